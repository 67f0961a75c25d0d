//! The move of a group to another host: its kernels by handovers, the rest as a freeze, and one decision about all of it.
//!
//! ```text
//! kernels copied ─▶ kernels held, prepared there ─▶ freeze of all members ─▶ its objects there, prepared
//!        ─▶ the decision: one record of the catalog ─▶ kernels depart ─▶ commit, repeated until it is acknowledged
//! ```
//! A failure before the decision leaves everything here, and the target deletes what it received.

use std::path::Path;
use std::rc::Rc;

use serde::Serialize;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::export::histories;
use super::members;
use super::operation_turn::refuse_half_restored;
use super::run_freeze::{Taken, Taking, take};
use super::{manifest, pauses, recover, removal, scratch, turn};
use crate::bundle::GroupHead;
use crate::catalog::state::StateHandle;
use crate::catalog::{GroupMoveRow, HandoverRow, NewAudit, Notes};
use crate::core::checkpoint::CheckpointType;
use crate::core::error::{Error, Result};
use crate::core::freeze::drain::Drain;
use crate::core::freeze::on_failure::OnFailure;
use crate::core::freeze::portable::check_portable;
use crate::core::freeze::{Captured, Group, KernelRevision, Part, Target};
use crate::core::handover::{MoveEvent, MoveOptions, Next, Side, Stage};
use crate::core::ids::{CheckpointId, Digest, Epoch, HandoverId, KernelId};
use crate::core::info::TeleportReport;
use crate::core::limits;
use crate::core::signature::Standing;
use crate::core::snapshot::PortableKind;
use crate::store::StoreError;
use crate::supervisor::checkpoint::manifest_of;
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::teleport::{self, Convoy, DescribedGroup, Leaving, OutGroup, Sent, as_kernel};
use crate::teleport::source::Session;
use crate::teleport::{Offer, OfferedGroup};
use crate::workspace::{self, Seen, TreeId};

/// Receives the phase and the totals so far.
pub type Shown = Rc<dyn Fn(&'static str, Sent)>;

/// Moves a group to the host at the other end of `to`. Dropping the call before the decision cancels the move.
///
/// # Errors
/// Refusals of either host, and failures before the decision: everything continues here, unchanged.
pub async fn teleport(
    supervisor: &Supervisor,
    name: &str,
    to: &str,
    (options, places): (MoveOptions, Vec<(String, String)>),
    actor: &Actor,
    progress: Shown,
) -> Result<TeleportReport> {
    let host = supervisor.host();
    if actor.uid != host.own_actor().uid {
        return Err(Error::refused("the daemon runs the transport's command, so only its own user may name one")
            .reason("transport")
            .hint("`ryokan export` here and `ryokan import` there make a copy"));
    }
    if options.since.is_some() || !options.key.is_empty() || options.expected_version != 0 {
        let message = "a group moves with all checkpoints, without a key and an expected version";
        return Err(Error::unsupported(message).reason("group"));
    }
    let cancel = CancellationToken::new();
    let _guard = cancel.clone().drop_guard();
    let (group, turn) = turn(supervisor, actor.uid, name).await?;
    let (this, to, actor) = (supervisor.clone(), to.to_owned(), actor.clone());
    // A separate task: once it is decided, the move does not depend on the client.
    let moving = tokio::task::spawn_local(async move {
        let _turn = turn;
        recover::unfinished(&this, &group).await?;
        let group = super::find(&this, actor.uid, &group.name).await?;
        pauses::refuse(&group)?;
        refuse_half_restored(this.host(), &group).await?;
        let moved = perform(&this, &group, to, (options, places), &actor, (progress, cancel)).await;
        if let Err(error) = &moved {
            this.host().audit_refusal(&actor, "group.teleport", None, error).await;
        }
        moved
    });
    moving.await.map_err(|error| Error::internal(error.to_string()))?
}

/// The kernels of a group that may move.
fn kernels(supervisor: &Supervisor, group: &Group, places: &[(String, String)]) -> Result<Vec<Rc<Kernel>>> {
    let mut kernels = Vec::new();
    for member in &group.members {
        match &member.target {
            Target::Kernel { id } => {
                let gone = || Error::not_found(format!("kernel {id} of the group is gone"));
                kernels.push(supervisor.get(*id).ok_or_else(gone)?);
            }
            Target::Repository { .. } | Target::Database { .. } | Target::Directory { .. } => {
                if !places.iter().any(|(name, _)| *name == member.name) {
                    return Err(Error::refused(format!("member {} has no place on the other host", member.name))
                        .reason("place")
                        .hint("name it with --place MEMBER=PATH"));
                }
            }
            Target::Command { .. } | Target::Postgres { .. } | Target::Server { .. } => {
                let message = format!("member {} is a {}, which does not move", member.name, member.target.kind());
                return Err(Error::unsupported(message).reason("group_member").hint(format!(
                    "take it out of the group; or copy the group: `ryokan export {}` here, `ryokan import` there",
                    group.name
                )));
            }
        }
    }
    if let Some((name, _)) = places.iter().find(|(name, _)| !group.members.iter().any(|one| one.name == *name)) {
        return Err(Error::invalid(format!("group {} has no member {name:?}", group.name)).reason("place"));
    }
    let most = limits::HANDOVERS_CONCURRENT - 1;
    match kernels.len() {
        0 => Err(Error::unsupported(format!("group {} has no kernel, and only kernels move", group.name))
            .reason("group")
            .hint("copy it: `ryokan export` here, `ryokan import` there")),
        many if many > most => {
            Err(Error::unsupported(format!("a group moves with at most {most} kernels")).reason("group"))
        }
        _ => Ok(kernels),
    }
}

struct Moving<'a> {
    supervisor: &'a Supervisor,
    host: &'a Rc<Host>,
    group: &'a Group,
    id: HandoverId,
    record: OutGroup,
    options: MoveOptions,
    places: Vec<(String, String)>,
    kernels: Vec<Rc<Kernel>>,
    actor: &'a Actor,
    progress: Shown,
    convoy: Rc<Convoy>,
    sent: Sent,
    /// The freeze, which is not interrupted.
    taking: Option<JoinHandle<Result<Taken>>>,
}

async fn perform(
    supervisor: &Supervisor,
    group: &Group,
    to: String,
    (options, places): (MoveOptions, Vec<(String, String)>),
    actor: &Actor,
    (progress, cancel): (Shown, CancellationToken),
) -> Result<TeleportReport> {
    let host = supervisor.host();
    let kernels = kernels(supervisor, group, &places)?;
    let earlier = host.catalog.group_moves().await?.into_iter();
    let is_open = earlier.filter(|row| row.side == Side::Out).any(|row| row.group == group.id)
        || kernels.iter().any(|kernel| supervisor.awaits_acknowledgement(kernel.id));
    if is_open {
        return Err(Error::conflict(format!("an earlier move of group {} has not ended", group.name))
            .reason("moving")
            .hint("`ryokan teleport --status` shows it, and what it waits for"));
    }
    let id = HandoverId::from_bytes(host.random());
    let record = OutGroup { to, name: group.name.clone(), epoch: Epoch(1), host: None, kernels: Vec::new() };
    let convoy = Rc::new(Convoy::new(kernels.len(), cancel.clone()));
    let row = GroupMoveRow {
        id,
        side: Side::Out,
        group: group.id,
        uid: group.uid,
        stage: Stage::Open,
        record: text(&record)?,
        at_ms: host.now_ms(),
    };
    let (sent, taking) = (Sent::default(), None);
    let mut moving =
        Moving { supervisor, host, group, id, record, options, places, kernels, actor, progress, convoy, sent, taking };
    supervisor.set_convoy(id, Some(cancel));
    let done = match host.catalog.put_group_move(row).await {
        Ok(()) => moving.run().await,
        Err(error) => Err(error.into()),
    };
    let row = moving.row()?;
    let delivering = teleport::deliver(supervisor, &row);
    let done = match done {
        Ok(report) => {
            let acknowledged = delivering.await;
            if let Err(error) = &acknowledged {
                tracing::info!(handover = %id, %error, "the commit of a group's move is repeated");
            }
            Ok(TeleportReport { acknowledged: acknowledged.is_ok(), ..report })
        }
        Err(error) => {
            // The client is not kept waiting for a target that does not answer.
            match moving.record.host {
                Some(_) => drop(tokio::time::timeout(limits::HANDOVER_ABORT_WAIT, delivering).await),
                // No host has accepted it.
                None => drop(supervisor.forget_group_move(id).await),
            }
            let detail = serde_json::json!({ "group": group.name, "handover": id, "error": error.message });
            host.events.publish("", "group_teleport_failed", detail);
            let message = format!("group {} stays here: {}", group.name, error.message);
            Err(Error { message, ..error })
        }
    };
    supervisor.set_convoy(id, None);
    done
}

fn text(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::internal(error.to_string()))
}

impl Moving<'_> {
    fn row(&self) -> Result<HandoverRow> {
        Ok(HandoverRow {
            id: self.id,
            side: Side::Out,
            kernel: as_kernel(self.group.id),
            uid: self.group.uid,
            live: false,
            record: text(&self.record)?,
            at_ms: self.host.now_ms(),
        })
    }

    async fn run(&mut self) -> Result<TeleportReport> {
        let begun = Instant::now();
        let _guard = self.host.store.run(|store| Ok(store.guard())).await?;
        // An early refusal: nothing is held yet.
        let mut session = self.connect().await?;
        self.record.host = Some(session.host());
        self.advance(Stage::Open, Notes::default()).await?;
        session.abort(self.id).await?;
        drop(session);
        let mut moves = JoinSet::new();
        for kernel in &self.kernels {
            let (supervisor, kernel, to) = (self.supervisor.clone(), Rc::clone(kernel), self.record.to.clone());
            let (options, actor, convoy) = (self.options.clone(), self.actor.clone(), Rc::clone(&self.convoy));
            let shown = Rc::clone(&self.progress);
            let progress = Box::new(move |phase, sent| shown(phase, sent));
            moves.spawn_local(async move {
                teleport::teleport_in(&supervisor, &kernel, &to, options, &actor, (progress, Some(convoy))).await
            });
        }
        let prepared = self.prepare(&mut moves).await;
        let held = match prepared {
            Ok((held, taken)) => self.decide(&taken).await.map(|()| (held, taken)),
            Err(error) => Err(error),
        };
        let (held, taken) = match held {
            Ok(decided) => decided,
            Err(error) => {
                self.convoy.take(MoveEvent::Failed);
                while moves.join_next().await.is_some() {}
                if let Some(taking) = self.taking.take() {
                    let _ = taking.await;
                }
                // What a failed freeze leaves.
                if let Err(error) = recover::unfinished(self.supervisor, self.group).await {
                    tracing::warn!(group = %self.group.name, %error, "the freeze of a move is withdrawn later");
                }
                return Err(error);
            }
        };
        self.convoy.take(MoveEvent::Recorded);
        let pause_ms = held.elapsed().as_millis() as u64;
        let mut total = self.sent;
        let mut missing = Vec::new();
        while let Some(moved) = moves.join_next().await {
            let Ok(Ok(report)) = moved else {
                tracing::error!(group = %self.group.name, "a kernel of a moved group departs at the next start");
                continue;
            };
            total.objects += report.objects;
            total.bytes += report.bytes;
            total.sent_objects += report.sent_objects;
            total.sent_bytes += report.sent_bytes;
            total.wire_bytes += report.wire_bytes;
            missing.extend(report.missing);
        }
        let stays = self.group.members.iter().filter(|one| !matches!(one.target, Target::Kernel { .. }));
        let mut notes: Vec<String> =
            stays.map(|one| format!("{} {} stays here as it is", one.target.kind(), one.name)).collect();
        notes.extend(taken.notes);
        let host = self.record.host.ok_or_else(|| Error::internal("a move without a target"))?;
        let detail = serde_json::json!({ "group": self.group.name, "handover": self.id, "host": host });
        self.host.events.publish("", "group_departed", detail);
        Ok(TeleportReport {
            handover: self.id,
            host,
            epoch: self.record.epoch,
            objects: total.objects,
            bytes: total.bytes,
            sent_objects: total.sent_objects,
            sent_bytes: total.sent_bytes,
            pause_ms,
            missing,
            acknowledged: false,
            kind: PortableKind::Checkpoint,
            kind_reason: match self.kernels.len() {
                1 => "a group of one kernel".into(),
                many => format!("a group of {many} kernels"),
            },
            elapsed_ms: begun.elapsed().as_millis() as u64,
            wire_bytes: total.wire_bytes,
            stays: notes,
        })
    }

    /// Everything is prepared at the target when this returns; since when the kernels are held, and the freeze.
    async fn prepare(&mut self, moves: &mut JoinSet<Result<TeleportReport>>) -> Result<(Instant, Taken)> {
        let (convoy, cancel) = (Rc::clone(&self.convoy), self.convoy.cancel.clone());
        let copying = async {
            convoy.reached(|next| next != Next::Wait).await?;
            let held = Instant::now();
            let end = held + self.host.config.teleport.pause_limit;
            let preparing = async {
                convoy.reached(|next| next == Next::Capture).await?;
                self.capture().await
            };
            match timeout_at(end, preparing).await {
                Ok(taken) => Ok((held, taken?)),
                Err(_) => Err(Error::deadline("the kernels were held for too long").reason("pause_limit")),
            }
        };
        tokio::pin!(copying);
        tokio::select! {
            // A kernel that fails cancels the others: its own reason comes first.
            biased;
            prepared = &mut copying => prepared,
            Some(ended) = moves.join_next() => Err(match ended {
                Ok(Err(error)) => error,
                Ok(Ok(_)) => Error::internal("a kernel moved without its group"),
                Err(error) => Error::internal(error.to_string()),
            }),
            () = cancel.cancelled() => {
                Err(Error::conflict("the move was cancelled before its commit").reason("cancelled"))
            }
        }
    }

    /// Connects, and offers the group.
    async fn connect(&self) -> Result<Session> {
        let mut session = teleport::connect(self.host, &self.record.to).await?;
        if session.host() == self.host.id() {
            return Err(Error::refused("the other end is this host").reason("same_host"));
        }
        self.record.check_target(session.host())?;
        let members = self.group.members.iter().filter(|one| !matches!(one.target, Target::Kernel { .. }));
        let members = members.map(|one| (one.name.clone(), one.target.kind().to_owned())).collect();
        // It may be the first seal of this host.
        self.host.signing_key().await?;
        let known = self.host.known_keys(self.actor.uid).await?;
        let key = known.iter().find(|one| one.standing == Standing::Own).map(|one| one.key);
        let mut spec = self.kernels[0].spec_now();
        spec.name = self.group.name.parse().map_err(|_| Error::internal("a group without a name"))?;
        let offer = Offer {
            handover: self.id,
            kernel: as_kernel(self.group.id),
            epoch: self.record.epoch,
            spec,
            resources: Vec::new(),
            allow_missing: true,
            allowed: Vec::new(),
            format: StateHandle::history_format(),
            bytes: 0,
            kind: PortableKind::Checkpoint,
            machine: None,
            or_checkpoint: true,
            report_ms: (self.host.config.teleport.stall_timeout / 4).as_millis() as u64,
            awaits_admission: true,
            group: Some(OfferedGroup {
                name: self.group.name.clone(),
                members,
                places: self.places.clone(),
                kernels: self.kernels.len(),
                key,
            }),
        };
        session.offer(offer).await?;
        Ok(session)
    }

    fn leaving(&self) -> Vec<Leaving> {
        let of =
            |one: teleport::PreparedKernel| Leaving { handover: one.handover, kernel: one.kernel, epoch: one.epoch };
        self.convoy.kernels().into_iter().map(of).collect()
    }

    /// Freezes the group, whose kernels are held, and sends the freeze.
    async fn capture(&mut self) -> Result<Taken> {
        let (supervisor, host, group) = (self.supervisor, self.host, self.group);
        let message = format!("move to host {}", self.record.host.map(|id| id.to_string()).unwrap_or_default());
        let (this, of, actor) = (supervisor.clone(), group.clone(), self.actor.clone());
        let prepared = self.convoy.kernels();
        let taking = self.taking.insert(tokio::task::spawn_local(async move {
            let taken = freeze_of(&this, &of, &prepared, &message, &actor).await;
            if taken.is_err() {
                removal::unpin(&this, pins(&prepared)).await;
            }
            taken
        }));
        let taken = taking.await.map_err(|error| Error::internal(error.to_string()));
        self.taking = None;
        let taken = taken??;
        let manifest = manifest(host, &taken.freeze).await?;
        check_portable(&taken.freeze, &manifest).map_err(|why| Error::refused(why).reason("not_portable"))?;
        let folder = scratch(host, group.id).join(".export");
        let packed = histories(supervisor, group, &manifest, Path::new(&folder)).await;
        let _ = std::fs::remove_dir_all(&folder);
        let histories = packed?;
        let packs: Vec<Digest> = histories.iter().map(|history| history.pack).collect();
        let head = GroupHead {
            ryokan: env!("CARGO_PKG_VERSION").into(),
            at_ms: host.now_ms(),
            host: host.id(),
            freeze: taken.freeze.clone(),
            kernels: Vec::new(),
            histories,
        };
        let described = DescribedGroup { head, kernels: self.leaving() };
        let description = host.store.put(text(&described)?.into_bytes()).await?;
        let single = [taken.freeze.manifest, description].into_iter().chain(packs).chain(manifest.objects());
        let (single, trees): (Vec<Digest>, Vec<Digest>) = (single.collect(), manifest.trees());
        let objects = host.store.run_beside(move |store| {
            let (mut seen, mut found) = (Seen::default(), Vec::new());
            found.extend(single.into_iter().filter(|object| seen.add(*object)));
            for tree in trees {
                let reached = workspace::reach(store, TreeId(tree), &mut seen, &mut |object| {
                    found.push(object);
                    Ok(())
                });
                if let Err(error) = reached {
                    return Ok(Err(Error::corrupt(error.to_string())));
                }
            }
            Ok::<_, StoreError>(Ok(found))
        });
        let objects = objects.await??;
        let mut session = self.connect().await?;
        session.hold(host.config.teleport.stall_timeout);
        let shown = Rc::clone(&self.progress);
        session.transfer(&host.store, &objects, 0, &move |sent| shown("members", sent)).await?;
        session.seal(description).await?;
        self.sent = session.sent;
        Ok(taken)
    }

    async fn advance(&self, stage: Stage, notes: Notes) -> Result<()> {
        let (host, record) = (self.host, text(&self.record)?);
        let advance =
            async || Ok(host.catalog.advance_group_move(self.id, stage, record.clone(), notes.clone()).await?);
        host.making_room(advance).await.map(drop)
    }

    /// Records the decision. Returns an error only if it is certain that there is none.
    async fn decide(&mut self, taken: &Taken) -> Result<()> {
        self.convoy.take(MoveEvent::Sent);
        self.record.kernels = self.leaving();
        let line = self.host.line(self.actor, "group.teleport", None);
        let host = self.record.host.map(|id| id.to_string()).unwrap_or_default();
        let detail =
            bounded(format!("{} to host {host}; handover {}; freeze {}", self.group.name, self.id, taken.freeze.id));
        let audit =
            vec![NewAudit { owner: Some(self.group.uid), manifest: Some(taken.freeze.manifest), detail, ..line }];
        if let Err(error) = self.advance(Stage::Decided, Notes { events: Vec::new(), audit }).await {
            loop {
                match self.host.catalog.group_moves().await {
                    Ok(rows) if rows.iter().any(|row| row.id == self.id && row.stage != Stage::Open) => break,
                    Ok(_) => {
                        self.record.kernels.clear();
                        return Err(error);
                    }
                    // The kernels are held until it is known.
                    Err(_) => tokio::time::sleep(limits::HANDOVER_REPEAT_FIRST).await,
                }
            }
        }
        self.supervisor.group_has_departed(self.id, &self.record);
        let mut synced = self.host.sync_decision(None).await;
        while let Err(error) = synced {
            tracing::error!(group = %self.group.name, %error, "the decision about a group is synced again");
            tokio::time::sleep(limits::HANDOVER_REPEAT_FIRST).await;
            synced = self.host.sync_decision_again(None).await;
        }
        Ok(())
    }
}

/// Freezes a group whose kernels are held by their handovers.
async fn freeze_of(
    supervisor: &Supervisor,
    group: &Group,
    prepared: &[teleport::PreparedKernel],
    message: &str,
    actor: &Actor,
) -> Result<Taken> {
    let mut moving = Vec::new();
    for one in prepared {
        moving.push(part(supervisor, group, one).await?);
    }
    // The freeze needs these checkpoints as long as it exists, and it stays if the move fails.
    pin(supervisor, prepared).await?;
    let is_other = |member: &crate::core::freeze::Member| !matches!(member.target, Target::Kernel { .. });
    let mut live = members::open(supervisor, group, is_other).await?;
    let taking = Taking {
        kind: CheckpointType::Manual,
        message,
        actor,
        suspend: Some(Drain::default()),
        on_failure: OnFailure::Resume,
        changed: Vec::new(),
        moving,
    };
    take(supervisor.host(), group, &mut live, &taking).await
}

/// Pins the checkpoints of held kernels.
///
/// # Errors
/// Database errors: retention would remove what the freeze needs.
async fn pin(supervisor: &Supervisor, prepared: &[teleport::PreparedKernel]) -> Result<()> {
    supervisor.host().catalog.begin_pins(pins(prepared)).await?;
    for one in prepared {
        let Some(kernel) = supervisor.get(one.kernel) else { continue };
        kernel.records.pin_checkpoint(one.checkpoint.id, true).await.map_err(|error| {
            let message = format!("the checkpoint of {} is not pinned: {}", kernel.spec().name, error.message);
            Error { message, ..error }
        })?;
    }
    Ok(())
}

fn pins(prepared: &[teleport::PreparedKernel]) -> Vec<(KernelId, CheckpointId)> {
    prepared.iter().map(|one| (one.kernel, one.checkpoint.id)).collect()
}

/// What the freeze has of a kernel that is held by its handover.
async fn part(supervisor: &Supervisor, group: &Group, prepared: &teleport::PreparedKernel) -> Result<Part> {
    let is_its = |target: &Target| matches!(target, Target::Kernel { id } if *id == prepared.kernel);
    let member = group.members.iter().find(|member| is_its(&member.target));
    let name = member.map(|member| member.name.clone()).ok_or_else(|| Error::internal("no member"))?;
    let kernel: KernelId = prepared.kernel;
    let kernel_name = supervisor.get(kernel).map(|kernel| kernel.spec().name.to_string()).unwrap_or_default();
    let manifest = manifest_of(supervisor.host(), &prepared.checkpoint).await?;
    let captured = Captured::Kernel {
        kernel,
        kernel_name,
        checkpoint: prepared.checkpoint.id,
        manifest: Some(prepared.checkpoint.manifest),
        revision: KernelRevision::from(&manifest),
        repositories: manifest.repositories,
        under_way: 0,
    };
    Ok(Part { name, captured, driver: String::new(), storage: Default::default() })
}
