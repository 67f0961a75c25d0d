//! Saves a stopped machine with its memory into its kernel's folder; its monitor ends next.
//!
//! ```text
//!  its memory maps a file ─ which has a name here, and its template proved it ─▶ devices, changed pages ─┐
//!  anything else ─▶ all memory in use, and why ──────────────────────────────────────────────────────────┴▶ sealed
//! ```

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::base::{self, BaseTemplate};
use super::copy::create;
use super::handle::{MachineHandle, blocking};
use super::installed;
use super::monitor::Monitor;
use super::pages::MappedMemory;
use super::qmp::Qmp;
use super::saved::{self, DEVICES, NEW, PAGES, SavedFiles, SavedMemory};
use super::saved_pages::{self, SavedPages};
use super::stream;
use super::template::{self, Kind};
use super::vmm::Vmm;
use crate::core::error::{DISK_FULL, Error, Result};
use crate::link::handshake::WorkerIdentity;
use crate::sys::{fault, fs};

/// Why Firecracker's machines are saved whole.
const FIRECRACKER: &str = "Firecracker writes all memory";

fn failed(error: &std::io::Error) -> Error {
    let failed = Error::unavailable(format!("the memory of a virtual machine cannot be saved: {error}"));
    if fs::is_full(error) { failed.reason(DISK_FULL) } else { failed }
}

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

    /// Saves the machine, not sealed yet.
    async fn save(
        self,
        monitor: &mut Qmp,
        dir: &Path,
        memory_bytes: u64,
        template: Option<BaseTemplate>,
    ) -> Result<SavedFiles> {
        let place = dir.to_owned();
        let devices = blocking(move || {
            saved::remove(&place)?;
            let mut options = OpenOptions::new();
            // Its reader opens it anew: the monitor finds a descriptor by how it was opened.
            options.write(true).create_new(true).mode(0o600);
            options.open(place.join(DEVICES)).map_err(|error| failed(&error))
        });
        let devices = devices.await?;
        monitor.save_devices(&devices).await?;
        let dir = dir.to_owned();
        blocking(move || self.write(&dir, memory_bytes, template).map_err(|error| failed(&error))).await
    }

    /// Writes state and pages of a machine whose devices are saved. Blocks.
    fn write(self, dir: &Path, memory_bytes: u64, template: Option<BaseTemplate>) -> std::io::Result<SavedFiles> {
        let ChangedPages { mapped, base, state } = self;
        let began = Instant::now();
        let pages = create(&dir.join(PAGES))?;
        let written = saved_pages::write(&mapped, &base, &pages)?;
        tracing::info!(
            private = written.private,
            filled = written.filled,
            zeros = written.zeros,
            took_ms = began.elapsed().as_millis(),
            "the changed pages of a suspended machine were written",
        );
        let devices = create(&dir.join(NEW))?;
        stream::join(&state, &File::open(dir.join(DEVICES))?, memory_bytes, &devices)?;
        std::fs::remove_file(dir.join(DEVICES))?;
        base::keep(dir)?;
        fault::point("machine.suspend.saved")?;
        Ok(SavedFiles { devices, memory: SavedMemory::Pages(SavedPages { pages, base, template }) })
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
                    Ok(pages) => return Ok((pages.save(qmp, dir, kind.memory_bytes(), self.base()).await?, None)),
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
    use super::super::template::tests::{kind, template};
    use super::*;
    use crate::sys::fault::tests::with_fault;

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
