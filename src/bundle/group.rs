//! A freeze of a group as a file: the head names the freeze, and has the head of each kernel in it.

use std::collections::HashSet;
use std::io::Write;
use std::sync::Arc;

use super::read::{Contents, Held, check_head, whole};
use super::write::Writing;
use super::{BundleError, GROUP_VERSION, GroupHead, Record};
use crate::core::freeze::portable::check_portable;
use crate::core::freeze::{Captured, DatabasePart, FreezeManifest, FreezeManifestError};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::core::signature::{Signed, Subject};
use crate::store::Store;
use crate::workspace::Seen;

/// The content of a group's file; all of it is in the store.
pub struct GroupContents {
    /// Its head.
    pub head: GroupHead,
    /// The freeze's manifest.
    pub manifest: FreezeManifest,
    /// The kernels, in the order of the head.
    pub kernels: Vec<Contents>,
    /// What each member needs once it is written out, bytes; histories as they are packed. Kernels have sizes of their own.
    pub sizes: Vec<(String, u64)>,
    /// The digest of the file.
    pub digest: Digest,
    /// The digest of its head, and the signature over that.
    pub signed: (Digest, Option<Signed>),
}

/// Writes a file; `sign` signs the digest of its head. Returns the file's digest and length.
///
/// # Errors
/// An object is missing or damaged; those of `to`.
pub fn write_group(
    store: &Store,
    head: &GroupHead,
    sign: impl FnOnce(Digest) -> Signed,
    to: impl Write,
) -> Result<(Digest, u64), BundleError> {
    let manifest = decode(&store.get(head.freeze.manifest, limits::FREEZE_MANIFEST_BYTES as u64)?)?;
    let mut writing = Writing::begin(store, (Record::Group, GROUP_VERSION), head, sign, to)?;
    writing.object(head.freeze.manifest)?;
    head.kernels.iter().try_for_each(|kernel| writing.kernel(kernel))?;
    manifest.objects().into_iter().try_for_each(|object| writing.object(object))?;
    manifest.trees().into_iter().try_for_each(|tree| writing.tree(tree))?;
    head.histories.iter().try_for_each(|history| writing.object(history.pack))?;
    writing.finish()
}

fn decode(bytes: &[u8]) -> Result<FreezeManifest, BundleError> {
    FreezeManifest::decode(bytes).map_err(|error| match error {
        FreezeManifestError::TooLarge => {
            BundleError::TooLarge { what: "bytes of a freeze", most: limits::FREEZE_MANIFEST_BYTES as u64 }
        }
        FreezeManifestError::Malformed(_) | FreezeManifestError::UnknownFormat(_) => {
            BundleError::Damaged(error.to_string())
        }
    })
}

/// Checks that `held` has everything of a group whose kernels come otherwise. For objects that arrived without a file.
///
/// # Errors
/// Each of [`BundleError`].
pub fn verify_group(
    store: &Store,
    head: GroupHead,
    held: Arc<HashSet<Digest>>,
    digest: Digest,
) -> Result<GroupContents, BundleError> {
    check_group_head(&head)?;
    if !head.kernels.is_empty() {
        return Err(BundleError::Damaged("its head has kernels".into()));
    }
    whole_group(&Held { store, held }, (head, true), digest, (digest, None))
}

/// Checks the head of a group's file.
pub(super) fn check_group_head(head: &GroupHead) -> Result<(), BundleError> {
    let wrong = |why: &str| BundleError::Damaged(format!("its head: {why}"));
    if head.ryokan.len() > limits::IDENTIFIER_BYTES {
        return Err(wrong("a name that is too long"));
    }
    if head.kernels.len() > limits::GROUP_MEMBERS || head.histories.len() > limits::GROUP_HISTORIES {
        return Err(wrong("more members than a group has"));
    }
    if head.kernels.iter().map(|kernel| kernel.checkpoints.len()).any(|count| count != 1) {
        return Err(wrong("a kernel without the one checkpoint of the freeze"));
    }
    if let Some(signed) = &head.freeze.signed
        && !signed.holds(Subject::Freeze, head.freeze.manifest)
    {
        return Err(BundleError::Signature);
    }
    head.kernels.iter().try_for_each(check_head)
}

/// Checks that the file holds everything that its freeze and its kernels reference.
pub(super) fn whole_group(
    held: &Held<'_>,
    (head, moved): (GroupHead, bool),
    digest: Digest,
    signed: (Digest, Option<Signed>),
) -> Result<GroupContents, BundleError> {
    let wrong = |why: String| BundleError::Damaged(format!("its freeze: {why}"));
    held.needs(head.freeze.manifest)?;
    let manifest = decode(&held.store.get(head.freeze.manifest, limits::FREEZE_MANIFEST_BYTES as u64)?)?;
    check_portable(&head.freeze, &manifest).map_err(wrong)?;
    let mut sizes = Vec::new();
    for part in &manifest.parts {
        let name = &part.name;
        let histories = head.histories.iter().filter(|history| history.member == *name);
        let mut of: Vec<&str> = histories.map(|history| &*history.submodule).collect();
        of.sort_unstable();
        match &part.captured {
            Captured::Repository { part, .. } => {
                let mut wanted: Vec<String> = part.with_submodules().into_iter().map(|(path, _)| path).collect();
                wanted.sort_unstable();
                if of != wanted {
                    return Err(wrong(format!("no single history of member {name} and each of its submodules")));
                }
            }
            _ if of.is_empty() => {}
            _ => return Err(wrong(format!("a history of member {name}, which has none"))),
        }
        sizes.push((name.clone(), part_bytes(held, name, &part.captured)?));
    }
    if head.histories.iter().any(|history| manifest.parts.iter().all(|part| part.name != history.member)) {
        return Err(wrong("a history of no member".into()));
    }
    for history in &head.histories {
        held.needs(history.pack)?;
        sizes.push((history.member.clone(), held.store.size(history.pack)?));
    }
    manifest.objects().into_iter().try_for_each(|object| held.needs(object))?;
    if !moved && head.kernels.len() != manifest.checkpoints().len() {
        return Err(wrong("other kernels than its head has".into()));
    }
    let mut kernels = Vec::new();
    for kernel in &head.kernels {
        let is_its = |captured: &Captured| {
            matches!(captured, Captured::Kernel { kernel: id, checkpoint, manifest, .. }
                if (*id, *checkpoint, *manifest) == (kernel.kernel, kernel.begin, Some(kernel.checkpoints[0].manifest)))
        };
        if !manifest.parts.iter().any(|part| is_its(&part.captured)) {
            return Err(wrong(format!("kernel {} has another checkpoint there", kernel.kernel)));
        }
        let (manifests, parts, bytes) = whole(held, kernel)?;
        kernels.push(Contents { head: kernel.clone(), manifests, parts, bytes, digest, signed });
    }
    Ok(GroupContents { head, manifest, kernels, sizes, digest, signed })
}

/// Checks what the file has of one member; returns the bytes once it is written out.
fn part_bytes(held: &Held<'_>, name: &str, captured: &Captured) -> Result<u64, BundleError> {
    let tree = |tree: Option<Digest>, keeps_owners: bool| {
        let tree = tree.ok_or_else(|| BundleError::Damaged(format!("member {name} has no content")))?;
        held.needs_tree(tree, &mut Seen::default())?;
        let size = held.size_of(tree)?;
        if !size.is_possible() || (size.is_foreign && !keeps_owners) {
            let why = "has files of other owners, or more than a directory may have";
            return Err(BundleError::Damaged(format!("member {name} {why}")));
        }
        Ok(size.bytes)
    };
    match captured {
        Captured::Kernel { .. } => Ok(0),
        Captured::Repository { part, .. } => part.packs().into_iter().try_fold(0, |bytes: u64, pack| {
            held.needs(pack)?;
            Ok(bytes.saturating_add(held.store.size(pack)?))
        }),
        Captured::Database { part, .. } => match part {
            DatabasePart::Whole { image, bytes, .. } => held.needs_sized(*image, *bytes).map(|()| *bytes),
            DatabasePart::Absent | DatabasePart::Damaged { .. } => Ok(0),
        },
        Captured::Directory { part, .. } => tree(part.tree, false),
        Captured::Server { part, .. } => tree(part.tree, true),
        Captured::Command { data, bytes, .. } => held.needs_sized(*data, *bytes).map(|()| *bytes),
        Captured::Postgres { part, .. } => match part.image {
            Some(image) => held.needs_sized(image, part.bytes).map(|()| part.bytes),
            None => Ok(0),
        },
    }
}
