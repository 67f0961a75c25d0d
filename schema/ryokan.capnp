@0xd3a1f0c92b7e4a56;
# ryokan's public interface: the only contract between `ryokand` and its clients, whatever their language.
#
# Bootstrap of `$XDG_RUNTIME_DIR/ryokan/ryokand.sock` is `Host`; bootstrap of `kernels/<name>.sock` is that one `Kernel`.
# Holding a capability is the permission: there are no tokens and no users in the calls.
#
# - Say `Host.hello` first; every other call of `Host` before it is refused.
# - Ordinals are permanent. A parameter or field added later has a default that means "as before".
# - A failure is an exception whose text holds one line `ryokan:{"code":…,"message":…,"hint":…,"reason":…}` (struct `Error`).
# - Times are milliseconds since 1970-01-01 UTC unless the name says otherwise. Hashes are BLAKE3, 64 hexadecimal digits.
# - A message is at most 64 MiB. Chunks of streams are at most 1 MiB.
# - `expectedVersion`: the kernel's `KernelInfo.version` that the caller knows; 0 means any; another one fails with `conflict`.

# This revision of the interface. `hello` with 0 or with an older one than the daemon still speaks is refused.
const wireVersion :UInt32 = 1;

interface Host {
  hello @0 (wireVersion :UInt32, client :Text) -> (wireVersion :UInt32, host :HostInfo);
  # `client` is a name for the journal and the audit log, such as "my-agent 1.2".

  createKernel @1 (spec :KernelSpec, key :Text) -> (kernel :Kernel, info :KernelInfo);
  # The same `key` within 24 hours gives the same kernel; without one a taken name fails with `alreadyExists`. No worker is
  # started: that happens at first use. Pipelines: `createKernel().kernel.run(…)` is one round trip.

  openKernel @2 (name :Text) -> (kernel :Kernel, info :KernelInfo);
  # By name or id.

  listKernels @3 (filter :KernelFilter, sink :KernelInfoSink) -> ();
  # Streams in order of name; returns when all were sent.

  removeKernel @4 (name :Text, expectedVersion :UInt64 = 0, withThreads :Bool = false) -> ();
  # Ends its worker and deletes its files, journal and sockets. What the kernel was given by mounts is untouched. `conflict` with reason
  # `threads` if it has threads, unless they go too (`withThreads`).

  events @5 (since :UInt64, sink :EventSink) -> (subscription :Subscription);
  # What happened after sequence number `since` and whatever happens until `subscription` is dropped. A gap (the log is
  # bounded) comes as an event of kind `gap`.

  abilities @6 () -> (abilities :List(Ability));
  # What this host can do.

  ping @7 () -> (hostId :Text, serverTimeMs :Int64);
  # Takes no locks and touches no disk.

  gc @8 (dryRun :Bool, sink :GcSink) -> (report :GcReport);
  # Removes checkpoints that retention lets go, then every object that nothing names, beside whoever works. `sink` gets each
  # checkpoint that goes; with `dryRun`, which changes nothing, each checkpoint and object with why it stays or goes. Of a system-wide
  # daemon its own user only.
  verify @9 (sink :VerifySink) -> (report :VerifyReport);
  # Reads everything: databases, audit log, packs, and whatever rows and checkpoints name. `sink` gets what is damaged and what
  # cannot be had because of it. Of a system-wide daemon its own user only.
  audit @10 (kernel :Text, since :UInt64, limit :UInt32, sink :AuditSink) -> ();
  # Lines of the audit log after number `since`, oldest first; `limit` 0: all. `kernel` by name or id, also of one that was removed
  # (by its id, or ten digits and more of the beginning of that); empty: all that you may see.
  verifyAudit @11 (known :Text) -> (head :Text, brokenAt :UInt64, why :Text);
  # Proves the log's chain. `known`: an end of it, `LINE:HASH`, that you kept; may be empty. `head` is the end now; `brokenAt` the first
  # line that does not fit, 0: all do.
  importKernel @12 (name :Text, withoutHost :Bool = false) -> (file :BundleWriter);
  # A new kernel of a file that `Kernel.export` wrote, here or elsewhere. `name` empty: as it was called. `withoutHost`: without the host's
  # paths, mounts and MCP servers that it had; otherwise each must be there and allowed here.
  pools @13 () -> (pools :List(PoolInfo));
  # The workers that are kept ready, by what they are like. Of a system-wide daemon its own user sees all, others those that are theirs.
}

interface Kernel {
  # Where a kernel has no worker, a method that needs one starts it.

  execute @0 (code :Text) -> (execId :UInt64);
  # Returns once the execution is in the journal and queued. Its result: `execution(execId)`.

  executeStreaming @1 (code :Text, callback :OutputCallback) -> (execId :UInt64);
  # As `execute`; `callback` then gets all of its output. A callback that answers slowly slows the code.

  interrupt @2 (execId :UInt64) -> ();
  # A queued execution ends without having run. `notFound` if there is none of that number; nothing if it has ended.

  getVar @3 (name :Text) -> (value :Value);
  setVar @4 (name :Text, value :Value, expectedVersion :UInt64 = 0) -> ();
  listVars @5 () -> (names :List(Text));

  mount @6 (path :Text, source :Text, writable :Bool, expectedVersion :UInt64 = 0) -> ();
  # Makes the host's folder or file `source` visible inside at `path`, at once and after every restart.
  unmount @7 (path :Text, expectedVersion :UInt64 = 0) -> ();
  listMounts @8 () -> (mounts :List(MountInfo));

  listTools @9 () -> (tools :List(ToolInfo));
  callTool @10 (name :Text, args :Value) -> (result :ExecResult);
  # `args` is an object (named arguments) or an array (positional). Runs as an execution and is journalled as one.

  registerMcp @11 (name :Text, transport :McpTransport, expectedVersion :UInt64 = 0) -> ();
  # Only servers in the configuration's allow-list; `refused` otherwise. They run outside the sandbox.
  listMcpServers @12 () -> (servers :List(McpInfo));

  snapshot @13 () -> (data :Data, missed :List(MissedEntry));
  # Engine state alone, opaque and versioned, at most 32 MiB. `missed` names what it does not hold.
  restore @14 (data :Data, expectedVersion :UInt64 = 0) -> (missed :List(MissedEntry));
  # All or nothing; `missed` names what was captured and could not be built again.

  readBlob @15 (hash :Text) -> (data :Data);
  # At most 32 MiB; larger: `openBlob`. Only what this kernel wrote or was given.
  writeBlob @16 (data :Data) -> (hash :Text);

  info @17 () -> (info :KernelInfo);

  run @18 (request :ExecRequest) -> (execution :Execution, execId :UInt64);
  # The full form of `execute`.
  execution @19 (execId :UInt64) -> (execution :Execution);
  # Also after reconnecting, also long after its end.

  attenuate @20 (rights :List(Right), label :Text) -> (kernel :Kernel);
  # The same kernel with at most these rights; `label` names the holder in the journal.
  publish @21 (rights :List(Right), name :Text) -> (path :Text);
  # The same as a Unix socket in `kernels/`, for another program of this user; lives until `unpublish` or removal.
  unpublish @22 (name :Text) -> ();

  openBlob @23 (hash :Text) -> (blob :BlobReader);
  newBlob @24 () -> (blob :BlobWriter);
  grantBlob @25 (hash :Text, to :Kernel) -> ();
  # Lets another kernel read a blob that this one can read.

  start @26 () -> ();
  # Starts the worker now. Also closes an open circuit breaker.
  stop @27 (force :Bool = false) -> ();
  # Ends the worker; state is kept. Waits for what runs, unless `force` interrupts it.
  remove @28 (expectedVersion :UInt64 = 0, withThreads :Bool = false) -> ();

  journal @29 (since :UInt64, limit :UInt32, sink :JournalSink, compacted :Bool = false, checkpoint :Text) -> ();
  # Entries after sequence number `since`, oldest first; `limit` 0: all. With `compacted`, messages that a checkpoint compacted are
  # left out; in the place of the last of them stands an entry of kind `checkpoint` with that checkpoint's summary. With
  # `checkpoint` (a `ref`), only the messages that this one compacted.
  message @30 (role :Text, text :Text, key :Text, expectedVersion :UInt64 = 0) -> (sequence :UInt64);
  # Appends what an agent or a person said. The same `key` within 24 hours gives the same entry.
  events @31 (since :UInt64, sink :EventSink) -> (subscription :Subscription);
  # As `Host.events`, of this kernel only.

  lease @32 (holder :Text, ttlMs :UInt64, token :Data) -> (lease :Lease, token :Data, expiresAtMs :Int64);
  # While it lasts, only its holder changes this kernel or executes in it; others get `busy` with reason `lease`. `token` empty
  # takes a new lease; the token of one takes it up again, also after a restart of the daemon.

  describeVars @33 () -> (vars :List(VarInfo));
  missed @34 () -> (missed :List(MissedEntry));
  # What the kernel holds now that its saved state does not.
  complete @35 (code :Text, cursor :UInt32) -> (start :UInt32, matches :List(Text));
  # Completions for the byte offset `cursor`; they replace the text from `start` to `cursor`.
  check @36 (code :Text) -> (status :CodeStatus, indent :Text);
  # Whether `code` is a whole program: for interactive front ends.
  unregisterMcp @37 (name :Text, expectedVersion :UInt64 = 0) -> ();
  jobs @38 () -> (jobs :List(Job));
  # Background jobs that run now.
  runToEnd @39 (request :ExecRequest) -> (result :ExecResult);
  # `run` and `Execution.result` in one call: the cheapest way to run something short. Dropping the call changes nothing: the
  # execution goes on, and its `key` or the journal leads back to it.

  checkpoint @40 (request :CheckpointRequest) -> (checkpoint :Checkpoint);
  # Waits for what runs, then keeps engine state, workspace, mounts and MCP servers as they are. `deadline` if the kernel did not come
  # to rest in time: then nothing was done.
  checkpoints @41 (limit :UInt32, sink :CheckpointSink) -> ();
  # Newest first; `limit` 0: all.
  findCheckpoint @42 (ref :Text) -> (checkpoint :Checkpoint);
  # `ref`: the beginning of an id, a name, `~N` (N before the newest) or `latest`. `conflict` with the candidates if it could be several.
  restoreCheckpoint @43 (ref :Text, expectedVersion :UInt64 = 0, supersedeDecisions :Bool = false, withArtifacts :Bool = false)
      -> (restoration :Restoration);
  # All or nothing, after a checkpoint of type `system` that `undo` goes back to. Steps and the current agent go back too. Journal,
  # messages and audit log are never touched; decisions made since are marked superseded and artifacts brought to their versions
  # then (as new versions) only when asked.
  undo @44 (expectedVersion :UInt64 = 0) -> (restoration :Restoration);
  # Back to where the kernel was before its last restore; `notFound` if nothing was restored.
  pinCheckpoint @45 (ref :Text, pinned :Bool) -> ();
  diff @46 (from :Text, to :Text, sink :DifferenceSink) -> ();
  # What differs from checkpoint `from` to checkpoint `to` (empty: to what is now), area by area; files that were added, removed or
  # renamed after those that were changed. Of what changed nothing but its time is not told.

  fork @47 (request :ForkRequest) -> (checkpoint :Checkpoint, children :List(ForkedKernel));
  # New kernels that begin as this one is, or was at a checkpoint: engine state, workspace, mounts, MCP servers, limits. All of them
  # from one safe point. `checkpoint`: the fork point, one of this kernel's. Each child has its own result; it is there whole or not at
  # all. A child's capability has the rights that this one has.
  thread @48 (name :Text, engine :Text = "", key :Text = "") -> (kernel :Kernel, info :KernelInfo);
  # A new kernel with an engine (empty: as this one) and state of its own, in this kernel's workspace and with its mounts. This kernel
  # cannot be removed before it, unless both are. The same `key` within 24 hours gives the same thread.

  removeCheckpoint @49 (ref :Text, expectedVersion :UInt64 = 0) -> (checkpoint :Checkpoint);
  # For good. `conflict` for the one that the kernel is at, and for those that `undo` or a restore under way need. Its children become
  # those of its parent.
  setRetention @50 (retention :Retention, expectedVersion :UInt64 = 0) -> (gone :UInt64);
  # How long checkpoints are kept that are neither `manual` nor pinned; a bound of 0 stays as it is. `gone`: how many went at once.
  export @51 (refs :List(Text)) -> (file :BundleReader);
  # This kernel and these of its checkpoints as one file; without any: all, and a new one of what is now. Needs the right `teleport`.

  workflow @52 () -> (workflow :Workflow);
  # Steps and the current agent.
  beginStep @53 (name :Text, expectedVersion :UInt64 = 0) -> (step :Step);
  # `conflict` with reason `step_open` while another is not completed.
  completeStep @54 (expectedVersion :UInt64 = 0) -> (step :Step, checkpoint :Checkpoint);
  # With a checkpoint of type `auto`: both or neither. As `checkpoint`, it waits for what runs.
  handOver @55 (agent :Text, note :Text, expectedVersion :UInt64 = 0) -> (checkpoint :Checkpoint);
  # `agent` works from now on. With a checkpoint of type `auto`: both or neither.

  openDecision @56 (title :Text, text :Text, key :Text, expectedVersion :UInt64 = 0) -> (decision :Decision);
  # The same `key` within 24 hours gives the same decision.
  lockDecision @57 (id :UInt64, expectedVersion :UInt64 = 0) -> (decision :Decision, checkpoint :Checkpoint);
  # With a checkpoint of type `auto` just before: both or neither.
  supersedeDecision @58 (id :UInt64, expectedVersion :UInt64 = 0) -> (decision :Decision);
  decisions @59 (sink :DecisionSink) -> ();
  # Oldest first.

  putArtifact @60 (name :Text, source :ArtifactSource, contentType :Text, key :Text, expectedVersion :UInt64 = 0)
      -> (artifact :Artifact);
  # One more version, unless the newest is the same already. The same `key` within 24 hours gives the same version.
  revertArtifact @61 (name :Text, version :UInt32, expectedVersion :UInt64 = 0) -> (artifact :Artifact);
  # One more version, with the content of an earlier one.
  artifacts @62 (name :Text, sink :ArtifactSink) -> ();
  # The newest version of each, by name; of one artifact, if `name` is given: every version, newest first.
  artifact @63 (name :Text, version :UInt32 = 0) -> (artifact :Artifact, blob :BlobReader);
  # `version` 0: the newest.

  diffText @64 (from :Text, to :Text, paths :List(Data), sink :PatchSink) -> ();
  # What differs in the files from checkpoint `from` to checkpoint `to` (empty: to what is now), as unified diffs; `paths` empty:
  # of all files, else of these and of what is beneath them.

  archive @65 (expectedVersion :UInt64 = 0) -> (checkpoint :Checkpoint, version :UInt64);
  # Stops it and puts it away: its files and its engine's state are in `checkpoint` alone, until `unarchive`. Journal, records and
  # checkpoints stay readable, and it can be forked and exported; whatever needs a worker is refused with reason `archived`.
  unarchive @66 (expectedVersion :UInt64 = 0) -> (version :UInt64);
}

interface Execution {
  # Dropping it changes nothing: the execution goes on. `cancel` stops it.
  result @0 () -> (result :ExecResult);
  # Resolves when it has ended.
  output @1 (from :UInt64, callback :OutputCallback) -> ();
  # Replays from byte `from` of both streams together, then live to the end; returns when all was delivered. What is no
  # longer there comes as `truncated`.
  cancel @2 () -> ();
  stdin @3 (data :Data) -> stream;
  # Only if the request said `stdinOpen`.
  closeStdin @4 () -> ();
}

interface OutputCallback {
  onOutput @0 (execId :UInt64, event :OutputEvent) -> stream;
}

interface KernelInfoSink { next @0 (info :KernelInfo) -> stream; }
interface EventSink {
  event @0 (event :Event) -> stream;
  caughtUp @1 () -> ();
  # Called once: every event that had happened when you subscribed has been told.
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
  # Without it nothing is kept.
}

interface BundleReader {
  read @0 () -> (data :Data, end :Bool, digest :Text, bytes :UInt64);
  # The next piece. At the end there is none, and digest and length are those of the whole. A failure means that what was read is no file.
}

interface BundleWriter {
  write @0 (data :Data) -> stream;
  # Fails as soon as something is wrong with the file.
  finish @1 () -> (kernel :Kernel, info :KernelInfo);
  # Without it nothing comes of it; after a failure nothing is visible.
}

interface Lease {
  kernel @0 () -> (kernel :Kernel);
  # The capability that the lease lets through.
  renew @1 (ttlMs :UInt64) -> (expiresAtMs :Int64);
  release @2 () -> ();
}

struct Value {
  # No type is lost between an engine and a client.
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
    opaque @10 :Opaque;       # a live object that has no value form: named, never silently dropped
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
    truncated @4 :UInt64;     # so many bytes of output are no longer there
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
  outputLimitBytes @5 :UInt64; # kept in the journal; 0: the default
  key @6 :Text;               # the same key within 24 hours gives the same execution
  expectedVersion @7 :UInt64;
  tool @8 :Text;              # call this tool with `args` in place of running `code`
  args @9 :Value;
}

struct ExecResult {
  code @0 :Int32;
  ok @1 :Bool;
  err @2 :Text;
  stdout @3 :Data;            # what was kept
  stderr @4 :Data;
  data @5 :Value;             # value of the last expression
  output @6 :OutputData;
  status @7 :ExecStatus;
  durationUs @8 :UInt64;
  execId @9 :UInt64;
  truncatedBytes @10 :UInt64; # written beyond what was kept
  hasData @11 :Bool;          # tells a null value from none
}

enum ExecStatus { done @0; failed @1; timeout @2; interrupted @3; lost @4; refused @5; }
enum CodeStatus { complete @0; incomplete @1; invalid @2; }

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
  paths @4 :List(MountInfo);  # `source` empty or the same as `path`
  memoryBytes @5 :UInt64;
  cpuMilli @6 :UInt32;
  pids @7 :UInt32;
  idleTimeoutMs @8 :UInt64;   # 0: default; the largest value: never
  labels @9 :List(Pair);
  net @10 :Text;              # "none" or "host"
  openFiles @11 :UInt32;
  workspaceBytes @12 :UInt64;
  allowDegraded @13 :List(Text); # sandbox layers to do without if the host lacks them
  fromDir @14 :Text;          # copy this folder of the host into the new workspace
  ephemeral @15 :Bool;        # removed when the connection that made it ends, and by a daemon that finds it when it starts
  retention @16 :Retention;   # of its checkpoints
}

struct Retention {
  # Of checkpoints that are neither `manual` nor pinned. 0: the configuration's default; the largest value: without this bound.
  newest @0 :UInt32;          # so many of the newest stay
  keepForMs @1 :UInt64;       # and those no longer than this
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
  dryRun @0 :Bool;            # nothing was changed: the rest says what would be
  checkpointsKept @1 :UInt64;
  checkpointsRemoved @2 :UInt64;
  objectsKept @3 :UInt64;
  bytesKept @4 :UInt64;       # before compression
  objectsRemoved @5 :UInt64;
  bytesRemoved @6 :UInt64;
  objectsRecent @7 :UInt64;   # of those that stay: only because they are young, or in use by what goes on
  packsRemoved @8 :UInt64;
  packBytesRemoved @9 :UInt64;
  bytesCopied @10 :UInt64;    # out of those packs, because they are still needed
}

struct Damage {
  what @0 :Text;              # `object`, `pack`, `database`, `audit log`
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
  kernels @0 :UInt64;         # whose databases were checked
  checkpoints @1 :UInt64;     # of which everything was found
  objects @2 :UInt64;         # whose content is what their address says
  bytes @3 :UInt64;
  damaged @4 :UInt64;
}

struct AuditLine {
  sequence @0 :UInt64;
  atMs @1 :Int64;
  uid @2 :UInt32;             # who
  client @3 :Text;            # what that client called itself, and after a `/` the label of an attenuated capability
  action @4 :Text;            # such as `checkpoint.restore`
  kernel @5 :Text;            # id; empty: the host
  versionBefore @6 :UInt64;   # 0: none
  versionAfter @7 :UInt64;    # 0: none
  outcome @8 :Text;           # `done`, or an ErrorCode by name
  manifest @9 :Text;          # of the checkpoint that it is about
  detail @10 :Text;
  hash @11 :Text;             # over this line and all before it: docs/audit-log.md
}

struct CheckpointRequest {
  name @0 :Text;
  description @1 :Text;
  type @2 :CheckpointType = manual;
  pinned @3 :Bool;            # never removed by retention
  interrupt @4 :Bool;         # interrupt what runs rather than wait for it
  waitMs @5 :UInt64;          # for the kernel to come to rest; 0: a minute
  expectedVersion @6 :UInt64;
  kind @7 :Text;              # of the snapshot: `checkpoint`, or empty or `auto` for the richest that there is
  summary @8 :Text;           # what the journal shows in place of the messages that it compacts
  compact @9 :List(Span);     # those messages; executions and marks among them stay
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
  parent @7 :Text;            # where the kernel was before; empty: it is the first
  pinned @8 :Bool;
  restorePoint @9 :Bool;
  restoredAtMs @10 :Int64;    # 0: never
  version @11 :UInt64;        # the kernel's version with it
  manifest @12 :Text;         # content address
  files @13 :UInt64;          # files, folders and links of the workspace
  stateBytes @14 :UInt64;     # of the engine's state
  isHead @15 :Bool;           # the kernel is at it: taken or restored last
  step @16 :UInt32;           # the newest step then; 0: there was none
  stepName @17 :Text;
  agent @18 :Text;            # who worked then; empty: nobody was named
  summary @19 :Text;
  compacted @20 :UInt64;      # messages that it compacted
}

struct Difference {
  area @0 :Area;
  deed @1 :Deed;
  name @2 :Text;              # a state entry's key (`var/x`), a path, a server's name
  before @3 :Text;            # bounded; of what was renamed: its name before
  after @4 :Text;             # bounded
  what @5 :List(Text);        # of a file: `content`, `mode`, `owner`, `links`, `time`, `kind`
}

enum Area {
  state @0; file @1; mount @2; mcp @3; journal @4; step @5; agent @6; decision @7; artifact @8; tool @9; limit @10; size @11;
}
enum Deed { added @0; removed @1; changed @2; renamed @3; }

struct Restoration {
  checkpoint @0 :Checkpoint;  # what was restored
  safety @1 :Text;            # the checkpoint that was taken just before
  version @2 :UInt64;         # the kernel's version now
  missed @3 :List(MissedEntry); # what the checkpoint never held, and what could not be built again
  filesChanged @4 :UInt64;    # files and folders that were made, changed or removed; a folder that came or went whole is one
  fromMemory @5 :Bool;        # the engine came back from a copy in memory, with everything that it held; else from its saved state
  whyNotMemory @6 :Text;      # empty: it came from memory, or its engine keeps no copies
  decisionsChanged @7 :UInt32; # marked superseded, or that mark taken back
  artifactsChanged @8 :UInt32; # that have one more version
}

struct Patch {
  # One file, or the next part of it.
  path @0 :Data;
  deed @1 :Deed;
  before @2 :Data;            # its name before, if it was renamed
  note @3 :Text;              # why there is no text: `binary`, `too large`, or what it is instead of a file; empty: there is
  text @4 :Data;              # of a unified diff, as the files have it: not to be sent to a terminal as it is
  more @5 :Bool;              # more of this file follows
}

struct Workflow {
  steps @0 :List(Step);       # the newest last
  agent @1 :Text;             # who works; empty: nobody was named
}

struct Step {
  index @0 :UInt32;           # from 1
  name @1 :Text;
  agent @2 :Text;             # who worked when it was begun
  begunAtMs @3 :Int64;
  completedAtMs @4 :Int64;    # 0: it is the current step
}

struct Decision {
  id @0 :UInt64;              # counts the kernel's decisions from 1
  title @1 :Text;
  text @2 :Text;
  state @3 :DecisionState;
  agent @4 :Text;             # who worked when it was opened
  step @5 :UInt32;            # the newest step then; 0: there was none
  openedBy @6 :Text;
  openedAtMs @7 :Int64;
  lockedBy @8 :Text;
  lockedAtMs @9 :Int64;       # 0: it was not
  supersededBy @10 :Text;
  supersededAtMs @11 :Int64;  # 0: it is not
}

enum DecisionState { open @0; locked @1; superseded @2; }

struct ArtifactSource {
  union {
    hash @0 :Text;            # a blob that the kernel may read
    path @1 :Data;            # a file of the workspace, as it is now
  }
}

struct Artifact {
  name @0 :Text;
  version @1 :UInt32;         # from 1
  hash @2 :Text;              # empty: withdrawn, for a restore led to where it did not exist
  bytes @3 :UInt64;
  contentType @4 :Text;
  putBy @5 :Text;
  atMs @6 :Int64;
  revertsTo @7 :UInt32;       # the version whose content it brought back; 0: its content is its own
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
  rights @14 :List(Right);    # of the capability that was asked
  origin @15 :Origin;
  threadOf @16 :Text;         # id of the kernel whose workspace this one works in; empty: its own
  capture @17 :Text;          # how its files are captured: the driver, and why no better one
}

struct Origin {
  # How the present state came to be. The code inside finds the kind in RYOKAN_ORIGIN, the generation in RYOKAN_GENERATION.
  kind @0 :Text;              # `original`, `restored`, `forked`
  kernel @1 :Text;            # id of the kernel that it was forked from; empty: none
  name @2 :Text;              # what that one was called then
  checkpoint @3 :Text;        # at which of its checkpoints
  restored @4 :Text;          # the checkpoint that was restored last; empty: none
}

struct ForkRequest {
  name @0 :Text;              # of the child; of several: what their names begin with, `-1`, `-2` and so on follow
  from @1 :Text;              # a checkpoint of this kernel; empty: as it is now
  count @2 :UInt32 = 1;
  interrupt @3 :Bool;         # interrupt what runs rather than wait for it
  waitMs @4 :UInt64;          # for the kernel to come to rest; 0: a minute
  expectedVersion @5 :UInt64;
  key @6 :Text;               # the same key within 24 hours gives the same children
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
struct HostInfo { id @0 :Text; name @1 :Text; version @2 :Text; arch @3 :Text; engines @4 :List(Text); }
struct Ability { name @0 :Text; present @1 :Bool; detail @2 :Text; hint @3 :Text; required @4 :Bool; }

struct PoolInfo {
  # Workers of one engine, with the same bounds and rights, that wait for kernels.
  engine @0 :Text;
  memoryBytes @1 :UInt64;
  net @2 :Text;
  uid @3 :UInt32;             # whose rights they have on the host
  poolSize @4 :UInt32;        # how the configuration wants them
  maxPoolSize @5 :UInt32;
  minIdle @6 :UInt32;
  target @7 :UInt32;          # idle ones that are wanted now
  total @8 :UInt32;           # in creation, idle, and those that kernels have
  idle @9 :UInt32;
  creating @10 :UInt32;
  active @11 :UInt32;         # kernels have them
  totalCreated @12 :UInt64;   # since the pool began
  totalDestroyed @13 :UInt64;
  totalExecutions @14 :UInt64;
  creationErrors @15 :UInt64;
  taken @16 :UInt64;          # given to kernels
  missed @17 :UInt64;         # kernels that came when none was ready
  trouble @18 :Text;          # why the last creation failed; empty: it did not
  triesAgainInMs @19 :UInt64; # with trouble: when the next creation is tried; 0: as soon as one is wanted
  refused @20 :UInt64;        # kernels that waited for a worker and got none
  cpuMilli @21 :UInt32;       # thousandths of a processor that each may use
  pids @22 :UInt32;           # processes and threads of each
}

struct Event { sequence @0 :UInt64; atMs @1 :Int64; kernel @2 :Text; kind @3 :Text; detailJson @4 :Text; }

struct JournalEntry {
  sequence @0 :UInt64;
  atMs @1 :Int64;
  kind @2 :Text;              # execution, message, mark; checkpoint, where one stands for what it compacted
  actor @3 :Text;
  execId @4 :UInt64;          # 0 if it is no execution
  text @5 :Text;              # code, message or mark
  status @6 :Text;            # an ExecStatus by name, or running
  code @7 :Int32;
  err @8 :Text;
  durationUs @9 :UInt64;
  outputBytes @10 :UInt64;    # kept
  truncatedBytes @11 :UInt64;
}

enum Right { read @0; execute @1; write @2; checkpoint @3; restore @4; fork @5; teleport @6; admin @7; }

struct Error { code @0 :ErrorCode; message @1 :Text; hint @2 :Text; reason @3 :Text; }
# The JSON object in an exception's text has these fields, `code` by its name.

enum ErrorCode {
  invalidArgument @0; notFound @1; alreadyExists @2; conflict @3; refused @4; busy @5; unsupported @6; departed @7; lost @8;
  corrupt @9; deadline @10; unavailable @11; internal @12;
}
