//! A group that arrives: its kernels are prepared by handovers of their own; here is the rest.
//!
//! Prepared, it is a record that names verified objects: nothing of it is in a place. With the commit its kernels are
//! activated, and the group is imported and brought into its places. A step that fails then is repeated with the commit.

use std::collections::HashSet;
use std::rc::Rc;

use super::groups::{DescribedGroup, Leaving, MovedGroup, record};
use super::incoming::TargetSide;
use super::room::Holder;
use super::sessions::Bounds;
use super::{memory, write};
use crate::bundle;
use crate::catalog::{GroupMoveRow, NewAudit, Notes};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::portable::GroupArrival;
use crate::core::freeze::{Captured, Part};
use crate::core::handover::{Side, Stage};
use crate::core::ids::{Digest, GroupId, HandoverId, HostId, KernelId};
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::registry::bundle_io::client_error;
use crate::teleport::target::Admission;
use crate::teleport::{Accept, Offer, OfferedGroup, Received};

fn arrival(name: &str, places: &[(String, String)]) -> GroupArrival {
    GroupArrival { name: name.to_owned(), places: places.to_vec(), moved: true, ..GroupArrival::default() }
}

impl TargetSide {
    /// The record of a group of this user that arrives.
    pub(super) async fn group_row(&self, id: HandoverId) -> Result<Option<GroupMoveRow>> {
        let rows = self.host().catalog.group_moves().await?;
        Ok(rows.into_iter().find(|row| row.id == id && row.side == Side::In && row.uid == self.actor.uid))
    }

    pub(super) async fn admit_group(&self, offer: &Offer, group: &OfferedGroup) -> Result<Admission> {
        let host = self.host();
        if host.disk_is_full() {
            return Err(Host::full());
        }
        let most = match host.environment.system_wide {
            true => limits::HANDOVERS_OF_USER,
            false => limits::HANDOVERS_CONCURRENT - 1,
        };
        if !(1..=most).contains(&group.kernels) {
            let message = format!("the other host takes groups of at least one and at most {most} kernels");
            return Err(Error::unsupported(message).reason("group"));
        }
        self.supervisor.group_arrivals()?.may_arrive(&self.supervisor, group, &self.actor).await?;
        let reuse = self.reuse(offer.kernel).await?;
        host.making_room(async || Ok(host.catalog.rewrite_handovers().await?)).await?;
        let handovers = &self.supervisor.registry().handovers;
        let of_host = limits::HANDOVERS_CONCURRENT;
        let bounds = Bounds { of_host, of_user: of_host, silence: host.config.teleport.stall_timeout };
        let silence = handovers.sessions.begin(offer.handover, self.actor.uid, bounds)?;
        let holder = Holder { silence: Rc::clone(&silence), most: bounds.silence };
        let begun = handovers.room.begin(offer.handover, offer.bytes, host.free_bytes().unwrap_or(u64::MAX), holder);
        let most_bytes = begun.inspect_err(|_| handovers.sessions.end(offer.handover))?;
        let accept = Accept { missing: Vec::new(), kind: offer.kind, why: String::new() };
        Ok(Admission { accept, reuse, most_bytes, silence })
    }

    /// Verifies a received group, and records it as prepared. The caller holds the session's `is_aborted`.
    pub(super) async fn prepare_group(
        &self,
        source: HostId,
        offer: &Offer,
        group: &OfferedGroup,
        received: &Received,
        description: Digest,
    ) -> Result<()> {
        let (host, handovers) = (self.host(), &self.supervisor.registry().handovers);
        let wrong = |what: &str| Error::corrupt(format!("the received group: {what}")).reason("handover");
        if !received.held.contains(&description) {
            return Err(wrong("its description was not sent"));
        }
        let bytes = host.store.get(description, limits::HANDOVER_SEAL_BYTES).await?;
        let described: DescribedGroup = serde_json::from_slice(&bytes).map_err(|error| wrong(&error.to_string()))?;
        let (head, held) = (described.head.clone(), received.held.clone());
        let verified = host.store.run_beside(move |store| Ok(bundle::verify_group(store, head, held, description)));
        let contents = verified.await?.map_err(client_error)?;
        let named: HashSet<KernelId> = contents.manifest.checkpoints().iter().map(|(kernel, _)| *kernel).collect();
        let leaving: HashSet<KernelId> = described.kernels.iter().map(|one| one.kernel).collect();
        let of_part = |part: &Part| (part.name.clone(), part.captured.kind().to_owned());
        let parts = contents.manifest.parts.iter().filter(|part| !matches!(part.captured, Captured::Kernel { .. }));
        let parts: HashSet<(String, String)> = parts.map(of_part).collect();
        let count = described.kernels.len();
        if contents.head.host != source
            || contents.manifest.group_name != group.name
            || named != leaving
            || (count, count) != (leaving.len(), group.kernels)
            || parts != group.members.iter().cloned().collect()
        {
            return Err(wrong("it is another one than was offered"));
        }
        for Leaving { handover, kernel, epoch } in &described.kernels {
            let row = self.row(*handover).await?.filter(|row| row.kernel == *kernel && !row.live);
            let is_prepared = match row {
                Some(row) => {
                    let incoming = super::read::<super::Incoming>(&row)?;
                    (incoming.epoch, incoming.source) == (*epoch, source)
                }
                None => false,
            };
            if !is_prepared || self.supervisor.arrives_with_group(*handover).await?.is_some() {
                return Err(wrong("a kernel of it is not prepared"));
            }
        }
        let (arrivals, arrival) = (self.supervisor.group_arrivals()?, arrival(&group.name, &group.places));
        arrivals.rehearse(&self.supervisor, &contents, &arrival, &self.actor).await?;
        let moved = MovedGroup {
            name: group.name.clone(),
            source,
            places: group.places.clone(),
            description,
            manifest: contents.head.freeze.manifest,
            packs: contents.head.histories.iter().map(|history| history.pack).collect(),
            kernels: described.kernels,
        };
        let row = GroupMoveRow {
            id: offer.handover,
            side: Side::In,
            group: GroupId::from_bytes(host.random()),
            uid: self.actor.uid,
            stage: Stage::Open,
            record: write(&moved)?,
            at_ms: host.now_ms(),
        };
        host.catalog.put_group_move(row).await?;
        host.sync_decision(None).await?;
        handovers.room.is_prepared(offer.handover);
        Ok(())
    }

    /// Activates the kernels of a prepared group, and brings the rest into its places. Idempotent.
    pub(super) async fn activate_group(&self, row: GroupMoveRow) -> Result<()> {
        let handovers = &self.supervisor.registry().handovers;
        let _turn = handovers.arriving.lock().await;
        let group = row.group;
        let arrived = self.bring_group(row).await;
        let mut incomplete = handovers.incomplete.borrow_mut();
        match (&arrived, incomplete.get_mut(&group)) {
            (Ok(()), _) => drop(incomplete.remove(&group)),
            (Err(error), Some(problem)) => *problem = bounded(error.message.clone()),
            (Err(_), None) => {}
        }
        drop(incomplete);
        arrived
    }

    async fn bring_group(&self, row: GroupMoveRow) -> Result<()> {
        let host = self.host();
        let Some(row) = self.group_row(row.id).await? else {
            return Err(Error::not_found(format!("handover {} is unknown here", row.id)));
        };
        if row.stage == Stage::Done {
            return host.sync_decision_again(None).await;
        }
        let moved: MovedGroup = record(&row)?;
        if row.stage == Stage::Open {
            let line = host.line(&self.actor, "group.arrive", None);
            let detail = bounded(format!("{} from host {}; handover {}", moved.name, moved.source, row.id));
            let audit = vec![NewAudit { owner: Some(row.uid), detail, ..line }];
            self.advance(&row, Stage::Decided, Notes { events: Vec::new(), audit }).await?;
        }
        self.supervisor.registry().handovers.incomplete.borrow_mut().entry(row.group).or_default();
        host.sync_decision_again(None).await?;
        for one in &moved.kernels {
            self.activate_kernel(one).await?;
        }
        let bytes = host.store.get(moved.description, limits::HANDOVER_SEAL_BYTES).await?;
        let wrong = |error: serde_json::Error| Error::corrupt(format!("the received group: {error}"));
        let described: DescribedGroup = serde_json::from_slice(&bytes).map_err(wrong)?;
        let (arrivals, arrival) = (self.supervisor.group_arrivals()?, arrival(&moved.name, &moved.places));
        let arriving = (row.group, moved.description, described);
        arrivals.arrive(&self.supervisor, arriving, arrival, &self.actor).await?;
        self.advance(&row, Stage::Done, Notes::default()).await?;
        host.sync_decision_again(None).await?;
        self.has_arrived(&row, &moved);
        let detail = serde_json::json!({ "handover": row.id, "source": moved.source, "group": moved.name });
        host.events.publish("", "group_arrived", detail);
        Ok(())
    }

    async fn activate_kernel(&self, one: &Leaving) -> Result<()> {
        self.activate_prepared(one.handover, Some((one.kernel, one.epoch)), true).await?;
        // Before any other task sees it.
        if let Some(kernel) = self.supervisor.get(one.kernel) {
            kernel.set_awaits_group(true);
        }
        Ok(())
    }

    /// Code may run in the kernels of a group, and operations on it.
    fn has_arrived(&self, row: &GroupMoveRow, moved: &MovedGroup) {
        let handovers = &self.supervisor.registry().handovers;
        handovers.incomplete.borrow_mut().remove(&row.group);
        handovers.room.is_live(row.id);
        for kernel in moved.kernels.iter().filter_map(|one| self.supervisor.get(one.kernel)) {
            kernel.set_awaits_group(false);
            memory::go_on(&self.supervisor, kernel.id);
        }
    }

    /// Ends the arrival of a decided group without its other members, which are still at the source: its kernels live
    /// here. For an operator, where its places cannot be had.
    pub(super) async fn give_up_rest(&self, row: &GroupMoveRow) -> Result<()> {
        let (host, handovers) = (self.host(), &self.supervisor.registry().handovers);
        let _turn = handovers.arriving.lock().await;
        let Some(row) = self.group_row(row.id).await?.filter(|row| row.stage == Stage::Decided) else {
            return Err(Error::conflict("the group has arrived meanwhile").reason("resolved"));
        };
        let moved: MovedGroup = record(&row)?;
        for one in &moved.kernels {
            match self.activate_kernel(one).await {
                // Its own record is gone or damaged: the others live all the same.
                Err(error) if matches!(error.code, ErrorCode::NotFound | ErrorCode::Corrupt) => {
                    tracing::error!(handover = %one.handover, %error, "a kernel of a group that is given up is not activated");
                }
                other => other?,
            }
        }
        if let Err(error) = self.supervisor.group_arrivals()?.end_unfinished(&self.supervisor, row.group).await {
            // Such as a place that is taken; `group rm --abandon` names what is left of it.
            tracing::warn!(group = %moved.name, %error, "an operation of a group that is given up has not ended");
        }
        self.advance(&row, Stage::Done, Notes::default()).await?;
        host.sync_decision_again(None).await?;
        self.has_arrived(&row, &moved);
        Ok(())
    }

    async fn advance(&self, row: &GroupMoveRow, stage: Stage, notes: Notes) -> Result<()> {
        let host = self.host();
        let advance =
            async || Ok(host.catalog.advance_group_move(row.id, stage, row.record.clone(), notes.clone()).await?);
        host.making_room(advance).await.map(drop)
    }

    /// Deletes the record of a prepared group; returns whether there was one.
    pub(super) async fn discard_group(&self, id: HandoverId) -> Result<bool> {
        let (host, handovers) = (self.host(), &self.supervisor.registry().handovers);
        if let Some(session) = handovers.sessions.get(id) {
            *session.is_aborted.lock().await = true;
        }
        if self.group_row(id).await?.is_none() {
            return Ok(false);
        }
        let _turn = handovers.arriving.lock().await;
        let Some(row) = self.group_row(id).await? else { return Ok(true) };
        // A damaged record completes nothing: its kernels have records of their own.
        if row.stage != Stage::Open && record::<MovedGroup>(&row).is_ok() {
            return Err(Error::conflict(format!("the group of handover {id} lives here")).reason("resolved"));
        }
        host.making_room(async || Ok(host.catalog.forget_group_move(id, Vec::new()).await?)).await?;
        handovers.room.is_discarded(id);
        handovers.incomplete.borrow_mut().remove(&row.group);
        host.sync_decision(None).await?;
        Ok(true)
    }
}
