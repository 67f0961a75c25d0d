//! Copies that die, lie or do not wake; a daemon and an engine that die meanwhile.
//!
//! The effects stay within the kernel, and a restore ends in one of the two states.

use ryokan::core::checkpoint::RestoredFrom;
use ryokan::rpc::client::{HostClient, run_local};
use ryokan::sys::fault;

use super::memory::{python, rebuilt, recall, take};
use crate::support::{Host, User, out, run, users};

/// Kills all processes in the kernel except the engine and init.
const KILL_OTHERS: &str = "
import os
for p in os.listdir('/proc'):
    if p.isdigit() and int(p) not in (1, os.getpid()): os.kill(int(p), 9)
";

#[test]
fn killed_memory_copy_falls_back() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = python(&client).await;
            out(&k, "x = 1; g = (i for i in 'ab')").await;
            take(&k, "one").await;
            out(&k, &format!("x = 2{KILL_OTHERS}")).await;
            let (why, done) = rebuilt(&k, "one").await;
            assert!(why.contains("its process ended"), "{user:?}: {why}");
            assert!(done.missed.iter().any(|missed| missed.key == "var/g"), "{user:?}: {:?}", done.missed);
            assert_eq!(out(&k, "print(x, 'g' in globals())").await, "1 False", "{user:?}");
            let done = k.undo(0).await.expect("undone");
            assert_eq!(done.engine, RestoredFrom::Memory, "{user:?}");
            assert_eq!(out(&k, "print(x, next(g))").await, "2 a", "{user:?}");
        });
    }
}

#[test]
fn hostile_memory_copy_discarded() {
    let host = Host::start();
    host.with(async |client| {
        let k = python(&client).await;
        out(&k, "x = 0").await;
        for (deed, said) in [
            ("lambda: os._exit(1)", "its process ended while waking"),
            ("lambda: time.sleep(60)", "did not wake in time"),
            ("lambda: os.write(wire.fileno(), b'\\xff' * 100)", "breaks the limits"),
            ("lambda: wire.send({'ev': 'reply', 'id': 1, 'ok': True})", "did not answer the wake request"),
            ("lambda: wire.send({'ev': 'reply', 'id': 1, 'ok': False})", "did not answer the wake request"),
            ("lambda: wire.send({'ev': 'nonsense'})", "unknown event"),
        ] {
            // The code can reach the driver: here each copy has a different one.
            let set_up = format!(
                "import os, time, sys\nfrom _ryokan import snapshot, snapshot_fds, wire\nwas = snapshot_fds.attach\nsnapshot_fds.attach = {deed}\nx += 1; g = (i for i in 'ab')"
            );
            out(&k, &set_up).await;
            let id = take(&k, "").await;
            let x = out(&k, "print(x)").await;
            out(&k, "snapshot_fds.attach = was; x = -1").await;
            let (why, _) = rebuilt(&k, &id).await;
            assert!(why.contains(said), "{deed}: {why}");
            assert_eq!(out(&k, "print(x)").await, x, "{deed}");
        }
        // Copies that never existed, or that are no copies.
        for (deed, said) in [
            ("lambda number, link, engine: None", "ended before it was ready"),
            ("lambda number, link, engine: 'not today'", "not today"),
            ("lambda number, link, engine: 1 / 0", "ZeroDivisionError while forking"),
            ("lambda number, link, engine: os.write(link, bytes(8)) and None", "ended before it was ready"),
            (
                "lambda number, link, engine: os.write(link, frame({'ev': 'reply', 'id': number, 'ok': True})) and None",
                "it is the engine itself",
            ),
            (
                "lambda number, link, engine: subprocess.run(['/bin/cat', '/workspace/frame'], stdout=link, pass_fds=[]) and None",
                "it is gone",
            ),
            (
                "lambda number, link, engine: (os.fork() or (os.write(link, frame({'ev': 'reply', 'id': 1, 'ok': True})), time.sleep(60), os._exit(0))) and time.sleep(0.3)",
                "its parent lives",
            ),
        ] {
            let set_up = format!(
                "
import json, os, struct, subprocess, time
from _ryokan import snapshot, wire
def frame(fields):
    body = json.dumps(fields).encode()
    return struct.pack('<II', len(body), 0) + body
open('/workspace/frame', 'wb').write(frame({{'ev': 'reply', 'id': 1, 'ok': True}}))
if not hasattr(snapshot, 'was'): snapshot.was = snapshot._fork
snapshot._fork = {deed}
x = 7"
            );
            out(&k, &set_up).await;
            let id = take(&k, "").await;
            out(&k, "snapshot._fork = snapshot.was; x = 8").await;
            let (why, _) = rebuilt(&k, &id).await;
            assert!(why.contains(said), "{deed}: {why}");
            assert_eq!(out(&k, "print(x)").await, "7", "{deed}");
        }
    });
}

#[test]
fn active_memory_copy_discarded() {
    let host = Host::start();
    host.with(async |client| {
        let k = python(&client).await;
        let chatter = "
import os
from _ryokan import wire
def receive(os=os, engine=os.getpid(), wire=wire, was=wire.receive):
    if os.getpid() != engine: wire.send({'ev': 'jobs', 'jobs': []})
    return was()
wire.receive = receive; x = 1";
        out(&k, chatter).await;
        take(&k, "one").await;
        out(&k, "x = 2").await;
        let (why, _) = rebuilt(&k, "one").await;
        assert!(why.contains("did not keep waiting") || why.contains("did not answer the wake request"), "{why}");
        assert_eq!(out(&k, "print(x)").await, "1");
    });
}

#[test]
fn engine_kill_during_memory_restore() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = python(&client).await;
            let deed = "lambda: os.kill(engine, 9) or time.sleep(1) or []";
            let set_up = format!(
                "import os, time\nfrom _ryokan import snapshot, snapshot_fds\nengine = os.getpid(); snapshot_fds.attach = {deed}; x = 1"
            );
            out(&k, &set_up).await;
            take(&k, "one").await;
            out(&k, "x = 2").await;
            let failed = k.restore_checkpoint("one", 0).await.expect_err("its engine was killed");
            assert!(failed.message.ends_with("the kernel is as it was"), "{user:?}: {failed:?}");
            assert_eq!(out(&k, "print(x)").await, "2", "{user:?}");
            let (why, _) = rebuilt(&k, "one").await;
            assert!(why.contains("started after"), "{user:?}: {why}");
            assert_eq!(out(&k, "print(x)").await, "1", "{user:?}");
            // The new engine itself, right after its creation.
            out(&k, "import os\nx = 3").await;
            take(&k, "three").await;
            recall(&k, "three").await;
            run(&k, "os.kill(os.getpid(), 9)").await;
            assert_eq!(out(&k, "print(x)").await, "3", "{user:?}");
        });
    }
}

/// The kernel's present state, engine and files.
async fn state(client: &HostClient, what: &str) -> String {
    let k = client.open_kernel("k").await.expect("the kernel is there").0;
    let shown = out(&k, "print(x, open('f').read())").await;
    match shown.as_str() {
        "1 1" => "one".into(),
        "2 2" => "two".into(),
        _ => panic!("{what}: between two states: {shown:?}"),
    }
}

#[test]
fn daemon_kill_during_memory_restore() {
    let mut host = Host::prepare(User::Own);
    host.configure("[daemon]\ndurability = \"power\"\n");
    host.launch();
    host.with(async |client| {
        let k = python(&client).await;
        out(&k, "x = 1; g = iter('ab'); open('f', 'w').write('1')").await;
        take(&k, "one").await;
        out(&k, "x = 2; open('f', 'w').write('2')").await;
    });
    let families = ["state.transition.begin", "state.restore."];
    let is_passed = |name: &str| families.iter().any(|family| name.starts_with(family));
    let points: Vec<_> = fault::points().filter(|(label, _)| is_passed(label.name)).collect();
    assert!(points.len() > 2, "{}", points.len());
    for (_, point) in points {
        // The daemon ends; the worker and its copies remain.
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.launch();
        let answered = run_local(async {
            let client = HostClient::connect(&host.socket(), "test").await?;
            let k = client.open_kernel("k").await?.0;
            k.restore_checkpoint("one", 0).await
        })
        .unwrap();
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        host.with(async |client| {
            let what = format!("{point}: {answered:?}");
            let at = state(&client, &what).await;
            assert!(answered.is_err() || at == "one", "{what}: an acknowledged restore was lost");
            let k = client.open_kernel("k").await.unwrap().0;
            recall(&k, "one").await;
            assert_eq!(out(&k, "print(x, list(g))").await, "1 ['a', 'b']", "{what}");
            out(&k, "x = 2; open('f', 'w').write('2')").await;
        });
    }
}
