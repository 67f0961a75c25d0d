//! Damaged databases are reported by name, left untouched, and do not affect other kernels.

use std::fs;
use std::path::PathBuf;

use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::ExecRequest;

use crate::support::{Host, eventually, kernel, out, run, users};

/// Overwrites the beginning and parts of the middle of a file, keeping its size; returns the new
/// content.
fn damage(path: &PathBuf) -> Vec<u8> {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    for at in (0..100).chain(middle..(middle + 200).min(bytes.len())) {
        if at < bytes.len() {
            bytes[at] ^= 0x5a;
        }
    }
    fs::write(path, &bytes).unwrap();
    for journal in ["-wal", "-shm"] {
        let mut name = path.clone().into_os_string();
        name.push(journal);
        let _ = fs::remove_file(PathBuf::from(name));
    }
    bytes
}

/// Two kernels whose workers have ended in order, and a stopped daemon.
fn stopped(user: crate::support::User) -> (Host, PathBuf, PathBuf) {
    let mut host = Host::prepare(user);
    host.configure("[daemon]\nresume_kernels = false\n");
    host.launch();
    let ids = host.with(async |client| {
        let mut ids = Vec::new();
        for name in ["bad", "good"] {
            let shell = kernel(&client, name, EngineName::Kaish).await;
            out(&shell, &format!("x={name}; echo file > /workspace/file")).await;
            ids.push(shell.info().await.expect("info").id.to_string());
        }
        ids
    });
    host.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(host.wait().success());
    let folder = |id: &String| host.data().join("kernels").join(id);
    let (bad, good) = (folder(&ids[0]), folder(&ids[1]));
    assert!(bad.is_dir() && good.is_dir(), "{bad:?}");
    (host, bad, good)
}

#[test]
fn damaged_catalog_stops_daemon() {
    for user in users() {
        let (mut host, bad, _) = stopped(user);
        let catalog = host.data().join("catalog.db");
        let whole = fs::read(&catalog).unwrap();
        let damaged = damage(&catalog);
        let state = fs::read(bad.join("state.db")).unwrap();
        host.spawn();
        let status = host.wait();
        assert!(!status.success() && status.code().is_some(), "it refuses, it does not crash: {status}");
        let log = host.log();
        assert!(log.contains("catalog.db") && log.contains("damaged"), "{log}");
        assert!(!log.contains("panicked"), "{log}");
        assert_eq!(fs::read(&catalog).unwrap(), damaged, "the damaged file is as it was");
        assert_eq!(fs::read(bad.join("state.db")).unwrap(), state, "other data is untouched");
        assert!(bad.join("workspace/file").exists(), "a kernel of a catalog that cannot be read is no orphan");
        // With the owner's copy restored, everything is there.
        fs::write(&catalog, whole).unwrap();
        host.launch();
        host.with(async |client| {
            let (shell, _) = client.open_kernel("bad").await.expect("there");
            assert_eq!(out(&shell, "echo $x").await, "bad");
        });
    }
}

#[test]
fn damaged_journal_affects_one_kernel() {
    let (mut host, bad, _) = stopped(crate::support::User::Own);
    let damaged = damage(&bad.join("state.db"));
    for _ in 0..2 {
        host.launch();
        host.with(async |client| {
            let listed = client.list_kernels(&Default::default()).await.expect("the list works");
            assert_eq!(listed.len(), 2);
            let (shell, info) = client.open_kernel("bad").await.expect("the kernel is known");
            assert!(info.state == "crashed" && !info.state_reason.is_empty(), "{info:?}");
            let error = shell.run(&ExecRequest::code("echo no")).await.err().expect("it does not run");
            assert!(
                [ErrorCode::Corrupt, ErrorCode::Unavailable, ErrorCode::Refused].contains(&error.code),
                "{error:?}"
            );
            let error = shell.message("user", "text").await.expect_err("nothing is written");
            assert!(
                [ErrorCode::Corrupt, ErrorCode::Unavailable, ErrorCode::Refused].contains(&error.code),
                "{error:?}"
            );
            let error = shell.each_journal_entry(0, 0, async |_| Ok(())).await.expect_err("nothing is read");
            assert!(error.code == ErrorCode::Corrupt && error.message.contains("state.db"), "{error:?}");
            let (good, _) = client.open_kernel("good").await.expect("there");
            assert_eq!(out(&good, "echo $x").await, "good");
        });
        host.kill();
    }
    assert_eq!(fs::read(bad.join("state.db")).unwrap(), damaged, "the damaged file is as it was");
    assert!(bad.join("workspace/file").exists(), "its files are still there");
    host.launch();
    host.with(async |client| client.remove_kernel("bad", 0).await.expect("it can be removed"));
    assert!(!bad.exists());
}

/// A history that cannot be loaded once, here because it is away, stays as it was: so does the archived kernel.
#[test]
fn unreadable_history_is_preserved() {
    let (mut host, bad, _) = stopped(crate::support::User::Own);
    host.launch();
    host.ok(&["archive", "bad"]);
    host.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(host.wait().success());
    let (state, away) = (bad.join("state.db"), host.path("away"));
    fs::rename(&state, &away).unwrap();
    host.launch();
    for args in [&["start", "bad"][..], &["exec", "bad", "echo no"], &["unarchive", "bad"], &["stop", "bad"]] {
        let refused = host.cli(args);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("could not be loaded"), "{args:?}: {said}");
    }
    // An orderly stop saves each kernel's state.
    host.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(host.wait().success());
    fs::rename(&away, &state).unwrap();
    host.launch();
    let shown: serde_json::Value = serde_json::from_str(&host.ok(&["show", "bad", "--json"])).unwrap();
    assert_eq!(shown["state"], "archived");
    host.ok(&["unarchive", "bad"]);
    assert_eq!(host.ok(&["exec", "bad", "echo $x"]), "bad\n");
}

#[test]
fn damaged_engine_db_reported() {
    for user in users() {
        let (mut host, bad, _) = stopped(user);
        let damaged = damage(&bad.join("engine.db"));
        host.launch();
        host.with(async |client| {
            let (shell, _) = client.open_kernel("bad").await.expect("the kernel is known");
            let error = shell.start().await.expect_err("its state cannot be loaded");
            assert_eq!(error.code, ErrorCode::Corrupt, "{error:?}\n{}", host.log());
            assert!(error.message.contains("the engine's state is damaged"), "{error:?}");
            let (good, _) = client.open_kernel("good").await.expect("there");
            assert_eq!(out(&good, "echo $x").await, "good");
            let result = shell.run(&ExecRequest::code("echo no")).await;
            match result {
                Err(error) => assert!(
                    [ErrorCode::Corrupt, ErrorCode::Unavailable, ErrorCode::Refused].contains(&error.code),
                    "{error:?}"
                ),
                Ok(running) => {
                    let end = running.result().await.expect("an end").end;
                    assert!(end.code != 0 && end.err.contains("the engine's state is damaged"), "{end:?}");
                }
            }
            assert_eq!(run(&good, "echo still").await.stdout, b"still\n");
            eventually("it does not try for ever", || async {
                let info = shell.info().await.expect("info");
                info.state == "crashed" || info.state == "stopped"
            })
            .await;
        });
        crate::support::until("only the good kernel's workers live", || host.workers().len() <= 2);
        assert_eq!(fs::read(bad.join("engine.db")).unwrap(), damaged, "the damaged file is as it was");
        assert!(bad.join("workspace/file").exists());
        host.with(async |client| client.remove_kernel("bad", 0).await.expect("it can be removed"));
    }
}
