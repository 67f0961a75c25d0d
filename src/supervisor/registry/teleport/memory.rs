//! The memory of virtual machines in moves: offered, accepted or left behind, and continued.

use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::core::snapshot::{Architecture, KindError, PortableKind, Snapshot, Teleport};
use crate::supervisor::checkpoint;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::StartMode;
use crate::supervisor::registry::Supervisor;
use crate::teleport::Offer;

use super::without_host;

/// Checks that a kernel has memory to move, and that it is within the limit.
///
/// # Errors
/// `conflict` without memory, `refused` beyond the limit, `busy` without room.
pub(super) fn check(host: &Host, kernel: &Kernel) -> Result<()> {
    let (spec, name) = (kernel.spec_now(), &kernel.spec().name);
    let home = host.home(kernel.id, None);
    let is_there = kernel.link.borrow().is_some() || host.drivers.of(spec.isolation)?.keeps_memory(&home)?;
    if !is_there {
        return Err(Error::conflict(format!("kernel {name} does not run: it has no memory to move"))
            .reason("no_memory")
            .hint("start it first, or use --kind checkpoint"));
    }
    checkpoint::machine::has_room(host, kernel, &spec)
}

/// The machine that is to continue at the target, with what it needs at most.
///
/// # Errors
/// Those of this host's own machine.
pub(super) async fn offered(host: &Host, kernel: &Kernel) -> Result<Snapshot<Teleport>> {
    let (spec, dir) = (kernel.spec_now(), host.home(kernel.id, None).dir);
    let driver = host.drivers.of(spec.isolation)?;
    let image = driver.image_version(&spec, &dir);
    let worker = kernel.worker.borrow().upgrade();
    let machine = match worker.and_then(|worker| worker.handle().machine()) {
        Some(machine) => machine,
        None => {
            let here = driver.site(&spec, kernel.uid, &image).await?;
            here.machine.ok_or(KindError::NoMachine)?
        }
    };
    let room = driver.machine_room(&spec, &dir);
    Ok(Snapshot {
        architecture: Architecture::here(),
        base_image_version: image,
        host: host.id(),
        content: Teleport { memory_bytes: room.memory_bytes, disk_bytes: room.disk_bytes, machine },
    })
}

/// The kind in which an offered kernel is taken, and why it is not the offered one.
///
/// # Errors
/// The rule against the machine, unless the kernel may come without it.
pub(super) async fn kind_of(host: &Host, uid: u32, offer: &Offer) -> Result<(PortableKind, String)> {
    if offer.kind != PortableKind::Teleport {
        return Ok((offer.kind, String::new()));
    }
    let machine = offer
        .machine
        .as_ref()
        .ok_or_else(|| Error::corrupt("the source host offers memory without its machine").reason("protocol"))?;
    let spec = without_host(&offer.spec);
    match checkpoint::machine::check_snapshot(host, &spec, uid, machine).await {
        Ok(()) => Ok((offer.kind, String::new())),
        Err(rule) if offer.or_checkpoint => Ok((PortableKind::Checkpoint, rule.message)),
        Err(rule) => Err(rule),
    }
}

/// Starts an arrived kernel whose memory came with it, so that it goes on.
pub(super) fn go_on(supervisor: &Supervisor, id: KernelId) {
    let Some(kernel) = supervisor.get(id) else { return };
    let (host, home) = (supervisor.host(), supervisor.host().home(id, None));
    let keeps = host.drivers.of(kernel.spec().isolation).and_then(|driver| driver.keeps_memory(&home));
    if !keeps.unwrap_or(false) {
        return;
    }
    let actor = host.own_actor();
    tokio::task::spawn_local(async move {
        if let Err(error) = kernel.start(actor, StartMode::WithMemory).await {
            tracing::warn!(kernel = %kernel.spec().name, %error, "an arrived kernel goes on at its next use");
        }
    });
}
