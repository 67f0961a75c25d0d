//! Carries out a freeze.
//!
//! The pause ends when everything is pinned and resumed. A kernel starts executions again once its checkpoint is made:
//! its journal must not go on before. Kernels are stored first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::gate::admitted;
use super::members::{self, Live};
use super::operation_turn::refuse_half_restored;
use super::pairings::{omitted, pairings};
use super::{pauses, recover, turn};
use crate::catalog::{NewFreeze, Notes};
use crate::core::audit::NewAudit;
use crate::core::checkpoint::CheckpointType;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::capture::{Action, Capture, Outcome, Reply};
use crate::core::freeze::cost::FreezeCost;
use crate::core::freeze::drain::Drain;
use crate::core::freeze::on_failure::OnFailure;
use crate::core::freeze::{FORMAT, Freeze, FreezeManifest, Group, Intent, Part};
use crate::core::ids::{CheckpointId, FreezeId, KernelId};
use crate::core::kernel::transition::Kind;
use crate::core::limits;
use crate::core::signature::Subject;
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::host::signing::HostKey;
use crate::supervisor::registry::Supervisor;

/// A freeze that was just taken.
#[derive(Debug, Clone)]
pub struct Taken {
    /// The freeze.
    pub freeze: Freeze,
    /// What it cost.
    pub cost: FreezeCost,
    /// Members that do not work again, and what is not captured.
    pub notes: Vec<String>,
}

/// Freezes a group.
///
/// # Errors
/// `notFound`, `conflict` (a kernel in another transition), `refused` and `unsupported` members, `deadline`, and capture
/// errors of any member; nothing of the freeze is visible then.
pub async fn freeze(
    supervisor: &Supervisor,
    group: &str,
    (message, drain, on_failure): (&str, Drain, Option<OnFailure>),
    actor: &Actor,
) -> Result<Taken> {
    if message.len() > limits::FREEZE_MESSAGE_BYTES || message.chars().any(char::is_control) {
        let most = limits::FREEZE_MESSAGE_BYTES;
        return Err(Error::invalid(format!("a freeze's message is one line of at most {most} bytes")));
    }
    let (group, turn) = turn(supervisor, actor.uid, group).await?;
    let (this, message, actor) = (supervisor.clone(), message.to_owned(), actor.clone());
    let freezing = tokio::task::spawn_local(async move {
        let _turn = turn;
        recover::unfinished(&this, &group).await?;
        // An import that had not ended is withdrawn, and the group with it.
        let group = super::find(&this, actor.uid, &group.name).await?;
        pauses::refuse(&group)?;
        let host = this.host();
        refuse_half_restored(host, &group).await?;
        let on_failure = on_failure.unwrap_or(group.on_failure);
        let mut live = match (members::open(&this, &group, |_| true).await, on_failure) {
            (Ok(live), _) => live,
            (Err(error), OnFailure::Resume) => return Err(error),
            (Err(error), OnFailure::Pause) => {
                pauses::close_admission(&this, &group);
                pauses::record(host, &group, &error.recorded(), &actor).await?;
                pauses::close(&this, &group);
                let message = format!("group {} was not frozen: {}", group.name, error.message);
                return Err(paused(Error { message, ..error }, &group.name));
            }
        };
        let (kind, suspend, changed) = (CheckpointType::Manual, Some(drain), Vec::new());
        let taking =
            Taking { kind, message: &message, actor: &actor, suspend, on_failure, changed, moving: Vec::new() };
        let done = take(host, &group, &mut live, &taking).await;
        if let Err(error) = &done {
            host.audit_refusal(&actor, "group.freeze", None, error).await;
        }
        done
    });
    freezing.await.map_err(|error| Error::internal(error.to_string()))?
}

/// How a freeze is taken.
pub(super) struct Taking<'a> {
    pub kind: CheckpointType,
    pub message: &'a str,
    pub actor: &'a Actor,
    /// How the members are suspended, and then resumed; `None`: they are suspended already.
    pub suspend: Option<Drain>,
    /// What a failure does with kernels that were suspended for it.
    pub on_failure: OnFailure,
    /// The members that a restore is about to change.
    pub changed: Vec<String>,
    /// Members that are captured already: kernels that are held by their handovers.
    pub moving: Vec<Part>,
}

/// Takes a freeze of open members.
///
/// # Errors
/// As [`freeze`].
pub(super) async fn take(host: &Host, group: &Group, live: &mut [Live], taking: &Taking<'_>) -> Result<Taken> {
    let started = Instant::now();
    // Before anything pauses.
    let key = host.signing_key().await?;
    let mut machine = match taking.suspend {
        Some(_) => Capture::new(live.len(), taking.on_failure),
        None => Capture::of_suspended(live.len()),
    };
    // The objects are kept until the row names them.
    let _kept = host.store.run_beside(|store| Ok(store.guard())).await?;
    if taking.suspend.is_some() {
        for one in live.iter_mut() {
            one.ahead().await;
        }
    }
    let id = FreezeId::from_bytes(host.random());
    let (begun, cost) = (Instant::now(), FreezeCost::default());
    let (sealed, failed, why, notes) = (None, None, String::new(), Vec::new());
    let said = Vec::new();
    let mut run = Run { host, group, taking, key, id, started, begun, cost, sealed, failed, why, notes, said };
    if live.is_empty() && !taking.moving.is_empty() {
        run.seal(live).await?;
    }
    loop {
        let action = machine.next();
        if action == Action::End {
            break;
        }
        let reply = run.perform(action, live).await;
        machine.reply(reply);
        if let Some((member, why)) = machine.failure() {
            let name = member.and_then(|at| live.get(at)).map(|live| format!("member {}: ", live.name));
            run.why = format!("{}{why}", name.unwrap_or_default());
        }
    }
    match (machine.outcome(), run.sealed) {
        (_, Some(freeze)) if live.is_empty() => Ok(Taken { freeze, cost: run.cost, notes: run.notes }),
        (Some(Outcome::Sealed), Some(freeze)) => {
            let said = run.said.iter().filter(|said| !said.is_empty()).map(|said| format!("a program wrote: {said}"));
            run.notes.extend(said);
            Ok(Taken { freeze, cost: run.cost, notes: run.notes })
        }
        (Some(Outcome::Failed { .. }), _) => {
            let mut message = format!("group {} was not frozen: {}", group.name, run.why);
            for note in &run.notes {
                message.push_str(&format!("; {note}"));
            }
            let error = match run.failed {
                Some(error) => {
                    let said = std::iter::once(&error.said).chain(&run.said).filter(|said| !said.is_empty());
                    let said = said.map(String::as_str).collect::<Vec<_>>().join("; ");
                    Error { message, said, ..error }
                }
                None => Error::new(ErrorCode::Conflict, message).reason("member_changed").hint("try again"),
            };
            Err(if taking.on_failure == OnFailure::Pause { paused(error, &group.name) } else { error })
        }
        _ => Err(Error::internal("the freeze has no outcome")),
    }
}

/// Says that the kernels of the group are paused.
fn paused(error: Error, group: &str) -> Error {
    let message = format!("{}; its kernels are paused", error.message);
    Error { message, ..error }.hint(format!("`ryokan resume {group}` lets them go on"))
}

struct Run<'a> {
    host: &'a Host,
    group: &'a Group,
    taking: &'a Taking<'a>,
    key: Arc<HostKey>,
    id: FreezeId,
    started: Instant,
    /// The beginning of the pause.
    begun: Instant,
    cost: FreezeCost,
    sealed: Option<Freeze>,
    /// The first failure.
    failed: Option<Error>,
    /// What failed, with the member.
    why: String,
    /// What a client must know although the freeze may succeed.
    notes: Vec<String>,
    /// What programs wrote whose members do not go on.
    said: Vec<String>,
}

impl Run<'_> {
    async fn perform(&mut self, action: Action, live: &mut [Live]) -> Reply {
        let done = |done: Result<()>| done.map(|()| Reply::Done);
        let result = match action {
            Action::End => Ok(Reply::Done),
            Action::Arm => {
                let intent = self.intent(Vec::new());
                done(self.host.catalog.begin_intent(self.group.id, intent).await.map_err(Error::from))
            }
            Action::Pause(n) => done(live[n].pause().await),
            Action::Suspend(n) | Action::Lock(n) | Action::Snapshot(n) | Action::Confirm(n) | Action::Resume(n) => {
                self.pause(action, &mut live[n]).await
            }
            Action::Intent => {
                let (host, group) = (self.host, self.group.id);
                let intent = self.intent(live.iter().filter_map(Live::checkpoint).collect());
                let recorded = match self.taking.on_failure {
                    OnFailure::Resume => host.catalog.begin_intent(group, intent).await,
                    OnFailure::Pause => host.catalog.update_intent(group, intent).await,
                };
                done(recorded.map_err(Error::from))
            }
            Action::Store(n) => done(self.store_next(n, live).await),
            Action::Seal => done(self.seal(live).await),
            Action::Withdraw => done(self.withdraw(live).await),
        };
        result.unwrap_or_else(|error| {
            tracing::warn!(group = %self.group.name, ?action, %error, "a step of a freeze failed");
            let why = error.recorded();
            if let Action::Resume(n) | Action::Pause(n) = action {
                self.notes.push(live[n].not_resumed(&error));
                self.said.push(error.said);
            } else {
                self.failed.get_or_insert(error);
            }
            Reply::Failed(why)
        })
    }

    /// A step of a member within the pause.
    async fn pause(&mut self, action: Action, live: &mut Live) -> Result<Reply> {
        let &Taking { kind, actor, suspend, .. } = self.taking;
        let (begun, any) = (Instant::now(), kind == CheckpointType::System);
        let (has_deadlines, most) = (live.has_deadlines(), self.host.config.limits.freeze_step);
        let done = |done: Result<()>| done.map(|()| Reply::Done);
        let at = |revision: Result<String>| revision.map(Reply::At);
        let result = match action {
            Action::Resume(_) => {
                let resumed = done(live.resume().await);
                self.cost.pause_us = us(self.begun);
                resumed
            }
            action => {
                let step = async {
                    match action {
                        Action::Suspend(_) => {
                            done(live.suspend(Kind::Freeze, actor, suspend.unwrap_or_default()).await)
                        }
                        Action::Snapshot(_) => at(live.snapshot(kind).await),
                        _ => at(live.revision(any).await),
                    }
                };
                in_time(has_deadlines, most, step).await
            }
        };
        live.paused(begun.elapsed());
        result
    }

    /// Stores the next member. Before the first one, writers of data are admitted: others may take long.
    async fn store_next(&mut self, n: usize, live: &mut [Live]) -> Result<()> {
        if n == 0 {
            let most = self.host.config.limits.freeze_store;
            for one in live.iter_mut() {
                let own = one.has_deadlines();
                in_time(own, most, async { one.admit_writers().await.map(|()| Reply::Done) }).await?;
            }
        }
        self.store(&mut live[n]).await
    }

    /// Stores one member, and releases a kernel that was suspended for this freeze.
    async fn store(&mut self, live: &mut Live) -> Result<()> {
        let &Taking { kind, message, actor, suspend, .. } = self.taking;
        let group = &self.group.name;
        let name = match message {
            "" => format!("freeze of {group}"),
            message => format!("freeze of {group}: {message}"),
        };
        let (has_deadlines, most) = (live.has_deadlines(), self.host.config.limits.freeze_store);
        let step = async { live.store(self.id, (&name, kind), actor).await.map(|()| Reply::Done) };
        in_time(has_deadlines, most, step).await?;
        if suspend.is_some() && live.is_held() {
            live.release();
            self.cost.admission_us = us(self.begun);
        }
        Ok(())
    }

    async fn seal(&mut self, live: &mut [Live]) -> Result<()> {
        let &Taking { kind, message, actor, .. } = self.taking;
        let (host, group) = (self.host, self.group);
        let mut parts = self.taking.moving.clone();
        for one in live.iter() {
            let driver = one.cost().driver;
            let storage = one.storage().await?;
            parts.push(Part { name: one.name.clone(), captured: one.captured()?.clone(), driver, storage });
        }
        let manifest = FreezeManifest {
            format: FORMAT,
            ryokan: env!("CARGO_PKG_VERSION").into(),
            id: self.id,
            group: group.id,
            group_name: group.name.clone(),
            at_ms: host.now_ms(),
            configuration: host.config.digest(),
            sections: Some(host.config.sections()),
            changed: self.taking.changed.clone(),
            origin: None,
            parts,
        };
        self.notes.extend(omitted(&manifest.parts));
        for one in live.iter() {
            if self.taking.suspend.is_some() {
                self.notes.extend(one.executions());
            }
            let found = one.notes_of_capture()?.into_iter();
            self.notes.extend(found.map(|what| format!("member {}: {what}", one.name)));
        }
        let mut pairings = pairings(&manifest.parts);
        if kind == CheckpointType::System {
            let recorded = host.catalog.pairings(group.id).await?;
            pairings = admitted(pairings, &recorded, live.iter()).await?;
        }
        let bytes = manifest.encode().map_err(|error| Error::refused(error.to_string()).reason("manifest_size"))?;
        let digest = host.store.put(bytes).await?;
        let freeze = Freeze {
            id: self.id,
            number: 0,
            message: message.to_owned(),
            kind,
            creator: actor.to_string(),
            at_ms: manifest.at_ms,
            restored_at_ms: None,
            manifest: digest,
            signed: Some(self.key.sign(Subject::Freeze, digest)),
        };
        let new = NewFreeze { freeze, group: group.id, checkpoints: manifest.checkpoints(), pairings };
        let line = host.line(actor, "group.freeze", None);
        let detail = bounded(format!("{}: {} ({})", group.name, self.id, kind.name()));
        let audit = vec![NewAudit { owner: Some(group.uid), manifest: Some(digest), detail, ..line }];
        let sealed = host.catalog.seal_freeze(new, Notes { events: Vec::new(), audit }).await?.value;
        self.cost.total_us = us(self.started);
        self.cost.admission_us = self.cost.admission_us.max(self.cost.pause_us);
        self.cost.members = live.iter().map(Live::cost).collect();
        let FreezeCost { pause_us, admission_us, total_us, .. } = self.cost;
        let detail = serde_json::json!({
            "group": group.name, "id": sealed.id, "number": sealed.number,
            "pause_us": pause_us, "admission_us": admission_us, "total_us": total_us,
        });
        host.events.publish("", "group_frozen", detail);
        self.sealed = Some(sealed);
        Ok(())
    }

    fn intent(&self, checkpoints: Vec<(KernelId, CheckpointId)>) -> Intent {
        Intent::Freeze { id: self.id, checkpoints, pauses: self.taking.on_failure == OnFailure::Pause }
    }

    async fn withdraw(&self, live: &[Live]) -> Result<()> {
        for one in live {
            one.withdraw(self.id).await?;
        }
        match self.taking.on_failure {
            OnFailure::Resume => Ok(self.host.catalog.clear_intent(self.group.id).await?),
            OnFailure::Pause => pauses::record(self.host, self.group, &self.why, self.taking.actor).await,
        }
    }
}

/// Time since then, microseconds.
fn us(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Runs a step of a member within a time limit, unless its parts have their own.
pub(super) async fn in_time<T>(
    has_deadlines: bool,
    most: Duration,
    step: impl Future<Output = Result<T>>,
) -> Result<T> {
    if has_deadlines {
        return step.await;
    }
    match tokio::time::timeout(most, step).await {
        Ok(done) => done,
        Err(_) => Err(Error::deadline(format!("it did not answer within {most:?}")).reason("member_late")),
    }
}
