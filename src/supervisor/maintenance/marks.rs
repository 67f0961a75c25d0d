//! Marks all objects that roots need: manifests lead to engine state and file trees, and those to bodies and contents.
//!
//! Memory: one address per object, and one more number if reasons are recorded; at most [`limits::GC_OBJECTS`].

use std::collections::HashMap;

use super::roots::Named;
use crate::catalog::state::RootKind;
use crate::core::checkpoint::{Manifest, ManifestError, StateParts};
use crate::core::error::{Error, Result};
use crate::core::freeze::{FreezeManifest, FreezeManifestError};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::store::{Image, Store};
use crate::workspace::{self, Seen, TreeId, WorkspaceError};

/// The live objects.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    live: Seen,
    /// The index of the first root that needs each object.
    by: Option<HashMap<Digest, u32>>,
}

impl Marks {
    /// Creates an empty set; `with_reasons` records which root needs an object.
    pub(crate) fn new(with_reasons: bool) -> Marks {
        Marks { live: Seen::default(), by: with_reasons.then(HashMap::new) }
    }

    /// Whether an object is needed.
    pub(crate) fn has(&self, digest: Digest) -> bool {
        self.live.contains(digest)
    }

    /// The index of the first root that needs an object.
    pub(crate) fn by(&self, digest: Digest) -> Option<usize> {
        self.by.as_ref().and_then(|by| by.get(&digest)).map(|at| *at as usize)
    }

    /// Marks the objects that a root needs.
    ///
    /// # Errors
    /// An object on the path cannot be read, or there are too many objects.
    pub(crate) fn mark(&mut self, store: &Store, at: usize, named: Named, digest: Digest) -> Result<()> {
        let Marks { live, by } = self;
        let mut note = |object: Digest| {
            if let Some(by) = by {
                by.entry(object).or_insert(at as u32);
            }
        };
        walk(store, named, digest, live, &mut note)?;
        match live.count() > limits::GC_OBJECTS {
            true => {
                Err(Error::refused(format!("more than {} objects are in use", limits::GC_OBJECTS)).reason("objects"))
            }
            false => Ok(()),
        }
    }
}

/// Passes to `object` each object that a root needs and that is not in `seen`.
///
/// # Errors
/// An object on the path cannot be read.
pub(crate) fn walk(
    store: &Store,
    named: Named,
    digest: Digest,
    seen: &mut Seen,
    object: &mut dyn FnMut(Digest),
) -> Result<()> {
    match named {
        Named::Row(RootKind::Checkpoint { .. }) => manifest(store, digest, seen, object),
        Named::Files => tree(store, digest, seen, object),
        Named::Freeze { .. } => freeze(store, digest, seen, object),
        Named::Row(RootKind::Blob | RootKind::Output { .. }) => {
            if seen.add(digest) {
                object(digest);
            }
            Ok(())
        }
    }
}

fn manifest(store: &Store, at: Digest, seen: &mut Seen, object: &mut dyn FnMut(Digest)) -> Result<()> {
    if !seen.enter(at) {
        return Ok(());
    }
    let mut tell = |seen: &mut Seen, digest| {
        if seen.add(digest) {
            object(digest);
        }
    };
    tell(seen, at);
    let bytes = store.get(at, limits::MANIFEST_BYTES as u64).map_err(|error| unreadable(at, error.into()))?;
    let manifest = Manifest::decode(&bytes).map_err(|error| wrong(at, &error))?;
    let named = manifest.names();
    tell(seen, named.state);
    if seen.enter(named.state) {
        let bytes = store.get(named.state, limits::MANIFEST_BYTES as u64);
        let bytes = bytes.map_err(|error| unreadable(named.state, error.into()))?;
        let parts = StateParts::decode(&bytes).map_err(|error| wrong(named.state, &error))?;
        parts.entries.iter().for_each(|part| tell(seen, part.body));
    }
    named.objects.into_iter().for_each(|single| tell(seen, single));
    for list in named.images {
        tell(seen, list);
        if seen.enter(list) {
            let image = Image::load(store, list).map_err(|error| unreadable(list, error))?;
            image.pieces().for_each(|piece| tell(seen, piece));
        }
    }
    tree(store, named.tree, seen, object)
}

fn freeze(store: &Store, at: Digest, seen: &mut Seen, object: &mut dyn FnMut(Digest)) -> Result<()> {
    let bytes = store.get(at, limits::FREEZE_MANIFEST_BYTES as u64).map_err(|error| unreadable(at, error.into()))?;
    let manifest = FreezeManifest::decode(&bytes).map_err(|error| match error {
        FreezeManifestError::UnknownFormat(_) => Error::unsupported(format!("object {at}: {error}")),
        FreezeManifestError::Malformed(_) | FreezeManifestError::TooLarge => {
            unreadable(at, Error::corrupt(format!("object {at}: {error}")))
        }
    })?;
    for digest in std::iter::once(at).chain(manifest.objects()) {
        if seen.add(digest) {
            object(digest);
        }
    }
    manifest.trees().into_iter().try_for_each(|root| tree(store, root, seen, object))
}

fn tree(store: &Store, at: Digest, seen: &mut Seen, object: &mut dyn FnMut(Digest)) -> Result<()> {
    let mut take = |digest| {
        object(digest);
        Ok(())
    };
    workspace::reach(store, TreeId(at), seen, &mut take).map_err(|error| {
        let of = match &error {
            WorkspaceError::Tree { digest, .. } => *digest,
            WorkspaceError::Store(error) => error.digest().unwrap_or(at),
            _ => at,
        };
        unreadable(of, error.into())
    })
}

/// An error whose `reason` is the address of the unreadable object.
fn unreadable(at: Digest, error: Error) -> Error {
    Error::corrupt(error.message).reason(at.to_string())
}

fn wrong(at: Digest, error: &ManifestError) -> Error {
    match error {
        ManifestError::UnknownFormat(_) | ManifestError::UnknownWorkFormat(_) | ManifestError::Kind(_) => {
            Error::unsupported(format!("object {at}: {error}"))
        }
        ManifestError::Malformed(_) | ManifestError::Parts(_) | ManifestError::TooLarge { .. } => {
            unreadable(at, Error::corrupt(format!("object {at}: {error}")))
        }
    }
}
