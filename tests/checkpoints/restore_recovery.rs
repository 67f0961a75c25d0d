//! An interrupted restore ends before code runs: with the live worker, with another worker, or without one.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::core::error::Error;
use ryokan::rpc::client::{HostClient, run_local};
use ryokan::sys::fault;

use crate::support::{Host, User, kernel, out, until};

/// Loading `b` ends the engine once per restore of the file `armed`.
const ENDS_ENGINE: &str = "
import os
class Ends:
    def __setstate__(self, state):
        import os
        if os.path.exists('armed'):
            os.remove('armed')
            os._exit(9)
b = Ends()
b.kept = 1
open('armed', 'w').close()
";

const LOOK: &str = "print(x, open('f').read())";

/// Creates a kernel in its second state; loading its first state, checkpoint `one`, ends the engine.
fn set_up() -> Host {
    let mut host = Host::prepare(User::Own);
    host.configure("[engines.python]\nrollback_memory = \"0\"\n");
    host.launch();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        out(&k, &format!("{ENDS_ENGINE}\nx = 1\nopen('f', 'w').write('1')")).await;
        host.ok(&["checkpoint", "k", "-m", "one"]);
        out(&k, "del b\nos.remove('armed')\nx = 2\nopen('f', 'w').write('2')").await;
    });
    host
}

fn arm(host: &mut Host, fault: &str) {
    host.kill();
    begin(host, fault);
}

fn begin(host: &mut Host, fault: &str) {
    host.env(fault::VARIABLE, fault);
    host.spawn();
    super::until_served(host);
}

/// Makes the daemon exit during a restore of `one`.
fn interrupt(host: &mut Host, point: &str) {
    arm(host, &format!("{point}=kill"));
    let answered: Result<_, Error> = run_local(async {
        let client = HostClient::connect(&host.socket(), "test").await?;
        client.open_kernel("k").await?.0.restore_checkpoint("one", 0).await
    })
    .unwrap();
    assert!(answered.is_err() && host.ends(), "{point}: {answered:?}");
}

fn end_workers(host: &Host) {
    for pid in host.workers() {
        // The worker may have exited already.
        let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
    }
    // The next daemon must not find one that is still ending: it would recover with it.
    until("the workers have ended", || host.workers().is_empty());
}

fn events(host: &Host, kind: &str) -> Vec<String> {
    let log = host.ok(&["events", "k"]);
    log.lines().filter(|line| line.contains(kind)).map(str::to_owned).collect()
}

/// Checks that the kernel works and is in this state; both directions are open.
fn is_at(host: &Host, state: &str, what: &str) {
    let other = if state == "1" { "2" } else { "1" };
    assert_eq!(host.ok(&["exec", "k", LOOK]), format!("{state} {state}\n"), "{what}");
    host.ok(&["exec", "k", &format!("x = {other}; open('f', 'w').write('{other}')")]);
    assert_eq!(host.ok(&["exec", "k", LOOK]), format!("{other} {other}\n"), "{what}");
}

/// The engine exits while the next daemon recovers with its worker: recovery continues without that worker.
#[test]
fn recovery_survives_dying_worker() {
    let mut host = set_up();
    interrupt(&mut host, "state.transition.begin.after_commit");
    let workers = host.workers();
    assert!(!workers.is_empty(), "the worker lives");
    arm(&mut host, "");
    is_at(&host, "1", "the first use");
    assert!(!events(&host, "restore_unfinished").is_empty(), "its worker ended: {}", host.ok(&["events", "k"]));
    assert!(events(&host, "restore_ended").iter().any(|event| event.contains("finished")));
}

/// Daemon and worker exit at each step: the next daemon needs no worker to recover.
#[test]
fn recovery_needs_no_worker() {
    for point in [
        "state.transition.begin.after_commit",
        "workspace.place.rename",
        "workspace.place.sync",
        "state.restore.finish.before_commit",
    ] {
        let mut host = Host::prepare(User::Own);
        host.configure("[daemon]\ndurability = \"power\"\n[engines.python]\nrollback_memory = \"0\"\n");
        host.launch();
        host.ok(&["new", "k", "--engine", "python"]);
        host.ok(&["exec", "k", "x = 1; _ = open('f', 'w').write('1')"]);
        super::checkpoint(&host, "k", "one");
        host.ok(&["exec", "k", "x = 2; _ = open('f', 'w').write('2')"]);
        interrupt(&mut host, point);
        end_workers(&host);
        // The recovery itself is killed, too, before it completes.
        for again in ["kernel.engine.recreate=kill", "engine.state.replace.before_commit=kill"] {
            arm(&mut host, again);
            assert!(host.ends(), "{point}: the start does not pass {again}");
        }
        arm(&mut host, "");
        is_at(&host, "1", point);
        assert_eq!(events(&host, "restore_unfinished"), Vec::<String>::new(), "{point}");
        host.ok(&["undo", "k", "--yes"]);
        assert_eq!(host.ok(&["exec", "k", LOOK]), "2 2\n", "{point}");
    }
}

/// The daemon is killed at any moment of a restore, in every other round with the worker: the kernel works at once.
#[test]
fn killed_restores_recover() {
    let mut host = Host::prepare(User::Own);
    host.configure("[engines.python]\nrollback_memory = \"0\"\n");
    host.launch();
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&["exec", "k", "x = 1; _ = open('f', 'w').write('1')"]);
    super::checkpoint(&host, "k", "one");
    host.ok(&["exec", "k", "x = 2; y = list(range(200_000)); _ = open('f', 'w').write('2')"]);
    super::checkpoint(&host, "k", "two");
    for round in 0..12_u64 {
        let reference = if round % 2 == 0 { "one" } else { "two" };
        let mut restoring = host.command("ryokan");
        restoring.args(["--no-autostart", "restore", "k", reference, "--yes"]).stdin(std::process::Stdio::null());
        let mut restoring =
            restoring.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(15 + 11 * round));
        host.kill();
        // After the daemon: three deaths in a minute that a daemon sees open the circuit breaker.
        if round % 4 < 2 {
            end_workers(&host);
        }
        begin(&mut host, "");
        restoring.wait().unwrap();
        let seen = host.ok(&["exec", "k", LOOK]);
        assert!(["1 1\n", "2 2\n"].contains(&seen.as_str()), "round {round}: {seen}");
    }
}

/// A recovery that cannot finish the restore reverts it; if neither is possible, it is retried.
#[test]
fn failed_recovery_is_retried() {
    for (fault, state) in [("kernel.engine.recreate=eio", "2"), ("state.restore.finish.before_commit=eio", "2")] {
        let mut host = set_up();
        interrupt(&mut host, "state.transition.begin.after_commit");
        end_workers(&host);
        arm(&mut host, fault);
        is_at(&host, state, fault);
        assert!(events(&host, "restore_ended").iter().any(|event| event.contains("reverted")), "{fault}");
    }
    let mut host = set_up();
    interrupt(&mut host, "workspace.place.rename");
    end_workers(&host);
    let objects = host.data().join("store").join("packs");
    let away = host.data().join("store").join("away");
    host.kill();
    std::fs::rename(&objects, &away).unwrap();
    std::fs::create_dir(&objects).unwrap();
    begin(&mut host, "");
    let refused = host.cli(&["exec", "k", LOOK]);
    assert!(!refused.status.success(), "neither state is there: {refused:?}");
    assert!(!events(&host, "restore_unfinished").is_empty());
    host.kill();
    std::fs::remove_dir_all(&objects).unwrap();
    std::fs::rename(&away, &objects).unwrap();
    begin(&mut host, "");
    // Attempts of the daemon before may have opened the breaker.
    host.ok(&["start", "k"]);
    is_at(&host, "2", "the store is back");
}

/// The daemon exits while it aborts a restore: the recorded decision holds.
#[test]
fn abort_crash_atomicity() {
    for (point, states) in
        [("state.transition.abort.before_commit", ["1", "1"]), ("state.transition.abort.after_commit", ["2", "2"])]
    {
        let mut host = set_up();
        interrupt(&mut host, point);
        arm(&mut host, "");
        let seen = host.ok(&["exec", "k", LOOK]);
        assert_eq!(seen.split_whitespace().collect::<Vec<_>>(), states, "{point}");
    }
}

/// A daemon that starts while the breaker is open recovers when the breaker closes, without a request.
#[test]
fn open_breaker_delays_recovery() {
    let mut host = set_up();
    interrupt(&mut host, "state.transition.begin.after_commit");
    end_workers(&host);
    let catalog = rusqlite::Connection::open(host.data().join("catalog.db")).unwrap();
    let text: String = catalog.query_row("SELECT state FROM kernels", [], |row| row.get(0)).unwrap();
    let mut record: serde_json::Value = serde_json::from_str(&text).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64;
    record["life"]["state"] = serde_json::json!({ "crashed": {
        "cause": { "kind": "notStarted", "detail": "the disk was full" }, "restart": { "breaker": { "until_ms": now + 3000 } }
    } });
    catalog.execute("UPDATE kernels SET state = ?", [record.to_string()]).unwrap();
    drop(catalog);
    arm(&mut host, "");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(180);
    while events(&host, "restore_ended").is_empty() {
        assert!(std::time::Instant::now() < deadline, "nothing recovers it: {}", host.ok(&["events", "k"]));
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    is_at(&host, "1", "recovered");
}

/// A restore that is refused before it records its intent leaves the interrupted one as it is, on disk too.
#[test]
fn refused_restore_keeps_interrupted() {
    let mut host = set_up();
    interrupt(&mut host, "state.transition.begin.after_commit");
    end_workers(&host);
    // Recovery fails, so the first restore stays interrupted.
    arm(&mut host, "kernel.engine.recreate=eio");
    let refused: Result<_, Error> = run_local(async {
        let client = HostClient::connect(&host.socket(), "test").await?;
        client.open_kernel("k").await?.0.restore_checkpoint("one", 99).await
    })
    .unwrap();
    assert!(refused.is_err(), "{refused:?}");
    arm(&mut host, "");
    // Attempts of the daemon before may have opened the breaker.
    host.ok(&["start", "k"]);
    let seen = host.ok(&["exec", "k", LOOK]);
    // The history is written with the restore's end; a killed daemon's last events may not be stored.
    let journal = host.ok(&["journal", "k", "--json"]);
    let expected = if journal.contains("went back to") { "2 2\n" } else { "1 1\n" };
    assert_eq!(seen, expected, "{journal}");
}

/// A variable that ends the engine when it is loaded does not keep a good checkpoint from being restored.
#[test]
fn restore_needs_no_present_state() {
    const DIES: &str = "
class Dies:
    def __setstate__(self, state):
        import os
        os._exit(9)
d = Dies()
d.kept = 1
x = 2
_ = open('f', 'w').write('2')
";
    for is_breaker_open in [false, true] {
        let host = Host::start();
        host.ok(&["new", "k", "--engine", "python"]);
        host.ok(&["exec", "k", "x = 1; _ = open('f', 'w').write('1')"]);
        super::checkpoint(&host, "k", "one");
        host.ok(&["exec", "k", DIES]);
        host.ok(&["stop", "k"]);
        if is_breaker_open {
            for _ in 0..4 {
                assert!(!host.cli(&["exec", "k", LOOK]).status.success(), "its state does not load");
            }
        }
        let restored = host.ok(&["restore", "k", "one", "--yes", "--json"]);
        assert!(restored.contains("files_changed"), "{restored}");
        is_at(&host, "1", "restored");
        assert!(host.ok(&["log", "k"]).contains("before restore of"), "the former state is kept");
    }
}
