//! A disk that is really full.
//!
//! Ends of executions are recorded with the reserve, or kept and written later. No client sees an
//! ended execution as running.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::core::fork::Forking;
use ryokan::rpc::client::{ExecutionClient, HostClient, KernelClient};
use ryokan::sys::fault;

use super::{inits, remove_all, strike, until};
use crate::support::{Host, UNPRIVILEGED, User, eventually, kernel, out, users};

/// A small file system in place of the data directory. Needs root.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    pub fn of(host: &Host, user: User) -> SmallDisk {
        let data = host.path("data");
        let owner = if user == User::Unprivileged { UNPRIVILEGED } else { 0 };
        let options = format!("size=24m,mode=700,uid={owner},gid={owner}");
        mount(Some("tmpfs"), &data, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).expect("root may");
        SmallDisk(data)
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    /// Takes all free space.
    pub fn fill(&self) {
        let mut filler = std::fs::File::options().create(true).append(true).open(self.filler()).unwrap();
        let all = [0; 4096];
        while filler.write_all(&all).is_ok() {}
    }

    pub fn free(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// A daemon on such a disk, and a directory for files that release waiting code.
fn small(user: User) -> (Host, SmallDisk, PathBuf) {
    let mut host = Host::prepare(user);
    let disk = SmallDisk::of(&host, user);
    host.launch();
    let go = host.path("go");
    std::fs::create_dir(&go).unwrap();
    std::fs::set_permissions(&go, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    (host, disk, go)
}

/// Code that waits for a file in `/go` and then writes more than a page.
async fn waits(kernel: &KernelClient, name: &str, go: &Path) -> ExecutionClient {
    kernel.mount_at("/go", &go.display().to_string(), false, 0).await.expect("mounted");
    let code = format!("/bin/sh -c 'while [ ! -e /go/{name} ]; do sleep 0.05; done; seq 1 2500'");
    let running = kernel.run(&ExecRequest::code(code)).await.expect("accepted");
    eventually("it runs", || async { kernel.info().await.expect("info").state == "busy" }).await;
    running
}

async fn status(kernel: &KernelClient, exec: u64) -> String {
    let mut status = String::new();
    let read = kernel.each_journal_entry(0, 0, async |entry| {
        if entry.exec == exec {
            status.clone_from(&entry.status);
        }
        Ok(())
    });
    read.await.expect("readable");
    status
}

async fn opened(client: &HostClient, name: &str) -> KernelClient {
    client.open_kernel(name).await.expect("there").0
}

#[test]
fn full_disk_records_ends() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    for user in users() {
        let (mut host, disk, go) = small(user);
        let reserve = host.data().join("reserve");
        assert!(reserve.is_file(), "the reserve exists");
        let start = |name: &str| std::fs::write(go.join(name), "").unwrap();
        let late = host.with(async |client| {
            let [one, two] = ["one", "two"];
            let (one, two) =
                (kernel(&client, one, EngineName::Kaish).await, kernel(&client, two, EngineName::Kaish).await);
            out(&two, "x=kept").await;
            let (first, second) = (waits(&one, "one", &go).await, waits(&two, "two", &go).await);
            disk.fill();
            start("one");
            let result = first.result().await.expect("journalled with the reserve");
            assert_eq!((result.end.status, result.stdout.len()), (ExecStatus::Done, 11393), "{user:?}");
            assert!(!reserve.exists(), "the reserve was released");
            // The rest of the reserve is for records of the past, and for code that deletes.
            assert_eq!(out(&one, "echo more").await, "more");
            // Another process takes even the released space.
            disk.fill();
            let refused = one.run(&ExecRequest::code(format!("echo {}", "x".repeat(1_000_000)))).await;
            let refused = refused.err().expect("no room for its record");
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Busy, "disk_full"), "{refused:?}");
            assert!(refused.hint.contains("ryokan gc"), "{refused:?}");
            start("two");
            let shown = second.result().await.expect_err("it cannot be journalled");
            assert!(shown.message.contains("ended (done)"), "{shown:?}");
            let exec = second.exec().0;
            assert_eq!(status(&two, exec).await, "done", "the execution is reported as ended");
            assert_eq!(two.info().await.expect("info").state, "ready");
            assert_eq!(two.var("x").await.expect("the kernel works").to_json(), "kept");
            disk.free();
            eventually("the journal takes it", || async {
                let execution = two.execution(second.exec()).await.expect("known");
                execution.result().await.is_ok_and(|result| result.stdout.len() == 11393)
            })
            .await;
            eventually("the reserve exists again", || async { reserve.is_file() }).await;
            assert_eq!(out(&one, "echo more").await, "more");
            one.stop(false).await.expect("stops");
            exec
        });
        let logs = |name: &str| {
            let kernels = std::fs::read_dir(host.data().join("kernels")).unwrap().flatten();
            kernels.filter(|kernel| kernel.path().join(name).metadata().is_ok_and(|log| log.len() > 0)).count()
        };
        assert_eq!(logs("state.db-wal"), 1, "a stop truncates the log; the other kernel is live");
        host.kill();
        host.launch();
        host.with(async |client| {
            let two = opened(&client, "two").await;
            assert_eq!(status(&two, late).await, "done", "the end is in the journal");
            assert_eq!(out(&two, "echo $x").await, "kept");
        });
        remove_all(&host);
    }
}

#[test]
fn full_disk_records_lost_execution() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let mut host = Host::prepare(User::Own);
    let disk = SmallDisk::of(&host, User::Own);
    host.launch();
    let go = host.path("go");
    std::fs::create_dir(&go).unwrap();
    let exec = host.with(async |client| {
        let one = kernel(&client, "one", EngineName::Kaish).await;
        waits(&one, "one", &go).await.exec().0
    });
    host.kill();
    inits(&host).into_iter().for_each(strike);
    until("its worker is gone", || host.workers().is_empty());
    // There is no reserve either.
    std::fs::remove_file(host.data().join("reserve")).unwrap();
    disk.fill();
    host.launch();
    host.with(async |client| {
        let one = opened(&client, "one").await;
        assert_eq!(status(&one, exec).await, "lost");
        disk.free();
        eventually("there is room again", || async {
            // Waits for the end, so that nothing is being started when the daemon is killed.
            match one.run(&ExecRequest::code("echo more")).await {
                Ok(running) => running.result().await.is_ok_and(|result| result.stdout == b"more\n"),
                Err(_) => false,
            }
        })
        .await;
    });
    host.restart();
    host.with(async |client| assert_eq!(status(&opened(&client, "one").await, exec).await, "lost"));
    remove_all(&host);
}

/// The worker cannot save: the client that stops it gets an error, and an event is recorded.
#[test]
fn stop_reports_unsaved_state() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    for user in users() {
        let (host, disk, go) = small(user);
        host.with(async |client| {
            let python = kernel(&client, "p", EngineName::Python).await;
            python.mount_at("/go", &go.display().to_string(), false, 0).await.expect("mounted");
            out(&python, "import os, time, threading; x, grown = 'kept', False").await;
            // The variable changes after the last save, and is larger than the reserve.
            let late = "def grow():\n    global x, grown\n    while not os.path.exists('/go/grow'): time.sleep(0.05)\n    x, grown = 'lost' * 1_500_000, True\nthreading.Thread(target=grow).start()";
            out(&python, late).await;
            disk.fill();
            std::fs::write(go.join("grow"), "").unwrap();
            let has_grown = async || python.var("grown").await.is_ok_and(|grown| grown.to_json() == true);
            eventually("the variable changes", has_grown).await;
            let execution = python.run(&ExecRequest::code("1")).await.expect("an idle kernel may run one");
            let warned = match execution.result().await {
                Ok(result) => result.end.unsaved().unwrap_or_default().to_owned(),
                Err(error) => error.message,
            };
            assert!(warned.contains("in execution 3 and after it is only in memory"), "{user:?}: {warned}");
            let error = python.stop(false).await.expect_err("the state cannot be saved");
            assert_eq!(error.reason, "disk_full", "{error:?}");
            assert!(error.message.contains("changed in execution 3 and after it (no room"), "{user:?}: {error:?}");
            assert!(!warned.contains("/proc") && !error.message.contains("/proc"), "{user:?}: {error:?}");
            assert_eq!(python.info().await.expect("info").state, "stopped", "{user:?}: the kernel is stopped");
            disk.free();
            let mut events = client.events(0).await.expect("events");
            // The event log had no room either; the event follows once there is room.
            let shown = async {
                while events.next().await.expect("an event").kind != "state_not_saved" {}
            };
            tokio::time::timeout(Duration::from_secs(180), shown).await.expect("the loss is reported");
            eventually("there is room again", || async { python.start().await.is_ok() }).await;
            assert_eq!(out(&python, "print(x)").await, "kept", "{user:?}: the last saved state");
        });
        remove_all(&host);
    }
}

/// On a full disk without a reserve a kernel can be removed, which frees space.
#[test]
fn full_disk_allows_kernel_removal() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let mut host = Host::prepare(User::Own);
    let disk = SmallDisk::of(&host, User::Own);
    host.launch();
    host.with(async |client| {
        let fills = kernel(&client, "fills", EngineName::Kaish).await;
        out(&fills, "head -c 14000000 /dev/urandom > large").await;
        out(&kernel(&client, "other", EngineName::Kaish).await, "x=kept").await;
        disk.fill();
        // The reserve is used up too: nothing can be written.
        let _ = std::fs::remove_file(host.data().join("reserve"));
        disk.fill();
        client.remove_kernel("fills", 0).await.expect("removed");
        assert_eq!(out(&opened(&client, "other").await, "echo $x").await, "kept", "and there is room");
    });
    host.kill();
    host.launch();
    host.with(async |client| {
        assert_eq!(client.open_kernel("fills").await.err().map(|error| error.code), Some(ErrorCode::NotFound));
        assert_eq!(out(&opened(&client, "other").await, "echo $x").await, "kept");
    });
    remove_all(&host);
}

/// On a full disk code can still delete files, which makes room.
#[test]
fn full_disk_allows_deletion() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (host, disk, _) = small(User::Own);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        out(&k, "import os; _ = open('fill', 'wb').write(os.urandom(12_000_000))").await;
        disk.fill();
        assert_eq!(out(&k, "os.remove('fill'); print('gone')").await, "gone");
        eventually("there is room", || async { host.data().join("reserve").is_file() }).await;
        assert_eq!(out(&k, "print(1)").await, "1");
    });
    remove_all(&host);
}

/// What only memory holds is not ended by an idle time.
#[test]
fn full_disk_keeps_idle_kernel() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (host, disk, _) = small(User::Own);
    host.ok(&["new", "k", "--engine", "python", "--idle-timeout", "1s"]);
    host.ok(&["exec", "k", "import os"]);
    disk.fill();
    let said = host.cli(&["exec", "k", "x = os.urandom(4 << 20)"]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("lost if the kernel stops"), "{said:?}");
    std::thread::sleep(Duration::from_secs(4));
    let state = || serde_json::from_str::<serde_json::Value>(&host.ok(&["show", "k", "--json"])).expect("JSON");
    assert_eq!(state()["state"], "ready", "{}", host.log());
    // With room again, it is saved and stopped.
    disk.free();
    assert_eq!(host.ok(&["exec", "k", "print(len(x))"]), format!("{}\n", 4 << 20));
    until("its idle stop", || state()["state"] == "stopped");
    assert_eq!(host.ok(&["exec", "k", "print(len(x))"]), format!("{}\n", 4 << 20));
}

/// A restore and its undo that need little room take the reserve.
#[test]
fn full_disk_allows_small_undo() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (host, disk, _) = small(User::Own);
    host.ok(&["new", "k"]);
    host.ok(&["exec", "k", "x=1; echo 1 > f"]);
    host.ok(&["checkpoint", "k", "-m", "one"]);
    host.ok(&["exec", "k", "x=2; echo 2 > f"]);
    host.ok(&["restore", "k", "one", "--yes"]);
    disk.fill();
    host.ok(&["undo", "k", "--yes"]);
    assert!(!host.data().join("reserve").exists(), "the reserve was released");
    assert_eq!(host.ok(&["exec", "k", "echo $x; cat f"]), "2\n2\n");
    disk.free();
    remove_all(&host);
}

/// A restore without room for the engine's state leaves the worker alone.
#[test]
fn full_disk_refuses_large_restore() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (host, disk, _) = small(User::Own);
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&["exec", "k", "import os; x = os.urandom(5 << 20)"]);
    host.ok(&["checkpoint", "k", "-m", "one"]);
    host.ok(&["exec", "k", "x = 1; numbers = iter(range(9)); print(next(numbers))"]);
    disk.fill();
    let refused = host.cli(&["restore", "k", "one", "--yes"]);
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("disk_full"), "{refused:?}");
    disk.free();
    assert_eq!(host.ok(&["exec", "k", "print(x, next(numbers))"]), "1 1\n", "the same worker\n{}", host.log());
    host.ok(&["restore", "k", "one", "--yes"]);
    assert_eq!(host.ok(&["exec", "k", "print(len(x))"]), format!("{}\n", 5 << 20));
}

/// A restore that the disk has no room for ends by itself: finished or reverted, once there is room.
#[test]
fn interrupted_restore_ends_after_full_disk() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (mut host, disk, _) = small(User::Own);
    host.ok(&["new", "k"]);
    host.ok(&["exec", "k", "x=1; echo 1 > f; /usr/bin/head -c 3000000 /dev/urandom > large"]);
    host.ok(&["checkpoint", "k", "-m", "one"]);
    host.ok(&["exec", "k", "x=2; echo 2 > f; /bin/rm large"]);
    host.kill();
    host.env(fault::VARIABLE, "state.transition.begin.after_commit=kill");
    host.launch();
    let killed = host.cli(&["restore", "k", "one", "--yes"]);
    assert!(!killed.status.success() && host.ends(), "killed in the restore");
    host.kill();
    inits(&host).into_iter().for_each(strike);
    disk.fill();
    host.env(fault::VARIABLE, "");
    host.launch();
    let full = host.cli(&["exec", "k", "echo $x; cat f"]);
    disk.free();
    let seen = until_done(&host, &["exec", "k", "echo $x; cat f"]);
    assert!(["1\n1\n", "2\n2\n"].contains(&seen.as_str()), "{seen:?}, before: {full:?}");
    host.ok(&["exec", "k", "x=3"]);
    remove_all(&host);
}

/// Repeats a command until it succeeds.
fn until_done(host: &Host, args: &[&str]) -> String {
    let mut last = None;
    for _ in 0..900 {
        let output = host.cli(args);
        if output.status.success() {
            return String::from_utf8(output.stdout).unwrap();
        }
        last = Some(output);
        std::thread::sleep(Duration::from_millis(200));
    }
    panic!("it does not recover: {last:?}\n{}", host.log())
}

/// A prepared copy is removed before the reserve is used.
#[test]
fn full_disk_drops_spares_first() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    for user in users() {
        let (host, disk, go) = small(user);
        let (reserve, spares) = (host.data().join("reserve"), host.data().join("prepared"));
        let kept = || spares.read_dir().map_or(0, Iterator::count);
        host.with(async |client| {
            let one = kernel(&client, "one", EngineName::Kaish).await;
            out(&one, "/bin/sh -c 'for n in $(seq 300); do echo $n > f$n; done'").await;
            let forked = one.fork(&Forking::of("child")).await.expect("forked");
            assert!(forked.children[0].1.is_ok());
            let made = || async {
                let (mut events, mut made) = (client.events(0).await.expect("events"), false);
                while let Some(event) = events.next_past().await.expect("an event") {
                    made |= event.kind == "copy_prepared";
                }
                made
            };
            eventually("a copy", made).await;
            assert_eq!(kept(), 1, "{user:?}");
            let running = waits(&one, "one", &go).await;
            disk.fill();
            std::fs::write(go.join("one"), "").unwrap();
            assert_eq!(running.result().await.expect("journalled").end.status, ExecStatus::Done, "{user:?}");
            assert_eq!((kept(), reserve.is_file()), (0, true), "{user:?}");
            disk.free();
        });
        remove_all(&host);
    }
}

/// Audit lines that find no room are a gap that the chain records.
#[test]
fn full_disk_leaves_audit_gap() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (mut host, disk, _) = small(User::Own);
    let rights = [ryokan::core::rights::Right::Read];
    let is_lost = |host: &Host| host.log().contains("the audit log could not be written");
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        for attempt in 0..2000 {
            disk.fill();
            k.attenuate(rights.into_iter().collect(), &format!("{attempt}")).await.expect("attenuated");
            if is_lost(&host) {
                return;
            }
        }
        panic!("every line found room");
    });
    let broken = |host: &Host| {
        let said = host.cli(&["audit", "--verify"]);
        assert_eq!(said.status.code(), Some(1), "{said:?}");
        let said = [said.stdout, said.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(said.contains("could not be written") && said.contains("not damaged"), "{said}");
    };
    broken(&host);
    host.kill();
    disk.free();
    host.launch();
    broken(&host);
    // No further line is needed.
    until("the gap is recorded", || host.ok(&["audit"]).contains("audit.gap"));
    broken(&host);
    let said = host.ok(&["verify"]);
    assert!(said.contains("gap, which is no damage: between lines") && said.contains("\nno damage"), "{said}");
}
