//! Carries out the restore of a group.

use std::collections::{BTreeMap, HashSet};

use super::gate::{Refusal, left_out};
use super::members::{self, Live};
use super::operation_turn::refuse_half_restored;
use super::pairings::pairings;
use super::run_freeze::{Taking, in_time, take};
use super::{Restored, find_freeze, manifest, provenance, recover, removal, turn};
use crate::catalog::Notes;
use crate::core::audit::NewAudit;
use crate::core::checkpoint::CheckpointType;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::capture::Reply;
use crate::core::freeze::drain::Drain;
use crate::core::freeze::gate::Pairing;
use crate::core::freeze::on_failure::OnFailure;
use crate::core::freeze::restore::{Action, Outcome, Restore};
use crate::core::freeze::{Captured, Freeze, Group, Intent, Member, Part};
use crate::core::kernel::transition::Kind;
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::host::operation_queue::Turn;
use crate::supervisor::registry::Supervisor;

/// Restores a group, or some of its members, to a freeze.
///
/// # Errors
/// `notFound`, `refused` by the gate (`data_newer`), `conflict`, `corrupt`; every member is as before then, unless the
/// message says that the restore is unfinished.
pub async fn restore(
    supervisor: &Supervisor,
    group: &str,
    reference: &str,
    (members, drain): (Vec<String>, Drain),
    actor: &Actor,
) -> Result<Restored> {
    let (group, turn) = turn(supervisor, actor.uid, group).await?;
    let freeze = find_freeze(supervisor.host(), &group, reference).await?;
    to(supervisor, group, freeze, (Wanted::Named(members), drain), actor, turn).await
}

/// Returns a group to the state before its last restore.
///
/// # Errors
/// `notFound` if nothing was restored, and errors of [`restore`].
pub async fn undo(supervisor: &Supervisor, group: &str, drain: Drain, actor: &Actor) -> Result<Restored> {
    let (group, turn) = turn(supervisor, actor.uid, group).await?;
    let none =
        || Error::not_found(format!("nothing was restored in group {}, so there is nothing to undo", group.name));
    let id = group.undo.ok_or_else(none)?;
    let all = supervisor.host().catalog.freezes(group.id).await?;
    let freeze = all.into_iter().find(|freeze| freeze.id == id).ok_or_else(none)?;
    to(supervisor, group, freeze, (Wanted::Changed, drain), actor, turn).await
}

/// Brings members of a group that moved here into their places. No code runs in its kernels yet: they are not held.
///
/// # Errors
/// As [`restore`].
pub(super) async fn bring(
    supervisor: &Supervisor,
    group: Group,
    freeze: Freeze,
    members: Vec<String>,
    actor: &Actor,
    turn: Turn,
) -> Result<Restored> {
    to(supervisor, group, freeze, (Wanted::Arriving(members), Drain::default()), actor, turn).await
}

/// Which members are restored.
enum Wanted {
    /// These, of a group whose kernels run no code yet.
    Arriving(Vec<String>),
    /// These; all if empty.
    Named(Vec<String>),
    /// Those that the restore after a safety freeze changed.
    Changed,
}

async fn to(
    supervisor: &Supervisor,
    group: Group,
    freeze: Freeze,
    wanted: (Wanted, Drain),
    actor: &Actor,
    turn: Turn,
) -> Result<Restored> {
    let (this, actor) = (supervisor.clone(), actor.clone());
    let restoring = tokio::task::spawn_local(async move {
        let _turn = turn;
        let done = perform(&this, &group, freeze, wanted, &actor).await;
        if let Err(error) = &done {
            this.host().audit_refusal(&actor, "group.restore", None, error).await;
        }
        done
    });
    restoring.await.map_err(|error| Error::internal(error.to_string()))?
}

async fn perform(
    supervisor: &Supervisor,
    group: &Group,
    freeze: Freeze,
    (wanted, drain): (Wanted, Drain),
    actor: &Actor,
) -> Result<Restored> {
    let host = supervisor.host();
    recover::unfinished(supervisor, group).await?;
    refuse_half_restored(host, group).await?;
    let manifest = manifest(host, &freeze).await?;
    provenance::admit(host, group, &freeze, &manifest).await?;
    let members = match &wanted {
        Wanted::Named(names) | Wanted::Arriving(names) => names,
        Wanted::Changed => &manifest.changed,
    };
    if let Some(unknown) = members.iter().find(|name| !manifest.parts.iter().any(|part| part.name == **name)) {
        return Err(Error::not_found(format!("freeze {} has no member {unknown:?}", freeze.number)));
    }
    let mut parts = manifest.parts.clone();
    parts.retain(|part| members.is_empty() || members.contains(&part.name));
    let is_concerned = |member: &Member| parts.iter().any(|part| part.name == member.name);
    let mut live = members::open(supervisor, group, is_concerned).await?;
    for part in &parts {
        let found = live.iter_mut().find(|live| live.name == part.name);
        let one = found.ok_or_else(|| {
            Error::refused(format!("{} was a member at that freeze and is none now", part.name))
                .reason("other_member")
                .hint("add it to the group again, or restore the others by name")
        })?;
        one.target = Some(part.captured.clone());
    }
    let notes = live.iter().filter_map(Live::other_place).collect();
    let is_held = |member: &&Member| !is_concerned(member) && !matches!(wanted, Wanted::Arriving(_));
    let others: Vec<&Member> = group.members.iter().filter(is_held).collect();
    let together = pairings(&manifest.parts).into_iter().collect();
    let (restored, configuration) = (live.len(), (manifest.configuration, manifest.sections));
    let begun = Run::new(host, group, freeze, actor);
    let mut run = Run { configuration, parts, live, restored, together, drain, frozen: manifest.parts, notes, ..begun };
    for member in others {
        match members::open_one(supervisor, group, member).await {
            Ok(live) => run.live.push(live),
            Err(error) => run.notes.push(left_out(&member.name, error)?),
        }
    }
    let databases = members::database_files_of(&run.frozen);
    run.live.iter_mut().for_each(|live| live.leave_out(&databases));
    run.compared = run.compare().await;
    run.plan_rebuild().await;
    run.order();
    let mut machine = Restore::new(run.restored, run.live.len() - run.restored);
    while machine.next() != Action::End {
        let reply = run.perform(machine.next()).await;
        machine.reply(reply);
    }
    let outcome = machine.outcome();
    // An unfinished restore needs them.
    let may_expire = matches!(outcome, Some(Outcome::Restored | Outcome::AsBefore { .. }));
    let mut ended = run.end(outcome);
    if may_expire && let Err(error) = removal::expire(supervisor, group.id, actor).await {
        let note = format!("older safety freezes could not be removed: {}", error.message);
        match &mut ended {
            Ok(restored) => restored.notes.push(note),
            Err(failed) => failed.message.push_str(&format!("; {note}")),
        }
    }
    ended
}

/// A restore under way.
pub(super) struct Run<'a> {
    pub host: &'a Host,
    pub group: &'a Group,
    pub freeze: Freeze,
    /// Digest of the configuration at that freeze, empty: not known; and of its sections.
    pub configuration: (String, Option<BTreeMap<String, String>>),
    /// The parts of that freeze, and the restored ones among them.
    pub frozen: Vec<Part>,
    pub parts: Vec<Part>,
    /// The members: first those that change, then the others, which are held.
    pub live: Vec<Live>,
    /// How many members change.
    pub restored: usize,
    /// The repository, the first of the members, that a program rebuilds.
    pub rebuilding: Option<Box<Refusal>>,
    /// The present state of the restored members.
    pub replaced: Vec<Part>,
    /// What would live together, and what was recorded to do so.
    pub would_be: Vec<Part>,
    pub recorded: Vec<Pairing>,
    /// What lived together at the freeze that is restored.
    pub together: HashSet<Pairing>,
    /// Whether these could be read.
    pub compared: Result<()>,
    /// The members in the order of their suspension.
    pub suspensions: Vec<usize>,
    pub actor: &'a Actor,
    /// What happens to running code of the kernels.
    pub drain: Drain,
    /// The freeze of the state before.
    pub safety: Option<Freeze>,
    pub failed: Option<Error>,
    /// The member that each failed step concerned.
    pub failures: Vec<Option<String>>,
    /// What could not be checked.
    pub notes: Vec<String>,
}

impl<'a> Run<'a> {
    /// A restore of no members.
    pub fn new(host: &'a Host, group: &'a Group, freeze: Freeze, actor: &'a Actor) -> Run<'a> {
        Run {
            host,
            group,
            freeze,
            configuration: (String::new(), None),
            frozen: Vec::new(),
            parts: Vec::new(),
            live: Vec::new(),
            restored: 0,
            rebuilding: None,
            replaced: Vec::new(),
            would_be: Vec::new(),
            recorded: Vec::new(),
            together: HashSet::new(),
            compared: Ok(()),
            suspensions: Vec::new(),
            actor,
            drain: Drain::default(),
            safety: None,
            failed: None,
            failures: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Carries out one action.
    pub async fn perform(&mut self, action: Action) -> Reply {
        let most = self.host.config.limits.freeze_step;
        // What a freeze could store can be prepared, placed and taken back.
        let long = self.host.config.limits.freeze_store;
        let (actor, attach) = (self.actor, self.freeze.kind == CheckpointType::System);
        let done = |done: Result<()>| done.map(|()| Reply::Done);
        let has_deadlines = |live: &Live| live.has_deadlines();
        let result = match action {
            Action::End => Ok(Reply::Done),
            // What a program rebuilds has no target.
            Action::Validate(n) | Action::Prepare(n) if self.is_rebuilt(n) => Ok(Reply::Done),
            Action::Validate(n) => {
                let own = has_deadlines(&self.live[n]);
                in_time(own, long, async { done(self.live[n].validate().await) }).await
            }
            Action::Gate => done(self.gate().await),
            Action::Suspend(at) => {
                if at == 0 {
                    self.read_ahead().await;
                }
                let n = self.suspensions[at];
                // Data sources that are not restored go on once they are pinned.
                let kind = if n < self.restored { Kind::Restore } else { Kind::Freeze };
                let own = has_deadlines(&self.live[n]);
                let drain = self.drain;
                let suspended =
                    in_time(own, most, async { done(self.live[n].suspend(kind, actor, drain).await) }).await;
                self.notes.extend(self.live[n].executions());
                suspended
            }
            Action::Safety => done(self.take_safety().await),
            Action::Intent => done(self.intent(0).and_then_begin(self.host, self.group).await),
            Action::Prepare(n) => {
                in_time(self.live[n].is_lasting(), long, async { done(self.live[n].prepare().await) }).await
            }
            // The program has its own deadline.
            Action::Switch(n) if self.is_rebuilt(n) => done(self.rebuild(n).await),
            Action::Switch(n) => {
                let own = self.live[n].is_lasting();
                in_time(own, long, async { done(self.switch(n, attach).await) }).await
            }
            Action::Revert(n) => {
                let own = self.live[n].is_lasting();
                in_time(own, long, async { done(self.live[n].revert(actor).await) }).await
            }
            Action::Discard(n) => {
                self.live[n].discard().await;
                Ok(Reply::Done)
            }
            Action::Commit => {
                let judged = self.judge_late().await;
                done(match judged {
                    Ok(()) => self.commit().await,
                    Err(error) => Err(error),
                })
            }
            Action::Clear => done(self.host.catalog.clear_intent(self.group.id).await.map_err(Error::from)),
            Action::Resume(at) => {
                let n = self.suspensions[at];
                let resumed = self.live[n].resume().await;
                self.live[n].release();
                if let Err(error) = &resumed {
                    self.notes.push(self.live[n].not_resumed(error));
                }
                let at_rest = self.live[n].at_rest();
                self.notes.extend(at_rest.map(|why| format!("member {}: {why}", self.live[n].name)));
                done(resumed)
            }
        };
        result.unwrap_or_else(|error| {
            tracing::warn!(group = %self.group.name, ?action, %error, "a step of a group's restore failed");
            let why = error.message.clone();
            self.failed.get_or_insert(error);
            self.failures.push(self.member(action));
            Reply::Failed(why)
        })
    }

    /// The name of the member that an action concerns.
    fn member(&self, action: Action) -> Option<String> {
        let n = match action {
            Action::Suspend(at) | Action::Resume(at) => *self.suspensions.get(at)?,
            Action::Validate(n) | Action::Prepare(n) | Action::Switch(n) | Action::Revert(n) | Action::Discard(n) => n,
            Action::Gate | Action::Safety | Action::Intent | Action::Commit | Action::Clear | Action::End => {
                return None;
            }
        };
        self.live.get(n).map(|live| live.name.clone())
    }

    async fn switch(&mut self, n: usize, attach: bool) -> Result<()> {
        self.reach(n).await?;
        let notes = self.live[n].switch(self.actor, attach).await?;
        self.notes.extend(notes);
        Ok(())
    }

    /// Records that a member is about to change: a new daemon reverts it and those before it.
    pub async fn reach(&self, n: usize) -> Result<()> {
        Ok(self.host.catalog.update_intent(self.group.id, self.intent(n + 1).0?).await?)
    }

    fn intent(&self, reached: usize) -> NewIntent {
        let members = self.changed();
        let safety = self.safety.as_ref().ok_or_else(|| Error::internal("there is no safety freeze"));
        NewIntent(safety.map(|safety| Intent::Restore { target: self.freeze.id, safety: safety.id, members, reached }))
    }

    fn is_rebuilt(&self, n: usize) -> bool {
        n == 0 && self.rebuilding.is_some()
    }

    /// The members that change.
    fn changed(&self) -> Vec<String> {
        self.live[..self.restored].iter().map(|live| live.name.clone()).collect()
    }

    async fn read_ahead(&mut self) {
        for one in &mut self.live[self.restored..] {
            one.ahead().await;
        }
    }

    async fn take_safety(&mut self) -> Result<()> {
        let message = format!("before restore of {}", self.freeze.number);
        let (kind, changed) = (CheckpointType::System, self.changed());
        let on_failure = OnFailure::Resume;
        let (actor, suspend, moving) = (self.actor, None, Vec::new());
        let taking = Taking { kind, message: &message, actor, suspend, on_failure, changed, moving };
        self.safety = Some(take(self.host, self.group, &mut self.live, &taking).await?.freeze);
        // Now it is known what the members have that are not restored.
        self.judge_kept().await
    }

    /// Decides the order of suspensions: kernels first. One may have to end its work, and sources that are quiesced keep
    /// other programs waiting.
    pub fn order(&mut self) {
        self.suspensions = (0..self.live.len()).collect();
        self.suspensions.sort_by_key(|n| self.live[*n].kernel().is_none());
    }

    async fn commit(&self) -> Result<()> {
        let (host, group) = (self.host, self.group);
        let safety = self.safety.as_ref().ok_or_else(|| Error::internal("there is no safety freeze"))?;
        let line = host.line(self.actor, "group.restore", None);
        let detail = bounded(format!("{}: {}, safety freeze {}", group.name, self.freeze.id, safety.id));
        let audit = vec![NewAudit { owner: Some(group.uid), manifest: Some(self.freeze.manifest), detail, ..line }];
        let notes = Notes { events: Vec::new(), audit };
        host.catalog.commit_group_restore(group.id, self.freeze.id, safety.id, host.now_ms(), notes).await?;
        let detail = serde_json::json!({ "group": group.name, "id": self.freeze.id, "number": self.freeze.number });
        host.events.publish("", "group_restored", detail);
        Ok(())
    }

    /// The result of an ended restore. Members that could not be reverted stay held.
    pub fn end(self, outcome: Option<Outcome>) -> Result<Restored> {
        let name = &self.group.name;
        let of = |failed: Option<&Option<String>>| {
            failed.and_then(Option::as_ref).map(|member| format!("member {member}: ")).unwrap_or_default()
        };
        let failed = self.failed.clone().unwrap_or_else(|| Error::new(ErrorCode::Conflict, ""));
        match outcome {
            Some(Outcome::Restored) => {
                let safety = self.safety.as_ref().ok_or_else(|| Error::internal("there is no safety freeze"))?.id;
                Ok(Restored { freeze: self.freeze, safety, notes: self.notes })
            }
            Some(Outcome::AsBefore { why, .. }) => {
                let member = of(self.failures.first());
                let mut message = format!("group {name} was not restored: {member}{why}; every member is as it was");
                // Also what concerns no failure: which member was not compared.
                for note in &self.notes {
                    message.push_str(&format!("; {note}"));
                }
                for kept in self.live.iter().flat_map(Live::kept) {
                    message.push_str(&format!("; {kept}"));
                }
                Err(Error { message, ..failed })
            }
            Some(Outcome::Unfinished { why, .. }) => {
                let member = of(self.failures.last());
                let message = format!("the restore of group {name} failed, and so did going back: {member}{why}");
                // The next attempt releases the kernels for a moment.
                self.live.iter().for_each(Live::await_group);
                let parked: Vec<Box<dyn std::any::Any>> =
                    self.live.into_iter().map(|live| Box::new(live) as Box<dyn std::any::Any>).collect();
                self.host.parked.borrow_mut().insert(self.group.id, parked);
                self.host.events.publish(
                    "",
                    "group_unfinished",
                    serde_json::json!({ "group": name, "error": message }),
                );
                Err(Error { message, ..failed }
                    .reason("group_unfinished")
                    .hint(format!("nothing is lost: the daemon tries again each minute, and the next operation of {name} goes back first")))
            }
            None => Err(Error::internal("the restore has no outcome")),
        }
    }
}

/// An intent that is about to be recorded.
struct NewIntent(Result<Intent>);

impl NewIntent {
    async fn and_then_begin(self, host: &Host, group: &Group) -> Result<()> {
        Ok(host.catalog.begin_intent(group.id, self.0?).await?)
    }
}

impl Live {
    /// The part of the present state that the gate judges; `None` for a kernel and for a database without a schema.
    pub(super) async fn present_part(&mut self) -> Result<Option<Part>> {
        let captured = self.present().await?;
        Ok(captured.map(|captured| self.part(captured)))
    }

    /// The part of what the safety freeze captured.
    pub(super) fn captured_part(&self) -> Result<Part> {
        Ok(self.part(self.captured()?.clone()))
    }

    fn part(&self, captured: Captured) -> Part {
        Part { name: self.name.clone(), captured, driver: String::new(), storage: Default::default() }
    }
}
