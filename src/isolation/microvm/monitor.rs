//! What differs between virtual machine monitors: how a machine is started, stopped, saved and loaded.
//!
//! ```text
//!  start ─▶ begin ─▶ runs ◀── stop, go on ──▶ stopped ── save ─▶ files ── start, load ─▶ stopped
//!             QEMU: options, QMP (qemu.rs, qmp.rs)        Firecracker: its API (firecracker/)
//! ```
//!
//! Everything else is shared: images, disks, templates, seeding, the mirror of files, the handle.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};

use super::base::BaseTemplate;
use super::firecracker::{self, Machine};
use super::image::Image;
use super::qemu;
use super::qmp::Qmp;
use super::saved::{self, SavedFiles, SavedMemory};
use super::saved_pages::SavedPages;
use super::sockets::Sockets;
use super::template::{Kind, Template};
use super::vmm::Vmm;
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::ids::WorkerId;
use crate::core::limits;
use crate::isolation::process::launch::WorkerProcess;
use crate::sys::fs;

/// How a machine begins.
pub(super) enum Begin<'a> {
    /// It boots the image.
    Boot(&'a Image),
    /// It boots the image with its memory in a file, and is saved.
    Record { image: &'a Image, memory: &'a File, state: &'a File },
    /// It goes on from a template, once that is loaded.
    Restore { image: &'a Image, template: &'a Template },
    /// As a template, from the copy of a running machine.
    Copy { image: &'a Image, template: &'a Template },
    /// It goes on from a suspended machine, once that is loaded.
    Continue { image: &'a Image, state: &'a SavedFiles },
}

impl<'a> Begin<'a> {
    /// Whether it waits for a state.
    pub(super) fn is_loaded(&self) -> bool {
        matches!(self, Begin::Restore { .. } | Begin::Copy { .. } | Begin::Continue { .. })
    }

    /// Whether its guest had a daemon before, whose connections it has still to see end.
    pub(super) fn had_daemon(&self) -> bool {
        matches!(self, Begin::Copy { .. } | Begin::Continue { .. })
    }

    /// The file that its memory maps, which nothing writes, and the template of which it is.
    ///
    /// # Errors
    /// Those of opening.
    pub(super) fn base(&self) -> std::io::Result<Option<(File, Option<BaseTemplate>)>> {
        Ok(match self {
            Begin::Restore { template, .. } | Begin::Copy { template, .. } => {
                Some((template.memory()?, template.as_base()))
            }
            Begin::Continue { .. } => self.saved_pages()?.map(|saved| (saved.base, saved.template)),
            Begin::Boot(_) | Begin::Record { .. } => None,
        })
    }

    /// The pages that must be in its memory before it is loaded.
    ///
    /// # Errors
    /// Those of opening.
    pub(super) fn saved_pages(&self) -> std::io::Result<Option<SavedPages>> {
        match self {
            Begin::Continue { state: SavedFiles { memory: SavedMemory::Pages(pages), .. }, .. } => {
                pages.again().map(Some)
            }
            Begin::Continue { .. }
            | Begin::Boot(_)
            | Begin::Record { .. }
            | Begin::Restore { .. }
            | Begin::Copy { .. } => Ok(None),
        }
    }

    pub(super) fn image(&self) -> &'a Image {
        match self {
            Begin::Boot(image)
            | Begin::Record { image, .. }
            | Begin::Restore { image, .. }
            | Begin::Copy { image, .. }
            | Begin::Continue { image, .. } => image,
        }
    }
}

/// A machine to start.
pub(super) struct NewMachine<'a> {
    pub program: &'a Path,
    pub begin: Begin<'a>,
    pub kind: &'a Kind,
    pub disk: File,
    pub sockets: &'a Sockets,
    pub account: Option<(u32, u32)>,
    /// The place of its cgroup, where one is delegated.
    pub cgroup: Option<&'a Path>,
    pub durability: Durability,
    /// The folder in which it may be saved later, for a monitor that opens the files at its start.
    pub saved_in: Option<PathBuf>,
    /// Whether it ends when its process is dropped; else it outlives the daemon.
    pub is_temporary: bool,
}

/// Starts a machine's monitor.
///
/// # Errors
/// Those of opening, and of the start of the program.
pub(super) async fn start(new: NewMachine<'_>) -> Result<tokio::process::Child> {
    let (is_temporary, name) = (new.is_temporary, new.sockets.name().to_owned());
    let mut command = match new.kind.vmm() {
        Vmm::Qemu => qemu::command(new),
        Vmm::Firecracker => firecracker::command(new),
    }?;
    // Not the daemon's own: there a monitor could write what looks like the daemon's lines, without a bound.
    command.stderr(Stdio::piped());
    // The child reports when it is confined, which may take tens of milliseconds.
    let spawn = move || tokio::process::Command::from(command).kill_on_drop(is_temporary).spawn();
    let spawned = tokio::task::spawn_blocking(spawn).await.map_err(|error| Error::internal(error.to_string()))?;
    let mut child = spawned.map_err(|error| {
        saved::unless_short(&error, Error::unavailable(format!("a virtual machine cannot be started: {error}")))
    })?;
    if let Some(stderr) = child.stderr.take() {
        tokio::spawn(async move {
            report_words(stderr, |line| tracing::warn!(machine = %name.display(), "its monitor: {line}")).await;
        });
    }
    Ok(child)
}

/// Reports the first lines that a monitor writes to its error output, without control characters, then closes it: what the
/// monitor writes from then on fails.
async fn report_words(stderr: impl AsyncRead + Unpin, mut report: impl FnMut(&str)) {
    let mut lines = BufReader::new(stderr.take(limits::VM_MONITOR_WORDS_BYTES)).split(b'\n');
    while let Ok(Some(line)) = lines.next_segment().await {
        let printable: String = String::from_utf8_lossy(&line).chars().filter(|c| !c.is_control()).collect();
        report(&printable);
    }
}

/// The monitor of a machine.
pub(super) enum Monitor {
    Qemu(Qmp),
    Firecracker(Machine),
}

impl Monitor {
    /// Connects to a monitor.
    ///
    /// # Errors
    /// `unavailable` if it has ended, `deadline`.
    pub(super) async fn connect(sockets: &Sockets) -> Result<Monitor> {
        Ok(match sockets.vmm {
            Vmm::Qemu => Monitor::Qemu(Qmp::connect(&sockets.monitor).await?),
            Vmm::Firecracker => Monitor::Firecracker(Machine::new(&sockets.monitor)),
        })
    }

    /// Boots a machine whose monitor was started for that.
    ///
    /// # Errors
    /// Those of the monitor.
    pub(super) async fn boot(sockets: &Sockets, kind: &Kind, durability: Durability) -> Result<()> {
        match sockets.vmm {
            // By its options.
            Vmm::Qemu => Ok(()),
            Vmm::Firecracker => Machine::new(&sockets.monitor).boot(kind, durability).await,
        }
    }

    /// Loads the state into a machine that waits for it, and leaves it stopped.
    ///
    /// # Errors
    /// Those of the monitor; `unavailable` if the state does not fit.
    pub(super) async fn load(&mut self, kind: &Kind, within: Duration) -> Result<()> {
        match self {
            Monitor::Qemu(qmp) => qmp.load(qemu::STATE_URI, within).await,
            Monitor::Firecracker(machine) => machine.load(kind, within).await,
        }
    }

    /// Stops the machine's processors.
    ///
    /// # Errors
    /// Those of the monitor; `unavailable` if they run on.
    pub(super) async fn stop(&mut self) -> Result<()> {
        match self {
            Monitor::Qemu(qmp) => qmp.stop().await,
            Monitor::Firecracker(machine) => machine.pause().await,
        }
    }

    /// Starts the machine's processors.
    ///
    /// # Errors
    /// Those of the monitor.
    pub(super) async fn resume(&mut self) -> Result<()> {
        match self {
            Monitor::Qemu(qmp) => qmp.resume().await,
            Monitor::Firecracker(machine) => machine.resume().await,
        }
    }

    /// As [`Self::resume`], after the end of a save that is under way.
    ///
    /// # Errors
    /// Those of the monitor.
    pub(super) async fn go_on(&mut self) -> Result<()> {
        match self {
            Monitor::Qemu(qmp) => qmp.go_on().await,
            Monitor::Firecracker(machine) => machine.resume().await,
        }
    }

    /// Whether the machine's processors are stopped.
    ///
    /// # Errors
    /// Those of the monitor.
    pub(super) async fn is_stopped(&mut self) -> Result<bool> {
        match self {
            Monitor::Qemu(qmp) => qmp.is_stopped().await,
            // A former daemon may have ended while it was saved.
            Monitor::Firecracker(machine) => machine.is_paused_after_save().await,
        }
    }

    /// Whether the machine was stopped at a write for which the host's disk has no room.
    ///
    /// # Errors
    /// Those of the monitor.
    pub(super) async fn is_halted(&mut self) -> Result<bool> {
        match self {
            Monitor::Qemu(qmp) => qmp.is_halted().await,
            // It reports the failed write to its guest.
            Monitor::Firecracker(_) => Ok(false),
        }
    }

    /// Stops the machine and saves it into the template's files.
    ///
    /// # Errors
    /// Those of the monitor; `unavailable` with the reason if it cannot be saved.
    pub(super) async fn save_template(&mut self) -> Result<()> {
        match self {
            Monitor::Qemu(qmp) => qmp.save(qemu::STATE_URI).await,
            Monitor::Firecracker(machine) => {
                machine.pause().await?;
                machine.save(limits::VM_MEMORY).await
            }
        }
    }

    /// Saves a stopped machine with its whole memory in that folder, not sealed yet.
    ///
    /// # Errors
    /// Those of the monitor and of the file system.
    pub(super) async fn save_memory(&mut self, dir: &Path) -> Result<SavedFiles> {
        match self {
            Monitor::Qemu(qmp) => {
                let devices = blocking(dir, saved::create).await?;
                qmp.save_into(&devices, limits::VM_MEMORY).await?;
                Ok(SavedFiles { devices, memory: SavedMemory::InState })
            }
            Monitor::Firecracker(machine) => {
                blocking(dir, saved::check_prepared).await?;
                machine.save(limits::VM_MEMORY).await?;
                blocking(dir, saved::take_prepared).await
            }
        }
    }

    /// Asks the monitor to end once its files are written; whether it does.
    pub(super) async fn quit(&mut self) -> bool {
        match self {
            Monitor::Qemu(qmp) => qmp.run("quit", serde_json::Value::Null).await.is_ok(),
            // It has no such request, and has written its files when it answers.
            Monitor::Firecracker(_) => false,
        }
    }
}

async fn blocking<T: Send + 'static>(dir: &Path, act: fn(&Path) -> Result<T>) -> Result<T> {
    let dir = dir.to_owned();
    tokio::task::spawn_blocking(move || act(&dir)).await.map_err(|error| Error::internal(error.to_string()))?
}

/// The machine's name for `ps` and for a later daemon: it names the daemon's folder and the worker.
pub(super) fn machine_name(path: &Path) -> String {
    format!("ryokan {}", path.display()).replace(',', ",,")
}

/// The machine of a daemon with that folder of sockets, by its monitor's command line: an option of QEMU, the first word
/// of Firecracker's.
fn machine_of(line: &[u8], sockets: &Path) -> Option<(WorkerId, Vmm)> {
    let ours = machine_name(&sockets.join(""));
    let mut words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let first = words.next()?;
    if let Some(name) = first.strip_prefix(&ours) {
        return Some((name.strip_suffix(".machine")?.parse().ok()?, Vmm::Firecracker));
    }
    words.find(|word| word == "-name")?;
    Some((words.next()?.strip_prefix(&ours)?.strip_suffix(".control")?.parse().ok()?, Vmm::Qemu))
}

/// The monitors of this and of former daemons with that folder of sockets, by their names.
fn running(sockets: &Path) -> Vec<(WorkerId, Vmm, WorkerProcess)> {
    let named = |pid: u32| machine_of(&std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default(), sockets);
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if named(pid).is_none() {
            continue;
        }
        // Looked at again once the descriptor names the process: its number may have been reused.
        if let Ok(process) = WorkerProcess::find(pid)
            && let Some((worker, vmm)) = named(pid)
        {
            found.push((worker, vmm, process));
        }
    }
    found
}

/// Ends the monitors of a worker whose record names no running process, and waits for their end: a daemon that is killed
/// between the start of a monitor and its record leaves a monitor that waits for requests, with the kernel's disk.
///
/// # Errors
/// `deadline` if one has not ended; those of watching.
pub(super) async fn end_unrecorded(sockets: &Path, worker: WorkerId) -> Result<()> {
    let sockets = sockets.to_owned();
    let found = tokio::task::spawn_blocking(move || running(&sockets)).await;
    for (_, _, process) in
        found.map_err(|error| Error::internal(error.to_string()))?.into_iter().filter(|m| m.0 == worker)
    {
        tracing::info!(%worker, pid = process.pid, "ending a virtual machine that its daemon did not record");
        process.kill();
        let ended = tokio::time::timeout(limits::WORKER_STOP, process.ended()).await;
        ended
            .map_err(|_| Error::deadline("the killed virtual machine has not ended"))?
            .map_err(|error| Error::unavailable(format!("watch a virtual machine: {error}")))?;
    }
    Ok(())
}

/// Kills the machines of former daemons with that folder of sockets whose worker is not known: a stopped one does not
/// notice its daemon's end.
pub(super) fn kill_unknown(sockets: &Path, known: &[WorkerId]) {
    for (worker, vmm, process) in running(sockets).into_iter().filter(|(worker, ..)| !known.contains(worker)) {
        tracing::info!(%worker, pid = process.pid, "ending a virtual machine of a former daemon that no kernel has");
        process.kill();
        Sockets::new(sockets, &worker, vmm).unlink();
    }
    // Folders of machines that have ended; sockets of QEMU are swept with those of processes.
    for entry in std::fs::read_dir(sockets).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let worker = name.to_str().and_then(|name| name.strip_suffix(".machine")?.parse::<WorkerId>().ok());
        if worker.is_some_and(|worker| !known.contains(&worker)) {
            let _ = fs::remove_tree(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_machines_are_found() {
        let worker = WorkerId::from_bytes([7; 16]);
        let line = |folder: &str, vmm| {
            let name = machine_name(Sockets::new(Path::new(folder), &worker, vmm).name());
            let words = match vmm {
                Vmm::Qemu => vec!["qemu", "-name", &name, "-S"],
                Vmm::Firecracker => vec![&name, "--api-sock", "api"],
            };
            words.join("\0").into_bytes()
        };
        for vmm in [Vmm::Qemu, Vmm::Firecracker] {
            assert_eq!(machine_of(&line("/run/a,b", vmm), Path::new("/run/a,b")), Some((worker, vmm)));
            assert_eq!(machine_of(&line("/run/a/b", vmm), Path::new("/run/a")), None);
        }
        assert_eq!(machine_of(b"vi\0-name\0ryokan /run/a/x.control", Path::new("/run/a")), None);
        assert_eq!(machine_of(b"ryokan /run/a/x.machine\0", Path::new("/run/a")), None);
    }

    #[tokio::test]
    async fn monitor_words_are_bounded() {
        let forged = b"\x1b[2Jone\r\ntwo\n".iter().copied().chain(std::iter::repeat_n(b'x', 1 << 20));
        let (mut lines, flood) = (Vec::new(), forged.collect::<Vec<u8>>());
        report_words(&flood[..], |line| lines.push(line.to_owned())).await;
        assert_eq!((&*lines[0], &*lines[1], lines.len()), ("[2Jone", "two", 3));
        assert!(lines[2].len() < limits::VM_MONITOR_WORDS_BYTES as usize, "{}", lines[2].len());
    }

    #[test]
    fn unknown_folders_are_swept() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let [known, unknown] = [1, 2].map(|number| WorkerId::from_bytes([number; 16]));
        for worker in [known, unknown] {
            std::fs::create_dir(Sockets::new(folder.path(), &worker, Vmm::Firecracker).folder())?;
        }
        std::fs::create_dir(folder.path().join("x.machine"))?;
        kill_unknown(folder.path(), &[known]);
        let exists = |worker| Sockets::new(folder.path(), &worker, Vmm::Firecracker).folder().exists();
        assert_eq!((exists(known), exists(unknown), folder.path().join("x.machine").exists()), (true, false, true));
        Ok(())
    }
}
