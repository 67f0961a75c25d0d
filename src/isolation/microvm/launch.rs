//! Starts a machine for a worker: from its template, or by booting the image, and the worker in it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::base;
use super::copy::MachineCopy;
use super::disk;
use super::document;
use super::driver::MicrovmDriver;
use super::handle::Record;
use super::image::Image;
use super::installed;
use super::machine::Machine;
use super::monitor::{self, Begin, Monitor, NewMachine};
use super::saved::{self, Saved};
use super::seed::{self, Renewal};
use super::sockets::Sockets;
use super::template::Kind;
use super::vmm::Vmm;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::WorkerId;
use crate::core::limits;
use crate::isolation::process::handle::ProcessRecord;
use crate::isolation::process::launch::WorkerProcess;
use crate::isolation::{LaunchNote, NewWorker, Recorder};
use crate::link::machine::Request;
use crate::sys::fault;

/// Time for a continued guest to learn that its ports were closed.
pub(super) const RECONNECTION: Duration = Duration::from_millis(100);

/// A machine whose worker serves.
pub(super) struct Serving {
    pub process: WorkerProcess,
    /// The boot id of another machine of its template; empty if it was booted.
    pub shared_boot_id: String,
    pub notes: Vec<LaunchNote>,
}

/// What is the same in each attempt to start a machine.
struct Attempt<'a> {
    worker: WorkerId,
    kind: &'a Kind,
    disk: &'a Path,
    machine: &'a Arc<Machine>,
}

impl MicrovmDriver {
    /// Starts a machine and its worker. On failure the machine has ended.
    ///
    /// # Errors
    /// Those of the image, the disk, `record`, the monitor and the guest.
    pub(super) async fn start(
        &self,
        new: &NewWorker<'_>,
        about: &mut Record,
        machine: &Arc<Machine>,
        saved: Option<Saved>,
        record: &Recorder<'_>,
    ) -> Result<Serving> {
        let (worker, folder, limits) = (new.identity.worker, &machine.folder, &new.shape.limits);
        let image = self.images.verified(&about.image).await?;
        let is_new = !folder.has_disk();
        let disk = if is_new {
            disk::make_disk(&folder.new_disk(), disk::disk_bytes(limits.workspace_bytes)).await?;
            folder.new_disk()
        } else {
            folder.disk()
        };
        let found = disk.metadata().map_err(|error| Error::unavailable(format!("{}: {error}", disk.display())))?;
        let choice = match &saved {
            // It continues with what it ran with, or is refused.
            Some(saved) => self.vmms.choose_again(&saved.kind).await?,
            None => self.vmms.choose(&image).await?,
        };
        let mut kind = Kind::new(&image, new.shape, choice, found.len());
        self.set_kind(&kind, new, about, machine);
        record(about.write()?).await?;
        let attempt = Attempt { worker, kind: &kind, disk: &disk, machine };
        if let Some(saved) = saved {
            let process = self.go_on(&attempt, &image, saved, about, record).await?;
            return Ok(Serving { process, shared_boot_id: String::new(), notes: Vec::new() });
        }
        let (mut notes, mut shared_boot_id) = (Vec::new(), String::new());
        let template = match new.is_warm {
            true => self.templates.find_or_build(&kind, &image).await,
            false => self.templates.find(&kind, &image).await,
        };
        let restored = match &template {
            Ok(template) => {
                let begin = Begin::Restore { image: &image, template };
                match self.attempt(&attempt, begin, &template.tested_boot_id, about, record).await? {
                    Ok(process) => {
                        shared_boot_id.clone_from(&template.tested_boot_id);
                        Ok(process)
                    }
                    Err(error) => Err(self.templates.note_failure(&kind, template, &error)),
                }
            }
            Err(why) => Err(why.clone()),
        };
        let is_restored = restored.is_ok();
        let process = match restored {
            Ok(process) => process,
            Err(why) => {
                notes.push(LaunchNote { kind: "cold_boot", detail: why });
                let mut booted = self.attempt(&attempt, Begin::Boot(&image), "", about, record).await?;
                while let Err(error) = &booted
                    && let Some(given_up) = self.vmms.give_up(&kind, error)
                {
                    notes.push(LaunchNote { kind: given_up, detail: error.message.clone() });
                    about.sockets.unlink();
                    kind = Kind::new(&image, new.shape, self.vmms.choose(&image).await?, found.len());
                    self.set_kind(&kind, new, about, machine);
                    let attempt = Attempt { worker, kind: &kind, disk: &disk, machine };
                    booted = self.attempt(&attempt, Begin::Boot(&image), "", about, record).await?;
                }
                booted.inspect_err(|_| self.failed(new, machine))?
            }
        };
        let is_prepared = is_restored && kind.prepared.is_some();
        let launch = match is_prepared {
            true => document::assignment(new)?,
            false => document::whole(new, &image)?,
        };
        let (filled, fills) = (Arc::clone(machine), is_new && !new.is_warm);
        let started = until_ended(&process, move || fill_and_start(&filled, fills, &launch)).await;
        if let Err(error) = started {
            self.failed(new, machine);
            // What the kernel's disk causes is no fault of the template.
            let is_disks = matches!(error.code, ErrorCode::Corrupt | ErrorCode::Busy);
            if let Some(template) = template.as_ref().ok().filter(|_| is_prepared && !is_disks) {
                self.templates.note_failure(&kind, template, &error);
            }
            end(&process).await;
            return Err(error);
        }
        match &template {
            Ok(template) if is_restored => self.templates.served(template),
            Ok(_) => {}
            Err(_) => self.templates.build_soon(kind, image),
        }
        Ok(Serving { process, shared_boot_id, notes })
    }

    /// Starts a machine with the copied memory of another, and a copy of its disk, or with what is installed in its folder.
    /// Its worker is the other's until it is bound.
    ///
    /// # Errors
    /// Those of the disk, `record`, the monitor and the guest; `unavailable` with the reason `seeding` if the guest does not
    /// confirm that it is seeded. The machine has ended then.
    pub(super) async fn start_copy(
        &self,
        worker: WorkerId,
        copy: &MachineCopy,
        about: &mut Record,
        machine: &Arc<Machine>,
        record: &Recorder<'_>,
    ) -> Result<Serving> {
        let kind = copy.kind();
        let image = self.images.verified(&kind.image).await?;
        if self.vmms.version(kind.vmm()).await? != kind.vmm {
            return Err(
                Error::refused("the monitor was exchanged since the machine was started").reason("vmm_mismatch")
            );
        }
        about.kind = Some(kind.clone());
        record(about.write()?).await?;
        let disk = machine.folder.disk();
        copy.make_disk(&disk, self.settings.durability).await?;
        let attempt = Attempt { worker, kind, disk: &disk, machine };
        let begin = Begin::Copy { image: &image, template: copy.template() };
        let process = self.attempt(&attempt, begin, copy.boot_id(), about, record).await??;
        Ok(Serving { process, shared_boot_id: String::new(), notes: Vec::new() })
    }

    /// Continues a suspended machine with its worker.
    async fn go_on(
        &self,
        attempt: &Attempt<'_>,
        image: &Image,
        saved: Saved,
        about: &mut Record,
        record: &Recorder<'_>,
    ) -> Result<WorkerProcess> {
        let (dir, disk, kind) = (attempt.machine.folder.dir.clone(), attempt.disk.to_owned(), attempt.kind.clone());
        let host = self.settings.host;
        let opened = tokio::task::spawn_blocking(move || saved.open(&dir, &disk, host, &kind)).await;
        let state = opened.map_err(|error| Error::internal(error.to_string()))??;
        let begin = Begin::Continue { image, state: &state };
        self.attempt(attempt, begin, "", about, record).await?
    }

    /// Decides what the machine of a worker is.
    fn set_kind(&self, kind: &Kind, new: &NewWorker<'_>, about: &mut Record, machine: &Machine) {
        about.sockets = Sockets::new(&self.settings.sockets, &new.identity.worker, kind.vmm());
        about.kind = Some(kind.clone());
        machine.client().redirect(about.sockets.control());
    }

    /// Notes that a kernel's machine did not serve.
    fn failed(&self, new: &NewWorker<'_>, machine: &Machine) {
        if !new.is_warm {
            self.machines.note_failure(&machine.folder.dir);
        }
    }

    /// Starts the monitor and seeds its guest. The inner error is the machine's; it has ended then.
    async fn attempt(
        &self,
        attempt: &Attempt<'_>,
        begin: Begin<'_>,
        shared_boot_id: &str,
        about: &mut Record,
        record: &Recorder<'_>,
    ) -> Result<Result<WorkerProcess>> {
        let Attempt { worker, kind, disk, machine } = *attempt;
        let (is_loaded, had_daemon) = (begin.is_loaded(), begin.had_daemon());
        let is_copy = matches!(begin, Begin::Copy { .. });
        let renewal = match &begin {
            Begin::Copy { .. } => Renewal::Renew,
            Begin::Restore { .. } => kind.renewal(),
            _ => Renewal::Keep,
        };
        let (is_continued, dir) = (matches!(begin, Begin::Continue { .. }), machine.folder.dir.clone());
        let unopened = |error: std::io::Error| {
            saved::unless_short(&error, Error::unavailable(format!("a machine's saved memory: {error}")))
        };
        let pages = begin.saved_pages().map_err(unopened)?;
        keep_base(&dir, &begin, about)?;
        let disk = disk::open_disk(disk)?;
        let program = &self.vmms.program(kind.vmm())?;
        let (account, durability, sockets) = (self.settings.account, self.settings.durability, &about.sockets);
        let (is_temporary, saved_in) = (false, Some(dir.clone()));
        let cgroup = self.cgroups.as_ref().map(|cgroups| cgroups.of(worker));
        let cgroup = cgroup.as_deref();
        let mut child = monitor::start(NewMachine {
            program,
            begin,
            kind,
            disk,
            sockets,
            account,
            cgroup,
            durability,
            saved_in,
            is_temporary,
        })
        .await?;
        let pid = child.id().ok_or_else(|| Error::unavailable("the virtual machine ended at once"))?;
        let process = WorkerProcess::find(pid)
            .map_err(|error| saved::unless_short(&error, Error::unavailable(format!("find the monitor: {error}"))))?;
        let identified = ProcessRecord::of(pid);
        // Reaps it.
        tokio::task::spawn_local(async move { child.wait().await });
        let recorded = async {
            fault::point("machine.started.record").map_err(|error| Error::unavailable(error.to_string()))?;
            about.process =
                Some(identified.map_err(|error| Error::unavailable(format!("identify the monitor: {error}")))?);
            record(about.write()?).await
        };
        if let Err(error) = recorded.await {
            end(&process).await;
            return Err(error);
        }
        let (seeded, shared) = (Arc::clone(machine), shared_boot_id.to_owned());
        let begun = async {
            if !is_loaded {
                return Monitor::boot(&about.sockets, kind, durability).await;
            }
            let mut monitor = Monitor::connect(&about.sockets).await?;
            let within = if is_continued { limits::VM_MEMORY } else { limits::VM_CALL };
            if let Some(pages) = pages {
                pages.load(&process, kind.memory_bytes()).await?;
            }
            monitor.load(kind, within).await?;
            // From here on the disk changes.
            if is_continued {
                saved::remove(&dir)?;
            }
            if is_copy {
                fault::point("machine.installed.start").map_err(|error| Error::unavailable(error.to_string()))?;
                installed::begin(&dir)?;
            }
            monitor.resume().await
        };
        let raised = async {
            tokio::select! {
                begun = begun => begun?,
                _ = process.ended() => return Err(Error::unavailable("the virtual machine ended while it started")),
            }
            // A guest that continues has still to notice that its former connections ended.
            let boot_time = kind.boot_time();
            let pause = if had_daemon { RECONNECTION } else { Duration::ZERO };
            tokio::time::sleep(pause).await;
            until_ended(&process, move || {
                let mut client = seeded.client();
                match is_loaded {
                    true => client.open(limits::VM_CALL)?,
                    false => client.open_booting(boot_time)?,
                }
                if is_copy {
                    let unconfirmed = |error| Error::unavailable(format!("seeding: {error}")).reason("seeding");
                    fault::point("machine.copy.seed").map_err(unconfirmed)?;
                }
                seed::seed(&mut client, &shared, renewal).map(drop)
            })
            .await
        };
        match raised.await {
            Ok(()) => Ok(Ok(process)),
            Err(error) => {
                end(&process).await;
                Ok(Err(error))
            }
        }
    }
}

/// Keeps the file that a machine's memory will map as long as the machine runs: its template may lose it meanwhile.
fn keep_base(dir: &Path, begin: &Begin<'_>, about: &mut Record) -> Result<()> {
    let failed = |error: std::io::Error| Error::unavailable(format!("the file beneath a machine's memory: {error}"));
    base::unpin(dir).map_err(failed)?;
    about.base = None;
    let is_mapped = about.kind.as_ref().is_some_and(|kind| kind.vmm() == Vmm::Qemu);
    let Some((file, template)) = begin.base().map_err(failed)?.filter(|_| is_mapped) else { return Ok(()) };
    about.base = template;
    // Without the name a suspension writes all memory, and says so.
    if let Err(error) = base::pin(dir, &file) {
        tracing::warn!(%error, dir = %dir.display(), "the file beneath a machine's memory is not kept");
    }
    Ok(())
}

async fn end(process: &WorkerProcess) {
    process.kill();
    let _ = process.ended().await;
}

/// Uses a machine's guest on another thread until the machine ends.
async fn until_ended(process: &WorkerProcess, act: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let mut acting = tokio::task::spawn_blocking(act);
    tokio::select! {
        done = &mut acting => done.map_err(|error| Error::internal(error.to_string()))?,
        _ = process.ended() => {
            // It fails soon, and keeps no disk of a later machine.
            let _ = acting.await;
            Err(Error::unavailable("the virtual machine ended while it started"))
        }
    }
}

/// Fills a machine and starts its worker. Blocks.
fn fill_and_start(machine: &Machine, fills: bool, launch: &[u8]) -> Result<()> {
    machine.client().tell(&Request::Mount, &[])?;
    if fills {
        machine.push()?;
        machine.push_state()?;
        machine.client().tell(&Request::Sync, &[])?;
        machine.folder.keep_disk()?;
    }
    let within = limits::WORKER_START + limits::VM_CALL;
    let (reply, _) = machine.client().call(&Request::Start, launch, within)?;
    document::started(reply)
}
