//! A kernel as a file: exported from the store, imported as a new kernel.
//!
//! Blocking threads write and read the file, a few at once. Its pieces go through bounded channels, so that a slow
//! client delays the thread and costs no memory.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::rc::Rc;

use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::bundle::{self, Bundle, BundleError, Contents, GroupContents, GroupHead, Head, Packed};
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType, Manifest};
use crate::core::error::{DISK_FULL, Error, ErrorCode, Result};
use crate::core::host_resource::{self, HostResource};
use crate::core::ids::{Digest, KernelId};
use crate::core::limits;
use crate::core::origin::{ForkPoint, Origin, OriginKind};
use crate::core::signature::{Signer, Subject};
use crate::core::snapshot::{Architecture, Site};
use crate::store::Store;
use crate::supervisor::checkpoint;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::create_from::{CreationRecord, KernelSource};
use crate::supervisor::registry::journal_io;
use crate::supervisor::registry::supervisor::ReservedName;
use crate::supervisor::registry::teleport::{check_excerpt, store_excerpt};

/// A bundle in progress: its pieces, then its digest.
pub struct Export {
    /// The pieces in order. After the last one, `done` holds the result.
    pub pieces: mpsc::Receiver<Vec<u8>>,
    /// Digest and length, or the error.
    pub done: Option<oneshot::Receiver<Result<(Digest, u64)>>>,
}

/// Begins to export a kernel and the named checkpoints; without names, all of them and a new one of the current state.
///
/// # Errors
/// `notFound`, `conflict` (ambiguous), `busy` (exports), and the errors of the new checkpoint.
pub async fn export(
    supervisor: &Supervisor,
    kernel: &Rc<Kernel>,
    references: &[String],
    actor: &Actor,
) -> Result<Export> {
    let host = supervisor.host();
    let place = place(supervisor)?;
    let source = kernel.lock_as_source()?;
    let (chosen, held) = choose(host, kernel, references, actor).await?;
    let newest = chosen.last().ok_or_else(|| Error::not_found("the kernel has no checkpoints"))?;
    if chosen.len() > limits::BUNDLE_CHECKPOINTS {
        return Err(Error::refused(format!("{} checkpoints are more than one file holds", chosen.len()))
            .reason("bundle_size")
            .hint("name those that are wanted with --checkpoint"));
    }
    let key = host.signing_key().await?;
    // Nothing names the pages of the journal but the file.
    let pages = host.store.run(|store| Ok(store.guard())).await?;
    let mut head = head(host, kernel, newest, &chosen).await?;
    if references.is_empty() {
        head.journal = Some(journal_io::export(host, kernel).await?);
        let excerpt = store_excerpt(host, kernel).await?;
        head.audit = Some(excerpt);
        head.blobs.push(excerpt);
    }
    let outcome = format!("{} checkpoints, newest {}", chosen.len(), newest.id);
    let version = Some(kernel.view().version);
    host.audit(actor, "kernel.export", kernel, (version, version), outcome).await;
    // The kernel's rows name the needed objects; the pins and the source lock keep those rows until the export is done.
    let write = move |store: &Store, outlet: Outlet| {
        bundle::write(store, &head, |digest| key.sign(Subject::Export, digest), outlet)
    };
    Ok(stream(host, place, write, (source, held, pages)))
}

/// The head of a kernel with these checkpoints, in which it begins at one of them.
pub(crate) async fn head(host: &Host, kernel: &Kernel, begin: &Checkpoint, chosen: &[Checkpoint]) -> Result<Head> {
    Ok(Head {
        ryokan: env!("CARGO_PKG_VERSION").into(),
        at_ms: host.now_ms(),
        host: host.id(),
        kernel: kernel.id,
        name: kernel.spec().name.to_string(),
        generation: kernel.view().origin.generation,
        begin: begin.id,
        blobs: kernel.records.blobs_granted_until(begin.at_ms).await?,
        decisions: kernel.records.all_decisions().await?,
        epoch: Some(kernel.epoch),
        journal: None,
        audit: None,
        checkpoints: chosen.iter().map(packed).collect(),
    })
}

/// Writes a file in the background; `held` protects what the file needs until then.
pub(crate) fn stream(
    host: &Host,
    place: OwnedSemaphorePermit,
    write: impl FnOnce(&Store, Outlet) -> std::result::Result<(Digest, u64), BundleError> + Send + 'static,
    held: impl Sized + 'static,
) -> Export {
    let (to, pieces) = mpsc::channel(limits::BUNDLE_PIECES_QUEUED);
    let (tell, done) = oneshot::channel();
    let store = host.store.clone();
    tokio::task::spawn_local(async move {
        let written = store.run_beside(move |store| {
            let _place = place;
            Ok(write(store, Outlet { to, runtime: tokio::runtime::Handle::current() }))
        });
        let written = match written.await {
            Ok(written) => written.map_err(client_error),
            Err(error) => Err(error.into()),
        };
        drop(held);
        // The receiver is gone if the client has disconnected.
        let _ = tell.send(written);
    });
    Export { pieces, done: Some(done) }
}

/// Returns the requested checkpoints, oldest first, with pins that keep them from being pruned.
async fn choose(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    references: &[String],
    actor: &Actor,
) -> Result<(Vec<Checkpoint>, Vec<checkpoint::ReadPin>)> {
    let mut found = Vec::new();
    if references.is_empty() {
        if kernel.archived_in().is_none() {
            let taking = CheckpointRequest::new(CheckpointType::Auto, "export");
            checkpoint::take(host, kernel, taking, actor.clone()).await?;
        }
        found = kernel.records.all_checkpoints().await?;
    }
    for reference in references {
        found.push(checkpoint::find(kernel, reference).await?);
    }
    found.sort_by_key(|checkpoint| checkpoint.number);
    found.dedup_by_key(|checkpoint| checkpoint.number);
    let (mut chosen, mut held) = (Vec::new(), Vec::new());
    for checkpoint in found {
        match checkpoint::pin_for_read(kernel, checkpoint).await {
            Ok((checkpoint, keeps)) => {
                chosen.push(checkpoint);
                held.push(keeps);
            }
            // Without explicit references, a checkpoint removed meanwhile is skipped.
            Err(error) if error.code == ErrorCode::NotFound && references.is_empty() => {}
            Err(error) => return Err(error),
        }
    }
    Ok((chosen, held))
}

/// A checkpoint for a head.
pub(crate) fn packed(checkpoint: &Checkpoint) -> Packed {
    Packed {
        id: checkpoint.id,
        name: checkpoint.name.clone(),
        description: checkpoint.description.clone(),
        summary: checkpoint.summary.clone(),
        kind: checkpoint.kind,
        creator: checkpoint.creator.clone(),
        at_ms: checkpoint.at_ms,
        parent: checkpoint.parent,
        pinned: checkpoint.pinned,
        manifest: checkpoint.manifest,
    }
}

/// Takes one of the permits for concurrent exports and imports.
pub(crate) fn place(supervisor: &Supervisor) -> Result<OwnedSemaphorePermit> {
    let places = std::sync::Arc::clone(&supervisor.registry().bundles);
    places.try_acquire_owned().map_err(|_| {
        Error::busy(format!("{} exports and imports are under way already", limits::BUNDLES_CONCURRENT))
            .reason("bundles")
            .hint("try again when one of them is done")
    })
}

/// The timeout error for a stalled client, which must not occupy a permit.
fn late(what: &str) -> io::Error {
    let within = limits::BUNDLE_PIECE_TIMEOUT.as_secs();
    io::Error::new(io::ErrorKind::TimedOut, format!("the client {what}: nothing for {within} s"))
}

/// The writing end of the pieces.
pub(crate) struct Outlet {
    to: mpsc::Sender<Vec<u8>>,
    runtime: tokio::runtime::Handle,
}

impl Write for Outlet {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(limits::CHUNK_BYTES)];
        match self.runtime.block_on(self.to.send_timeout(piece.to_vec(), limits::BUNDLE_PIECE_TIMEOUT)) {
            Ok(()) => Ok(piece.len()),
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => Err(late("takes no more")),
            Err(mpsc::error::SendTimeoutError::Closed(_)) => {
                Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client takes no more"))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An import in progress. Dropping cancels the import.
pub struct Import {
    pieces: Option<mpsc::Sender<Vec<u8>>>,
    reading: JoinHandle<Result<Bundle>>,
    reviewed: Option<Reviewed>,
    _held: crate::store::GcGuard,
}

/// A whole file.
struct Reviewed {
    contents: Bundle,
    review: Review,
}

/// What a client learns of a file before a kernel is made of it.
pub struct Review {
    /// The resources of the host that it requests.
    pub requested: Vec<HostResource>,
    /// The host that wrote it.
    pub signer: Signer,
    /// Whether it is a group's.
    pub is_group: bool,
}

/// The result of an import.
pub struct Imported {
    /// The new kernel.
    pub kernel: Rc<Kernel>,
    /// The resources of the host that it has.
    pub granted: Vec<HostResource>,
    /// The resources that the file requests and the kernel does not have.
    pub withheld: Vec<HostResource>,
}

impl Import {
    /// Begins an import of `actor`. A group's freeze must be sealed by this host, or by a host that the actor trusts.
    ///
    /// # Errors
    /// `busy` (imports).
    pub async fn begin(supervisor: &Supervisor, actor: &Actor) -> Result<Import> {
        let (host, place) = (supervisor.host(), place(supervisor)?);
        let known = host.known_keys(actor.uid).await?;
        // Nothing else names the stored objects until the new kernel's rows do.
        let held = host.store.run(|store| Ok(store.guard())).await?;
        let (to, pieces) = mpsc::channel(limits::BUNDLE_PIECES_QUEUED);
        let store = host.store.clone();
        let reading = tokio::task::spawn_local(async move {
            let read = store.run_beside(move |store| {
                let _place = place;
                let runtime = tokio::runtime::Handle::current();
                let admit = |head: &GroupHead| {
                    let freeze = &head.freeze;
                    Signer::of(freeze.signed.as_ref(), Subject::Freeze, freeze.manifest, &known).require_trusted()
                };
                Ok(bundle::read(store, Inlet { pieces, runtime, rest: Vec::new(), at: 0 }, admit))
            });
            read.await?.map_err(client_error)
        });
        Ok(Import { pieces: Some(to), reading, reviewed: None, _held: held })
    }

    /// Accepts the next piece; waits until there is room for it.
    ///
    /// # Errors
    /// The defect of the file, as soon as it is known.
    pub async fn write(&mut self, piece: Vec<u8>) -> Result<()> {
        let Some(pieces) = &self.pieces else { return Err(over()) };
        if pieces.send(piece).await.is_err() {
            return Err(match self.read().await {
                Err(error) => error,
                Ok(_) => Error::corrupt("the file is damaged: something follows its end"),
            });
        }
        Ok(())
    }

    async fn read(&mut self) -> Result<Bundle> {
        self.pieces = None;
        (&mut self.reading).await.map_err(|error| Error::internal(error.to_string()))?
    }

    /// Ends the file; returns the resources of the host that it requests, and who signed it as `actor` knows keys.
    ///
    /// # Errors
    /// The defect of the file, also a signature that does not fit.
    pub async fn review(&mut self, supervisor: &Supervisor, actor: &Actor) -> Result<&Review> {
        if self.reviewed.is_none() {
            if self.pieces.is_none() {
                return Err(over());
            }
            let contents = self.read().await?;
            let (requested, (head, signed)) = match &contents {
                Bundle::Kernel(contents) => (host_resource::requested(&contents.manifests), contents.signed),
                Bundle::Group(group) => {
                    let all: Vec<Manifest> = group.kernels.iter().flat_map(|one| one.manifests.clone()).collect();
                    (host_resource::requested(&all), group.signed)
                }
            };
            let known = supervisor.host().known_keys(actor.uid).await?;
            let signer = Signer::of(signed.as_ref(), Subject::Export, head, &known);
            let is_group = matches!(contents, Bundle::Group(_));
            self.reviewed = Some(Reviewed { contents, review: Review { requested, signer, is_group } });
        }
        self.reviewed.as_ref().map(|reviewed| &reviewed.review).ok_or_else(over)
    }

    /// Creates a kernel from the file. Without `name`, the kernel keeps the file's name. The kernel has only those
    /// resources of the host that are granted.
    ///
    /// # Errors
    /// The defect of the file; `invalidArgument` for a grant that the file does not request; `alreadyExists`,
    /// `refused`, `notFound` (mounts): no kernel is visible then.
    pub async fn finish(
        mut self,
        supervisor: &Supervisor,
        name: Option<&str>,
        granted: Vec<HostResource>,
        actor: &Actor,
    ) -> Result<Imported> {
        self.review(supervisor, actor).await?;
        let Some(Reviewed { contents, review: Review { requested, signer, .. } }) = self.reviewed.take() else {
            return Err(over());
        };
        let Bundle::Kernel(contents) = contents else {
            return Err(Error::invalid("the file is a group's").reason("group").hint("import it as a group"));
        };
        let resources = divide(requested, granted)?;
        let name = name.unwrap_or(&contents.head.name).to_owned();
        let name = name.parse().map_err(|error: crate::core::name::NameError| Error::invalid(error.to_string()))?;
        let (supervisor, actor) = (supervisor.clone(), actor.clone());
        // A separate task, so that a client's disconnect leaves nothing half done.
        let making = tokio::task::spawn_local(async move {
            let reserved = supervisor.reserve(actor.uid, name)?;
            let made = make(&supervisor, *contents, (supervisor.new_id(), &reserved), resources, &signer, &actor).await;
            drop(self);
            made
        });
        making.await.map_err(|error| Error::internal(error.to_string()))?
    }
}

impl Import {
    /// The group of a reviewed file.
    ///
    /// # Errors
    /// `conflict` without a review; `invalidArgument` for a kernel's file.
    pub(crate) fn group(&self) -> Result<&GroupContents> {
        match self.reviewed.as_ref().map(|reviewed| &reviewed.contents) {
            Some(Bundle::Group(group)) => Ok(&**group),
            Some(Bundle::Kernel(_)) => {
                Err(Error::invalid("the file is a kernel's").reason("kernel").hint("import it as a kernel"))
            }
            None => Err(over()),
        }
    }

    /// Takes the group of a reviewed file, and what was found of the file.
    ///
    /// # Errors
    /// As [`Self::group`].
    pub(crate) fn take_group(&mut self) -> Result<(GroupContents, Review)> {
        self.group()?;
        match self.reviewed.take() {
            Some(Reviewed { contents: Bundle::Group(group), review }) => Ok((*group, review)),
            _ => Err(over()),
        }
    }
}

/// Divides the requested resources of the host into those that are granted and the others.
///
/// # Errors
/// `invalidArgument` for a grant that the file does not request.
pub(crate) fn divide(requested: Vec<HostResource>, granted: Vec<HostResource>) -> Result<Resources> {
    let unknown = granted.iter().find(|wanted| !requested.contains(wanted));
    if let Some(unknown) = unknown {
        return Err(Error::invalid(format!("the file does not request {unknown}")).reason("grant"));
    }
    let granted: HashSet<HostResource> = granted.into_iter().collect();
    Ok(requested.into_iter().partition(|resource| granted.contains(resource)))
}

/// Granted and withheld resources of the host.
pub(crate) type Resources = (Vec<HostResource>, Vec<HostResource>);

fn over() -> Error {
    Error::conflict("this import is over").hint("begin another one")
}

/// The reading end of the pieces.
struct Inlet {
    pieces: mpsc::Receiver<Vec<u8>>,
    runtime: tokio::runtime::Handle,
    rest: Vec<u8>,
    at: usize,
}

impl Read for Inlet {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        while self.at == self.rest.len() {
            let next = async { tokio::time::timeout(limits::BUNDLE_PIECE_TIMEOUT, self.pieces.recv()).await };
            match self.runtime.block_on(next) {
                Ok(Some(piece)) => (self.rest, self.at) = (piece, 0),
                Ok(None) => return Ok(0),
                Err(_) => return Err(late("gives no more")),
            }
        }
        let count = room.len().min(self.rest.len() - self.at);
        room[..count].copy_from_slice(&self.rest[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

/// Creates a kernel from the content of a file.
///
/// # Errors
/// `refused`, `busy`, `notFound` (mounts), and errors of files and databases; nothing is left then.
pub(crate) async fn make(
    supervisor: &Supervisor,
    contents: Contents,
    (id, reserved): (KernelId, &ReservedName),
    (granted, withheld): Resources,
    signer: &Signer,
    actor: &Actor,
) -> Result<Imported> {
    let Contents { head, mut manifests, mut parts, bytes, digest, .. } = contents;
    let kept: HashSet<HostResource> = granted.iter().cloned().collect();
    for manifest in &mut manifests {
        host_resource::keep_granted(manifest, &kept);
        // Resolved paths of another host do not apply here.
        manifest.spec.paths.iter_mut().for_each(|path| path.real = None);
        manifest.mounts.iter_mut().for_each(|mount| mount.real = None);
    }
    let begin = manifests.iter().find(|manifest| manifest.id == head.begin);
    let manifest = begin.cloned().ok_or_else(|| Error::corrupt("the file lacks the checkpoint that it begins at"))?;
    has_room(supervisor.host(), &manifest, bytes)?;
    holds_state(supervisor.host(), &manifest, parts.bytes())?;
    // The same file may be imported twice; the copies must not share random state.
    parts.leave_out_random();
    let from = ForkPoint { kernel: head.kernel, name: head.name.clone(), checkpoint: head.begin };
    let origin = Origin {
        kind: OriginKind::Restored,
        generation: head.generation.saturating_add(1),
        from: Some(from),
        restored: Some(head.begin),
    };
    let by = signer.key.map_or_else(|| "no key".into(), |key| format!("{key} ({})", signer.standing.name()));
    let mut outcome = format!("{} of host {}; file {digest}; signed by {by}", head.kernel, head.host);
    if let Some(excerpt) = head.audit {
        if !head.blobs.contains(&excerpt) {
            return Err(Error::corrupt("the file lacks its excerpt of the audit log"));
        }
        check_excerpt(supervisor.host(), excerpt, head.host, head.kernel).await?;
    }
    for (what, resources) in [("granted", &granted), ("withheld", &withheld)] {
        let _ = write!(outcome, "; {what} {}", listed(resources));
    }
    let words = CreationRecord {
        mark: format!("imported {} of host {}", head.name, head.host),
        action: "kernel.import",
        outcome,
        detail: serde_json::json!({ "imported": head.kernel, "name": head.name, "host": head.host, "file": digest, "signer": signer, "epoch": head.epoch, "audit_excerpt": head.audit }),
    };
    let seed = KernelSource {
        manifest,
        parts,
        blobs: head.blobs,
        decisions: head.decisions,
        origin,
        parent: None,
        called: String::new(),
        giving: None,
        like: None,
        machine: None,
        made: Default::default(),
    };
    let checkpoints = head.checkpoints.into_iter().zip(manifests).collect();
    let past = (checkpoints, head.journal);
    let kernel = supervisor.create_imported((id, reserved), &seed, past, words, actor).await?;
    Ok(Imported { kernel, granted, withheld })
}

/// Describes resources for the audit log, first their number, because the text may be cut.
fn listed(resources: &[HostResource]) -> String {
    let mut text = resources.len().to_string();
    for (i, resource) in resources.iter().enumerate() {
        let _ = write!(text, "{}{resource}", if i == 0 { ": " } else { ", " });
    }
    text
}

/// Checks that the files of the imported checkpoint fit the workspace limit and the disk.
pub(super) fn has_room(host: &Host, manifest: &Manifest, wanted: u64) -> Result<()> {
    let most = manifest.spec.limits.workspace_bytes;
    if wanted > most {
        return Err(Error::refused(format!("its files have {wanted} bytes, and its workspace may hold {most}"))
            .reason("bundle_size")
            .hint("export it again with a larger limit, or from a checkpoint with less in it"));
    }
    match host.free_bytes() {
        Some(free) if wanted > free => {
            Err(Error::busy(format!("its files have {wanted} bytes, and {free} are free here"))
                .reason(DISK_FULL)
                .hint("free space on the device or raise the quota, then try again"))
        }
        _ => Ok(()),
    }
}

/// Checks that the engine state of the received checkpoint fits its kernel's limit and that of its kind.
pub(super) fn holds_state(host: &Host, manifest: &Manifest, wanted: u64) -> Result<()> {
    let most = limits::engine_state_bytes(manifest.spec.limits.memory_bytes);
    if wanted > most {
        let why = format!("its engine state has {wanted} bytes, and its memory limit allows {most}");
        return Err(Error::refused(why)
            .reason("state_size")
            .hint("export it again with a larger memory limit, or from a checkpoint with less in it"));
    }
    let (architecture, host) = (Architecture::here(), host.id());
    let here = Site { architecture, base_image_version: String::new(), host, machine: None };
    Ok(manifest.snapshot(wanted).check_arrival(&here)?)
}

/// Converts a bundle error to a client's error.
pub(super) fn client_error(error: BundleError) -> Error {
    let code = match &error {
        BundleError::Version(_) => ErrorCode::Unsupported,
        BundleError::Foreign | BundleError::TooLarge { .. } => ErrorCode::InvalidArgument,
        BundleError::Truncated(_) | BundleError::Damaged(_) | BundleError::Signature | BundleError::Tree(_) => {
            ErrorCode::Corrupt
        }
        BundleError::Owners(_) => ErrorCode::Refused,
        BundleError::NotAdmitted(_) => {
            let BundleError::NotAdmitted(error) = error else { return Error::internal("an error changed") };
            return error;
        }
        BundleError::Store(_) => {
            let BundleError::Store(error) = error else { return Error::internal("an error changed") };
            return error.into();
        }
        BundleError::Io(_) => ErrorCode::Unavailable,
    };
    let hint = match code {
        ErrorCode::Unsupported => "use the release that wrote it, or a later one",
        ErrorCode::Refused => "give the files to the kernel's user where it was exported, and export it again",
        ErrorCode::Corrupt => "get the file again from where it was written",
        _ => "",
    };
    Error::new(code, error.to_string()).hint(hint).reason("bundle")
}
