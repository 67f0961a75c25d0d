//! One move of a kernel to another host.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::convoy::{Convoy, PreparedKernel};
use super::keyed::{self, MoveKey, Recalled};
use super::steps::Steps;
use super::{Active, Fate, Outgoing, memory, next_epoch, older_checkpoints, repeat, settings, write};
use crate::bundle::{self, Head, Packed};
use crate::catalog::HandoverRow;
use crate::catalog::state::RootKind;
use crate::core::checkpoint::Checkpoint;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::handover::{MoveOptions, Side, Source, SourceAction, SourceEvent};
use crate::core::ids::{Digest, HandoverId, HostId};
use crate::core::info::TeleportReport;
use crate::core::kernel::transition::{Kind, Transition};
use crate::core::limits;
use crate::core::quantity::{format_duration, format_size};
use crate::core::snapshot::{Choice, Continuing, KindRequest, PortableKind, choose_for_move};
use crate::supervisor::checkpoint;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change};
use crate::supervisor::kernel::transition::ExclusiveTransition;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::bundle_io::{client_error, packed};
use crate::teleport::source::Session;
use crate::teleport::transport::Transport;
use crate::teleport::{Progress, Seal, Sent};
use crate::workspace::Seen;

/// The phase within the pause.
const SEALING: &str = "sealing";

/// The parts of a move.
pub(super) struct Move {
    supervisor: Supervisor,
    pub(super) host: Rc<Host>,
    pub(super) kernel: Rc<Kernel>,
    pub(super) actor: Actor,
    pub(super) row: HandoverRow,
    pub(super) outgoing: Outgoing,
    /// The other host, once it is recorded.
    target: Cell<Option<HostId>>,
    machine: Cell<Source>,
    cancel: CancellationToken,
    fate: watch::Sender<Fate>,
    progress: Progress,
    pub(super) options: MoveOptions,
    /// The kind; the target's answer may change it.
    pub(super) choice: RefCell<Choice>,
    /// Whether the target knows of the move.
    pub(super) offered: Cell<bool>,
    /// The number of the oldest checkpoint that moves, beside those that are needed or pinned.
    pub(super) since: u64,
    /// Checkpoints that are left behind.
    pub(super) left_behind: Cell<u64>,
    /// Processes and jobs that the offer named, and those that began later.
    pub(super) named_work: RefCell<HashSet<String>>,
    pub(super) later_work: RefCell<Vec<String>>,
    /// The objects that were sent or named.
    seen: RefCell<Seen>,
    /// The excerpt of the audit log that was sent.
    pub(super) excerpt: Cell<Option<Digest>>,
    frozen_at: Cell<Option<Instant>>,
    pause: Cell<Duration>,
    steps: Steps,
    /// Remembers the move for a repeated request.
    key: Option<MoveKey>,
    /// The group with which it moves.
    convoy: Option<Rc<Convoy>>,
    begun: Instant,
}

/// Moves a kernel to the host at the other end of `to`. Dropping the call before the commit cancels the move.
///
/// # Errors
/// Refusals of either host, and failures before the commit: the kernel continues here, unchanged.
pub async fn teleport(
    supervisor: &Supervisor,
    kernel: &Rc<Kernel>,
    to: &str,
    options: MoveOptions,
    actor: &Actor,
    progress: Progress,
) -> Result<TeleportReport> {
    teleport_in(supervisor, kernel, to, options, actor, (progress, None)).await
}

/// As [`teleport`], perhaps with its group: it departs when the group is decided, and the caller notifies the target.
///
/// # Errors
/// As [`teleport`].
pub(crate) async fn teleport_in(
    supervisor: &Supervisor,
    kernel: &Rc<Kernel>,
    to: &str,
    options: MoveOptions,
    actor: &Actor,
    (progress, convoy): (Progress, Option<Rc<Convoy>>),
) -> Result<TeleportReport> {
    let transport = Transport::parse(to)?;
    let host = supervisor.host();
    if (1..limits::HANDOVER_RATE_MIN).contains(&options.limit_rate) {
        let least = format_size(limits::HANDOVER_RATE_MIN);
        return Err(Error::invalid(format!("a move sends at least {least} a second")));
    }
    let there = options.isolation.unwrap_or(kernel.spec().isolation);
    let mut choice = choose_for_move(options.kind, Continuing::of(&kernel.spec()), there)?;
    if actor.uid != host.own_actor().uid {
        return Err(Error::refused("the daemon runs the transport's command, so only its own user may name one")
            .reason("transport")
            .hint("`ryokan export` here and `ryokan import` there make a copy; a daemon of your own moves kernels"));
    }
    if choice.kind == PortableKind::Teleport
        && let Err(error) = memory::check(host, kernel)
    {
        match options.kind {
            KindRequest::Auto => choice = Choice { kind: PortableKind::Checkpoint, why: error.message },
            KindRequest::Only(_) => return Err(error),
        }
    }
    let cancel = convoy.as_ref().map_or_else(CancellationToken::new, |convoy| convoy.cancel.clone());
    let _guard = cancel.clone().drop_guard();
    let key = match options.key.as_str() {
        "" => None,
        key => match keyed::recall(supervisor, kernel, to, key, actor).await? {
            Recalled::Moved(report) => return Ok(*report),
            Recalled::New(key) => Some(key),
        },
    };
    check(kernel, actor, options.expected_version).await?;
    match &convoy {
        Some(_) => kernel.refuse_unfinished_group()?,
        None => supervisor.refuse_member(kernel).await?,
    }
    let since = match &options.since {
        Some(reference) => checkpoint::find(kernel, reference).await?.number,
        None => 0,
    };
    let transition = Rc::new(ExclusiveTransition::begin(kernel, Kind::HandoverOut)?);
    let epoch = next_epoch(kernel.epoch)?;
    let outgoing = Outgoing { to: to.to_owned(), name: kernel.spec().name.to_string(), epoch, host: None };
    let row = HandoverRow {
        id: HandoverId::from_bytes(host.random()),
        side: Side::Out,
        kernel: kernel.id,
        uid: kernel.uid,
        live: false,
        record: write(&outgoing)?,
        at_ms: host.now_ms(),
    };
    let moving = Rc::new(Move {
        supervisor: supervisor.clone(),
        host: Rc::clone(host),
        kernel: Rc::clone(kernel),
        actor: actor.clone(),
        row,
        outgoing,
        target: Cell::new(None),
        machine: Cell::new(Source::begin().0),
        cancel,
        fate: watch::Sender::new(Fate::Open),
        progress,
        options,
        choice: RefCell::new(choice),
        offered: Cell::new(false),
        since,
        left_behind: Cell::new(0),
        named_work: RefCell::default(),
        later_work: RefCell::default(),
        seen: RefCell::default(),
        excerpt: Cell::new(None),
        frozen_at: Cell::new(None),
        pause: Cell::new(Duration::ZERO),
        steps: Steps::since(Instant::now()),
        key,
        convoy,
        begun: Instant::now(),
    });
    // In its own task: once it is committed, the move does not depend on the client.
    let running = tokio::task::spawn_local(async move { moving.run(transport, transition).await });
    running.await.map_err(|error| Error::internal(error.to_string()))?
}

/// Checks that the kernel may be moved at all.
async fn check(kernel: &Rc<Kernel>, actor: &Actor, expected_version: u64) -> Result<()> {
    let name = &kernel.spec().name;
    kernel.admit(actor, expected_version).await?;
    kernel.check_available()?;
    if kernel.thread_of.is_some() || !kernel.threads().is_empty() {
        return Err(Error::refused(format!("kernel {name} shares its workspace with another kernel"))
            .reason("thread")
            .hint("remove the threads first: `ryokan rm`"));
    }
    if kernel.spec().ephemeral {
        return Err(Error::refused(format!("kernel {name} is ephemeral: it is removed with its client's connection"))
            .reason("ephemeral"));
    }
    match kernel.interrupted() {
        Some(Kind::Restore) => kernel.recovered().await,
        Some(Kind::Archive | Kind::Unarchive | Kind::HandoverOut | Kind::Remove | Kind::Freeze) => {
            kernel.settle().await
        }
        None => Ok(()),
    }
}

/// What a target names, for people: bounded in number and length.
fn named(missing: Vec<String>) -> Vec<String> {
    let cut = |text: String| text.chars().filter(|c| !c.is_control()).take(1000).collect();
    missing.into_iter().take(limits::BUNDLE_HOST_RESOURCES).map(cut).collect()
}

pub(super) fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn cancelled() -> Error {
    Error::conflict("the move was cancelled before its commit; the kernel continues here").reason("cancelled")
}

fn too_long(limit: Duration) -> Error {
    let limit = format_duration(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
    Error::deadline(format!("the kernel was held for {limit}, and its last part had not arrived; it continues here"))
        .reason("pause_limit")
        .hint("move it while less of it changes, or raise [teleport] pause_limit on this host")
}

impl Move {
    fn step(&self, event: SourceEvent) -> Vec<SourceAction> {
        let mut machine = self.machine.get();
        let actions = machine.step(event);
        self.machine.set(machine);
        actions
    }

    /// Awaits a step before the commit, or fails when the move is cancelled.
    async fn unless_cancelled<T>(&self, step: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = step => done,
            () = self.cancel.cancelled() => Err(cancelled()),
        }
    }

    async fn run(self: Rc<Self>, transport: Transport, transition: Rc<ExclusiveTransition>) -> Result<TeleportReport> {
        let handovers = &self.supervisor.registry().handovers;
        if handovers.active.borrow().len() >= limits::HANDOVERS_CONCURRENT {
            return Err(Error::busy("too many kernels are being moved at once").hint("try again when one has arrived"));
        }
        let active = Active { id: self.row.id, cancel: self.cancel.clone(), fate: self.fate.subscribe() };
        handovers.active.borrow_mut().insert(self.kernel.id, active);
        let recorded = self.host.catalog.put_handover(self.row.clone()).await;
        let outcome = match recorded {
            Ok(()) => self.perform(&transport, &transition).await,
            Err(error) => Err(error.into()),
        };
        let ended = match outcome {
            Ok(moved) => Ok(moved),
            Err(error) => Err(self.stay(&transition, error).await),
        };
        // A failed move releases the kernel before its abort is acknowledged: the entry may be that of the next move.
        let is_own = |active: &Active| active.id == self.row.id;
        if handovers.active.borrow().get(&self.kernel.id).is_some_and(is_own) {
            handovers.active.borrow_mut().remove(&self.kernel.id);
        }
        handovers.wake.notify_one();
        ended
    }

    /// The kernel stays: the target deletes what it received, now or when it can be reached.
    async fn stay(&self, transition: &ExclusiveTransition, error: Error) -> Error {
        if transition.is_recorded()
            && let Err(error) = transition.clear(&self.host).await
        {
            tracing::warn!(kernel = %self.kernel.spec().name, %error, "the record of a failed move is left to recovery");
        }
        transition.release();
        self.fate.send_replace(Fate::Stays);
        let is_refused =
            !self.offered.get() || !matches!(error.reason.as_str(), "connection" | "protocol" | "cancelled");
        let event = if is_refused { SourceEvent::Refused } else { SourceEvent::Failed };
        for action in self.step(event) {
            let done = match action {
                SourceAction::SendAbort => self.send_abort().await,
                SourceAction::Forget => self.forget().await,
                _ => Ok(()),
            };
            if let Err(error) = done {
                tracing::info!(handover = %self.row.id, %error, "the abort of a move is repeated later");
            }
        }
        let detail = serde_json::json!({ "handover": self.row.id, "error": error.message, "reason": error.reason });
        self.host.events.publish(&self.kernel.event_name(), "teleport_failed", detail);
        self.host.audit_refusal(&self.actor, "kernel.teleport", Some(&self.kernel), &error).await;
        error
    }

    /// Sends the abort, and does not keep the client waiting for a target that does not answer.
    async fn send_abort(&self) -> Result<()> {
        let row = HandoverRow { record: self.record()?, ..self.row.clone() };
        let delivering = repeat::deliver(&self.supervisor, &row);
        match tokio::time::timeout(limits::HANDOVER_ABORT_WAIT, delivering).await {
            Ok(done) => done,
            Err(_) => Err(Error::unavailable("the other host does not acknowledge in time").reason("connection")),
        }
    }

    /// The record of the move as it is now.
    fn record(&self) -> Result<String> {
        write(&Outgoing { host: self.target.get(), ..self.outgoing.clone() })
    }

    async fn forget(&self) -> Result<()> {
        self.host.making_room(async || Ok(self.host.catalog.forget_handover(self.row.id).await?)).await
    }

    async fn perform(
        self: &Rc<Self>,
        transport: &Transport,
        transition: &Rc<ExclusiveTransition>,
    ) -> Result<TeleportReport> {
        let mut session =
            self.unless_cancelled(Session::open(transport.connect(&settings(&self.host))?, self.host.id())).await?;
        let target = session.host();
        if target == self.host.id() {
            return Err(Error::refused("the other end is this host").reason("same_host"));
        }
        // Only this host decides with the source from now on, wherever the transport leads later.
        self.target.set(Some(target));
        self.host.catalog.name_handover(self.row.id, self.record()?).await?;
        let accept = self.unless_cancelled(self.offer(&mut session)).await?;
        let kind = self.settle_kind(&accept)?;
        self.step(SourceEvent::Accepted);
        // Objects that only this move names stay in the store until its end.
        let _guard = self.host.store.run(|store| Ok(store.guard())).await?;
        let rounds = self.unless_cancelled(self.copy_rounds(&mut session, &accept)).await?;
        self.step(SourceEvent::Copied);
        if let Some(convoy) = &self.convoy {
            self.unless_cancelled(self.await_others(&mut session, convoy)).await?;
        }
        let copied = session.sent.sent_bytes;
        let session = Rc::new(Mutex::new(session));
        let (own, held, transition) = (Rc::clone(self), Rc::clone(&session), Rc::clone(transition));
        let there = accept.missing.clone();
        let change = Change { actor: self.actor.clone(), expected_version: 0 };
        // The worker is not held longer than the queue allows; cancellation is checked inside.
        let (decided, decision) = oneshot::channel();
        let leaving =
            checkpoint::while_frozen(&self.host, &self.kernel, (change, kind), move |last, pause| async move {
                own.frozen_at.set(Some(pause.begun));
                own.steps.begin(pause.begun);
                own.steps.ended_at("capture", pause.captured);
                own.steps.ended("store");
                let done = own.depart(&held, &transition, target, last, &there, decided).await;
                if done.is_err() && transition.is_recorded() && !own.kernel.has_departed(own.row.id) {
                    // Before the code inside resumes.
                    transition.clear(&own.host).await?;
                }
                done
            });
        // While the worker ends and the files are removed here.
        let committing = async {
            // The target acts on the commit: it must not be older than what a loss of power leaves here.
            if decision.await.is_err() {
                return Err(Error::unavailable("the departure is not synced"));
            }
            self.pause.set(self.frozen_at.get().map_or(Duration::ZERO, |at| at.elapsed()));
            self.steps.ended("departure");
            if self.convoy.is_some() {
                return Ok(());
            }
            let live = session.lock().await.commit(self.row.id, self.kernel.id, self.outgoing.epoch).await;
            self.steps.ended("commit and acknowledgement");
            live
        };
        let (left, acknowledged) = futures::join!(leaving, committing);
        left?;
        let session = session.lock().await;
        if let Err(error) = &acknowledged {
            tracing::info!(handover = %self.row.id, %error, "the commit of a move is repeated");
        } else if self.convoy.is_none()
            && self.step(SourceEvent::Live).contains(&SourceAction::Forget)
            && let Err(error) = self.forget().await
        {
            tracing::info!(handover = %self.row.id, %error, "the record of a completed move is left");
        }
        let (kernel, steps) = (&self.kernel.spec().name, self.steps.text());
        let rest_bytes = session.sent.sent_bytes - copied;
        tracing::info!(%kernel, handover = %self.row.id, rounds, rest_bytes, steps, "a kernel moved; milliseconds of its pause");
        let report = self.report(target, &session.sent, accept.missing, acknowledged.is_ok());
        if let Some(key) = &self.key
            && let Err(error) = key.remember(&self.host, report.clone(), true).await
        {
            tracing::warn!(handover = %self.row.id, %error, "the key of a move is remembered without its whole report");
        }
        Ok(report)
    }

    /// The report so far.
    fn report(&self, host: HostId, sent: &Sent, there: Vec<String>, acknowledged: bool) -> TeleportReport {
        let Sent { objects, bytes, sent_objects, sent_bytes, wire_bytes, .. } = *sent;
        let Choice { kind, why } = self.choice.borrow().clone();
        TeleportReport {
            handover: self.row.id,
            host,
            epoch: self.outgoing.epoch,
            objects,
            bytes,
            sent_objects,
            sent_bytes,
            pause_ms: ms(self.pause.get()),
            missing: self.missing(there),
            acknowledged,
            kind,
            kind_reason: why,
            elapsed_ms: ms(self.begun.elapsed()),
            wire_bytes,
            stays: Vec::new(),
        }
    }

    /// What the kernel moved without.
    fn missing(&self, there: Vec<String>) -> Vec<String> {
        let mut missing = named(there);
        missing.extend(self.later_work.borrow().iter().cloned());
        missing.extend(older_checkpoints(self.left_behind.get()));
        missing
    }

    /// Sends what the kernel's records reference and was not sent yet. Returns the checkpoints, pinned.
    pub(super) async fn copy(
        &self,
        session: &mut Session,
        phase: &'static str,
    ) -> Result<(Vec<Checkpoint>, Vec<checkpoint::ReadPin>)> {
        // Those that are left behind, too: the rows of the history must not change while they are read.
        let mut pins = Vec::new();
        for found in self.kernel.records.all_checkpoints().await? {
            match checkpoint::pin_for_read(&self.kernel, found).await {
                Ok((_, pin)) => pins.push(pin),
                // Pruned meanwhile.
                Err(error) if error.code == ErrorCode::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let (checkpoints, left_behind) = self.moving_checkpoints().await?;
        self.left_behind.set(left_behind);
        let numbers: HashSet<u64> = checkpoints.iter().map(|found| found.number).collect();
        let mut roots = self.kernel.records.state.roots().await?;
        roots.retain(|root| !matches!(root.kind, RootKind::Checkpoint { number } if !numbers.contains(&number)));
        let mut seen = self.seen.take();
        let found = self.host.store.run_beside(move |store| {
            let mut found = Vec::new();
            for root in roots {
                match root.kind {
                    RootKind::Checkpoint { .. } => {
                        let reached = bundle::reach(store, root.digest, &mut seen, &mut |object| found.push(object));
                        if let Err(error) = reached {
                            return Ok(Err(error));
                        }
                    }
                    RootKind::Blob | RootKind::Output { .. } => {
                        if seen.add(root.digest) {
                            found.push(root.digest);
                        }
                    }
                }
            }
            Ok(Ok((found, seen)))
        });
        let (found, seen) = found.await?.map_err(client_error)?;
        self.seen.replace(seen);
        self.send(session, &found, phase).await?;
        Ok((checkpoints, pins))
    }

    pub(super) async fn send(&self, session: &mut Session, digests: &[Digest], phase: &'static str) -> Result<()> {
        // The kernel is paused while it is sealed: the rest is not held back.
        let limit_rate = if phase == SEALING { 0 } else { self.options.limit_rate };
        session.transfer(&self.host.store, digests, limit_rate, &|sent| (self.progress)(phase, sent)).await
    }

    /// Sends the rest, waits for the target, and records the departure. The kernel's code is frozen.
    async fn depart(
        &self,
        session: &Mutex<Session>,
        transition: &Rc<ExclusiveTransition>,
        target: HostId,
        last: Checkpoint,
        there: &[String],
        decided: oneshot::Sender<()>,
    ) -> Result<()> {
        self.check_later_work()?;
        let epoch = self.outgoing.epoch;
        let intent = Transition::HandoverOut { handover: self.row.id, checkpoint: last.id, host: target, epoch };
        transition.record(intent, self.actor.to_string(), self.host.now_ms()).await?;
        self.steps.ended("record");
        let limit = self.host.config.teleport.pause_limit;
        let begun = self.frozen_at.get().unwrap_or_else(Instant::now);
        let sealing = self.unless_cancelled(async { self.seal(&mut *session.lock().await, &last).await });
        match tokio::time::timeout_at((begun + limit).into(), sealing).await {
            Ok(sealed) => sealed?,
            Err(_) => return Err(too_long(limit)),
        }
        if let Some(key) = &self.key {
            let report = self.report(target, &session.lock().await.sent, there.to_vec(), false);
            key.remember(&self.host, report, false).await?;
        }
        if self.cancel.is_cancelled() {
            return Err(cancelled());
        }
        if let Some(convoy) = &self.convoy {
            // What recovery finds of a decided group.
            self.host.sync_decision(Some(self.kernel.id)).await?;
            let (kernel, handover) = (self.kernel.id, self.row.id);
            convoy.prepared(PreparedKernel { kernel, handover, epoch, checkpoint: last }).await?;
        }
        if !self.step(SourceEvent::Prepared).contains(&SourceAction::RecordDeparture) {
            return Err(Error::internal("a departure out of order"));
        }
        let mut text = format!("moved to host {target} at epoch {}", epoch.0);
        if let Some(left) = older_checkpoints(self.left_behind.get()) {
            text.push_str(&format!(" without {left}"));
        }
        let departed = match self.convoy {
            Some(_) => self.depart_for_certain(&text, transition, decided).await,
            None => self.kernel.depart(self.actor.clone(), text, Rc::clone(transition), decided).await.map(drop),
        };
        if !self.kernel.has_departed(self.row.id) {
            self.machine.set(Source::restarted(false).0);
            return Err(departed.err().unwrap_or_else(|| Error::internal("a departure was not recorded")));
        }
        self.fate.send_replace(Fate::Departs);
        self.host.prepared.discard_of(self.kernel.id).await;
        Ok(())
    }

    /// Sends the last objects, the history and the description; returns when the target is prepared.
    async fn seal(&self, session: &mut Session, last: &Checkpoint) -> Result<()> {
        session.hold(self.host.config.teleport.stall_timeout);
        let (checkpoints, history, _pins) = loop {
            let (checkpoints, pins) = self.copy(session, SEALING).await?;
            self.steps.ended("objects");
            let history = self.history().await?;
            // A client may have pinned another one meanwhile; one that was unpinned moves all the same.
            let described: HashSet<u64> = checkpoints.iter().map(|one| one.number).collect();
            if self.moving_checkpoints().await?.0.iter().all(|one| described.contains(&one.number)) {
                break (checkpoints, history, pins);
            }
        };
        self.send(session, &history, SEALING).await?;
        self.steps.ended("history");
        let kernel = &self.kernel;
        let head = Head {
            ryokan: env!("CARGO_PKG_VERSION").into(),
            at_ms: self.host.now_ms(),
            host: self.host.id(),
            kernel: kernel.id,
            name: kernel.spec().name.to_string(),
            generation: kernel.view().origin.generation,
            begin: last.id,
            blobs: kernel.records.blobs_granted_until(i64::MAX).await?,
            decisions: Vec::new(),
            // The offer and the history have both.
            epoch: None,
            journal: None,
            audit: None,
            checkpoints: checkpoints.iter().map(packed).collect::<Vec<Packed>>(),
        };
        let spec = self.options.spec_there(kernel.spec_now());
        let (created_at_ms, audit) = (kernel.created_at_ms, self.excerpt.get());
        let seal = Seal { head, spec, history, created_at_ms, audit, left_behind: self.left_behind.get() };
        let description = serde_json::to_vec(&seal).map_err(|error| Error::internal(error.to_string()))?;
        if description.len() as u64 > limits::HANDOVER_SEAL_BYTES {
            return Err(Error::refused("the kernel's description is too large to move").reason("handover_size"));
        }
        let description = self.host.store.put(description).await?;
        self.send(session, &[description], SEALING).await?;
        self.steps.ended("description");
        session.seal(description).await?;
        self.steps.ended("prepared by the target");
        Ok(())
    }
}
