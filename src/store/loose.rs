//! Objects of format 1: one file each, `objects/ab/cdef…`, the bytes as they are. They are read, counted and collected like
//! others; nothing new is written so. Garbage collection moves those that live into packs.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use super::{Result, Store, StoreError};
use crate::core::ids::Digest;
use crate::sys::fault;

/// Reads one to its end, hashing.
#[derive(Debug)]
pub(super) struct Loose {
    file: File,
    path: PathBuf,
    pub size: u64,
}

impl Loose {
    /// Some bytes; 0 at the end.
    pub(super) fn read(&mut self, room: &mut [u8]) -> Result<usize> {
        loop {
            match self.file.read(room) {
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(StoreError::io("read", &self.path, error)),
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Store {
    pub(super) fn loose(&self, digest: Digest) -> PathBuf {
        let name = digest.to_string();
        let (shard, rest) = name.split_at(2);
        self.shared.layout.objects.join(shard).join(rest)
    }

    pub(super) fn loose_size(&self, digest: Digest) -> Result<u64> {
        let path = self.loose(digest);
        match std::fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(meta.len()),
            Ok(_) => Err(StoreError::Damaged { digest, path, offset: 0 }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(StoreError::NotFound(digest)),
            Err(error) => Err(StoreError::io("look at", &path, error)),
        }
    }

    pub(super) fn open_loose(&self, digest: Digest) -> Result<Loose> {
        let path = self.loose(digest);
        let open = || File::open(&path).and_then(|file| file.metadata().map(|meta: Metadata| (file, meta.len())));
        match open() {
            Ok((file, size)) => Ok(Loose { file, path, size }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(StoreError::NotFound(digest)),
            Err(error) => Err(StoreError::io("open", &path, error)),
        }
    }

    /// Whether there is one that is what its address says.
    pub(super) fn is_loose_good(&self, digest: Digest) -> bool {
        let read = || -> Result<bool> {
            let mut loose = self.open_loose(digest)?;
            let (mut hasher, mut piece) = (blake3::Hasher::new(), vec![0; 64 << 10]);
            loop {
                match loose.read(&mut piece)? {
                    0 => return Ok(hasher.finalize().as_bytes() == digest.as_bytes()),
                    count => hasher.update(&piece[..count]),
                };
            }
        };
        read().unwrap_or(false)
    }

    /// Every one. Names that are no digest are none of ours and are left alone.
    pub(super) fn loose_objects(&self) -> impl Iterator<Item = Result<(Digest, u64)>> + '_ {
        let objects = &self.shared.layout.objects;
        let shards = if objects.is_dir() { 0..256u32 } else { 0..0 };
        shards.flat_map(move |shard| {
            let prefix = format!("{shard:02x}");
            let dir = objects.join(&prefix);
            let list = || -> io::Result<Vec<(Digest, u64)>> {
                let mut found = Vec::new();
                for entry in dir.read_dir()? {
                    let entry = entry?;
                    if let Ok(digest) = format!("{prefix}{}", entry.file_name().to_string_lossy()).parse() {
                        found.push((digest, entry.metadata()?.len()));
                    }
                }
                Ok(found)
            };
            match list() {
                Ok(found) => found.into_iter().map(Ok).collect(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
                Err(error) => vec![Err(StoreError::io("list", &dir, error))],
            }
        })
    }

    /// Removes one whose content is in a pack, or worth nothing.
    pub(super) fn remove_loose(&self, digest: Digest) -> Result<()> {
        let path = self.loose(digest);
        match fault::point("store.loose.remove").and_then(|()| std::fs::remove_file(&path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", &path, error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Removes the directories of format 1 when nothing is in them any more.
    pub(super) fn remove_loose_dirs(&self) {
        let objects = &self.shared.layout.objects;
        for shard in 0..256u32 {
            // One that is not empty stays, and with it the one above.
            let _ = std::fs::remove_dir(objects.join(format!("{shard:02x}")));
        }
        let _ = std::fs::remove_dir(objects);
    }
}
