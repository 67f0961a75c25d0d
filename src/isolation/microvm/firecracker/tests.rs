//! The client and the driver's requests against a server that checks them.

use std::path::Path;
use std::time::Duration;

use super::api::{Api, ApiError, Drive, MachineConfig, SnapshotCreate, SnapshotType, State, WantedState};
use super::api::{BootSource, CacheType};
use super::fake::{Fake, Fault, Stage};
use super::process::{INITRD, KERNEL, LOADED_MEMORY, LOADED_STATE, ROOT, SAVED_MEMORY, SAVED_STATE};
use super::{Machine, name};
use crate::core::durability::Durability;
use crate::core::error::{Error, ErrorCode, Result};
use crate::isolation::microvm::monitor::Monitor;
use crate::isolation::microvm::sockets::Sockets;
use crate::isolation::microvm::template::Kind;
use crate::isolation::microvm::vmm::Vmm;
use crate::isolation::microvm::{saved, template};

/// A kind of machines with Firecracker 1.16.1.
pub(super) fn kind() -> Kind {
    Kind { vmm: name("1.16.1"), machine: super::machine(), memory_mib: 64, ..template::tests::kind() }
}

/// A folder, the sockets of a machine in it, and a new process behind its API.
fn process() -> (tempfile::TempDir, Sockets, Fake) {
    let folder = tempfile::tempdir().expect("a folder");
    let sockets = Sockets::new(folder.path(), &"0a", Vmm::Firecracker);
    std::fs::create_dir(sockets.folder()).expect("a folder");
    let fake = Fake::serve(sockets.folder());
    (folder, sockets, fake)
}

#[tokio::test]
async fn boot_follows_api() -> Result<()> {
    let (_folder, sockets, fake) = process();
    Monitor::boot(&sockets, &kind(), Durability::Power).await?;
    assert_eq!(fake.locked().stage, Stage::Running);
    let calls = fake.locked().calls.clone();
    let body = |request: &str| {
        let found = calls.iter().find(|(call, _)| call == request);
        found.map(|(_, body)| body.clone()).unwrap_or_default()
    };
    assert_eq!(body("PUT /boot-source")["kernel_image_path"], format!("/proc/self/fd/{KERNEL}"));
    assert_eq!(body("PUT /boot-source")["initrd_path"], format!("/proc/self/fd/{INITRD}"));
    assert_eq!(body("PUT /machine-config")["mem_size_mib"], 64);
    let (root, disk) = (body("PUT /drives/root"), body("PUT /drives/disk"));
    assert_eq!((&root["path_on_host"], &root["is_read_only"]), (&format!("/proc/self/fd/{ROOT}").into(), &true.into()));
    assert_eq!((&disk["cache_type"], &disk["is_read_only"]), (&"Writeback".into(), &false.into()));
    assert_eq!(body("PUT /vsock")["uds_path"], "vsock");
    let expected = [
        "PUT /boot-source",
        "PUT /machine-config",
        "PUT /drives/root",
        "PUT /drives/disk",
        "PUT /vsock",
        "PUT /entropy",
        "PUT /actions",
    ];
    assert_eq!(fake.requests(), expected);
    Ok(())
}

#[tokio::test]
async fn template_is_restored() -> Result<()> {
    let (_folder, sockets, fake) = process();
    Monitor::boot(&sockets, &kind(), Durability::Process).await?;
    fake.requests();
    Monitor::connect(&sockets).await?.save_template().await?;
    assert_eq!(fake.requests(), ["PATCH /vm", "PUT /snapshot/create"]);
    let (_slot_folder, slot, other) = process();
    for (saved, loaded) in [(SAVED_STATE, LOADED_STATE), (SAVED_MEMORY, LOADED_MEMORY)] {
        let [from, to] = [(&sockets, saved), (&slot, loaded)].map(|(of, number)| of.folder().join(number.to_string()));
        std::fs::copy(from, to).expect("copied");
    }
    let mut monitor = Monitor::connect(&slot).await?;
    monitor.load(&kind(), Duration::from_secs(5)).await?;
    assert!(monitor.is_stopped().await?, "it is loaded, and not resumed");
    let load = other.locked().calls.iter().find(|(call, _)| call == "PUT /snapshot/load").cloned().expect("loaded").1;
    assert_eq!((&load["mem_backend"]["backend_type"], &load["clock_realtime"]), (&"File".into(), &true.into()));
    assert_eq!((&load["vsock_override"]["uds_path"], &load["resume_vm"]), (&"vsock".into(), &false.into()));
    monitor.resume().await?;
    assert!(!monitor.is_stopped().await?);
    assert_eq!(other.requests(), ["PUT /snapshot/load", "PATCH /vm"]);
    // A process has one machine.
    let again = monitor.load(&kind(), Duration::from_secs(5)).await.expect_err("it has one");
    assert!(again.message.contains("machine already"), "{again}");
    Ok(())
}

#[tokio::test]
async fn parked_machine_is_saved() -> Result<()> {
    let (folder, sockets, fake) = process();
    let home = folder.path().join("kernel");
    std::fs::create_dir(&home).expect("a folder");
    Monitor::boot(&sockets, &kind(), Durability::Process).await?;
    let mut monitor = Monitor::connect(&sockets).await?;
    monitor.stop().await?;
    let missing = monitor.save_memory(&home).await.err().expect("nothing is prepared");
    assert!(missing.message.contains("machine.state"), "{missing}");
    // The descriptors of the process, as the fake finds them.
    drop(saved::prepare(&home)?);
    for (name, number) in [("machine.state", SAVED_STATE), ("machine.memory", SAVED_MEMORY)] {
        std::fs::hard_link(home.join(name), sockets.folder().join(number.to_string())).expect("linked");
    }
    fake.requests();
    let files = monitor.save_memory(&home).await?;
    assert_eq!(fake.requests(), ["PUT /snapshot/create"]);
    assert!(files.whole_memory().is_some() && home.join("suspended.memory").exists());
    monitor.go_on().await?;
    assert_eq!(fake.locked().stage, Stage::Running);
    assert!(!monitor.quit().await, "it must be killed");
    Ok(())
}

/// What the API answers to requests that no driver sends.
#[tokio::test]
async fn wrong_requests_are_refused() {
    let (_folder, _sockets, fake) = process();
    let api = Api::new(&fake.socket);
    let fault = |done: std::result::Result<(), ApiError>| match done {
        Err(ApiError::Refused { fault, status, .. }) if status == 400 => fault,
        other => panic!("it was not refused: {other:?}"),
    };
    let source = |kernel_image_path| BootSource { kernel_image_path, initrd_path: "i", boot_args: "" };
    let machine = |vcpu_count| MachineConfig { vcpu_count, mem_size_mib: 1, smt: false, track_dirty_pages: false };
    let snapshot = SnapshotCreate { snapshot_type: SnapshotType::Full, snapshot_path: "s", mem_file_path: "m" };
    // Order.
    assert!(fault(api.start().await).contains("without kernel"));
    assert!(fault(api.set_state(WantedState::Paused).await).contains("not supported: Fresh"));
    assert!(fault(api.create_snapshot(&snapshot, api.within).await).contains("not supported: Fresh"));
    // Types and values.
    assert!(fault(api.set_boot_source(&source("")).await).contains("field `kernel_image_path`"));
    assert!(fault(api.set_machine(&machine(33)).await).contains("field `vcpu_count`: it is 33"));
    // Fields.
    for (body, why) in [
        (serde_json::json!({ "vcpu_count": 1 }), "missing field `mem_size_mib`"),
        (serde_json::json!({ "vcpu_count": "1", "mem_size_mib": 1 }), "field `vcpu_count`: it is \"1\""),
        (serde_json::json!({ "vcpu_count": 1, "mem_size_mib": 1, "cpus": 1 }), "unknown field `cpus`"),
        (serde_json::json!([]), "is no object"),
    ] {
        assert!(fault(api.put("/machine-config", &body).await).contains(why), "{body}");
    }
    assert!(fault(api.put("/nowhere", &1).await).contains("Invalid request"));
    let drive = Drive {
        drive_id: "root",
        path_on_host: "p",
        is_root_device: false,
        is_read_only: true,
        cache_type: CacheType::Unsafe,
    };
    assert!(fault(api.put("/drives/disk", &drive).await).contains("does not match"));
    api.set_drive(&drive).await.expect("it is right");
    // A configured process loads nothing, and a started one is not configured.
    let late = Machine::new(&fake.socket).load(&kind(), api.within).await.expect_err("it is configured");
    assert!(late.message.contains("not supported: Configured"), "{late}");
    assert_eq!(fake.locked().stage, Stage::Configured);
    api.set_boot_source(&source("k")).await.expect("it is right");
    api.start().await.expect("it is configured");
    assert!(fault(api.set_boot_source(&source("k")).await).contains("not supported: Running"));
    assert!(fault(api.create_snapshot(&snapshot, api.within).await).contains("not supported: Running"));
    assert_eq!(api.describe().await.expect("described").state, State::Running);
}

#[tokio::test]
async fn damaged_snapshots_are_refused() {
    let (_folder, sockets, fake) = process();
    let path = |number: i32| sockets.folder().join(number.to_string());
    std::fs::write(path(LOADED_STATE), b"{").expect("written");
    std::fs::write(path(LOADED_MEMORY), b"memory").expect("written");
    let mut monitor = Monitor::connect(&sockets).await.expect("connected");
    let refused = monitor.load(&kind(), Duration::from_secs(5)).await.expect_err("it is damaged");
    assert!(refused.message.contains("Invalid snapshot state"), "{refused}");
    assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Unavailable, "vmm_refused"));
    assert_eq!(fake.locked().stage, Stage::Dead);
}

#[tokio::test]
async fn exchanged_program_is_noticed() {
    let (_folder, sockets, fake) = process();
    fake.fails("GET /", Fault::OtherVersion);
    let refused = Monitor::boot(&sockets, &kind(), Durability::Process).await.expect_err("another version");
    assert!(refused.message.contains("Firecracker 1.17.0 runs in place of Firecracker v1.16.1"), "{refused}");
    assert!(fake.requests().is_empty());
}

#[tokio::test]
async fn broken_answers_are_errors() {
    let cases = [
        (Fault::Hang, ErrorCode::Deadline, "in time: GET /"),
        (Fault::Close, ErrorCode::Unavailable, "cannot be reached"),
        (Fault::Garbage, ErrorCode::Unavailable, "answer is invalid"),
        (Fault::Endless, ErrorCode::Unavailable, "too long"),
        (Fault::EndlessHead, ErrorCode::Unavailable, "answer is invalid"),
        (Fault::OtherBody, ErrorCode::Unavailable, "answer is invalid"),
    ];
    for (what, code, text) in cases {
        let (_folder, _sockets, fake) = process();
        fake.fails("GET /", what);
        let mut api = Api::new(&fake.socket);
        if what == Fault::Hang {
            api.within = Duration::from_millis(100);
        }
        let error = Error::from(api.describe().await.expect_err("it is broken"));
        assert_eq!(error.code, code, "{what:?}: {error}");
        assert!(error.message.contains(text), "{what:?}: {error}");
        // The next request has a connection of its own.
        fake.locked().faults.clear();
        assert!(Api::new(&fake.socket).describe().await.is_ok(), "{what:?}");
    }
}

#[tokio::test]
async fn missing_process_is_late() {
    let mut api = Api::new(Path::new("/nowhere/api"));
    api.within = Duration::from_millis(50);
    assert!(matches!(api.listening().await, Err(ApiError::Late(_))));
    assert!(matches!(api.describe().await, Err(ApiError::Lost(_))));
}
