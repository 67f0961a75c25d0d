//! In-memory restores of a Python kernel: their results, their limits, and the messages when a memory restore is
//! impossible.

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType, Restoration, RestoredFrom};
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecStatus;
use ryokan::rpc::client::KernelClient;

use crate::support::{Host, User, eventually, kernel, out, run, users};

/// A kernel of the python engine.
pub(super) async fn python(client: &ryokan::rpc::client::HostClient) -> KernelClient {
    kernel(client, "k", EngineName::Python).await
}

/// Takes a checkpoint; returns its id.
pub(super) async fn take(k: &KernelClient, name: &str) -> String {
    k.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, name)).await.expect("a checkpoint").id.to_string()
}

/// Restores, and expects a restore from memory.
pub(super) async fn recall(k: &KernelClient, name: &str) -> Restoration {
    let done = k.restore_checkpoint(name, 0).await.expect("restored");
    assert_eq!(done.engine, RestoredFrom::Memory, "{name}: {:?}", done.missed);
    done
}

/// Restores, and expects no restore from memory; returns the reason.
pub(super) async fn rebuilt(k: &KernelClient, name: &str) -> (String, Restoration) {
    let done = k.restore_checkpoint(name, 0).await.expect("restored");
    match done.engine.clone() {
        RestoredFrom::Saved { why_not_memory } => (why_not_memory, done),
        RestoredFrom::Memory => panic!("{name} was restored from memory"),
    }
}

fn keys(done: &Restoration) -> Vec<&str> {
    done.missed.iter().map(|missed| missed.key.as_str()).collect()
}

/// Values that cannot be pickled, each in mid-use.
const SET_UP: &str = "
import asyncio, collections, os, random, signal, socket, sqlite3, threading
random.seed(5)
count = (i for i in range(100)); next(count)
def walk():
    for at in range(100): yield at
walking = walk(); next(walking); next(walking)
lock = threading.Lock(); lock.acquire()
twice = lambda x: x * 2
twice.calls = 7
one, other = socket.socketpair(); one.send(b'waits')
reader, writer = os.pipe(); os.write(writer, b'piped')
collections.ours = 'of the module'
text = open('text.txt', 'w+'); text.write('0123456789'); text.flush(); text.seek(4)
late = open('late.txt', 'w'); late.write('not written yet')
base = sqlite3.connect(':memory:'); base.execute('create table t (n)'); base.execute('insert into t values (1)')
os.makedirs('below', exist_ok=True); os.chdir('below')
os.environ['MOOD'] = 'good'
received = []
signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
async def tick():
    await asyncio.sleep(0.001)
    return 'ticked'
await tick()
x = 1
";
const CHANGE: &str = "
next(count); next(walking); lock.release(); twice = None; one.recv(0); other.recv(10); one.close(); other.close()
os.read(reader, 10); os.close(reader); os.close(writer); del collections.ours; text.seek(0); text.write('XXXXXXX'); text.close()
late.close(); base.execute('insert into t values (2)'); os.chdir('/workspace'); os.rmdir('below'); os.environ['MOOD'] = 'bad'
signal.signal(signal.SIGUSR1, signal.SIG_DFL); random.random(); x = 2
asyncio.get_event_loop_policy().get_event_loop().close()
";
const SHOW: &str = "
print(next(count), next(walking), lock.locked(), twice(4), twice.calls, other.recv(10), os.read(reader, 10), collections.ours)
print(text.read(), base.execute('select count(*) from t').fetchone(), os.getcwd(), os.environ['MOOD'], random.random(), x)
one.send(b'again'); print(other.recv(10)); os.write(writer, b'more'); print(os.read(reader, 10))
os.kill(os.getpid(), signal.SIGUSR1); print(received, await tick())
late.close(); print(open('/workspace/late.txt').read(), open('/workspace/text.txt').read())
";
const SHOWN: &str = "1 2 True 8 7 b'waits' b'piped' of the module
456789 (1,) /workspace/below good 0.6229016948897019 1
b'again'
b'more'
[1] ticked
not written yet 0123456789";

#[test]
fn memory_restore_is_complete() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = python(&client).await;
            out(&k, SET_UP).await;
            take(&k, "one").await;
            let workers = host.workers();
            // Repeated restores return to the same point.
            for round in 0..3 {
                out(&k, CHANGE).await;
                let done = recall(&k, "one").await;
                assert!(done.missed.is_empty(), "{user:?} {round}: {:?}", done.missed);
                assert_eq!(out(&k, SHOW).await, SHOWN, "{user:?} {round}");
                recall(&k, "one").await;
            }
            assert_eq!(host.workers(), workers, "{user:?}: no worker was restarted for that");
            // A crash returns to the same point, as far as it was saved.
            out(&k, "x = 5").await;
            recall(&k, "one").await;
            run(&k, "os._exit(3)").await;
            assert_eq!(out(&k, "print(x, os.environ['MOOD'])").await, "1 good", "{user:?}");
        });
    }
}

#[test]
fn memory_restore_of_older_checkpoint() {
    let host = Host::start();
    host.with(async |client| {
        let k = python(&client).await;
        out(&k, "g = iter(range(100)); h = lambda: next(g)").await;
        for (name, step) in [("one", "h()"), ("two", "h()")] {
            out(&k, step).await;
            take(&k, name).await;
        }
        out(&k, "h(); h()").await;
        recall(&k, "one").await;
        assert_eq!(out(&k, "print(h())").await, "1");
        recall(&k, "two").await;
        assert_eq!(out(&k, "print(h())").await, "2");
        out(&k, "h(); h(); h()").await;
        recall(&k, "two").await;
        for (expected, what) in [("6", "undone"), ("2", "forwards again"), ("7", "undone again")] {
            let done = k.undo(0).await.expect("undone");
            assert_eq!(done.engine, RestoredFrom::Memory, "{what}");
            assert_eq!(out(&k, "print(h())").await, expected, "{what}");
        }
    });
}

#[test]
fn memory_copies_limited_per_worker() {
    let host = Host::start();
    host.with(async |client| {
        let k = python(&client).await;
        for name in ["one", "two", "three", "four"] {
            out(&k, &format!("x = {name:?}; g = (i for i in x)")).await;
            take(&k, name).await;
        }
        let (why, done) = rebuilt(&k, "one").await;
        assert!(why.contains("replaced it"), "{why}");
        assert!(keys(&done).contains(&"var/g"), "lost state is reported: {:?}", done.missed);
        assert_eq!(out(&k, "print(x, 'g' in globals())").await, "one False");
        recall(&k, "four").await;
        assert_eq!(out(&k, "print(x, *g)").await, "four f o u r");
        k.stop(false).await.expect("stopped");
        let (why, done) = rebuilt(&k, "four").await;
        assert!(why.contains("this worker was started after"), "{why}");
        assert!(keys(&done).contains(&"var/g"), "{:?}", done.missed);
        assert_eq!(out(&k, "print(x, 'g' in globals())").await, "four False");
        // An automatic checkpoint evicts no copy.
        k.checkpoint(&CheckpointRequest::new(CheckpointType::Auto, "automatic")).await.expect("taken");
        assert!(rebuilt(&k, "automatic").await.0.contains("automatic"));
    });
}

#[test]
fn memory_copy_shares_no_resources() {
    let host = Host::start();
    host.with(async |client| {
        let k = python(&client).await;
        out(
            &k,
            "
import fcntl, os, socket, subprocess
cat = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
server = socket.create_server(('127.0.0.1', 0)); port = server.getsockname()[1]
client = socket.create_connection(('127.0.0.1', port)); served, _ = server.accept()
held = open('held', 'w'); fcntl.flock(held, fcntl.LOCK_EX)
reader, writer = os.pipe()
",
        )
        .await;
        take(&k, "one").await;
        // Each of these would block for ever if a copy still held the other end.
        let seen = out(
            &k,
            "
cat.stdin.write(b'said'); cat.stdin.close(); print(cat.stdout.read(), cat.wait())
client.close(); print(served.recv(1)); served.close(); server.close()
server = socket.create_server(('127.0.0.1', port)); server.close()
held.close(); again = open('held', 'w'); fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.close(writer); print(os.read(reader, 1))
",
        )
        .await;
        assert_eq!(seen, "b'said' 0\nb''\nb''");
        let done = recall(&k, "one").await;
        let missed = keys(&done);
        assert_eq!(missed.iter().filter(|key| key.starts_with("descriptor/")).count(), 5, "{missed:?}");
        assert!(missed.iter().any(|key| key.starts_with("job/")), "{missed:?}");
        // The descriptors exist and fail; no other descriptor replaced them.
        let tried = out(
            &k,
            "
def fails(work):
    try: work()
    except OSError as error: return type(error).__name__
print(fails(lambda: client.send(b'x')), fails(lambda: cat.stdin.raw.write(b'x')), fails(server.accept))
print(os.write(writer, b'x'), os.read(reader, 1))
",
        );
        assert_eq!(tried.await.lines().last(), Some("1 b'x'"));
        let left = "print([c for p in os.listdir('/proc') if p.isdigit() for c in [open(f'/proc/{p}/comm').read()] if 'cat' in c])";
        assert_eq!(out(&k, left).await, "[]", "unreferenced objects are gone");
    });
}

#[test]
fn missing_memory_copy_reported() {
    let host = Host::start();
    host.with(async |client| {
        let k = python(&client).await;
        let threaded =
            "import threading; stop = threading.Event(); t = threading.Thread(target=stop.wait); t.start(); x = 1";
        out(&k, threaded).await;
        take(&k, "threaded").await;
        out(&k, "stop.set(); t.join(); x = 2").await;
        let (why, _) = rebuilt(&k, "threaded").await;
        assert!(why.contains("2 threads run"), "{why}");
        assert_eq!(out(&k, "print(x)").await, "1");
    });
    // Disabled by configuration, and unsupported by an engine.
    let host = Host::prepare(User::Own);
    host.configure("[engines.python]\nrollback_memory = \"0\"\n");
    let mut host = host;
    host.launch();
    host.with(async |client| {
        let k = python(&client).await;
        out(&k, "x = 1").await;
        take(&k, "one").await;
        assert!(rebuilt(&k, "one").await.0.contains("configuration"));
        let kaish = kernel(&client, "kaish", EngineName::Kaish).await;
        out(&kaish, "x=1").await;
        take(&kaish, "one").await;
        assert_eq!(rebuilt(&kaish, "one").await.0, "");
    });
}

#[test]
fn memory_copies_evicted_oldest_first() {
    let mut host = Host::prepare(User::Own);
    host.configure("[engines.python]\nrollback_memory = \"40M\"\n");
    host.launch();
    host.with(async |client| {
        let k = python(&client).await;
        out(&k, "big = [bytes(1000) for _ in range(60_000)]; x = 1").await;
        take(&k, "large").await;
        recall(&k, "large").await;
        recall(&k, "large").await;
        // Shared pages cost nothing; pages that the engine releases count for the copies.
        out(&k, "big = None; x = 2").await;
        take(&k, "small").await;
        out(&k, "x = 3").await;
        recall(&k, "small").await;
        assert_eq!(out(&k, "print(x, big)").await, "2 None");
        let (why, _) = rebuilt(&k, "large").await;
        assert!(why.contains("memory is short"), "{why}");
        assert_eq!(out(&k, "print(x, len(big))").await, "1 60000");
    });
}

#[test]
fn memory_restore_keeps_streams() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = python(&client).await;
            out(&k, "import time; n = 0").await;
            take(&k, "one").await;
            recall(&k, "one").await;
            let endless = "while True: n += 1; open('begun', 'w').close(); time.sleep(0.001)";
            let exec = k.run(&ryokan::core::exec::ExecRequest::code(endless)).await.unwrap();
            let begun = host.workspace(k.info().await.unwrap().id).join("begun");
            eventually("it runs", async || begun.exists()).await;
            exec.cancel().await.expect("interrupted");
            let result = exec.result().await.expect("a result");
            assert_eq!(result.end.status, ExecStatus::Interrupted, "{user:?}: {:?}", result.end);
            assert!(String::from_utf8_lossy(&result.stderr).contains("KeyboardInterrupt"), "{user:?}");
            assert_ne!(out(&k, "print(n)").await, "0", "{user:?}");
            let mut asks = ryokan::core::exec::ExecRequest::code("print(input() * 2)");
            asks.stdin = b"given\n".to_vec();
            let asked = k.run(&asks).await.unwrap().result().await.unwrap();
            assert_eq!(asked.stdout, b"givengiven\n", "{user:?}");
            assert_eq!(out(&k, "print('y' * 300_000)").await.len(), 300_000, "{user:?}");
        });
    }
}

#[test]
fn memory_restores_leak_nothing() {
    let host = Host::start();
    host.with(async |client| {
        let k = python(&client).await;
        out(&k, "import os; n = iter(range(1000)); f = open('f', 'w'); r, w = os.pipe()").await;
        take(&k, "one").await;
        let look = "
def stat(p):
    try: return open(f'/proc/{p}/stat').read().rsplit(')', 1)[1].split()[0]
    except OSError: return '-'
states = [stat(p) for p in os.listdir('/proc') if p.isdigit() and p != '1']
print(len(states), 'Z' in states, len(os.listdir('/proc/self/fd')))
del states, stat";
        for _ in 0..3 {
            recall(&k, "one").await;
        }
        let before = out(&k, look).await;
        let inits = || -> usize {
            // Init lets only root see the copies.
            host.workers()
                .iter()
                .filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")).ok())
                .map(Iterator::count)
                .sum()
        };
        let descriptors = inits();
        for round in 0..100 {
            assert_eq!(out(&k, "print(next(n))").await, "0", "{round}");
            let done = k.restore_checkpoint("one", 0).await.expect("restored");
            assert_eq!(done.engine, RestoredFrom::Memory, "{round}");
        }
        eventually("ended snapshots are reaped", async || out(&k, look).await == before).await;
        eventually("their descriptors are closed", async || inits() == descriptors).await;
    });
}

/// Safety checkpoints of restores and undos never evict the copy of a requested checkpoint.
#[test]
fn undo_keeps_named_copy() {
    let host = Host::start();
    host.with(async |client| {
        let k = python(&client).await;
        out(&k, "x = 1").await;
        take(&k, "named").await;
        out(&k, "x = 2").await;
        recall(&k, "named").await;
        for _ in 0..4 {
            k.undo(0).await.expect("undone");
        }
        recall(&k, "named").await;
        assert_eq!(out(&k, "print(x)").await, "1");
    });
}
