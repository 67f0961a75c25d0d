@0xd3a1f0c92b7e4a56;
# The public interface of ryokan, and the only contract between `ryokand` and its clients.
#
# The bootstrap of `$XDG_RUNTIME_DIR/ryokan/ryokand.sock` is `Host`; the bootstrap of
# `kernels/<name>.sock` is that `Kernel`.
# Holding a capability is the permission: calls carry no tokens and no users.
#
# - Call `Host.hello` first; `Host` refuses every other call before it.
# - Ordinals are permanent. A parameter or field added later has a default that preserves the
#   previous behaviour.
# - A failure is an exception whose text holds one line
#   `ryokan:{"code":…,"message":…,"hint":…,"reason":…}` (struct `Error`).
# - Times are milliseconds since 1970-01-01 UTC unless the name says otherwise. Hashes are BLAKE3,
#   64 hexadecimal digits.
# - A message is at most 64 MiB. Chunks of streams are at most 1 MiB.
# - `expectedVersion`: the kernel's `KernelInfo.version` known to the caller; 0 means any. A
#   different version fails with `conflict`.

# This revision of the interface. `hello` refuses 0 and revisions older than the daemon supports.
const wireVersion :UInt32 = 1;

interface Host {
  hello @0 (wireVersion :UInt32, client :Text) -> (wireVersion :UInt32, host :HostInfo);
  # `client` is a name for the journal and the audit log, such as "my-agent 1.2".

  createKernel @1 (spec :KernelSpec, key :Text) -> (kernel :Kernel, info :KernelInfo);
  # Idempotent: the same `key` within 24 hours returns the same kernel. Without a key, a taken name
  # fails with `alreadyExists`. Starts no worker; the first use does. Pipelines:
  # `createKernel().kernel.run(…)` is one round trip.

  openKernel @2 (name :Text) -> (kernel :Kernel, info :KernelInfo);
  # By name or id.

  listKernels @3 (filter :KernelFilter, sink :KernelInfoSink) -> ();
  # Streams in order of name; returns when all were sent.

  removeKernel @4 (name :Text, expectedVersion :UInt64 = 0, withThreads :Bool = false) -> ();
  # Ends the kernel's worker and deletes its files, journal and sockets. The host's files behind
  # mounts are untouched. `conflict` with reason `threads` if the kernel has threads and
  # `withThreads` is false.

  events @5 (since :UInt64, sink :EventSink) -> (subscription :Subscription);
  # Events after sequence number `since`, then live events until `subscription` is dropped. The log
  # is bounded: an event of kind `gap` replaces events that are no longer in it.

  abilities @6 () -> (abilities :List(Ability));
  # What this host can do.

  ping @7 () -> (hostId :Text, serverTimeMs :Int64);
  # Takes no locks and touches no disk.

  gc @8 (dryRun :Bool, sink :GcSink) -> (report :GcReport);
  # Removes the checkpoints that retention expires, then every unreferenced object. Runs
  # concurrently with executions. `sink` receives each removed checkpoint. With `dryRun`, which
  # changes nothing, it receives each checkpoint and object with the reason why it stays or is
  # removed. In a system-wide daemon only the daemon's own user may call it.
  verify @9 (sink :VerifySink) -> (report :VerifyReport);
  # Reads everything: databases, audit log, packs, and the objects that rows and checkpoints
  # reference. `sink` receives the damage and what is unavailable because of it. In a system-wide
  # daemon only the daemon's own user may call it.
  audit @10 (kernel :Text, since :UInt64, limit :UInt32, sink :AuditSink) -> ();
  # Lines of the audit log after number `since`, oldest first; `limit` 0: all. `kernel` by name or
  # id, including removed kernels (by id, or by its first ten digits or more); empty: all lines
  # visible to the caller.
  verifyAudit @11 (known :Text) -> (head :Text, brokenAt :UInt64, why :Text, gap :Bool);
  # Verifies the log's hash chain. `known`: an earlier end of it, `LINE:HASH`, that the caller kept;
  # may be empty. `head` is the current end; `brokenAt` is the first line that does not fit, or
  # that records lost lines (action `audit.gap`; then `gap` is set: no line was changed); 0: none.
  # In a system-wide daemon only the daemon's own user may call it.
  importKernel @12 (name :Text, withoutHost :Bool = false) -> (file :BundleWriter);
  # Creates a kernel from a file that `Kernel.export` wrote, on any host. `name` empty: the name in
  # the file. The kernel has no resources of the host (`HostResource`) unless `BundleWriter.finish`
  # grants them. `withoutHost`: `finish` refuses to grant any. A file of `Groups.export` becomes a
  # group with its kernels (`BundleWriter.finishGroup`); `name` is that of the group then.
  pools @13 () -> (pools :List(PoolInfo));
  # The pools of warm workers. In a system-wide daemon its own user sees all pools, other users
  # their own.

  teleport @14 (kernel :Text, to :Text, allowMissing :Bool, sink :TeleportSink, kind :Text, limitRate :UInt64,
      isolation :Text, since :Text, key :Text, expectedVersion :UInt64 = 0, missing :List(Text), places :List(Pair))
      -> (report :TeleportReport);
  # Moves a kernel to another host; returns when the kernel lives there. `to` is
  # `ssh://[USER@]HOST[:PORT][/SOCKET]` (the path of the other daemon's socket), or `exec:COMMAND`: a shell command whose standard streams are
  # connected to the other daemon. The daemon runs ssh or the command, so only its own user may name
  # one. Before the commit, a failure or the loss of this call
  # leaves the kernel here. `allowMissing`: the kernel moves without its host paths, network, MCP
  # servers and processes; otherwise `refused` names them. `missing`: the same for these only:
  # `paths`, `venv`, `network`, `layers`, `mounts`, `mcp`, `processes`. `kind`: `auto` (or empty), `checkpoint`,
  # `teleport`; `unsupported` with reason `snapshot_kind` names the rule of an impossible one.
  # `limitRate`: bytes a second while the kernel runs, 0: no limit. What changed meanwhile is sent at
  # full speed, because the kernel is paused then. `isolation`: that of the kernel on the other host;
  # empty: as here. `since`: a checkpoint; older ones stay behind, except pinned ones, those with
  # a summary or of a freeze, and the one that undo goes back to. They end with the record of the
  # departed kernel. A branch from one of them begins anew. Empty: all move.
  # `unsupported` (`partial_history`) if the other host's release takes only all of them.
  # Idempotent: the same `key` within 24 hours returns the report of the first move, also after the
  # kernel came back; a move that failed is tried again.
  # Of a group, its kernels move as one, and its repositories, databases and directories come to be at
  # `places`, by member, on the other host, as a copy: here they stay. Any other member is
  # `unsupported` with reason `group_member`. Neither `since` nor `key`.
  abortTeleport @15 (kernel :Text) -> ();
  # Ends a move before its commit; `conflict` after it.
  handovers @16 () -> (handovers :List(Handover));
  # Moves in progress, unacknowledged moves, and received kernels.
  resolveHandover @17 (id :Text, live :Bool) -> ();
  # Decides about a prepared kernel in place of its source: `live` activates it, else it is deleted.
  # Only for a source that is gone for good: if it still runs the kernel, there are two live copies.
  handoverStream @18 () -> (stream :HandoverStream);
  # The receiving end of the handover protocol. `ryokan pipe` connects its standard streams to it.
  groups @19 () -> (groups :Groups);
  # Kernels, repositories and databases that are frozen and restored as one.

  renameKernel @20 (name :Text, to :Text, expectedVersion :UInt64 = 0) -> (version :UInt64);
  # Its id, history and open capabilities stay; its earlier events get the new name. Its own socket
  # moves to the new name; published ones stay. `alreadyExists` if a kernel, a group or a published
  # socket has the name.
  diskUsage @21 (kernel :Text) -> (usage :DiskUsage);
  # What takes room on the disk: of one kernel, with each of its checkpoints, or (empty) of all
  # kernels of the caller. Other users of a system-wide daemon see their own kernels only, and what
  # these share among each other. `busy` while another call runs.
  provenance @22 () -> (provenance :Provenance);
  # Keys, and signatures over what hosts sealed.
  images @23 () -> (images :Images);
  # What virtual machines boot. In a system-wide daemon only the daemon's own user may call it.

  updateKernel @24 (name :Text, change :KernelUpdate, expectedVersion :UInt64 = 0)
      -> (version :UInt64, atNextStart :List(Text));
  # Changes a kernel's specification. A live worker gets added and removed paths at once; `atNextStart`
  # names what it does not have until the next start (also in `KernelInfo.atNextStart`). Checkpoints
  # keep the specification with which they were taken, and neither `restoreCheckpoint` nor `fork`
  # brings it back. `conflict` with reason `saved_memory` for a virtual machine whose memory is saved.
  forkKernel @25 (name :Text, request :ForkRequest) -> ForkResult;
  # `Kernel.fork` of that kernel, also with a `change`.
}

struct KernelUpdate {
  # Unset fields change nothing. The checks are those of `createKernel`.
  net @0 :Text;               # "none" or "host"
  memoryBytes @1 :UInt64;
  cpuMilli @2 :UInt32;
  pids @3 :UInt32;
  openFiles @4 :UInt32;
  workspaceBytes @5 :UInt64;
  idleTimeoutMs @6 :UInt64;   # the largest value: never
  paths @7 :List(MountInfo);  # added, or given a new `writable`; `source` empty or equal to `path`
  removePaths @8 :List(Text);
  venv @9 :Text;              # as in `KernelSpec`; "none": the host's Python. From the next start
}

struct DiskUsage {
  kernels @0 :List(KernelDisk);
  host @1 :List(DiskPart);    # of the data folder; add up to it. Empty for a single kernel
  store @2 :List(DiskPart);   # what `objects` in `host` are kept for; add up to them. Empty for a single kernel
}
struct DiskPart {
  what @0 :Text;
  bytes @1 :UInt64;           # on the disk
  why @2 :Text;               # what it is for, and how to free it
}
struct KernelDisk {
  id @0 :Text;
  name @1 :Text;
  parts @2 :List(DiskPart);   # of the kernel's folder; add up to it
  checkpoints @3 :UInt32;
  storedBytes @4 :UInt64;     # of the store's objects that checkpoints, blobs and kept output need
  freedBytes @5 :UInt64;      # of these, what only this kernel needs: freed with it, by the next `gc`
  each @6 :List(CheckpointDisk); # newest first; only in the answer for one kernel
  incomplete @7 :Text;        # why files or objects are missing in the figures; empty: none is
  kept @8 :List(DiskPart);    # what it needs `storedBytes` for; add up to them. An object counts once
}
struct CheckpointDisk {
  id @0 :Text;
  name @1 :Text;
  storedBytes @2 :UInt64;
  freedBytes @3 :UInt64;      # of these, what no other checkpoint, kernel or record needs
  machineBytes @4 :UInt64;    # of a virtual machine's memory, state and disk; 0: of kind `checkpoint`
  why @5 :Text;               # why it is kept
}

interface Kernel {
  # A method that needs a worker starts it if the kernel has none.

  execute @0 (code :Text) -> (execId :UInt64);
  # Returns once the execution is in the journal and queued. Its result: `execution(execId)`.

  executeStreaming @1 (code :Text, callback :OutputCallback) -> (execId :UInt64);
  # As `execute`; `callback` also receives all of its output. A slow callback slows the code.

  interrupt @2 (execId :UInt64) -> (ended :Text);
  # A queued execution ends without having run. `notFound` if the number is unknown; no effect if it
  # has ended: then `ended` is its status, otherwise empty.

  getVar @3 (name :Text) -> (value :Value);
  setVar @4 (name :Text, value :Value, expectedVersion :UInt64 = 0) -> ();
  listVars @5 () -> (names :List(Text));

  mount @6 (path :Text, source :Text, writable :Bool, expectedVersion :UInt64 = 0) -> ();
  # Makes the host's directory or file `source` visible inside at `path`, at once and after every
  # restart.
  unmount @7 (path :Text, expectedVersion :UInt64 = 0) -> ();
  listMounts @8 () -> (mounts :List(MountInfo));

  listTools @9 () -> (tools :List(ToolInfo));
  callTool @10 (name :Text, args :Value) -> (result :ExecResult);
  # `args` is an object (named arguments) or an array (positional). Runs and is journalled as an
  # execution.

  registerMcp @11 (name :Text, transport :McpTransport, expectedVersion :UInt64 = 0) -> ();
  # Only servers in the configuration's allow-list; `refused` otherwise. They run outside the sandbox.
  listMcpServers @12 () -> (servers :List(McpInfo));

  snapshot @13 () -> (data :Data, missed :List(MissedEntry));
  # Engine state alone, opaque and versioned, at most 32 MiB. `missed` lists values that it does not
  # hold.
  restore @14 (data :Data, expectedVersion :UInt64 = 0) -> (missed :List(MissedEntry));
  # All or nothing; `missed` lists captured values that could not be rebuilt.

  readBlob @15 (hash :Text) -> (data :Data);
  # At most 32 MiB; larger: `openBlob`. Only blobs that this kernel wrote or was granted.
  writeBlob @16 (data :Data) -> (hash :Text);

  info @17 () -> (info :KernelInfo);

  run @18 (request :ExecRequest) -> (execution :Execution, execId :UInt64);
  # The full form of `execute`.
  execution @19 (execId :UInt64) -> (execution :Execution);
  # Also after a reconnect, and for executions that ended long ago.

  attenuate @20 (rights :List(Right), label :Text) -> (kernel :Kernel);
  # The same kernel with at most these rights; `label` names the holder in the journal.
  publish @21 (rights :List(Right), name :Text) -> (path :Text);
  # The same, as a Unix socket in `kernels/` for another program of this user; lives until
  # `unpublish` or removal.
  unpublish @22 (name :Text) -> ();

  openBlob @23 (hash :Text) -> (blob :BlobReader);
  newBlob @24 () -> (blob :BlobWriter);
  grantBlob @25 (hash :Text, to :Kernel) -> ();
  # Lets another kernel read a blob that this one can read.

  start @26 (withoutMemory :Bool = false) -> ();
  # Starts the worker now. Also closes an open circuit breaker. Memory of a virtual machine that is
  # kept for the next start is not discarded if it cannot continue now, except if it is damaged: the
  # start fails. `withoutMemory` discards it and starts from the saved state; `conflict` with reason
  # `worker` if the kernel has a worker.
  stop @27 (force :Bool = false) -> ();
  # Ends the worker and keeps the state. Waits for the running execution unless `force` interrupts
  # it.
  remove @28 (expectedVersion :UInt64 = 0, withThreads :Bool = false) -> ();

  journal @29 (since :UInt64, limit :UInt32, sink :JournalSink, compacted :Bool = false, checkpoint :Text) -> ();
  # Entries after sequence number `since`, oldest first; `limit` 0: all. With `compacted`, an entry
  # of kind `checkpoint` with the checkpoint's summary replaces the messages that the checkpoint
  # compacted, in the place of the last of them. With `checkpoint` (a `ref`), only the messages that
  # this checkpoint compacted.
  message @30 (role :Text, text :Text, key :Text, expectedVersion :UInt64 = 0) -> (sequence :UInt64);
  # Appends a message of an agent or a person. Idempotent: the same `key` within 24 hours returns
  # the same entry.
  events @31 (since :UInt64, sink :EventSink) -> (subscription :Subscription);
  # As `Host.events`, for this kernel only.

  lease @32 (holder :Text, ttlMs :UInt64, token :Data) -> (lease :Lease, token :Data, expiresAtMs :Int64);
  # While the lease lasts, only its holder may change this kernel or execute in it; other callers
  # get `busy` with reason `lease`. An empty `token` takes a new lease; the token of a lease resumes
  # it, also after a restart of the daemon.

  describeVars @33 () -> (vars :List(VarInfo));
  missed @34 () -> (missed :List(MissedEntry));
  # Values that the kernel holds now and its saved state does not.
  complete @35 (code :Text, cursor :UInt32) -> (start :UInt32, matches :List(Text));
  # Completions for the byte offset `cursor`; they replace the text from `start` to `cursor`.
  check @36 (code :Text) -> (status :CodeStatus, indent :Text);
  # Whether `code` is a complete program; for interactive front ends.
  unregisterMcp @37 (name :Text, expectedVersion :UInt64 = 0) -> ();
  jobs @38 () -> (jobs :List(Job));
  # Background jobs that are running.
  runToEnd @39 (request :ExecRequest) -> (result :ExecResult);
  # `run` and `Execution.result` in one call: the cheapest way to run short code. Dropping the call
  # does not stop the execution; its `key` or the journal finds it again.

  checkpoint @40 (request :CheckpointRequest) -> (checkpoint :Checkpoint);
  # Waits for the running execution, then captures engine state, workspace, mounts and MCP servers.
  # `deadline` if the kernel did not quiesce in time; nothing was done then.
  checkpoints @41 (limit :UInt32, sink :CheckpointSink) -> ();
  # Newest first; `limit` 0: all.
  findCheckpoint @42 (ref :Text, undo :Bool = false) -> (checkpoint :Checkpoint);
  # `ref`: the beginning of an id, a name, `~N` (N before the newest) or `latest`. `conflict` with
  # the candidates if it is ambiguous. With `undo` instead the checkpoint to which `undo` returns;
  # `notFound` if nothing was restored.
  restoreCheckpoint @43 (ref :Text, expectedVersion :UInt64 = 0, supersedeDecisions :Bool = false, withArtifacts :Bool = false,
      kind :Text = "") -> (restoration :Restoration);
  # All or nothing, after a checkpoint of type `system` to which `undo` returns. Steps and the
  # current agent are restored too. Journal, messages and audit log never change. Only on request
  # are later decisions marked superseded, and artifacts given their old content as new versions.
  # `kind`: `teleport` continues the memory of the checkpoint's virtual machine, and is refused with
  # the rule where this host cannot; `checkpoint` restores engine state and workspace only; `auto`
  # does the first where possible, and says why not; empty: the checkpoint's own kind.
  undo @44 (expectedVersion :UInt64 = 0) -> (restoration :Restoration);
  # Returns to the state before the kernel's last restore; `notFound` if nothing was restored.
  pinCheckpoint @45 (ref :Text, pinned :Bool) -> ();
  diff @46 (from :Text, to :Text, sink :DifferenceSink, other :Kernel) -> ();
  # Differences from checkpoint `from` to checkpoint `to` (empty: the present state), area by area.
  # Added, removed and renamed files follow changed ones. Files that differ only in time are
  # omitted. With `other`, a kernel of the same connection with the right `read`, `to` is a checkpoint
  # or the present state of that kernel, and an empty `from` the present state of this one.

  fork @47 (request :ForkRequest) -> ForkResult;
  # Creates kernels that start from this kernel's present state or from a checkpoint: engine state,
  # workspace, mounts, MCP servers, limits. All of them start from one safe point. Each child has its
  # own result: it exists completely or not at all. A child's capability has the rights of this one.
  thread @48 (name :Text, engine :Text = "", key :Text = "") -> (kernel :Kernel, info :KernelInfo);
  # Creates a kernel with its own engine (empty: this kernel's) and its own state, in this kernel's
  # workspace and with its mounts. This kernel cannot be removed before its threads, only with them.
  # Idempotent: the same `key` within 24 hours returns the same thread.

  removeCheckpoint @49 (ref :Text, expectedVersion :UInt64 = 0) -> (checkpoint :Checkpoint);
  # Permanent. `conflict` for the kernel's current checkpoint and for those that `undo` or a pending
  # restore needs. The removed checkpoint's children get its parent.
  setRetention @50 (retention :Retention, expectedVersion :UInt64 = 0) -> (gone :UInt64);
  # How long checkpoints are kept that are neither `manual` nor pinned; a bound of 0 does not
  # change. `gone`: number of checkpoints removed at once.
  export @51 (refs :List(Text)) -> (file :BundleReader);
  # This kernel and the given checkpoints as one file; without `refs`: all of them, a new one of the
  # present state, and the journal. Needs the right `teleport`.

  workflow @52 () -> (workflow :Workflow);
  # Steps and the current agent.
  beginStep @53 (name :Text, expectedVersion :UInt64 = 0) -> (step :Step);
  # `conflict` with reason `step_open` while another step is open.
  completeStep @54 (expectedVersion :UInt64 = 0) -> (step :Step, checkpoint :Checkpoint);
  # With a checkpoint of type `auto`: both or neither. Waits for the running execution, as
  # `checkpoint` does.
  handOver @55 (agent :Text, note :Text, expectedVersion :UInt64 = 0) -> (checkpoint :Checkpoint);
  # `agent` is the current agent from now on. With a checkpoint of type `auto`: both or neither.

  openDecision @56 (title :Text, text :Text, key :Text, expectedVersion :UInt64 = 0) -> (decision :Decision);
  # Idempotent: the same `key` within 24 hours returns the same decision.
  lockDecision @57 (id :UInt64, expectedVersion :UInt64 = 0) -> (decision :Decision, checkpoint :Checkpoint);
  # With a checkpoint of type `auto` just before: both or neither.
  supersedeDecision @58 (id :UInt64, expectedVersion :UInt64 = 0) -> (decision :Decision);
  decisions @59 (sink :DecisionSink) -> ();
  # Oldest first.

  putArtifact @60 (name :Text, source :ArtifactSource, contentType :Text, key :Text, expectedVersion :UInt64 = 0)
      -> (artifact :Artifact);
  # Adds a version unless the newest has the same content. Idempotent: the same `key` within 24
  # hours returns the same version.
  revertArtifact @61 (name :Text, version :UInt32, expectedVersion :UInt64 = 0) -> (artifact :Artifact);
  # Adds a version with the content of an earlier one.
  artifacts @62 (name :Text, sink :ArtifactSink) -> ();
  # The newest version of each artifact, by name; with `name`: every version of that artifact,
  # newest first.
  artifact @63 (name :Text, version :UInt32 = 0) -> (artifact :Artifact, blob :BlobReader);
  # `version` 0: the newest.

  diffText @64 (from :Text, to :Text, paths :List(Data), sink :PatchSink, other :Kernel) -> ();
  # Differences in files from checkpoint `from` to checkpoint `to` (empty: the present state), as
  # unified diffs. `paths` restricts them to these paths and everything beneath them; empty: all
  # files. `other` as in `diff`.

  archive @65 (expectedVersion :UInt64 = 0) -> (checkpoint :Checkpoint, version :UInt64);
  # Stops the kernel and keeps its files and engine state in `checkpoint` alone, until `unarchive`.
  # Journal, records and checkpoints stay readable, and the kernel can be forked and exported. Calls
  # that need a worker are refused with reason `archived`.
  unarchive @66 (expectedVersion :UInt64 = 0) -> (version :UInt64);

  files @67 (noWait :Bool = false) -> (files :Files);
  # The workspace's files, whether the kernel runs or not. Reads need the right `read`, changes the
  # right `write`. `noWait`: calls fail with `busy` during a transition (see `Files`).

  spawn @68 (request :ProcessRequest) -> (process :Process, execution :Execution, execId :UInt64);
  # Runs a program beside the engine, also during an execution, in the engine's sandbox and limits.
  # It has the number, the output and the result of an execution: `execution` and `interrupt` take
  # its number, and `cancel` and `interrupt` end its whole tree. The result's code is the program's
  # status, or 128 and the number of the signal that ended it; 126 or 127 with status `refused` if
  # the program cannot be run or was not found. What it leaves running stays in the kernel, without
  # output, until the worker ends.
  processes @69 () -> (processes :List(ProcessInfo));
  # The processes that run.
  signalProcess @70 (execId :UInt64, signal :Int32) -> ();
  # Sends a signal to a process's program, not to its tree.

  suspend @71 (interrupt :Bool = false, release :Bool = false, untilStart :Bool = false) -> ();
  # Waits for the running execution, unless `interrupt` interrupts it, saves the engine's state and
  # pauses every process of the kernel. Memory is kept until the host stops; afterwards the kernel is
  # as after `stop`. The next use resumes it. `conflict` if the kernel has no worker. `release`: a
  # virtual machine's memory is saved on the disk and its worker ends; the next use continues from
  # there, without processes beside the engine, or from the saved state if the memory is damaged; see
  # `start`. `unsupported` for processes. `untilStart`: if the daemon is stopped before the next use,
  # its next start starts the kernel, as it does with kernels that ran.
  resume @72 () -> ();
  # `conflict` if the kernel has no worker.
  resizeTerminal @73 (execId :UInt64, rows :UInt16, columns :UInt16) -> ();
  # Sets the size of a process's terminal; its foreground processes get SIGWINCH.

  openPort @74 (port :UInt16) -> (port :Port);
  # A TCP port of a kernel without network, for connections from outside; needs the right `execute`.
  # Audited. `conflict` with reason `no_worker` if the kernel has no worker, `unsupported` if it
  # uses the host's network.
}

interface Process {}
# Drop it to end the process with its tree, unless it is detached.

interface Port {
  # Belongs to the kernel's present worker.
  connect @0 () -> (stream :PortStream);
  # Connects to the port on 127.0.0.1 inside, else on ::1. `notFound` with reason `port_closed` if
  # nothing listens there, `busy` with reason `connections` beyond the limit of a kernel.
  closed @1 () -> ();
  # Returns when the worker has ended; the port stays closed then.
}
interface PortStream {
  # One connection. Drop it to close both directions. Each direction takes one call at a time.
  write @0 (data :Data) -> ();
  # At most 64 KiB; returns when the connection has taken them. Empty: the end of this direction.
  read @1 () -> (data :Data);
  # Waits for data; empty: the end of the other direction.
}

struct ProcessRequest {
  argv @0 :List(Text);        # a program without a slash is found in PATH
  cwd @1 :Text;               # relative to /workspace; empty: /workspace
  env @2 :List(Pair);         # beside the variables of every engine; the journal keeps the names only
  stdinOpen @3 :Bool;         # input arrives through Execution.stdin; otherwise it is empty
  timeoutMs @4 :UInt64;       # then the whole tree is killed; 0: none
  outputLimitBytes @5 :UInt64; # output kept in the journal; 0: the default
  detached @6 :Bool;          # it continues without this client, until it, its worker or its daemon ends
  expectedVersion @7 :UInt64;
  rows @8 :UInt16;            # with `columns`: the program gets a terminal of that size as its
  columns @9 :UInt16;         # streams, and its output is all stdout; both 0: none
}

struct ProcessInfo {
  execId @0 :UInt64;
  argv @1 :List(Text);
  startedAtMs @2 :Int64;
  detached @3 :Bool;
  terminal @4 :Bool;          # whether it runs on a terminal
}

interface Files {
  # A path is `/workspace`, a path below it, or relative to it, without `..`; everything else fails
  # with reason `outside`. Symbolic links are followed inside the workspace and never out of it; an
  # absolute link counts as leading out. The last name of a path is followed by `stat` (if asked),
  # `list` and `open`, and by nothing else.
  #
  # Reasons of errors: `not_found`, `is_directory`, `not_directory`, `not_regular`, `permission`,
  # `too_large`, `outside`, `exists`, `not_empty`, `mount` (the path is in a mount of the host).
  #
  # Calls wait for a restore, an archive, an unarchive, a move to another host or a freeze to end, and
  # changes also for a checkpoint; `deadline` after a minute in all. Lease, version and mounts count at
  # the end of the wait, and a call that is dropped before it changes nothing. With `noWait` they fail at once with
  # `busy` and the reason `restoring`, `archiving`, `unarchiving`, `teleporting`, `freezing` or
  # `checkpointing`. Either way, `conflict` if the kernel is being removed, or if a transition was
  # interrupted and awaits its recovery.
  stat @0 (path :Data, follow :Bool = true) -> (info :FileInfo);
  list @1 (path :Data, sink :FileInfoSink) -> ();
  # The entries of a directory, in no order.
  open @2 (path :Data) -> (file :FileReader, info :FileInfo);
  # A regular file.
  write @3 (path :Data, attributes :FileAttributes, parents :Bool = true, expectedVersion :UInt64 = 0) -> (file :FileWriter);
  # Creates or replaces a file. A replaced file's mode is kept unless `attributes` sets it.
  makeDir @4 (path :Data, mode :UInt32 = 493, parents :Bool = true, expectedVersion :UInt64 = 0) -> ();
  # An existing directory is no error.
  makeLink @5 (path :Data, target :Data, modified :FileAttributes, parents :Bool = true, expectedVersion :UInt64 = 0) -> ();
  # Creates a symbolic link, or replaces a link or file by it. `target` is not checked.
  rename @6 (from :Data, to :Data, replace :Bool = false, expectedVersion :UInt64 = 0) -> ();
  remove @7 (path :Data, recursive :Bool = false, expectedVersion :UInt64 = 0) -> ();
  setAttributes @8 (path :Data, attributes :FileAttributes, expectedVersion :UInt64 = 0) -> ();
  watch @9 (path :Data, recursive :Bool, sink :FileEventSink) -> ();
  # Reports what happens in a directory, and below it if `recursive`, until the call is dropped.
  # `ready` comes first: nothing is missed after it. An event may come twice. `ended` comes last: the
  # directory was removed or replaced, or has more in it than one call watches (reason `watch_size`
  # at the beginning), or the kernel's virtual machine starts or ends. `unsupported` with reason
  # `image_version` for a machine with an image of an earlier version; `busy` for too many watches.
}

interface FileEventSink { next @0 (event :FileEvent) -> stream; }

struct FileEvent {
  kind @0 :FileEventKind;
  path @1 :Data;              # relative to the watched directory; empty: that itself
}

enum FileEventKind {
  ready @0;
  created @1;                 # or moved here
  written @2;
  closed @3;                  # after it was open for writing
  changed @4;                 # mode, owner or times
  removed @5;                 # or moved away
  overflow @6;                # events are missing: list the directory again
  ended @7;                   # the last event: begin anew
}

interface FileReader {
  read @0 (from :UInt64, maxBytes :UInt32) -> (data :Data, end :Bool);
  # At most 1 MiB from byte `from`. The reader keeps the file that it opened, also if the path names
  # another one later.
}

interface FileWriter {
  write @0 (data :Data) -> stream;
  finish @1 () -> (info :FileInfo);
  # The file appears complete, with its attributes. Without `finish` nothing changes. After `busy` or
  # `deadline` it can be called again.
}

interface FileInfoSink { next @0 (info :FileInfo) -> stream; }

struct FileInfo {
  name @0 :Data;              # the last name of the path
  kind @1 :FileKind;
  bytes @2 :UInt64;
  mode @3 :UInt32;            # permission bits
  modifiedNs @4 :Int64;       # since 1970
  target @5 :Data;            # of a symbolic link
}

enum FileKind { file @0; directory @1; symlink @2; other @3; }

struct FileAttributes {
  mode @0 :Int32 = -1;        # permission bits; -1: not set
  setModified @1 :Bool;
  modifiedNs @2 :Int64;       # since 1970
}

interface Execution {
  # Dropping it does not stop the execution; `cancel` does.
  result @0 () -> (result :ExecResult);
  # Resolves when the execution has ended.
  output @1 (from :UInt64, callback :OutputCallback) -> ();
  # Replays from byte `from` of both streams together, then continues live until the end; returns
  # when all output was delivered. `truncated` stands for output that was discarded.
  cancel @2 () -> ();
  stdin @3 (data :Data) -> stream;
  # Only if the request set `stdinOpen`.
  closeStdin @4 () -> ();
}

interface OutputCallback {
  onOutput @0 (execId :UInt64, event :OutputEvent) -> stream;
}

interface KernelInfoSink { next @0 (info :KernelInfo) -> stream; }
interface EventSink {
  event @0 (event :Event) -> stream;
  caughtUp @1 () -> ();
  # Called once, after every event from before the subscription was delivered.
}
interface CheckpointSink { next @0 (checkpoint :Checkpoint) -> stream; }
interface DifferenceSink { next @0 (difference :Difference) -> stream; }
interface GcSink { next @0 (item :GcItem) -> stream; }
interface VerifySink {
  progress @0 (packs :UInt64, ofPacks :UInt64, bytes :UInt64) -> stream;
  damage @1 (damage :Damage) -> stream;
}
interface AuditSink { next @0 (line :AuditLine) -> stream; }
interface DecisionSink { next @0 (decision :Decision) -> stream; }
interface ArtifactSink { next @0 (artifact :Artifact) -> stream; }
interface PatchSink { next @0 (patch :Patch) -> stream; }
interface TeleportSink {
  progress @0 (phase :Text, sentBytes :UInt64, reusedBytes :UInt64) -> stream;
  # `sentBytes`: on the connection, compressed. `reusedBytes`: content that the other host had.
}
interface HandoverStream {
  write @0 (data :Data) -> ();
  # At most 1 MiB; empty: the end of the sender's stream. Several calls may be in flight, in order.
  read @1 () -> (data :Data);
  # Waits for data; empty: the end of the receiver's stream. Several calls may be in flight: each
  # gets the bytes after those of the one before.
}
interface JournalSink { entry @0 (entry :JournalEntry) -> stream; }

interface Subscription {}
# Drop it to end the subscription.

interface BlobReader {
  size @0 () -> (bytes :UInt64);
  read @1 (from :UInt64, maxBytes :UInt32) -> (data :Data, end :Bool);
}

interface BlobWriter {
  write @0 (data :Data) -> stream;
  finish @1 () -> (hash :Text, bytes :UInt64);
  # Without `finish` nothing is kept.
}

interface BundleReader {
  read @0 () -> (data :Data, end :Bool, digest :Text, bytes :UInt64);
  # The next chunk. At the end it is empty, and `digest` and `bytes` are those of the whole file.
  # After a failure the chunks read so far are not a valid file.
}

interface BundleWriter {
  write @0 (data :Data) -> stream;
  # Fails as soon as the file is found invalid.
  finish @1 (grant :List(HostResource))
      -> (kernel :Kernel, info :KernelInfo, granted :List(HostResource), withheld :List(HostResource));
  # Without `finish` no kernel is created; after a failure nothing is visible. `grant`: the resources
  # of the host that the kernel and its checkpoints keep, out of those that `review` returns; each
  # must exist and be allowed on this host. All others are removed from the kernel and from every
  # checkpoint, and are in `withheld`.
  review @2 () -> (requested :List(HostResource), signer :Signer, group :PackedGroup);
  # Ends the file and returns the resources of the host that it requests, up to 1000, and the host
  # that signed it. A signature that does not fit is `corrupt`. `group`: the group of the file; absent
  # if the file is a kernel's.
  finishGroup @3 (places :List(Pair), leftOut :List(Text), grant :List(HostResource))
      -> (group :Group, freeze :Freeze, leftOut :List(Text), granted :List(HostResource),
          withheld :List(HostResource));
  # Instead of `finish`, of a group's file: creates the kernels and the group with its freeze, or
  # nothing. `places`: members by name, each with where it comes to be, as in `Groups.add`; a kernel's
  # is its new name, and needs none. `refused` with reason `place` names the members without a place
  # that are not in `leftOut`. Repositories are created if they are not there; `Groups.restore` brings
  # the other members into place. `grant`: of all kernels, as in `finish`.
}

struct PackedGroup {
  # A freeze in a file.
  name @0 :Text;
  freeze @1 :Freeze;
  members @2 :List(GroupMember); # with where they were
  sealer @3 :Signer;          # of the freeze; that of the file may be another
}

interface Lease {
  kernel @0 () -> (kernel :Kernel);
  # The kernel's capability for the lease holder.
  renew @1 (ttlMs :UInt64) -> (expiresAtMs :Int64);
  release @2 () -> ();
}

struct Value {
  # No type is lost between engine and client.
  union {
    null @0 :Void;
    bool @1 :Bool;
    int @2 :Int64;
    float @3 :Float64;
    string @4 :Text;
    array @5 :List(Value);
    object @6 :List(KeyValue);
    blob @7 :BlobRef;
    bytes @8 :Data;
    bigInt @9 :Text;          # decimal digits, perhaps with a minus sign
    opaque @10 :Opaque;       # a live object without a value form: named, never silently dropped
  }
}

struct KeyValue { key @0 :Text; value @1 :Value; }
struct Pair { key @0 :Text; value @1 :Text; }
struct Opaque { type @0 :Text; repr @1 :Text; }
struct BlobRef { id @0 :Text; size @1 :UInt64; contentType @2 :Text; hash @3 :Data; }

struct OutputEvent {
  union {
    stdout @0 :Data;
    stderr @1 :Data;
    structured @2 :OutputData;
    exitCode @3 :Int32;       # the last event
    truncated @4 :UInt64;     # number of output bytes that were discarded
    display @5 :Display;
  }
}

struct Display { mime @0 :Text; data @1 :Data; }
struct OutputData { headers @0 :List(Text); root @1 :List(OutputNode); }
struct OutputNode { name @0 :Text; entryType @1 :Text; text @2 :Text; cells @3 :List(Text); children @4 :List(OutputNode); }

struct ExecRequest {
  code @0 :Text;
  stdin @1 :Data;
  stdinOpen @2 :Bool;         # more input follows through Execution.stdin
  env @3 :List(Pair);         # for this execution only
  timeoutMs @4 :UInt64;       # 0: none
  outputLimitBytes @5 :UInt64; # output kept in the journal; 0: the default
  key @6 :Text;               # idempotency key: the same key within 24 hours returns the same execution
  expectedVersion @7 :UInt64;
  tool @8 :Text;              # call this tool with `args` instead of running `code`
  args @9 :Value;
}

struct ExecResult {
  code @0 :Int32;
  ok @1 :Bool;
  err @2 :Text;
  stdout @3 :Data;            # the kept beginning
  stderr @4 :Data;
  data @5 :Value;             # value of the last expression
  output @6 :OutputData;
  status @7 :ExecStatus;
  durationUs @8 :UInt64;
  execId @9 :UInt64;
  truncatedBytes @10 :UInt64; # bytes written beyond the kept beginning
  hasData @11 :Bool;          # distinguishes a null value from no value
  displays @12 :List(Display); # the kept rich forms, in order
  stdoutTail @13 :Data;       # the newest of the truncated bytes: of both streams together a quarter of
  stderrTail @14 :Data;       # the output limit, at most 64 KiB
}

enum ExecStatus { done @0; failed @1; timeout @2; interrupted @3; lost @4; refused @5; }
enum CodeStatus { complete @0; incomplete @1; invalid @2; }

struct HostResource {
  # A resource of the host that an imported file requests.
  kind @0 :Text;              # `path`, `mount`, `net`, `mcp` or `layer` (a sandbox layer that may be missing)
  name @1 :Text;              # path inside, `host`, or the name of the server or layer
  source @2 :Text;            # the host path; a server's command line or URL
  writable @3 :Bool;
}

struct MountInfo { path @0 :Text; source @1 :Text; writable @2 :Bool; }
struct ToolInfo { name @0 :Text; description @1 :Text; source @2 :Text; schemaJson @3 :Text; }
struct VarInfo { name @0 :Text; type @1 :Text; summary @2 :Text; }
struct MissedEntry { key @0 :Text; type @1 :Text; reason @2 :Text; }
struct Job { id @0 :Text; command @1 :Text; }

struct McpTransport { union { stdio @0 :StdioTransport; http @1 :HttpTransport; } }
struct StdioTransport { command @0 :Text; args @1 :List(Text); env @2 :List(Pair); }
struct HttpTransport { baseUrl @0 :Text; headers @1 :List(Pair); }
struct McpInfo { name @0 :Text; state @1 :Text; tools @2 :UInt32; error @3 :Text; }

struct KernelSpec {
  # 0 and empty mean the configuration's default.
  name @0 :Text;
  engine @1 :Text;
  isolation @2 :Text;
  image @3 :Text;
  paths @4 :List(MountInfo);  # `source` empty or equal to `path`
  memoryBytes @5 :UInt64;
  cpuMilli @6 :UInt32;
  pids @7 :UInt32;
  idleTimeoutMs @8 :UInt64;   # 0: default; the largest value: never
  labels @9 :List(Pair);
  net @10 :Text;              # "none" or "host"
  openFiles @11 :UInt32;
  workspaceBytes @12 :UInt64;
  allowDegraded @13 :List(Text); # sandbox layers that may be missing on this host
  fromDir @14 :Text;          # copy this host directory into the new workspace
  ephemeral @15 :Bool;        # removed when the connection that created it ends, or at the daemon's next start
  retention @16 :Retention;   # of its checkpoints
  venv @17 :Text;             # Python's virtual environment, as the kernel sees it: in its workspace, in one of `paths`,
                              # or added to those read-only. Without an engine: python
}

struct Retention {
  # For checkpoints that are neither `manual` nor pinned. 0: the configuration's default; the
  # largest value: no bound.
  newest @0 :UInt32;          # number of newest checkpoints that stay
  keepForMs @1 :UInt64;       # maximum age of those
}

struct GcItem {
  union {
    checkpoint :group {
      kernel @0 :Text;
      checkpoint @1 :Checkpoint;
    }
    object :group {
      hash @2 :Text;
      bytes @3 :UInt64;
    }
  }
  stays @4 :Bool;
  why @5 :Text;
}

struct GcReport {
  dryRun @0 :Bool;            # nothing was changed; the other fields say what would be
  checkpointsKept @1 :UInt64;
  checkpointsRemoved @2 :UInt64;
  objectsKept @3 :UInt64;
  bytesKept @4 :UInt64;       # before compression
  objectsRemoved @5 :UInt64;
  bytesRemoved @6 :UInt64;
  objectsRecent @7 :UInt64;   # of the kept objects: unreferenced, but too young or in use by a current operation
  packsRemoved @8 :UInt64;
  packBytesRemoved @9 :UInt64;
  bytesCopied @10 :UInt64;    # still needed, copied out of the removed packs
}

struct Damage {
  what @0 :Text;              # `object`, `pack`, `database`, `audit log`; `audit gap`: lines that could
                              # not be written, which is no damage and does not count as such
  name @1 :Text;              # an address, a path, a line
  why @2 :Text;
  affects @3 :List(Affected);
}
struct Affected {
  kernel @0 :Text;
  what @1 :Text;              # `checkpoint`, `blob`, `output`, `files`, `all`
  name @2 :Text;              # a checkpoint's or an execution's number, a blob's address
}
struct VerifyReport {
  kernels @0 :UInt64;         # kernels whose databases were checked
  checkpoints @1 :UInt64;     # checkpoints that are complete
  objects @2 :UInt64;         # objects whose content matches their address
  bytes @3 :UInt64;
  damaged @4 :UInt64;
}

struct AuditLine {
  sequence @0 :UInt64;
  atMs @1 :Int64;
  uid @2 :UInt32;             # the caller
  client @3 :Text;            # the client's own name, followed by `/` and the label of an attenuated capability
  action @4 :Text;            # such as `checkpoint.restore`
  kernel @5 :Text;            # id; empty: the host
  versionBefore @6 :UInt64;   # 0: none
  versionAfter @7 :UInt64;    # 0: none
  outcome @8 :Text;           # `done`, or an ErrorCode by name
  manifest @9 :Text;          # of the checkpoint concerned
  detail @10 :Text;
  hash @11 :Text;             # over this line and all before it: docs/audit-log.md
}

struct CheckpointRequest {
  name @0 :Text;
  description @1 :Text;
  type @2 :CheckpointType = manual;
  pinned @3 :Bool;            # exempt from retention
  interrupt @4 :Bool;         # interrupt the running execution instead of waiting for it
  waitMs @5 :UInt64;          # time for the kernel to quiesce; 0: one minute
  expectedVersion @6 :UInt64;
  kind @7 :Text;              # of the snapshot: `checkpoint` (also if empty or `auto`), which is valid
                              # anywhere, or `teleport`: with a virtual machine's memory and disk
  summary @8 :Text;           # shown in the journal in place of the compacted messages
  compact @9 :List(Span);     # messages to compact; executions and marks in these spans stay
}

struct Span { first @0 :UInt64; last @1 :UInt64; }
# Sequence numbers of a journal, both included.

enum CheckpointType { auto @0; manual @1; system @2; conflict @3; }

struct Checkpoint {
  id @0 :Text;
  number @1 :UInt64;          # counts the kernel's checkpoints from 1
  name @2 :Text;
  description @3 :Text;
  type @4 :CheckpointType;
  creator @5 :Text;
  atMs @6 :Int64;
  parent @7 :Text;            # the kernel's previous checkpoint; empty: none
  pinned @8 :Bool;
  restorePoint @9 :Bool;
  restoredAtMs @10 :Int64;    # 0: never
  version @11 :UInt64;        # the kernel's version with it
  manifest @12 :Text;         # content address
  files @13 :UInt64;          # files, directories and links of the workspace
  stateBytes @14 :UInt64;     # of the engine's state
  isHead @15 :Bool;           # the kernel's current checkpoint: the last taken or restored
  step @16 :UInt32;           # the newest step at that time; 0: none
  stepName @17 :Text;
  agent @18 :Text;            # the current agent at that time; empty: none was named
  summary @19 :Text;
  compacted @20 :UInt64;      # number of compacted messages
  kind @21 :Text;             # of the snapshot: `checkpoint` or `teleport`
  machineBytes @22 :UInt64;   # of the virtual machine's memory, state and disk, without zero pages
}

struct Difference {
  area @0 :Area;
  deed @1 :Deed;
  name @2 :Text;              # a state entry's key (`var/x`), a path, a server's name
  before @3 :Text;            # bounded; of a renamed item: its previous name
  after @4 :Text;             # bounded
  what @5 :List(Text);        # of a file: `content`, `mode`, `owner`, `links`, `time`, `kind`
}

enum Area {
  state @0; file @1; mount @2; mcp @3; journal @4; step @5; agent @6; decision @7; artifact @8; tool @9; limit @10; size @11;
}
enum Deed { added @0; removed @1; changed @2; renamed @3; unknown @4; } # `unknown`: not compared, only of groups

struct Restoration {
  checkpoint @0 :Checkpoint;  # the restored checkpoint
  safety @1 :Text;            # the checkpoint taken just before the restore
  version @2 :UInt64;         # the kernel's new version
  missed @3 :List(MissedEntry); # values that the checkpoint never held or that could not be rebuilt
  filesChanged @4 :UInt64;    # files and directories created, changed or removed; a whole created or removed directory counts as one
  fromMemory @5 :Bool;        # the engine was restored with its complete memory, else from its saved state
  whyNotMemory @6 :Text;      # empty: restored with its memory, or the engine keeps no copies
  decisionsChanged @7 :UInt32; # marked superseded, or no longer marked
  artifactsChanged @8 :UInt32; # that got a new version
  ended @9 :List(Job);        # jobs of the engine, and processes beside it, that the restore ended
}

struct Patch {
  # One file, or the next part of one.
  path @0 :Data;
  deed @1 :Deed;
  before @2 :Data;            # its previous name, if it was renamed
  note @3 :Text;              # the reason for a missing text: `binary`, `too large`, or the kind of a non-file; empty: there is text
  text @4 :Data;              # of a unified diff, with the file's bytes unescaped: not safe to print to a terminal
  more @5 :Bool;              # more of this file follows
}

struct Workflow {
  steps @0 :List(Step);       # the newest last
  agent @1 :Text;             # the current agent; empty: none was named
}

struct Step {
  index @0 :UInt32;           # from 1
  name @1 :Text;
  agent @2 :Text;             # the agent that began it
  begunAtMs @3 :Int64;
  completedAtMs @4 :Int64;    # 0: it is the current step
}

struct Decision {
  id @0 :UInt64;              # counts the kernel's decisions from 1
  title @1 :Text;
  text @2 :Text;
  state @3 :DecisionState;
  agent @4 :Text;             # the agent that opened it
  step @5 :UInt32;            # the newest step at that time; 0: none
  openedBy @6 :Text;
  openedAtMs @7 :Int64;
  lockedBy @8 :Text;
  lockedAtMs @9 :Int64;       # 0: not locked
  supersededBy @10 :Text;
  supersededAtMs @11 :Int64;  # 0: not superseded
}

enum DecisionState { open @0; locked @1; superseded @2; }

struct ArtifactSource {
  union {
    hash @0 :Text;            # a blob that the kernel may read
    path @1 :Data;            # a file of the workspace, with its present content
  }
}

struct Artifact {
  name @0 :Text;
  version @1 :UInt32;         # from 1
  hash @2 :Text;              # empty: withdrawn by a restore to a state without it
  bytes @3 :UInt64;
  contentType @4 :Text;
  putBy @5 :Text;
  atMs @6 :Int64;
  revertsTo @7 :UInt32;       # the version whose content it repeats; 0: none
}

struct KernelInfo {
  id @0 :Text;
  spec @1 :KernelSpec;
  state @2 :Text;
  stateReason @3 :Text;
  version @4 :UInt64;
  epoch @5 :UInt64;
  generation @6 :UInt32;
  checkpoints @7 :UInt32;
  createdAtMs @8 :Int64;
  lastUsedAtMs @9 :Int64;
  memoryBytes @10 :UInt64;    # of the worker, now
  sandbox @11 :List(Text);    # layers in force
  uid @12 :UInt32;
  executions @13 :UInt64;
  rights @14 :List(Right);    # of the capability that was called
  origin @15 :Origin;
  threadOf @16 :Text;         # id of the kernel whose workspace this one shares; empty: its own
  capture @17 :Text;          # the driver that captures its files, and why no better one is used
  atNextStart @18 :List(Text); # changes of `spec` that the present worker does not have
  disk @19 :DiskFigures;      # as last measured, in the background after clients ask for it
  inForce @20 :KernelSpec;    # of the present worker, if `atNextStart` has entries; otherwise null
}

struct DiskFigures {
  # What a kernel takes on the disk, in bytes. Its removal releases the sum, but its share of memory
  # that copies of its virtual machine have in common only with the last of them.
  workspaceBytes @0 :UInt64;  # files of its code; of a virtual machine: its disk. 0 for a thread
  historyBytes @1 :UInt64;    # the journal, and what only this kernel needs of checkpoints, blobs and
                              # kept output: `KernelDisk.freedBytes` among kernels of the same user.
                              # Without all rights: the journal
  savedMemoryBytes @2 :UInt64; # saved memory of a virtual machine, and its share of copies' common memory
  otherBytes @3 :UInt64;      # engine state, index of the files, staging
  measuredAtMs @4 :Int64;     # 0: not yet
}

struct Origin {
  # The origin of the present state. Code inside reads the kind in RYOKAN_ORIGIN and the generation
  # in RYOKAN_GENERATION.
  kind @0 :Text;              # `original`, `restored`, `forked`
  kernel @1 :Text;            # id of the kernel from which it was forked; empty: none
  name @2 :Text;              # that kernel's name at the time
  checkpoint @3 :Text;        # that kernel's checkpoint
  restored @4 :Text;          # the last restored checkpoint; empty: none
}

struct ForkRequest {
  name @0 :Text;              # of the child; of several: the prefix of their names, followed by `-1`, `-2` and so on
  from @1 :Text;              # a checkpoint of this kernel; empty: the present state
  count @2 :UInt32 = 1;
  interrupt @3 :Bool;         # interrupt the running execution instead of waiting for it
  waitMs @4 :UInt64;          # time for the kernel to quiesce; 0: one minute
  expectedVersion @5 :UInt64;
  key @6 :Text;               # idempotency key: the same key within 24 hours returns the same children
  isolation @7 :Text;         # of the children: `process` or `microvm`; empty: that of this kernel
  image @8 :Text;             # of the children; empty: that of this kernel, or the current one of another isolation
  change @9 :KernelUpdate;    # of the children's network, limits and paths; with `Host.forkKernel` only
}

struct ForkResult {
  checkpoint @0 :Checkpoint;  # the fork point, a checkpoint of the forked kernel
  children @1 :List(ForkedKernel);
  kind @2 :Text;              # `machine`: the children continue copies of the running virtual machine
                              # with all of its memory; `checkpoint`: they start from the fork point;
                              # empty from an older daemon
  reason @3 :Text;            # of kind `checkpoint` although the kernel's machine was running
  pauseUs @4 :UInt64;         # how long the machine stood still
}

struct ForkedKernel {
  name @0 :Text;
  union {
    forked :group {
      kernel @1 :Kernel;
      info @2 :KernelInfo;
    }
    failed @3 :Error;
  }
}

struct KernelFilter { labels @0 :List(Pair); states @1 :List(Text); prefix @2 :Text; }
struct HostInfo {
  id @0 :Text;
  name @1 :Text;
  version @2 :Text;
  arch @3 :Text;
  engines @4 :List(Text);
  pid @5 :UInt32;             # the daemon's process, as it sees it; 0: an older daemon
}
struct Ability { name @0 :Text; present @1 :Bool; detail @2 :Text; hint @3 :Text; required @4 :Bool; }

struct PoolInfo {
  # Warm workers of one engine with the same limits and rights.
  engine @0 :Text;
  memoryBytes @1 :UInt64;
  net @2 :Text;
  uid @3 :UInt32;             # the host user with whose rights they run
  poolSize @4 :UInt32;        # the configured sizes
  maxPoolSize @5 :UInt32;
  minIdle @6 :UInt32;
  target @7 :UInt32;          # number of idle workers wanted now
  total @8 :UInt32;           # in creation, idle, or in use by kernels
  idle @9 :UInt32;
  creating @10 :UInt32;
  active @11 :UInt32;         # in use by kernels
  totalCreated @12 :UInt64;   # since the pool was created
  totalDestroyed @13 :UInt64;
  totalExecutions @14 :UInt64;
  creationErrors @15 :UInt64;
  taken @16 :UInt64;          # granted to kernels
  missed @17 :UInt64;         # requests of kernels that found no idle worker
  trouble @18 :Text;          # the last creation error; empty: none
  triesAgainInMs @19 :UInt64; # after an error: time until the next attempt; 0: as soon as a worker is wanted
  refused @20 :UInt64;        # kernels that waited for a worker in vain
  cpuMilli @21 :UInt32;       # thousandths of a processor, per worker
  pids @22 :UInt32;           # processes and threads, per worker
}

struct TeleportReport {
  handover @0 :Text;
  host @1 :Text;              # id of the other host
  epoch @2 :UInt64;           # of the kernel there
  objects @3 :UInt64;         # that the kernel consists of
  bytes @4 :UInt64;
  sentObjects @5 :UInt64;     # that the other host lacked
  sentBytes @6 :UInt64;
  pauseMs @7 :UInt64;         # from the last moment here to the commit
  missing @8 :List(Text);     # what the kernel moved without
  acknowledged @9 :Bool;      # whether the other host has confirmed that the kernel lives there
  kind @10 :Text;             # of the snapshot: checkpoint
  kindReason @11 :Text;       # why this kind
  elapsedMs @12 :UInt64;      # of the whole move
  wireBytes @13 :UInt64;      # sent on the connection, compressed
  stays @14 :List(Text);      # of a group: what stays here as it is
}

struct Handover {
  id @0 :Text;
  kernel @1 :Text;            # id
  name @2 :Text;
  state @3 :Text;             # moving, committing, aborting, undecided; prepared, arriving (a group), live; damaged
  peer @4 :Text;              # outgoing: the transport; incoming: id of the source host
  epoch @5 :UInt64;           # incoming: of the kernel here
  atMs @6 :Int64;
  problem @7 :Text;           # why it is not acknowledged yet, or what is wrong with its record
}

struct Event { sequence @0 :UInt64; atMs @1 :Int64; kernel @2 :Text; kind @3 :Text; detailJson @4 :Text; }

struct JournalEntry {
  sequence @0 :UInt64;
  atMs @1 :Int64;
  kind @2 :Text;              # execution, process, message, mark; checkpoint for compacted messages
  actor @3 :Text;
  execId @4 :UInt64;          # 0 unless it is an execution or a process
  text @5 :Text;              # code, message or mark
  status @6 :Text;            # an ExecStatus by name, or running
  code @7 :Int32;
  err @8 :Text;
  durationUs @9 :UInt64;
  outputBytes @10 :UInt64;    # kept output
  truncatedBytes @11 :UInt64;
}

enum Right { read @0; execute @1; write @2; checkpoint @3; restore @4; fork @5; teleport @6; admin @7; }

struct Error { code @0 :ErrorCode; message @1 :Text; hint @2 :Text; reason @3 :Text; }
# The JSON object in an exception's text has these fields, with `code` by name.

enum ErrorCode {
  invalidArgument @0; notFound @1; alreadyExists @2; conflict @3; refused @4; busy @5; unsupported @6; departed @7; lost @8;
  corrupt @9; deadline @10; unavailable @11; internal @12;
}

interface Groups {
  # The caller's groups. A member is on this host: a kernel, or a host path that the caller may use.

  create @0 (name :Text) -> ();
  # `alreadyExists` if a group or a kernel of the caller has this name.
  add @1 (group :Text, kind :Text, target :Text, name :Text) -> (member :GroupMember);
  # `kind`: `kernel`, `repository` (a git work tree), `database` (an SQLite file), `directory`,
  # `command` (a data source of the daemon's configuration), `postgres`, or `server` (a PostgreSQL
  # server of the configuration). `target`: the kernel's name, the path, the configured name, or
  # `dbname=… host=… port=… user=…` without a password. `name` empty: derived from the target.
  remove @2 (group :Text, member :Text, abandon :Bool, freeze :Text) -> (left :List(Text));
  # `member` empty: the group with all of its freezes. `abandon`: although a freeze or a restore of
  # it has not ended; its members stay as they are. `left`: the directories of imported repositories
  # that are not in their places. `freeze`, as `ref` of `restore`: only this freeze, of the whole group.
  list @3 () -> (groups :List(Group));
  show @4 (group :Text) -> (group :Group);
  freeze @5 (group :Text, message :Text, interrupt :Bool, waitMs :UInt64, onFailure :OnFailure,
      park :Bool) -> (freeze :Freeze);
  # Captures every member within one pause: all or nothing. A kernel's running execution is awaited for
  # `waitMs` (0: one minute; at most an hour), or interrupted, or parked: it stands still for the pause
  # and goes on, and the freeze holds the engine's state before it with the files of the moment. The
  # cost of its member and `notes` name it. `unsupported` with reason `park` if that state is not
  # saved, or in a virtual machine; `invalidArgument` with both `interrupt` and `park`.
  # `conflict` with reason `group_paused` after a failure with `pause`, until `resume`.
  freezes @6 (group :Text, limit :UInt32) -> (freezes :List(Freeze));
  # Newest first; `limit` 0: all.
  restore @7 (group :Text, ref :Text, members :List(Text), interrupt :Bool, waitMs :UInt64)
      -> (restoration :GroupRestoration);
  # `ref`: a number, the beginning of an id, a message, `latest` or `~N`. `members` empty: all. After
  # a freeze of type `system` to which `undo` returns. All or nothing. Running executions as in
  # `freeze`, never parked; `notes` name them.
  undo @8 (group :Text, interrupt :Bool, waitMs :UInt64) -> (restoration :GroupRestoration);
  lock @9 (name :Text) -> (lock :Text);
  # Of the present state of a kernel or a group: docs/lock-format.md.
  check @10 (name :Text, ref :Text) -> (differences :List(Text));
  # How the present state differs from a checkpoint of the kernel or a freeze of the group; `ref`
  # empty: the newest. `refused` with reason `data_newer` if a group's data needs newer code.
  diff @11 (group :Text, from :Text, to :Text) -> (differences :List(GroupDifference), omitted :UInt64);
  # From freeze `from` (empty: the newest) to freeze `to` (empty: the present state), member by
  # member. `omitted`: the number of further differences.
  export @12 (group :Text, ref :Text) -> (file :BundleReader);
  # A freeze as a file, for `Host.importKernel`: the lock, every part, the checkpoints of the kernels
  # and the history of each repository. `ref` empty: the newest that a client took; `notFound` without
  # one. Holds no configuration, remotes or credentials.
  configure @13 (group :Text, onFailure :OnFailure) -> ();
  # What a freeze does that fails, unless it says so itself. `group` changes nothing.
  resume @14 (group :Text) -> ();
  # Lets the kernels of a paused group go on. Nothing to do is no error.
}

enum OnFailure {
  group @0;                   # as the group is configured; a new one: `resume`
  resume @1;                  # everything goes on
  pause @2;                   # the kernels stay suspended and start nothing; other members go on
}

struct Group {
  name @0 :Text;
  members @1 :List(GroupMember);
  freezes @2 :UInt64;
  createdAtMs @3 :Int64;
  unfinished @4 :Bool;        # a restore was interrupted and awaits recovery
  onFailure @5 :OnFailure;    # never `group`
  paused @6 :Text;            # why its kernels are paused; empty: they are not
}

struct GroupMember {
  name @0 :Text;
  kind @1 :Text;
  target @2 :Text;            # a kernel's name, a path, a source's name, or a connection
}

struct Freeze {
  id @0 :Text;
  number @1 :UInt64;          # counts the group's freezes from 1
  message @2 :Text;
  type @3 :CheckpointType;
  creator @4 :Text;
  atMs @5 :Int64;
  restoredAtMs @6 :Int64;     # 0: never
  isHead @7 :Bool;            # the last taken or restored
  lock @8 :Text;              # docs/lock-format.md
  cost @9 :FreezeCost;        # only in the result of `freeze`
  notes @10 :List(Text);      # only there: members that do not work again, what is not captured
}

struct FreezeCost {
  pauseUs @0 :UInt64;         # until everything runs again
  admissionUs @1 :UInt64;     # until every kernel starts executions again
  totalUs @2 :UInt64;         # with what was read ahead of the pause
  members @3 :List(MemberCost);
}

struct MemberCost {
  name @0 :Text;
  driver @1 :Text;            # how its content was held: `reflink`, `tracked`, `transaction` and so on
  growth @2 :Text;            # what its part of the pause grows with: `constant`, `changes`, `size`
  pauseUs @3 :UInt64;
  storeUs @4 :UInt64;         # after the pause
  interrupted @5 :UInt64;     # the execution that was interrupted for the freeze; 0: none
  parked @6 :UInt64;          # the execution that was under way and went on; 0: none
  awaited @7 :List(UInt64);   # executions whose end was awaited
  queued @8 :List(UInt64);    # executions in the queue, which are in no freeze
}

struct GroupDifference {
  member @0 :Text;
  kind @1 :Text;              # the member's
  what @2 :Text;              # an area of a kernel; `head`, `commit`, `file`, `table`, `rows` and so on
  deed @3 :Deed;
  name @4 :Text;              # a path, a table, a commit
  before @5 :Text;            # bounded
  after @6 :Text;             # bounded
  details @7 :List(Text);     # as in `Difference.what`; `uncommitted` for a file of a repository
}

struct GroupRestoration {
  freeze @0 :Freeze;
  safety @1 :Text;            # the freeze taken just before
  notes @2 :List(Text);       # what could not be checked or is not restored, and executions in flight
}

interface Provenance {
  # Each host signs the freezes of groups and the files that it exports: docs/snapshot-format.md.

  keys @0 () -> (keys :List(KnownKey));
  # This host's key, which the first call makes, its former keys, and those that the caller trusts.
  trust @1 (name :Text, key :Text) -> (key :KnownKey);
  # Trusts a host's key, 64 hexadecimal digits, under a name.
  distrust @2 (name :Text) -> ();
  check @3 (name :Text, ref :Text) -> (units :List(SignedUnit), omitted :UInt64);
  # Who signed the freezes of a group, or those that hold the checkpoints of a kernel; `ref` empty:
  # all, newest first. `name` empty: all groups of the caller. `omitted`: the number of further ones.
}

struct KnownKey {
  key @0 :Text;
  name @1 :Text;              # empty: this host's
  standing @2 :Standing;      # `own`, `former` or `trusted`
  atMs @3 :Int64;             # made or added
}

struct Signer {
  standing @0 :Standing;
  name @1 :Text;              # of a trusted key
  key @2 :Text;               # empty: no signature
}

enum Standing {
  own @0; trusted @1; former @2; unknown @3; missing @4; damaged @5;
  # `former`: a key that this host no longer has. `damaged`: the signature does not fit, or what it
  # is over is not readable.
}

struct SignedUnit {
  unit @0 :Text;              # `freeze` or `checkpoint`
  of @1 :Text;                # the group or the kernel
  number @2 :UInt64;
  id @3 :Text;
  atMs @4 :Int64;
  signer @5 :Signer;
  detail @6 :Text;            # perhaps empty
}

interface Images {
  # A version is given by its first digits.

  list @0 () -> (images :List(ImageInfo), folder :Text);
  # `folder`: into which images are built.
  pin @1 (version :Text, pinned :Bool) -> (version :Text);
  # A pinned image is not removed.
  rotate @2 (version :Text) -> (version :Text);
  # Makes an image current, the newest if `version` is empty, once its templates are built and a
  # machine started from each: the default one, and those of kernels that would run it. Kernels that
  # name no image run it from their next start on. Nothing else changes the current image.
  remove @3 (version :Text) -> (version :Text);
  # `conflict` with reason `in_use`, `current` or `pinned`. Checkpoints with memory of its machines
  # use it, too.
}

struct ImageInfo {
  version @0 :Text;           # the digest of its content
  engines @1 :List(Text);
  summary @2 :Text;
  bytes @3 :UInt64;
  builtAtMs @4 :Int64;
  current @5 :Bool;
  pinned @6 :Bool;
  kernels @7 :List(Text);     # that run it, or would at their next start
  trouble @8 :Text;           # why it cannot be used; else empty
  engineVersions @9 :List(Text);
  # Of `engines`, in their order; empty for one that is part of the worker. An earlier daemon sends none.
}
