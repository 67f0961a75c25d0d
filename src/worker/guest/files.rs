//! Applies a client's changes of the workspace's files, with the code that does it for a workspace on a host.
//!
//! Code inside owns the files and may change them meanwhile: that code follows no link out of the workspace, and refuses
//! this process, which is root, what their owner could not do.

use std::collections::HashMap;
use std::path::Path;

use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::files::Placement;
use crate::core::limits;
use crate::link::machine::{FileRequest, Reply};
use crate::workspace::{LocalFiles, NewFile, WorkspacePaths};

/// The workspace's files, and the unfinished ones.
pub(super) struct Files {
    local: LocalFiles,
    uploads: HashMap<u64, Upload>,
}

struct Upload {
    file: NewFile,
    bytes: u64,
}

impl Files {
    /// The files of the kernel with this folder.
    pub(super) fn new(folder: &Path) -> Files {
        let [workspace, staging, index] = ["workspace", "staging", "index"].map(|name| folder.join(name));
        let paths = WorkspacePaths { workspace, staging, index };
        // The end of the machine is a loss of power to its guest.
        Files { local: LocalFiles::new(paths, Durability::Power), uploads: HashMap::new() }
    }

    /// The same files, for reading.
    pub(super) fn local(&self) -> LocalFiles {
        self.local.clone()
    }

    /// Discards all unfinished files.
    pub(super) fn discard_all(&mut self) {
        self.uploads.clear();
    }

    /// Answers a request; `body` belongs to it.
    ///
    /// # Errors
    /// A [`FileError`](crate::core::files::FileError), those of the disk, `busy` for a file that is not here any more.
    pub(super) fn answer(&mut self, request: FileRequest, body: &[u8]) -> Result<Reply> {
        match request {
            FileRequest::Append { upload, offset, most_bytes } => self.append(upload, offset, most_bytes, body)?,
            FileRequest::Place { upload, bytes, place } => return self.place(upload, bytes, &place),
            FileRequest::Discard { upload } => drop(self.uploads.remove(&upload)),
            FileRequest::Change { change } => self.local.change(&change)?,
        }
        Ok(Reply::Done)
    }

    /// A file that cannot be continued is discarded.
    fn append(&mut self, upload: u64, offset: u64, most_bytes: u64, data: &[u8]) -> Result<()> {
        let mut present = match (self.uploads.remove(&upload), offset) {
            (_, 0) if self.uploads.len() >= limits::FILES_OPEN => {
                return Err(Error::busy("too many files are being written").reason("files_open"));
            }
            (_, 0) => Upload { file: self.local.begin_write(most_bytes)?, bytes: 0 },
            (Some(present), _) if present.bytes == offset => present,
            (Some(_) | None, _) => return Err(lost()),
        };
        present.file.write(data)?;
        present.bytes += data.len() as u64;
        self.uploads.insert(upload, present);
        Ok(())
    }

    fn place(&mut self, upload: u64, bytes: u64, place: &Placement) -> Result<Reply> {
        let present = match self.uploads.remove(&upload) {
            Some(present) if present.bytes == bytes => present.file,
            None if bytes == 0 => self.local.begin_write(0)?,
            Some(_) | None => return Err(lost()),
        };
        let info = self.local.place(&present, place)?;
        Ok(Reply::Placed { mode: info.mode, modified_ns: info.modified_ns })
    }
}

fn lost() -> Error {
    Error::busy("the connection to the virtual machine was interrupted").hint("write the file again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::files::{FileAttributes, FileChange, FilePath};

    fn path(text: &str) -> FilePath {
        FilePath::parse(text.as_bytes()).expect("a path")
    }

    fn files() -> (tempfile::TempDir, Files) {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("workspace")).expect("made");
        let files = Files::new(folder.path());
        (folder, files)
    }

    fn append(files: &mut Files, offset: u64, data: &[u8]) -> Result<Reply> {
        files.answer(FileRequest::Append { upload: 7, offset, most_bytes: 6 }, data)
    }

    fn place(files: &mut Files, bytes: u64) -> Result<Reply> {
        let place = Placement { path: path("d/f"), attributes: FileAttributes::default(), parents: true };
        files.answer(FileRequest::Place { upload: 7, bytes, place }, b"")
    }

    #[test]
    fn placed_file_is_complete() -> Result<()> {
        let (folder, mut files) = files();
        let read = || std::fs::read(folder.path().join("workspace/d/f")).ok();
        append(&mut files, 0, b"abc")?;
        append(&mut files, 3, b"def")?;
        assert_eq!(read(), None, "it has no name");
        assert!(matches!(place(&mut files, 6)?, Reply::Placed { mode: 0o644, .. }));
        assert_eq!(read().as_deref(), Some(&b"abcdef"[..]));
        assert!(place(&mut files, 6).is_err(), "it is placed once");
        place(&mut files, 0)?;
        assert_eq!(read().as_deref(), Some(&b""[..]));
        // Begun anew, it has nothing of what was there.
        append(&mut files, 0, b"abc")?;
        append(&mut files, 0, b"x")?;
        place(&mut files, 1)?;
        assert_eq!(read().as_deref(), Some(&b"x"[..]));
        Ok(())
    }

    #[test]
    fn interrupted_upload_is_refused() -> Result<()> {
        let (folder, mut files) = files();
        assert!(append(&mut files, 3, b"def").is_err(), "its beginning is lost");
        append(&mut files, 0, b"abc")?;
        assert!(append(&mut files, 2, b"x").is_err() && place(&mut files, 3).is_err(), "it was discarded");
        append(&mut files, 0, b"abc")?;
        files.discard_all();
        assert!(place(&mut files, 3).is_err());
        append(&mut files, 0, b"abc")?;
        assert!(place(&mut files, 4).is_err(), "an end is missing");
        append(&mut files, 0, b"abc")?;
        files.answer(FileRequest::Discard { upload: 7 }, b"")?;
        assert!(append(&mut files, 3, b"d").is_err());
        assert_eq!(append(&mut files, 0, b"seven b").err().map(|error| error.reason), Some("too_large".into()));
        assert_eq!(std::fs::read_dir(folder.path().join("workspace")).expect("listed").count(), 0);
        Ok(())
    }

    #[test]
    fn unfinished_files_are_bounded() -> Result<()> {
        let (_folder, mut files) = files();
        let mut begin = |upload| files.answer(FileRequest::Append { upload, offset: 0, most_bytes: 1 }, b"x");
        for upload in 0..limits::FILES_OPEN as u64 {
            begin(upload)?;
        }
        assert_eq!(begin(u64::MAX).err().map(|error| error.reason), Some("files_open".into()));
        begin(0).map(drop)
    }

    #[test]
    fn changes_stay_in_workspace() -> Result<()> {
        let (folder, mut files) = files();
        std::os::unix::fs::symlink(folder.path(), folder.path().join("workspace/out")).expect("made");
        let mut change = |change| files.answer(FileRequest::Change { change }, b"");
        change(FileChange::MakeDir { path: path("a/b"), mode: 0o700, parents: true })?;
        let led_out = change(FileChange::MakeDir { path: path("out/x"), mode: 0o700, parents: true });
        assert_eq!(led_out.err().map(|error| error.reason), Some("outside".into()));
        change(FileChange::Remove { path: path("a"), recursive: true })?;
        let names = |path| std::fs::read_dir(path).expect("listed").count();
        assert_eq!(names(folder.path().join("workspace")), 1, "the link");
        assert!(!folder.path().join("x").exists());
        Ok(())
    }
}
