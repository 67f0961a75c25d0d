//! The content of a user's SQLite database at one moment, held while other programs write on.
//!
//! | journal | held by | other writers, until the copy is made |
//! |---|---|---|
//! | write-ahead log | a read transaction | commit |
//! | any other, on a file system that shares blocks | a clone without a name | commit |
//! | any other | a shared lock | wait with their commits |
//!
//! A pin takes the same time for every size. Nothing of it is left by a killed process.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rusqlite::Connection;

use super::host_database::{io, open, revision_of, run, wrong};
use crate::core::error::{Error, Result};
use crate::core::freeze::SchemaRevision;
use crate::core::freeze::cost::Driver;

/// A pinned database.
#[derive(Debug)]
pub struct PinnedDatabase {
    path: PathBuf,
    mode: u32,
    revision: SchemaRevision,
    parameters: String,
    held: Held,
}

#[derive(Debug)]
enum Held {
    /// A connection in a read transaction.
    Connection {
        connection: Connection,
        driver: Driver,
    },
    Clone(File),
}

impl PinnedDatabase {
    /// Pins the present content. `may_clone`: by a clone where the file system makes one. Blocks.
    ///
    /// # Errors
    /// `corrupt`, `busy`, `refused`.
    pub fn pin(path: &Path, may_clone: bool) -> Result<PinnedDatabase> {
        let failed = wrong(path, "read");
        let mode = std::fs::metadata(path).map_err(|error| io(path, "read", error))?.permissions().mode() & 0o777;
        let connection = open(path, false)?;
        connection.execute_batch("BEGIN").map_err(&failed)?;
        // The first read begins the transaction.
        let revision = revision_of(&connection, path)?;
        let journal: String = connection.query_row("PRAGMA journal_mode", [], |row| row.get(0)).map_err(&failed)?;
        let page: i64 = connection.query_row("PRAGMA page_size", [], |row| row.get(0)).map_err(&failed)?;
        let parameters = format!("journal_mode {journal}, page_size {page}");
        let held = if journal == "wal" {
            Held::Connection { connection, driver: Driver::Transaction }
        } else {
            // Without a log, the locked file alone is the database.
            match may_clone.then(|| clone_of(path)).flatten() {
                Some(clone) => Held::Clone(clone),
                None => Held::Connection { connection, driver: Driver::SharedLock },
            }
        };
        Ok(PinnedDatabase { path: path.to_owned(), mode, revision, parameters, held })
    }

    /// The schema revision of the pinned content.
    pub fn revision(&self) -> &SchemaRevision {
        &self.revision
    }

    /// Journal mode and page size.
    pub fn parameters(&self) -> &str {
        &self.parameters
    }

    /// The mode of the database's file.
    pub fn mode(&self) -> u32 {
        self.mode
    }

    /// How the content is held.
    pub fn driver(&self) -> Driver {
        match self.held {
            Held::Connection { driver, .. } => driver,
            Held::Clone(_) => Driver::Clone,
        }
    }

    /// Copies the pinned content into a new file, verifies the copy, and ends the pin. Blocks.
    ///
    /// # Errors
    /// `corrupt` if the copy fails SQLite's own check; `unavailable`.
    pub fn copy(self, copy: &Path) -> Result<()> {
        match self.held {
            Held::Connection { connection, .. } => {
                let mut target = Connection::open(copy).map_err(wrong(copy, "create"))?;
                run(&connection, &mut target, &self.path, || Ok(()))?;
            }
            Held::Clone(mut clone) => {
                let copied = File::create(copy).and_then(|mut to| std::io::copy(&mut clone, &mut to));
                copied.map_err(|error| io(copy, "write", error))?;
            }
        }
        let copied = open(copy, false)?;
        let verdict: String = copied
            .query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))
            .map_err(wrong(copy, "check the copy of"))?;
        if verdict != "ok" {
            let message = format!("{} is damaged: {}", self.path.display(), verdict.trim());
            return Err(Error::corrupt(message).reason("database_damaged"));
        }
        match revision_of(&copied, copy)? == self.revision {
            true => Ok(()),
            false => Err(Error::internal(format!("the copy of {} has another schema", self.path.display()))),
        }
    }
}

/// The version of SQLite.
pub fn version() -> &'static str {
    rusqlite::version()
}

/// Copies a file of a database, which may be locked; `false`: there is none. Blocks.
///
/// # Errors
/// `refused` if it is no file; `unavailable`.
pub fn copy_file(from: &Path, to: &Path) -> Result<bool> {
    match std::fs::symlink_metadata(from) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(io(from, "read", error)),
        Ok(meta) if !meta.is_file() => {
            return Err(Error::refused(format!("{} is not a file", from.display())).reason("not_a_file"));
        }
        Ok(_) => {}
    }
    match cp(&["--no-dereference", "--remove-destination"], from, to) {
        Ok(true) => Ok(true),
        Ok(false) => Err(Error::unavailable(format!("cp cannot copy {} to {}", from.display(), to.display()))),
        Err(error) => Err(io(from, "copy", error)),
    }
}

/// Runs `cp`; returns whether it succeeded. By a program of its own: a close of the file in this process would release
/// SQLite's locks of all its connections.
fn cp(options: &[&str], from: &Path, to: &Path) -> std::io::Result<bool> {
    let mut command = Command::new("cp");
    command.args(options).arg("--").arg(from).arg(to).env_clear();
    command.envs(std::env::var_os("PATH").map(|value| ("PATH", value)));
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().map(|status| status.success())
}

/// A clone of a database's file, if its file system makes one. The caller holds a lock of SQLite.
fn clone_of(path: &Path) -> Option<File> {
    let parent = path.parent()?;
    let clone = File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(parent).ok()?;
    let place = format!("/proc/{}/fd/{}", std::process::id(), clone.as_raw_fd());
    cp(&["--reflink=always"], path, Path::new(&place)).is_ok_and(|done| done).then_some(clone)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database(path: &Path, journal: &str) -> Connection {
        let database = Connection::open(path).expect("made");
        database.busy_timeout(std::time::Duration::ZERO).expect("set");
        database.pragma_update(None, "journal_mode", journal).expect("set");
        database.execute_batch("CREATE TABLE t (x); INSERT INTO t VALUES (1)").expect("filled");
        database
    }

    fn rows(path: &Path) -> i64 {
        Connection::open(path).and_then(|c| c.query_row("SELECT count(*) FROM t", [], |row| row.get(0))).expect("read")
    }

    /// What is committed after the pin is not in the copy, with a log and with a clone. Where neither holds the content,
    /// a commit waits.
    #[test]
    fn pin_ignores_later_commits() {
        for journal in ["wal", "delete"] {
            let dir = tempfile::tempdir().expect("a folder");
            let (path, copy) = (dir.path().join("db"), dir.path().join("copy"));
            let database = database(&path, journal);
            let pinned = PinnedDatabase::pin(&path, true).expect("pinned");
            let wrote = database.execute_batch("INSERT INTO t VALUES (2)");
            assert_eq!(wrote.is_ok(), pinned.driver() != Driver::SharedLock, "{journal}: {wrote:?}");
            assert_eq!(pinned.driver() == Driver::Transaction, journal == "wal");
            pinned.copy(&copy).expect("copied");
            assert_eq!(rows(&copy), 1, "{journal}");
            database.execute_batch("INSERT INTO t VALUES (3)").expect("the pin has ended");
            assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), if journal == "wal" { 4 } else { 2 });
        }
    }

    /// An attempt to clone a database, and a copy of its files, leave the locks of this process's other connections.
    #[test]
    fn attempt_keeps_locks() {
        use nix::fcntl::{FcntlArg, fcntl};
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("db");
        let database = database(&path, "delete");
        database.execute_batch("BEGIN IMMEDIATE").expect("locked");
        drop(PinnedDatabase::pin(&path, true).expect("pinned"));
        let copy = dir.path().join("copy");
        assert_eq!(copy_file(&path, &copy), Ok(true));
        assert_eq!(std::fs::read(&copy).expect("copied").len() as u64, std::fs::metadata(&path).expect("there").len());
        assert_eq!(copy_file(&dir.path().join("none"), &copy), Ok(false));
        // SQLite's reserved byte, by a lock that conflicts with those of the same process.
        let file = File::options().read(true).write(true).open(&path).expect("opened");
        let (kind, whence) = (libc::F_WRLCK as i16, libc::SEEK_SET as i16);
        let lock = libc::flock { l_type: kind, l_whence: whence, l_start: 0x4000_0001, l_len: 1, l_pid: 0 };
        assert!(fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)).is_err());
    }
}
