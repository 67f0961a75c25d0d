//! A freeze beside running code: it stands still for the pause, and goes on.

use std::fs;
use std::path::PathBuf;

use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::sys::fault;
use serde_json::Value;

use super::Shop;
use super::crash_safety::killed;
use super::full_disk::SmallDisk;
use super::pause::checkpoints;
use crate::support::{Host, User, WAITS, kernel, out, until, users};

/// Code of an engine: `first` binds a variable and writes a file; `long` changes both, waits for the file `go`, and changes
/// both again; `shown` prints both.
struct Dialect {
    engine: EngineName,
    first: &'static str,
    long: String,
    shown: &'static str,
}

fn dialects() -> [Dialect; 4] {
    let shell = |engine| Dialect {
        engine,
        first: "x=1; echo 1 > f",
        long: format!("x=2; echo 2 > f; {WAITS}; echo end; x=3; echo 3 > f"),
        shown: "echo $x $(cat f)",
    };
    let python = "x = 2; _ = open('f', 'w').write('2')\nimport os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n\
                  print('end'); x = 3; _ = open('f', 'w').write('3')";
    let node = "x = 2; require('fs').writeFileSync('f', '2');\n\
                while (!require('fs').existsSync('go')) await new Promise(r => setTimeout(r, 50));\n\
                console.log('end'); x = 3; require('fs').writeFileSync('f', '3');";
    [
        shell(EngineName::Kaish),
        shell(EngineName::Bash),
        Dialect {
            engine: EngineName::Python,
            first: "x = 1; _ = open('f', 'w').write('1')",
            long: python.into(),
            shown: "print(x, open('f').read())",
        },
        Dialect {
            engine: EngineName::Node,
            first: "var x = 1; require('fs').writeFileSync('f', '1')",
            long: node.into(),
            shown: "console.log(x, require('fs').readFileSync('f', 'utf8'))",
        },
    ]
}

/// Starts code and does not wait for it; returns its number.
fn begin(host: &Host, name: &str, code: &str) -> u64 {
    host.with(async |client| {
        let kernel = client.open_kernel(name).await.expect("it is there").0;
        kernel.run(&ExecRequest::code(code)).await.expect("it runs").exec().0
    })
}

fn workspace(host: &Host, name: &str) -> PathBuf {
    let shown: Value = serde_json::from_str(&host.ok(&["show", name, "--json"])).expect("JSON");
    host.workspace(shown["id"].as_str().expect("an id"))
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

fn has_written(host: &Host, name: &str) {
    let file = workspace(host, name).join("f");
    until("the running code", || fs::read_to_string(&file).is_ok_and(|text| text.trim() == "2"));
}

fn refused(host: &Host, command: &[&str], part: &str) {
    let output = host.cli(command);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && reported.contains(part), "{command:?}: {reported}");
}

#[test]
fn parked_code_goes_on() {
    for user in users() {
        let mut host = Host::prepare(user);
        host.launch();
        for Dialect { engine, first, long, shown } in dialects() {
            let name = engine.name();
            host.with(async |client| out(&kernel(&client, name, engine).await, first).await);
            let group = format!("of-{name}");
            host.ok(&["group", "new", &group]);
            host.ok(&["group", "add", &group, "--kernel", name]);
            let exec = begin(&host, name, &long);
            has_written(&host, name);
            let queued = begin(&host, name, shown);
            let taken = json(&host.ok(&["freeze", &group, "--park", "--json"]));
            let member = &taken["cost"]["members"][0];
            assert_eq!((&member["parked"], &member["queued"]), (&exec.into(), &vec![queued].into()), "{taken}");
            assert!(taken["notes"].to_string().contains(&format!("execution {exec} was under way")), "{taken}");
            assert!(host.ok(&["show", name, "--json"]).contains("busy"), "it runs on");
            fs::write(workspace(&host, name).join("go"), "").unwrap();
            assert_eq!(host.ok(&["exec", name, "--attach", &exec.to_string()]), "end\n", "{name}");
            assert_eq!(host.ok(&["exec", name, "--attach", &queued.to_string()]).trim(), "3 3", "{name}");
            // What it changed is not taken for captured.
            host.ok(&["archive", name]);
            host.ok(&["unarchive", name]);
            assert_eq!(host.ok(&["exec", name, shown]).trim(), "3 3", "{name}");
            let restored = host.cli(&["--yes", "restore", &group, "1"]);
            let said = String::from_utf8_lossy(&restored.stderr).into_owned();
            assert!(restored.status.success() && said.contains(&format!("execution {exec} was under way")), "{said}");
            assert_eq!(
                host.ok(&["exec", name, shown]).trim(),
                "1 2",
                "{name}: variables of before, files of the moment"
            );
            host.ok(&["--yes", "undo", &group]);
            assert_eq!(host.ok(&["exec", name, shown]).trim(), "3 3", "{name}");
            // Without running code it is a freeze like any other.
            let taken = json(&host.ok(&["freeze", &group, "--park", "--json"]));
            assert_eq!(taken["cost"]["members"][0]["parked"], 0, "{taken}");
        }
        assert_eq!(host.cli(&["--yes", "undo", "of-bash", "--park"]).status.code(), Some(2));
        assert_eq!(host.cli(&["freeze", "of-bash", "--park", "--interrupt"]).status.code(), Some(2));
        assert_eq!(host.cli(&["freeze", "of-bash", "--park", "--wait", "1s"]).status.code(), Some(2));
    }
}

/// Many short executions: each freeze holds a boundary, whichever it meets.
#[test]
fn parked_states_are_boundaries() {
    let mut host = Host::prepare(users()[0]);
    host.launch();
    host.with(async |client| out(&kernel(&client, "agent", EngineName::Bash).await, "n=0; echo 0 > f").await);
    host.ok(&["group", "new", "work"]);
    host.ok(&["group", "add", "work", "--kernel", "agent"]);
    for round in 0..4 {
        let mut last = 0;
        for _ in 0..30 {
            last = begin(&host, "agent", "n=$((n + 1)); sleep 0.02; echo $n > f");
        }
        let message = format!("r{round}");
        host.ok(&["freeze", "work", "--park", "-m", &message]);
        host.ok(&["exec", "agent", "--attach", &last.to_string()]);
        host.ok(&["--yes", "restore", "work", &message]);
        let numbers = host.ok(&["exec", "agent", "echo $n $(cat f)"]);
        let (n, f) = numbers.trim().split_once(' ').expect("two numbers");
        let (n, f): (u32, u32) = (n.parse().unwrap(), f.parse().unwrap());
        assert!(f == n || f == n + 1, "{numbers}");
    }
}

#[test]
fn uncertain_state_is_not_parked() {
    let mut host = Host::prepare(users()[0]);
    host.launch();
    host.with(async |client| out(&kernel(&client, "agent", EngineName::Python).await, "import time, threading").await);
    host.ok(&["group", "new", "work"]);
    host.ok(&["group", "add", "work", "--kernel", "agent"]);
    host.ok(&["exec", "agent", "t = threading.Thread(target=time.sleep, args=(600,), daemon=True); t.start()"]);
    let exec = begin(&host, "agent", "time.sleep(600)");
    until("an execution", || host.ok(&["show", "agent", "--json"]).contains("busy"));
    let before = host.ok(&["log", "agent", "--json"]);
    refused(&host, &["freeze", "work", "--park"], "cannot be parked: threads");
    assert_eq!((host.ok(&["log", "work", "--json"]), host.ok(&["log", "agent", "--json"])), (String::new(), before));
    assert!(host.ok(&["show", "agent", "--json"]).contains("busy"), "it runs on");
    // Nothing keeps it from work afterwards.
    host.ok(&["interrupt", "agent", &exec.to_string()]);
    assert_eq!(host.ok(&["exec", "agent", "print(1)"]).trim(), "1");
}

#[test]
fn unsaved_state_is_not_parked() {
    let mut host = Host::prepare(User::Own);
    let Some(disk) = SmallDisk::of(host.path("data")) else { return };
    host.launch();
    host.with(async |client| out(&kernel(&client, "agent", EngineName::Python).await, "import os, time").await);
    host.ok(&["group", "new", "work"]);
    host.ok(&["group", "add", "work", "--kernel", "agent"]);
    disk.fill(0);
    let said = host.cli(&["exec", "agent", "x = os.urandom(4 << 20)"]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("lost if the kernel stops"), "{said:?}");
    disk.free();
    begin(&host, "agent", "time.sleep(600)");
    until("an execution", || host.ok(&["show", "agent", "--json"]).contains("busy"));
    refused(&host, &["freeze", "work", "--park"], "an earlier execution changed could not be saved");
    assert_eq!(host.ok(&["log", "work", "--json"]), "");
    assert!(host.ok(&["freeze", "work", "--interrupt"]).contains("interrupted: execution"));
}

/// Other members fail after the kernel was captured; a daemon ends while it stands still.
#[test]
fn parked_code_survives_failures() {
    let mut shop = Shop::new(users()[0]);
    let long = format!("x=2; echo 2 > f; {WAITS}; echo 3 > f; echo end");
    let exec = begin(&shop.host, "agent", &long);
    has_written(&shop.host, "agent");
    let before = checkpoints(&shop);
    killed(&mut shop, "freeze.member.snapshot:2=kill", &["freeze", "shop", "--park"]);
    // The worker runs without a daemon.
    let files = workspace_of_dead(&shop);
    fs::write(files.join("go"), "").unwrap();
    until("the end without a daemon", || fs::read_to_string(files.join("f")).is_ok_and(|text| text.trim() == "3"));
    shop.host.launch();
    assert_eq!(shop.host.ok(&["exec", "agent", "--attach", &exec.to_string()]), "end\n");
    assert_eq!((shop.freezes(), checkpoints(&shop)), (0, before));
    fs::remove_file(files.join("go")).unwrap();
    let kept = fs::read(shop.data()).expect("there");
    fs::write(shop.data(), "this is no database".repeat(100)).expect("written");
    shop.give();
    let exec = begin(&shop.host, "agent", &long);
    until("an execution", || shop.host.ok(&["show", "agent", "--json"]).contains("busy"));
    // The next daemon knows which one runs.
    shop.host.kill();
    shop.host.launch();
    assert!(shop.host.ok(&["show", "agent"]).contains(&format!("busy (execution {exec})")));
    refused(&shop.host, &["freeze", "shop", "--park", "--on-failure", "pause"], "its kernels are paused");
    assert!(shop.host.ok(&["show", "agent", "--json"]).contains("busy"), "it runs on");
    fs::write(files.join("go"), "").unwrap();
    until("the end", || shop.host.ok(&["show", "agent", "--json"]).contains("suspended"));
    fs::write(shop.data(), kept).expect("written");
    shop.host.ok(&["resume", "shop"]);
    assert_eq!(shop.host.ok(&["exec", "agent", "--attach", &exec.to_string()]), "end\n");
    shop.host.env(fault::VARIABLE, "");
    shop.host.ok(&["freeze", "shop", "--park"]);
}

/// The only workspace, which no daemon names now.
fn workspace_of_dead(shop: &Shop) -> PathBuf {
    let kernels = fs::read_dir(shop.host.data().join("kernels")).unwrap();
    let mut found: Vec<PathBuf> = kernels.map(|entry| entry.unwrap().path().join("workspace")).collect();
    found.retain(|path| path.join("f").exists());
    found.pop().expect("a workspace")
}
