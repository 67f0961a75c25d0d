//! Access to files in a directory of this host, on blocking threads.

use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::core::error::{Error, Result};
use crate::core::files::{FileChange, FileEvent, FileInfo, FilePath, Placement};
use crate::core::limits;
use crate::isolation::{FileAccess, FileListing, FileWatch, OpenFile, PendingFile};
use crate::sys::watched::{self, Watched};
use crate::workspace::{Listing, LocalFiles, NewFile, Watch};

/// The files of a kernel on this host.
pub(super) struct HostFiles(pub LocalFiles);

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Error::internal(error.to_string()))?
}

#[async_trait::async_trait(?Send)]
impl FileAccess for HostFiles {
    async fn stat(&self, path: FilePath, follow: bool) -> Result<FileInfo> {
        let files = self.0.clone();
        blocking(move || files.stat(&path, follow)).await
    }

    async fn list(&self, path: FilePath) -> Result<Box<dyn FileListing>> {
        let files = self.0.clone();
        let listing = blocking(move || files.list(&path)).await?;
        Ok(Box::new(HostListing(Some(listing))))
    }

    async fn open(&self, path: FilePath) -> Result<(Rc<dyn OpenFile>, FileInfo)> {
        let files = self.0.clone();
        let (file, info) = blocking(move || files.open(&path)).await?;
        Ok((Rc::new(HostFile(Arc::new(file))), info))
    }

    async fn watch(&self, path: FilePath, is_recursive: bool) -> Result<Box<dyn FileWatch>> {
        let files = self.0.clone();
        let watch = blocking(move || Watch::open(files, path, is_recursive)).await?;
        let failed = |error: std::io::Error| Error::unavailable(format!("the watch cannot be awaited: {error}"));
        let ready = watch.readiness().and_then(|fd| watched::watch(fd, Interest::READABLE)).map_err(failed)?;
        Ok(Box::new(HostWatch { watch: Some(watch), ready }))
    }

    async fn begin_write(&self, most_bytes: u64) -> Result<Box<dyn PendingFile>> {
        let files = self.0.clone();
        let new = blocking(move || files.begin_write(most_bytes)).await?;
        Ok(Box::new(HostNewFile { files: self.0.clone(), new: Some(new) }))
    }

    async fn used_bytes(&self) -> Result<u64> {
        let files = self.0.clone();
        blocking(move || files.used_bytes()).await
    }

    async fn change(&self, change: FileChange) -> Result<()> {
        let files = self.0.clone();
        blocking(move || files.change(&change)).await
    }
}

struct HostListing(Option<Listing>);

#[async_trait::async_trait(?Send)]
impl FileListing for HostListing {
    async fn next_page(&mut self) -> Result<Vec<FileInfo>> {
        let Some(mut listing) = self.0.take() else { return Ok(Vec::new()) };
        let (listing, page) = blocking(move || listing.next_page().map(|page| (listing, page))).await?;
        self.0 = Some(listing);
        Ok(page)
    }
}

struct HostWatch {
    /// `None` during a call, and after a failed or dropped one.
    watch: Option<Watch>,
    ready: AsyncFd<Watched>,
}

#[async_trait::async_trait(?Send)]
impl FileWatch for HostWatch {
    async fn next(&mut self) -> Result<Vec<FileEvent>> {
        loop {
            let has_more = self.watch.as_ref().is_some_and(Watch::has_more);
            // What the queue does not report is looked for from time to time.
            let ready = tokio::time::timeout(limits::FILE_WATCH_CHECK, self.ready.readable());
            if !has_more && let Ok(Ok(mut ready)) = ready.await {
                ready.clear_ready();
            }
            let Some(mut watch) = self.watch.take() else { return Ok(Vec::new()) };
            let (watch, events) = blocking(move || watch.take().map(|events| (watch, events))).await?;
            self.watch = Some(watch);
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }
}

struct HostFile(Arc<File>);

#[async_trait::async_trait(?Send)]
impl OpenFile for HostFile {
    async fn read(&self, from: u64, most: usize) -> Result<Vec<u8>> {
        let file = Arc::clone(&self.0);
        blocking(move || LocalFiles::read(&file, from, most)).await
    }
}

struct HostNewFile {
    files: LocalFiles,
    /// `None` during a call, and after a failed or dropped one.
    new: Option<NewFile>,
}

impl HostNewFile {
    fn take(&mut self) -> Result<NewFile> {
        self.new.take().ok_or_else(|| Error::conflict("this file is placed, or writing it has failed"))
    }
}

#[async_trait::async_trait(?Send)]
impl PendingFile for HostNewFile {
    async fn write(&mut self, data: Vec<u8>) -> Result<()> {
        let mut new = self.take()?;
        self.new = Some(blocking(move || new.write(&data).map(|()| new)).await?);
        Ok(())
    }

    async fn place(&mut self, place: Placement) -> Result<FileInfo> {
        let (files, new) = (self.files.clone(), self.take()?);
        blocking(move || files.place(&new, &place)).await
    }
}
