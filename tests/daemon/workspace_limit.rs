//! Limits of a workspace: of each file, and of all together.

use crate::support::Host;

/// A workspace beyond its limit ends the execution, not the engine; then code deletes files.
#[test]
fn workspace_limit_interrupts_execution() {
    let host = Host::start();
    for (engine, writes, look, pause, deletes) in [
        (
            "python",
            "import os, time\nx = 'kept'\nfor n in range(4000):\n open(f'f{n}', 'wb').write(bytes(1 << 20)); time.sleep(0.02)",
            "print(x)",
            "time.sleep(3)",
            "[os.remove(f) for f in os.listdir()]; print('gone')",
        ),
        (
            "bash",
            "x=kept; for n in $(seq 4000); do head -c 1M /dev/zero > f$n; sleep 0.02; done",
            "echo $x",
            "sleep 3",
            "rm f*; echo gone",
        ),
    ] {
        host.ok(&["new", "k", "--engine", engine, "--workspace", "16M"]);
        let said = host.cli(&["exec", "k", writes]);
        let error = String::from_utf8_lossy(&said.stderr);
        assert!(!said.status.success() && error.contains("beyond its size limit"), "{engine}: {said:?}");
        // Further executions are not interrupted for what is there, only for more.
        assert_eq!(host.ok(&["exec", "k", look]).trim(), "kept", "{engine}");
        host.ok(&["exec", "k", pause]);
        let said = host.cli(&["exec", "k", writes]);
        assert!(String::from_utf8_lossy(&said.stderr).contains("beyond its size limit"), "{engine}: {said:?}");
        assert_eq!(host.ok(&["exec", "k", deletes]).trim(), "gone", "{engine}");
        assert_eq!(host.ok(&["exec", "k", look]).trim(), "kept", "{engine}");
        assert!(!host.ok(&["events", "--json"]).contains("kernel_crashed"), "{engine}");
        host.ok(&["rm", "k", "--yes"]);
    }
}

/// A file beyond the size limit is an error of the writing code and does not end the engine.
#[test]
fn file_size_limit() {
    let host = Host::start();
    for (engine, writes, look) in [
        ("kaish", "x=kept; head -c 5000000 /dev/zero > f || echo refused", "echo $x"),
        ("kaish", "x=kept; /usr/bin/head -c 5000000 /dev/zero > f || echo refused", "echo $x"),
        (
            "python",
            "x = 'kept'\ntry:\n open('f', 'wb').write(bytes(5000000))\nexcept OSError as e:\n print('refused', e.errno)",
            "print(x)",
        ),
    ] {
        host.ok(&["new", "k", "--engine", engine, "--workspace", "1M"]);
        let said = host.cli(&["exec", "k", writes]);
        assert!(String::from_utf8_lossy(&said.stdout).contains("refused"), "{engine}: {said:?}");
        assert_eq!(host.ok(&["exec", "k", look]).trim(), "kept", "{engine}");
        assert!(!host.ok(&["events", "--json"]).contains("kernel_crashed"), "{engine}");
        host.ok(&["rm", "k", "--yes"]);
    }
}
