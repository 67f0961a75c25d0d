//! SQLite databases of users on this host, as members of groups. They are not ryokan's own.
//!
//! Other processes may write them at any time: a capture pins one moment (`pinned_database`), and a restore is one
//! write transaction into the live file, so every connection sees one state or the other. Only a file that is missing,
//! that SQLite cannot read or that is to be removed is replaced by a rename.
//!
//! Nothing in the database is executed: no query of it runs but those of the schema, without triggers and views.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use rusqlite::backup::{Backup, StepResult};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};

use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::SchemaRevision;
use crate::core::limits;
use crate::sys::fault;
use crate::sys::fs::sync_dir;

/// The suffixes of the files beside a database.
pub const SUFFIXES: [&str; 4] = ["", "-wal", "-shm", "-journal"];

/// Pause between two attempts to lock.
const PAUSE: Duration = Duration::from_millis(5);

/// What a database's file is now.
#[derive(Debug)]
pub enum Present {
    /// SQLite reads it.
    Whole,
    /// There is no file.
    Absent,
    /// SQLite cannot read it; why.
    Damaged(String),
}

/// Keeps others from writing a database, until dropped.
pub struct WriteLock {
    path: PathBuf,
    /// In a write transaction that changes nothing.
    holder: Connection,
    /// Sees whether others wrote after the lock was released.
    observer: Observer,
    version: i64,
}

/// Reads a number that each commit of another connection changes.
enum Observer {
    /// With a write-ahead log: readers are admitted beside a writer.
    Log(Connection),
    /// With a rollback journal: the change counter in the file. Its close would release SQLite's locks of this process,
    /// so it is dropped last.
    Journal(File),
}

impl std::fmt::Debug for WriteLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WriteLock").field("path", &self.path).finish_non_exhaustive()
    }
}

pub(super) fn wrong(path: &Path, what: &str) -> impl Fn(rusqlite::Error) -> Error {
    let (path, what) = (path.display().to_string(), what.to_owned());
    move |error| {
        use rusqlite::ErrorCode as Sqlite;
        let message = format!("cannot {what} {path}: {error}");
        match error.sqlite_error_code() {
            Some(Sqlite::DatabaseBusy | Sqlite::DatabaseLocked) => {
                Error::busy(message).reason("database_locked").hint("another program holds it locked; try again later")
            }
            Some(Sqlite::DatabaseCorrupt | Sqlite::NotADatabase) => Error::corrupt(message).reason("database_damaged"),
            Some(Sqlite::ReadOnly | Sqlite::CannotOpen | Sqlite::PermissionDenied) => Error::refused(message),
            _ => Error::unavailable(message),
        }
    }
}

pub(super) fn io(path: &Path, what: &str, error: std::io::Error) -> Error {
    Error::unavailable(format!("cannot {what} {}: {error}", path.display()))
}

pub(super) fn open(path: &Path, create: bool) -> Result<Connection> {
    let mut flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    flags.set(OpenFlags::SQLITE_OPEN_CREATE, create);
    let failed = wrong(path, "open");
    let connection = Connection::open_with_flags(path, flags).map_err(&failed)?;
    connection.busy_timeout(limits::DATABASE_LOCK_WAIT).map_err(&failed)?;
    for (option, on) in [
        (DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true),
        (DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false),
        (DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false),
        (DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false),
        // The close of the last connection would write the file.
        (DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true),
    ] {
        connection.set_db_config(option, on).map_err(&failed)?;
    }
    Ok(connection)
}

/// Looks what a database's file is. Blocks.
///
/// # Errors
/// A file that cannot be judged: locked, or without access.
pub fn present(path: &Path) -> Result<Present> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Present::Absent),
        Err(error) => return Err(io(path, "read", error)),
        Ok(meta) if !meta.is_file() => {
            return Err(Error::refused(format!("{} is not a file", path.display())).reason("not_a_file"));
        }
        Ok(_) => {}
    }
    match open(path, false).and_then(|connection| revision_of(&connection, path)) {
        Ok(_) => Ok(Present::Whole),
        Err(error) if error.code == ErrorCode::Corrupt => Ok(Present::Damaged(error.message)),
        Err(error) => Err(error),
    }
}

pub(super) fn revision_of(connection: &Connection, path: &Path) -> Result<SchemaRevision> {
    let failed = wrong(path, "read");
    let read = || {
        let user_version = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        let mut hash = blake3::Hasher::new();
        let mut statement = connection
            .prepare("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema ORDER BY type, name")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            for column in 0..4 {
                let text = row.get_ref(column)?.as_bytes()?;
                // The length comes first, so that the encoding is unambiguous.
                hash.update(&(text.len() as u64).to_le_bytes()).update(text);
            }
        }
        Ok(SchemaRevision { user_version, schema: hash.finalize().to_hex().to_string() })
    };
    read().map_err(failed)
}

/// The schema revision of a database. Blocks.
///
/// # Errors
/// `corrupt`, `busy`, `refused`.
pub fn revision(path: &Path) -> Result<SchemaRevision> {
    revision_of(&open(path, false)?, path)
}

/// Copies all pages in one transaction of the target. `locked` runs once the target cannot be written by others.
pub(super) fn run(
    source: &Connection,
    target: &mut Connection,
    path: &Path,
    locked: impl Fn() -> Result<()>,
) -> Result<()> {
    let failed = wrong(path, "copy");
    let backup = Backup::new(source, target).map_err(&failed)?;
    let deadline = Instant::now() + limits::DATABASE_LOCK_WAIT;
    // Takes the locks, and copies nothing: a single page would be the whole transaction.
    let mut pages = 0;
    loop {
        match backup.step(pages).map_err(&failed)? {
            StepResult::Done => return Ok(()),
            StepResult::More => {
                if pages == 0 {
                    locked()?;
                }
                pages = -1;
            }
            _ if Instant::now() < deadline => std::thread::sleep(PAUSE),
            _ => {
                return Err(Error::busy(format!("{} is locked by another program", path.display()))
                    .reason("database_locked")
                    .hint("try again when that has ended"));
            }
        }
    }
}

impl WriteLock {
    /// Locks a database against writers. Blocks for at most [`limits::DATABASE_LOCK_WAIT`].
    ///
    /// # Errors
    /// `busy` if another program holds it.
    pub fn take(path: &Path) -> Result<WriteLock> {
        let failed = wrong(path, "lock");
        let holder = open(path, false)?;
        holder.execute_batch("BEGIN IMMEDIATE").map_err(&failed)?;
        let mode: String = holder.query_row("PRAGMA journal_mode", [], |row| row.get(0)).map_err(&failed)?;
        let observer = match mode.as_str() {
            "wal" => Observer::Log(open(path, false)?),
            _ => Observer::Journal(File::open(path).map_err(|error| io(path, "open", error))?),
        };
        let version = observer.version(path)?;
        Ok(WriteLock { path: path.to_owned(), holder, observer, version })
    }

    /// Checks that [`Self::replace`] can copy this image: SQLite keeps the page size of a write-ahead log.
    ///
    /// # Errors
    /// `refused` (`page_size`) says how the log is ended.
    pub fn check_image(&self, image: &Path) -> Result<()> {
        let size = |connection: &Connection, path: &Path| {
            connection.query_row("PRAGMA page_size", [], |row| row.get::<_, i64>(0)).map_err(wrong(path, "read"))
        };
        let (Observer::Log(live), image) = (&self.observer, open(image, false)?) else { return Ok(()) };
        let (now, then) = (size(live, &self.path)?, size(&image, &self.path)?);
        if now == then {
            return Ok(());
        }
        let path = self.path.display();
        Err(Error::refused(format!("{path} has pages of {now} bytes, and had pages of {then} bytes then"))
            .reason("page_size")
            .hint(format!(
                "SQLite cannot change that with a write-ahead log: end the programs that have it open, then \
                 `sqlite3 {path} 'PRAGMA journal_mode = delete'`, and restore again"
            )))
    }

    /// Replaces the content of the live database in one transaction. Blocks.
    ///
    /// # Errors
    /// `conflict` if another program wrote after the lock was taken; `busy`; nothing has changed then.
    pub fn replace(&mut self, image: &Path) -> Result<()> {
        let source = open(image, false)?;
        let mut target = open(&self.path, false)?;
        let failed = wrong(&self.path, "restore");
        target.pragma_update(None, "synchronous", "FULL").map_err(&failed)?;
        // SQLite's backup takes the lock itself.
        self.holder.execute_batch("ROLLBACK").map_err(&failed)?;
        let (observer, version, path) = (&self.observer, self.version, &self.path);
        run(&source, &mut target, path, || match observer.version(path)? == version {
            true => Ok(()),
            false => Err(written(path)),
        })
    }
}

/// Whether two copies hold the same, apart from the counters that SQLite changes with each copy. Blocks.
///
/// # Errors
/// Files that cannot be read.
pub fn is_same(a: &Path, b: &Path) -> Result<bool> {
    use std::io::Read as _;
    // The journal mode, the change counter, the schema cookie, and the version of the last writer.
    const COUNTERS: [std::ops::Range<usize>; 4] = [18..20, 24..28, 40..44, 92..100];
    let read = |path: &Path| File::open(path).map_err(|error| io(path, "read", error));
    let (mut left, mut right) = (read(a)?, read(b)?);
    let (mut first, mut one, mut other) = (true, vec![0; 1 << 16], vec![0; 1 << 16]);
    let size = |file: &File, path| file.metadata().map(|meta| meta.len()).map_err(|error| io(path, "read", error));
    let mut rest = size(&left, a)?;
    if rest != size(&right, b)? {
        return Ok(false);
    }
    while rest > 0 {
        let part = usize::try_from(rest).unwrap_or(usize::MAX).min(one.len());
        left.read_exact(&mut one[..part]).map_err(|error| io(a, "read", error))?;
        right.read_exact(&mut other[..part]).map_err(|error| io(b, "read", error))?;
        if std::mem::take(&mut first) && part >= 100 {
            for range in COUNTERS {
                one[range.clone()].fill(0);
                other[range].fill(0);
            }
        }
        if one[..part] != other[..part] {
            return Ok(false);
        }
        rest -= part as u64;
    }
    Ok(true)
}

impl Observer {
    fn version(&self, path: &Path) -> Result<i64> {
        match self {
            Observer::Log(connection) => {
                connection.query_row("PRAGMA data_version", [], |row| row.get(0)).map_err(wrong(path, "read"))
            }
            Observer::Journal(file) => {
                use std::os::unix::fs::FileExt as _;
                let mut counter = [0; 4];
                match file.read_exact_at(&mut counter, 24) {
                    // An empty database.
                    Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(-1),
                    read => {
                        read.map(|()| i64::from(u32::from_be_bytes(counter))).map_err(|error| io(path, "read", error))
                    }
                }
            }
        }
    }
}

/// What a comparison reads of a database.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    /// The application's own schema number.
    pub user_version: i64,
    /// The definitions by kind (`table`, `index`, `view`, `trigger`) and name: a digest and the beginning.
    pub definitions: BTreeMap<String, BTreeMap<String, String>>,
    /// Numbers of rows of the tables, at most [`limits::TABLES_COMPARED`]. Virtual tables, which run code, have none.
    pub rows: BTreeMap<String, u64>,
    /// Number of tables whose rows were not counted.
    pub omitted: u64,
}

/// Reads the definitions and the numbers of rows of a copy. Blocks.
///
/// # Errors
/// `corrupt`.
pub fn contents(copy: &Path) -> Result<Contents> {
    let connection = open(copy, false)?;
    let read = || {
        let user_version = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        let mut contents = Contents { user_version, ..Contents::default() };
        let mut statement = connection.prepare(
            "SELECT type, name, sql, rootpage FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT GLOB 'sqlite_*'",
        )?;
        let mut listed = statement.query([])?;
        while let Some(row) = listed.next()? {
            let (kind, name, sql): (String, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
            let is_stored = row.get::<_, i64>(3)? > 0;
            if kind == "table" && is_stored {
                if contents.rows.len() < limits::TABLES_COMPARED {
                    let table = name.replace('"', "\"\"");
                    let count = format!("SELECT count(*) FROM main.\"{table}\"");
                    let rows: i64 = connection.query_row(&count, [], |row| row.get(0))?;
                    contents.rows.insert(name.clone(), u64::try_from(rows).unwrap_or_default());
                } else {
                    contents.omitted += 1;
                }
            }
            let digest: String = blake3::hash(sql.as_bytes()).to_hex().chars().take(10).collect();
            let start: String = sql.chars().take(limits::DIFF_SHOWN_CHARS).collect();
            contents.definitions.entry(kind).or_default().insert(name, format!("{digest} {start}"));
        }
        Ok(contents)
    };
    read().map_err(wrong(copy, "compare"))
}

/// The path of a file beside a database.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// What [`replace_files`] replaces.
#[derive(Debug)]
pub enum Replaced {
    /// Nothing.
    Absent,
    /// Files that SQLite cannot read.
    Damaged,
    /// A whole database, which stays locked until it is replaced.
    Locked(Box<WriteLock>),
}

/// Another program wrote a database that a restore is about to replace.
pub fn written(path: &Path) -> Error {
    Error::conflict(format!("{} was written during the restore", path.display()))
        .reason("database_written")
        .hint("try again, or stop the program that writes it")
}

/// Puts files in the place of a database: each suffix, the prepared file in the same directory and its mode. Other files
/// of the database are removed. Blocks. May be repeated.
///
/// # Errors
/// `conflict` (`database_written`) if another program has made the database meanwhile; file errors.
pub fn replace_files(path: &Path, prepared: &[(String, PathBuf, u32)], replaced: &Replaced) -> Result<()> {
    let removed: &[&str] = match replaced {
        // Logs that are left of it. A database would be another program's.
        Replaced::Absent => &["-journal", "-shm", "-wal"],
        // The main file goes last: until then the database is as unreadable as before.
        Replaced::Damaged => &["-journal", "-shm", "-wal", ""],
        // First: without its log it would be an older database, and its lock is in the shared memory.
        Replaced::Locked(_) => &["", "-wal", "-shm", "-journal"],
    };
    for suffix in removed {
        let file = beside(path, suffix);
        match std::fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(&file, "remove", error)),
            _ => {}
        }
    }
    fault::point("database.files.replace").map_err(|error| io(path, "replace", error))?;
    for (suffix, from, mode) in prepared {
        let to = beside(path, suffix);
        // Code that can write in the directory may have put a link or a pipe there since.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let opened = File::options().read(true).custom_flags(flags).open(from);
        let file = opened.map_err(|error| io(from, "open", error))?;
        if !file.metadata().map_err(|error| io(from, "read", error))?.is_file() {
            return Err(Error::refused(format!("{} is not a file", from.display())).reason("not_a_file"));
        }
        let mode = std::fs::Permissions::from_mode(*mode & 0o777);
        file.set_permissions(mode).map_err(|error| io(from, "change", error))?;
        file.sync_all().map_err(|error| io(from, "sync", error))?;
        match suffix.as_str() {
            "" => place_new(from, &to)?,
            _ => std::fs::rename(from, &to).map_err(|error| io(&to, "replace", error))?,
        }
    }
    let parent = path.parent().unwrap_or(path);
    sync_dir(parent).map_err(|error| Error::unavailable(error.to_string()))
}

/// Renames a file to a name that is free.
fn place_new(from: &Path, to: &Path) -> Result<()> {
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        Err(Errno::EEXIST) => Err(written(to)),
        // A file system that cannot exclude it.
        Err(Errno::EINVAL | Errno::ENOSYS) => std::fs::rename(from, to).map_err(|error| io(to, "replace", error)),
        renamed => renamed.map_err(|error| io(to, "replace", error.into())),
    }
}

/// Sets the mode of a database's files. Links are not followed.
///
/// # Errors
/// File errors.
pub fn set_mode(path: &Path, mode: u32) -> Result<()> {
    for suffix in SUFFIXES {
        let file = beside(path, suffix);
        // A close of a file that was opened to be read would release SQLite's locks of this process.
        let opened = File::options().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(&file);
        let opened = match opened {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            opened => opened.map_err(|error| io(&file, "open", error))?,
        };
        let now = opened.metadata().map_err(|error| io(&file, "read", error))?;
        if now.is_file() && now.permissions().mode() & 0o777 != mode & 0o777 {
            let place = format!("/proc/self/fd/{}", opened.as_raw_fd());
            let mode = std::fs::Permissions::from_mode(mode & 0o777);
            std::fs::set_permissions(place, mode).map_err(|error| io(&file, "change", error))?;
        }
    }
    Ok(())
}

/// The owner of a file or directory.
///
/// # Errors
/// `notFound`, or why it cannot be read.
pub fn owner(path: &Path) -> Result<u32> {
    std::fs::symlink_metadata(path).map(|meta| meta.uid()).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::not_found(format!("there is no {}", path.display())),
        _ => io(path, "read", error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_image_is_not_copied_unasked() {
        let dir = tempfile::tempdir().expect("a folder");
        let (image, live) = (dir.path().join("image"), dir.path().join("live"));
        Connection::open(&image).expect("made").pragma_update(None, "user_version", 7).expect("set");
        Connection::open(&live).expect("made").execute_batch("CREATE TABLE kept (x)").expect("set");
        let (source, mut target) = (open(&image, false).expect("opened"), open(&live, false).expect("opened"));
        let refused = run(&source, &mut target, &live, || Err(Error::conflict("written meanwhile")));
        assert_eq!(refused.map_err(|error| error.code), Err(ErrorCode::Conflict));
        assert_eq!(revision(&live).expect("read").user_version, 0);
        run(&source, &mut target, &live, || Ok(())).expect("copied");
        drop(target);
        assert_eq!(revision(&live).expect("read").user_version, 7);
    }
}
