//! What a machine cannot do is refused with a reason.

use super::Machines;
use crate::support::{Host, User};

fn refused(host: &Host, args: &[&str]) -> String {
    let output = host.cli(args);
    assert!(!output.status.success(), "{args:?} was accepted");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn missing_image_is_unsupported() {
    let host = Host::start();
    let output = host.cli(&["new", "lab", "--isolation", "microvm"]);
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("no image") && said.contains("ryokan images build"), "{said}");
}

#[test]
fn host_paths_are_refused() {
    let host = Machines::start(User::Own);
    let new = ["new", "lab", "--isolation", "microvm"];
    let with = |more: &[&'static str]| [&new[..], more].concat();
    assert!(refused(&host, &with(&["--allow-path", "/opt:ro"])).contains("disk of its own"));
    assert!(refused(&host, &with(&["--net", "host"])).contains("no network"));
    assert!(refused(&host, &with(&["--cpus", "0.5"])).contains("whole processors"));
    assert!(refused(&host, &with(&["--image", "0123"])).contains("no image 0123"));
    assert!(host.machines().is_empty());
}

#[test]
fn emulated_kvm_is_not_used() {
    let host = Machines::configured(User::Own, "[microvm]\naccelerator = \"kvm\"\n");
    let probe = std::process::Command::new(env!("CARGO_BIN_EXE_ryokan-worker")).arg("probe-kvm").output();
    let printed = String::from_utf8(probe.expect("it runs").stdout).expect("text");
    let serves = printed.trim().parse::<u64>().is_ok_and(|micros| micros <= 5000);
    let doctor = host.cli(&["doctor"]);
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert_eq!(said.contains("/dev/kvm, a guest's loop in"), serves, "{said}");
    host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    let output = host.cli(&["exec", "lab", "print(1)"]);
    match serves {
        true => assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n", "{}", host.log()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains("KVM does not serve") && said.contains("microvm.accelerator"), "{said}");
            assert!(host.machines().is_empty());
        }
    }
}

/// A program in a folder that every user can enter, which names a version of Firecracker.
fn firecracker(folder: &std::path::Path, version: &str) -> String {
    use std::os::unix::fs::PermissionsExt as _;
    let path = folder.join("fc");
    std::fs::write(&path, format!("#!/bin/sh\necho 'Firecracker v{version}'\n")).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
    path.display().to_string()
}

#[test]
fn firecracker_has_no_stand_in() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("open to others");
    let program = firecracker(folder.path(), "1.16.0");
    // Software emulation, so that the reason is the same on every host.
    let config = "[microvm]\naccelerator = \"tcg\"\nvmm = \"firecracker\"\nfirecracker = ";
    // A daemon that is root names the owner of /dev/kvm first.
    let host = Machines::cold(User::Unprivileged, &format!("{config}{program:?}\n"));
    let doctor = String::from_utf8_lossy(&host.cli(&["doctor"]).stdout).into_owned();
    assert!(doctor.contains("no connection to a restored machine"), "{doctor}");
    let start = |name: &str| {
        host.ok(&["new", name, "--isolation", "microvm", "--engine", "python"]);
        refused(&host, &["exec", name, "print(1)"])
    };
    let said = start("broken");
    assert!(said.contains("Firecracker 1.16.0") && said.contains("microvm.vmm"), "{said}");
    firecracker(folder.path(), "1.16.1");
    let said = start("slow");
    assert!(said.contains("needs KVM") && said.contains("microvm.accelerator is"), "{said}");
    std::fs::remove_file(folder.path().join("fc")).expect("removed");
    let said = refused(&host, &["new", "gone", "--isolation", "microvm", "--engine", "python"]);
    assert!(said.contains(&format!("there is no {program}")), "{said}");
    assert!(host.machines().is_empty());
}
