//! Files into the store, and back.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::core::error::{Error, Result};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::store::{Store, StoreError};
use crate::supervisor::host::Host;
use crate::sys::{btrfs, inode};

/// Bytes that are copied at once.
const PIECE: usize = 256 << 10;

/// Stores a file; returns its address and its size. Durable.
///
/// # Errors
/// Store errors, and files that cannot be read.
pub(super) async fn put(host: &Host, path: PathBuf) -> Result<(Digest, u64)> {
    let put = move |store: &Store| {
        let copy = || -> std::io::Result<Result<(Digest, u64), StoreError>> {
            let (mut file, mut piece) = (File::open(&path)?, vec![0; PIECE]);
            let mut writer = match store.writer(limits::BLOB_BYTES) {
                Ok(writer) => writer,
                Err(error) => return Ok(Err(error)),
            };
            loop {
                let read = file.read(&mut piece)?;
                if read == 0 {
                    return Ok(writer.finish());
                }
                if let Err(error) = writer.write(&piece[..read]) {
                    return Ok(Err(error));
                }
            }
        };
        let name = path.display().to_string();
        Ok(copy().map_err(|error| Error::unavailable(format!("cannot read {name}: {error}"))))
    };
    host.store.run_beside(put).await??.map_err(Error::from)
}

/// Writes an object to a new file, which is synced and replaces what had its name. The whole object is verified.
///
/// # Errors
/// Store errors, and files that cannot be written.
pub(super) async fn get(host: &Host, digest: Digest, path: &Path) -> Result<()> {
    get_as(host, digest, path, false).await
}

/// As [`get`]; with `no_cow` the file gets that attribute of Btrfs while it is empty, where it can have it.
///
/// # Errors
/// As there.
pub(super) async fn get_as(host: &Host, digest: Digest, path: &Path, no_cow: bool) -> Result<()> {
    let path = path.to_owned();
    let get = move |store: &Store| {
        let (mut reader, mut piece) = (store.open_object(digest)?, vec![0; PIECE]);
        let failed = |error: std::io::Error| Error::unavailable(format!("cannot write {}: {error}", path.display()));
        let mut file = match replaced(&path) {
            Ok(file) => file,
            Err(error) => return Ok(Err(failed(error))),
        };
        let is_btrfs = || inode::file_system(file.as_fd()).is_ok_and(|found| found == btrfs::MAGIC);
        if no_cow
            && is_btrfs()
            && let Err(error) = inode::set_no_cow(file.as_fd())
        {
            // The content does not depend on it.
            tracing::warn!(path = %path.display(), %error, "a restored file has no attribute No_COW");
        }
        loop {
            let read = reader.read_some(&mut piece)?;
            let done = if read == 0 { file.sync_all() } else { file.write_all(&piece[..read]) };
            match done {
                Err(error) => return Ok(Err(failed(error))),
                Ok(()) if read == 0 => return Ok(Ok(())),
                Ok(()) => {}
            }
        }
    };
    host.store.run_beside(get).await?
}

/// Makes a new file in the place of another. A link is not followed: code of a kernel may have put one beside a member.
fn replaced(path: &Path) -> std::io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

/// Runs blocking work.
///
/// # Errors
/// Those of `work`.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Error::internal(error.to_string()))?
}
