//! Tests of the node engine's driver from the outside: frames, streams, interrupts, state.

use std::path::Path;
use std::process::Command;

#[test]
fn node_driver_contract() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/node_driver");
    let output = Command::new("/usr/bin/python3")
        .args(["-B", "-m", "unittest", "discover", "--start-directory"])
        .arg(&folder)
        .output()
        .expect("python3 runs; scripts/check installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let summary = String::from_utf8_lossy(&output.stderr);
    assert!(!summary.contains("Ran 0 tests"), "no test ran: {summary}");
}
