@0xb6a8d1c5e04f3b92;
# The protocol between the daemon and a worker's init, over the worker's private socket. Not public.
# An upgraded daemon adopts the workers of an earlier build, so the protocol changes by additions
# only; an incompatible change comes with a migration of the catalog that ends those workers.
# JSON texts are frames of docs/engine-contract.md: init checks their size and decodes only the
# fields that it acts on; the daemon decodes values.

interface Worker {
  # Bootstrap of the private socket. Only `challenge` and `attach` are answered before `attach`
  # succeeds.

  challenge @0 (nonce :Data) -> (proof :Data, counterNonce :Data, identity :Identity);
  # `nonce`: 32 random bytes. `proof`: BLAKE3 keyed with the worker's secret over "worker", nonce,
  # counterNonce and the identity's fields, each length-prefixed; the daemon verifies it. `attach`
  # answers the worker's own `counterNonce`, once.

  attach @1 (proof :Data, supervisor :Supervisor) -> (report :Report);
  # `proof`: BLAKE3 keyed with the secret over "daemon", counterNonce and nonce. A later attach
  # replaces an earlier one. Output and ends that the previous daemon did not acknowledge are sent
  # to the new one again, from their beginning.

  start @2 (exec :Exec) -> (ended :Bool, end :End, output :List(Chunk));
  # Has no queue: the daemon starts one execution at a time (`Busy` otherwise). An `execId` that the
  # worker already knows (running, or ended and not acknowledged) is not started again. An execution
  # that ends at once with little output is answered completely: `ended`, its end and all of its
  # output. Otherwise the answer says that it runs, and output and end follow as `Supervisor.output`
  # and `Supervisor.ended`.
  stdin @3 (execId :UInt64, data :Data, end :Bool) -> ();
  # Returns when the engine side has taken the bytes.
  interrupt @4 (execId :UInt64) -> ();
  acknowledge @5 (execId :UInt64) -> ();
  # The end is in the journal; init may forget it.

  request @6 (json :Data) -> (json :Data);
  # get, set, vars, tools, complete, check, save: one request frame without `id` (init adds it), one
  # `reply` frame. Between executions only; `Busy` while one runs.
  dynamicTools @7 (json :Data) -> ();
  # A `dynamic_tools` frame.

  loadBegin @8 () -> ();
  loadEntry @9 (key :Text, metaJson :Data, data :Data, more :Bool) -> stream;
  loadEnd @10 () -> (missedJson :Data);
  # Replaces the engine's whole state, in engine.db (one transaction) and in the engine. If the
  # engine fails midway the worker ends, and engine.db keeps the previous state.

  bind @11 (path :Text, source :Text, writable :Bool, token :UInt64) -> ();
  # `token` not 0: the source is the detached mount whose descriptor was passed under that number on
  # the descriptor socket.
  unbind @12 (path :Text) -> ();
  usage @13 () -> (memoryBytes :UInt64, pids :UInt32, cpuUs :UInt64, workspaceBytes :UInt64);
  stop @14 (graceMs :UInt64) -> ();
  # Saves, ends the engine, exits. Answered once the state is saved.

  stateHeads @15 () -> (heads :List(StateHead), underWay :UInt64, before :StateBefore);
  # The present entries of engine.db, by key. The daemon cannot open the database while the worker
  # lives. `underWay`: the running execution, 0: none; `before`: whether they are the state before it.
  stateEntry @16 (key :Text, offset :UInt64) -> (metaJson :Data, size :UInt64, data :Data);
  # At most 1 MiB of an entry's body from `offset`.

  freeze @17 (atWork :Bool = false) -> ();
  # Stops every process inside, between two executions or, with `atWork`, also during one. Nothing
  # writes to the workspace until `thaw` or until this daemon disconnects.
  thaw @18 () -> ();
  # `Conflict` if the processes resumed earlier because of a stop: data read meanwhile may be
  # inconsistent.

  execChannel @19 (token :UInt64) -> ();
  # The descriptor passed under that number on the descriptor socket is a sequenced-packet socket.
  # From now on it carries `ExecChannelCall`s and their `ExecChannelAnswer`s, one message per
  # packet. It belongs to this attachment and ends with it.

  keep @20 (checkpoint :Text, spare :Text, transient :Bool) -> (whyNot :Text);
  # The engine forks a snapshot of itself in memory, under that checkpoint's id. The answer is empty
  # if the snapshot exists, else the reason. The oldest snapshot beyond three, or of `transient`
  # ones beyond two, is evicted, but not that of `spare`.
  wake @21 (checkpoint :Text) -> (missedJson :Data);
  # Makes that snapshot the engine; every other process inside ends. `NotFound` with reason
  # `no_copy` if there is none; nothing has changed then. engine.db does not change: `revise`
  # updates it afterwards.
  revise @22 (key :Text, metaJson :Data, data :Data, more :Bool, gone :Bool, last :Bool) -> ();
  # One change of engine.db, to match the state that the engine already has: a chunk of an entry, as
  # in `loadEntry`, or a deleted entry (`gone`). The `last` change (its key may be empty) stores all
  # of them in one transaction.

  bindKernel @23 (json :Data) -> (report :Report);
  # Binds a warm worker to a kernel, once: its identity in `challenge` is then the kernel's. `json`:
  # a `KernelBinding` (src/link/binding.rs); the descriptors that it names were passed on the
  # descriptor socket. Answered when the engine has the kernel's state. Before this call the worker
  # accepts only `usage` and `execChannel`, refuses others with reason `unbound`, and ends when its
  # daemon disconnects.

  spawn @24 (process :Process, sink :ProcessSink) -> ();
  # Starts a program beside the engine. `stdin`, `interrupt` (ends the tree) and `signal` take its
  # number. It ends with this attachment. Returns when its sandbox is verified; whether the program
  # could run is in its end.
  signal @25 (execId :UInt64, signal :Int32) -> ();
  # Sends a signal to a process's program.
  endProcesses @26 () -> ();
  # Ends every process with its tree; returns when their ends were reported.

  suspend @27 (copied :Bool = false) -> ();
  # As `freeze`, but until `resume` or `stop`: the processes stay stopped without a daemon, too.
  # Idempotent. `copied`: only while the worker's machine is copied; no report says `suspended`.
  resume @28 () -> ();
  resize @29 (execId :UInt64, rows :UInt16, columns :UInt16) -> ();
  # Sets the size of a process's terminal.

  connect @30 (port :UInt16) -> (stream :PortStream);
  # Connects to a TCP port of the kernel's own loopback. `Unsupported` if the kernel has no network
  # namespace of its own; `NotFound` with reason `port_closed` if nothing listens.
}

interface PortStream {
  # As in ryokan.capnp.
  write @0 (data :Data) -> ();
  read @1 () -> (data :Data);
}

interface ProcessSink {
  # Receives the output and the end of one process.
  output @0 (offset :UInt64, stream :OutputStream, data :Data) -> stream;
  # As `Supervisor.output`.
  ended @1 (end :End) -> ();
}

interface Supervisor {
  # The daemon's side, passed to `attach`.

  output @0 (execId :UInt64, offset :UInt64, stream :OutputStream, data :Data) -> stream;
  # `offset` counts the bytes of both streams of this execution. Delayed while the daemon's readers
  # are slow.
  event @1 (execId :UInt64, json :Data, tail :Data) -> stream;
  # `display` and `structured` frames.
  ended @2 (execId :UInt64, end :End) -> ();
  toolCall @3 (execId :UInt64, json :Data) -> (ok :Bool, valueJson :Data, text :Text);
  # `json`: the `tool_call` frame. `text`: of a result, or the error.
  jobs @4 (json :Data) -> ();
  missed @5 (json :Data) -> ();
  background @6 (stream :OutputStream, data :Data) -> ();
  # Output of jobs while no execution ran, bounded.
  dying @7 (causeJson :Data) -> ();     # a `core::kernel::CrashCause`
  # The engine is gone, or a limit was exceeded; the worker's exit follows.
}

enum OutputStream { stdout @0; stderr @1; }

enum StateBefore {
  unknown @0;                 # a worker of an earlier build
  saved @1;                   # engine.db has the state before the running execution
  unsaved @2;                 # changes of an earlier execution could not be stored
  background @3;              # background work of the engine may have changed it since
}

struct Identity {
  workerId @0 :Text;
  kernelId @1 :Text;
  epoch @2 :UInt64;
  build @3 :Text;
}

struct Exec {
  execId @0 :UInt64;
  requestJson @1 :Data;       # an `exec` or `call` frame without `id`
  stdin @2 :Data;
  stdinOpen @3 :Bool;
  hasStdin @4 :Bool;
  timeoutMs @5 :UInt64;       # 0: none
  outputKeptBytes @6 :UInt64; # output that init keeps for a reconnecting daemon
  acknowledged @7 :List(UInt64); # earlier executions, as in `acknowledge`
}

struct Process {
  execId @0 :UInt64;
  argv @1 :List(Text);
  env @2 :List(Text);         # NAME=VALUE, beside the variables of every engine
  cwd @3 :Text;
  hasStdin @4 :Bool;          # input arrives through `stdin`; otherwise it is empty
  timeoutMs @5 :UInt64;       # 0: none
  rows @6 :UInt16;            # with `columns`: size of its terminal; both 0: it has none
  columns @7 :UInt16;
}

struct ExecChannelCall {
  # Starts an execution without input, beside the calls of `Worker`: the most frequent request at
  # the lowest cost.
  union {
    start @0 :Exec;           # as `Worker.start`
    prepare @1 :Exec;        # as `start`, but init waits for `commit`; replaces an earlier prepared execution
    commit @2 :UInt64;        # begin the prepared execution with this number: its start is in the journal
    abort @3 :UInt64;         # drop the prepared execution; no answer
  }
}

struct ExecChannelAnswer {
  # The answer of `Worker.start`.
  execId @0 :UInt64;
  union {
    runs @1 :Void;            # output and end follow as `Supervisor.output` and `Supervisor.ended`
    over :group { end @2 :End; output @3 :List(Chunk); }
    refused @4 :Text;         # the text of a failed call
  }
}

struct Chunk { stream @0 :OutputStream; data @1 :Data; }

struct End {
  status @0 :Text;            # core::exec::ExecStatus by name
  code @1 :Int32;
  err @2 :Text;
  frameJson @3 :Data;         # the engine's `end` frame with `value` and `output`; empty: the engine sent none
  durationUs @4 :UInt64;
  outputBytes @5 :UInt64;     # total
  last @6 :Bool;              # the engine has ended too: this worker accepts no more work
}

struct Report {
  engine @0 :Text;
  engineVersion @1 :Text;
  sandbox @2 :List(Text);     # layers in force, one line each
  executions @3 :List(Known); # running, or ended and not acknowledged
  jobsJson @4 :Data;          # the last `jobs` frame; empty: none
  missedJson @5 :Data;        # the last `missed` frame; empty: none
  restoredEntries @6 :UInt32;
  mounts @8 :List(Text);      # mount points inside of the kernel's host mounts
  suspended @9 :Bool;         # paused by `suspend`
  notRestoredJson @7 :Data;   # a list as in `missed`: state entries of engine.db that the engine could not rebuild
}

struct StateHead {
  key @0 :Text;
  metaJson @1 :Data;
  digest @2 :Data;            # BLAKE3 of the body
  size @3 :UInt64;
  execId @4 :UInt64;          # the execution that changed it last; 0: none
}

struct Known { execId @0 :UInt64; running @1 :Bool; }
