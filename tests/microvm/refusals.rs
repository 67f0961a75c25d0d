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
    assert!(said.contains("no image") && said.contains("scripts/build-image"), "{said}");
}

#[test]
fn host_paths_are_refused() {
    let host = Machines::start(User::Own);
    let new = ["new", "lab", "--isolation", "microvm"];
    let with = |more: &[&'static str]| [&new[..], more].concat();
    assert!(refused(&host, &with(&["--allow-path", "/opt:ro"])).contains("disk of its own"));
    assert!(refused(&host, &with(&["--net", "host"])).contains("no network"));
    assert!(refused(&host, &with(&["--cpus", "0.5"])).contains("whole processors"));
    assert!(refused(&host, &with(&["--engine", "node"])).contains("has no node"));
    assert!(refused(&host, &with(&["--image", "0123"])).contains("no image 0123"));
    assert!(host.machines().is_empty());
}

#[test]
fn machines_do_not_teleport() {
    let host = Machines::start(User::Own);
    host.ok(&["new", "lab", "--isolation", "microvm"]);
    let output = host.cli(&["teleport", "lab", "--to", "exec:cat"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains("virtual machine") && said.contains("ryokan export"), "{said}");
}
