//! Access to a kernel's files from outside, wherever they are.
//!
//! Process isolation implements it for a directory of this host, microVM isolation for the mirror of the guest's files.

use std::rc::Rc;

use crate::core::error::Result;
use crate::core::files::{FileChange, FileEvent, FileInfo, FilePath, Placement};

/// The files of one kernel. Errors are those of [`FileError`](crate::core::files::FileError), or of the way to the files.
#[async_trait::async_trait(?Send)]
pub trait FileAccess {
    /// The attributes of a file; with `follow`, of what a link leads to.
    async fn stat(&self, path: FilePath, follow: bool) -> Result<FileInfo>;

    /// Opens a directory, to list its entries.
    async fn list(&self, path: FilePath) -> Result<Box<dyn FileListing>>;

    /// Opens a regular file.
    async fn open(&self, path: FilePath) -> Result<(Rc<dyn OpenFile>, FileInfo)>;

    /// Watches a directory, and with `is_recursive` those below it.
    async fn watch(&self, path: FilePath, is_recursive: bool) -> Result<Box<dyn FileWatch>>;

    /// Begins a file of at most `most_bytes`. It appears with [`PendingFile::place`]; dropped before, it leaves nothing.
    async fn begin_write(&self, most_bytes: u64) -> Result<Box<dyn PendingFile>>;

    /// The bytes that the files take on their device. Links are not followed.
    async fn used_bytes(&self) -> Result<u64>;

    /// Applies a change. The caller keeps captures and restores away meanwhile.
    async fn change(&self, change: FileChange) -> Result<()>;
}

/// An open directory.
#[async_trait::async_trait(?Send)]
pub trait FileListing {
    /// The next entries, a bounded number; none at the end.
    async fn next_page(&mut self) -> Result<Vec<FileInfo>>;
}

/// A watched directory.
#[async_trait::async_trait(?Send)]
pub trait FileWatch {
    /// Waits for events, and returns a bounded number of them. After `ended` there are none.
    async fn next(&mut self) -> Result<Vec<FileEvent>>;
}

/// An open file.
#[async_trait::async_trait(?Send)]
pub trait OpenFile {
    /// Reads at most `most` bytes; fewer only at the end.
    async fn read(&self, from: u64, most: usize) -> Result<Vec<u8>>;
}

/// A file that is being written.
#[async_trait::async_trait(?Send)]
pub trait PendingFile {
    /// Appends to it. After an error or a dropped call it cannot be used.
    async fn write(&mut self, data: Vec<u8>) -> Result<()>;

    /// Makes it appear, complete. The caller keeps captures and restores away meanwhile.
    async fn place(&mut self, place: Placement) -> Result<FileInfo>;
}
