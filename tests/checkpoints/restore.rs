//! Effects of a restore and of undo, and the state that neither changes.

use ryokan::core::exec::ExecRequest;
use serde_json::Value;

use super::{checkpoint, log};
use crate::daemon::metrics::{reported, value};
use crate::support::{Host, User, WAITS, eventually, out, users};

/// Each engine: code for the first state, code that breaks it, and code that shows it.
const ENGINES: [[&str; 4]; 2] = [
    [
        "kaish",
        "x=before\ngreet() { echo hello $1; }\nmkdir -p src/deep empty\necho one > src/deep/a.txt\necho '#!/bin/sh' > run.sh\nln -s deep/a.txt src/link",
        "x=after\ngreet() { echo broken; }\nrm -r src\nrm -r empty\necho no > run.sh\necho new > new.txt",
        "echo $x; greet you; cat src/link run.sh; ls",
    ],
    [
        "python",
        "import os\nx = {'n': [1, 2.5, None]}\ndef greet(who): return 'hello ' + who\nos.makedirs('src/deep'); os.mkdir('empty')\nopen('src/deep/a.txt', 'w').write('one\\n')\nopen('run.sh', 'w').write('#!/bin/sh\\n')\nos.symlink('deep/a.txt', 'src/link')",
        "import shutil\nx = 'after'\ngreet = None\nshutil.rmtree('src'); os.rmdir('empty')\nopen('run.sh', 'w').write('no\\n')\nopen('new.txt', 'w').write('new\\n')",
        "print(x, greet and greet('you'), sorted(os.listdir('.')), open('run.sh').read(), os.path.exists('src/link') and open('src/link').read())",
    ],
];

#[test]
fn checkpoint_no_faults() {
    for user in users() {
        let host = Host::start_as(user);
        for [engine, set_up, break_it, show] in ENGINES {
            host.ok(&["new", engine, "--engine", engine]);
            host.ok(&["exec", engine, set_up]);
            let before = host.ok(&["exec", engine, show]);
            checkpoint(&host, engine, "before refactor");
            host.ok(&["exec", engine, break_it]);
            let shown = host.cli(&["exec", engine, show]);
            let after = String::from_utf8_lossy(&shown.stdout).into_owned();
            assert_ne!(before, after, "{user:?} {engine}");
            let pid = host.workers();
            host.ok(&["restore", engine, "before refactor", "--yes"]);
            assert_eq!(host.ok(&["exec", engine, show]), before, "{user:?} {engine}: restored");
            host.ok(&["undo", engine, "--yes"]);
            let again = host.cli(&["exec", engine, show]);
            assert_eq!(String::from_utf8_lossy(&again.stdout), after, "{user:?} {engine}: undone");
            host.ok(&["undo", engine, "--yes"]);
            assert_eq!(host.ok(&["exec", engine, show]), before, "{user:?} {engine}: forwards again");
            assert_eq!(host.workers(), pid, "{user:?} {engine}: no worker was restarted for that");
        }
    }
}

#[test]
fn restore_survives_restart() {
    let mut host = Host::start();
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&["exec", "k", "x = 1; open('f', 'w').write('1')"]);
    checkpoint(&host, "k", "one");
    host.ok(&["exec", "k", "x = 2; open('f', 'w').write('2')"]);
    host.ok(&["stop", "k"]);
    host.kill();
    host.launch();
    // Without a worker: one is started for it.
    host.ok(&["restore", "k", "one", "--yes"]);
    host.ok(&["stop", "k"]);
    host.kill();
    host.launch();
    assert_eq!(host.ok(&["exec", "k", "print(x, open('f').read())"]), "1 1\n");
    // One of the first stop, and one before the restore; nothing had changed at the second stop.
    assert_eq!(host.ok(&["show", "k", "--json"]).matches("\"checkpoints\": 3").count(), 1);
}

#[test]
fn restore_updates_mounts() {
    for user in users() {
        let host = Host::start_as(user);
        for name in ["first", "second"] {
            std::fs::create_dir(host.path(name)).unwrap();
            std::fs::write(host.path(name).join("who"), name).unwrap();
        }
        let (first, second) = (host.path("first"), host.path("second"));
        host.ok(&["new", "k"]);
        host.ok(&["mount", "k", "/first", first.to_str().unwrap()]);
        checkpoint(&host, "k", "with first");
        host.ok(&["unmount", "k", "/first"]);
        host.ok(&["mount", "k", "/second", second.to_str().unwrap()]);
        host.ok(&["restore", "k", "with first", "--yes"]);
        assert_eq!(host.ok(&["exec", "k", "cat /first/who"]), "first", "{user:?}");
        assert_ne!(host.cli(&["exec", "k", "cat /second/who"]).status.code(), Some(0), "{user:?}");
        host.ok(&["undo", "k", "--yes"]);
        assert_eq!(host.ok(&["exec", "k", "cat /second/who"]), "second", "{user:?}");
        host.ok(&["stop", "k"]);
        assert_eq!(host.ok(&["exec", "k", "cat /second/who"]), "second", "{user:?}: for good");
        // A resource that may not be granted any more prevents the whole restore.
        std::fs::remove_dir_all(&first).unwrap();
        let refused = host.cli(&["restore", "k", "with first", "--yes"]);
        assert_eq!(refused.status.code(), Some(3), "{user:?}: {refused:?}");
        assert_eq!(host.ok(&["exec", "k", "cat /second/who"]), "second", "{user:?}");
    }
}

#[test]
fn restore_keeps_journal_and_audit() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    host.ok(&["exec", "k", "echo one"]);
    checkpoint(&host, "k", "one");
    host.ok(&["message", "k", "--role", "user", "remember me"]);
    host.ok(&["exec", "k", "echo two"]);
    let entries = || -> Vec<Value> {
        host.ok(&["journal", "k", "--json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let before = entries();
    let version = |host: &Host| -> u64 {
        let shown: Value = serde_json::from_str(&host.ok(&["show", "k", "--json"])).unwrap();
        shown["version"].as_u64().unwrap()
    };
    let at = version(&host);
    let done: Value = serde_json::from_str(&host.ok(&["restore", "k", "one", "--yes", "--json"])).unwrap();
    let after = entries();
    assert_eq!(&after[..before.len()], &before[..], "earlier entries remain in the journal");
    let texts: Vec<&str> = after[before.len()..].iter().map(|entry| entry["text"].as_str().unwrap()).collect();
    assert!(texts[0].starts_with("checkpoint") && texts[1].starts_with("restored"), "{texts:?}");
    assert!(version(&host) > at);
    assert_eq!(done["version"].as_u64(), Some(version(&host)));
    assert_eq!(log(&host, "k")[0]["type"], "system");
}

/// A mount is removed with its directory, which a restore of the files removes.
#[test]
fn restore_updates_workspace_mounts() {
    for user in users() {
        let host = Host::start_as(user);
        let given = host.given(user);
        let source = given.display().to_string();
        for (engine, look) in [
            ("kaish", "cat out/file || echo none"),
            ("python", "import os; print(os.path.exists('out/file') and open('out/file').read() or 'none')"),
        ] {
            let looks = |says: &str, when: &str| {
                assert_eq!(host.ok(&["exec", engine, look]).trim_end(), says, "{user:?} {engine}: {when}");
            };
            let mounts = || host.ok(&["mounts", engine]).contains("/workspace/out");
            host.ok(&["new", engine, "--engine", engine]);
            host.ok(&["exec", engine, "x=1"]);
            checkpoint(&host, engine, "before");
            host.ok(&["mount", engine, "/workspace/out", &source]);
            looks("of the host", "mounted");
            host.ok(&["restore", engine, "before", "--yes"]);
            looks("none", "restored");
            assert!(!mounts());
            host.ok(&["undo", engine, "--yes"]);
            looks("of the host", "undone");
            assert!(mounts());
            checkpoint(&host, engine, "with it");
            host.ok(&["unmount", engine, "/workspace/out"]);
            looks("none", "unmounted");
            host.ok(&["restore", engine, "with it", "--yes"]);
            looks("of the host", "restored with it");
            // Also when the worker starts with the mount.
            host.ok(&["stop", engine]);
            host.ok(&["restore", engine, "before", "--yes"]);
            looks("none", "restored after a stop");
            // Nested mounts, in either order.
            std::fs::create_dir_all(given.join("sub")).expect("made");
            host.ok(&["mount", engine, "/workspace/out", &source]);
            host.ok(&["mount", engine, "/workspace/out/sub", &source]);
            looks("of the host", "both mounted");
            host.ok(&["restore", engine, "before", "--yes"]);
            looks("none", "restored without either");
            host.ok(&["undo", engine, "--yes"]);
            looks("of the host", "undone with both");
            let below = host.ok(&["mounts", engine]);
            assert!(below.contains("/workspace/out/sub"), "{user:?} {engine}: {below}");
        }
        assert_eq!(std::fs::read_to_string(given.join("file")).expect("read"), "of the host");
    }
}

/// Failures before anything is changed, and after everything was.
#[test]
fn failed_restore_keeps_mounts() {
    for point in ["state.transition.begin", "state.restore.finish"] {
        let mut host = Host::prepare(User::Own);
        host.env(ryokan::sys::fault::VARIABLE, &format!("{point}.before_commit=eio"));
        host.launch();
        let given = host.given(User::Own);
        host.ok(&["new", "k"]);
        host.ok(&["exec", "k", "x=1"]);
        checkpoint(&host, "k", "before");
        host.ok(&["mount", "k", "/workspace/one", &given.display().to_string()]);
        host.ok(&["mount", "k", "/two", &given.display().to_string()]);
        let refused = host.cli(&["restore", "k", "before", "--yes"]);
        assert!(!refused.status.success(), "{point}: {refused:?}");
        let both = "cat one/file; cat /two/file";
        assert_eq!(host.ok(&["exec", "k", both]), "of the hostof the host", "{point}");
        host.ok(&["restore", "k", "before", "--yes"]);
        assert_eq!(host.ok(&["exec", "k", "/bin/ls -A; echo $x"]), "1\n", "{point}");
        assert_eq!(std::fs::read_to_string(given.join("file")).expect("read"), "of the host");
    }
}

/// An abandoned restore must not undo others' work later.
#[test]
fn abandoned_restore_cancelled() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "kaish"]);
    host.ok(&["exec", "k", "x=old"]);
    checkpoint(&host, "k", "old");
    host.with(async |client| {
        let (k, _) = client.open_kernel("k").await.expect("there");
        let running = k.run(&ExecRequest::code(format!("x=new; {WAITS}; y=1"))).await.expect("accepted");
        eventually("it runs", async || k.info().await.expect("info").state == "busy").await;
        let clients = || value(&reported(&host), "ryokan_clients");
        let mut restore = host.command("ryokan").args(["restore", "k", "old", "--yes"]).spawn().expect("spawned");
        eventually("it is connected", async || clients() == 2.0).await;
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        assert!(restore.try_wait().expect("waited").is_none(), "the restore is queued");
        restore.kill().expect("killed");
        restore.wait().expect("ended");
        eventually("its disconnection is noticed", async || clients() == 1.0).await;
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        host.release(&k).await;
        running.result().await.expect("a result");
        assert_eq!(out(&k, "echo $x $y").await, "new 1");
    });
    assert!(!host.ok(&["journal", "k"]).contains("restored"));
}
