//! A real Firecracker, named by `RYOKAN_FIRECRACKER`, with a guest of a few instructions on `/dev/kvm`.
//!
//! The guest counts its starts and its rounds in memory, where saved memory shows them. It needs nothing of a kernel, so
//! it also runs where KVM emulates: what does not serve for Linux serves here.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{machine, name, printed};
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::isolation::microvm::disk::open_disk;
use crate::isolation::microvm::image::{self, Image};
use crate::isolation::microvm::monitor::{Begin, Monitor, NewMachine, start};
use crate::isolation::microvm::saved::{self, SavedFiles};
use crate::isolation::microvm::sockets::Sockets;
use crate::isolation::microvm::template::{Kind, MEMORY, STATE, Template, seal, tests};
use crate::isolation::microvm::vmm::Vmm;
use crate::link::bootstrap::BUILD;

/// Where the guest is loaded, and where it counts.
const CODE: u64 = 16 << 20;
const COUNTERS: u64 = 2 << 20;

/// An executable that starts at its first instruction in 64-bit mode, with the first gigabyte mapped.
fn guest() -> Vec<u8> {
    let code: &[u8] = &[
        0xbb, 0x00, 0x00, 0x20, 0x00, // mov ebx, COUNTERS
        0x48, 0xff, 0x43, 0x08, // inc qword [rbx + 8]
        0x48, 0xff, 0x03, // inc qword [rbx]
        0xeb, 0xfb, // jmp to the one before
    ];
    let bytes = code.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [2u16, 62] {
        file.extend(half.to_le_bytes());
    }
    file.extend(1u32.to_le_bytes());
    // Entry, program headers, no section headers.
    for word in [CODE, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    // One segment to load, executable.
    for half in [1u32, 7] {
        file.extend(half.to_le_bytes());
    }
    for word in [4096, CODE, CODE, bytes, bytes, 4096] {
        file.extend(word.to_le_bytes());
    }
    file.resize(4096, 0);
    file.extend(code);
    file
}

/// What a test needs on this host.
struct Bench {
    folder: tempfile::TempDir,
    program: PathBuf,
    image: Image,
    kind: Kind,
}

impl Bench {
    fn new() -> Result<Bench> {
        let program =
            PathBuf::from(std::env::var_os("RYOKAN_FIRECRACKER").expect("RYOKAN_FIRECRACKER names a program"));
        let said = std::process::Command::new(&program).arg("--version").output().expect("it runs");
        let version = printed(&String::from_utf8_lossy(&said.stdout))?;
        let folder = tempfile::tempdir().expect("a folder");
        image::tests::write_image(folder.path(), "abc", "abc", BUILD);
        let image = image::find(folder.path(), "")?;
        std::fs::write(image.dir.join("vmlinux"), guest()).expect("written");
        std::fs::write(image.dir.join("rootfs.erofs"), vec![0; 64 << 10]).expect("written");
        let kind = Kind { vmm: name(&version.to_string()), machine: machine(), memory_mib: 64, ..tests::kind() };
        Ok(Bench { folder, program, image, kind })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a process for a machine with a folder and a disk of its own.
    async fn start(&self, worker: &str, begin: Begin<'_>) -> Result<(tokio::process::Child, Sockets)> {
        let sockets = Sockets::new(self.folder.path(), &worker, Vmm::Firecracker);
        let dir = self.path(&format!("home-{worker}"));
        std::fs::create_dir_all(&dir).expect("a folder");
        let disk = File::create(dir.join("disk")).and_then(|disk| disk.set_len(self.kind.disk_bytes));
        disk.expect("a disk");
        let saved_in = (!matches!(begin, Begin::Record { .. })).then(|| dir.clone());
        let child = start(NewMachine {
            program: &self.program,
            begin,
            kind: &self.kind,
            disk: open_disk(&dir.join("disk"))?,
            sockets: &sockets,
            account: None,
            cgroup: None,
            durability: Durability::Process,
            saved_in,
            is_temporary: true,
        })
        .await?;
        Ok((child, sockets))
    }
}

/// Starts and rounds of a guest, by its saved memory.
fn counters(memory: &File) -> (u64, u64) {
    let word = |at| {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, at).expect("it is large enough");
        u64::from_le_bytes(bytes)
    };
    (word(COUNTERS + 8), word(COUNTERS))
}

async fn rounds() {
    tokio::time::sleep(Duration::from_millis(300)).await;
}

async fn ended(mut child: tokio::process::Child) {
    child.kill().await.expect("it is killed");
}

/// Saves a running machine as for a suspend, with its process's end.
async fn suspend(home: &Path, child: tokio::process::Child, sockets: &Sockets) -> Result<SavedFiles> {
    let mut monitor = Monitor::connect(sockets).await?;
    monitor.stop().await?;
    let files = monitor.save_memory(home).await?;
    ended(child).await;
    Ok(files)
}

#[tokio::test]
#[ignore = "needs /dev/kvm and the program in RYOKAN_FIRECRACKER; scripts/check runs it"]
async fn real_machine_goes_on() -> Result<()> {
    let bench = Bench::new()?;
    let (child, sockets) = bench.start("0a", Begin::Boot(&bench.image)).await?;
    Monitor::boot(&sockets, &bench.kind, Durability::Process).await?;
    rounds().await;
    let state = suspend(&bench.path("home-0a"), child, &sockets).await?;
    let (starts, before) = counters(state.whole_memory().expect("a memory"));
    eprintln!("booted: {starts} starts, {before} rounds");
    assert!(starts == 1 && before > 0, "it ran");
    // A new process continues: it has not begun anew.
    let (child, sockets) = bench.start("0b", Begin::Continue { image: &bench.image, state: &state }).await?;
    let mut monitor = Monitor::connect(&sockets).await?;
    monitor.load(&bench.kind, Duration::from_secs(20)).await?;
    assert!(monitor.is_stopped().await?);
    monitor.resume().await?;
    rounds().await;
    assert!(sockets.folder().join("vsock").exists(), "its ports are in its own folder");
    let again = suspend(&bench.path("home-0b"), child, &sockets).await?;
    let (starts, after) = counters(again.whole_memory().expect("a memory"));
    eprintln!("continued in a new process: {starts} starts, {after} rounds");
    assert!(starts == 1 && after > before);
    sockets.unlink();
    assert!(!sockets.folder().exists());
    Ok(())
}

#[tokio::test]
#[ignore = "needs /dev/kvm and the program in RYOKAN_FIRECRACKER; scripts/check runs it"]
async fn real_template_serves_two() -> Result<()> {
    let bench = Bench::new()?;
    let place = bench.path("template");
    std::fs::create_dir(&place).expect("a folder");
    let made = |name: &str| {
        let mut options = File::options();
        options.read(true).write(true).create_new(true).open(place.join(name)).expect("made")
    };
    let (memory, state) = (made(MEMORY), made(STATE));
    memory.set_len(bench.kind.memory_bytes()).expect("sized");
    let begin = Begin::Record { image: &bench.image, memory: &memory, state: &state };
    let (child, sockets) = bench.start("0a", begin).await?;
    Monitor::boot(&sockets, &bench.kind, Durability::Process).await?;
    rounds().await;
    Monitor::connect(&sockets).await?.save_template().await?;
    ended(child).await;
    seal(&place, bench.kind.clone())?;
    let template = Template::untested(&place).map_err(|error| Error::internal(error.to_string()))?;
    let (_, before) = counters(&memory);
    let mut slots = Vec::new();
    for worker in ["0b", "0c"] {
        let (child, sockets) = bench.start(worker, Begin::Restore { image: &bench.image, template: &template }).await?;
        let mut monitor = Monitor::connect(&sockets).await?;
        monitor.load(&bench.kind, Duration::from_secs(20)).await?;
        monitor.resume().await?;
        slots.push((worker, child, sockets));
    }
    rounds().await;
    for (worker, child, sockets) in slots {
        let state = suspend(&bench.path(&format!("home-{worker}")), child, &sockets).await?;
        let (starts, after) = counters(state.whole_memory().expect("a memory"));
        eprintln!("slot {worker}: {starts} starts, {before} rounds before, {after} after");
        assert!(starts == 1 && after > before);
    }
    assert_eq!(counters(&memory), (1, before), "the template is as it was");
    Ok(())
}

#[tokio::test]
#[ignore = "needs /dev/kvm and the program in RYOKAN_FIRECRACKER; scripts/check runs it"]
async fn real_parked_machine_waits() -> Result<()> {
    let bench = Bench::new()?;
    let home = bench.path("home-0a");
    let (child, sockets) = bench.start("0a", Begin::Boot(&bench.image)).await?;
    Monitor::boot(&sockets, &bench.kind, Durability::Process).await?;
    rounds().await;
    let mut monitor = Monitor::connect(&sockets).await?;
    monitor.stop().await?;
    let first = counters(monitor.save_memory(&home).await?.whole_memory().expect("a memory"));
    rounds().await;
    let second = counters(monitor.save_memory(&home).await?.whole_memory().expect("a memory"));
    assert_eq!(first, second, "a paused machine stands still");
    saved::remove(&home)?;
    monitor.go_on().await?;
    rounds().await;
    let third = counters(suspend(&home, child, &sockets).await?.whole_memory().expect("a memory"));
    eprintln!("paused at {} rounds, went on to {}", second.1, third.1);
    assert!(third.0 == 1 && third.1 > second.1);
    Ok(())
}
