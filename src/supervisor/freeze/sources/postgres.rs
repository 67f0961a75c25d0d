//! A PostgreSQL database, through the server's own programs: `pg_dump`, `pg_restore` and `psql`.
//!
//! ```text
//! before a restore    NAME
//! quiesced            NAME_ryokan_was                         connections to NAME are ended, nothing can connect to it
//! prepared            NAME_ryokan_was   NAME_ryokan_new       restored and compared, with connections
//! switched            NAME_ryokan_was   NAME                  without connections
//! resumed             NAME                                    either of both, with connections; then NAME_ryokan_new is dropped
//! ```
//! Which databases exist decides what a step still has to do, so that each may be repeated. Passwords come from the
//! user's own password file or are not needed; a connection with one is refused, and so is a dump with one.
//!
//! A freeze pins the content by a `psql` whose transaction has locked all tables against changes of their definition and
//! has exported its snapshot; `pg_dump` reads that snapshot after the pause. Sequences are in no snapshot: a dump may
//! hold later values of them.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use async_trait::async_trait;

use super::postgres_credentials::{self, Begun};
use super::{DataSource, NOT_STORED, other_content};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::cost::Driver;
use crate::core::freeze::postgres::Connection;
use crate::core::freeze::{Captured, PostgresPart, SchemaRevision};
use crate::core::kernel::transition::Kind;
use crate::core::limits;
use crate::programs::{Output, Program, Session};
use crate::supervisor::freeze::{access, objects};
use crate::supervisor::host::Host;
use crate::sys::fault;

/// Variables of the daemon's environment that name files with credentials and how to connect; none holds a secret.
const KEPT: [&str; 5] = ["PGPASSFILE", "PGSSLMODE", "PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY"];
const ENVIRONMENT: [(&str, &str); 4] =
    [("PGAPPNAME", "ryokan"), ("PGCONNECT_TIMEOUT", "10"), ("LC_ALL", "C"), ("PGOPTIONS", SEARCH_PATH)];
/// The names in the daemon's own queries are PostgreSQL's, whatever a database sets.
const SEARCH_PATH: &str = "-c search_path=pg_catalog";
/// The database to connect to for changes of databases.
const MAINTENANCE: &str = "postgres";
/// Attempts to rename a database whose last connections are ending.
const ATTEMPTS: u32 = 50;
/// Pause between them.
const PAUSE: Duration = Duration::from_millis(100);

/// Begins the transaction of a pin: it waits for nothing afterwards, and changes of a table's definition wait for it. The
/// same tables as `pg_dump` reads; those that the user cannot read are left to its error message.
const BEGIN: &str = "\
    SELECT count(set_config(name, '0', false)) FROM pg_settings WHERE name IN \
      ('statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout');
    BEGIN;
    DO $$ DECLARE one record; BEGIN
      FOR one IN SELECT nspname, relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace
        WHERE relkind IN ('r', 'p') AND relpersistence <> 't' AND nspname <> 'information_schema'
        AND nspname !~ '^pg_' AND has_table_privilege(c.oid, 'SELECT')
      LOOP EXECUTE format('LOCK TABLE ONLY %I.%I IN ACCESS SHARE MODE', one.nspname, one.relname); END LOOP;
    END $$;
";
/// What is set for a database and not in a dump of it.
const LOST: &str = "SELECT concat_ws(', ', CASE WHEN datacl IS NOT NULL THEN 'its rights' END, \
    CASE WHEN EXISTS (SELECT FROM pg_db_role_setting WHERE setdatabase = d.oid) THEN 'its settings' END, \
    CASE WHEN datconnlimit <> -1 THEN 'its connection limit' END, \
    CASE WHEN spcname <> 'pg_default' THEN 'its tablespace' END, \
    CASE WHEN datistemplate THEN 'its mark as a template' END, \
    CASE WHEN EXISTS (SELECT FROM pg_replication_slots WHERE database = d.datname) THEN 'its replication slots' END, \
    CASE WHEN shobj_description(d.oid, 'pg_database') IS NOT NULL THEN 'its comment' END) \
    FROM pg_database d JOIN pg_tablespace t ON t.oid = dattablespace WHERE datname = :name";
/// The subscriptions of a database.
const SUBSCRIPTIONS: &str = "SELECT string_agg(subname, ', ') FROM pg_subscription JOIN pg_database AS d ON d.oid = subdbid \
    WHERE datname = :name";
/// The options of a pin: a bound on each wait for a lock of a table.
const PIN_OPTIONS: &str = "-c search_path=pg_catalog -c lock_timeout=20s";

/// The options of a dump. The store compresses, and finds what older freezes have in common with a dump that is not
/// compressed. A copy with a subscription could not be dropped.
const DUMP: [&str; 3] = ["-Fc", "-Z0", "--no-subscriptions"];

/// A transaction whose snapshot others can read.
struct Pin {
    session: Session,
    /// The name of the snapshot.
    snapshot: String,
    /// The database.
    name: String,
}

/// The source.
pub(super) struct PostgresSource {
    host: Rc<Host>,
    connection: Connection,
    pub(super) scratch: PathBuf,
    pin: Option<Pin>,
    is_switched: bool,
    /// Whether it was quiesced for a freeze, which closes nothing.
    is_freeze: bool,
    /// The server's version at the last pin.
    version: String,
}

fn was(name: &str) -> String {
    format!("{name}_ryokan_was")
}

fn new(name: &str) -> String {
    format!("{name}_ryokan_new")
}

fn part_of(captured: &Captured) -> Result<&PostgresPart> {
    match captured {
        Captured::Postgres { part, .. } => Ok(part),
        _ => Err(other_content()),
    }
}

fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn injected(error: std::io::Error) -> Error {
    Error::unavailable(error.to_string())
}

fn without_programs(error: Error) -> Error {
    match error.reason.as_str() {
        "program" => Error::unsupported("PostgreSQL's programs are not installed on this host")
            .reason("postgres")
            .hint("install the client programs of the server's version, then try again"),
        _ => error,
    }
}

impl PostgresSource {
    /// A database.
    pub fn new(host: Rc<Host>, connection: Connection, scratch: PathBuf) -> PostgresSource {
        PostgresSource {
            host,
            connection,
            scratch,
            pin: None,
            is_switched: false,
            is_freeze: false,
            version: String::new(),
        }
    }

    fn name(&self) -> &str {
        &self.connection.database
    }

    fn argv(&self, program: &str, database: &str, args: &[&str]) -> Vec<String> {
        let Connection { host, port, user, .. } = &self.connection;
        let mut argv = vec![program.to_owned(), "-w".into()];
        for (option, value) in [("-h", host.as_str()), ("-p", port.as_str()), ("-U", user.as_str()), ("-d", database)] {
            if !value.is_empty() {
                argv.extend([option.to_owned(), value.to_owned()]);
            }
        }
        argv.extend(args.iter().map(|arg| (*arg).to_owned()));
        argv
    }

    pub(super) async fn run(
        &self,
        program: &str,
        database: &str,
        args: &[&str],
        output: Output<'_>,
    ) -> Result<Vec<u8>> {
        let limits = &self.host.config.limits;
        // A pin or a quiesced database does not wait for these.
        let is_long = matches!(output, Output::File(_, limits::BLOB_BYTES) | Output::Ignored);
        let program = Program {
            argv: &self.argv(program, database, args),
            kept: &KEPT,
            env: &ENVIRONMENT,
            input: None,
            output,
            timeout: if is_long { limits.freeze_store } else { limits.freeze_step },
            user: None,
        };
        access::programs(&self.host).await?.run(&program).await.map_err(without_programs)
    }

    /// Begins a transaction that holds the content of a database.
    async fn begin(&self, name: &str) -> Result<Pin> {
        let program = Program {
            argv: &self.argv("psql", name, &["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"]),
            kept: &KEPT,
            env: &[&ENVIRONMENT[..], &[("PGOPTIONS", PIN_OPTIONS)]].concat(),
            input: None,
            output: Output::Ignored,
            timeout: self.host.config.limits.freeze_step,
            user: None,
        };
        let mut session = access::programs(&self.host).await?.start(&program).map_err(without_programs)?;
        let (most, mut requests) = (limits::POSTGRES_ANSWER_BYTES, BEGIN.split_inclusive(";\n"));
        // The first request answers, too.
        session.ask(requests.next().unwrap_or_default(), most).await?;
        let export = postgres_credentials::export();
        let begun = session.ask(&(requests.collect::<String>() + &export), most).await?;
        let begun = Begun::parse(&begun, self.name())?;
        Ok(Pin { session, snapshot: begun.snapshot, name: name.to_owned() })
    }

    /// Runs one statement.
    async fn sql(&self, database: &str, statement: &str) -> Result<String> {
        let args = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", statement];
        let output = self.run("psql", database, &args, Output::Bytes(limits::POSTGRES_ANSWER_BYTES)).await?;
        Ok(String::from_utf8_lossy(&output).trim().to_owned())
    }

    /// Whether a database admits connections; `None`: there is none.
    async fn is_open(&self, name: &str) -> Result<Option<bool>> {
        let query = format!("SELECT datallowconn FROM pg_database WHERE datname = {}", literal(name));
        Ok(match self.sql(MAINTENANCE, &query).await?.as_str() {
            "t" => Some(true),
            "f" => Some(false),
            _ => None,
        })
    }

    async fn exists(&self, name: &str) -> Result<bool> {
        Ok(self.is_open(name).await?.is_some())
    }

    /// The name under which the present content is.
    pub(super) async fn present_name(&self) -> Result<Option<String>> {
        for name in [was(self.name()), self.name().to_owned()] {
            if self.exists(&name).await? {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    async fn allow(&self, name: &str, allow: bool) -> Result<()> {
        self.sql(MAINTENANCE, &format!("ALTER DATABASE \"{name}\" WITH ALLOW_CONNECTIONS {allow}")).await.map(drop)
    }

    /// Closes a database and gives it another name.
    async fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.allow(from, false).await?;
        let end = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = {} AND pid <> pg_backend_pid()",
            literal(from)
        );
        let mut attempt = 0;
        loop {
            self.sql(MAINTENANCE, &end).await?;
            match self.sql(MAINTENANCE, &format!("ALTER DATABASE \"{from}\" RENAME TO \"{to}\"")).await {
                Ok(_) => return Ok(()),
                // A connection that is ending still counts.
                Err(error) if attempt < ATTEMPTS && error.said.contains("being accessed") => attempt += 1,
                Err(error) => return Err(error),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn drop_database(&self, name: &str) -> Result<()> {
        self.sql(MAINTENANCE, &format!("DROP DATABASE IF EXISTS \"{name}\" WITH (FORCE)")).await.map(drop)
    }

    /// A digest of all definitions.
    async fn schema(&self, database: &str) -> Result<SchemaRevision> {
        self.schema_of(database, None).await
    }

    /// A digest of all definitions in a snapshot; without one, of the present ones.
    async fn schema_of(&self, database: &str, snapshot: Option<&str>) -> Result<SchemaRevision> {
        // Never in a file: definitions may hold credentials.
        let output = Output::Bytes(limits::POSTGRES_SCHEMA_BYTES);
        let snapshot = snapshot.map(|snapshot| format!("--snapshot={snapshot}"));
        let args = ["--schema-only", "--no-comments", "--no-subscriptions"].into_iter().chain(snapshot.as_deref());
        let text = self.run("pg_dump", database, &args.collect::<Vec<_>>(), output).await?;
        let mut hash = blake3::Hasher::new();
        // Comments name the release, and newer releases add a random word.
        let is_definition = |line: &&[u8]| !line.starts_with(b"--") && !line.starts_with(b"\\") && !line.is_empty();
        for line in text.split(|byte| *byte == b'\n').filter(is_definition) {
            hash.update(line).update(b"\n");
        }
        Ok(SchemaRevision { user_version: 0, schema: hash.finalize().to_hex().to_string() })
    }

    /// Creates a database from a dump in a file, and compares its schema.
    async fn create(&self, name: &str, part: &PostgresPart, file: &Path) -> Result<()> {
        let (Some(revision), Some(facts)) = (&part.revision, &part.facts) else { return Ok(()) };
        self.drop_database(name).await?;
        let [encoding, collate, ctype, owner] = [&facts.encoding, &facts.collate, &facts.ctype, &facts.owner];
        let owner = owner.replace('"', "\"\"");
        let statement = format!(
            "CREATE DATABASE \"{name}\" OWNER \"{owner}\" TEMPLATE template0 ENCODING {} LC_COLLATE {} LC_CTYPE {}",
            literal(encoding),
            literal(collate),
            literal(ctype)
        );
        self.sql(MAINTENANCE, &statement).await?;
        let file = file.display().to_string();
        self.run("pg_restore", name, &["--exit-on-error", &file], Output::Ignored).await?;
        let found = self.schema(name).await?;
        match found == *revision {
            true => Ok(()),
            false => Err(Error::corrupt(format!("the restored copy of {} has another schema", self.name()))
                .reason("postgres_schema")
                .hint("use the programs of the server's version that made the dump")),
        }
    }

    async fn facts(&self, name: &str) -> Result<crate::core::freeze::PostgresFacts> {
        let query = format!(
            "SELECT json_build_object('encoding', pg_encoding_to_char(encoding), 'collate', datcollate, 'ctype', datctype, \
             'owner', pg_get_userbyid(datdba), 'version', current_setting('server_version')) FROM pg_database AS one WHERE datname = {} \
             AND coalesce(to_jsonb(one) ->> 'datlocprovider', 'c') = 'c'",
            literal(name)
        );
        let text = self.sql(MAINTENANCE, &query).await?;
        if text.is_empty() {
            return Err(Error::unsupported(format!(
                "database {} takes its collation from another library than libc",
                self.name()
            ))
            .reason("postgres_locale"));
        }
        serde_json::from_str(&text)
            .map_err(|error| Error::unavailable(format!("the server's answer is malformed: {error}")))
    }

    fn foreign(&self) -> Error {
        let name = self.name();
        Error::new(ErrorCode::Conflict, format!("another program created database {name} during the restore"))
            .reason("database_written")
            .hint(format!("rename or drop it; {} holds the content from before", was(name)))
    }

    fn absent(&self) -> Error {
        Error::not_found(format!("there is no database {} on the server", self.name()))
    }

    fn as_captured(&self, part: PostgresPart) -> Captured {
        Captured::Postgres { connection: self.connection.to_string(), part }
    }
}

#[async_trait(?Send)]
impl DataSource for PostgresSource {
    fn must_resume(&self, transition: Kind) -> bool {
        transition == Kind::Restore
    }

    /// A dump is one snapshot; only a restore ends connections.
    async fn quiesce(&mut self, transition: Kind) -> Result<()> {
        self.is_freeze = transition != Kind::Restore;
        if self.is_freeze {
            return Ok(());
        }
        let was = was(self.name());
        match (self.exists(&was).await?, self.exists(self.name()).await?) {
            (true, _) => {}
            (false, true) => self.rename(self.name(), &was).await?,
            (false, false) => return Ok(()),
        }
        self.allow(&was, true).await
    }

    async fn resume(&mut self) -> Result<()> {
        if self.is_freeze {
            return Ok(());
        }
        let (was, name) = (was(self.name()), self.name());
        match (self.exists(&was).await?, self.is_open(name).await?) {
            // The restore holds: a restored database is closed until now. What was there becomes an inactive copy, whose
            // removal may fail and takes a checkpoint of the server.
            (true, Some(false)) => {
                let new = new(name);
                self.drop_database(&new).await?;
                self.rename(&was, &new).await?;
            }
            (true, Some(true)) => return Err(self.foreign()),
            (true, None) => self.rename(&was, name).await?,
            (false, None) => return Ok(()),
            (false, Some(_)) => {}
        }
        self.allow(name, true).await?;
        self.discard().await;
        Ok(())
    }

    async fn revision(&mut self, any: bool) -> Result<String> {
        match self.present_name().await? {
            Some(name) => Ok(self.schema(&name).await?.to_string()),
            None if any => Ok("absent".into()),
            None => Err(self.absent()),
        }
    }

    async fn present(&mut self) -> Result<Option<Captured>> {
        let mut part = PostgresPart::default();
        if let Some(name) = self.present_name().await? {
            part.revision = Some(self.schema(&name).await?);
        }
        Ok(Some(self.as_captured(part)))
    }

    async fn pin(&mut self, any: bool) -> Result<(Captured, String)> {
        let Some(name) = self.present_name().await? else {
            return if any {
                Ok((self.as_captured(PostgresPart::default()), "absent".into()))
            } else {
                Err(self.absent())
            };
        };
        let pin = self.begin(&name).await?;
        let revision = self.schema_of(&name, Some(&pin.snapshot)).await?;
        let facts = Some(self.facts(&name).await?);
        self.version = facts.as_ref().map(|facts| facts.version.clone()).unwrap_or_default();
        self.pin = Some(pin);
        let reported = revision.to_string();
        let part = PostgresPart { image: Some(NOT_STORED), bytes: 0, revision: Some(revision), facts };
        Ok((self.as_captured(part), reported))
    }

    async fn lost_by_restore(&mut self) -> Result<Option<String>> {
        let Some(name) = self.present_name().await? else { return Ok(None) };
        let found = self.sql(MAINTENANCE, &LOST.replace(":name", &literal(&name))).await?;
        Ok((!found.is_empty()).then(|| {
            format!(
                "a dump has nothing of the database itself: set again {found}; `ALTER DATABASE`, `GRANT … ON DATABASE` and \
                 `COMMENT ON DATABASE` do"
            )
        }))
    }

    fn held_by(&self) -> (String, Option<PathBuf>) {
        let shown = if self.version.is_empty() { String::new() } else { format!("PostgreSQL {}", self.version) };
        (shown, None)
    }

    fn parameters(&self) -> String {
        format!("pg_dump {}", DUMP.join(" "))
    }

    fn driver(&self) -> Driver {
        Driver::Snapshot
    }

    async fn store(&mut self, captured: &mut Captured) -> Result<()> {
        let Captured::Postgres { part, .. } = captured else { return Err(other_content()) };
        let Some(Pin { session, snapshot, name }) = self.pin.take() else { return Ok(()) };
        let file = self.scratch.join("dump");
        let output = Output::File(&file, limits::BLOB_BYTES);
        let snapshot = format!("--snapshot={snapshot}");
        let args: Vec<&str> = DUMP.into_iter().chain([snapshot.as_str()]).collect();
        self.run("pg_dump", &name, &args, output).await?;
        session.end().await;
        // Reads and unpacks all of it.
        self.verify_dump(&file).await?;
        let (image, bytes) = objects::put(&self.host, file.clone()).await?;
        (part.image, part.bytes) = (Some(image), bytes);
        // It may be large, and the next operation would remove it only then.
        let _ = std::fs::remove_file(file);
        Ok(())
    }

    async fn verify(&mut self, target: &Captured) -> Result<()> {
        let Some(image) = part_of(target)?.image else { return Ok(()) };
        let file = self.scratch.join("target");
        objects::get(&self.host, image, &file).await?;
        self.verify_dump(&file).await
    }

    async fn prepare(&mut self, target: &Captured) -> Result<()> {
        if let Some(name) = self.present_name().await? {
            let found = self.sql(MAINTENANCE, &SUBSCRIPTIONS.replace(":name", &literal(&name))).await?;
            if !found.is_empty() {
                return Err(Error::refused(format!("database {} has subscriptions: {found}", self.name()))
                    .reason("subscriptions")
                    .hint("the server drops no database with one: remove them (`DROP SUBSCRIPTION`), then restore"));
            }
        }
        self.create(&new(self.name()), part_of(target)?, &self.scratch.join("target")).await
    }

    async fn switch(&mut self, target: &Captured, _safety: &Captured) -> Result<()> {
        self.is_switched = true;
        fault::point("source.postgres.switch").map_err(injected)?;
        if self.exists(self.name()).await? {
            return Err(self.foreign());
        }
        let (was, new) = (was(self.name()), new(self.name()));
        match part_of(target)?.image {
            Some(_) => self.rename(&new, self.name()).await?,
            // Back to no database: what was there goes with the inactive copies.
            None if self.exists(&was).await? => {
                self.drop_database(&new).await?;
                self.rename(&was, &new).await?;
            }
            None => {}
        }
        fault::point("source.postgres.switched").map_err(injected)
    }

    async fn revert(&mut self, safety: &Captured, _target: Option<&Captured>) -> Result<()> {
        if !self.is_switched {
            return Ok(());
        }
        let (safety, was, name) = (part_of(safety)?, was(self.name()), self.name());
        if let (Some(image), false) = (safety.image, self.exists(&was).await?) {
            // Another hand removed it.
            let file = self.scratch.join("safety");
            objects::get(&self.host, image, &file).await?;
            self.create(&was, safety, &file).await?;
        }
        match self.is_open(name).await? {
            // Another program created it.
            Some(true) => Err(self.foreign()),
            Some(false) => {
                let new = new(name);
                self.drop_database(&new).await?;
                self.rename(name, &new).await
            }
            None => Ok(()),
        }
    }

    fn may_be_switched(&mut self) {
        self.is_switched = true;
    }

    async fn discard(&mut self) {
        // What stays is removed by the next operation.
        if let Err(error) = self.drop_database(&new(self.name())).await {
            tracing::warn!(database = self.name(), %error, "an inactive copy of a database could not be removed");
        }
    }
}

impl PostgresSource {
    async fn verify_dump(&self, file: &Path) -> Result<()> {
        let argv = ["pg_restore", "-f", "/dev/null", &file.display().to_string()].map(str::to_owned);
        let program = Program {
            argv: &argv,
            kept: &[],
            env: &[("LC_ALL", "C")],
            input: None,
            output: Output::Ignored,
            timeout: self.host.config.limits.freeze_store,
            user: None,
        };
        access::programs(&self.host).await?.run(&program).await.map(drop)
    }
}
