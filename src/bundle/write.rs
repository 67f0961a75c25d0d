//! Writes a file: the head, then every object that its checkpoints and blobs need, each once.

use std::io::Write;

use super::frame::Pieces;
use super::{BundleError, Head, Record, SIGNATURE_BYTES, VERSION};
use crate::core::checkpoint::{Manifest, StateParts};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::core::signature::Signed;
use crate::store::{Image, Store};
use crate::workspace::{self, Seen, TreeId};

/// zstd level: files are read many times more slowly than they are compressed.
const LEVEL: i32 = 3;
/// Read size, bytes.
const PIECE: usize = 256 << 10;

/// Writes a file; `sign` signs the digest of its head. Returns the file's digest and length.
///
/// # Errors
/// An object is missing or damaged; those of `to`.
pub fn write(
    store: &Store,
    head: &Head,
    sign: impl FnOnce(Digest) -> Signed,
    to: impl Write,
) -> Result<(Digest, u64), BundleError> {
    let mut writing = Writing::begin(store, (Record::Head, VERSION), head, sign, to)?;
    writing.kernel(head)?;
    writing.finish()
}

/// Calls `object` for every object of a checkpoint that is not in `seen`: its manifest at `at`, engine state, files.
///
/// # Errors
/// An object on the path is missing or damaged.
pub fn reach(store: &Store, at: Digest, seen: &mut Seen, object: &mut dyn FnMut(Digest)) -> Result<(), BundleError> {
    let wrong = |error: crate::core::checkpoint::ManifestError| BundleError::Damaged(error.to_string());
    let most = limits::MANIFEST_BYTES as u64;
    let manifest = Manifest::decode(&store.get(at, most)?).map_err(wrong)?;
    let parts = StateParts::decode(&store.get(manifest.state, most)?).map_err(wrong)?;
    let bodies = parts.entries.into_iter().map(|part| part.body);
    for single in [at, manifest.state].into_iter().chain(bodies).chain(manifest.names().objects) {
        if seen.add(single) {
            object(single);
        }
    }
    for list in manifest.names().images {
        if !seen.add(list) {
            continue;
        }
        object(list);
        let image = Image::load(store, list).map_err(|error| BundleError::Damaged(error.message))?;
        for single in image.pieces() {
            if seen.add(single) {
                object(single);
            }
        }
    }
    let tree = TreeId(manifest.workspace.tree);
    workspace::reach(store, tree, seen, &mut |single| {
        object(single);
        Ok(())
    })?;
    Ok(())
}

/// A file that is being written.
pub(super) struct Writing<'a, W: Write> {
    store: &'a Store,
    to: zstd::stream::write::Encoder<'static, Pieces<W>>,
    seen: Seen,
}

impl<'a, W: Write> Writing<'a, W> {
    /// Writes the head and its signature.
    pub(super) fn begin(
        store: &'a Store,
        (record, version): (Record, u32),
        head: &impl serde::Serialize,
        sign: impl FnOnce(Digest) -> Signed,
        to: W,
    ) -> Result<Writing<'a, W>, BundleError> {
        let pieces = Pieces::begin(to, version)?;
        let to = zstd::stream::write::Encoder::new(pieces, LEVEL)?;
        let mut writing = Writing { store, to, seen: Seen::default() };
        let json = serde_json::to_vec(head).map_err(|error| BundleError::Damaged(error.to_string()))?;
        if json.len() > limits::BUNDLE_HEADER_BYTES {
            return Err(BundleError::TooLarge { what: "bytes of its head", most: limits::BUNDLE_HEADER_BYTES as u64 });
        }
        writing.record(record, json.len() as u64)?;
        writing.to.write_all(&json)?;
        // The head names every object by its content, directly or through others.
        let signed = sign(Digest::from_bytes(*blake3::hash(&json).as_bytes()));
        writing.record(Record::Signature, SIGNATURE_BYTES)?;
        writing.to.write_all(signed.key.as_bytes())?;
        writing.to.write_all(signed.signature.as_bytes())?;
        Ok(writing)
    }

    /// Writes the objects of a kernel's checkpoints, its blobs, and its journal.
    pub(super) fn kernel(&mut self, head: &Head) -> Result<(), BundleError> {
        for packed in &head.checkpoints {
            self.checkpoint(packed.manifest)?;
        }
        let journal = head.journal.iter().flat_map(|journal| journal.pages.iter().chain(&journal.outputs));
        head.blobs.iter().chain(journal).try_for_each(|object| self.object(*object))
    }

    /// Writes the objects of a file tree.
    pub(super) fn tree(&mut self, tree: Digest) -> Result<(), BundleError> {
        let mut found = Vec::new();
        workspace::reach(self.store, TreeId(tree), &mut self.seen, &mut |object| {
            found.push(object);
            Ok(())
        })?;
        found.into_iter().try_for_each(|object| self.copy(object))
    }

    /// Writes the end; returns the file's digest and length.
    pub(super) fn finish(mut self) -> Result<(Digest, u64), BundleError> {
        self.record(Record::End, 8)?;
        let count = self.seen.count() as u64;
        self.to.write_all(&count.to_le_bytes())?;
        Ok(self.to.finish()?.finish()?)
    }

    fn record(&mut self, record: Record, length: u64) -> Result<(), BundleError> {
        self.to.write_all(&[record as u8])?;
        Ok(self.to.write_all(&length.to_le_bytes())?)
    }

    fn checkpoint(&mut self, at: Digest) -> Result<(), BundleError> {
        let mut found = Vec::new();
        reach(self.store, at, &mut self.seen, &mut |object| found.push(object))?;
        found.into_iter().try_for_each(|object| self.copy(object))
    }

    /// Writes an object, unless it is there.
    pub(super) fn object(&mut self, digest: Digest) -> Result<(), BundleError> {
        if self.seen.add(digest) { self.copy(digest) } else { Ok(()) }
    }

    fn copy(&mut self, digest: Digest) -> Result<(), BundleError> {
        let mut reader = self.store.open_object(digest)?;
        self.record(Record::Object, 32 + reader.size())?;
        self.to.write_all(digest.as_bytes())?;
        let mut room = vec![0; PIECE.min(reader.size().max(1) as usize)];
        loop {
            match reader.read_some(&mut room)? {
                0 => return Ok(()),
                count => self.to.write_all(&room[..count])?,
            }
        }
    }
}
