//! The launch document of a worker in a machine: whole, or in two parts with a template in between.
//!
//! ```text
//!  booted:    Start: document, secret ─▶ worker, folder, engine ─▶ serves
//!  template:  Prepare: document without kernel and secret ─▶ worker, engine ─▶ waits, is saved
//!  restored:  Start: assignment, secret ─▶ folder ─▶ serves
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::client::unexpected;
use super::guest_error::of_guest;
use super::image::Image;
use super::template::Kind;
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::name::KernelName;
use crate::core::origin::OriginKind;
use crate::core::spec::KernelLimits;
use crate::isolation::NewWorker;
use crate::link::bootstrap::{Assignment, BUILD, LaunchDocument, ReportLine};
use crate::link::handshake::{PROOF_BYTES, WorkerIdentity};
use crate::link::machine::{IDENTITY_FILES, IDENTITY_FOLDER, PREPARED, Reply};
use crate::sandbox::{RunAs, SandboxPlan};
use crate::sys::random;

/// The kernel's folder in the guest.
const KERNEL: &str = "/data/kernel";
/// The name of a prepared worker, which no code sees.
const PREPARED_NAME: &str = "prepared";

/// The document and the secret of a worker that starts at once.
///
/// # Errors
/// If it is too large.
pub(super) fn whole(new: &NewWorker<'_>, image: &Image) -> Result<Vec<u8>> {
    let mut plan = plan(KERNEL, new.shape.limits);
    plan.unbound = new.is_warm;
    plan.hostname = hostname(new);
    let mut document = document(new.identity, new.name.clone(), (new.shape.engine, image), plan);
    document.origin = new.origin;
    document.orphan_grace_ms = millis(new.orphan_grace);
    Ok([&document.to_bytes()?[..], &new.identity.secret].concat())
}

/// The document of a template's worker, which waits for its kernel.
///
/// # Errors
/// If it is too large.
pub(super) fn prepared(kind: &Kind, limits: KernelLimits, image: &Image) -> Result<Vec<u8>> {
    let (worker, kernel) = (WorkerId::from_bytes([0; 16]), KernelId::from_bytes([0; 16]));
    let (build, secret) = (BUILD.to_owned(), [0; PROOF_BYTES]);
    let nameless = WorkerIdentity { worker, kernel, epoch: Epoch(0), build, secret };
    let mut plan = plan(PREPARED, limits);
    plan.unbound = true;
    let mut document = document(&nameless, name()?, (kind.engine, image), plan);
    document.is_prepared = true;
    document.to_bytes()
}

/// What a prepared worker still needs: its identity and what depends on its kernel, with the secret.
///
/// # Errors
/// If it is too large.
pub(super) fn assignment(new: &NewWorker<'_>) -> Result<Vec<u8>> {
    let assignment = Assignment {
        worker: new.identity.worker,
        kernel: new.identity.kernel,
        name: new.name.clone(),
        epoch: new.identity.epoch,
        hostname: hostname(new),
        kernel_dir: KERNEL.into(),
        unbound: new.is_warm,
        orphan_grace_ms: millis(new.orphan_grace),
        origin: new.origin,
    };
    Ok([&assignment.to_bytes()?[..], &new.identity.secret].concat())
}

/// An assignment of no kernel, for the test start of a template.
///
/// # Errors
/// If it is too large.
pub(super) fn trial() -> Result<Vec<u8>> {
    let assignment = Assignment {
        worker: WorkerId::from_bytes(random::bytes()),
        kernel: KernelId::from_bytes([0; 16]),
        name: name()?,
        epoch: Epoch(0),
        hostname: SandboxPlan::new(KERNEL).hostname,
        kernel_dir: KERNEL.into(),
        unbound: true,
        orphan_grace_ms: 0,
        origin: (OriginKind::Original, 0),
    };
    Ok([&assignment.to_bytes()?[..], &random::bytes::<PROOF_BYTES>()].concat())
}

/// Whether the worker started.
///
/// # Errors
/// The worker's own, as far as a guest is trusted, if it did not.
pub(super) fn started(reply: Reply) -> Result<()> {
    match reply {
        Reply::Started(ReportLine::Ready {}) => Ok(()),
        Reply::Started(ReportLine::Failed(error)) => Err(of_guest(&error)),
        _ => Err(unexpected()),
    }
}

fn name() -> Result<KernelName> {
    PREPARED_NAME.parse().map_err(|_| Error::internal("a prepared worker has no name"))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn hostname(new: &NewWorker<'_>) -> String {
    match new.is_warm {
        true => SandboxPlan::new(KERNEL).hostname,
        false => new.name.as_str().to_owned(),
    }
}

fn plan(kernel_dir: &str, limits: KernelLimits) -> SandboxPlan {
    let mut plan = SandboxPlan::new(kernel_dir);
    plan.limits = limits;
    plan.run_as = Some(RunAs::GUEST);
    let in_guest = |name: &str| Path::new(IDENTITY_FOLDER).join(name);
    plan.replaced = IDENTITY_FILES.map(|(name, inside)| (in_guest(name), inside.into())).to_vec();
    plan
}

fn document(
    identity: &WorkerIdentity,
    name: KernelName,
    (engine, image): (EngineName, &Image),
    plan: SandboxPlan,
) -> LaunchDocument<SandboxPlan> {
    let memory_bytes = plan.limits.memory_bytes;
    let socket = PathBuf::from("/run/ryokan/worker.sock");
    let mut document = LaunchDocument::new(identity, name, engine, plan, socket);
    if let Some(interpreter) = image.engines.get(&engine).filter(|interpreter| !interpreter.is_empty()) {
        document.engine_settings.set_interpreter(engine, interpreter.clone(), memory_bytes);
    }
    // The end of the machine is a loss of power to its guest.
    document.power_safe = true;
    document.sync_files = true;
    document
}
