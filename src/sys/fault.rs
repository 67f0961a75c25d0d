//! Fault injection: every durable operation passes a labelled point, where a test can kill the
//! process or make the operation fail.
//!
//! In builds with `debug_assertions` the environment variable [`VARIABLE`], `label[:n]=kill|eio|enospc|emfile|hold`, arms
//! one point for its n-th pass (default 1); several are separated by commas. `hold` blocks while the file named by
//! [`HOLD`] exists, and makes one with the extension `reached` beside it. In release builds a point is nothing at all.

use std::io;

/// The environment variable that arms a point.
pub const VARIABLE: &str = "RYOKAN_FAULT";
/// The environment variable that names the file of a `hold`.
pub const HOLD: &str = "RYOKAN_FAULT_HOLD";

/// The steps of a labelled operation. A point lies *before* each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steps {
    /// One step; the label itself is the point.
    One,
    /// A whole file: `.create`, `.sync`, `.rename`, `.sync_dir`.
    File,
    /// A rename: `.rename`, `.sync_dir`.
    Rename,
    /// A new directory: `.create`, `.sync_dir`.
    Dir,
    /// A removal: `.unlink`, `.sync_dir`.
    Remove,
    /// A transaction: `.before_commit`, and `.after_commit`, where only `kill` has an effect.
    Commit,
}

impl Steps {
    /// The suffixes that form points from a label.
    pub const fn suffixes(self) -> &'static [&'static str] {
        match self {
            Steps::One => &[""],
            Steps::File => &[".create", ".sync", ".rename", ".sync_dir"],
            Steps::Rename => &[".rename", ".sync_dir"],
            Steps::Dir => &[".create", ".sync_dir"],
            Steps::Remove => &[".unlink", ".sync_dir"],
            Steps::Commit => &[".before_commit", ".after_commit"],
        }
    }
}

/// One labelled durable operation.
#[derive(Debug, Clone, Copy)]
pub struct Label {
    /// The name, of three parts or more; used at exactly one place in the source.
    pub name: &'static str,
    /// Its steps.
    pub steps: Steps,
    /// What the operation does.
    pub doc: &'static str,
}

const fn label(name: &'static str, steps: Steps, doc: &'static str) -> Label {
    Label { name, steps, doc }
}

/// Every labelled operation. A test compares this table with the source.
pub const LABELS: &[Label] = &[
    label("catalog.audit.append", Steps::Commit, "adds lines to the audit log"),
    label("catalog.data.dir", Steps::Dir, "makes the directory of all kernels"),
    label("catalog.database.create", Steps::One, "names a new, empty database"),
    label("catalog.decision.rewrite", Steps::Commit, "writes the records of moves anew, after a failed sync"),
    label("catalog.events.append", Steps::Commit, "adds events and drops the oldest"),
    label("catalog.freeze.remove", Steps::Commit, "removes a freeze of a group"),
    label("catalog.freeze.seal", Steps::Commit, "makes a freeze of a group visible"),
    label("catalog.group.add", Steps::Commit, "adds a member to a group"),
    label("catalog.group.adopt", Steps::Commit, "makes an imported group visible with its freeze"),
    label("catalog.group.arrive", Steps::Commit, "creates a group with the intent of its import"),
    label("catalog.group.clear", Steps::Commit, "deletes the intent of a group's operation"),
    label("catalog.group.create", Steps::Commit, "creates a group"),
    label("catalog.group.drop", Steps::Commit, "removes a member of a group"),
    label("catalog.group.intent", Steps::Commit, "records the intent of a group's operation"),
    label("catalog.group.open", Steps::Commit, "records that the kernels of a group are resumed"),
    label("catalog.group.pause", Steps::Commit, "records that the kernels of a group are paused"),
    label("catalog.group.pins", Steps::Commit, "records checkpoints that are about to be pinned for a freeze"),
    label("catalog.group.progress", Steps::Commit, "records which member a restore changes next"),
    label("catalog.group.remove", Steps::Commit, "removes a group with its freezes"),
    label("catalog.group.restored", Steps::Commit, "records that a group's restore holds"),
    label("catalog.group.set", Steps::Commit, "sets what a failed freeze of a group does"),
    label("catalog.group.unpinned", Steps::Commit, "forgets checkpoints whose pins were lifted"),
    label("catalog.groupmove.advance", Steps::Commit, "records the decision about a group that moves, or its end"),
    label("catalog.groupmove.forget", Steps::Commit, "forgets a group's move that has ended"),
    label("catalog.groupmove.put", Steps::Commit, "records a group's move"),
    label("catalog.handover.activate", Steps::Commit, "activates a received kernel"),
    label("catalog.handover.forget", Steps::Commit, "forgets a handover that has ended"),
    label("catalog.handover.name", Steps::Commit, "records the target of a handover"),
    label("catalog.handover.put", Steps::Commit, "records a handover"),
    label("catalog.host.first", Steps::Commit, "creates the host's identity"),
    label("catalog.host.key", Steps::Commit, "records a key of this host"),
    label("catalog.kernel.insert", Steps::Commit, "records a new kernel"),
    label("catalog.kernel.remove", Steps::Commit, "forgets a kernel"),
    label("catalog.kernel.rename", Steps::Commit, "changes a kernel's name, also in its events"),
    label("catalog.kernel.touch", Steps::Commit, "records the use of a kernel"),
    label("catalog.kernel.update", Steps::Commit, "changes a kernel's record"),
    label("catalog.keys.forget", Steps::Commit, "drops expired idempotency keys"),
    label("catalog.keys.remember", Steps::Commit, "remembers an idempotency key"),
    label("catalog.schema.migrate", Steps::Commit, "migrates a database to the current format"),
    label("catalog.trust.add", Steps::Commit, "trusts a key"),
    label("catalog.trust.remove", Steps::Commit, "trusts a key no longer"),
    label("catalog.worker.put", Steps::Commit, "records a worker"),
    label("catalog.worker.remove", Steps::Commit, "forgets a worker"),
    label("database.files.replace", Steps::One, "replaces a missing or damaged database of a group"),
    label("engine.info.set", Steps::Commit, "records the writing engine"),
    label("engine.state.apply", Steps::Commit, "stores an execution's changes"),
    label("engine.state.replace", Steps::Commit, "replaces all engine state"),
    label("engine.state.revise", Steps::Commit, "makes engine state equal to that of a checkpoint"),
    label("freeze.groups.dir", Steps::Dir, "makes the folder for operations on groups"),
    label("freeze.import.kernel", Steps::One, "creates a kernel of an imported group"),
    label("freeze.import.place", Steps::Rename, "puts a repository of an imported group in its place"),
    label("freeze.import.seal", Steps::One, "seals the freeze of an imported group"),
    label("freeze.import.sync", Steps::One, "makes a repository of an imported group durable"),
    label("freeze.kept.dir", Steps::Dir, "makes the folder for copies of databases that others wrote"),
    label("freeze.member.prepare", Steps::One, "makes an inactive copy for a member of a group"),
    label("freeze.member.revert", Steps::One, "brings a member of a group back"),
    label("freeze.member.snapshot", Steps::One, "captures a member of a group"),
    label("freeze.member.store", Steps::One, "stores what was captured of a member of a group"),
    label("freeze.member.switch", Steps::One, "makes a member's restored copy the active one"),
    label("freeze.quiesced.clear", Steps::Remove, "removes the record of a data source that is resumed"),
    label("freeze.quiesced.dir", Steps::Dir, "makes the folder for records of quiesced data sources"),
    label("freeze.quiesced.record", Steps::File, "records a data source that is about to be quiesced"),
    label("handover.data.sync", Steps::One, "makes the records of a handover survive a loss of power"),
    label("host.audit.head", Steps::File, "keeps the end of the audit log beside it"),
    label("host.key.write", Steps::File, "makes the host's key, with which it signs"),
    label("kernel.engine.adopt", Steps::One, "gives a received kernel the engine.db that was written ahead"),
    label("kernel.engine.recreate", Steps::One, "gives a kernel an empty engine.db in place of its own"),
    label("kernel.files.adopt", Steps::Rename, "gives a received kernel's directory its name"),
    label("kernel.files.clear", Steps::One, "removes what a kernel that is put away does not keep"),
    label("kernel.files.dir", Steps::Dir, "makes a kernel's directory"),
    label("kernel.files.engine", Steps::One, "writes a kernel's empty engine.db"),
    label("kernel.files.hide", Steps::Rename, "hides a removed kernel's directory"),
    label("kernel.files.remove", Steps::One, "removes a hidden kernel directory"),
    label("kernel.files.state", Steps::One, "writes a kernel's empty state.db"),
    label("kernel.files.sync", Steps::One, "makes a new kernel's files durable"),
    label("kernel.worker.resume", Steps::One, "resumes the paused worker of a kernel"),
    label("kernel.worker.suspend", Steps::One, "pauses the worker of a kernel"),
    label("machine.checkpoint.stored", Steps::One, "seals a checkpoint whose machine was stored"),
    label("machine.copy.pages", Steps::One, "prepares to copy a machine by its changed pages"),
    label("machine.copy.save", Steps::One, "copies the disk of a stopped machine whose memory was saved"),
    label("machine.copy.seed", Steps::One, "seeds a copied machine"),
    label("machine.copy.split", Steps::One, "starts machines from a copy"),
    label("machine.install.done", Steps::One, "ends a restore whose machine was installed"),
    label("machine.installed.bound", Steps::One, "forgets what an installed machine was started from"),
    label("machine.installed.start", Steps::One, "continues an installed machine"),
    label("machine.restore.recorded", Steps::One, "ends the worker of a kernel that is restored with its machine"),
    label("machine.resume.pages", Steps::One, "loads a machine whose saved pages are in its memory"),
    label("machine.started.record", Steps::One, "records the monitor of a machine that was started"),
    label("machine.suspend.compare", Steps::One, "finds the memory of a saved machine as it was written"),
    label("machine.suspend.forget", Steps::Remove, "removes what was saved of a machine before it continues"),
    label("machine.suspend.pages", Steps::One, "prepares to save a machine by its changed pages"),
    label("machine.suspend.saved", Steps::One, "seals a machine whose changed pages were saved"),
    label("machine.suspend.seal", Steps::File, "describes a suspended machine whose memory was saved"),
    label("machine.template.boot", Steps::One, "boots the machine of a template that is rebuilt beside its use"),
    label("machine.template.exchange", Steps::Rename, "puts a new template in the place of another one"),
    label(
        "machine.template.proof",
        Steps::One,
        "proves that machines of a new template are copied by their changed pages",
    ),
    label("machine.template.publish", Steps::Rename, "gives a new template its name"),
    label("machine.warm.bound", Steps::One, "makes the disk of a warm machine the kernel's"),
    label("machine.warm.seed", Steps::One, "seeds a warm machine for its kernel"),
    label("repository.files.switch", Steps::One, "has git change the files of a repository"),
    label("repository.head.switch", Steps::One, "sets the commit of a repository"),
    label("repository.history.checkout", Steps::One, "checks out the history of an imported repository"),
    label("repository.index.switch", Steps::One, "puts a restored index into a repository"),
    label("source.command.restore", Steps::One, "runs the program that restores a command source"),
    label("source.directory.discard", Steps::One, "removes a copy beside a directory"),
    label("source.directory.switch", Steps::One, "exchanges a directory for its restored copy"),
    label("source.directory.switched", Steps::One, "compares an exchanged directory with what was captured"),
    label("source.postgres.switch", Steps::One, "names a restored PostgreSQL database"),
    label("source.postgres.switched", Steps::One, "ends the switch of a PostgreSQL database"),
    label("source.server.checkout", Steps::One, "fills a new data directory of a PostgreSQL server"),
    label("source.server.discard", Steps::One, "removes a copy of the data directory of a PostgreSQL server"),
    label("source.server.keep", Steps::One, "keeps a data directory that another program used during a restore"),
    label("source.server.snapshot", Steps::One, "ends the backup of a PostgreSQL server behind the snapshot"),
    label("source.server.start", Steps::One, "starts a PostgreSQL server after a restore"),
    label("source.server.stop", Steps::One, "stops a PostgreSQL server for a restore"),
    label("source.server.switch", Steps::One, "exchanges the data directory of a PostgreSQL server"),
    label("source.server.switched", Steps::One, "ends the switch of a PostgreSQL server"),
    label("state.blobs.grant", Steps::Commit, "grants a kernel access to blobs"),
    label("state.checkpoints.add", Steps::Commit, "makes a checkpoint visible"),
    label("state.checkpoints.pin", Steps::Commit, "pins or unpins a checkpoint"),
    label("state.checkpoints.prune", Steps::Commit, "removes checkpoints by retention"),
    label("state.checkpoints.remove", Steps::Commit, "removes a checkpoint on request"),
    label("state.checkpoints.withdraw", Steps::Commit, "removes a checkpoint of a freeze that failed"),
    label("state.consent.add", Steps::Commit, "records a consent"),
    label("state.decision.rewrite", Steps::Commit, "writes the record of a move anew, after a failed sync"),
    label("state.exec.begin", Steps::Commit, "records an execution before it starts"),
    label("state.exec.end", Steps::Commit, "closes an execution"),
    label("state.history.begin", Steps::Commit, "ends the import of a moved kernel's history"),
    label("state.history.import", Steps::Commit, "imports a page of a moved kernel's history"),
    label("state.journal.append", Steps::Commit, "adds messages or marks to the journal"),
    label("state.kernel.begin", Steps::Commit, "writes the first records of a kernel created from a checkpoint"),
    label("state.lease.release", Steps::Commit, "releases the lease"),
    label("state.lease.take", Steps::Commit, "takes or renews the lease"),
    label("state.mcp.put", Steps::Commit, "records an MCP server"),
    label("state.mcp.remove", Steps::Commit, "forgets an MCP server"),
    label("state.messages.add", Steps::Commit, "adds a message to the journal, once per key"),
    label("state.mounts.put", Steps::Commit, "records a mount"),
    label("state.mounts.remove", Steps::Commit, "forgets a mount"),
    label("state.restore.finish", Steps::Commit, "notes where a restore has led"),
    label("state.transition.abort", Steps::Commit, "records that a transition is reverted"),
    label("state.transition.begin", Steps::Commit, "records a transition's intent"),
    label("state.transition.clear", Steps::Commit, "deletes the record of a transition that has ended"),
    label("state.transition.commit", Steps::Commit, "records that a transition's outcome holds"),
    label("state.workflow.change", Steps::Commit, "changes a step, an agent, a decision or an artifact"),
    label("store.dropped.write", Steps::File, "lists dropped entries before their pack is removed"),
    label("store.format.write", Steps::File, "declares the store's format, after creating its directories"),
    label("store.index.remove", Steps::One, "removes a replaced index file"),
    label("store.index.write", Steps::File, "writes the index of full packs"),
    label("store.layout.dir", Steps::Dir, "makes the store's directory"),
    label("store.pack.create", Steps::One, "creates a pack"),
    label("store.pack.remove", Steps::One, "removes a pack whose entries were moved or dropped"),
    label("store.pack.seal", Steps::One, "writes the table of a full pack"),
    label("store.pack.sync", Steps::One, "makes a pack's entries durable"),
    label("store.pack.sync_dir", Steps::One, "makes the names of new packs durable"),
    label("store.pack.trim", Steps::One, "cuts off the incomplete end of a dead writer"),
    label("store.pack.write", Steps::One, "writes an entry"),
    label("store.part.dir", Steps::Dir, "makes one of the store's inner directories"),
    label("workspace.branch.empty", Steps::One, "removes the empty subvolume that a snapshot replaces"),
    label("workspace.branch.snapshot", Steps::One, "makes a workspace from a snapshot of another"),
    label("workspace.checkout.file", Steps::One, "makes a file of a new workspace"),
    label("workspace.checkout.folder", Steps::One, "makes a folder of a new workspace"),
    label("workspace.checkout.give", Steps::One, "clones or copies a file of a live workspace into a new one"),
    label("workspace.checkout.sync", Steps::One, "makes a new workspace durable"),
    label("workspace.clone.make", Steps::One, "makes a clone of a file that is read later"),
    label("workspace.file.keep", Steps::One, "reads a file into memory"),
    label("workspace.file.read", Steps::One, "reads a file into the store"),
    label("workspace.index.save", Steps::One, "saves the index of a workspace"),
    label("workspace.place.folder", Steps::One, "makes a folder in a workspace"),
    label("workspace.place.folder_meta", Steps::One, "sets a restored folder's mode and times"),
    label("workspace.place.meta", Steps::One, "changes mode and time of a file in its place"),
    label("workspace.place.remove", Steps::One, "removes an entry of a workspace"),
    label("workspace.place.rename", Steps::One, "moves a restored file into place"),
    label("workspace.place.sync", Steps::One, "makes a restored workspace durable"),
    label("workspace.snapshot.make", Steps::One, "takes a snapshot of a workspace's subvolume"),
    label("workspace.snapshot.remove", Steps::One, "removes a snapshot after reading it"),
    label("workspace.spare.make", Steps::One, "makes the folder of a prepared workspace"),
    label("workspace.spare.place", Steps::One, "moves a prepared workspace into place"),
    label("workspace.staging.clear", Steps::One, "removes the staging folder of a workspace"),
    label("workspace.staging.dir", Steps::Dir, "makes the folder where files are prepared"),
    label("workspace.staging.link", Steps::One, "adds a hard link to a prepared file"),
    label("workspace.staging.write", Steps::One, "writes a piece of a prepared file"),
];

/// Every point: label plus suffix.
pub fn points() -> impl Iterator<Item = (Label, String)> {
    LABELS
        .iter()
        .flat_map(|label| label.steps.suffixes().iter().map(|suffix| (*label, format!("{}{suffix}", label.name))))
}

/// Passes a point of one step.
///
/// # Errors
/// The armed error.
#[inline(always)]
pub fn point(label: &'static str) -> io::Result<()> {
    step(label, "")
}

/// Passes one step of a labelled operation.
///
/// # Errors
/// The armed error.
#[inline(always)]
pub fn step(label: &'static str, suffix: &'static str) -> io::Result<()> {
    #[cfg(any(debug_assertions, test))]
    return armed::pass(label, suffix);
    #[cfg(not(any(debug_assertions, test)))]
    {
        let _ = (label, suffix);
        Ok(())
    }
}

#[cfg(any(debug_assertions, test))]
pub use armed::{BadFault, Fault};

#[cfg(any(debug_assertions, test))]
mod armed {
    use std::io;
    use std::str::FromStr;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::{VARIABLE, points};

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Deed {
        Kill,
        Fail(i32),
        Hold,
    }

    /// An armed point.
    #[derive(Debug)]
    pub struct Fault {
        point: String,
        at_pass: u64,
        passes: AtomicU64,
        deed: Deed,
    }

    /// Texts that arm nothing.
    #[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
    #[error("{0:?} is no fault: expected LABEL[:N]=kill|eio|enospc|emfile|hold with a label of sys::fault::LABELS")]
    pub struct BadFault(String);

    impl FromStr for Fault {
        type Err = BadFault;
        fn from_str(text: &str) -> Result<Self, BadFault> {
            let wrong = || BadFault(text.to_owned());
            let (place, deed) = text.split_once('=').ok_or_else(wrong)?;
            let (point, pass) = place.split_once(':').unwrap_or((place, "1"));
            let deed = match deed {
                "kill" => Deed::Kill,
                "eio" => Deed::Fail(libc::EIO),
                "enospc" => Deed::Fail(libc::ENOSPC),
                "emfile" => Deed::Fail(libc::EMFILE),
                "hold" => Deed::Hold,
                _ => return Err(wrong()),
            };
            let at_pass = pass.parse().map_err(|_| wrong())?;
            if !points().any(|(_, name)| name == point) {
                return Err(wrong());
            }
            Ok(Fault { point: point.to_owned(), at_pass, passes: AtomicU64::new(0), deed })
        }
    }

    impl Fault {
        fn pass(&self, label: &str, suffix: &str) -> io::Result<()> {
            let here = self.point.strip_prefix(label).is_some_and(|rest| rest == suffix);
            if !here || self.passes.fetch_add(1, Ordering::Relaxed) + 1 != self.at_pass {
                return Ok(());
            }
            match self.deed {
                Deed::Kill => {
                    let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::Signal::SIGKILL);
                    unreachable!("SIGKILL to oneself returned")
                }
                Deed::Fail(errno) => Err(io::Error::from_raw_os_error(errno)),
                Deed::Hold => {
                    let file = std::env::var_os(super::HOLD).ok_or(io::ErrorKind::NotFound)?;
                    // A test that may not write there does not wait for it.
                    let _ = std::fs::write(std::path::Path::new(&file).with_extension("reached"), "");
                    while std::path::Path::new(&file).exists() {
                        std::thread::sleep(std::time::Duration::from_millis(10));
                    }
                    Ok(())
                }
            }
        }
    }

    fn of_environment() -> &'static [Fault] {
        static FAULTS: OnceLock<Vec<Fault>> = OnceLock::new();
        let read = || {
            let text = std::env::var(VARIABLE).unwrap_or_default();
            let faults = text.split(',').filter(|text| !text.is_empty());
            // A misspelt fault that silently arms nothing would let a crash test pass.
            faults.map(|fault| fault.parse().unwrap_or_else(|bad: BadFault| panic!("{VARIABLE}: {bad}"))).collect()
        };
        FAULTS.get_or_init(read)
    }

    pub(super) fn pass(label: &'static str, suffix: &'static str) -> io::Result<()> {
        #[cfg(test)]
        super::tests::pass_here(|fault| fault.pass(label, suffix))?;
        of_environment().iter().try_for_each(|fault| fault.pass(label, suffix))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::*;

    thread_local!(static HERE: RefCell<Option<Fault>> = const { RefCell::new(None) });

    pub(super) fn pass_here(pass: impl FnOnce(&Fault) -> io::Result<()>) -> io::Result<()> {
        HERE.with_borrow(|fault| fault.as_ref().map_or(Ok(()), pass))
    }

    /// Runs `work` with a fault armed for this thread only.
    pub(crate) fn with_fault<T>(fault: &str, work: impl FnOnce() -> T) -> T {
        HERE.set(Some(fault.parse().expect("a fault of the table")));
        let result = work();
        HERE.set(None);
        result
    }

    /// A directory for crash tests, in memory where possible: the remains of a killed process do
    /// not depend on the device, and hundreds of runs would wait for it.
    pub(crate) fn crash_dir() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory")
    }

    /// The outcome of a child that ran one test of this binary with a fault armed.
    pub(crate) struct Ran {
        /// The lines after `ack `, in order.
        pub(crate) acks: Vec<String>,
        /// The text after `fail `.
        pub(crate) failed: Option<String>,
        /// Whether it was killed.
        pub(crate) killed: bool,
        /// Its whole output.
        pub(crate) all: String,
    }

    /// Runs the test `name` of this binary in a process of its own, with a directory and optionally
    /// a fault. The test finds the directory in `RYOKAN_CRASH_DIR`; in an ordinary run the variable
    /// is unset and the test does nothing.
    pub(crate) fn run_child(name: &str, dir: &Path, fault: Option<&str>, extra: &[(&str, &str)]) -> Ran {
        let mut command = std::process::Command::new(std::env::current_exe().expect("this binary"));
        command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
        command.env("RYOKAN_CRASH_DIR", dir).env_remove(VARIABLE).envs(extra.iter().copied());
        if let Some(fault) = fault {
            command.env(VARIABLE, fault);
        }
        let output = command.output().expect("this binary runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // The harness prints before the test's first line without ending its own line.
        let after =
            |word: &str| text.lines().filter_map(|l| l.split_once(word).map(|(_, rest)| rest.to_owned())).collect();
        let failed: Vec<String> = after("fail ");
        let killed = std::os::unix::process::ExitStatusExt::signal(&output.status) == Some(libc::SIGKILL);
        assert!(killed || output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        Ran { acks: after("ack "), failed: failed.into_iter().next(), killed, all: text.clone() }
    }

    fn sources(dir: &Path, found: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(dir).expect("src is readable") {
            let path = entry.expect("src is readable").path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("sys/fault.rs") {
                let text = std::fs::read_to_string(&path).expect("source is text");
                // Tests may name any label; by convention they are at the bottom.
                let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().to_owned();
                if !path.file_name().is_some_and(|name| name.to_string_lossy().ends_with("tests.rs")) {
                    found.push((path.display().to_string(), text));
                }
            }
        }
    }

    /// Literals that look like a label: three or more lowercase parts, the first of a known label.
    fn labels_in(text: &str) -> Vec<&str> {
        let part = |p: &str| !p.is_empty() && p.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        text.split('"')
            .filter(|literal| literal.split('.').count() >= 3 && literal.split('.').all(part))
            .filter(|literal| {
                let family = literal.split('.').next();
                LABELS.iter().any(|label| label.name.split('.').next() == family)
            })
            .collect()
    }

    #[test]
    fn fault_labels_match_source() {
        let mut files = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
        let mut uses: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (path, text) in &files {
            for label in labels_in(text) {
                uses.entry(label).or_default().push(path);
            }
        }
        for (label, places) in &uses {
            assert!(LABELS.iter().any(|row| row.name == *label), "{label} in {places:?} is not in the table");
            assert_eq!(places.len(), 1, "{label} is used at {places:?}: a label names one place");
        }
        for row in LABELS {
            assert!(uses.contains_key(row.name), "{} is in the table and nowhere in the source", row.name);
            assert!(!row.doc.is_empty());
        }
        let names: Vec<_> = LABELS.iter().map(|row| row.name).collect();
        assert!(names.is_sorted(), "the table is sorted");
    }

    #[test]
    fn faults_are_parsed_strictly() {
        for good in ["store.pack.write=eio", "catalog.kernel.insert.before_commit:3=kill"] {
            assert!(good.parse::<Fault>().is_ok(), "{good}");
        }
        for bad in ["", "store.pack.write", "store.pack.write=no", "no.such.label=eio", "store.pack.write:x=eio"] {
            assert!(bad.parse::<Fault>().is_err(), "{bad}");
        }
    }

    #[test]
    fn fault_fires_at_nth_pass() {
        with_fault("store.pack.write:2=enospc", || {
            assert!(point("store.pack.write").is_ok());
            let error = point("store.pack.write").expect_err("armed");
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
            assert!(point("store.pack.write").is_ok());
        });
        assert!(point("store.pack.write").is_ok());
    }
}
