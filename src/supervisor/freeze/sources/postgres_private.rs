//! Programs of a PostgreSQL server of the configuration: on the server itself, and on inactive copies of its data
//! directory, which they start on a socket that only the server's user reaches.
//!
//! A started copy runs no jobs: it loads no libraries ahead, archives nothing, follows no other server.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use super::postgres_files::Places;
use super::postgres_process::Process;
use crate::config::PostgresServer;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::SchemaRevision;
use crate::core::freeze::postgres::Connection;
use crate::core::freeze::server::{ServerFacts, control_value};
use crate::core::limits;
use crate::programs::{Output, Program, Session};
use crate::supervisor::freeze::access;
use crate::supervisor::freeze::objects::blocking;
use crate::supervisor::host::Host;

/// Variables of the daemon's environment for the user's own programs: those by which they reach the user's service
/// manager. The variables for PostgreSQL's programs would change the server that they start.
const KEPT_FOR_OWN: [&str; 2] = ["XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"];
/// Variables of the daemon's environment that name files with credentials and how to connect; none holds a secret.
const KEPT: [&str; 5] = ["PGPASSFILE", "PGSSLMODE", "PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY"];
const ENVIRONMENT: [(&str, &str); 4] =
    [("PGAPPNAME", "ryokan"), ("PGCONNECT_TIMEOUT", "10"), ("LC_ALL", "C"), ("PGOPTIONS", OPTIONS)];
/// The names in the daemon's own queries are PostgreSQL's, whatever a database sets; a backup waits for other members.
const OPTIONS: &str = "-c search_path=pg_catalog -c idle_session_timeout=0 -c statement_timeout=0";
/// Reason of a data directory in which no server starts.
pub(super) const DOES_NOT_START: &str = "postgres_start";
/// What `pg_ctl` may take longer than its deadline here: at that, it has not said that the server does not start.
const LATE: u64 = 60;
const QUIET: [&str; 6] = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"];

/// What a server reports about itself, as one line.
pub(super) const FACTS: &str = "SELECT json_build_object('version', current_setting('server_version_num')::int, \
    'data', current_setting('data_directory'), 'recovery', pg_is_in_recovery(), \
    'tablespaces', (SELECT count(*) FROM pg_tablespace WHERE spcname NOT IN ('pg_default', 'pg_global')), \
    'system', (SELECT system_identifier::text FROM pg_control_system()))";
/// The role that the cluster was made with: it may read all definitions.
const FIRST_ROLE: &str = "SELECT rolname FROM pg_roles WHERE oid = 10";
/// Settings of a started copy. They stand above what the data directory itself sets.
const SETTINGS: &str = "-c listen_addresses= -c port=5432 -c ssl=off -c archive_mode=off -c archive_command= \
    -c restore_command= -c primary_conninfo= -c primary_slot_name= -c shared_preload_libraries= \
    -c session_preload_libraries= -c local_preload_libraries= -c max_logical_replication_workers=0 -c autovacuum=off \
    -c logging_collector=off -c log_destination=stderr -c log_min_messages=warning -c external_pid_file= \
    -c wal_level=logical -c max_replication_slots=1000 -c shared_buffers=32MB -c huge_pages=off -c jit=off";

/// The programs of a server.
pub(super) struct Server {
    pub host: Rc<Host>,
    pub config: PostgresServer,
    pub connection: Connection,
}

/// Reads what [`FACTS`] answers.
pub(super) fn facts_of(text: &str) -> Result<ServerFacts> {
    serde_json::from_str(text.trim())
        .map_err(|error| Error::unavailable(format!("the server's answer is malformed: {error}")))
}

/// The end of a server's log, as one line.
fn last_words(log: &Path) -> String {
    use std::io::{Read as _, Seek as _, SeekFrom};
    use std::os::unix::fs::OpenOptionsExt as _;
    let read = || {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let mut file = std::fs::File::options().read(true).custom_flags(flags).open(log)?;
        let from = file.metadata()?.len().saturating_sub(limits::POSTGRES_LOG_BYTES);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(limits::POSTGRES_LOG_BYTES).read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&bytes).trim().replace('\n', "; "))
    };
    read().unwrap_or_default()
}

impl Server {
    fn program(&self, name: &str) -> String {
        self.config.programs.join(name).display().to_string()
    }

    async fn run(
        &self,
        argv: &[String],
        output: Output<'_>,
        (timeout, user): (Duration, Option<(u32, u32)>),
    ) -> Result<Vec<u8>> {
        self.run_in(&Program { argv, kept: &KEPT, env: &ENVIRONMENT, input: None, output, timeout, user }).await
    }

    async fn run_in(&self, program: &Program<'_>) -> Result<Vec<u8>> {
        access::programs(&self.host).await?.run(program).await.map_err(|error| match error.reason.as_str() {
            "program" => error.hint("correct [postgres] in the configuration: programs, start and stop"),
            _ => error,
        })
    }

    /// Runs the user's own program.
    pub async fn own(&self, argv: &[String]) -> Result<()> {
        let (kept, timeout) = (&KEPT_FOR_OWN, self.config.timeout);
        let program = Program { argv, kept, env: &[], input: None, output: Output::Ignored, timeout, user: None };
        self.run_in(&program).await.map(drop)
    }

    fn client(&self, name: &str, to: &Connection, database: &str, args: &[&str]) -> Vec<String> {
        let mut argv = vec![self.program(name), "-w".into()];
        for (option, value) in [("-h", &to.host), ("-p", &to.port), ("-U", &to.user)] {
            if !value.is_empty() {
                argv.extend([option.to_owned(), value.clone()]);
            }
        }
        argv.extend([database.to_owned(), to.database.clone()]);
        argv.extend(args.iter().map(|arg| (*arg).to_owned()));
        argv
    }

    async fn ask(&self, to: &Connection, query: &str) -> Result<String> {
        let argv = self.client("psql", to, "-d", &[&QUIET[..], &["-c", query]].concat());
        let output = Output::Bytes(limits::POSTGRES_ANSWER_BYTES);
        let answer = self.run(&argv, output, (self.host.config.limits.freeze_step, None)).await?;
        Ok(String::from_utf8_lossy(&answer).trim().to_owned())
    }

    /// A session on the server itself.
    pub async fn session(&self) -> Result<Session> {
        let argv = self.client("psql", &self.connection, "-d", &QUIET);
        let program = Program {
            argv: &argv,
            kept: &KEPT,
            env: &ENVIRONMENT,
            input: None,
            output: Output::Ignored,
            timeout: self.host.config.limits.freeze_step,
            user: None,
        };
        access::programs(&self.host).await?.start(&program)
    }

    /// What the server itself reports.
    pub async fn facts(&self) -> Result<ServerFacts> {
        facts_of(&self.ask(&self.connection, FACTS).await?)
    }

    /// A digest of all definitions of all databases, on the server itself.
    pub async fn definitions(&self) -> Result<SchemaRevision> {
        self.definitions_of(&self.connection).await
    }

    async fn definitions_of(&self, of: &Connection) -> Result<SchemaRevision> {
        // On the server itself, a lock of another session may last.
        let wait = format!("--lock-wait-timeout={}", self.host.config.limits.freeze_step.as_millis());
        let args = ["--schema-only", "--no-comments", "--no-role-passwords", &wait];
        let argv = self.client("pg_dumpall", of, "-l", &args);
        // Never in a file: definitions may hold credentials.
        let output = Output::Bytes(limits::POSTGRES_SCHEMA_BYTES);
        let text = self.run(&argv, output, (self.host.config.limits.freeze_store, None)).await?;
        let mut hash = blake3::Hasher::new();
        // Comments name the release, and newer releases add a random word.
        let is_definition = |line: &&[u8]| {
            let is_random = line.starts_with(b"\\restrict") || line.starts_with(b"\\unrestrict");
            !line.starts_with(b"--") && !is_random && !line.is_empty()
        };
        for line in text.split(|byte| *byte == b'\n').filter(is_definition) {
            hash.update(line).update(b"\n");
        }
        Ok(SchemaRevision { user_version: 0, schema: hash.finalize().to_hex().to_string() })
    }

    /// The process of the server itself.
    pub async fn process(&self) -> Result<Process> {
        Ok(match process(&self.config.data).await? {
            Process::Runs => Process::Runs,
            // It may also answer from elsewhere.
            _ if self.facts().await.is_ok() => Process::Runs,
            found => found,
        })
    }

    /// A value that `pg_controldata` reports of an inactive copy. `user`: that of the server, where this is root.
    async fn control(&self, data: &Path, key: &str, user: Option<(u32, u32)>) -> Result<String> {
        let argv = [self.program("pg_controldata"), "-D".into(), data.display().to_string()];
        let output = Output::Bytes(limits::POSTGRES_ANSWER_BYTES);
        let text = self.run(&argv, output, (self.host.config.limits.freeze_step, user)).await?;
        let text = String::from_utf8_lossy(&text);
        let value = control_value(&text, key).map(str::to_owned);
        value.ok_or_else(|| Error::corrupt(format!("pg_controldata reports no {key} of {}", data.display())))
    }

    /// Starts an inactive copy, reads its system and its definitions, and stops it. `lasting`: it is used afterwards,
    /// so the stop is clean and everything is durable.
    pub async fn try_copy(&self, places: &Places, name: &str, lasting: bool) -> Result<Tried> {
        let data = places.at(name);
        let (home, copy) = (places.clone(), data.clone());
        let prepare = move || -> Result<(u32, u32)> {
            let owner = home.owner(&copy)?;
            home.forget_process(&copy)?;
            home.make_run(owner)?;
            home.open()?;
            Ok(owner)
        };
        let owner = blocking(prepare).await?;
        let user = nix::unistd::geteuid().is_root().then_some(owner);
        let tried = self.tried(places, &data, (lasting, user)).await;
        let mode = if lasting && tried.is_ok() { "fast" } else { "immediate" };
        let stopped = self.stop_copy(&data, mode, user).await;
        let home = places.clone();
        blocking(move || home.close()).await?;
        let tried = tried.map_err(|error| {
            let said = last_words(&places.run().join("log"));
            let what = if error.reason == DOES_NOT_START { "does not start" } else { "could not be tried" };
            let message = format!("a copy of {} {what}: {}: {said}", places.data.display(), error.message);
            Error { message, ..error }
        })?;
        stopped.map(|()| tried)
    }

    async fn tried(&self, places: &Places, data: &Path, (lasting, user): (bool, Option<(u32, u32)>)) -> Result<Tried> {
        let timeout = self.host.config.limits.freeze_store;
        let prepared = match self.control(data, "max_prepared_xacts setting", user).await {
            // The server reports that better.
            Err(error) if error.reason == "program_failed" || error.code == ErrorCode::Corrupt => "0".into(),
            prepared => prepared?,
        };
        let run = places.run();
        let quoted = |file: &str| format!("\"{}\"", run.join(file).display());
        let options = format!(
            "{SETTINGS} -c config_file={} -c hba_file={} -c ident_file={} -c unix_socket_directories=\"{}\" \
             -c max_prepared_transactions={prepared} -c fsync={}",
            quoted("settings"),
            quoted("access"),
            quoted("settings"),
            run.display(),
            if lasting { "on" } else { "off" }
        );
        let most = (timeout.as_secs() + LATE).to_string();
        let argv = [
            self.program("pg_ctl"),
            "start".into(),
            "-s".into(),
            "-w".into(),
            "-t".into(),
            most,
            "-D".into(),
            data.display().to_string(),
            "-l".into(),
            run.join("log").display().to_string(),
            "-o".into(),
            options,
        ];
        // Whatever else fails says nothing about the data directory.
        self.run(&argv, Output::Ignored, (timeout, user)).await.map_err(|error| match error.reason.as_str() {
            "program_failed" => error.reason(DOES_NOT_START),
            _ => error,
        })?;
        let socket = run.display().to_string();
        let to = Connection { host: socket, port: "5432".into(), ..self.connection.clone() };
        let system = facts_of(&self.ask(&to, FACTS).await?)?.system;
        let first = Connection { user: self.ask(&to, FIRST_ROLE).await?, ..to };
        Ok(Tried { system, revision: self.definitions_of(&first).await? })
    }

    /// Stops the server of an inactive copy, if one may run. Afterwards it is certain that none does.
    pub async fn stop_copy(&self, data: &Path, mode: &str, user: Option<(u32, u32)>) -> Result<()> {
        if process(data).await? == Process::Ended {
            return Ok(());
        }
        let timeout = self.host.config.limits.freeze_store;
        let most = timeout.as_secs().max(1).to_string();
        let argv = ["stop", "-s", "-w", "-t", &most, "-m", mode, "-D", &data.display().to_string()];
        let argv: Vec<String> = [self.program("pg_ctl")].into_iter().chain(argv.map(str::to_owned)).collect();
        self.run(&argv, Output::Ignored, (timeout, user)).await?;
        match process(data).await? {
            Process::Ended => Ok(()),
            Process::Runs | Process::Unknown => {
                let message = format!("the server of {} was stopped, but may still run", data.display());
                Err(Error::unavailable(message).reason("server_late"))
            }
        }
    }
}

/// Looks for the server of a data directory, outside of the event loop.
pub(super) async fn process(data: &Path) -> Result<Process> {
    let data = data.to_owned();
    blocking(move || Ok(Process::of(&data))).await
}

/// What a started copy reports.
pub(super) struct Tried {
    pub system: String,
    pub revision: SchemaRevision,
}
