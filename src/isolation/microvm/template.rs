//! A template on the disk: a stopped machine's memory and state, and a description with their digests.
//!
//! It holds nothing of a kernel: no secret, no mounted disk. But for Node.js, it holds a worker whose engine has started
//! and which waits for a kernel (`document.rs`). Machines that are restored from a template begin with the same random state,
//! so each is seeded before anything else (`seed.rs`), then its engine. `templates.rs` builds and finds them.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::accelerator::{self, Chosen};
use super::base::BaseTemplate;
use super::description::{Description, Made, Unusable, describe};
use super::image::Image;
use super::seed::Renewal;
use super::vmm::{Choice, Vmm};
use super::{firecracker, qemu};
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::snapshot::Machine;
use crate::core::spec::KernelLimits;
use crate::isolation::Shape;
use crate::link::bootstrap::BUILD;
use crate::sys::fs::path_of;

pub(super) const MEMORY: &str = "ram";
pub(super) const STATE: &str = "state";

/// What machines must have in common to be restored from one template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kind {
    /// The image's version.
    pub image: String,
    /// Whose interpreter it has read.
    pub engine: EngineName,
    /// Whose kernels they are: users share no memory through a template.
    pub uid: u32,
    /// Name and version of the monitor: states are loaded by the version that saved them.
    #[serde(rename = "qemu")]
    pub vmm: String,
    /// The version of the guest's programs.
    pub build: String,
    pub machine: Vec<String>,
    pub memory_mib: u64,
    pub processors: u32,
    pub disk_bytes: u64,
    /// The limits of the worker that its template holds, which cannot be changed any more; `None`: it holds no worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared: Option<KernelLimits>,
}

impl Kind {
    pub(super) fn new(image: &Image, shape: &Shape, choice: Choice, disk_bytes: u64) -> Kind {
        let Shape { engine, uid, limits, .. } = shape;
        let machine = match choice.vmm {
            Vmm::Qemu => qemu::machine(choice.accelerator),
            Vmm::Firecracker => firecracker::machine(),
        };
        Kind {
            image: image.version.clone(),
            engine: *engine,
            uid: *uid,
            vmm: choice.version,
            build: BUILD.to_owned(),
            machine,
            memory_mib: (limits.memory_bytes + limits::VM_EXTRA_MEMORY_BYTES).div_ceil(1 << 20),
            processors: limits.cpu_milli.div_ceil(1000).max(1),
            disk_bytes,
            prepared: (choice.vmm == Vmm::Qemu && engine.seeds_anew()).then_some(*limits),
        }
    }

    /// Whether a machine of one kind is one of the other, templates aside.
    pub(super) fn is_same(&self, other: &Kind) -> bool {
        *self == (Kind { prepared: self.prepared, ..other.clone() })
    }

    /// How a machine that is restored from a template of it is seeded: the sandbox of a prepared worker shows the
    /// template's identity.
    pub(super) fn renewal(&self) -> Renewal {
        if self.prepared.is_some() { Renewal::Renew } else { Renewal::Keep }
    }

    /// What runs it.
    pub(super) fn vmm(&self) -> Vmm {
        match self.option("-M") {
            Some(firecracker::MACHINE_TYPE) => Vmm::Firecracker,
            _ => Vmm::Qemu,
        }
    }

    /// Whether KVM runs its instructions.
    pub(super) fn uses_kvm(&self) -> bool {
        self.vmm() == Vmm::Firecracker || self.machine == qemu::machine(Chosen::Kvm)
    }

    fn option(&self, name: &str) -> Option<&str> {
        self.machine.iter().skip_while(|word| *word != name).nth(1).map(String::as_str)
    }

    /// Time for its boot.
    pub(super) fn boot_time(&self) -> Duration {
        if self.uses_kvm() { limits::KVM_BOOT } else { limits::VM_BOOT }
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.memory_mib << 20
    }

    /// What the memory of one machine needs of another.
    pub(super) fn machine(&self) -> Machine {
        let option = |name| self.option(name).unwrap_or_default().to_owned();
        Machine {
            vmm: self.vmm.clone(),
            build: self.build.clone(),
            machine_type: option("-M"),
            cpu_model: match self.uses_kvm() {
                true => format!("{} of {}", option("-cpu"), accelerator::processor()),
                false => option("-cpu"),
            },
            ram_bytes: self.memory_bytes(),
            processors: self.processors,
        }
    }

    /// Checks that a stored machine is what this host would start itself, except for the size of its disk. Its description
    /// may be a stranger's: QEMU gets no other option from it.
    ///
    /// # Errors
    /// `refused`.
    pub(super) fn check_same(&self, now: &Kind) -> Result<()> {
        match self.is_same(&Kind { disk_bytes: self.disk_bytes, ..now.clone() }) {
            true => Ok(()),
            false => Err(Error::refused("it is a machine of another kind").reason("kind")),
        }
    }

    /// The name of its folder.
    pub(super) fn key(&self) -> Result<String> {
        let text = serde_json::to_vec(self).map_err(|error| Error::internal(error.to_string()))?;
        Ok(blake3::hash(&text).to_hex()[..40].to_owned())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub bytes: u64,
    pub blake3: String,
}

/// A verified template. Its files stay open, so that nothing that happens to its folder changes it.
#[derive(Debug)]
pub(super) struct Template {
    memory: File,
    state: File,
    pub tested_boot_id: String,
    /// `None`: a former version made it, or it is no template of this host.
    made: Option<Made>,
    /// The digest of its memory, if it is described.
    memory_digest: Option<String>,
    /// Failed restores since the last machine that was restored.
    failures: Cell<u32>,
    is_used: Cell<bool>,
}

/// Opens a file anew: each reader has its own position, at the beginning.
pub(super) fn again(file: &File) -> std::io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

impl Template {
    /// The template of just written files, not tested yet.
    pub(super) fn untested(place: &Path) -> std::io::Result<Template> {
        Template::of_files(&place.join(MEMORY), &place.join(STATE))
    }

    /// The same of files elsewhere.
    pub(super) fn of_files(memory: &Path, state: &Path) -> std::io::Result<Template> {
        let (memory, state) = (File::open(memory)?, File::open(state)?);
        let (failures, is_used) = (Cell::new(0), Cell::new(false));
        Ok(Template {
            memory,
            state,
            tested_boot_id: String::new(),
            made: None,
            memory_digest: None,
            failures,
            is_used,
        })
    }

    /// The same, with what its description says.
    pub(super) fn described(self, about: &Description) -> Template {
        let (tested_boot_id, made) = (about.tested_boot_id.clone(), about.made.clone());
        Template { tested_boot_id, made, memory_digest: Some(about.memory.blake3.clone()), ..self }
    }

    /// What it is to machines that have mapped its memory; `None`: it is the memory of a copied machine.
    pub(super) fn as_base(&self) -> Option<BaseTemplate> {
        let blake3 = self.memory_digest.clone()?;
        Some(BaseTemplate { id: self.id().to_owned(), blake3 })
    }

    /// Its id; empty if a former version made it.
    pub(super) fn id(&self) -> &str {
        self.made.as_ref().map_or("", |made| &made.id)
    }

    /// When it was made, milliseconds of the wall clock, as far as known.
    pub(super) fn created_at_ms(&self) -> Option<i64> {
        self.made.as_ref().map(|made| made.created_at_ms)
    }

    /// Whether a machine was restored from it.
    pub(super) fn is_used(&self) -> bool {
        self.is_used.get()
    }

    /// Notes that a machine was restored; returns whether it is the first one.
    pub(super) fn served(&self) -> bool {
        self.failures.set(0);
        !self.is_used.replace(true)
    }

    /// Notes that a machine could not be restored; returns how many in a row.
    pub(super) fn failed(&self) -> u32 {
        self.failures.set(self.failures.get().saturating_add(1));
        self.failures.get()
    }

    pub(super) fn memory(&self) -> std::io::Result<File> {
        again(&self.memory)
    }

    pub(super) fn state(&self) -> std::io::Result<File> {
        again(&self.state)
    }

    /// Opens and verifies a template's folder; `None` if there is none. Blocks.
    pub(super) fn open(folder: &Path, kind: &Kind) -> std::result::Result<Option<Template>, Unusable> {
        match folder.symlink_metadata() {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(Unusable::Damaged(String::from("it is no folder"))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Unusable::Damaged(error.to_string())),
        }
        let about = describe(folder)?;
        Template::open_files(folder, kind, about).map(Some).map_err(Unusable::Damaged)
    }

    fn open_files(folder: &Path, kind: &Kind, about: Description) -> std::result::Result<Template, String> {
        let words = |error: std::io::Error| error.to_string();
        let file = |name: &str| {
            let mut options = OpenOptions::new();
            let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(folder.join(name));
            let file = file.map_err(|error| format!("{name}: {error}"))?;
            match file.metadata() {
                Ok(found) if found.is_file() => Ok(file),
                Ok(_) => Err(format!("{name} is no file")),
                Err(error) => Err(format!("{name}: {error}")),
            }
        };
        if about.kind != *kind {
            return Err(String::from("it is of another machine than its name says"));
        }
        let (memory, state) = (file(MEMORY)?, file(STATE)?);
        for (name, found, wanted) in [(MEMORY, &memory, &about.memory), (STATE, &state, &about.state)] {
            if found.metadata().map_err(words)?.len() != wanted.bytes {
                return Err(format!("{name} has another size than was written"));
            }
            if part(found).map_err(words)? != *wanted {
                return Err(format!("{name} is not what was written"));
            }
        }
        if about.memory.bytes != kind.memory_bytes() || about.state.bytes > limits::VM_DEVICE_STATE_BYTES {
            return Err(String::from("its sizes are not those of the machine"));
        }
        let (failures, is_used) = (Cell::new(0), Cell::new(false));
        let (tested_boot_id, made, memory_digest) = (about.tested_boot_id, about.made, Some(about.memory.blake3));
        Ok(Template { memory, state, tested_boot_id, made, memory_digest, failures, is_used })
    }
}

/// The state of a template that has proved copies by pages; an error says why there is none.
pub(super) fn proven_state(folder: &Path, kind: &Kind) -> std::result::Result<File, String> {
    // Another template may take its name meanwhile.
    let opened = File::open(folder).map_err(|error| format!("its template: {error}"))?;
    let folder = &path_of(&opened);
    let about = describe(folder).map_err(|why| format!("its template: {why}"))?;
    if about.kind != *kind || !about.proves_pages {
        return Err(String::from("its template did not prove copies by pages"));
    }
    let mut options = OpenOptions::new();
    let state = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(folder.join(STATE));
    let state = state.map_err(|error| format!("its template: {error}"))?;
    match part(&state) {
        Ok(found) if found == about.state => Ok(state),
        Ok(_) => Err(String::from("its template's state is not what was written")),
        Err(error) => Err(format!("its template: {error}")),
    }
}

/// Length and digest of a file. Blocks.
pub(super) fn part(file: &File) -> std::io::Result<Part> {
    let mut hasher = blake3::Hasher::new();
    let (mut from, mut bytes, mut piece) = (again(file)?, 0, vec![0; 1 << 20]);
    loop {
        let count = from.read(&mut piece)?;
        if count == 0 {
            return Ok(Part { bytes, blake3: hasher.finalize().to_hex().to_string() });
        }
        hasher.update(&piece[..count]);
        bytes += count as u64;
    }
}

/// Frees the zeros of a memory that was written as a whole. Blocks.
pub(super) fn dig_holes(file: &File) -> std::io::Result<()> {
    use nix::fcntl::{FallocateFlags, fallocate};
    const PIECE: usize = 64 << 10;
    let (mut from, mut at, mut piece, zeros) = (again(file)?, 0i64, vec![0; PIECE], vec![0; PIECE]);
    loop {
        let mut filled = 0;
        while filled < PIECE {
            match from.read(&mut piece[filled..])? {
                0 => break,
                count => filled += count,
            }
        }
        if filled == PIECE && piece == zeros {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            match fallocate(file, flags, at, PIECE as i64) {
                // A file system without holes keeps the zeros.
                Err(nix::errno::Errno::EOPNOTSUPP) => return Ok(()),
                dug => dug?,
            }
        }
        at += filled as i64;
        if filled < PIECE {
            return Ok(());
        }
    }
}

/// Makes a file unchangeable. QEMU may be another user, and reads it through a descriptor; the folder is private.
pub(super) fn close(file: &File) -> std::io::Result<()> {
    let mode = match nix::unistd::geteuid().is_root() {
        true => {
            std::os::unix::fs::fchown(file, Some(0), Some(0))?;
            0o444
        }
        false => 0o400,
    };
    file.set_permissions(PermissionsExt::from_mode(mode))
}

/// Makes memory and state durable and unchangeable, and describes them. Blocks.
pub(super) fn seal(place: &Path, kind: Kind) -> Result<Description> {
    let vmm = kind.vmm();
    let sealed = |name: &str| {
        let file = File::open(place.join(name))?;
        if name == MEMORY && vmm == Vmm::Firecracker {
            dig_holes(&File::options().write(true).read(true).open(place.join(name))?)?;
        }
        file.sync_all()?;
        close(&file)?;
        part(&file)
    };
    let failed = |error: std::io::Error| Error::unavailable(format!("write a template: {error}"));
    let (memory, state) = (sealed(MEMORY).map_err(failed)?, sealed(STATE).map_err(failed)?);
    if state.bytes == 0 || state.bytes > limits::VM_DEVICE_STATE_BYTES {
        return Err(Error::unavailable(format!("a template's state has {} bytes", state.bytes)));
    }
    Ok(Description::new(kind, memory, state))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::description::{DESCRIPTION, MadeFrom, write_description};
    use super::super::template_folder::publish;
    use super::*;
    use std::path::PathBuf;

    pub(in crate::isolation::microvm) fn kind() -> Kind {
        Kind {
            image: String::from("abc"),
            engine: EngineName::Python,
            uid: 0,
            vmm: String::from("QEMU 10"),
            build: BUILD.to_owned(),
            machine: Vec::new(),
            memory_mib: 1,
            processors: 1,
            disk_bytes: 1 << 20,
            prepared: None,
        }
    }

    pub(in crate::isolation::microvm) fn template(folder: &Path, kind: &Kind) -> PathBuf {
        let (from, to) = (folder.join(".new-1"), folder.join(kind.key().expect("a key")));
        std::fs::create_dir(&from).expect("a folder");
        std::fs::write(from.join(MEMORY), vec![1; 1 << 20]).expect("written");
        std::fs::write(from.join(STATE), b"state").expect("written");
        let mut described = seal(&from, kind.clone()).expect("sealed");
        described.made = Some(Made::now(MadeFrom::FreshBoot, None));
        write_description(&from, &described).expect("described");
        publish(&from, &to).expect("published");
        to
    }

    fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(path).expect("it is there");
        change(&mut bytes);
        std::fs::remove_file(path).expect("removed");
        std::fs::write(path, bytes).expect("written");
    }

    #[test]
    fn damaged_templates_are_refused() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        assert!(Template::open(&folder.path().join("key"), &kind).is_ok_and(|found| found.is_none()));
        type Damage = (&'static str, fn(&Path));
        let damages: [Damage; 6] = [
            ("not what was written", |dir| change(&dir.join(MEMORY), |bytes| bytes[77] ^= 1)),
            ("another size", |dir| change(&dir.join(MEMORY), |bytes| bytes.truncate(4096))),
            ("not what was written", |dir| change(&dir.join(STATE), |bytes| bytes[0] ^= 1)),
            ("another machine", |dir| {
                change(&dir.join(DESCRIPTION), |bytes| {
                    let text = String::from_utf8_lossy(bytes).replace("QEMU 10", "QEMU 11");
                    *bytes = text.into_bytes();
                });
            }),
            ("template.json", |dir| std::fs::remove_file(dir.join(DESCRIPTION)).expect("removed")),
            ("state", |dir| {
                std::fs::remove_file(dir.join(STATE)).expect("removed");
                std::os::unix::fs::symlink("/etc/passwd", dir.join(STATE)).expect("a link");
            }),
        ];
        for (why, damage) in damages {
            let dir = template(folder.path(), &kind);
            assert!(Template::open(&dir, &kind).is_ok_and(|found| found.is_some()), "it is whole");
            damage(&dir);
            let refused = Template::open(&dir, &kind).expect_err("refused").to_string();
            assert!(refused.contains(why), "{refused} names {why}");
        }
    }

    #[test]
    fn foreign_options_are_refused() {
        let here = Kind { machine: qemu::machine(Chosen::Tcg), ..kind() };
        assert!(here.check_same(&Kind { disk_bytes: 7, ..here.clone() }).is_ok());
        let mut options = here.machine.clone();
        options.extend(["-drive", "file=/etc/passwd"].map(str::to_owned));
        let foreign = Kind { machine: options, ..here.clone() };
        assert_eq!(foreign.machine(), here.machine(), "what a manifest says is equal");
        for other in [foreign, Kind { uid: 7, ..here.clone() }, Kind { vmm: "QEMU 11".into(), ..here.clone() }] {
            assert_eq!(other.check_same(&here).err().map(|error| error.reason), Some("kind".into()));
        }
    }

    #[test]
    fn machines_differ_by_key() -> Result<()> {
        let one = kind();
        let other = Kind { disk_bytes: 2 << 20, ..one.clone() };
        assert_ne!(one.key()?, other.key()?);
        assert_eq!(one.key()?, kind().key()?);
        // A prepared worker has its limits; a machine that runs need not have the template's.
        let with = |pids| Kind { prepared: Some(KernelLimits { pids, ..KernelLimits::default() }), ..kind() };
        assert_ne!(with(7).key()?, with(8).key()?);
        assert!(with(7).is_same(&with(8)) && with(7).is_same(&one) && !with(7).is_same(&other));
        Ok(())
    }
}
