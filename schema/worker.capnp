@0xb6a8d1c5e04f3b92;
# Between the daemon and a worker's init, over the worker's private socket. Not public, but a daemon that was upgraded adopts the
# workers of the former build: it changes by additions only. JSON texts are frames of docs/engine-contract.md: init checks their size and reads of them only what it
# acts on; the daemon decodes values.

interface Worker {
  # Bootstrap of the private socket. Nothing but `challenge` and `attach` answers before `attach` succeeded.

  challenge @0 (nonce :Data) -> (proof :Data, counterNonce :Data, identity :Identity);
  # `nonce`: 32 random bytes. `proof`: BLAKE3 keyed with the worker's secret over "worker", nonce, counterNonce and the identity's
  # fields, each with its length before it; the daemon checks it. The worker's own `counterNonce` is answered in `attach`, once.

  attach @1 (proof :Data, supervisor :Supervisor) -> (report :Report);
  # `proof`: BLAKE3 keyed with the secret over "daemon", counterNonce and nonce. A later attach replaces an earlier one. Output and ends that the
  # former daemon did not acknowledge are sent again, from their beginning, to the new one.

  start @2 (exec :Exec) -> (ended :Bool, end :End, output :List(Chunk));
  # Queues nothing: the daemon starts one at a time (`Busy` otherwise). An `execId` that the worker knows already (running, or ended and
  # not acknowledged) is not started again. What ends within a moment and wrote little is answered whole: `ended`, its end and all of its
  # output. Otherwise the answer says that it runs, and output and end come as `Supervisor.output` and `Supervisor.ended`.
  stdin @3 (execId :UInt64, data :Data, end :Bool) -> ();
  # Returns when the engine side took it.
  interrupt @4 (execId :UInt64) -> ();
  acknowledge @5 (execId :UInt64) -> ();
  # The end is in the journal: forget it.

  request @6 (json :Data) -> (json :Data);
  # get, set, vars, tools, complete, check, save: one request frame without `id` (init puts it in), one `reply` frame. Between
  # executions only; `Busy` while one runs.
  dynamicTools @7 (json :Data) -> ();
  # A `dynamic_tools` frame.

  loadBegin @8 () -> ();
  loadEntry @9 (key :Text, metaJson :Data, data :Data, more :Bool) -> stream;
  loadEnd @10 () -> (missedJson :Data);
  # Replaces the engine's whole state, in engine.db (one transaction) and in the engine. A worker whose engine fails half-way
  # ends; engine.db then still holds the former state.

  bind @11 (path :Text, source :Text, writable :Bool, token :UInt64) -> ();
  # `token` not 0: the source is the detached mount whose descriptor came with that number over the descriptor socket.
  unbind @12 (path :Text) -> ();
  usage @13 () -> (memoryBytes :UInt64, pids :UInt32, cpuUs :UInt64, workspaceBytes :UInt64);
  stop @14 (graceMs :UInt64) -> ();
  # Saves, ends the engine, exits. The answer comes when the state is saved.

  stateHeads @15 () -> (heads :List(StateHead));
  # What engine.db holds now, by key: the daemon cannot open it while the worker lives.
  stateEntry @16 (key :Text, offset :UInt64) -> (metaJson :Data, size :UInt64, data :Data);
  # At most 1 MiB of an entry's body from `offset`.

  freeze @17 (atWork :Bool = false) -> ();
  # Stops every process inside between two executions, or (`atWork`) whatever goes on: nothing writes to the workspace until `thaw`, or
  # until this daemon is gone.
  thaw @18 () -> ();
  # `Conflict` if they went on before, for a stop: what was read meanwhile may be of two moments.

  execChannel @19 (token :UInt64) -> ();
  # The descriptor that came under that number over the descriptor socket is a sequenced-packet socket: from now on `ExecChannelCall`s may
  # come there, one message a packet, and are answered there by `ExecChannelAnswer`s. It is this attachment's and ends with it.

  keep @20 (checkpoint :Text, spare :Text) -> (whyNot :Text);
  # Has the engine keep a copy of itself in memory, under that checkpoint's id; empty answer: it stands. The oldest copy beyond
  # three goes, but not that of `spare`.
  wake @21 (checkpoint :Text) -> (missedJson :Data);
  # Makes that copy the engine: everything else inside ends. `NotFound` with reason `no_copy` says why there is none; nothing
  # was touched then. engine.db is not: `revise` brings it after.
  revise @22 (key :Text, metaJson :Data, data :Data, more :Bool, gone :Bool, last :Bool) -> ();
  # One change of engine.db that makes it what the engine has already: a chunk of an entry, as in `loadEntry`, or one that is `gone`.
  # The `last` one (its key may be empty) stores them all in one transaction.

  bindKernel @23 (json :Data) -> (report :Report);
  # To a slot, once: from now on it is that kernel's worker, and its identity in `challenge` is the kernel's. `json`: a `KernelBinding`
  # (src/worker/binding.rs); the descriptors that it names came over the descriptor socket. Answers when the engine has the kernel's state.
  # Until then a slot takes nothing else, and ends when its daemon goes.
}

interface Supervisor {
  # The daemon's side, given to `attach`.

  output @0 (execId :UInt64, offset :UInt64, stream :OutputStream, data :Data) -> stream;
  # `offset` counts both streams' bytes of this execution. Held back while the daemon's readers are slow.
  event @1 (execId :UInt64, json :Data, tail :Data) -> stream;
  # `display` and `structured` frames.
  ended @2 (execId :UInt64, end :End) -> ();
  toolCall @3 (execId :UInt64, json :Data) -> (ok :Bool, valueJson :Data, text :Text);
  # `json`: the `tool_call` frame. `text`: of a result, or what went wrong.
  jobs @4 (json :Data) -> ();
  missed @5 (json :Data) -> ();
  background @6 (stream :OutputStream, data :Data) -> ();
  # What jobs wrote while no execution ran, bounded.
  dying @7 (causeJson :Data) -> ();     # a `core::kernel::CrashCause`
  # The engine is gone, or a limit was broken; the worker's exit follows.
}

enum OutputStream { stdout @0; stderr @1; }

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
  outputKeptBytes @6 :UInt64; # how much output init keeps for a daemon that comes back
  acknowledged @7 :List(UInt64); # earlier executions, as by `acknowledge`
}

struct ExecChannelCall {
  # The start of an execution without input, beside the calls of `Worker`: what is asked most often at the least cost.
  union {
    start @0 :Exec;           # as `Worker.start`
    prepare @1 :Exec;        # as `start`, but init waits for `commit`; replaces an earlier prepared execution
    commit @2 :UInt64;        # begin the prepared execution of this number: its start is in the journal
    abort @3 :UInt64;         # drop the prepared execution; no answer
  }
}

struct ExecChannelAnswer {
  # What `Worker.start` would answer.
  execId @0 :UInt64;
  union {
    runs @1 :Void;            # output and end come as `Supervisor.output` and `Supervisor.ended`
    over :group { end @2 :End; output @3 :List(Chunk); }
    refused @4 :Text;         # as the text of a failed call
  }
}

struct Chunk { stream @0 :OutputStream; data @1 :Data; }

struct End {
  status @0 :Text;            # core::exec::ExecStatus by name
  code @1 :Int32;
  err @2 :Text;
  frameJson @3 :Data;         # the engine's `end` frame with `value` and `output`; empty: the engine gave none
  durationUs @4 :UInt64;
  outputBytes @5 :UInt64;     # written in all
  last @6 :Bool;              # the engine is gone with it: this worker takes no more work
}

struct Report {
  engine @0 :Text;
  engineVersion @1 :Text;
  sandbox @2 :List(Text);     # layers in force, one line each
  executions @3 :List(Known); # running, or ended and not acknowledged
  jobsJson @4 :Data;          # the last `jobs` frame; empty: there was none
  missedJson @5 :Data;        # the last `missed` frame; empty: there was none
  restoredEntries @6 :UInt32;
  mounts @8 :List(Text);      # paths inside at which something of the host's is mounted that the kernel was given
  notRestoredJson @7 :Data;   # a list as in `missed`: state entries of engine.db that the engine could not build again
}

struct StateHead {
  key @0 :Text;
  metaJson @1 :Data;
  digest @2 :Data;            # BLAKE3 of the body
  size @3 :UInt64;
  execId @4 :UInt64;          # which execution changed it last; 0: none
}

struct Known { execId @0 :UInt64; running @1 :Bool; }
