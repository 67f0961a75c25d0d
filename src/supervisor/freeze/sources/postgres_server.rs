//! A PostgreSQL server as a whole, captured by a snapshot of the Btrfs subvolume that is its data directory.
//!
//! ```text
//! freeze   ahead: backup start ─▶ pin: snapshot, backup stop, the log between ─▶ store: as a tree; start a copy of it
//! restore  quiesce: stop ─▶ pin: snapshot ─▶ store ─▶ prepare: check out, start, compare, stop ─▶ switch: exchange
//!          ─▶ resume: start
//! ```
//! A backup is the moment of its stop: what the log holds up to there is replayed when a copy starts. The user's programs
//! of `[postgres.NAME]` stop and start the server. While it is stopped, no acknowledged write can be lost.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;

use super::postgres_files::{COPY, NEW, Places, TRIAL, exists};
use super::postgres_private::{DOES_NOT_START, FACTS, Server, facts_of, process};
use super::postgres_process::Process;
use super::{DataSource, NOT_STORED, other_content, tree_is_whole};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::Captured;
use crate::core::freeze::cost::Driver;
use crate::core::freeze::postgres::ConnectionError;
use crate::core::freeze::server::{BackupEnd, OLDEST, ServerFacts, ServerPart};
use crate::core::kernel::transition::Kind;
use crate::core::limits;
use crate::programs::Session;
use crate::store::Store;
use crate::supervisor::freeze::objects::blocking;
use crate::supervisor::host::Host;
use crate::sys::fault;
use crate::sys::process::which_works_in;
use crate::workspace::Donor;

/// The revision: a backup is whole by itself.
const REVISION: &str = "server";
/// Waits for as long as the server needs to write its present state, so ahead of the pause.
const BEGIN: &str = "SELECT pg_backup_start('ryokan', true);\n";
const END: &str =
    "SELECT json_build_object('label', labelfile, 'segment', pg_walfile_name(lsn)) FROM pg_backup_stop(false);\n";
/// Pause between looks at a server that starts or stops.
const PAUSE: Duration = Duration::from_millis(50);

/// The source.
pub(super) struct ServerSource {
    host: Rc<Host>,
    /// Its name in the configuration.
    name: String,
    server: Server,
    places: Places,
    /// A backup under way, or why there is none.
    backup: Option<Result<Session>>,
    /// Whether the operation is a restore: the server is stopped.
    is_restore: bool,
    /// The time of the snapshot, until it is stored.
    pinned: Option<SystemTime>,
    /// How no server has used the stopped data directory since it was pinned.
    unused: Option<String>,
    /// Whether a copy that does not start may be stored.
    any: bool,
    /// The stored copy.
    donor: Option<Donor>,
    is_switched: bool,
    /// Why it was not started again.
    at_rest: Option<String>,
    kept: Option<PathBuf>,
    /// The server's version at the last look; 0: not known.
    version: Cell<u32>,
}

fn part_of(captured: &Captured) -> Result<&ServerPart> {
    match captured {
        Captured::Server { part, .. } => Ok(part),
        _ => Err(other_content()),
    }
}

fn injected(error: std::io::Error) -> Error {
    Error::unavailable(error.to_string())
}

impl ServerSource {
    /// A server of the configuration.
    ///
    /// # Errors
    /// `notFound`.
    pub fn new(host: Rc<Host>, name: &str) -> Result<ServerSource> {
        let config = host.config.postgres.get(name).cloned().ok_or_else(|| {
            Error::not_found(format!("no PostgreSQL server {name:?} is configured"))
                .reason("source")
                .hint(format!("add [postgres.{name}] to the configuration, then restart the daemon"))
        })?;
        let wrong = |error: ConnectionError| Error::internal(error.to_string());
        let connection = config.connection.parse().map_err(wrong)?;
        let places = Places::new(&host, config.data.clone());
        let server = Server { host: Rc::clone(&host), config, connection };
        Ok(ServerSource {
            host,
            name: name.to_owned(),
            server,
            places,
            backup: None,
            is_restore: false,
            pinned: None,
            unused: None,
            any: false,
            donor: None,
            is_switched: false,
            at_rest: None,
            kept: None,
            version: Cell::new(0),
        })
    }

    async fn on<T: Send + 'static>(&self, work: impl FnOnce(&Places) -> Result<T> + Send + 'static) -> Result<T> {
        let places = self.places.clone();
        blocking(move || work(&places)).await
    }

    async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Places, &Store) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let places = self.places.clone();
        self.host.store.run_beside(move |store| Ok(work(&places, store))).await?
    }

    fn as_captured(&self, part: ServerPart) -> Captured {
        Captured::Server { server: self.name.clone(), part }
    }

    /// Refuses a server that a backup would not hold the whole of.
    fn check_facts(&self, facts: &ServerFacts) -> Result<()> {
        self.version.set(facts.version);
        let refused = |what: String, hint: &str| Err(Error::unsupported(what).reason("postgres").hint(hint));
        let data = &self.places.data;
        if facts.version / 10_000 < OLDEST {
            return refused(
                format!("the server {} has version {}", self.name, facts.version / 10_000),
                "it needs version 15 or later; add its databases with --postgres: a dump",
            );
        }
        if Path::new(&facts.data) != data {
            return refused(
                format!("the data directory of the server is {}, not {}", facts.data, data.display()),
                "correct data or connection in the configuration; data has no symbolic links",
            );
        }
        if facts.recovery {
            return refused(format!("the server {} follows another one", self.name), "freeze that one");
        }
        match facts.tablespaces {
            0 => Ok(()),
            _ => refused(
                format!("the server {} has tablespaces outside of its data directory", self.name),
                "move their tables, or add its databases with --postgres: a dump",
            ),
        }
    }

    async fn begin(&self) -> Result<Session> {
        let mut session = self.server.session().await?;
        let facts = session.ask(&format!("{FACTS};\n"), limits::POSTGRES_ANSWER_BYTES).await?;
        self.check_facts(&facts_of(&facts)?)?;
        session.ask(BEGIN, limits::POSTGRES_ANSWER_BYTES).await?;
        Ok(session)
    }

    fn late(&self, why: &str) -> Error {
        let (name, timeout) = (&self.name, self.server.config.timeout);
        Error::deadline(format!("the server {name} {why} within {timeout:?}")).reason("server_late")
    }

    /// Waits until it is certain that the server no longer runs.
    async fn await_stopped(&self) -> Result<()> {
        let until = Instant::now() + self.server.config.timeout;
        loop {
            match self.server.process().await? {
                Process::Ended => return Ok(()),
                _ if Instant::now() <= until => tokio::time::sleep(PAUSE).await,
                Process::Runs => return Err(self.late("was stopped, but did not end")),
                Process::Unknown => return Err(Process::unknown(&self.places.data)),
            }
        }
    }

    /// Starts the server, and waits until it answers. One that is still being stopped ends first, if it does in time.
    ///
    /// What works in the data directory may be another program. The user's program must accept to run twice.
    async fn start(&self) -> Result<()> {
        let timeout = self.server.config.timeout;
        let (mut until, mut is_started) = (Instant::now() + timeout, false);
        loop {
            let Err(error) = self.server.facts().await else { return Ok(()) };
            let is_late = Instant::now() > until;
            if is_started && is_late {
                let late = self.late("was started, but does not answer");
                let message = format!("{}: {}", late.message, error.message);
                return Err(self.with_process(Error { message, said: error.said, ..late }).await);
            }
            if is_started || (!is_late && process(&self.places.data).await? == Process::Runs) {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            if let Err(error) = self.server.own(&self.server.config.start).await {
                return Err(self.with_process(error).await);
            }
            (until, is_started) = (Instant::now() + timeout, true);
        }
    }

    /// Names the process that keeps the server from a start, if one does.
    async fn with_process(&self, error: Error) -> Error {
        let data = self.places.data.clone();
        match blocking(move || Ok(which_works_in(&data))).await {
            Ok(Some(id)) => {
                let message = format!("{}; process {id} works in {}", error.message, self.places.data.display());
                Error { message, ..error }
            }
            _ => error,
        }
    }

    async fn refuse_running(&self) -> Result<()> {
        match self.server.process().await? {
            Process::Ended => Ok(()),
            Process::Unknown => Err(Process::unknown(&self.places.data)),
            Process::Runs => {
                Err(Error::new(ErrorCode::Conflict, format!("the server {} was started during the restore", self.name))
                    .reason("server_started")
                    .hint("keep its service manager from starting it, then try again"))
            }
        }
    }

    /// A snapshot of the running server, and the log up to the end of the backup, which is the moment that it holds.
    async fn pin_running(&mut self) -> Result<ServerPart> {
        let mut session = match self.backup.take() {
            Some(begun) => begun?,
            None => return Err(Error::internal("no backup was begun")),
        };
        let taken = SystemTime::now();
        self.pinned = Some(taken);
        self.on(|places| places.snapshot(&places.data, COPY)).await?;
        fault::point("source.server.snapshot").map_err(injected)?;
        let end = session.ask(END, limits::POSTGRES_ANSWER_BYTES).await?;
        let end: BackupEnd = serde_json::from_str(&end)
            .map_err(|error| Error::unavailable(format!("the server's answer is malformed: {error}")))?;
        self.on(move |places| places.complete(&end)).await?;
        session.end().await;
        Ok(ServerPart { tree: Some(NOT_STORED), ..ServerPart::default() })
    }

    async fn pin_stopped(&mut self) -> Result<ServerPart> {
        self.refuse_running().await?;
        self.unused = None;
        if !self.places.is_there()? {
            return Ok(ServerPart::default());
        }
        self.pinned = Some(SystemTime::now());
        let pin = |places: &Places| {
            places.snapshot(&places.data, COPY)?;
            places.pinned_digest()
        };
        self.unused = Some(self.on(pin).await?);
        Ok(ServerPart { tree: Some(NOT_STORED), ..ServerPart::default() })
    }

    /// Stores the copy, and starts a copy of it. During a restore, it gives files to the checkout.
    async fn stored(&mut self, taken: SystemTime) -> Result<ServerPart> {
        let is_running = !self.is_restore;
        let (mut stored, donor) = self
            .with_store(move |places, store| {
                places.strip(is_running)?;
                places.unsettle(taken)?;
                places.store(store)
            })
            .await?;
        match self.verified().await? {
            Some((system, revision)) => (stored.system, stored.revision) = (system, Some(revision)),
            None => stored.revision = None,
        }
        self.donor = donor;
        Ok(stored)
    }

    /// Starts a copy of the stored copy. Of a state that may be damaged, `None` says that it is.
    async fn verified(&self) -> Result<Option<(String, crate::core::freeze::SchemaRevision)>> {
        self.on(|places| places.snapshot(&places.at(COPY), TRIAL)).await?;
        let tried = self.server.try_copy(&self.places, TRIAL, false).await;
        self.on(|places| places.remove(TRIAL)).await?;
        match tried {
            Ok(tried) => Ok(Some((tried.system, tried.revision))),
            Err(error) if self.any && error.reason == DOES_NOT_START => {
                tracing::warn!(server = %self.name, %error, "the data directory before a restore does not start");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Stops servers of inactive copies that a former daemon started.
    async fn stop_copies(&self) {
        for name in [TRIAL, NEW] {
            let data = self.places.at(name);
            match process(&data).await {
                Ok(Process::Runs) => {}
                // No server of ours was started in a former data directory: its file may name any process.
                Ok(Process::Unknown) if name == TRIAL || self.places.is_restored(&data).unwrap_or(false) => {}
                _ => continue,
            }
            let user = self.places.owner(&data).ok().filter(|_| nix::unistd::geteuid().is_root());
            let stop = async {
                self.on(|places| places.open()).await?;
                let stopped = self.server.stop_copy(&data, "immediate", user).await;
                self.on(|places| places.close()).await.and(stopped)
            };
            if let Err(error) = stop.await {
                tracing::warn!(server = %self.name, %error, "the server of an inactive copy could not be stopped");
            }
        }
    }

    async fn clear(&mut self) {
        self.donor = None;
        self.stop_copies().await;
        // What stays is removed by the next operation.
        let _ = self
            .on(|places| {
                places.discard();
                Ok(())
            })
            .await;
    }
}

#[async_trait(?Send)]
impl DataSource for ServerSource {
    /// A backup ends with its session; only a restore stops the server.
    fn must_resume(&self, transition: Kind) -> bool {
        transition == Kind::Restore
    }

    async fn ahead(&mut self) {
        self.clear().await;
        // An error is reported when the backup is needed, within no pause of its own.
        self.backup = Some(self.begin().await);
    }

    async fn quiesce(&mut self, transition: Kind) -> Result<()> {
        self.is_restore = transition == Kind::Restore;
        if !self.is_restore {
            return Ok(());
        }
        self.backup = None;
        if self.server.process().await? != Process::Ended {
            self.on(|places| {
                places.record_stopped()?;
                // The server of a restore that has not ended: another program started it. Only this says so once it stops.
                if places.is_restored(&places.data)? { places.mark_used() } else { Ok(()) }
            })
            .await?;
            fault::point("source.server.stop").map_err(injected)?;
            self.server.own(&self.server.config.stop).await?;
        }
        self.await_stopped().await
    }

    async fn resume(&mut self) -> Result<()> {
        if let Some(Ok(session)) = self.backup.take() {
            // The backup is abandoned.
            session.end().await;
        }
        if self.places.is_stopped()? {
            fault::point("source.server.start").map_err(injected)?;
            if self.places.may_start()? {
                self.start().await?;
            } else {
                let data = self.places.data.display();
                self.at_rest = Some(match self.places.is_there()? {
                    true => format!("its server is stopped: no server started in {data} as it was captured"),
                    false => format!("its server is stopped: {data} did not exist when it was captured"),
                });
            }
            self.on(|places| places.clear_stopped()).await?;
        }
        self.on(|places| if places.is_there()? { places.unmark(&places.data) } else { Ok(()) }).await?;
        if self.is_restore {
            self.clear().await;
        }
        Ok(())
    }

    async fn revision(&mut self, _any: bool) -> Result<String> {
        if self.is_restore {
            self.refuse_running().await?;
        } else if let Some(Err(error)) = &self.backup {
            return Err(error.clone());
        }
        Ok(REVISION.into())
    }

    async fn check_reachable(&mut self) -> Result<()> {
        self.on(|places| places.check()).await?;
        // The same as a freeze needs; the session's end abandons the backup.
        self.begin().await?.end().await;
        Ok(())
    }

    async fn present(&mut self) -> Result<Option<Captured>> {
        let mut part = ServerPart::default();
        if let Ok(facts) = self.server.facts().await {
            self.check_facts(&facts)?;
            part.revision = Some(self.server.definitions().await?);
            (part.system, part.tree) = (facts.system, Some(NOT_STORED));
        } else if self.places.is_there()? {
            part.tree = Some(NOT_STORED);
        }
        Ok(Some(self.as_captured(part)))
    }

    async fn pin(&mut self, any: bool) -> Result<(Captured, String)> {
        self.any = any;
        let part = if self.is_restore { self.pin_stopped().await? } else { self.pin_running().await? };
        Ok((self.as_captured(part), REVISION.into()))
    }

    fn held_by(&self) -> (String, Option<PathBuf>) {
        let version = self.version.get();
        let shown = (version > 0).then(|| format!("PostgreSQL {}.{}", version / 10_000, version % 10_000));
        (shown.unwrap_or_default(), Some(self.places.data.clone()))
    }

    fn driver(&self) -> Driver {
        Driver::Subvolume
    }

    fn credentials_held(&self) -> Option<&'static str> {
        Some(
            "it is a physical copy, which holds the server's credentials: verifiers of passwords, user mappings, \
             connections of subscriptions and of primary_conninfo, and keys in the data directory",
        )
    }

    async fn store(&mut self, captured: &mut Captured) -> Result<()> {
        let Captured::Server { part, .. } = captured else { return Err(other_content()) };
        let Some(taken) = self.pinned.take() else { return Ok(()) };
        let stored = self.stored(taken).await;
        if !self.is_restore || stored.is_err() {
            self.clear().await;
        }
        *part = stored?;
        Ok(())
    }

    async fn verify(&mut self, target: &Captured) -> Result<()> {
        let Some(tree) = part_of(target)?.tree else { return Ok(()) };
        tree_is_whole(&self.host, tree, "server").await
    }

    async fn prepare(&mut self, target: &Captured) -> Result<()> {
        let part = part_of(target)?.clone();
        if part.tree.is_none() {
            return self.on(|places| places.remove_new()).await;
        }
        let (wanted, donor) = (part.clone(), self.donor.take());
        self.with_store(move |places, store| places.checkout(store, &wanted, donor.as_ref(), true)).await?;
        if let Some(revision) = &part.revision {
            let tried = self.server.try_copy(&self.places, NEW, true).await?;
            if (&tried.system, &tried.revision) != (&part.system, revision) {
                return Err(Error::corrupt(format!("the restored copy of {} has other definitions", self.name))
                    .reason("postgres_schema")
                    .hint("use the programs of the server's version that made the freeze"));
            }
        }
        self.on(|places| places.seal_restored()).await
    }

    async fn switch(&mut self, target: &Captured, safety: &Captured) -> Result<()> {
        self.is_switched = true;
        fault::point("source.server.switch").map_err(injected)?;
        self.refuse_running().await?;
        let (target, safety) = (part_of(target)?, part_of(safety)?);
        let (is_wanted, was_there) = (target.tree.is_some(), safety.tree.is_some());
        let (answers, unused) = (target.revision.is_some(), self.unused.clone());
        let changed = Error::conflict(format!("the data directory of {} was changed", self.name));
        self.on(move |places| {
            let is_prepared = places.is_restored(&places.at(NEW))? == is_wanted;
            if places.is_there()? != was_there || !is_prepared {
                return Err(changed.reason("server_changed"));
            }
            let was_stopped = places.is_stopped()?;
            if answers {
                places.record_stopped()?;
            }
            // A server may have been started and stopped meanwhile: what it acknowledged is only there.
            if let Some(unused) = &unused
                && let Err(error) = places.check_unchanged(unused)
            {
                // It did not run before, so it is not started.
                if !was_stopped {
                    places.clear_stopped()?;
                }
                return Err(error);
            }
            places.exchange()
        })
        .await?;
        fault::point("source.server.switched").map_err(injected)
    }

    async fn revert(&mut self, safety: &Captured, _target: Option<&Captured>) -> Result<()> {
        if !self.is_switched {
            return Ok(());
        }
        self.refuse_running().await?;
        let (safety, at_ms) = (part_of(safety)?.clone(), self.host.now_ms());
        self.donor = None;
        let kept = self.with_store(move |places, store| reverted(places, store, &safety, at_ms)).await?;
        if let Some(kept) = kept {
            let (path, place) = (self.places.data.display().to_string(), kept.display().to_string());
            tracing::warn!(%path, kept = %place, "another program used a server during a restore that is reverted");
            self.host.events.publish("", "directory_kept", serde_json::json!({ "path": path, "kept": place }));
            self.kept = Some(kept);
        }
        Ok(())
    }

    fn may_be_switched(&mut self) {
        self.is_switched = true;
    }

    async fn discard(&mut self) {
        self.clear().await;
    }

    fn at_rest(&self) -> Option<String> {
        self.at_rest.clone()
    }

    fn kept(&self) -> Option<&Path> {
        self.kept.as_deref()
    }
}

/// Puts the former data directory back, which the mark of a restored one tells apart. A restored one that another program
/// used is moved away with this time in its name, and returned.
fn reverted(places: &Places, store: &Store, safety: &ServerPart, at_ms: i64) -> Result<Option<PathBuf>> {
    let (data, new) = (places.data.clone(), places.at(NEW));
    // What an attempt before did not come to.
    let kept = places.keep_used(at_ms)?;
    let (is_there, has_new) = (places.is_there()?, exists(&new)?);
    if is_there && !places.is_restored(&data)? {
        // Not switched, or back already.
        return Ok(kept);
    }
    let is_former = has_new && !places.is_restored(&new)?;
    match (is_former, safety.tree.is_some()) {
        (true, _) => places.exchange()?,
        (false, true) => {
            places.checkout(store, safety, None, false)?;
            places.exchange()?;
        }
        // There was none.
        (false, false) => {
            places.remove_new()?;
            places.exchange()?;
        }
    }
    Ok(places.keep_used(at_ms)?.or(kept))
}

impl Drop for ServerSource {
    fn drop(&mut self) {
        // The freeze failed before it was stored.
        if self.pinned.take().is_some()
            && let Err(error) = self.places.remove(COPY)
        {
            tracing::warn!(%error, "an inactive copy of a server could not be removed");
        }
    }
}
