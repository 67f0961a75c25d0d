//! The templates of a host: found, built in the background, counted, removed.
//!
//! ```text
//!  templates/.new-…/   ── boot, warm up, stop, save ─▶ ram, state ── test start, template.json ── rename ─▶ templates/KEY/
//!  templates/KEY/      ── description and digests are right ─▶ open descriptors ─▶ private copies of the memory
//! ```

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use super::client::Client;
use super::copy::Source;
use super::disk;
use super::image::Image;
use super::launch::RECONNECTION;
use super::monitor::{self, Begin, Monitor, NewMachine};
use super::qemu;
use super::qmp::Qmp;
use super::seed::{self, Renewal};
use super::sockets::Sockets;
use super::template::{self, Kind, MEMORY, STATE, Template, publish, seal};
use super::vmm::{Vmm, Vmms};
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::ids::WorkerId;
use crate::core::limits;
use crate::isolation::LaunchNote;
use crate::link::machine::Request;
use crate::sys::{fs, random};

/// Folders that are being filled.
pub(super) const UNFINISHED: &str = ".new-";
/// Time for the guest to become quiet after its last request.
const QUIET: Duration = Duration::from_millis(200);
/// Time for a monitor to end by itself.
const QUIT: Duration = Duration::from_secs(5);

/// What is known of a kind's template.
enum Known {
    Ready(Rc<Template>),
    Building,
    /// When, and why.
    Failed(Instant, String),
}

/// The settings of templates.
pub(super) struct TemplateSettings {
    pub folder: PathBuf,
    pub sockets: PathBuf,
    /// Uid and gid of the monitor, in a daemon that is root.
    pub account: Option<(u32, u32)>,
}

/// The templates of a host.
pub(super) struct Templates {
    settings: TemplateSettings,
    vmms: Rc<Vmms>,
    known: RefCell<HashMap<String, Known>>,
    /// One template is verified at a time.
    turn: tokio::sync::Mutex<()>,
    notes: RefCell<Vec<LaunchNote>>,
    is_swept: Cell<bool>,
    /// Notified after each build.
    built: tokio::sync::watch::Sender<()>,
}

impl Templates {
    pub(super) fn new(settings: TemplateSettings, vmms: Rc<Vmms>) -> Rc<Templates> {
        Rc::new(Templates {
            settings,
            vmms,
            known: RefCell::default(),
            turn: tokio::sync::Mutex::default(),
            notes: RefCell::default(),
            is_swept: Cell::new(false),
            built: tokio::sync::watch::Sender::new(()),
        })
    }

    /// What happened to templates since the last call.
    pub(super) fn take_notes(&self) -> Vec<LaunchNote> {
        std::mem::take(&mut *self.notes.borrow_mut())
    }

    fn note(&self, kind: &'static str, detail: String) {
        tracing::info!(kind, detail, "a template of virtual machines");
        self.notes.borrow_mut().push(LaunchNote { kind, detail });
    }
    /// The template of a kind; an error says why a machine boots instead.
    pub(super) async fn find(&self, kind: &Kind) -> std::result::Result<Rc<Template>, String> {
        let key = kind.key().map_err(|error| error.message)?;
        let _turn = self.turn.lock().await;
        match self.known.borrow().get(&key) {
            Some(Known::Ready(template)) => return Ok(Rc::clone(template)),
            Some(Known::Building) => return Err(String::from("its template is being built")),
            Some(Known::Failed(at, why)) if at.elapsed() < limits::VM_TEMPLATE_RETRY => return Err(why.clone()),
            Some(Known::Failed(..)) | None => {}
        }
        self.sweep();
        let (folder, kind) = (self.settings.folder.join(&key), kind.clone());
        let opened = tokio::task::spawn_blocking(move || Template::open(&folder, &kind)).await;
        match opened.map_err(|error| error.to_string())? {
            Ok(Some(template)) => {
                let template = Rc::new(template);
                self.known.borrow_mut().insert(key, Known::Ready(Rc::clone(&template)));
                Ok(template)
            }
            Ok(None) => Err(String::from("there is no template of it yet")),
            Err(why) => {
                let why = format!("its template {key} cannot be used: {why}");
                tracing::warn!(why, "a template of virtual machines is built again");
                self.note("template_damaged", why.clone());
                Err(why)
            }
        }
    }

    /// The template of a kind, built first if there is none: a machine that nothing waits for yet need not boot.
    pub(super) async fn find_or_build(
        self: &Rc<Self>,
        kind: &Kind,
        image: &Image,
    ) -> std::result::Result<Rc<Template>, String> {
        let key = kind.key().map_err(|error| error.message)?;
        let mut built = self.built.subscribe();
        if let Ok(template) = self.find(kind).await {
            return Ok(template);
        }
        self.build_soon(kind.clone(), image.clone());
        while matches!(self.known.borrow().get(&key), Some(Known::Building)) {
            // The sender is borrowed, so it does not close. Each step of a build has a deadline.
            let _ = built.changed().await;
        }
        self.find(kind).await
    }

    /// Notes that a machine could not be restored from a template, and returns why it boots instead. A busy host or the
    /// end of one machine is no fault of the template: it is removed after several failures in a row, and built again.
    pub(super) fn note_failure(&self, kind: &Kind, template: &Template, error: &Error) -> String {
        let why = format!("no machine can be restored from its template: {}", error.message);
        let Ok(key) = kind.key() else { return why };
        if template.failed() < limits::VM_TEMPLATE_FAILURES {
            tracing::warn!(key, why, "a virtual machine boots instead");
            return why;
        }
        let _ = fs::remove_tree(&self.settings.folder.join(&key));
        self.note("template_damaged", why.clone());
        self.known.borrow_mut().insert(key, Known::Failed(Instant::now(), why.clone()));
        why
    }

    /// Builds a template in the background, unless it is known already.
    pub(super) fn build_soon(self: &Rc<Self>, kind: Kind, image: Image) {
        let Ok(key) = kind.key() else { return };
        match self.known.borrow().get(&key) {
            Some(Known::Ready(_) | Known::Building) => return,
            Some(Known::Failed(at, _)) if at.elapsed() < limits::VM_TEMPLATE_RETRY => return,
            Some(Known::Failed(..)) | None => {}
        }
        self.known.borrow_mut().insert(key.clone(), Known::Building);
        let templates = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let began = Instant::now();
            let known = match templates.build(&key, &kind, &image).await {
                Ok(template) => {
                    templates.note("template_built", format!("{key} in {} ms", began.elapsed().as_millis()));
                    Known::Ready(Rc::new(template))
                }
                Err(error) => {
                    let why = format!("its template cannot be built: {error}");
                    tracing::warn!(why, "virtual machines boot instead");
                    Known::Failed(Instant::now(), why)
                }
            };
            templates.known.borrow_mut().insert(key, known);
            templates.built.send_replace(());
        });
    }

    async fn build(&self, key: &str, kind: &Kind, image: &Image) -> Result<Template> {
        let place = self.settings.folder.join(format!("{UNFINISHED}{}", hex(random::bytes::<8>())));
        let unwritten = |error: std::io::Error| Error::unavailable(format!("write a template: {error}"));
        std::fs::create_dir_all(&self.settings.folder).map_err(unwritten)?;
        std::fs::create_dir(&place).map_err(unwritten)?;
        std::fs::set_permissions(&place, PermissionsExt::from_mode(0o700)).map_err(unwritten)?;
        let built = self.fill(&place, key, kind, image).await;
        if built.is_err() {
            let _ = fs::remove_tree(&place);
        }
        built
    }

    async fn fill(&self, place: &Path, key: &str, kind: &Kind, image: &Image) -> Result<Template> {
        self.record(place, kind, image).await?;
        let (folder, about) = (place.to_owned(), kind.clone());
        let sealed = tokio::task::spawn_blocking(move || seal(&folder, about)).await;
        let mut description = sealed.map_err(|error| Error::internal(error.to_string()))??;
        let template = Template::untested(place).map_err(|error| Error::unavailable(error.to_string()))?;
        description.tested_boot_id = self.test(place, kind, image, &template).await?;
        match kind.vmm() {
            Vmm::Qemu => match self.prove_pages(place, kind, image, &template).await {
                Ok(()) => description.proves_pages = true,
                Err(error) => self.note("copies_by_stream", format!("{key}: {}", error.message)),
            },
            // It copies no running machine.
            Vmm::Firecracker => {}
        }
        let (from, to) = (place.to_owned(), self.settings.folder.join(key));
        let boot_id = description.tested_boot_id.clone();
        let published = tokio::task::spawn_blocking(move || publish(&from, &to, &description)).await;
        published.map_err(|error| Error::internal(error.to_string()))??;
        self.prune(key);
        Ok(template.tested(boot_id))
    }

    /// Boots the image and saves the machine.
    async fn record(&self, place: &Path, kind: &Kind, image: &Image) -> Result<()> {
        let failed = |error: std::io::Error| Error::unavailable(format!("write a template: {error}"));
        let mut options = OpenOptions::new();
        options.create_new(true).mode(0o600);
        let memory = options.read(true).write(true).open(place.join(MEMORY)).map_err(failed)?;
        memory.set_len(kind.memory_bytes()).map_err(failed)?;
        // Its monitor opens its memory by name.
        if let Some((uid, gid)) = self.settings.account {
            std::os::unix::fs::fchown(&memory, Some(uid), Some(gid)).map_err(failed)?;
        }
        let state = options.read(false).open(place.join(STATE)).map_err(failed)?;
        let disk = options.read(true).open(place.join("disk")).map_err(failed)?;
        disk.set_len(kind.disk_bytes).map_err(failed)?;
        let program = image.engines.get(&kind.engine).cloned().unwrap_or_default();
        let begin = Begin::Record { image, memory: &memory, state: &state };
        self.with_machine(begin, kind, disk, async |sockets: &Sockets, _| {
            Monitor::boot(sockets, kind, Durability::Process).await?;
            let control = sockets.control();
            let within = kind.boot_time();
            blocking(move || {
                let mut client = Client::new(control);
                client.open_booting(within)?;
                match program.is_empty() {
                    true => Ok(()),
                    false => client.call(&Request::WarmUp { program }, &[], limits::VM_BOOT).map(drop),
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
        let begin = Begin::Restore { image, template };
        let boot_id = self.with_machine(begin, kind, disk, async |sockets: &Sockets, _| {
            let mut monitor = Monitor::connect(sockets).await?;
            monitor.load(kind, limits::VM_CALL).await?;
            monitor.resume().await?;
            let control = sockets.control();
            blocking(move || {
                let mut client = Client::new(control);
                let boot_id = seed::seed(&mut client, "", Renewal::Keep)?;
                client.tell(&Request::Mount, &[])?;
                Ok(boot_id)
            })
            .await
        });
        let boot_id = boot_id.await?;
        std::fs::remove_file(path).map_err(|error| Error::unavailable(format!("write a template: {error}")))?;
        Ok(boot_id)
    }

    /// Copies a machine of the template by its changed pages and as a stream, at one stop, and starts the former copy.
    ///
    /// # Errors
    /// `unavailable` if the copies differ or the copy does not start; those of copying.
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
        let (by_pages, by_stream, path) = (proof.join("pages"), proof.join("stream"), proof.join("disk"));
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
            blocking(move || {
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
        let copy = Template::untested(&by_pages).map_err(failed)?;
        let begin = Begin::Copy { image, template: &copy };
        self.with_machine(begin, kind, disk::open_disk(&path)?, async |sockets: &Sockets, _| {
            let mut monitor = Qmp::connect(&sockets.monitor).await?;
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
        let sockets = Sockets::new(&self.settings.sockets, &WorkerId::from_bytes(random::bytes()), kind.vmm());
        let program = &self.vmms.program(kind.vmm())?;
        let (sockets, account, durability) = (&sockets, self.settings.account, Durability::Process);
        let (is_temporary, saved_in) = (true, None);
        let started = monitor::start(NewMachine {
            program,
            begin,
            kind,
            disk,
            sockets,
            account,
            cgroup: None,
            durability,
            saved_in,
            is_temporary,
        })
        .await;
        let mut child = match started {
            Ok(child) => child,
            Err(error) => {
                sockets.unlink();
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
        done
    }

    /// Removes the templates of an image that is no more.
    pub(super) fn forget_image(&self, version: &str) {
        for entry in std::fs::read_dir(&self.settings.folder).into_iter().flatten().flatten() {
            if template::image_of(&entry.path()).is_some_and(|image| image == version) {
                self.known.borrow_mut().remove(&*entry.file_name().to_string_lossy());
                let _ = fs::remove_tree(&entry.path());
            }
        }
    }

    /// Removes the oldest templates beyond the limit.
    fn prune(&self, kept: &str) {
        let folders = std::fs::read_dir(&self.settings.folder).into_iter().flatten().flatten();
        let mut found: Vec<(SystemTime, PathBuf)> = folders
            .filter(|entry| !entry.file_name().to_string_lossy().starts_with('.') && entry.file_name() != *kept)
            .map(|entry| {
                let at = entry.metadata().and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
                (at, entry.path())
            })
            .collect();
        found.sort();
        let surplus = (found.len() + 1).saturating_sub(limits::VM_TEMPLATES);
        for (_, folder) in found.into_iter().take(surplus) {
            tracing::info!(folder = %folder.display(), "an old template of virtual machines is removed");
            let _ = fs::remove_tree(&folder);
        }
    }

    /// Removes what a former daemon did not finish, once.
    pub(super) fn sweep(&self) {
        if self.is_swept.replace(true) {
            return;
        }
        for entry in std::fs::read_dir(&self.settings.folder).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                let _ = fs::remove_tree(&entry.path());
            }
        }
    }
}

async fn blocking<T: Send + 'static>(act: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(act).await.map_err(|error| Error::internal(error.to_string()))?
}

pub(super) fn hex(bytes: [u8; 8]) -> String {
    format!("{:016x}", u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::super::template::tests::{kind, template};
    use super::super::vmm::tests::vmms;
    use super::*;
    use crate::core::vmm::WantedVmm;

    #[tokio::test]
    async fn repeated_failures_remove_template() {
        let (folder, kind, late) = (tempfile::tempdir().expect("a folder"), kind(), Error::deadline("a busy host"));
        let place = template(folder.path(), &kind);
        let (folder, sockets) = (folder.path().to_owned(), folder.path().to_owned());
        let settings = TemplateSettings { folder, sockets, account: None };
        let templates = Templates::new(settings, vmms(WantedVmm::Qemu, None));
        let found = templates.find(&kind).await.expect("a template");
        for failures in [limits::VM_TEMPLATE_FAILURES - 1, limits::VM_TEMPLATE_FAILURES] {
            found.served();
            for _ in 0..failures {
                let why = templates.note_failure(&kind, &found, &late);
                assert!(why.contains("a busy host"), "{why}");
            }
            let is_kept = failures < limits::VM_TEMPLATE_FAILURES;
            assert_eq!((templates.find(&kind).await.is_ok(), place.exists()), (is_kept, is_kept));
        }
        assert_eq!(templates.take_notes().len(), 1);
    }
}
