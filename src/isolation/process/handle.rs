//! A handle to a worker that is a process of this host.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::launch::WorkerProcess;
use crate::core::error::{Error, Result};
use crate::core::ids::WorkerId;
use crate::isolation::cgroups::{Cgroups, remove_cgroup};
use crate::isolation::{BoundSources, HostMount, KernelHome, WorkerHandle, WorkerRecord};
use crate::link::binding::{BoundFolder, BoundMount, BoundSource};
use crate::link::connector::unix;
use crate::link::host::WorkerLink;
use crate::sandbox::{Owners, RunAs};
use crate::sys;

/// The record of a worker, for a later daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The private socket.
    pub socket: PathBuf,
    /// Init's process; `None` before the start.
    pub process: Option<ProcessRecord>,
    /// The account of its processes, in a daemon that is root.
    pub run_as: Option<RunAs>,
}

/// Identifies a process even if its number is reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::isolation) struct ProcessRecord {
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`, clock ticks since boot.
    pub start_ticks: u64,
}

impl ProcessRecord {
    /// Records a running process.
    ///
    /// # Errors
    /// If `/proc` does not show the process.
    pub(in crate::isolation) fn of(pid: u32) -> io::Result<ProcessRecord> {
        Ok(ProcessRecord { pid, start_ticks: sys::process::start_ticks(pid)? })
    }

    /// Finds the recorded process; `None` if it has ended.
    ///
    /// # Errors
    /// If the process may be running but cannot be opened or identified.
    pub(in crate::isolation) fn find(self) -> io::Result<Option<WorkerProcess>> {
        // Opened before the start time is read, so that the descriptor refers to the recorded process.
        let opened = WorkerProcess::find(self.pid);
        let start_ticks = sys::process::start_ticks(self.pid);
        let running = |process: WorkerProcess| match process.has_ended()? {
            true => Err(io::Error::from(Errno::ESRCH)),
            false => Ok(process),
        };
        self.identify(opened.and_then(running), start_ticks)
    }

    fn identify<P>(self, opened: io::Result<P>, start_ticks: io::Result<u64>) -> io::Result<Option<P>> {
        match (opened, start_ticks) {
            (Err(error), _) if error.raw_os_error() == Some(Errno::ESRCH as i32) => Ok(None),
            (_, Ok(ticks)) if ticks != self.start_ticks => Ok(None),
            (Ok(process), Ok(_)) => Ok(Some(process)),
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    }
}

impl Record {
    pub(super) fn read(record: &str) -> Result<Record> {
        serde_json::from_str(record).map_err(|error| Error::corrupt(format!("a worker's record is damaged: {error}")))
    }

    pub(super) fn write(&self) -> Result<WorkerRecord> {
        serde_json::to_string(self).map_err(|error| Error::internal(error.to_string()))
    }
}

/// State shared by a driver's handles.
pub(super) struct Shared {
    pub cgroups: Option<Cgroups>,
    pub owners: Owners,
    /// Paths whose owner is mapped to the user of root's kernels.
    pub mapped_paths: Vec<PathBuf>,
}

impl Shared {
    /// The account to which the owner of a host path is mapped; `None` if the worker opens it with its own rights.
    pub(super) fn mapping(&self, run_as: Option<RunAs>, source: &Path) -> Option<RunAs> {
        let is_named = self.mapped_paths.iter().any(|path| source.starts_with(path));
        run_as.filter(|run_as| run_as.map_root && is_named)
    }

    /// Removes leftovers of an ended worker. A worker unlinks its sockets itself, unless it was killed.
    pub(super) async fn clean_up(&self, worker: WorkerId, socket: &Path) {
        for path in [socket.to_owned(), unix::descriptor_path(socket)] {
            let _ = std::fs::remove_file(path);
        }
        if let Some(cgroups) = &self.cgroups {
            remove_cgroup(&cgroups.of(worker)).await;
        }
    }
}

/// A worker's init, watched through a descriptor.
pub(super) struct ProcessHandle {
    pub id: WorkerId,
    pub process: WorkerProcess,
    pub record: Record,
    /// The encoded record in the catalog.
    pub written: WorkerRecord,
    pub shared: Rc<Shared>,
}

impl ProcessHandle {
    /// Returns a file or folder as a detached mount, with its owner's ids mapped to the worker's user.
    fn mapped(&self, path: &Path, run_as: RunAs) -> Result<OwnedFd> {
        Ok(self.shared.owners.mapped(path, run_as)?)
    }

    fn mapping(&self, source: &Path) -> Option<RunAs> {
        self.shared.mapping(self.record.run_as, source)
    }

    async fn source(&self, link: &WorkerLink, path: &Path, run_as: Option<RunAs>) -> Result<BoundSource> {
        let token = match run_as {
            Some(run_as) => link.pass_descriptor(self.mapped(path, run_as)?).await?,
            None => 0,
        };
        Ok(BoundSource { path: path.to_owned(), token })
    }
}

#[async_trait::async_trait(?Send)]
impl WorkerHandle for ProcessHandle {
    fn id(&self) -> WorkerId {
        self.id
    }

    fn record(&self) -> WorkerRecord {
        self.written.clone()
    }

    fn process_id(&self) -> Option<u32> {
        Some(self.process.pid)
    }

    fn kill(&self) {
        self.process.kill();
    }

    async fn exited(&self) {
        if let Err(error) = self.process.ended().await {
            tracing::warn!(worker = %self.id, %error, "a worker's process cannot be watched");
        }
    }

    async fn clean_up(&self) {
        self.shared.clean_up(self.id, &self.record.socket).await;
    }

    async fn bind_sources(
        &self,
        link: &WorkerLink,
        home: Option<&KernelHome>,
        mounts: &[HostMount],
    ) -> Result<BoundSources> {
        let mut bound = BoundSources::default();
        if let Some(KernelHome { dir, own_workspace, shared_workspace, .. }) = home {
            let own = [Some(dir.as_path()), shared_workspace.as_deref()].into_iter().flatten();
            bound.protected = own.filter_map(|folder| folder.canonicalize().ok()).collect();
            let workspace = match shared_workspace {
                Some(shared) => Some(self.source(link, shared, self.record.run_as).await?),
                None => None,
            };
            let dir = self.source(link, dir, self.record.run_as).await?;
            bound.folder = Some(BoundFolder { dir, own_workspace: own_workspace.clone(), workspace });
        }
        for mount in mounts {
            let source = self.source(link, &mount.source, self.mapping(&mount.source)).await?;
            bound.mounts.push(BoundMount { inside: mount.inside.clone(), source, writable: mount.writable });
        }
        Ok(bound)
    }

    async fn attach_mount(&self, link: &WorkerLink, mount: &HostMount) -> Result<()> {
        let detached = self.mapping(&mount.source).map(|run_as| self.mapped(&mount.source, run_as)).transpose()?;
        link.bind(&mount.inside, &mount.source, mount.writable, detached).await
    }

    async fn detach_mount(&self, link: &WorkerLink, inside: &Path) -> Result<()> {
        link.unbind(inside).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDED: ProcessRecord = ProcessRecord { pid: 7, start_ticks: 100 };

    #[test]
    fn only_proven_end_counts() {
        let error = |errno: Errno| io::Error::from(errno);
        let identify = |opened, ticks| RECORDED.identify(opened, ticks).map_err(|error| error.raw_os_error());
        assert_eq!(identify(Ok(()), Ok(100)), Ok(Some(())));
        assert_eq!(identify(Ok(()), Ok(101)), Ok(None), "another process has the number");
        assert_eq!(identify(Err(error(Errno::ESRCH)), Err(error(Errno::EMFILE))), Ok(None));
        // The number is now that of a thread.
        assert_eq!(identify(Err(error(Errno::EINVAL)), Ok(101)), Ok(None));
        for (opened, ticks) in [
            (Err(error(Errno::EMFILE)), Ok(100)),
            (Ok(()), Err(error(Errno::EMFILE))),
            (Err(error(Errno::EMFILE)), Err(error(Errno::ENOENT))),
        ] {
            assert_eq!(identify(opened, ticks), Err(Some(Errno::EMFILE as i32)));
        }
        assert!(identify(Ok(()), Err(error(Errno::ENOENT))).is_err(), "a hidden process may be running");
    }

    #[test]
    fn unreaped_process_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let recorded = ProcessRecord::of(child.id()).expect("shown by /proc");
        assert_eq!(recorded.find().expect("found").map(|process| process.pid), Some(child.id()));
        let other = ProcessRecord { start_ticks: recorded.start_ticks + 1, ..recorded };
        assert!(other.find().expect("known").is_none());
        let process = WorkerProcess::find(child.id()).expect("running");
        child.kill().expect("killed");
        while !process.has_ended().expect("polled") {
            std::thread::yield_now();
        }
        assert!(recorded.find().expect("known").is_none(), "ended, not reaped");
        child.wait().expect("reaped");
        assert!(recorded.find().expect("known").is_none());
    }
}
