//! Builds a template: a machine boots, warms up, stops and is saved; then another one is started from it.
//!
//! ```text
//!  boot, warm up or prepare, stop, save ─▶ ram, state ─ seal ─▶ test start ─▶ copies by pages? ─▶ template.json
//! ```
//!
//! The machine never had a kernel. A worker in it has no identity, no secret and no kernel's folder. Nothing here knows the
//! templates that are in use; `templates.rs` decides what is built, and `template_folder.rs` gives it its name.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::client::Client;
use super::copy::{Source, create};
use super::description::{Made, MadeFrom, write_description};
use super::disk;
use super::document;
use super::handle::blocking;
use super::image::Image;
use super::launch::RECONNECTION;
use super::monitor::{self, Begin, Monitor, NewMachine};
use super::pages::MappedMemory;
use super::qemu;
use super::qmp::Qmp;
use super::saved::{SavedFiles, SavedMemory};
use super::saved_pages::{self, SavedPages};
use super::seed::{self, Renewal};
use super::sockets::Sockets;
use super::stream;
use super::template::{self, Kind, MEMORY, STATE, Template, seal};
use super::template_folder::UNFINISHED;
use super::vmm::{Vmm, Vmms};
use crate::core::durability::Durability;
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::WorkerId;
use crate::core::limits;
use crate::isolation::cgroups::{Cgroups, remove_cgroup};
use crate::isolation::process::launch::WorkerProcess;
use crate::link::machine::Request;
use crate::sys::{fault, fs, random};

/// Time for the guest to become quiet after its last request.
const QUIET: Duration = Duration::from_millis(200);
/// Time for a monitor to end by itself.
const QUIT: Duration = Duration::from_secs(5);

/// Builds templates.
pub(super) struct Builder {
    /// The folder of templates.
    pub folder: PathBuf,
    pub sockets: PathBuf,
    /// Uid and gid of the monitor, in a daemon that is root.
    pub account: Option<(u32, u32)>,
    /// The machines' cgroups, where they are delegated.
    pub cgroups: Option<Cgroups>,
    pub vmms: Rc<Vmms>,
}

/// A built template without its name yet.
pub(super) struct Built {
    pub place: Unpublished,
    pub template: Template,
    /// Why machines of it are copied as a stream.
    pub copies_by_stream: Option<String>,
}

/// The folder of a template without a name. It is removed with this, unless it was published.
pub(super) struct Unpublished(pub PathBuf);

impl Drop for Unpublished {
    fn drop(&mut self) {
        match fs::remove_tree(&self.0) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(folder = %self.0.display(), %error, "an unfinished template is left for the next start");
            }
            _ => {}
        }
    }
}

fn unwritten(error: std::io::Error) -> Error {
    Error::unavailable(format!("write a template: {error}"))
}

impl Builder {
    /// Builds a template, in the place of another one if there is one in use.
    ///
    /// # Errors
    /// Those of the file system, the monitor and the guest. Nothing is left then.
    pub(super) async fn build(&self, kind: &Kind, image: &Image, replaced: Option<&Template>) -> Result<Built> {
        let name = format!("{UNFINISHED}{:016x}", u64::from_le_bytes(random::bytes()));
        std::fs::create_dir_all(&self.folder).map_err(unwritten)?;
        let unpublished = Unpublished(self.folder.join(name));
        let place = &unpublished.0;
        std::fs::create_dir(place).map_err(unwritten)?;
        std::fs::set_permissions(place, PermissionsExt::from_mode(0o700)).map_err(unwritten)?;
        if replaced.is_some() {
            fault::point("machine.template.boot").map_err(unwritten)?;
        }
        self.record(place, kind, image).await?;
        let (folder, about) = (place.to_owned(), kind.clone());
        let mut description = blocking(move || seal(&folder, about)).await?;
        let template = Template::untested(place).map_err(unwritten)?;
        if let Some(replaced) = replaced.filter(|_| kind.vmm() == Vmm::Qemu) {
            let states = (template.state().map_err(unwritten)?, replaced.state().map_err(unwritten)?);
            let bytes = kind.memory_bytes();
            blocking(move || same_head(&states.0, &states.1, bytes)).await?;
        }
        description.tested_boot_id = self.test(place, kind, image, &template).await?;
        let mut copies_by_stream = None;
        match kind.vmm() {
            Vmm::Qemu => match self.prove_pages(place, kind, image, &template).await {
                Ok(()) => description.proves_pages = true,
                Err(error) => copies_by_stream = Some(error.message),
            },
            // It copies no running machine.
            Vmm::Firecracker => {}
        }
        let replaces = replaced.map(|replaced| replaced.id().to_owned()).filter(|id| !id.is_empty());
        description.made = Some(Made::now(MadeFrom::FreshBoot, replaces));
        let (folder, template) = (place.to_owned(), template.described(&description));
        blocking(move || write_description(&folder, &description)).await?;
        Ok(Built { place: unpublished, template, copies_by_stream })
    }

    /// Boots the image and saves the machine.
    async fn record(&self, place: &Path, kind: &Kind, image: &Image) -> Result<()> {
        let failed = |error: std::io::Error| Error::unavailable(format!("write a template: {error}"));
        let mut options = OpenOptions::new();
        options.create_new(true).mode(0o600);
        let memory = options.read(true).write(true).open(place.join(MEMORY)).map_err(failed)?;
        memory.set_len(kind.memory_bytes()).map_err(failed)?;
        // Its monitor opens its memory by name.
        if let Some((uid, gid)) = self.account {
            std::os::unix::fs::fchown(&memory, Some(uid), Some(gid)).map_err(failed)?;
        }
        let state = options.read(false).open(place.join(STATE)).map_err(failed)?;
        let disk = options.read(true).open(place.join("disk")).map_err(failed)?;
        disk.set_len(kind.disk_bytes).map_err(failed)?;
        let program = image.engines.get(&kind.engine).cloned().unwrap_or_default();
        let has_program = !program.is_empty();
        let option = if kind.engine == EngineName::Node { "-e" } else { "-c" };
        let warm_up = Request::WarmUp { program, arguments: vec![option.to_owned(), String::new()] };
        let prepared = kind.prepared.map(|limits| document::prepared(kind, limits, image)).transpose()?;
        let begin = Begin::Record { image, memory: &memory, state: &state };
        self.with_machine(begin, kind, disk, async |sockets: &Sockets, _| {
            Monitor::boot(sockets, kind, Durability::Process).await?;
            let control = sockets.control();
            let within = kind.boot_time();
            blocking(move || {
                let mut client = Client::new(control);
                client.open_booting(within)?;
                if let Some(prepared) = prepared {
                    // The sandbox shows the files of the machine's identity, which each restore writes anew.
                    seed::seed(&mut client, "", Renewal::Keep)?;
                    client.call(&Request::Prepare, &prepared, limits::VM_PREPARE).map(drop)
                } else if has_program {
                    client.call(&warm_up, &[], limits::VM_BOOT).map(drop)
                } else {
                    Ok(())
                }
            })
            .await?;
            tokio::time::sleep(QUIET).await;
            Monitor::connect(sockets).await?.save_template().await
        })
        .await?;
        std::fs::remove_file(place.join("disk")).map_err(failed)
    }

    /// Restores a machine once, as for a kernel. Returns its boot id.
    async fn test(&self, place: &Path, kind: &Kind, image: &Image, template: &Template) -> Result<String> {
        let path = place.join("disk");
        disk::make_disk(&path, kind.disk_bytes).await?;
        let disk = disk::open_disk(&path)?;
        let (begin, renewal) = (Begin::Restore { image, template }, kind.renewal());
        let trial = kind.prepared.map(|_| document::trial()).transpose()?;
        let boot_id = self.with_machine(begin, kind, disk, async |sockets: &Sockets, _| {
            let mut monitor = Monitor::connect(sockets).await?;
            monitor.load(kind, limits::VM_CALL).await?;
            monitor.resume().await?;
            let control = sockets.control();
            blocking(move || {
                let mut client = Client::new(control);
                let boot_id = seed::seed(&mut client, "", renewal)?;
                client.tell(&Request::Mount, &[])?;
                if let Some(trial) = trial {
                    let (reply, _) = client.call(&Request::Start, &trial, limits::WORKER_START + limits::VM_CALL)?;
                    document::started(reply)?;
                }
                Ok(boot_id)
            })
            .await
        });
        let boot_id = boot_id.await?;
        std::fs::remove_file(path).map_err(|error| Error::unavailable(format!("write a template: {error}")))?;
        Ok(boot_id)
    }

    /// Copies a machine of the template by its changed pages and as a stream, at one stop, writes the pages into another
    /// machine, and starts that one.
    ///
    /// # Errors
    /// `unavailable` if the copies differ or the other machine does not start; those of copying.
    async fn prove_pages(&self, place: &Path, kind: &Kind, image: &Image, template: &Template) -> Result<()> {
        let proof = place.join("proof");
        let proved = self.compare_copies(&proof, kind, image, template).await;
        let removed = blocking(move || {
            fs::remove_tree(&proof).map_err(|error| Error::unavailable(format!("write a template: {error}")))
        });
        proved.and(removed.await)
    }

    async fn compare_copies(&self, proof: &Path, kind: &Kind, image: &Image, template: &Template) -> Result<()> {
        let failed = |error: std::io::Error| Error::unavailable(format!("prove copies by pages: {error}"));
        fault::point("machine.template.proof").map_err(failed)?;
        let (by_pages, by_stream, path) = (proof.join("pages"), proof.join("stream"), proof.join("disk"));
        let (saved, again) = (proof.join("saved"), proof.join("again"));
        std::fs::create_dir_all(&by_pages).map_err(failed)?;
        std::fs::create_dir(&by_stream).map_err(failed)?;
        disk::make_disk(&path, kind.disk_bytes).await?;
        let begin = Begin::Restore { image, template };
        let bytes = kind.memory_bytes();
        self.with_machine(begin, kind, disk::open_disk(&path)?, async |sockets: &Sockets, pid| {
            let mut monitor = Qmp::connect(&sockets.monitor).await?;
            monitor.load(qemu::STATE_URI, limits::VM_CALL).await?;
            monitor.resume().await?;
            let control = sockets.control();
            blocking(move || seed::seed(&mut Client::new(control), "", Renewal::Keep).map(drop)).await?;
            let (place, state) = (by_pages.clone(), template.state().map_err(failed)?);
            let pages = blocking(move || Source::pages(&place, pid, bytes, state).map_err(failed)).await?;
            let stream = Source::stream(&by_stream).map_err(failed)?;
            monitor.stop().await?;
            let (pages, stream) = (pages.save(&mut monitor).await?, stream.save(&mut monitor).await?);
            let (by_pages, by_stream) = (by_pages.clone(), by_stream.clone());
            let (base, saved) = (template.memory().map_err(failed)?, create(&saved).map_err(failed)?);
            blocking(move || {
                let mapped = MappedMemory::find(pid, bytes).map_err(failed)?;
                saved_pages::write(&mapped, &base, &saved).map_err(failed)?;
                pages.finish(&by_pages, bytes).and_then(|()| stream.finish(&by_stream, bytes)).map_err(failed)?;
                let memory = |folder: &Path| File::open(folder.join(MEMORY)).and_then(|file| template::part(&file));
                match memory(&by_pages).map_err(failed)? == memory(&by_stream).map_err(failed)? {
                    true => Ok(()),
                    false => Err(Error::unavailable("a copy by pages differs from the machine's memory")),
                }
            })
            .await
        })
        .await?;
        let open = |path: PathBuf| File::open(path).map_err(failed);
        let pages = SavedPages { pages: open(saved)?, base: template.memory().map_err(failed)?, template: None };
        let saved = SavedFiles { devices: open(by_pages.join(STATE))?, memory: SavedMemory::Pages(pages) };
        let begin = Begin::Continue { image, state: &saved };
        let loaded = begin.saved_pages().map_err(failed)?;
        self.with_machine(begin, kind, disk::open_disk(&path)?, async |sockets: &Sockets, pid| {
            let mut monitor = Qmp::connect(&sockets.monitor).await?;
            if let Some(pages) = loaded {
                let (before, found) = (pages.again().map_err(failed)?, create(&again).map_err(failed)?);
                pages.load(&WorkerProcess::find(pid).map_err(failed)?, bytes).await?;
                blocking(move || same_pages(&before.pages, pid, &before.base, &found, bytes)).await?;
            }
            monitor.load(qemu::STATE_URI, limits::VM_CALL).await?;
            monitor.resume().await?;
            let control = sockets.control();
            tokio::time::sleep(RECONNECTION).await;
            blocking(move || {
                let mut client = Client::new(control);
                client.open(limits::VM_CALL)?;
                seed::seed(&mut client, "", Renewal::Keep).map(drop)
            })
            .await
        })
        .await
    }

    /// Starts a machine, does something with it, and ends it.
    async fn with_machine<T>(
        &self,
        begin: Begin<'_>,
        kind: &Kind,
        disk: File,
        act: impl AsyncFnOnce(&Sockets, u32) -> Result<T>,
    ) -> Result<T> {
        let worker = WorkerId::from_bytes(random::bytes());
        let sockets = Sockets::new(&self.sockets, &worker, kind.vmm());
        let cgroup = self.cgroups.as_ref().map(|cgroups| cgroups.of(worker));
        let program = &self.vmms.program(kind.vmm())?;
        let (sockets, account, durability) = (&sockets, self.account, Durability::Process);
        let (is_temporary, saved_in) = (true, None);
        let started = monitor::start(NewMachine {
            program,
            begin,
            kind,
            disk,
            sockets,
            account,
            cgroup: cgroup.as_deref(),
            durability,
            saved_in,
            is_temporary,
        })
        .await;
        let mut child = match started {
            Ok(child) => child,
            Err(error) => {
                sockets.unlink();
                end_cgroup(cgroup).await;
                return Err(error);
            }
        };
        let done = match child.id() {
            Some(pid) => act(sockets, pid).await,
            None => Err(Error::unavailable("the virtual machine ended at once")),
        };
        // It may write its files until it has ended.
        let quits = match done.is_ok() {
            true => match Monitor::connect(sockets).await {
                Ok(mut monitor) => monitor.quit().await,
                Err(_) => false,
            },
            false => false,
        };
        if !quits || !matches!(tokio::time::timeout(QUIT, child.wait()).await, Ok(Ok(_))) {
            let _ = child.kill().await;
        }
        sockets.unlink();
        end_cgroup(cgroup).await;
        done
    }
}

async fn end_cgroup(cgroup: Option<PathBuf>) {
    if let Some(cgroup) = cgroup {
        remove_cgroup(&cgroup).await;
    }
}

/// Checks that a machine that is not loaded yet has those pages, and no other ones. Blocks.
fn same_pages(pages: &File, pid: u32, base: &File, found: &File, memory_bytes: u64) -> Result<()> {
    let mapped = MappedMemory::find(pid, memory_bytes);
    let parts = mapped.and_then(|mapped| {
        saved_pages::write(&mapped, base, found)?;
        Ok((template::part(pages)?, template::part(found)?))
    });
    let (saved, found) = parts.map_err(|error| Error::unavailable(format!("prove copies by pages: {error}")))?;
    match saved == found {
        true => Ok(()),
        false => {
            Err(Error::unavailable("the saved pages of a machine are not those of the one that they were loaded into"))
        }
    }
}

/// Checks that the states of two templates differ in their devices only: a machine of the old one is copied with the
/// beginning of the new one's. Blocks.
fn same_head(new: &File, old: &File, memory_bytes: u64) -> Result<()> {
    let heads = [new, old].map(|state| stream::head(state, memory_bytes));
    let [new, old] = heads.map(|head| head.map_err(unwritten));
    match new? == old? {
        true => Ok(()),
        false => Err(Error::unavailable("the new template is of another machine than the one in use")),
    }
}
