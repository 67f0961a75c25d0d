//! Every bound in ryokan, named once. A queue, message, file or wait without a line here is a defect.

use std::time::Duration;

/// Kernels of one daemon, live or not.
pub const KERNELS: usize = 20_000;
/// Clients connected at once to one daemon.
pub const CLIENTS: usize = 2_000;
/// Clients of one user of a system-wide daemon.
pub const CLIENTS_PER_USER: usize = 500;
/// Clients that are being told that there is no place for them; one more is disconnected without a word.
pub const CLIENTS_REFUSED: usize = 64;
/// A client that is told so must have left within this.
pub const CLIENT_REFUSAL: Duration = Duration::from_secs(2);
/// Longest kernel name in bytes: its socket path must fit the 108 bytes of `sockaddr_un`.
pub const NAME_BYTES: usize = 64;
/// Longest path in a request, bytes (the host's own `PATH_MAX`).
pub const PATH_BYTES: usize = 4096;
/// Longest label, tool or variable name, bytes.
pub const IDENTIFIER_BYTES: usize = 256;
/// Labels of one kernel.
pub const LABELS: usize = 64;
/// Mounts of one kernel.
pub const MOUNTS: usize = 64;
/// Longest code of one execution, bytes.
pub const CODE_BYTES: usize = 8 << 20;
/// Environment of one execution, bytes in all.
pub const ENV_BYTES: usize = 256 << 10;
/// Standard input that travels inside a request; more goes through `Execution.stdin`.
pub const STDIN_INLINE_BYTES: usize = 8 << 20;
/// Executions waiting in one kernel behind the one that runs; one more is `Busy`.
pub const EXECUTIONS_QUEUED: usize = 256;
/// Finished executions whose handles a kernel's task keeps in memory.
pub const EXECUTIONS_REMEMBERED: usize = 64;
/// Executions of one kernel that have ended and whose journal has no room for it; while there are as many, no more are run.
/// One less than what a worker remembers.
pub const ENDS_UNJOURNALLED: usize = EXECUTIONS_UNACKNOWLEDGED - 1;
/// How often a journal that refused an end is offered it again.
pub const JOURNAL_RETRY: Duration = Duration::from_secs(2);
/// Part of the disk that is kept back for the day on which the rest is full, bytes.
pub const RESERVE_BYTES: u64 = 2 << 20;
/// How often it is looked at.
pub const RESERVE_INTERVAL: Duration = Duration::from_secs(10);
/// Output of a finished execution whose handle is kept in memory, bytes; of larger ones the journal is asked.
pub const OUTPUT_REMEMBERED_BYTES: u64 = 64 << 10;
/// Requests waiting for one kernel's task; one more is `Busy`.
pub const KERNEL_REQUESTS: usize = 1024;
/// Output that the journal keeps of one execution by default, bytes; what is beyond is counted, not kept.
pub const OUTPUT_KEPT_BYTES: u64 = 4 << 20;
/// Output that the journal may be asked to keep of one execution, bytes: a result with it is one message, and still one that
/// every reader takes.
pub const OUTPUT_KEPT_MOST_BYTES: u64 = 48 << 20;
/// Output of background jobs that one event shows, bytes.
pub const BACKGROUND_SHOWN_BYTES: usize = 4096;
/// Output of one execution that sits in the journal's row itself; more becomes an object in the store.
pub const OUTPUT_INLINE_BYTES: usize = 16 << 10;
/// One chunk of a stream, bytes.
pub const CHUNK_BYTES: usize = 1 << 20;
/// An execution that is over within this time, having written at most [`OUTPUT_GATHERED_BYTES`], is told in one message. So long may
/// the first output of any other be held back.
pub const OUTPUT_GATHERED_FOR: Duration = Duration::from_millis(2);
/// See [`OUTPUT_GATHERED_FOR`], bytes.
pub const OUTPUT_GATHERED_BYTES: u64 = 32 << 10;
/// Output that a worker holds while no daemon listens, bytes; then the code waits.
pub const OUTPUT_BUFFER_BYTES: usize = 4 << 20;
/// Executions that a worker remembers because their end was not acknowledged; one more is `Busy`.
pub const EXECUTIONS_UNACKNOWLEDGED: usize = 8;
/// What jobs write between executions and nobody has taken yet, bytes; then they wait.
pub const BACKGROUND_BUFFER_BYTES: usize = 256 << 10;
/// Frames on their way from init to an engine that does not read them, bytes; one more ends it.
pub const ENGINE_QUEUE_BYTES: usize = 64 << 20;
/// Calls of dynamic tools that one engine has open at once.
pub const TOOL_CALLS: usize = 64;
/// Requests that one engine has open at once.
pub const ENGINE_REQUESTS: usize = 64;
/// An engine's list of jobs or of what it does not capture, bytes.
pub const ENGINE_LIST_BYTES: usize = 4 << 20;
/// The largest message on the execution channel between daemon and init, bytes. A start or an end that is larger goes as a call.
pub const EXEC_CHANNEL_BYTES: usize = 64 << 10;
/// Calls of the daemon that wait for init's event loop.
pub const WORKER_CALLS: usize = 256;
/// Connections that a worker's private socket has open at once.
pub const WORKER_CONNECTIONS: usize = 8;
/// Descriptors that a worker holds for calls that were announced and have not come: all that a kernel brings to a worker that was ready, and
/// its execution channel.
pub const WORKER_DESCRIPTORS: usize = MOUNTS + 3;
/// Output event queue of one client's callback, chunks in flight.
pub const OUTPUT_IN_FLIGHT: usize = 8;
/// One value in its JSON form, bytes; larger data is a blob.
pub const VALUE_BYTES: usize = 8 << 20;
/// Nesting of a value.
pub const VALUE_DEPTH: usize = 100;
/// Items of one list in a message that has no narrower bound: an array, an object, rows, variables.
pub const VALUE_ITEMS: usize = 1_000_000;
/// Columns of one table of output.
pub const OUTPUT_COLUMNS: usize = 4096;
/// JSON part of a frame between init and engine, bytes.
pub const FRAME_JSON_BYTES: usize = 16 << 20;
/// Values, rows, cells and fields in the JSON part of one frame: a text of 16 MiB could hold so many that they would take
/// hundreds of MiB.
pub const FRAME_PARTS: usize = 500_000;
/// Bytes of a `display`'s media type.
pub const MEDIA_TYPE_BYTES: usize = 255;
/// Pieces of output that a running execution keeps for its journal; what comes in more of them counts as beyond its limit.
pub const OUTPUT_KEPT_ITEMS: usize = 64 << 10;
/// Tail of a frame between init and engine, bytes.
pub const FRAME_TAIL_BYTES: usize = 1 << 20;
/// One Cap'n Proto message, in 8-byte words (64 MiB): the reader's limit.
pub const MESSAGE_WORDS: usize = 8 << 20;
/// The same for a client that has not said hello, in 8-byte words (64 KiB).
pub const HELLO_WORDS: usize = 8 << 10;
/// A blob in one message (`readBlob`, `writeBlob`), bytes; larger ones stream.
pub const BLOB_INLINE_BYTES: usize = 32 << 20;
/// One blob, bytes.
pub const BLOB_BYTES: u64 = 64 << 30;
/// A checkpoint's manifest, or its list of engine state, bytes.
pub const MANIFEST_BYTES: usize = 64 << 20;
/// A checkpoint's name, bytes.
pub const CHECKPOINT_NAME_BYTES: usize = 255;
/// A checkpoint's description, bytes.
pub const CHECKPOINT_DESCRIPTION_BYTES: usize = 64 << 10;
/// Checkpoints that ryokan took by itself and keeps, the newest of each kernel, unless it is told otherwise.
pub const DEFAULT_CHECKPOINTS_KEPT: u32 = 20;
/// How long it keeps them, unless it is told otherwise.
pub const DEFAULT_CHECKPOINTS_KEPT_FOR: Duration = Duration::from_secs(90 * 86_400);
/// Steps of one kernel.
pub const STEPS: u32 = 4096;
/// Decisions of one kernel.
pub const DECISIONS: u64 = 4096;
/// Artifacts of one kernel.
pub const ARTIFACTS: u64 = 4096;
/// Versions of one artifact.
pub const ARTIFACT_VERSIONS: u32 = 65_536;
/// The name of a step, agent or artifact, or a decision's title, bytes.
pub const RECORD_NAME_BYTES: usize = 255;
/// A decision's text, a hand-over's note or a checkpoint's summary, bytes.
pub const RECORD_TEXT_BYTES: usize = 64 << 10;
/// Messages that one checkpoint compacts.
pub const COMPACTED_MESSAGES: u64 = 65_536;
/// Ranges of messages that one checkpoint compacts.
pub const COMPACTED_SPANS: usize = 1024;
/// What one difference shows of a value, characters.
pub const DIFF_SHOWN_CHARS: usize = 200;
/// A file whose content a comparison shows, bytes; of a larger one it only says so.
pub const DIFF_TEXT_BYTES: u64 = 4 << 20;
/// Lines of such a file.
pub const DIFF_TEXT_LINES: usize = 200_000;
/// How long the comparison of two files may look for the shortest difference; then it takes a longer one.
pub const DIFF_TEXT_TIME: Duration = Duration::from_millis(500);
/// Paths that a comparison of contents is limited to.
pub const DIFF_PATHS: usize = 1024;
/// A path within a workspace, as a comparison of contents tells it, bytes: deeper than a path may be in a request.
pub const PATCH_PATH_BYTES: usize = 4 << 20;
/// Differences of files that wait for who asked.
pub const DIFF_BEHIND: usize = 256;
/// How long a checkpoint waits for what runs, unless it is told another time.
pub const CHECKPOINT_WAIT: Duration = Duration::from_secs(60);
/// Copies of one Python engine that stand still in memory, each for a checkpoint: the newest, and while one is restored the safety
/// checkpoint's beside it.
pub const COPIES: usize = 3;
/// Copies that are gone of which a worker remembers why.
pub const COPIES_REMEMBERED: usize = 64;
/// A copy must have woken within this, or the saved state is used.
pub const COPY_WAKES: Duration = Duration::from_secs(2);
/// Memory that the copies of one engine may take by default, bytes.
pub const ROLLBACK_BYTES: u64 = 256 << 20;
/// How long a stop waits for the checkpoint before it.
pub const REST_CHECKPOINT: Duration = Duration::from_secs(10);
/// The same at the daemon's stop, where many wait for their turn; no more than half of what that stop may take.
pub const REST_CHECKPOINT_DAEMON: Duration = Duration::from_secs(30);
/// The same for a forced stop.
pub const REST_CHECKPOINT_FORCED: Duration = Duration::from_secs(3);
/// Kernels that are checkpointed at once before they stop.
pub const REST_CHECKPOINTS: usize = 8;
/// Children of one fork.
pub const FORK_CHILDREN: usize = 256;
/// Copies of kernels' files that are kept ready for their next fork, unless it is told otherwise.
pub const SPARES: usize = 4;
/// No more than that.
pub const SPARES_MOST: usize = 256;
/// One is made of so many files, folders and links ...
pub const SPARE_WORTH_ENTRIES: u64 = 256;
/// ... or of so many bytes: fewer are copied soon enough ...
pub const SPARE_WORTH_BYTES: u64 = 16 << 20;
/// ... if so many times as much is free on the disk.
pub const SPARE_ROOM: u64 = 10;
/// No more entries than that: what is known of each stays in memory.
pub const SPARE_ENTRIES: u64 = 1 << 18;
/// A file of a spare that is so large is looked at when the spare is taken: somebody who makes room may have emptied it.
pub const SPARE_WORTH_A_LOOK_BYTES: u64 = 256 << 10;
/// For how long none is made after one could not be.
pub const SPARE_AFTER_FAILURE: Duration = Duration::from_secs(600);
/// It goes when so many times as much is not free any more ...
pub const SPARE_ROOM_LEAST: u64 = 5;
/// ... which is looked at this often ...
pub const SPARE_LOOK: Duration = Duration::from_secs(30);
/// ... or when nobody took it for so long.
pub const SPARE_KEPT: Duration = Duration::from_secs(3600);
/// Children of one fork that are made at the same time.
pub const FORKS_AT_ONCE: usize = 4;
/// A piece of a kernel's file, bytes.
pub const BUNDLE_PIECE_BYTES: usize = 256 << 10;
/// Pieces of a file between client and reader or writer.
pub const BUNDLE_PIECES_WAITING: usize = 4;
/// What a file says first, bytes.
pub const BUNDLE_HEAD_BYTES: usize = 64 << 20;
/// Checkpoints of one file.
pub const BUNDLE_CHECKPOINTS: usize = 10_000;
/// Objects of one file.
pub const BUNDLE_OBJECTS: u64 = 20_000_000;
/// What the objects of one file hold, bytes.
pub const BUNDLE_BYTES: u64 = 1 << 40;
/// Files that are written or read at once.
pub const BUNDLES_AT_ONCE: usize = 4;
/// Engine state as one message (`snapshot`, `restore`), bytes.
pub const STATE_INLINE_BYTES: usize = 32 << 20;
/// Engine state of one kernel, all entries, bytes.
pub const STATE_BYTES: u64 = 4 << 30;
/// State entries of one kernel.
pub const STATE_ENTRIES: usize = 100_000;
/// Events that one subscriber may lag before it is told of a gap.
pub const EVENTS_BEHIND: usize = 4096;
/// Events kept in the catalog.
pub const EVENTS_KEPT: u64 = 100_000;
/// MCP servers of one kernel.
pub const MCP_SERVERS: usize = 32;
/// Arguments, environment variables or headers of one MCP server.
pub const MCP_ITEMS: usize = 1024;
/// Idempotency keys are remembered this long.
pub const KEY_LIFE: Duration = Duration::from_secs(24 * 3600);
/// Idempotency key, bytes.
pub const KEY_BYTES: usize = 256;

/// A worker must have reported a complete sandbox and a ready engine within this.
pub const WORKER_START: Duration = Duration::from_secs(30);
/// Workers that are started at once.
pub const WORKER_STARTS: usize = 8;
/// The most that a configuration may set for that.
pub const WORKER_STARTS_MOST: usize = 1000;
/// Who wants a worker waits so long for his turn.
pub const WORKER_WAIT: Duration = Duration::from_secs(60);
/// A daemon that starts waits so long for the lock of one that was killed.
pub const LOCK_WAIT: Duration = Duration::from_millis(500);
/// A daemon that ends waits so long until its last events are written.
pub const EVENTS_WRITTEN: Duration = Duration::from_secs(2);
/// A change of a kernel's state that nobody waits for is saved after this, with what changed meanwhile.
pub const LIFE_SAVED: Duration = Duration::from_millis(5);
/// From the word to a slot's engine that it has a kernel to its answer: it enters a folder and learns some variables.
pub const WORKER_BINDING: Duration = Duration::from_secs(5);
/// A running worker must answer its re-adoption within this.
pub const WORKER_ADOPT: Duration = Duration::from_secs(10);
/// An engine that was interrupted must have stopped within this, or is killed.
pub const INTERRUPT_GRACE: Duration = Duration::from_secs(5);
/// A worker says within this what it uses, or that is shown as unknown.
pub const USAGE_ANSWER: Duration = Duration::from_secs(2);
/// Workers that are asked what they use at the same time, for a list.
pub const WORKERS_ASKED: usize = 32;
/// A worker that was asked to end saves and exits within this, or is killed.
pub const WORKER_STOP: Duration = Duration::from_secs(10);
/// An engine must answer a request other than code within this, or is killed.
pub const ENGINE_ANSWER: Duration = Duration::from_secs(60);
/// An engine that closed its control socket must have ended within this, or is killed.
pub const ENGINE_HANG_UP: Duration = Duration::from_secs(3);
/// A worker whose engine died waits this long for its daemon to take the last news.
pub const WORKER_LINGER: Duration = Duration::from_secs(5);
/// A worker looks for the first time at what it uses after code has run this long.
pub const WATCH_INTERVAL: Duration = Duration::from_millis(20);
/// While no code runs a worker looks as often as this whether anything has run nevertheless.
pub const WATCH_QUIET: Duration = Duration::from_secs(10);
/// A worker must answer a call of its daemon within this.
pub const WORKER_CALL: Duration = Duration::from_secs(120);
/// The daemon's orderly stop.
pub const DAEMON_DRAIN: Duration = Duration::from_secs(60);
/// A worker whose daemon is gone lives this long.
pub const ORPHAN_GRACE: Duration = Duration::from_secs(600);
/// An MCP server must answer a call within this.
pub const MCP_CALL: Duration = Duration::from_secs(300);
/// An MCP server must have started within this.
pub const MCP_START: Duration = Duration::from_secs(30);
/// One message in the journal, bytes.
pub const MESSAGE_BYTES: usize = 1 << 20;
/// Longest lease.
pub const LEASE_MOST: Duration = Duration::from_secs(24 * 3600);
/// Client connections must have said hello within this.
pub const CLIENT_HELLO: Duration = Duration::from_secs(10);
/// The command line waits so long for a daemon that is about to end: a little more than that takes by itself.
pub const DAEMON_ENDS: Duration = Duration::from_secs(75);
/// A daemon that the command line starts must answer within this.
pub const DAEMON_START: Duration = Duration::from_secs(20);
/// A client waits this long for an answer that does not wait for code, files or a worker's end.
pub const CLIENT_CALL: Duration = Duration::from_secs(120);

/// Crashes within [`BREAKER_WINDOW`] that open a kernel's circuit breaker.
pub const BREAKER_CRASHES: usize = 3;
/// See [`BREAKER_CRASHES`].
pub const BREAKER_WINDOW: Duration = Duration::from_secs(60);
/// First pause before a crashed worker is started again; doubles with each crash in the window.
pub const RESTART_BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// Longest such pause.
pub const RESTART_BACKOFF_MAX: Duration = Duration::from_secs(10);

/// Default memory of a kernel, bytes.
pub const DEFAULT_MEMORY_BYTES: u64 = 512 << 20;
/// Default processors of a kernel, thousandths.
pub const DEFAULT_CPU_MILLI: u32 = 1000;
/// Default processes of a kernel.
pub const DEFAULT_PIDS: u32 = 256;
/// Default open files of one process.
pub const DEFAULT_OPEN_FILES: u32 = 1024;
/// The fewest open files of one process that a kernel may have.
pub const LEAST_OPEN_FILES: u32 = 32;
/// The same for bash, whose driver takes descriptors up to 255 and places them from 256 on.
pub const BASH_OPEN_FILES: u32 = 320;
/// Default size of a workspace, bytes.
pub const DEFAULT_WORKSPACE_BYTES: u64 = 10 << 30;
/// Default idle time before a kernel is stopped.
pub const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// Requests waiting for one database thread; one more is `Busy`.
pub const DATABASE_REQUESTS: usize = 4096;
/// Requests that share one transaction.
pub const DATABASE_BATCH: usize = 64;
/// A write up to this is small: whoever wants it may do it himself when the database's thread is at rest, bytes.
pub const SMALL_WRITE_BYTES: usize = 64 << 10;
/// Text of one page of a journal, bytes; a page has one entry at least.
pub const JOURNAL_PAGE_BYTES: usize = 1 << 20;
/// Threads for the kernels' state databases.
pub const STATE_THREADS: usize = 2;
/// State databases that one thread keeps open; beyond, the least recently used one is closed.
pub const STATE_DATABASES_OPEN: usize = 1024;
/// Databases up to this size are checked whole whenever they are opened, bytes.
pub const DATABASE_CHECKED_BYTES: u64 = 1 << 20;
/// A write-ahead log beyond this is moved into its database in the next quiet moment, bytes.
pub const WAL_BYTES: u64 = 2 << 20;
/// Beyond this it is moved even while requests wait, bytes.
pub const WAL_MOST_BYTES: u64 = 16 << 20;
/// Rows of one page of a journal, of events or of the audit log.
pub const PAGE_ROWS: usize = 1000;
/// Store operations at once.
pub const STORE_OPERATIONS: usize = 4;
/// Threads that hash and compress for one batch, or read for one restore.
pub const STORE_THREADS: usize = 4;
/// Bytes of one batch that wait to be compressed; beyond, who brings more compresses too.
pub const STORE_QUEUE_BYTES: usize = 4 << 20;
/// Bytes that wait beyond which other threads begin to compress.
pub const STORE_BESIDE_BYTES: usize = 512 << 10;
/// Lists of chunks that wait for their chunks to be written.
pub const STORE_LISTS: usize = 1024;
/// An object up to this is one chunk, bytes; a larger one is cut where its content says.
pub const STORE_WHOLE_BYTES: usize = 512 << 10;
/// Smallest chunk of a larger object but its last, bytes. This and the next two are part of the format: with others, what is
/// there would not be found again.
pub const STORE_CHUNK_LEAST_BYTES: usize = 128 << 10;
/// What chunks are like on the average, bytes.
pub const STORE_CHUNK_MEAN_BYTES: usize = 512 << 10;
/// Largest chunk, bytes.
pub const STORE_CHUNK_MOST_BYTES: usize = 1 << 20;
/// One entry of a pack, bytes: the list of the chunks of the largest object is less.
pub const STORE_ENTRY_BYTES: u64 = 64 << 20;
/// A pack that would become larger is full, bytes.
pub const STORE_PACK_BYTES: u64 = 64 << 20;
/// Entries of one pack.
pub const STORE_PACK_ENTRIES: usize = 64 << 10;
/// Packs that the store keeps open for reading.
pub const STORE_PACKS_OPEN: usize = 64;
/// Packs that one reader keeps open, so that it can go on when they are removed.
pub const STORE_READER_PACKS: usize = 64;
/// Entries that no index file has yet; then one is written.
pub const STORE_INDEX_FRESH: usize = 64 << 10;
/// Objects that were lately written or used again, which the store remembers one by one.
pub const STORE_TOUCHED: usize = 256 << 10;
/// How long garbage collection leaves alone what was lately written or used again, unless it is told otherwise.
pub const STORE_GRACE: Duration = Duration::from_secs(600);
/// Longest time for which garbage collection leaves alone what was lately written or used again.
pub const STORE_GRACE_MOST: Duration = Duration::from_secs(24 * 3600);
/// Objects that one collection of garbage can tell from garbage: beyond, it removes nothing.
pub const GC_OBJECTS: usize = 32 << 20;
/// How often a checkpoint's manifest is made, if work is recorded beside it each time.
pub const SEAL_TRIES: u32 = 5;
/// Who exports or imports a file takes or gives a piece within this, or it comes to nothing.
pub const BUNDLE_PIECE_TAKEN: Duration = Duration::from_secs(60);
/// Manifests that the reader of a file holds, bytes.
pub const BUNDLE_MANIFESTS_BYTES: u64 = 512 << 20;
/// Items of a collection of garbage, or of a verification, that wait for who asked.
pub const UPKEEP_BEHIND: usize = 256;
/// Who asked for a collection of garbage or a verification takes an item within this, or hears no more of it.
pub const UPKEEP_TAKEN: Duration = Duration::from_secs(30);
/// Bytes that one turn of background collection copies out of packs of which little lives, unless it is told otherwise.
pub const UPKEEP_TURN_BYTES: u64 = 256 << 20;
/// How often background upkeep has a turn, unless it is told otherwise.
pub const UPKEEP_INTERVAL: Duration = Duration::from_secs(600);
/// Turns of background collection that are left out while code runs; then one comes nevertheless.
pub const UPKEEP_PUT_OFF: u32 = 6;
/// How often the end of the audit log is kept in a file of its own.
pub const AUDIT_KEPT_EVERY: Duration = Duration::from_secs(10);
/// Lines about refusals that one user gets into the audit log in a minute; what is beyond is counted in the next.
pub const AUDIT_REFUSALS: u32 = 120;
/// Longest detail of a line of the audit log, bytes.
pub const AUDIT_DETAIL_BYTES: usize = 1024;
/// How long the opening of a store waits for its former owner to be gone.
pub const STORE_LOCK: Duration = Duration::from_secs(2);

/// A file up to this is part of its folder's object, bytes.
pub const TREE_INLINE_BYTES: usize = 256;
/// One piece of a file in the store, bytes.
pub const TREE_PIECE_BYTES: usize = 1 << 20;
/// Entries of one page of a folder; names usually end one sooner.
pub const TREE_PAGE_ENTRIES: usize = 1024;
/// One object of a tree other than a file's bytes: a page whose entries all have the largest extended attributes fits.
pub const TREE_OBJECT_BYTES: u64 = 256 << 20;
/// Removed and added files that a comparison of trees keeps in case they are renamed.
pub const TREE_DIFF_WAITING: usize = 65_536;
/// Files, folders and links of one workspace.
pub const WORKSPACE_ENTRIES: u64 = 8_000_000;
/// Folders within folders.
pub const WORKSPACE_DEPTH: u32 = 16_384;
/// Names that changed since a workspace was last captured; beyond, all of it is walked.
pub const WORKSPACE_CHANGES: usize = 262_144;
/// How often a file that changes is read again.
pub const WORKSPACE_READS: usize = 3;
/// Files that a pass over a workspace opens before it takes the notifications of that: fewer than the host queues.
pub const WORKSPACE_OPENED: usize = 2048;
/// Folders that a walk of a workspace holds open.
pub const WORKSPACE_OPEN: usize = 64;
/// Things that a capture names as not captured; of more, only the number is told.
pub const WORKSPACE_MISSING: usize = 10_000;
/// Files that are kept in memory or held by a driver while nobody writes, to be stored later; more are stored at once.
pub const WORKSPACE_KEPT: usize = 65_536;
/// Bytes of files that are kept in memory so.
pub const WORKSPACE_KEPT_BYTES: u64 = 32 << 20;
/// Entries of a workspace that was just made above which the clock's next tick is waited for, so that none is read again.
pub const WORKSPACE_WORTH_SETTLING: u64 = 1000;
/// Files up to so many bytes are sooner copied into a new workspace than cloned.
pub const WORKSPACE_CLONE_ABOVE: u64 = 16 << 10;
/// Clones that are held at once: each is an open file.
pub const WORKSPACE_CLONES: usize = 256;
/// Clones after which a snapshot is cheaper than more of them.
pub const WORKSPACE_CLONES_BEFORE_SNAPSHOT: usize = 64;
/// Files that a restore replaces and that go after it, bytes; beyond, each goes at once.
pub const WORKSPACE_REPLACED_BYTES: u64 = 64 << 20;
/// A saved index of a workspace, bytes; a larger one is not saved.
pub const WORKSPACE_INDEX_BYTES: u64 = 4 << 30;

/// Readers of metrics at once.
pub const METRICS_CONNECTIONS: usize = 16;
/// A reader of metrics that has not said what it wants, or not read it, is closed after this.
pub const METRICS_READ: Duration = Duration::from_secs(10);
/// Modules that Python loads in a worker which waits for its kernel.
pub const PRELOADED_MODULES: usize = 64;
/// Pools of one host, one for each shape of worker that is asked for.
pub const POOLS: usize = 64;
/// One that somebody came to within this makes no room for another.
pub const POOL_STAYS: Duration = Duration::from_secs(60);
/// So long a slot waits for the first use of the kernel that was made on its folder.
pub const POOL_PROMISE_KEPT: Duration = Duration::from_secs(10);
/// A slot that is ready and asked whether it is well answers within this, or another takes its place.
pub const POOL_ANSWER: Duration = Duration::from_secs(5);
/// For so long after a slot was taken no other is made.
pub const POOL_GIVES_WAY: Duration = Duration::from_millis(40);
/// The longest that this puts it off while slots are taken one after the other.
pub const POOL_GIVES_WAY_MOST: Duration = Duration::from_millis(250);
/// The spawner forks a worker within this, or another one takes its place.
pub const SPAWN: Duration = Duration::from_secs(10);
/// Memory is short when some task stood still for want of it so long ...
pub const PRESSURE_STALL: Duration = Duration::from_millis(150);
/// ... within this.
pub const PRESSURE_WINDOW: Duration = Duration::from_secs(2);
/// It counts as short for so long after that was heard last.
pub const PRESSURE_HOLD: Duration = Duration::from_secs(10);
/// Where the host kernel does not say so: it is looked at this often ...
pub const PRESSURE_LOOK: Duration = Duration::from_secs(5);
/// ... and short if less than this part of it can be had.
pub const PRESSURE_LEAST_FREE: f64 = 0.05;
/// While memory is short, a kernel that was not used for this long is one that nobody uses.
pub const PRESSURE_UNUSED: Duration = Duration::from_secs(5);
/// Kernels that are stopped at once, each time that memory is found short.
pub const PRESSURE_STOPS: usize = 16;
/// Slots of one pool, idle and in creation, at most.
pub const POOL_SLOTS: u32 = 256;
/// Slots of one pool that are in creation at the same time.
pub const POOL_CREATIONS: u32 = 4;
/// A slot must be ready within this after its creation began, or it is given up.
pub const POOL_CREATION: Duration = Duration::from_secs(30);
/// At the daemon's end, slots that do not end are left to their link after this.
pub const POOL_CLOSE: Duration = Duration::from_secs(5);
/// A pool's demand is measured by how many came for a slot within this.
pub const POOL_BURST: Duration = Duration::from_secs(2);
/// Shortest time that a rule of a pool can name.
pub const POOL_TIME_LEAST: Duration = Duration::from_secs(1);
/// Failures in a row that open a pool's breaker.
pub const POOL_FAILURES: u32 = 3;
/// First pause of an open breaker; doubles with each failure after it.
pub const POOL_BACKOFF_FIRST: Duration = Duration::from_millis(200);
/// Longest such pause.
pub const POOL_BACKOFF_MAX: Duration = Duration::from_secs(60);
/// An idle slot that dies within this after a failure is another failure of the same row, whatever was created in between.
pub const POOL_DOUBT: Duration = Duration::from_secs(60);
/// What a breaker keeps of the reason, bytes.
pub const POOL_REASON_BYTES: usize = 500;
/// Default number of idle slots while there is demand.
pub const DEFAULT_POOL_SIZE: u32 = 3;
/// Default bound of idle slots and slots in creation.
pub const DEFAULT_MAX_POOL_SIZE: u32 = 10;
/// Default number of idle slots while there is no demand.
pub const DEFAULT_MIN_IDLE: u32 = 2;
/// Default time without demand after which only those are kept.
pub const DEFAULT_MAX_IDLE_TIME: Duration = Duration::from_secs(300);
/// Default number of executions after which an idle slot is replaced.
pub const DEFAULT_MAX_EXEC_COUNT: u32 = 100;
/// Default age at which an idle slot is replaced.
pub const DEFAULT_MAX_UPTIME: Duration = Duration::from_secs(1800);
/// Default time after which a pool is looked at although nothing happened.
pub const DEFAULT_MAINTENANCE_INTERVAL: Duration = Duration::from_secs(30);
