//! The offer of a move, and its answer.

use super::outgoing::{Move, ms};
use super::{Outgoing, memory, read};
use crate::catalog::StateHandle;
use crate::core::error::{Error, Result};
use crate::core::handover::{Allowed, Left, Missing, Side};
use crate::core::snapshot::{Choice, KindRequest, PortableKind};
use crate::teleport::source::Session;
use crate::teleport::{Accept, Offer};

/// Reports that a target is to send within the time after which it counts as stalled.
const REPORTS: u32 = 4;

impl Move {
    /// Processes and jobs that end with the departure.
    fn background_work(&self) -> Vec<Left> {
        let work = self.kernel.background_work().into_iter();
        work.map(|job| {
            let kind = if job.id.starts_with("process ") { "" } else { "job " };
            Left::new(Missing::Processes, format!("{kind}{}: {}", job.id, job.command))
        })
        .collect()
    }

    /// Names the processes and jobs that began after the offer, as the offer did with the others.
    ///
    /// # Errors
    /// `refused` unless they may be missing.
    pub(super) fn check_later_work(&self) -> Result<()> {
        let mut later = self.background_work();
        later.retain(|one| !self.named_work.borrow().contains(&one.text));
        let name = &self.kernel.spec().name;
        self.options.allow_missing.check(&later, &format!("kernel {name} began these during its move"))?;
        self.later_work.replace(later.into_iter().map(|one| one.text).collect());
        Ok(())
    }

    /// Offers the kernel, after the aborts of its earlier moves to the same target; returns what it moves without.
    pub(super) async fn offer(&self, session: &mut Session) -> Result<Accept> {
        for row in self.host.catalog.handovers().await? {
            let is_earlier = row.side == Side::Out && row.kernel == self.kernel.id && row.id != self.row.id;
            // Another host keeps what it has until it gets the abort itself.
            let is_of_target = |earlier: Outgoing| earlier.leads_to(&self.outgoing.to, session.host());
            if is_earlier && read(&row).is_ok_and(is_of_target) {
                session.abort(row.id).await?;
                self.host.catalog.forget_handover(row.id).await?;
            }
        }
        let (mounts, mcp) = self.kernel.records.grants().await?;
        let mounts = mounts
            .iter()
            .map(|given| Left::new(Missing::Mounts, format!("mount {} of {}", given.mount.path, given.mount.source)));
        let servers = mcp.iter().map(|(name, _)| Left::new(Missing::Mcp, format!("MCP server {name}")));
        let jobs = self.background_work();
        self.named_work.replace(jobs.iter().map(|job| job.text.clone()).collect());
        let own = self.kernel.spec_now();
        let spec = self.options.spec_there(own.clone());
        // A virtual machine has none, the kernel's own neither.
        let venv = own.venv.filter(|_| spec.venv.is_none());
        let venv = venv.map(|venv| Left::new(Missing::Venv, format!("virtual environment {}", venv.display())));
        let resources: Vec<Left> = mounts.chain(servers).chain(jobs).chain(venv).collect();
        let is_offered = self.choice.borrow().kind == PortableKind::Teleport;
        let machine = if is_offered { Some(memory::offered(&self.host, &self.kernel).await?) } else { None };
        let mut left = Missing::of_spec(&spec);
        left.extend(resources.iter().cloned());
        let allowed = &self.options.allow_missing;
        allowed.check(&left, &format!("kernel {} leaves these behind", spec.name))?;
        let offer = Offer {
            handover: self.row.id,
            kernel: self.kernel.id,
            epoch: self.outgoing.epoch,
            spec,
            resources: resources.into_iter().map(|one| one.text).collect(),
            // All of them are allowed; which kinds are, the target reads below.
            allow_missing: *allowed != Allowed::default(),
            allowed: allowed.names().into_iter().map(str::to_owned).collect(),
            format: StateHandle::history_format(),
            bytes: self.known_bytes().await,
            kind: self.choice.borrow().kind,
            machine,
            or_checkpoint: self.options.kind == KindRequest::Auto,
            report_ms: ms(self.host.config.teleport.stall_timeout / REPORTS),
            awaits_admission: true,
            group: None,
        };
        self.offered.set(true);
        session.offer(offer).await
    }

    /// The kind in which the target takes the kernel.
    pub(super) fn settle_kind(&self, accept: &Accept) -> Result<PortableKind> {
        let offered = self.choice.borrow().kind;
        match accept.kind {
            kind if kind == offered => Ok(kind),
            kind @ PortableKind::Checkpoint if self.options.kind == KindRequest::Auto => {
                let why: String = accept.why.chars().filter(|c| !c.is_control()).take(1000).collect();
                tracing::info!(kernel = %self.kernel.spec().name, why, "a kernel moves without its memory");
                *self.choice.borrow_mut() = Choice { kind, why };
                Ok(kind)
            }
            kind => Err(Error::corrupt(format!("the other host takes kind {}, which was not offered", kind.name()))
                .reason("protocol")),
        }
    }
}
