//! Moves of kernels between hosts: the records on both sides, and what drives `teleport`.
//!
//! ```text
//! missing.rs    what an offered kernel comes without
//! outgoing.rs   one move: offer, copy, freeze, seal, departure, commit
//! offer.rs      the offer, and its answer
//! keyed.rs      idempotency keys
//! precopy.rs    rounds of copying before the pause
//! preview.rs    files of an arriving kernel, written before the pause
//! steps.rs      the time of each step of a pause
//! repeat.rs     repeats commits and aborts until they are acknowledged, also after a restart
//! room.rs       the disk's room for all kernels that arrive
//! sessions.rs   how many of them arrive at once
//! groups.rs     the records of moves of groups, and what their decisions mean for kernels
//! convoy.rs     the kernels of a group that moves: they wait for each other
//! group_in.rs   a group that arrives
//! evidence.rs   the lines of the audit log about a moved kernel
//! incoming.rs   received kernels: verified, prepared, activated or discarded
//! ```
//! A record of an outgoing move precedes its first message and goes with its last. Whether it is a commit or an abort
//! that is repeated follows from the kernel alone: it has departed by this very handover, or it has not.

mod convoy;
mod evidence;
mod group_in;
mod groups;
mod history;
mod incoming;
mod keyed;
mod memory;
mod missing;
mod offer;
mod outgoing;
mod precopy;
mod preview;
mod repeat;
mod reuse;
mod room;
mod sessions;
mod steps;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::catalog::HandoverRow;
use crate::core::error::{Error, Result};
use crate::core::handover::{Side, Stage};
use crate::core::ids::{Digest, Epoch, GroupId, HandoverId, HostId, KernelId};
use crate::core::info::HandoverInfo;
use crate::core::spec::{KernelSpec, Net};
use crate::core::venv::is_in_workspace;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::transition::Departure;
use crate::supervisor::registry::Supervisor;
use crate::teleport::source::Session;
use crate::teleport::transport::{Settings, Transport};

pub(crate) use convoy::{Convoy, PreparedKernel};
pub(super) use evidence::{check_excerpt, store_excerpt};
use groups::MovedGroup;
pub(crate) use groups::{DescribedGroup, GroupArrivals, Leaving, OutGroup, as_kernel};
pub use incoming::serve;
pub use outgoing::teleport;
pub(crate) use outgoing::teleport_in;
pub(crate) use repeat::deliver;

pub use crate::teleport::Sent;

/// Moves in progress of a daemon.
#[derive(Default)]
pub struct Handovers {
    /// Outgoing moves, by kernel.
    active: RefCell<HashMap<KernelId, Active>>,
    /// Kernels that arrive.
    sessions: sessions::Sessions,
    /// The room that they share.
    room: room::Room,
    /// Objects that sessions of a user brought, in a system-wide daemon.
    sent: RefCell<HashMap<u32, HashSet<Digest>>>,
    /// Held while a received kernel is activated or discarded.
    deciding: Mutex<()>,
    /// Wakes the repetition of unacknowledged decisions.
    wake: Notify,
    /// Why decisions were not acknowledged at the last attempt.
    problems: RefCell<HashMap<HandoverId, String>>,
    /// Why groups that arrived are not complete yet.
    incomplete: RefCell<HashMap<GroupId, String>>,
    /// Kernels whose group has moved, and its acknowledgement is awaited.
    departed: RefCell<HashMap<KernelId, groups::Departed>>,
    /// Moves of groups of this daemon.
    convoys: RefCell<HashMap<HandoverId, CancellationToken>>,
    /// What brings groups into their places.
    arrivals: RefCell<Option<Rc<dyn GroupArrivals>>>,
    /// Held while a group is brought into its places.
    arriving: Mutex<()>,
}

impl Handovers {
    /// No moves. Kernels that arrive may take `arrivals` bytes together, if configured.
    pub(super) fn new(arrivals: Option<u64>) -> Handovers {
        Handovers { room: room::Room::new(arrivals), ..Handovers::default() }
    }
}

/// An outgoing move in progress.
#[derive(Debug, Clone)]
struct Active {
    id: HandoverId,
    cancel: CancellationToken,
    fate: watch::Receiver<Fate>,
}

/// What is decided about an outgoing move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Nothing yet.
    Open,
    /// The kernel stays.
    Stays,
    /// The kernel departs.
    Departs,
}

/// The record of an outgoing move.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Outgoing {
    /// The transport to the target.
    to: String,
    /// The kernel's name.
    name: String,
    /// The kernel's epoch at the target.
    epoch: Epoch,
    /// The target, from its first answer on; absent in records of releases that did not keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    host: Option<HostId>,
}

impl Outgoing {
    /// Refuses to decide about the move at another host than the target.
    fn check_target(&self, found: HostId) -> Result<()> {
        match self.host {
            Some(host) if host != found => Err(Error::conflict(format!(
                "{} leads to host {found} now, and kernel {} was offered to host {host}: the decision waits for that host",
                self.to, self.name
            ))
            .reason("other_target")
            .hint("let the transport lead to that host again")),
            Some(_) | None => Ok(()),
        }
    }

    /// Whether the move is one to this host, to which that transport leads.
    fn leads_to(&self, to: &str, host: HostId) -> bool {
        self.host.map_or(self.to == to, |own| own == host)
    }
}

/// The record of a received kernel.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Incoming {
    /// The id under which its files are kept until it is activated.
    files: KernelId,
    /// The host that it comes from.
    source: HostId,
    /// Its specification here.
    spec: KernelSpec,
    /// Its epoch here.
    epoch: Epoch,
    version: u64,
    executions: u64,
    generation: u32,
    created_at_ms: i64,
    /// Whether it takes the place that the kernel left when it departed from here.
    replaces: bool,
    /// The excerpt of the source's audit log.
    #[serde(default)]
    audit: Option<evidence::Evidence>,
    /// Checkpoints of the departed kernel here that did not come back: they end with its record.
    #[serde(default)]
    ended_checkpoints: u64,
    /// What its files take.
    #[serde(default)]
    bytes: u64,
}

/// What keeps the files of a received kernel, also if the rest of its record is damaged.
#[derive(Debug, Deserialize)]
struct IncomingFiles {
    files: KernelId,
}

/// Names what a move leaves behind of a kernel's history.
fn older_checkpoints(count: u64) -> Option<String> {
    match count {
        0 => None,
        1 => Some("1 older checkpoint".into()),
        count => Some(format!("{count} older checkpoints")),
    }
}

fn read<T: serde::de::DeserializeOwned>(row: &HandoverRow) -> Result<T> {
    serde_json::from_str(&row.record)
        .map_err(|error| Error::corrupt(format!("the record of handover {}: {error}", row.id)))
}

fn write(record: &impl Serialize) -> Result<String> {
    serde_json::to_string(record).map_err(|error| Error::internal(error.to_string()))
}

/// Connects to the host at the other end of `to`.
///
/// # Errors
/// As [`Session::open`].
pub(crate) async fn connect(host: &Host, to: &str) -> Result<Session> {
    Session::open(Transport::parse(to)?.connect(&settings(host))?, host.id()).await
}

/// How this host connects to others.
fn settings(host: &Host) -> Settings {
    let configured = &host.config.teleport;
    Settings { ssh: configured.ssh.clone(), command: configured.command.clone() }
}

fn unknown_departure(name: &str) -> Error {
    Error::unavailable(format!("whether kernel {name} has departed cannot be read from its records"))
        .reason("undecided")
        .hint("correct what `ryokan daemon log` names, then restart the daemon: nothing is decided before")
}

/// The epoch after a move.
fn next_epoch(epoch: Epoch) -> Result<Epoch> {
    epoch
        .0
        .checked_add(1)
        .map(Epoch)
        .filter(is_epoch)
        .ok_or_else(|| Error::refused("the kernel has moved too often").reason("epoch"))
}

/// Whether the databases have room for an epoch and for the one after it.
fn is_epoch(epoch: &Epoch) -> bool {
    i64::try_from(epoch.0).is_ok_and(|number| number < i64::MAX)
}

/// A specification without what it names of its host.
fn without_host(spec: &KernelSpec) -> KernelSpec {
    let venv = spec.venv.clone().filter(|venv| is_in_workspace(venv));
    KernelSpec { paths: Vec::new(), net: Net::None, degraded: Vec::new(), ephemeral: false, venv, ..spec.clone() }
}

impl Supervisor {
    /// Moves in progress, unacknowledged ones, and received kernels that `uid` may see.
    ///
    /// # Errors
    /// Catalog errors.
    pub async fn handovers(&self, uid: u32) -> Result<Vec<HandoverInfo>> {
        let rows = self.host().catalog.handovers().await?;
        let is_visible = |row: &HandoverRow| !self.host().environment.system_wide || row.uid == uid;
        let groups = self.host().catalog.group_moves().await?;
        let arriving = |id: HandoverId| groups.iter().any(|row| row.id == id && row.stage == Stage::Decided);
        let rows = rows.into_iter().chain(groups.iter().cloned().map(groups::as_handover));
        let describe = |row: HandoverRow| {
            let mut shown = self.describe(&row).unwrap_or_else(|error| self.damaged(&row, error));
            if shown.state == "live" && arriving(row.id) {
                shown.state = "arriving".into();
            }
            shown
        };
        Ok(rows.filter(is_visible).map(describe).collect())
    }

    fn damaged(&self, row: &HandoverRow, error: Error) -> HandoverInfo {
        HandoverInfo {
            id: row.id,
            kernel: row.kernel,
            name: self.get(row.kernel).map(|kernel| kernel.spec().name.to_string()).unwrap_or_default(),
            state: "damaged".into(),
            peer: String::new(),
            epoch: Epoch(0),
            at_ms: row.at_ms,
            problem: error.message,
        }
    }

    fn describe(&self, row: &HandoverRow) -> Result<HandoverInfo> {
        let (name, peer, epoch, state) = match row.side {
            Side::Out => {
                let Outgoing { to, name, epoch, host: _ } = read(row)?;
                let active = self.registry().handovers.active.borrow();
                let is_active = active.get(&row.kernel).is_some_and(|active| active.id == row.id)
                    || self.registry().handovers.convoys.borrow().contains_key(&row.id);
                let state = match (self.departure(row), is_active) {
                    (Departure::Decided, _) => "committing",
                    (Departure::Unknown, _) => "undecided",
                    (Departure::Undecided, true) => "moving",
                    (Departure::Undecided, false) => "aborting",
                };
                (name, to, epoch, state)
            }
            Side::In => {
                if let Ok(MovedGroup { name, source, .. }) = read(row) {
                    let state = if row.live { "live" } else { "prepared" };
                    return Ok(self.described(row, (name, source.to_string(), Epoch(0), state)));
                }
                let incoming: Incoming = read(row)?;
                let state = if row.live { "live" } else { "prepared" };
                (incoming.spec.name.to_string(), incoming.source.to_string(), incoming.epoch, state)
            }
        };
        Ok(self.described(row, (name, peer, epoch, state)))
    }

    fn described(&self, row: &HandoverRow, (name, peer, epoch, state): (String, String, Epoch, &str)) -> HandoverInfo {
        let (id, kernel, at_ms) = (row.id, row.kernel, row.at_ms);
        let handovers = &self.registry().handovers;
        let found = handovers.problems.borrow().get(&id).cloned();
        let group = GroupId::from_bytes(*kernel.as_bytes());
        let problem = found.or_else(|| handovers.incomplete.borrow().get(&group).cloned()).unwrap_or_default();
        HandoverInfo { id, kernel, name, state: state.into(), peer, epoch, at_ms, problem }
    }

    /// Whether the kernel of an outgoing move has departed by it. One that is removed has not.
    fn departure(&self, row: &HandoverRow) -> Departure {
        if self.registry().handovers.departed.borrow().values().any(|departed| departed.group == row.id) {
            return Departure::Decided;
        }
        self.get(row.kernel).map_or(Departure::Undecided, |kernel| kernel.departure(row.id))
    }

    /// Cancels a move before its commit; returns when it is certain that the kernel stays.
    ///
    /// # Errors
    /// `conflict` after the commit, also if that comes first; `notFound` if the kernel is not being moved.
    pub async fn abort_teleport(&self, kernel: &Kernel) -> Result<()> {
        let active = self.registry().handovers.active.borrow().get(&kernel.id).cloned();
        let too_late = |hint: String| {
            Error::conflict(format!("too late: the move of kernel {} is committed", kernel.spec().name))
                .reason("committed")
                .hint(hint)
        };
        if let Some(Active { id, cancel, mut fate }) = active
            && !kernel.has_departed(id)
        {
            cancel.cancel();
            // The departure may be under way. A move that ends without a word has not departed.
            let fate = fate.wait_for(|fate| *fate != Fate::Open).await.map_or(Fate::Stays, |fate| *fate);
            return match fate == Fate::Departs || kernel.has_departed(id) {
                true => Err(too_late("use it on the other host".into())),
                false => Ok(()),
            };
        }
        kernel.check_here().map_err(|error| too_late(error.hint))?;
        // Only the target is left to be notified.
        self.registry().handovers.wake.notify_one();
        let rows = self.host().catalog.handovers().await?;
        match rows.iter().find(|row| row.kernel == kernel.id && row.side == Side::Out) {
            Some(row) if self.departure(row) == Departure::Unknown => {
                Err(unknown_departure(kernel.spec().name.as_str()))
            }
            Some(_) => Ok(()),
            None => Err(Error::not_found(format!("kernel {} is not being moved", kernel.spec().name))),
        }
    }

    /// Refuses the removal of a kernel while the other host still needs its decision.
    pub(crate) async fn check_no_handover(&self, kernel: &Kernel) -> Result<()> {
        let rows = self.host().catalog.handovers().await?;
        let name = &kernel.spec().name;
        for row in rows.iter().filter(|row| row.kernel == kernel.id) {
            match row.side {
                Side::Out => match self.departure(row) {
                    Departure::Decided => {
                        return Err(Error::conflict(format!(
                            "the other host has not acknowledged that kernel {name} lives there"
                        ))
                        .reason("unacknowledged")
                        .hint("`ryokan teleport --status` shows it; the commit is repeated by itself"));
                    }
                    Departure::Unknown => return Err(unknown_departure(name.as_str())),
                    Departure::Undecided => {}
                },
                Side::In if !row.live => {
                    return Err(Error::conflict(format!("kernel {name} is about to return by handover {}", row.id))
                        .reason("prepared"));
                }
                Side::In => {}
            }
        }
        Ok(())
    }

    /// Restores what the records of handovers demand, before any kernel is recovered. Returns the directories of prepared
    /// kernels; `None`: a damaged record does not name its own, so no directory may be removed.
    ///
    /// # Errors
    /// Catalog errors, and files that cannot be renamed.
    pub(crate) async fn recover_handovers(&self) -> Result<Option<Vec<KernelId>>> {
        let (mut prepared, mut is_whole) = (Vec::new(), true);
        self.recover_group_moves().await?;
        let rows = self.host().catalog.handovers().await?;
        let awaits_rename = |row: &HandoverRow| {
            let files = read::<IncomingFiles>(row).map(|IncomingFiles { files }| files);
            row.side == Side::In
                && row.live
                && files.is_ok_and(|files| self.host().catalog.kernel_files(files).dir.exists())
        };
        if rows.iter().any(awaits_rename) {
            // A loss of power must not take an activation back after its directory was renamed.
            self.host().sync_decision_again(None).await?;
        }
        for row in rows {
            if row.side == Side::Out {
                continue;
            }
            let files = match read(&row) {
                Ok(IncomingFiles { files }) => files,
                Err(error) => {
                    tracing::error!(handover = %row.id, %error, "the files of a received kernel cannot be found");
                    is_whole = false;
                    continue;
                }
            };
            if row.live {
                self.host().catalog.adopt_kernel_files(files, row.kernel).await?;
                continue;
            }
            prepared.push(files);
            let record = read::<Incoming>(&row);
            if let Ok(incoming) = &record {
                self.registry().handovers.room.was_prepared(row.id, incoming.bytes);
            }
            match record {
                Ok(incoming) if !incoming.replaces => {
                    self.registry().creating.borrow_mut().insert((row.uid, incoming.spec.name), ());
                }
                Ok(_) => {}
                Err(error) => tracing::error!(handover = %row.id, %error, "a received kernel cannot be activated"),
            }
        }
        Ok(is_whole.then_some(prepared))
    }

    /// The prepared kernels: the id of the files, and a label.
    ///
    /// # Errors
    /// Catalog errors; `corrupt` if a record does not name its files: what they reference is not known then.
    pub(crate) async fn prepared_kernels(&self) -> Result<Vec<(KernelId, String)>> {
        let rows = self.host().catalog.handovers().await?;
        let prepared = rows.iter().filter(|row| row.side == Side::In && !row.live);
        prepared
            .map(|row| {
                let IncomingFiles { files } = read(row)?;
                let label = match read::<Incoming>(row) {
                    Ok(incoming) => self.host().event_name(row.uid, &incoming.spec.name),
                    Err(_) => row.kernel.to_string(),
                };
                Ok((files, label))
            })
            .collect()
    }

    /// Decides about a prepared kernel in place of its source; or gives up a decision that the target does not acknowledge.
    ///
    /// # Errors
    /// `notFound`, `conflict` if the handover is decided otherwise.
    pub async fn resolve_handover(&self, id: HandoverId, live: bool, actor: &Actor) -> Result<()> {
        let target = incoming::TargetSide::new(self.clone(), actor.clone());
        if self.resolve_group(id, live, actor).await? {
            return Ok(());
        }
        if let Some(group) = self.arrives_with_group(id).await? {
            return Err(Error::conflict(format!("handover {id} is that of a kernel that arrives with its group"))
                .hint(format!("resolve {group} in its place")));
        }
        let rows = self.host().catalog.handovers().await?;
        let is_own = |row: &HandoverRow| !self.host().environment.system_wide || row.uid == actor.uid;
        let row = rows.into_iter().find(|row| row.id == id && !row.live && is_own(row));
        let row = row.ok_or_else(|| Error::not_found(format!("nothing waits for an end of handover {id}")))?;
        let is_active = self.registry().handovers.active.borrow().values().any(|active| active.id == id);
        if row.side == Side::Out && (live || is_active) {
            return Err(Error::conflict(format!("handover {id} is a move away from here: nothing can be activated"))
                .hint("once it has ended, --discard gives up a decision that the other host does not acknowledge"));
        }
        let line = self.host().line(actor, "handover.resolve", None);
        let detail = format!("{} without its source: {}", id, if live { "activated" } else { "discarded" });
        let line =
            crate::core::audit::NewAudit { kernel: row.kernel.to_string(), owner: Some(row.uid), detail, ..line };
        self.host().write_audit(line).await;
        match (row.side, live) {
            (Side::Out, _) => Ok(self.host().catalog.forget_handover(id).await?),
            (Side::In, true) => target.activate_prepared(id, None, false).await,
            (Side::In, false) => target.discard_prepared(id).await,
        }
    }

    /// A garbage collection has removed what nothing references and what was last used before this time.
    pub(crate) fn objects_collected(&self, before: Instant) {
        self.registry().handovers.room.collected(before);
        self.registry().handovers.sent.borrow_mut().clear();
    }

    /// Starts the repetition of unacknowledged decisions.
    pub(crate) fn start_handovers(&self) {
        repeat::run(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_name_their_target() {
        let [target, other] = [1, 2].map(|byte| HostId::from_bytes([byte; 16]));
        // A former release's: any host at the end of the transport.
        let former: Outgoing = serde_json::from_str(r#"{"to":"exec:x","name":"k","epoch":2}"#).expect("a record");
        assert!(former.check_target(other).is_ok());
        assert!(former.leads_to("exec:x", other) && !former.leads_to("exec:y", other));
        let record = Outgoing { host: Some(target), ..former };
        let record: Outgoing = serde_json::from_str(&write(&record).expect("JSON")).expect("a record");
        assert!(record.check_target(target).is_ok());
        assert_eq!(record.check_target(other).map_err(|error| error.reason), Err("other_target".into()));
        assert!(record.leads_to("exec:y", target) && !record.leads_to("exec:x", other));
    }
}
