//! Opening, checking and committing, common to the three kinds of database.
//!
//! Every database has one owner at a time: WAL mode with an exclusive lock, so there is no shared memory file and no
//! lock per transaction. A second opener is refused (`InUse`) until the first ends, however it ends. The commits of a
//! killed owner are in the WAL; the next owner finds them.
//!
//! POSIX locks belong to the process: closing any other descriptor of a database file drops them. Only this module
//! opens those files.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _};

use super::error::CatalogError;
use super::sums;
use crate::core::durability::Durability;
use crate::core::limits;
use crate::sys::{fault, sqlite_vfs};

/// Result of a database operation.
pub type Result<T, E = CatalogError> = std::result::Result<T, E>;

/// The three kinds of database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `catalog.db`.
    Catalog,
    /// `state.db`.
    State,
    /// `engine.db`.
    Engine,
}

impl Kind {
    /// The file's name.
    pub const fn file_name(self) -> &'static str {
        match self {
            Kind::Catalog => "catalog.db",
            Kind::State => "state.db",
            Kind::Engine => "engine.db",
        }
    }

    /// SQLite's `application_id`: "RyC", "RyS", "RyE" and a 1.
    pub(super) const fn application_id(self) -> i32 {
        let letter = match self {
            Kind::Catalog => b'C',
            Kind::State => b'S',
            Kind::Engine => b'E',
        };
        i32::from_be_bytes([b'R', b'y', letter, 1])
    }

    /// The migrations; migration n produces format n.
    pub(super) const fn migrations(self) -> &'static [&'static str] {
        match self {
            Kind::Catalog => &[
                include_str!("../../schema/catalog/0001_first.sql"),
                include_str!("../../schema/catalog/0002_threads.sql"),
                include_str!("../../schema/catalog/0003_audit.sql"),
                include_str!("../../schema/catalog/0004_worker_records.sql"),
                include_str!("../../schema/catalog/0005_handovers.sql"),
                include_str!("../../schema/catalog/0006_groups.sql"),
                include_str!("../../schema/catalog/0007_signatures.sql"),
                include_str!("../../schema/catalog/0008_paused_groups.sql"),
                include_str!("../../schema/catalog/0009_removed_freezes.sql"),
                include_str!("../../schema/catalog/0010_group_moves.sql"),
                include_str!("../../schema/catalog/0011_unneeded_pins.sql"),
            ],
            Kind::State => &[
                include_str!("../../schema/state/0001_first.sql"),
                include_str!("../../schema/state/0002_real_sources.sql"),
                include_str!("../../schema/state/0003_mount_places.sql"),
                include_str!("../../schema/state/0004_checkpoints.sql"),
                include_str!("../../schema/state/0005_origin.sql"),
                include_str!("../../schema/state/0006_rest.sql"),
                include_str!("../../schema/state/0007_workflow.sql"),
                include_str!("../../schema/state/0008_transition.sql"),
                include_str!("../../schema/state/0009_displays.sql"),
                include_str!("../../schema/state/0010_sums.sql"),
                include_str!("../../schema/state/0011_machines.sql"),
                include_str!("../../schema/state/0012_output_tail.sql"),
            ],
            Kind::Engine => &[include_str!("../../schema/engine/0001_first.sql")],
        }
    }

    /// The latest format.
    pub const fn format(self) -> i64 {
        self.migrations().len() as i64
    }

    fn run_migrations(self, conn: &Connection, due: &[&str]) -> rusqlite::Result<()> {
        if self == Kind::State {
            sums::define(conn)?;
        }
        due.iter().try_for_each(|migration| conn.execute_batch(migration))?;
        if self == Kind::State { sums::cover(conn) } else { Ok(()) }
    }

    /// Page size of a new database, bytes. Each commit writes whole pages to the WAL; those of a kernel's journal hold
    /// a few rows.
    const fn page_bytes(self) -> i32 {
        match self {
            Kind::State => 1024,
            Kind::Catalog | Kind::Engine => 4096,
        }
    }

    /// The bytes of an empty database of this kind: writing them is many times faster than running its DDL.
    pub(super) fn template(self) -> Result<&'static [u8]> {
        static TEMPLATES: [OnceLock<Vec<u8>>; 3] = [const { OnceLock::new() }; 3];
        let slot = &TEMPLATES[self as usize];
        if let Some(bytes) = slot.get() {
            return Ok(bytes);
        }
        let bytes = self
            .make_template()
            .map_err(|e| CatalogError::of_sqlite("make an empty database", Path::new(self.file_name()), e))?;
        Ok(slot.get_or_init(|| bytes))
    }

    fn make_template(self) -> rusqlite::Result<Vec<u8>> {
        let mut conn = Connection::open_in_memory()?;
        conn.pragma_update(None, "page_size", self.page_bytes())?;
        conn.pragma_update(None, "application_id", self.application_id())?;
        self.run_migrations(&conn, self.migrations())?;
        conn.pragma_update(None, "user_version", self.format())?;
        let mut bytes = conn.serialize("main")?.to_vec();
        // A database in memory has no WAL; these two header bytes, write and read version, select it
        // (https://www.sqlite.org/fileformat2.html#file_format_version_numbers).
        for version in &mut bytes[18..20] {
            *version = 2;
        }
        Ok(bytes)
    }
}

/// An open database.
#[derive(Debug)]
pub struct Db {
    conn: Connection,
    path: PathBuf,
    wal: PathBuf,
    /// The WAL is empty and newly created, not reused.
    ///
    /// SQLite syncs the first page of a reused WAL, because frames of the earlier use may reach the
    /// device in another order. A new WAL has no such frames: a lost frame means only that its
    /// transaction did not happen.
    first: Cell<bool>,
}

/// Syncs the WAL before a checkpoint, not at each commit.
const SYNCS_BETWEEN: &str = "PRAGMA synchronous = NORMAL";

impl Db {
    /// Opens an existing database, migrates it and checks it (all of it if it is small).
    ///
    /// # Errors
    /// `Missing`, `InUse`, `Corrupt` (also for a database of another program), `Newer`, `ReadOnly`, `Full`.
    pub fn open(kind: Kind, path: &Path, durability: Durability) -> Result<Db> {
        let bytes = match std::fs::symlink_metadata(path) {
            Ok(meta) if meta.is_file() => meta.len(),
            Ok(_) => return Err(CatalogError::Corrupt { path: path.to_owned(), why: "it is not a plain file".into() }),
            Err(error) => return Err(CatalogError::of_io("open", path, error)),
        };
        if bytes == 0 {
            // SQLite would create it, and an empty database would hide a lost one.
            return Err(CatalogError::Corrupt { path: path.to_owned(), why: "it is empty".into() });
        }
        let db = Db::connect(path, durability)?;
        if kind == Kind::State {
            db.sql("open", sums::define)?;
        }
        db.check_identity(kind)?;
        if bytes <= limits::DATABASE_CHECKED_BYTES {
            db.check()?;
        }
        db.migrate(kind)?;
        Ok(db)
    }

    /// Opens a database, or creates it.
    ///
    /// # Errors
    /// As [`Db::open`].
    pub fn open_or_create(kind: Kind, path: &Path, durability: Durability) -> Result<Db> {
        match Db::open(kind, path, durability) {
            Err(CatalogError::Missing { .. }) => {
                // Under a temporary name: a half-written file must never have the real one.
                let temp = path.with_extension("db-new");
                let written = std::fs::remove_file(&temp).or_else(allow_missing).and_then(|()| {
                    let file = write_template(&temp, kind.template().map_err(std::io::Error::other)?)?;
                    if durability == Durability::Power {
                        file.sync_all()?;
                    }
                    fault::point("catalog.database.create")?;
                    std::fs::rename(&temp, path)
                });
                written.map_err(|e| CatalogError::of_io("create", path, e))?;
                Db::open(kind, path, durability)
            }
            opened => opened,
        }
    }

    fn connect(path: &Path, durability: Durability) -> Result<Db> {
        let fail = |e| CatalogError::of_sqlite("open", path, e);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let vfs = sqlite_vfs::name().ok_or(CatalogError::Stopped)?;
        let absolute = std::path::absolute(path).map_err(|e| CatalogError::of_io("open", path, e))?;
        let conn = Connection::open_with_flags_and_vfs(&absolute, flags, vfs).map_err(fail)?;
        // Without write access SQLite would open the file read-only.
        if conn.is_readonly("main").map_err(fail)? {
            return Err(CatalogError::ReadOnly { path: path.to_owned() });
        }
        let mut wal = path.as_os_str().to_owned();
        wal.push("-wal");
        let wal = PathBuf::from(wal);
        let first = !wal.exists() && durability == Durability::Process;
        let db = Db { conn, path: path.to_owned(), wal, first: Cell::new(first) };
        db.conn.set_prepared_statement_cache_capacity(64);
        db.sql("open", |c| {
            // The lock first: entering WAL mode exclusively avoids the shared memory file.
            c.execute_batch(
                "PRAGMA locking_mode = EXCLUSIVE; PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;
                 PRAGMA foreign_keys = ON; PRAGMA recursive_triggers = ON; PRAGMA temp_store = MEMORY; PRAGMA wal_autocheckpoint = 0;
                 PRAGMA cache_size = -1024; PRAGMA journal_size_limit = 0;",
            )?;
            c.execute_batch(match durability {
                Durability::Process if first => "PRAGMA synchronous = OFF",
                Durability::Process => SYNCS_BETWEEN,
                Durability::Power => "PRAGMA synchronous = FULL",
            })
        })?;
        Ok(db)
    }

    /// Takes a read-only connection, after checking the database's kind and format.
    pub(super) fn read_only(conn: Connection, path: &Path, kind: Kind) -> Result<Db> {
        let mut wal = path.as_os_str().to_owned();
        wal.push("-wal");
        let db = Db { conn, path: path.to_owned(), wal: wal.into(), first: Cell::new(false) };
        let (application, found): (i32, i64) = db.sql("look at", |c| {
            let application = c.query_row("PRAGMA application_id", [], |row| row.get(0))?;
            Ok((application, c.query_row("PRAGMA user_version", [], |row| row.get(0))?))
        })?;
        if application != kind.application_id() {
            let why = format!("it is no {}", kind.file_name());
            return Err(CatalogError::Corrupt { path: path.to_owned(), why });
        }
        match found == kind.format() {
            true => Ok(db),
            false => Err(CatalogError::Newer { path: path.to_owned(), found, known: kind.format() }),
        }
    }

    fn check_identity(&self, kind: Kind) -> Result<()> {
        let corrupt = |why: String| Err(CatalogError::Corrupt { path: self.path.clone(), why });
        let (application, mode) = self.sql("open", |c| {
            let mode: String = c.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
            let application: i32 = c.query_row("PRAGMA application_id", [], |row| row.get(0))?;
            Ok((application, mode))
        })?;
        if application != kind.application_id() {
            return corrupt(format!(
                "application id {application:#010x} is not that of a {} ({:#010x})",
                kind.file_name(),
                kind.application_id()
            ));
        }
        if mode != "wal" {
            return corrupt(format!("journal mode is {mode}, not wal"));
        }
        Ok(())
    }

    fn migrate(&self, kind: Kind) -> Result<()> {
        let found: i64 = self.sql("open", |c| c.query_row("PRAGMA user_version", [], |row| row.get(0)))?;
        let known = kind.format();
        if found > known {
            return Err(CatalogError::Newer { path: self.path.clone(), found, known });
        }
        let Some(due) = usize::try_from(found).ok().and_then(|done| kind.migrations().get(done..)) else {
            return Err(CatalogError::Corrupt { path: self.path.clone(), why: format!("format {found}") });
        };
        if due.is_empty() {
            return Ok(());
        }
        self.transaction("catalog.schema.migrate", |db| {
            db.sql("migrate", |c| {
                kind.run_migrations(c, due)?;
                c.pragma_update(None, "user_version", known)
            })
        })
    }

    /// The database's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs statements and classifies their errors.
    pub(super) fn sql<T>(&self, op: &'static str, run: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T> {
        run(&self.conn).map_err(|error| CatalogError::of_sqlite(op, &self.path, error))
    }

    /// Runs one cached statement.
    fn execute(&self, sql: &'static str) -> Result<()> {
        self.sql("commit", |c| c.prepare_cached(sql)?.execute([]).map(drop))
    }

    /// Runs `work` in a transaction. If it or the commit fails, nothing has changed.
    ///
    /// # Errors
    /// Those of `work` and of the commit.
    pub(super) fn transaction<T>(&self, label: &'static str, work: impl FnOnce(&Db) -> Result<T>) -> Result<T> {
        self.begin()?;
        let done = work(self).and_then(|value| self.before_commit(label).map(|()| value));
        match done {
            Ok(value) => {
                self.commit()?;
                after_commit(label);
                Ok(value)
            }
            Err(error) => {
                self.rollback();
                Err(error)
            }
        }
    }

    /// Runs `work` and rolls it back, to warm the caches.
    ///
    /// # Errors
    /// Those of `work`.
    pub(super) fn rehearse(&self, work: impl FnOnce(&Db) -> Result<()>) -> Result<()> {
        self.begin()?;
        let done = work(self);
        self.rollback();
        done
    }

    pub(super) fn begin(&self) -> Result<()> {
        self.execute("BEGIN")
    }

    /// Commits; if that fails, rolls back.
    pub(super) fn commit(&self) -> Result<()> {
        self.execute("COMMIT").inspect_err(|_| self.rollback())?;
        // The commit is done: if this fails, the next commit retries it.
        if self.first.get() && self.sql("commit", |c| c.execute_batch(SYNCS_BETWEEN)).is_ok() {
            self.first.set(false);
        }
        Ok(())
    }

    /// Rolls back, unless SQLite has done so.
    pub(super) fn rollback(&self) {
        if !self.conn.is_autocommit() {
            // A failed rollback leaves the transaction open; the next BEGIN reports it.
            let _ = self.execute("ROLLBACK");
        }
    }

    /// Runs `work` in a savepoint: if it reports failure, its changes are undone. The caller must check whether SQLite
    /// ended the whole transaction meanwhile.
    pub(super) fn savepoint(&self, work: impl FnOnce(&Db) -> bool) -> Result<bool> {
        self.execute("SAVEPOINT part")?;
        let well = work(self);
        if self.in_transaction() {
            if !well {
                self.execute("ROLLBACK TO part")?;
            }
            self.execute("RELEASE part")?;
        }
        Ok(well)
    }

    /// Whether a transaction is open: SQLite ends it by itself on a full disk, for example.
    pub(super) fn in_transaction(&self) -> bool {
        !self.conn.is_autocommit()
    }

    /// The fault point before a commit.
    pub(super) fn before_commit(&self, label: &'static str) -> Result<()> {
        fault::step(label, ".before_commit").map_err(|e| CatalogError::of_io("commit", &self.path, e))
    }

    /// Checks every row of a `state.db` against the checksums.
    ///
    /// # Errors
    /// `Corrupt` with the first difference.
    pub(super) fn check_rows(&self) -> Result<()> {
        match self.sql("check rows", sums::find_wrong)? {
            None => Ok(()),
            Some(why) => Err(CatalogError::Corrupt { path: self.path.clone(), why }),
        }
    }

    /// Checks every page.
    ///
    /// # Errors
    /// `Corrupt` with the first problem.
    pub fn check(&self) -> Result<()> {
        self.check_length()?;
        let first: Option<String> =
            self.sql("check", |c| c.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).optional())?;
        match first.as_deref() {
            Some("ok") => Ok(()),
            Some(why) => Err(CatalogError::Corrupt { path: self.path.clone(), why: why.trim().to_owned() }),
            None => Err(CatalogError::Corrupt { path: self.path.clone(), why: "it could not be checked".into() }),
        }
    }

    /// SQLite reads missing pages at the end as zeros. While the WAL is empty, the file must hold every page.
    fn check_length(&self) -> Result<()> {
        if std::fs::metadata(&self.wal).is_ok_and(|meta| meta.len() > 0) {
            return Ok(());
        }
        let due: u64 = self.sql("check", |c| {
            let pages: u32 = c.query_row("PRAGMA page_count", [], |row| row.get(0))?;
            let page: u32 = c.query_row("PRAGMA page_size", [], |row| row.get(0))?;
            Ok(u64::from(pages) * u64::from(page))
        })?;
        let found = std::fs::metadata(&self.path).map_err(|e| CatalogError::of_io("check", &self.path, e))?.len();
        if found < due {
            let why = format!("it has {found} bytes where there were {due}");
            return Err(CatalogError::Corrupt { path: self.path.clone(), why });
        }
        Ok(())
    }

    /// Checkpoints the WAL if it has more than `most` bytes. Between requests, never inside one.
    pub(super) fn checkpoint_wal(&self, most: u64) {
        let grown = std::fs::metadata(&self.wal).is_ok_and(|meta| meta.len() > most);
        if grown {
            self.checkpoint();
        }
    }

    /// Checkpoints the WAL. A failure loses nothing, because the WAL stays; the next failing commit reports why.
    pub(super) fn checkpoint(&self) {
        let _ = self.sql("checkpoint", |c| c.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())));
    }

    /// Runs `work` in a transaction and checkpoints the WAL, which writes every page since the last checkpoint to the
    /// database again and syncs it.
    ///
    /// # Errors
    /// As [`Self::transaction`], and a failed checkpoint: the next one begins where the last successful one ended.
    pub(super) fn write_anew(&self, label: &'static str, work: impl FnOnce(&Db) -> Result<()>) -> Result<()> {
        self.transaction(label, work)?;
        let is_busy: bool =
            self.sql("checkpoint", |c| c.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0)))?;
        if is_busy { Err(CatalogError::Busy) } else { Ok(()) }
    }

    /// Checkpoints the WAL and closes the database.
    ///
    /// # Errors
    /// SQLite errors; nothing is lost then, the WAL stays.
    pub fn close(self) -> Result<()> {
        let Db { conn, path, .. } = self;
        conn.flush_prepared_statement_cache();
        conn.close().map_err(|(_, error)| CatalogError::of_sqlite("close", &path, error))
    }

    /// Closes a database that is about to be deleted, without a checkpoint: nothing waits for the device.
    pub fn discard(self) {
        // Otherwise the close takes longer.
        let _ = self.conn.set_db_config(rusqlite::config::DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
        let _ = self.close();
    }
}

/// The fault point after a commit.
pub(super) fn after_commit(label: &'static str) {
    // The commit is done: only a kill has an effect here.
    let _ = fault::step(label, ".after_commit");
}

/// Writes an empty database, accessible to its owner only. Not synced.
pub(super) fn write_template(path: &Path, template: &[u8]) -> std::io::Result<std::fs::File> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(template)?;
    Ok(file)
}

fn allow_missing(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}
