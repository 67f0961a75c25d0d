//! Reads a file into a store. Every error is found before anything is returned; objects stored by then are
//! unreferenced, and garbage collection removes them.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufReader, Read};
use std::sync::Arc;

use super::frame::Opened;
use super::group::{GroupContents, check_group_head, whole_group};
use super::{BundleError, GROUP_VERSION, GroupHead, Head, Journal, OLDEST, Packed, Record, SIGNATURE_BYTES};
use crate::core::checkpoint::{CheckpointRequest, Manifest, StateParts};
use crate::core::error::Error;
use crate::core::ids::{CheckpointId, Digest, PublicKey, Signature};
use crate::core::limits;
use crate::core::signature::{Signed, Subject};
use crate::core::workflow::Decision;
use crate::store::{Image, Store, StoreError};
use crate::workspace::{self, ObjectBatch, Objects, Seen, Size, Sizes, TreeId, WorkspaceError};

/// Read size, bytes.
const PIECE: usize = 256 << 10;
/// Objects up to this size are stored in batches, bytes.
const SMALL: u64 = 1 << 20;
/// Size of a batch, bytes.
const TOGETHER: u64 = 32 << 20;
/// Largest compression window, log2: bounds the reader's memory.
const WINDOW_LOG: u32 = 24;

/// What a file holds.
pub enum Bundle {
    /// A kernel.
    Kernel(Box<Contents>),
    /// A freeze of a group.
    Group(Box<GroupContents>),
}

/// The content of a kernel's file; all of it is in the store.
#[derive(Clone)]
pub struct Contents {
    /// Its head.
    pub head: Head,
    /// The manifests, in the order of the head.
    pub manifests: Vec<Manifest>,
    /// The engine's state at the checkpoint at which an import starts.
    pub parts: StateParts,
    /// Size of the files there once they are written out, bytes.
    pub bytes: u64,
    /// The digest of the file.
    pub digest: Digest,
    /// The digest of its head, and the signature over that; a file of the first format has none.
    pub signed: (Digest, Option<Signed>),
}

/// Reads a file. `admit` decides on a group by its head, whose signature fits, before any object is stored.
///
/// # Errors
/// Each of [`BundleError`].
pub fn read(
    store: &Store,
    from: impl Read,
    admit: impl FnOnce(&GroupHead) -> Result<(), Error>,
) -> Result<Bundle, BundleError> {
    let opened = Opened::begin(from)?;
    let version = opened.version;
    let mut decoder = zstd::stream::read::Decoder::new(opened)?.single_frame();
    decoder.window_log_max(WINDOW_LOG)?;
    let mut reading = Reading { store, from: decoder, seen: HashSet::new(), bytes: 0 };
    if version == GROUP_VERSION {
        let (head, head_digest) = reading.head::<GroupHead>(Record::Group)?;
        check_group_head(&head)?;
        let signed = (head_digest, Some(reading.signature(head_digest)?));
        admit(&head).map_err(BundleError::NotAdmitted)?;
        let (digest, held) = reading.rest()?;
        return whole_group(&held, (head, false), digest, signed).map(|group| Bundle::Group(Box::new(group)));
    }
    let (head, head_digest) = reading.head::<Head>(Record::Head)?;
    check_head(&head)?;
    let signature = if version > OLDEST { Some(reading.signature(head_digest)?) } else { None };
    let (digest, held) = reading.rest()?;
    let (manifests, parts, bytes) = whole(&held, &head)?;
    Ok(Bundle::Kernel(Box::new(Contents { head, manifests, parts, bytes, digest, signed: (head_digest, signature) })))
}

struct Reading<'a, R: io::BufRead> {
    store: &'a Store,
    from: zstd::stream::read::Decoder<'static, R>,
    seen: HashSet<Digest>,
    bytes: u64,
}

impl<'a, R: Read> Reading<'a, BufReader<Opened<R>>> {
    /// Reads the objects and the end; returns the digest of the file.
    fn rest(mut self) -> Result<(Digest, Held<'a>), BundleError> {
        self.objects()?;
        let Reading { store, from, seen, .. } = self;
        let rest: BufReader<Opened<R>> = from.into_inner();
        if !rest.buffer().is_empty() {
            return Err(BundleError::Damaged("something follows the last record".into()));
        }
        Ok((rest.into_inner().finish()?, Held { store, held: Arc::new(seen) }))
    }
}

impl<R: io::BufRead> Reading<'_, R> {
    fn fill(&mut self, room: &mut [u8], within: &'static str) -> Result<(), BundleError> {
        self.from.read_exact(room).map_err(|error| sort(error, within))
    }

    fn record(&mut self) -> Result<(Record, u64), BundleError> {
        let (mut kind, mut length) = ([0], [0; 8]);
        self.fill(&mut kind, "a record")?;
        self.fill(&mut length, "a record")?;
        let kind = Record::of(kind[0]).ok_or_else(|| BundleError::Damaged(format!("a record of kind {}", kind[0])))?;
        Ok((kind, u64::from_le_bytes(length)))
    }

    fn head<T: serde::de::DeserializeOwned>(&mut self, record: Record) -> Result<(T, Digest), BundleError> {
        let (found, length) = self.record()?;
        if found != record {
            return Err(BundleError::Damaged("it does not begin with its head".into()));
        }
        if length > limits::BUNDLE_HEADER_BYTES as u64 {
            return Err(BundleError::TooLarge { what: "bytes of its head", most: limits::BUNDLE_HEADER_BYTES as u64 });
        }
        let mut json = Vec::new();
        let count = (&mut self.from).take(length).read_to_end(&mut json).map_err(|error| sort(error, "its head"))?;
        if (count as u64) < length {
            return Err(BundleError::Truncated("its head"));
        }
        let head = serde_json::from_slice(&json).map_err(|error| BundleError::Damaged(format!("its head: {error}")))?;
        Ok((head, Digest::from_bytes(*blake3::hash(&json).as_bytes())))
    }

    fn signature(&mut self, head: Digest) -> Result<Signed, BundleError> {
        let (Record::Signature, SIGNATURE_BYTES) = self.record()? else {
            return Err(BundleError::Damaged("its head is not followed by a signature".into()));
        };
        let (mut key, mut signature) = ([0; 32], [0; 64]);
        self.fill(&mut key, "its signature")?;
        self.fill(&mut signature, "its signature")?;
        let signed = Signed { key: PublicKey::from_bytes(key), signature: Signature::from_bytes(signature) };
        if signed.holds(Subject::Export, head) { Ok(signed) } else { Err(BundleError::Signature) }
    }

    fn objects(&mut self) -> Result<(), BundleError> {
        let mut batch = self.store.batch();
        let mut together = 0;
        loop {
            let (kind, length) = self.record()?;
            match kind {
                Record::Head | Record::Group => return Err(BundleError::Damaged("it has two heads".into())),
                Record::Signature => return Err(BundleError::Damaged("it has another signature".into())),
                Record::End => {
                    let mut count = [0; 8];
                    if length != 8 {
                        return Err(BundleError::Damaged("its end is not one".into()));
                    }
                    self.fill(&mut count, "its end")?;
                    if u64::from_le_bytes(count) != self.seen.len() as u64 {
                        return Err(BundleError::Damaged("it does not hold as many objects as it says".into()));
                    }
                    break;
                }
                Record::Object => {
                    let size = length
                        .checked_sub(32)
                        .ok_or_else(|| BundleError::Damaged("an object without an address".into()))?;
                    self.admit(size)?;
                    let mut address = [0; 32];
                    self.fill(&mut address, "an object")?;
                    let address = Digest::from_bytes(address);
                    if size <= SMALL {
                        let mut bytes = vec![0; size as usize];
                        self.fill(&mut bytes, "an object")?;
                        // Verified before it is stored: the object must have its address.
                        same(address, Digest::from_bytes(*blake3::hash(&bytes).as_bytes()))?;
                        batch.put(&bytes)?;
                        together += size;
                    } else {
                        self.large(address, size)?;
                    }
                    self.seen.insert(address);
                    if together > TOGETHER {
                        together = 0;
                        std::mem::replace(&mut batch, self.store.batch()).commit()?;
                    }
                }
            }
        }
        batch.commit()?;
        match self.from.read(&mut [0]).map_err(|error| sort(error, "its end"))? {
            0 => Ok(()),
            _ => Err(BundleError::Damaged("something follows the last record".into())),
        }
    }

    /// Counts an object.
    fn admit(&mut self, size: u64) -> Result<(), BundleError> {
        self.bytes = self.bytes.saturating_add(size);
        if size > limits::BLOB_BYTES || self.bytes > limits::BUNDLE_BYTES {
            return Err(BundleError::TooLarge { what: "bytes", most: limits::BUNDLE_BYTES });
        }
        if self.seen.len() as u64 >= limits::BUNDLE_OBJECTS {
            return Err(BundleError::TooLarge { what: "objects", most: limits::BUNDLE_OBJECTS });
        }
        Ok(())
    }

    fn large(&mut self, address: Digest, size: u64) -> Result<(), BundleError> {
        let mut writer = self.store.writer(size)?;
        let (mut room, mut left) = (vec![0; PIECE], size);
        while left > 0 {
            let count = room.len().min(usize::try_from(left).unwrap_or(PIECE));
            self.fill(&mut room[..count], "an object")?;
            writer.write(&room[..count])?;
            left -= count as u64;
        }
        same(address, writer.finish()?.0)
    }
}

fn same(said: Digest, is: Digest) -> Result<(), BundleError> {
    match said == is {
        true => Ok(()),
        false => Err(BundleError::Damaged(format!("object {said} is not what its address says"))),
    }
}

/// Classifies an error of the layers below.
fn sort(error: io::Error, within: &'static str) -> BundleError {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return BundleError::Truncated(within);
    }
    if error.get_ref().is_some_and(|inner| inner.is::<BundleError>()) {
        if let Some(Ok(inner)) = error.into_inner().map(|inner| inner.downcast::<BundleError>()) {
            return *inner;
        }
        return BundleError::Truncated(within);
    }
    // zstd's own message.
    BundleError::Damaged(format!("{within} cannot be unpacked: {error}"))
}

pub(super) fn check_head(head: &Head) -> Result<(), BundleError> {
    let wrong = |why: String| BundleError::Damaged(format!("its head: {why}"));
    if head.checkpoints.is_empty() || head.checkpoints.len() > limits::BUNDLE_CHECKPOINTS {
        return Err(wrong(format!("{} checkpoints", head.checkpoints.len())));
    }
    if head.name.len() > limits::NAME_BYTES || head.ryokan.len() > limits::IDENTIFIER_BYTES {
        return Err(wrong("a name that is too long".into()));
    }
    let long = |decision: &Decision| {
        let Decision { text, agent, opened_by, locked_by, .. } = decision;
        let name = |name: &String| name.len() > limits::PATH_BYTES || name.chars().any(char::is_control);
        text.len() > limits::RECORD_TEXT_BYTES || [agent, opened_by, locked_by].into_iter().any(name)
    };
    if head.decisions.len() as u64 > limits::DECISIONS || head.decisions.iter().any(long) {
        return Err(wrong("more decisions, or longer ones, than may be".into()));
    }
    let mut ids = HashSet::new();
    for packed in &head.checkpoints {
        let Packed { id, name, description, summary, kind, creator, .. } = packed;
        let (description, summary) = (description.clone(), summary.clone());
        let request = CheckpointRequest { description, summary, ..CheckpointRequest::new(*kind, name) };
        request.check().map_err(|error| wrong(error.message))?;
        if creator.len() > limits::PATH_BYTES || creator.chars().any(char::is_control) {
            return Err(wrong("a creator that is no name".into()));
        }
        if !ids.insert(*id) {
            return Err(wrong(format!("checkpoint {id} twice")));
        }
    }
    match ids.contains(&head.begin) {
        true => Ok(()),
        false => Err(wrong("it begins at a checkpoint that it does not hold".into())),
    }
}

/// The store, restricted to the file's own objects: a file must not lead to objects that others stored.
pub(super) struct Held<'a> {
    pub(super) store: &'a Store,
    pub(super) held: Arc<HashSet<Digest>>,
}

impl Objects for Held<'_> {
    fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>, StoreError> {
        match self.held.contains(&digest) {
            true => self.store.get(digest, limit),
            false => Err(StoreError::NotFound(digest)),
        }
    }

    fn contains(&self, digest: Digest) -> bool {
        self.held.contains(&digest)
    }

    fn batch(&self) -> Box<dyn ObjectBatch> {
        Objects::batch(self.store)
    }
}

impl Held<'_> {
    /// Checks that an object is in the file.
    pub(super) fn needs(&self, digest: Digest) -> Result<(), BundleError> {
        match self.held.contains(&digest) {
            true => Ok(()),
            false => Err(BundleError::Damaged(format!("object {digest} is not in it"))),
        }
    }

    /// Checks that an object of this size is in the file.
    pub(super) fn needs_sized(&self, digest: Digest, bytes: u64) -> Result<(), BundleError> {
        self.needs(digest)?;
        match self.store.size(digest)? == bytes {
            true => Ok(()),
            false => Err(BundleError::Damaged(format!("object {digest} has not the {bytes} bytes that the file says"))),
        }
    }

    /// Checks that all of a tree is in the file; `walked`: the objects that need no second check.
    pub(super) fn needs_tree(&self, tree: Digest, walked: &mut Seen) -> Result<(), BundleError> {
        let reached = workspace::reach(self, TreeId(tree), walked, &mut |object| {
            if self.held.contains(&object) { Ok(()) } else { Err(StoreError::NotFound(object).into()) }
        });
        match reached {
            Err(WorkspaceError::Store(StoreError::NotFound(object))) => self.needs(object),
            reached => Ok(reached?),
        }
    }

    /// The size of a tree once it is written out.
    pub(super) fn size_of(&self, tree: Digest) -> Result<Size, BundleError> {
        Ok(Sizes::default().of(self, TreeId(tree))?)
    }
}

/// Checks a head, and that `held` has everything that it references. For objects that arrived otherwise than in a file.
///
/// # Errors
/// Each of [`BundleError`].
pub fn verify(
    store: &Store,
    head: &Head,
    held: impl Into<Arc<HashSet<Digest>>>,
) -> Result<(Vec<Manifest>, StateParts, u64), BundleError> {
    check_head(head)?;
    whole(&Held { store, held: held.into() }, head)
}

/// Checks that `held` has all of a tree, and that a workspace may be like it; returns its size.
///
/// # Errors
/// Each of [`BundleError`].
pub fn verify_tree(store: &Store, tree: Digest, held: Arc<HashSet<Digest>>) -> Result<Size, BundleError> {
    let held = Held { store, held };
    held.needs_tree(tree, &mut Seen::default())?;
    let size = held.size_of(tree)?;
    match size.is_possible() && !size.is_foreign {
        true => Ok(size),
        false => Err(BundleError::Damaged(format!("tree {tree} is no workspace"))),
    }
}

/// Checks that `held` has all of a list of engine state; returns the list.
///
/// # Errors
/// Each of [`BundleError`].
pub fn verify_state(store: &Store, list: Digest, held: Arc<HashSet<Digest>>) -> Result<StateParts, BundleError> {
    let wrong = |error: &dyn std::fmt::Display| BundleError::Damaged(format!("engine state {list}: {error}"));
    state(&Held { store, held }, list, &wrong)
}

/// Says of which part an error is.
type Wrong<'a> = &'a dyn Fn(&dyn std::fmt::Display) -> BundleError;

/// Checks that an object of this size is held.
fn sized(held: &Held<'_>, (object, bytes): (Digest, u64), wrong: Wrong<'_>) -> Result<(), BundleError> {
    held.needs(object)?;
    match held.store.size(object)? == bytes {
        true => Ok(()),
        false => Err(wrong(&format!("object {object} has not the {bytes} bytes that it says"))),
    }
}

/// Checks that all of a list of engine state is held.
fn state(held: &Held<'_>, list: Digest, wrong: Wrong<'_>) -> Result<StateParts, BundleError> {
    held.needs(list)?;
    let bytes = held.store.get(list, limits::MANIFEST_BYTES as u64)?;
    let parts = StateParts::decode(&bytes).map_err(|error| wrong(&error))?;
    if parts.entries.len() > limits::STATE_ENTRIES {
        return Err(wrong(&"more engine state than may be"));
    }
    parts.entries.iter().map(|part| (part.body, part.bytes)).try_for_each(|body| sized(held, body, wrong))?;
    if parts.bytes() > limits::STATE_BYTES {
        return Err(wrong(&"more engine state than may be"));
    }
    Ok(parts)
}

/// Checks the images of a checkpoint's virtual machine: all pieces are held, and the sizes are those of the machine.
fn images(held: &Held<'_>, manifest: &Manifest, checked: &mut CheckedImages) -> Result<(), BundleError> {
    let Some(part) = &manifest.machine else { return Ok(()) };
    if held.store.size(part.state)? != part.state_bytes || part.state_bytes > limits::VM_DEVICE_STATE_BYTES {
        return Err(BundleError::Damaged("its machine's state has another size than it says".into()));
    }
    if held.store.size(part.description)? > limits::VM_TEMPLATE_JSON_BYTES {
        return Err(BundleError::Damaged("its machine's description is too large".into()));
    }
    for (what, named) in [("memory", &part.memory), ("disk", &part.disk)] {
        let (bytes, stored_bytes) = match checked.get(&named.list) {
            Some(sizes) => *sizes,
            None => {
                let sizes = check_image(held, named.list, what)?;
                checked.insert(named.list, sizes);
                sizes
            }
        };
        let is_memory = what == "memory";
        let fits = match is_memory {
            true => bytes == part.machine.ram_bytes,
            false => bytes <= limits::VM_DISK_MAX_BYTES,
        };
        if stored_bytes != named.bytes || !fits {
            return Err(BundleError::Damaged(format!("its {what} has another size than it says")));
        }
    }
    Ok(())
}

/// Checked lists of pieces, with the bytes of each image and those that are stored: many checkpoints may name one list.
type CheckedImages = HashMap<Digest, (u64, u64)>;

/// Checks the pieces of an image. Returns its bytes, and those that are stored.
fn check_image(held: &Held<'_>, list: Digest, what: &str) -> Result<(u64, u64), BundleError> {
    held.needs(list)?;
    let image = Image::load(held.store, list).map_err(|error| BundleError::Damaged(error.message))?;
    for piece in image.entries() {
        held.needs(piece.digest)?;
        if held.store.size(piece.digest)? != piece.bytes() {
            return Err(BundleError::Damaged(format!("piece {} of its {what} has another size", piece.digest)));
        }
    }
    Ok((image.bytes(), image.stored_bytes()))
}

/// Checks that the file holds a journal, each page once: a repeated one would be read as often as it is named.
fn check_journal(held: &Held<'_>, journal: &Journal) -> Result<(), BundleError> {
    if journal.pages.len() > limits::HANDOVER_PAGES {
        return Err(BundleError::TooLarge { what: "pages of its journal", most: limits::HANDOVER_PAGES as u64 });
    }
    let mut distinct = HashSet::new();
    for page in &journal.pages {
        held.needs(*page)?;
        if held.store.size(*page)? > limits::HANDOVER_PAGE_BYTES || !distinct.insert(*page) {
            return Err(BundleError::Damaged(format!("page {page} of its journal is repeated or too large")));
        }
    }
    journal.outputs.iter().try_for_each(|output| held.needs(*output))
}

/// Checks that the file holds everything that it references.
pub(super) fn whole(held: &Held<'_>, head: &Head) -> Result<(Vec<Manifest>, StateParts, u64), BundleError> {
    let store = held.store;
    let wrong = |id: CheckpointId| {
        move |error: &dyn std::fmt::Display| BundleError::Damaged(format!("checkpoint {id}: {error}"))
    };
    let most = limits::MANIFEST_BYTES as u64;
    let (mut manifests, mut begins, mut walked) = (Vec::new(), StateParts::default(), Seen::default());
    let (mut bytes, mut all, mut sizes) = (0, 0, Sizes::default());
    let mut checked_images = CheckedImages::default();
    for packed in &head.checkpoints {
        let wrong = wrong(packed.id);
        held.needs(packed.manifest)?;
        all += store.size(packed.manifest)?;
        if all > limits::BUNDLE_MANIFESTS_BYTES {
            return Err(BundleError::TooLarge { what: "bytes of manifests", most: limits::BUNDLE_MANIFESTS_BYTES });
        }
        let manifest = Manifest::decode(&store.get(packed.manifest, most)?).map_err(|error| wrong(&error))?;
        if manifest.kernel != head.kernel || manifest.id != packed.id {
            return Err(wrong(&"its manifest is another checkpoint's"));
        }
        manifest.spec.check().map_err(|error| wrong(&error))?;
        manifest.work.check().map_err(|error| wrong(&error))?;
        if manifest.mounts.len() > limits::MOUNTS || manifest.mcp.len() > limits::MCP_SERVERS {
            return Err(wrong(&"it has more mounts or servers than may be"));
        }
        for given in &manifest.mounts {
            crate::core::spec::check_inside_path(std::path::Path::new(&given.mount.path))
                .map_err(|error| wrong(&error))?;
        }
        let parts = state(held, manifest.state, &wrong)?;
        let artifacts = manifest.work.artifacts.iter();
        artifacts.map(|artifact| (artifact.hash, artifact.bytes)).try_for_each(|object| sized(held, object, &wrong))?;
        manifest.names().objects.into_iter().try_for_each(|object| held.needs(object))?;
        images(held, &manifest, &mut checked_images).map_err(|error| wrong(&error))?;
        held.needs_tree(manifest.workspace.tree, &mut walked)?;
        // Nested references to small objects can expand beyond any disk.
        let begins_here = packed.id == head.begin;
        let known = if begins_here { &mut Sizes::default() } else { &mut sizes };
        let size = known.of(held, TreeId(manifest.workspace.tree))?;
        if !size.is_possible() {
            return Err(wrong(&format!("{} entries in folders {} deep", size.entries, size.depth)));
        }
        if size.is_foreign {
            return Err(BundleError::Owners(packed.id));
        }
        if begins_here {
            (begins, bytes) = (parts, size.bytes);
        }
        manifests.push(manifest);
    }
    head.blobs.iter().try_for_each(|blob| held.needs(*blob))?;
    if let Some(journal) = &head.journal {
        check_journal(held, journal)?;
    }
    Ok((manifests, begins, bytes))
}
