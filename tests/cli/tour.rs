//! The whole tour, as a new user runs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[test]
fn tour_succeeds_in_empty_home() {
    let _place = crate::microvm::Place::take();
    let home = tempfile::tempdir().expect("a folder");
    // The packages of the image stay: fetching them is no part of this.
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache"))).expect("a home");
    let programs = Path::new(env!("CARGO_BIN_EXE_ryokan")).parent().expect("a folder");
    let mut tour = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/tour"));
    tour.arg("--image");
    for name in ["XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "RYOKAN_SOCKET"] {
        tour.env_remove(name);
    }
    tour.env("HOME", home.path()).env("XDG_CACHE_HOME", cache).env("RYOKAN_TOUR_BIN", programs);
    let done = tour.stdin(Stdio::null()).output().expect("it runs");
    let (shown, said) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{shown}\n{said}");
    // Its part with virtual machines is left out where there is no QEMU.
    assert!(shown.contains("microvm") && !shown.contains("not here: "), "{shown}");
}
