//! Stores one file of a live workspace as an object.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path};

use super::beneath::{self, Kind};
use super::error::WorkspaceError;
use super::tree::entry::Name;
use crate::core::ids::Digest;
use crate::core::limits;
use crate::store::Store;

/// Read size, bytes.
const ROOM: usize = 256 << 10;

/// Stores a regular file, named by its path in the workspace (with or without `/workspace` before it). Returns address
/// and length.
///
/// # Errors
/// No such file, or not a regular one; it keeps changing; it is larger than a blob may be; store errors.
pub fn read_file(root: &Path, path: &Path, store: &Store) -> Result<(Digest, u64), WorkspaceError> {
    let failed = |source: io::Error| WorkspaceError::NoFile { path: path.to_owned(), source };
    let names = names(path).map_err(failed)?;
    let (last, folders) = names.split_last().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
    for _ in 0..limits::WORKSPACE_READ_ATTEMPTS {
        let top = File::open(root).map_err(failed)?;
        let folder = beneath::folder(top.as_fd(), folders).map_err(|error| failed(error.into()))?;
        let mut file = beneath::file(folder.as_fd(), last).map_err(|error| failed(error.into()))?;
        let before = beneath::look_at(&file).map_err(|error| failed(error.into()))?;
        if beneath::kind(&before) != Kind::File {
            return Err(failed(io::Error::other("it is no regular file")));
        }
        let mut writer = store.writer(limits::BLOB_BYTES)?;
        let mut room = vec![0; ROOM];
        loop {
            match file.read(&mut room) {
                Ok(0) => break,
                Ok(read) => writer.write(&room[..read])?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        let after = beneath::look_at(&file).map_err(|error| failed(error.into()))?;
        if beneath::stamp(&before) == beneath::stamp(&after) {
            return Ok(writer.finish()?);
        }
    }
    Err(WorkspaceError::Changing { path: path.to_owned() })
}

fn names(path: &Path) -> io::Result<Vec<Name>> {
    let inside = path.strip_prefix("/workspace").unwrap_or(path);
    let name = |part: Component<'_>| match part {
        Component::Normal(name) => Ok(name.as_bytes().into()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir | Component::ParentDir => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no path in the workspace"))
        }
    };
    inside.components().filter(|part| *part != Component::CurDir).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_file_stays_in_workspace() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (root, store) = (dir.path().join("workspace"), dir.path().join("store"));
        std::fs::create_dir_all(root.join("d")).expect("made");
        std::fs::create_dir(&store).expect("made");
        let store = Store::open(&store).expect("opens");
        std::fs::write(root.join("d/f"), "content").expect("written");
        std::fs::write(dir.path().join("secret"), "secret").expect("written");
        std::os::unix::fs::symlink(dir.path().join("secret"), root.join("link")).expect("made");
        std::os::unix::fs::symlink(dir.path(), root.join("out")).expect("made");
        let expected = (Digest::from_bytes(*blake3::hash(b"content").as_bytes()), 7);
        for path in ["d/f", "/workspace/d/f", "./d/f"] {
            assert_eq!(read_file(&root, Path::new(path), &store).expect(path), expected);
        }
        for path in ["link", "out/secret", "../secret", "/etc/passwd", "d", "", "gone", "d/f/x"] {
            assert!(read_file(&root, Path::new(path), &store).is_err(), "{path:?}");
        }
    }
}
