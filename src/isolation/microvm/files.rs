//! Access to the files of a kernel with this isolation, through its mirror.
//!
//! Reading brings the mirror up to date first. Changes need a stopped kernel: the transfer into a running guest makes its
//! whole tree equal to the mirror and would undo what code inside writes meanwhile.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use super::DISK;
use super::machine::Machines;
use crate::core::error::{Error, Result};
use crate::core::files::{FileChange, FileInfo, FilePath};
use crate::isolation::{FileAccess, FileListing, FileWatch, OpenFile, PendingFile};

pub(super) struct MirroredFiles {
    pub mirror: Rc<dyn FileAccess>,
    pub machines: Machines,
    pub dir: PathBuf,
}

impl MirroredFiles {
    async fn pull(&self) -> Result<()> {
        let Some(machine) = self.machines.find(&self.dir) else { return self.is_mirror_current() };
        // One thread for all readers of a kernel, until its transfer has ended.
        let pulling = Arc::clone(&machine.pull_lock).lock_owned().await;
        if self.machines.find(&self.dir).is_none() {
            return self.is_mirror_current();
        }
        let pulled = tokio::task::spawn_blocking(move || {
            let _pulling = pulling;
            machine.pull()
        });
        let pulled = pulled.await;
        pulled.map_err(|error| Error::internal(error.to_string()))?
    }

    fn is_mirror_current(&self) -> Result<()> {
        if !self.dir.join(DISK).exists() {
            return Ok(());
        }
        Err(Error::unavailable("the kernel's files are on the disk of a virtual machine that has ended")
            .hint("start the kernel, for example with ryokan exec"))
    }

    fn may_change(&self) -> Result<()> {
        if self.machines.find(&self.dir).is_some() {
            return Err(Error::unsupported("files of a running virtual machine are changed by code inside only")
                .reason("microvm")
                .hint("stop the kernel first, or change them by an execution"));
        }
        self.is_mirror_current()
    }
}

#[async_trait::async_trait(?Send)]
impl FileAccess for MirroredFiles {
    async fn stat(&self, path: FilePath, follow: bool) -> Result<FileInfo> {
        self.pull().await?;
        self.mirror.stat(path, follow).await
    }

    async fn list(&self, path: FilePath) -> Result<Box<dyn FileListing>> {
        self.pull().await?;
        self.mirror.list(path).await
    }

    async fn open(&self, path: FilePath) -> Result<(Rc<dyn OpenFile>, FileInfo)> {
        self.pull().await?;
        self.mirror.open(path).await
    }

    async fn watch(&self, _path: FilePath, _is_recursive: bool) -> Result<Box<dyn FileWatch>> {
        Err(Error::unsupported("the files of a virtual machine cannot be watched from outside")
            .reason("microvm")
            .hint("watch them by code inside"))
    }

    async fn begin_write(&self, most_bytes: u64) -> Result<Box<dyn PendingFile>> {
        self.may_change()?;
        self.mirror.begin_write(most_bytes).await
    }

    async fn used_bytes(&self) -> Result<u64> {
        self.mirror.used_bytes().await
    }

    async fn change(&self, change: FileChange) -> Result<()> {
        self.may_change()?;
        self.mirror.change(change).await
    }
}
