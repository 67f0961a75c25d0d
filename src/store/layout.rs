//! Where objects are: format 1, one file for each.
//!
//! ```text
//! store/format             "1\n"; written last, when all of the below is there
//! store/objects/ab/cdef…   an object's bytes as they are, mode 0400; `abcdef…` is its digest
//! store/tmp/               objects being written (sweep)
//! ```

use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use super::Result;
use super::error::StoreError;
use crate::core::ids::Digest;
use crate::sys::fault;
use crate::sys::fs::{self, FsError};

const FORMAT: u32 = 1;
const DIR_MODE: u32 = 0o700;

#[derive(Debug)]
pub(super) struct Layout {
    objects: PathBuf,
    tmp: PathBuf,
}

impl Layout {
    /// Opens the directory of a store, or makes it. A creation that was cut short is finished.
    pub(super) fn open(dir: &Path) -> Result<Layout> {
        let layout = Layout { objects: dir.join("objects"), tmp: dir.join("tmp") };
        let format = dir.join("format");
        match std::fs::read_to_string(&format) {
            Ok(found) if found.trim() == FORMAT.to_string() => {}
            Ok(found) => {
                let found = found.trim().chars().take(40).collect();
                return Err(StoreError::Newer { path: format, found, known: FORMAT });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => layout.create(dir, &format)?,
            Err(error) => return Err(StoreError::io("read", &format, error)),
        }
        fs::sweep_temps(dir)?;
        Ok(layout)
    }

    fn create(&self, dir: &Path, format: &Path) -> Result<()> {
        for dir in [dir, &self.objects, &self.tmp] {
            fs::create_dir_durable(dir, DIR_MODE, "store.layout.dir")?;
        }
        // All of them now, so that no object ever waits for one.
        for shard in 0..=255u8 {
            match std::fs::create_dir(self.objects.join(format!("{shard:02x}"))) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(StoreError::io("create", &self.objects, error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        fs::sync_dir(&self.objects)?;
        Ok(fs::write_new(format, format!("{FORMAT}\n").as_bytes(), 0o600, "store.format.write")?)
    }

    /// Where temporary files are.
    pub(super) fn tmp(&self) -> &Path {
        &self.tmp
    }

    /// The file of an object, whether it is there or not.
    pub(super) fn object(&self, digest: Digest) -> PathBuf {
        let name = digest.to_string();
        let (shard, rest) = name.split_at(2);
        self.objects.join(shard).join(rest)
    }

    /// What the file system knows of an object.
    pub(super) fn stat(&self, digest: Digest) -> Result<Metadata> {
        let path = self.object(digest);
        match std::fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(meta),
            Ok(_) => Err(StoreError::Damaged { digest, path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(StoreError::NotFound(digest)),
            Err(error) => Err(StoreError::io("look at", &path, error)),
        }
    }

    /// Opens an object for reading.
    pub(super) fn open_object(&self, digest: Digest) -> Result<File> {
        let path = self.object(digest);
        match File::open(&path) {
            Ok(file) => Ok(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(StoreError::NotFound(digest)),
            Err(error) => Err(StoreError::io("open", &path, error)),
        }
    }

    /// Gives a written and synced temporary file its address. Durable only after [`Self::sync_shard`].
    pub(super) fn publish(&self, temp: &Path, digest: Digest) -> Result<()> {
        let path = self.object(digest);
        let rename = fault::point("store.object.rename").and_then(|()| std::fs::rename(temp, &path));
        rename.map_err(|e| StoreError::io("name", &path, e))
    }

    /// Makes the names in an object's directory durable.
    pub(super) fn sync_shard(&self, digest: Digest) -> Result<()> {
        let path = self.object(digest);
        let shard = path.parent().unwrap_or(&self.objects);
        fault::point("store.object.sync_dir").map_err(|e| StoreError::io("sync", shard, e))?;
        Ok(fs::sync_dir(shard)?)
    }

    /// Which directory an object is in: objects of one number share [`Self::sync_shard`].
    pub(super) fn shard(digest: Digest) -> u8 {
        digest.as_bytes()[0]
    }

    /// Every object. Names that are no digest are none of ours and are left alone.
    pub(super) fn objects(&self) -> impl Iterator<Item = Result<(Digest, u64)>> + '_ {
        (0..=255u8).flat_map(move |shard| {
            let prefix = format!("{shard:02x}");
            let dir = self.objects.join(&prefix);
            let listed =
                dir.read_dir().map_err(|e| StoreError::Io(FsError { op: "list", path: dir.clone(), source: e }));
            let (entries, failed) = match listed {
                Ok(entries) => (Some(entries), None),
                Err(error) => (None, Some(Err(error))),
            };
            let found = entries.into_iter().flatten().filter_map(move |entry| {
                let digest = match &entry {
                    Ok(entry) => format!("{prefix}{}", entry.file_name().to_string_lossy()).parse().ok()?,
                    Err(_) => Digest::from_bytes([shard; 32]),
                };
                Some(
                    entry
                        .and_then(|entry| entry.metadata())
                        .map(|meta| (digest, meta.len()))
                        .map_err(|e| StoreError::Io(FsError { op: "list", path: dir.clone(), source: e })),
                )
            });
            failed.into_iter().chain(found)
        })
    }
}
