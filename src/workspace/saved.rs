//! The index between processes: only contents by stamp, because every entry is checked again. A missing, old or damaged
//! file costs time and nothing else.
//!
//! ```text
//! "ryi" 1 · boot · time · inode of the workspace · folders in scan order · BLAKE3 of all before
//! ```

use std::cmp::Reverse;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::error::WorkspaceError;
use super::index::{FolderId, Index, Known, NodeState, ROOT, Stamp};
use super::tree::entry::{Content, Entry, Moment, Name, Node};
use super::tree::format::{Decoder, FormatError, encode_entry, number, text, zigzag};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::sys::fs::{self, FsError};

const MAGIC: &[u8] = b"ryi\x01";
const HASH: usize = 32;
/// Seconds after which writes are on the device even without a sync. Files younger than that when the index was saved
/// may have other bytes after a loss of power.
const WRITTEN_BACK_SECS: i64 = 120;

/// Result of loading a saved index.
pub(super) enum Loaded {
    /// It can be used.
    Index(Box<Index>),
    /// There is no file.
    Nothing,
    /// The file is damaged, too large, of another format or of another workspace.
    Unusable,
}

/// The boot id of the host.
fn boot() -> Vec<u8> {
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// Saves an index.
pub(super) fn save(path: &Path, index: &Index, root: u64) -> Result<(), WorkspaceError> {
    let mut out = MAGIC.to_vec();
    text(&mut out, &boot());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    number(&mut out, now);
    number(&mut out, root);
    let mut folders: Vec<FolderId> = vec![ROOT];
    while let Some(id) = folders.pop() {
        let folder = index.folder(id);
        number(&mut out, folder.entries.len() as u64);
        for (name, known) in &folder.entries {
            let hot = index.hot.contains(&(id, name.clone()));
            encode_known(&mut out, name, known, hot);
            if let NodeState::Folder(inner) = known.what {
                folders.push(inner);
            }
        }
    }
    let hash = blake3::hash(&out);
    out.extend_from_slice(hash.as_bytes());
    if out.len() as u64 > limits::WORKSPACE_INDEX_BYTES {
        let source = io::Error::from_raw_os_error(libc::EFBIG);
        return Err(FsError { op: "save", path: path.to_owned(), source }.into());
    }
    // The reader verifies it, and scans everything if it is damaged.
    Ok(fs::replace_soon(path, &out, 0o600, "workspace.index.save")?)
}

fn encode_known(out: &mut Vec<u8>, name: &[u8], known: &Known, hot: bool) {
    let node = match &known.what {
        NodeState::File { content, .. } => Node::File { size: known.stamp.size, content: content.clone(), group: None },
        NodeState::Folder(_) => Node::Folder { digest: Digest::from_bytes([0; 32]) },
        NodeState::Symlink(target) => Node::Symlink { target: target.clone() },
        NodeState::Fifo => Node::Fifo,
        NodeState::Missing(reason) => Node::Missing { reason: *reason },
    };
    encode_entry(out, &Entry { name: name.into(), meta: known.meta.clone(), node });
    let names = if let NodeState::File { names, .. } = known.what { names } else { 0 };
    out.push(u8::from(known.settled && !hot));
    for value in [names, known.stamp.inode, known.stamp.size] {
        number(out, value);
    }
    for moment in [known.stamp.modified, known.stamp.changed] {
        number(out, zigzag(moment.secs));
        number(out, u64::from(moment.nanos));
    }
}

/// Loads a saved index.
pub(super) fn load(path: &Path, root: u64) -> Loaded {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Loaded::Nothing,
        Ok(meta) if meta.is_file() && meta.len() <= limits::WORKSPACE_INDEX_BYTES => {}
        Ok(_) | Err(_) => return Loaded::Unusable,
    }
    let Ok(bytes) = std::fs::read(path) else { return Loaded::Unusable };
    match decode(&bytes, root) {
        Ok(index) => Loaded::Index(Box::new(index)),
        Err(_) => Loaded::Unusable,
    }
}

fn decode(bytes: &[u8], root: u64) -> Result<Index, FormatError> {
    let (body, hash) = bytes.split_at(bytes.len().saturating_sub(HASH));
    let body_is_whole = blake3::hash(body).as_bytes() == hash;
    let rest = body.strip_prefix(MAGIC).filter(|_| body_is_whole).ok_or(FormatError::Shape)?;
    let mut decoder = Decoder::bare(rest);
    let same_boot = *decoder.text()? == *boot();
    let saved = i64::try_from(decoder.number()?).map_err(|_| FormatError::Shape)?;
    if decoder.number()? != root {
        return Err(FormatError::Shape);
    }
    // After a reboot, only files that were certainly written back.
    let trusted_before = if same_boot { i64::MAX } else { saved - WRITTEN_BACK_SECS };
    let mut index = Index::new();
    let mut folders: Vec<FolderId> = vec![ROOT];
    while let Some(id) = folders.pop() {
        for _ in 0..decoder.number()? {
            let (name, mut known) = decode_known(&mut decoder)?;
            known.settled &= known.stamp.changed.secs < trusted_before;
            if let NodeState::Folder(inner) = &mut known.what {
                *inner = index.make_folder(id, &name);
                folders.push(*inner);
            }
            index.set(id, &name, known);
        }
    }
    if !decoder.is_at_end() {
        return Err(FormatError::Shape);
    }
    index.stale = index.folders.iter().map(|(id, folder)| (Reverse(folder.depth), *id)).collect();
    Ok(index)
}

fn decode_known(decoder: &mut Decoder<'_>) -> Result<(Name, Known), FormatError> {
    let Entry { name, meta, node } = decoder.entry()?;
    let settled = decoder.byte()? != 0;
    let (names, inode, size) = (decoder.number()?, decoder.number()?, decoder.number()?);
    let mut moment = || Ok::<_, FormatError>(Moment { secs: decoder.signed()?, nanos: decoder.small()? });
    let stamp = Stamp { inode, size, modified: moment()?, changed: moment()? };
    let what = match node {
        Node::File { content, .. } => NodeState::File { content: sized(content, size)?, names, group: None },
        Node::Folder { .. } => NodeState::Folder(ROOT),
        Node::Symlink { target } => NodeState::Symlink(target),
        Node::Fifo => NodeState::Fifo,
        Node::Missing { reason } => NodeState::Missing(reason),
    };
    Ok((name, Known { stamp, settled, meta, what }))
}

fn sized(content: Content, size: u64) -> Result<Content, FormatError> {
    match &content {
        Content::Inline(bytes) if bytes.len() as u64 != size => Err(FormatError::Shape),
        Content::Inline(_) | Content::Whole(_) | Content::Map(_) => Ok(content),
    }
}
