//! Saves a stopped machine with its memory into its kernel's folder; its monitor ends next.
//!
//! ```text
//!  its memory maps a file ─ which has a name here, and its template proved it ─▶ changed pages, devices ─┐
//!  anything else ─▶ all memory in use, and why ──────────────────────────────────────────────────────────┴▶ sealed
//! ```
//!
//! A monitor may write to the memory of a stopped guest: a port that closes is an entry of a ring. So the pages are read
//! again once the devices are saved. Rings only advance: pages that are as they were belong to the devices.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::base::{self, BaseTemplate};
use super::copy::{ATTEMPTS, CHANGED, create};
use super::handle::{MachineHandle, blocking};
use super::installed;
use super::monitor::Monitor;
use super::pages::MappedMemory;
use super::qmp::Qmp;
use super::saved::{self, DEVICES, NEW, PAGES, SavedFiles, SavedMemory, failed};
use super::saved_pages::{self, SavedPages};
use super::stream;
use super::template::{self, Kind};
use super::vmm::Vmm;
use crate::core::error::{Error, Result};
use crate::link::handshake::WorkerIdentity;
use crate::sys::fault;

/// Why Firecracker's machines are saved whole.
const FIRECRACKER: &str = "Firecracker writes all memory";

/// What saving by changed pages needs.
struct ChangedPages {
    mapped: MappedMemory,
    base: File,
    /// The state of its template, which has proved such copies.
    state: File,
}

impl ChangedPages {
    /// Finds it for the machine with that folder; an error says why the whole memory is saved. Blocks.
    fn find(dir: &Path, templates: &Path, pid: u32, kind: &Kind) -> std::result::Result<ChangedPages, String> {
        let words = |error: std::io::Error| error.to_string();
        fault::point("machine.suspend.pages").map_err(words)?;
        let template = templates.join(kind.key().map_err(|error| error.message)?);
        // Writable: a monitor that cannot be written to cannot be continued from pages, either.
        let mapped = MappedMemory::find_writable(pid, kind.memory_bytes()).map_err(words)?;
        let base = base::pinned(dir, mapped.base());
        let base = base.map_err(|error| format!("the file beneath its memory is not kept: {error}"))?;
        Ok(ChangedPages { mapped, base, state: template::proven_state(&template, kind)? })
    }

    /// Saves the machine, not sealed yet; `None` if its memory changed meanwhile, each time.
    async fn save(
        self,
        monitor: &mut Qmp,
        dir: &Path,
        memory_bytes: u64,
        template: Option<BaseTemplate>,
    ) -> Result<Option<SavedFiles>> {
        let changed = Arc::new(self);
        for _ in 0..ATTEMPTS {
            let (place, from) = (dir.to_owned(), Arc::clone(&changed));
            let (pages, devices) = blocking(move || {
                saved::remove(&place)?;
                from.write(&place).map_err(|error| failed(&error))
            })
            .await?;
            monitor.save_devices(&devices).await?;
            let (place, from, template) = (dir.to_owned(), Arc::clone(&changed), template.clone());
            let files = move || from.finish(&place, pages, memory_bytes, template).map_err(|error| failed(&error));
            match blocking(files).await? {
                Some(files) => return Ok(Some(files)),
                None => tracing::warn!("the memory of a stopped machine changed while it was saved"),
            }
        }
        Ok(None)
    }

    /// Writes the pages, and makes a file for the devices. Blocks.
    fn write(&self, dir: &Path) -> std::io::Result<(File, File)> {
        let began = Instant::now();
        let pages = create(&dir.join(PAGES))?;
        let written = saved_pages::write(&self.mapped, &self.base, &pages)?;
        tracing::info!(
            private = written.private,
            filled = written.filled,
            zeros = written.zeros,
            took_ms = began.elapsed().as_millis(),
            "the changed pages of a suspended machine were written",
        );
        let mut options = OpenOptions::new();
        // Its reader opens it anew: the monitor finds a descriptor by how it was opened.
        let devices = options.write(true).create_new(true).mode(0o600).open(dir.join(DEVICES))?;
        Ok((pages, devices))
    }

    /// Makes the state once the devices are saved; `None` if the pages are not as they were written. Blocks.
    fn finish(
        &self,
        dir: &Path,
        pages: File,
        memory_bytes: u64,
        template: Option<BaseTemplate>,
    ) -> std::io::Result<Option<SavedFiles>> {
        let began = Instant::now();
        let is_same = saved_pages::is_written(&self.mapped, &self.base, &pages)?;
        tracing::info!(is_same, took_ms = began.elapsed().as_millis(), "the memory was compared with what was written");
        if !is_same {
            return Ok(None);
        }
        let devices = create(&dir.join(NEW))?;
        stream::join(&self.state, &File::open(dir.join(DEVICES))?, memory_bytes, &devices)?;
        std::fs::remove_file(dir.join(DEVICES))?;
        base::keep(dir)?;
        fault::point("machine.suspend.saved")?;
        let base = self.base.try_clone()?;
        Ok(Some(SavedFiles { devices, memory: SavedMemory::Pages(SavedPages { pages, base, template }) }))
    }
}

impl MachineHandle {
    /// Saves the stopped machine. Returns why all of its memory was written, if it was, and not only what it changed.
    ///
    /// # Errors
    /// `unsupported` for a machine of an earlier version; those of saving: nothing is saved then.
    pub(super) async fn save_stopped(&self, identity: &WorkerIdentity) -> Result<Option<String>> {
        let (machine, identity) = (self.machine(), identity.clone());
        let Some(kind) = self.kind().filter(|_| self.is_suspended()) else {
            return Err(Error::unsupported("the virtual machine was started by an earlier version of ryokan")
                .reason("suspend")
                .hint("stop the kernel, and start it again"));
        };
        let (dir, disk, host) = (machine.folder.dir.clone(), machine.folder.disk(), self.host());
        if kind.vmm() == Vmm::Firecracker {
            // Its save ends the guest's connections.
            let (ended, address) = (Arc::clone(&machine), self.sockets().control());
            blocking(move || {
                ended.client().redirect(address);
                Ok(())
            })
            .await?;
        }
        let (place, began) = (dir.clone(), Instant::now());
        let saving = async {
            let (files, whole) = self.save_files(&place, &kind).await?;
            blocking(move || {
                // It has continued: a daemon that was killed since did not say so.
                installed::forget_begun(&place)?;
                saved::seal(&place, &disk, host, kind, &identity, &files)
            })
            .await?;
            Ok(whole)
        };
        let saved: Result<Option<String>> = saving.await;
        match &saved {
            Ok(whole) => {
                let (took_ms, is_whole) = (began.elapsed().as_millis(), whole.is_some());
                tracing::info!(took_ms, is_whole, "the memory of a suspended machine was saved");
            }
            Err(_) => drop(saved::remove(&dir)),
        }
        saved
    }

    /// Writes the files of the stopped machine, and says why they have all of its memory, if they have.
    async fn save_files(&self, dir: &Path, kind: &Kind) -> Result<(SavedFiles, Option<String>)> {
        let mut monitor = Monitor::connect(self.sockets()).await?;
        let whole = match &mut monitor {
            Monitor::Firecracker(_) => String::from(FIRECRACKER),
            Monitor::Qemu(qmp) => {
                let (place, templates) = (dir.to_owned(), self.copies().to_owned());
                let (pid, about) = (self.process(), kind.clone());
                let found = blocking(move || Ok(ChangedPages::find(&place, &templates, pid, &about))).await?;
                match found {
                    Ok(pages) => match pages.save(qmp, dir, kind.memory_bytes(), self.base()).await? {
                        Some(files) if fault::point("machine.suspend.compare").is_ok() => return Ok((files, None)),
                        // Its stream has what changes meanwhile.
                        Some(_) | None => CHANGED.to_owned(),
                    },
                    Err(why) => why,
                }
            }
        };
        tracing::info!(why = whole, "all memory of a suspended machine is written");
        Ok((monitor.save_memory(dir).await?, Some(whole)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;

    use super::super::pages::PAGE_BYTES;
    use super::super::pages::tests::{PAGES as COUNT, with_mapping};
    use super::super::template::tests::{kind, template};
    use super::*;
    use crate::sys::fault::tests::with_fault;

    /// A monitor that changes the memory of its stopped guest whenever it saves the devices.
    fn changing_monitor(listener: &UnixListener, guest: &MappedMemory) -> std::io::Result<usize> {
        let (mut stream, _) = listener.accept()?;
        stream.write_all(b"{\"QMP\": {}}\n")?;
        let mut saves = 0;
        for line in BufReader::new(stream.try_clone()?).lines() {
            let asked: serde_json::Value = serde_json::from_str(&line?)?;
            if asked["execute"] == "xen-save-devices-state" {
                assert_eq!(asked["arguments"]["live"], false, "the disk stays the machine's");
                saves += 1;
                guest.write_at(PAGE_BYTES, &[10 + saves as u8])?;
            }
            let answer = format!("{{\"return\": {{\"fdset-id\": 1}}, \"id\": {}}}\n", asked["id"]);
            stream.write_all(answer.as_bytes())?;
        }
        Ok(saves)
    }

    #[test]
    fn changing_memory_is_not_trusted() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let (socket, bytes) = (folder.path().join("q"), COUNT * PAGE_BYTES);
        let listener = UnixListener::bind(&socket)?;
        with_mapping("memory[4096] = 2", |pid, base| {
            let guest = MappedMemory::find_writable(pid, bytes)?;
            let monitor = std::thread::spawn(move || changing_monitor(&listener, &guest));
            let mapped = MappedMemory::find_writable(pid, bytes)?;
            let pages = ChangedPages { mapped, base: base.try_clone()?, state: base.try_clone()? };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let saved = runtime.block_on(async {
                let mut qmp = Qmp::connect(&socket).await?;
                pages.save(&mut qmp, folder.path(), bytes, None).await
            });
            assert!(saved.is_ok_and(|saved| saved.is_none()), "it is saved whole");
            assert_eq!(monitor.join().expect("no panic")?, ATTEMPTS);
            Ok(())
        })
    }

    #[test]
    fn whole_save_has_reason() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        template(folder.path(), &kind);
        let own = std::process::id();
        let why = |pid| ChangedPages::find(folder.path(), folder.path(), pid, &kind).map(drop).expect_err("no machine");
        assert!(!why(own).is_empty());
        let armed = with_fault("machine.suspend.pages=eio", || why(own));
        assert!(armed.contains("Input/output error"), "{armed}");
    }
}
