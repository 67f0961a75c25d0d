//! Tests of suspended machines on the disk.

use std::os::unix::fs::MetadataExt as _;

use super::super::firecracker;
use super::*;
use crate::core::engine::EngineName;
use crate::link::bootstrap::BUILD;

const HERE: HostId = HostId::from_bytes([5; 16]);

fn kind() -> Kind {
    Kind {
        image: String::from("abc"),
        engine: EngineName::Python,
        uid: 0,
        vmm: String::from("QEMU 10"),
        build: BUILD.to_owned(),
        machine: ["-M", "q35", "-cpu", "qemu64", "-accel", "tcg"].map(str::to_owned).to_vec(),
        memory_mib: 1,
        processors: 1,
        disk_bytes: 4,
        prepared: None,
    }
}

fn saved(dir: &Path) -> Saved {
    let mut devices = create(dir).expect("created");
    std::io::Write::write_all(&mut devices, b"state").expect("written");
    let files = SavedFiles { devices, memory: SavedMemory::InState };
    std::fs::write(dir.join("disk"), b"disk").expect("written");
    let worker = WorkerIdentity {
        worker: WorkerId::from_bytes([1; 16]),
        kernel: KernelId::from_bytes([2; 16]),
        epoch: Epoch(3),
        build: BUILD.to_owned(),
        secret: [4; 32],
    };
    seal(dir, &dir.join("disk"), HERE, kind(), &worker, &files).expect("sealed");
    Saved::read(dir).expect("read").expect("it is there")
}

/// The saved memory is refused for that reason, is not changed, and continues in the machine that it is of.
fn refuses(dir: &Path, saved: &Saved, host: HostId, other: &Kind, reason: &str) {
    let disk = dir.join("disk");
    let before = [DESCRIPTION, STATE].map(|name| std::fs::read(dir.join(name)).expect("read"));
    let refused = saved.open(dir, &disk, host, other).err().map(|error| (error.code, error.reason));
    assert_eq!(refused, Some((crate::core::error::ErrorCode::Refused, reason.into())));
    let after = [DESCRIPTION, STATE].map(|name| std::fs::read(dir.join(name)).expect("read"));
    assert!(before == after, "{reason}: a refusal changed the files");
    let own = Saved::read(dir).expect("read").expect("it is there");
    assert!(own.open(dir, &disk, HERE, &kind()).is_ok(), "{reason}");
}

/// Replaces a word of the description on the disk.
fn changed(dir: &Path, from: &str, to: &str) -> Saved {
    let place = dir.join(DESCRIPTION);
    let text = std::fs::read_to_string(&place).expect("read");
    std::fs::write(&place, text.replacen(from, to, 1)).expect("written");
    let found = Saved::read(dir).expect("read").expect("it is there");
    std::fs::write(&place, text).expect("written");
    found
}

#[test]
fn architecture_mismatch_faults() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    saved(dir);
    let own = format!("\"arch\": \"{}\"", std::env::consts::ARCH);
    for other in ["vax", "", "X86_64"] {
        let foreign = changed(dir, &own, &format!("\"arch\": \"{other}\""));
        refuses(dir, &foreign, HERE, &kind(), "architecture_mismatch");
    }
    refuses(dir, &saved(dir), HostId::from_bytes([6; 16]), &kind(), "other_host");
}

#[test]
fn base_image_mismatch_faults() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let saved = saved(dir);
    for image in ["abcd", "ab", "", "ABC"] {
        refuses(dir, &saved, HERE, &Kind { image: image.into(), ..kind() }, "base_image_mismatch");
        let foreign = changed(dir, "\"image\": \"abc\"", &format!("\"image\": \"{image}\""));
        refuses(dir, &foreign, HERE, &kind(), "base_image_mismatch");
    }
}

#[test]
fn other_machines_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let saved = saved(dir);
    let machine = |words: [&str; 4]| words.map(str::to_owned).to_vec();
    let others: [(&str, Kind); 7] = [
        ("vmm_mismatch", Kind { vmm: firecracker::name("1.16.1"), machine: firecracker::machine(), ..kind() }),
        ("vmm_mismatch", Kind { vmm: "QEMU 11".into(), ..kind() }),
        ("build_mismatch", Kind { build: "other".into(), ..kind() }),
        ("machine_type_mismatch", Kind { machine: machine(["-M", "pc", "-cpu", "qemu64"]), ..kind() }),
        ("cpu_model_mismatch", Kind { machine: machine(["-M", "q35", "-cpu", "max"]), ..kind() }),
        ("machine_size_mismatch", Kind { memory_mib: 2, ..kind() }),
        ("kind", Kind { uid: 1, ..kind() }),
    ];
    for (reason, other) in others {
        refuses(dir, &saved, HERE, &other, reason);
    }
}

#[test]
fn other_formats_are_refused() {
    use crate::core::error::ErrorCode;

    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    saved(dir);
    let text = std::fs::read_to_string(dir.join(DESCRIPTION)).expect("read");
    let own = format!("\"format\": {FORMAT}");
    assert!(text.contains(&own), "{text}");
    for (text, code, reason) in [
        (text.replace(&own, "\"format\": 2"), ErrorCode::Unsupported, "format"),
        ("{\"format\": 4, \"machine\": \"of another time\"}".into(), ErrorCode::Unsupported, "format"),
        (text.replace(&own, "\"format\": \"3\""), ErrorCode::Corrupt, ""),
        (text.replace(&own, "\"formats\": 2"), ErrorCode::Corrupt, ""),
    ] {
        std::fs::write(dir.join(DESCRIPTION), &text).expect("written");
        let refused = Saved::read(dir).err().map(|error| (error.code, error.reason));
        assert_eq!(refused, Some((code, reason.into())), "{text}");
    }
    assert!(dir.join(STATE).exists(), "nothing is removed");
}

#[test]
fn changed_files_are_refused() {
    use crate::core::error::ErrorCode;

    let folder = tempfile::tempdir().expect("a folder");
    let (dir, disk) = (folder.path(), folder.path().join("disk"));
    let refused = |saved: &Saved| saved.open(dir, &disk, HERE, &kind()).err().map(|error| (error.code, error.reason));
    let first = saved(dir);
    std::fs::write(dir.join(STATE), b"stale").expect("written");
    assert_eq!(refused(&first), Some((ErrorCode::Corrupt, String::new())));
    let second = saved(dir);
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&disk, b"DISK").expect("written");
    assert_eq!(refused(&second), Some((ErrorCode::Refused, "disk".into())));
    std::fs::write(&disk, b"larger").expect("written");
    assert_eq!(refused(&second), Some((ErrorCode::Refused, "disk_size".into())));
    std::fs::remove_file(&disk).expect("removed");
    assert_eq!(refused(&second), Some((ErrorCode::Lost, String::new())));
    std::fs::write(dir.join(DESCRIPTION), b"{").expect("written");
    assert_eq!(Saved::read(dir).err().map(|error| error.code), Some(ErrorCode::Corrupt));
    remove(dir).expect("removed");
    assert!(Saved::read(dir).is_ok_and(|found| found.is_none()) && !dir.join(STATE).exists());
}

/// Bytes that all files of a suspended machine by pages have.
const MIB: u64 = 1 << 20;

/// A machine that was saved by its changed pages.
fn saved_by_pages(dir: &Path) -> Saved {
    use super::super::base::{BaseTemplate, keep, pin};

    let worker = saved(dir).worker();
    remove(dir).expect("removed");
    std::fs::write(dir.join("ram"), vec![1; MIB as usize]).expect("written");
    let base = File::open(dir.join("ram")).expect("opened");
    pin(dir, &base).and_then(|()| keep(dir)).expect("linked");
    std::fs::remove_file(dir.join("ram")).expect("removed");
    let [mut devices, mut pages] = [NEW, PAGES].map(|name| create_file(&dir.join(name)).expect("created"));
    std::io::Write::write_all(&mut devices, b"state").expect("written");
    std::io::Write::write_all(&mut pages, b"pages").expect("written");
    let template = Some(BaseTemplate { id: String::from("one"), blake3: String::from("digest") });
    let files = SavedFiles { devices, memory: SavedMemory::Pages(SavedPages { pages, base, template }) };
    seal(dir, &dir.join("disk"), HERE, kind(), &worker, &files).expect("sealed");
    drop_prepared(dir);
    Saved::read(dir).expect("read").expect("it is there")
}

#[test]
fn saved_pages_keep_their_base() {
    use crate::core::error::ErrorCode;

    let folder = tempfile::tempdir().expect("a folder");
    let (dir, disk) = (folder.path(), folder.path().join("disk"));
    let refused = |saved: &Saved| saved.open(dir, &disk, HERE, &kind()).err().map(|error| error.code);
    let saved = saved_by_pages(dir);
    let found = saved.open(dir, &disk, HERE, &kind()).expect("it is whole");
    let SavedMemory::Pages(pages) = found.memory else { panic!("it was saved by pages") };
    assert_eq!(pages.template.map(|template| template.id).as_deref(), Some("one"));
    assert_eq!(pages.base.metadata().expect("read").len(), MIB);
    let text = std::fs::read_to_string(dir.join(DESCRIPTION)).expect("read");
    assert!(text.contains("\"blake3\": \"digest\"") && !text.contains("in_state"), "{text}");
    refuses(dir, &saved, HERE, &Kind { memory_mib: 2, ..kind() }, "machine_size_mismatch");
    // Changed, shorter or without its base it is not loaded.
    for name in [PAGES, base::SAVED, STATE] {
        let whole = saved_by_pages(dir);
        let file = File::options().write(true).open(dir.join(name)).expect("opened");
        file.set_len(3).expect("cut off");
        assert_eq!(refused(&whole), Some(ErrorCode::Corrupt), "{name}");
        std::fs::remove_file(dir.join(name)).expect("removed");
        assert_eq!(refused(&whole), Some(ErrorCode::Corrupt), "{name}");
    }
    let whole = saved_by_pages(dir);
    std::fs::write(dir.join(PAGES), b"PAGES").expect("written");
    assert_eq!(refused(&whole), Some(ErrorCode::Corrupt));
    remove(dir).expect("removed");
    let left: Vec<_> = std::fs::read_dir(dir).expect("a folder").flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["disk"]);
}

/// As a data directory is moved to another disk: all files are other ones with the same bytes.
#[test]
fn copied_memory_continues() {
    use super::super::stamp::tests::copied;
    use crate::core::error::ErrorCode;

    let folder = tempfile::tempdir().expect("a folder");
    let (dir, disk) = (folder.path(), folder.path().join("disk"));
    let opened = |saved: &Saved| saved.open(dir, &disk, HERE, &kind()).map(drop).map_err(|error| error.code);
    let first = saved_by_pages(dir);
    for name in ["disk", STATE, PAGES, DESCRIPTION] {
        copied(&dir.join(name)).expect("copied");
    }
    assert_eq!(opened(&first), Ok(()));
    // Without the times.
    std::fs::write(dir.join("other"), b"disk").expect("written");
    std::fs::rename(dir.join("other"), &disk).expect("exchanged");
    assert_eq!(opened(&first), Ok(()));
    std::fs::write(dir.join("other"), b"DISK").expect("written");
    std::fs::rename(dir.join("other"), &disk).expect("exchanged");
    assert_eq!(opened(&first), Err(ErrorCode::Refused));
    // A large disk was not read: only a request discards its memory.
    let second = Saved { disk_contents: None, ..saved_by_pages(dir) };
    assert_eq!(opened(&second), Ok(()));
    copied(&disk).expect("copied");
    assert_eq!(opened(&second), Err(ErrorCode::Unavailable));
}

#[test]
fn large_disks_are_not_read() -> std::io::Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = File::options().read(true).write(true).create_new(true).open(folder.path().join("disk"))?;
    disk.set_len(1 << 40)?;
    assert!(disk_contents(&disk)?.is_some(), "holes are not read");
    nix::fcntl::fallocate(
        &disk,
        nix::fcntl::FallocateFlags::empty(),
        0,
        (limits::VM_COMPARED_DISK_BYTES + 1).cast_signed(),
    )?;
    assert_eq!(disk_contents(&disk)?, None);
    Ok(())
}

#[test]
fn written_files_are_taken() -> Result<()> {
    let (folder, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (dir, disk) = (folder.path(), folder.path().join("disk"));
    assert!(check_prepared(dir).is_err());
    std::fs::write(&disk, b"disk").expect("written");
    let mut running = prepare(other.path())?;
    move_prepared(other.path(), dir)?;
    check_prepared(dir)?;
    let mut write = |devices: &[u8], memory: &[u8]| {
        std::io::Write::write_all(&mut running.devices, devices).expect("written");
        let mut to = running.whole_memory().expect("it is there");
        std::io::Write::write_all(&mut to, memory).expect("written");
    };
    write(b"devices", &vec![0; (1 << 20) - 6]);
    write(b"", b"memory");
    let worker = saved(tempfile::tempdir().expect("a folder").path()).worker();
    seal(dir, &disk, HERE, kind(), &worker, &take_prepared(dir)?)?;
    let sealed = Saved::read(dir)?.expect("it is there");
    let opened = sealed.open(dir, &disk, HERE, &kind())?;
    drop_prepared(dir);
    assert!(check_prepared(dir).is_err(), "they are removed at the machine's end");
    assert!(sealed.open(dir, &disk, HERE, &kind()).is_ok(), "sealed files stay");
    let memory = opened.whole_memory().expect("it is there").metadata().expect("read");
    assert_eq!(memory.len(), 1 << 20);
    assert!(memory.blocks() * 512 < 1 << 18, "zeros are holes: {} blocks", memory.blocks());
    // What is not sealed any more changes with the running machine.
    write(b"more", b"more");
    assert_eq!(sealed.open(dir, &disk, HERE, &kind()).err().map(|error| error.code.name()), Some("corrupt"));
    drop(prepare(dir)?);
    drop(take_prepared(dir)?);
    // It goes on, and may be saved again.
    remove(dir)?;
    assert!(!dir.join(MEMORY).exists() && !dir.join(NEW).exists());
    take_prepared(dir).map(drop)
}

#[test]
fn unsealed_files_are_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let left =
        || std::fs::read_dir(dir).expect("a folder").flatten().map(|entry| entry.file_name()).collect::<Vec<_>>();
    // A sealed machine stays.
    saved(dir);
    remove_unsealed(dir).expect("left alone");
    assert!(Saved::read(dir).is_ok_and(|found| found.is_some()) && dir.join(STATE).exists());
    // Daemon and machine ended before the description was there.
    remove(dir).expect("removed");
    for name in [STATE, MEMORY, PAGES, base::SAVED, DEVICES, NEW] {
        std::fs::write(dir.join(name), b"left").expect("written");
    }
    remove_unsealed(dir).expect("removed");
    assert_eq!(left(), ["disk"]);
}

#[test]
fn shortage_is_busy() {
    use crate::core::error::ErrorCode;

    let code = |errno| {
        let error = std::io::Error::from_raw_os_error(errno);
        unless_short(&error, Error::corrupt(error.to_string())).code
    };
    for errno in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN] {
        assert_eq!(code(errno), ErrorCode::Busy);
    }
    assert_eq!((code(libc::EIO), code(libc::ENOENT)), (ErrorCode::Corrupt, ErrorCode::Corrupt));
}

#[test]
fn unreadable_memory_is_not_damaged() {
    use crate::core::error::ErrorCode;

    let code = |errno| unreadable("suspended.state", &std::io::Error::from_raw_os_error(errno)).code;
    assert_eq!([libc::ENOENT, libc::ELOOP].map(code), [ErrorCode::Corrupt; 2]);
    assert_eq!([libc::EIO, libc::EACCES].map(code), [ErrorCode::Unavailable; 2], "it may be readable later");
    assert_eq!(code(libc::EMFILE), ErrorCode::Busy);
}

#[test]
fn full_disk_has_its_reason() {
    let reason = |errno| failed(&std::io::Error::from_raw_os_error(errno)).reason;
    assert_eq!((reason(libc::ENOSPC).as_str(), reason(libc::EIO).as_str()), (DISK_FULL, ""));
}
