//! Client limits: one user cannot take all places, and a client costs little before its hello.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::ExecRequest;
use ryokan::core::limits;

use super::system_wide::SystemWide;
use crate::support::{Host, UNPRIVILEGED, User, kernel, run, users};

/// The header of a message of one segment.
fn table(words: usize) -> Vec<u8> {
    [0, words as u32].iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn large_hello_disconnects() {
    for user in users() {
        let host = Host::start_as(user);
        let connect = || {
            let stream = UnixStream::connect(host.socket()).unwrap();
            stream.set_read_timeout(Some(limits::CLIENT_HELLO)).unwrap();
            stream
        };
        // The announced size suffices for a refusal: the body is not awaited.
        let mut large = connect();
        large.write_all(&table(limits::HELLO_WORDS + 1)).unwrap();
        let began = Instant::now();
        // An error message may precede the end.
        let over = large.read_to_end(&mut Vec::new());
        assert!(!over.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "the connection is closed");
        assert!(began.elapsed() < limits::CLIENT_HELLO * 9 / 10, "at once, not at the deadline for hello");
        // A message of the maximum size is awaited, as any client's is.
        let mut small = connect();
        small.write_all(&table(limits::HELLO_WORDS)).unwrap();
        small.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let waits = small.read(&mut [0; 64]).expect_err("nothing to read yet");
        assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock, "{waits}");
        // After hello, larger messages are accepted.
        host.with(async |client| {
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            let code = format!("echo large # {}", "x".repeat(limits::HELLO_WORDS * 8 * 4));
            let result = shell.run(&ExecRequest::code(code)).await.expect("accepted").result().await.expect("a result");
            assert_eq!(result.stdout, b"large\n");
        });
    }
}

#[test]
fn client_limit_is_reported() {
    let mut host = Host::prepare(User::Own);
    host.configure("[limits]\nclients = 2\n");
    host.launch();
    let mut taken = Vec::new();
    let said = until_refused(|| {
        // An earlier connection may still count, and cause this refusal.
        taken.push(UnixStream::connect(host.socket()).unwrap());
        host.cli(&["ls"])
    });
    assert!(said.contains("has 2 clients already"), "{said}");
    drop(taken);
    until_served(|| host.cli(&["ls"]));
}

/// Repeats `run` until it fails, because a connection counts only once accepted. Returns its error
/// output.
fn until_refused(mut run: impl FnMut() -> Output) -> String {
    let began = Instant::now();
    for tries in 0.. {
        let output = run();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            assert_eq!(output.status.code(), Some(4), "the exit status of a refusal: {said}");
            return said;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "not refused after {tries} tries");
    }
    unreachable!("a refusal returns, the deadline fails")
}

fn until_served(mut run: impl FnMut() -> Output) {
    let deadline = Instant::now() + Duration::from_secs(180);
    loop {
        let output = run();
        if output.status.success() {
            return;
        }
        assert!(Instant::now() < deadline, "{}", String::from_utf8_lossy(&output.stderr));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn client_limit_is_per_user() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("ignored, because only root starts a system-wide daemon");
    }
    let system = SystemWide::start("[limits]\nclients = 20\nclients_per_user = 3\n");
    let (greedy, other) = (UNPRIVILEGED, UNPRIVILEGED + 1);
    let made = system.cli(other, &["new", "mine"]);
    assert!(made.status.success(), "{}\n{}", String::from_utf8_lossy(&made.stderr), system.log());
    // Connections without a hello end at its deadline: new ones take their places.
    let script = "import select, socket, sys\nheld = []\nwhile True:\n\
        \x20   new = [socket.socket(socket.AF_UNIX) for _ in range(40)]\n\
        \x20   for one in new: one.connect(sys.argv[1])\n    held = held[-80:] + new\n\
        \x20   print('held', flush=True)\n    if select.select([sys.stdin], [], [], 3)[0]: break";
    let mut holder = system.run_as(greedy, "/usr/bin/python3");
    holder.args(["-c", script]).arg(system.socket()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = holder.spawn().unwrap();
    holder.stdout.as_mut().unwrap().read_exact(&mut [0; 4]).unwrap();
    let said = until_refused(|| system.cli(greedy, &["ls"]));
    assert!(said.contains("you have 3 clients connected already"), "{said}");
    let ran = system.cli(other, &["exec", "mine", "echo served"]);
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "served\n", "{ran:?}\n{}", system.log());
    drop(holder.stdin.take());
    holder.wait().unwrap();
    until_served(|| system.cli(greedy, &["ls"]));
    assert!(system.cli(other, &["rm", "--yes", "mine"]).status.success());
}

#[test]
fn worker_limit_is_per_user() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("ignored, because only root starts a system-wide daemon");
    }
    let system =
        SystemWide::start("[limits]\nworkers = 2\nworkers_per_user = 1\n[pool]\npool_size = 0\nmin_idle = 0\n");
    let (greedy, other) = (UNPRIVILEGED, UNPRIVILEGED + 1);
    let ok = |uid: u32, args: &[&str]| {
        let output = system.cli(uid, args);
        assert!(output.status.success(), "{args:?}: {output:?}\n{}", system.log());
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for name in ["a", "b"] {
        ok(greedy, &["new", name]);
    }
    assert_eq!(ok(greedy, &["exec", "a", "echo served"]), "served\n");
    let refused = system.cli(greedy, &["exec", "b", "echo served"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("you have 1 workers already"), "{said}");
    assert!(said.contains("stop one of your kernels"), "{said}");
    ok(other, &["new", "mine"]);
    assert_eq!(ok(other, &["exec", "mine", "echo served"]), "served\n");
    ok(greedy, &["stop", "a"]);
    assert_eq!(ok(greedy, &["exec", "b", "echo served"]), "served\n");
}

#[test]
fn memory_limit_evicts_warm_workers() {
    let mut host = Host::prepare(User::Own);
    host.configure("[limits]\nmemory = \"1100M\"\n[pool]\npool_size = 1\nmin_idle = 1\n");
    host.launch();
    host.with(async |client| {
        crate::support::eventually("both slots are ready", async || {
            client.pools().await.expect("pools").iter().all(|pool| pool.idle == 1)
        })
        .await;
        let mut kernels = Vec::new();
        for name in ["a", "b", "c"] {
            kernels.push(kernel(&client, name, EngineName::Kaish).await);
        }
        for served in &kernels[..2] {
            assert_eq!(run(served, "echo served").await.stdout, b"served\n");
        }
        let refused = kernels[2].run(&ExecRequest::code("echo served")).await.err().expect("there is no memory left");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Busy, "workers"), "{refused}");
        assert!(refused.message.contains("promised 1 GiB") && refused.hint.contains("limits.memory"), "{refused}");
        kernels[0].stop(false).await.expect("stopped");
        assert_eq!(run(&kernels[2], "echo served").await.stdout, b"served\n");
        // A request beyond the total limit is refused, and evicts no warm worker.
        let mut wanted = crate::support::spec("large", EngineName::Kaish);
        wanted.memory_bytes = Some(2 << 30);
        let large = client.create_kernel(&wanted, "").await.expect("made").0;
        let refused = large.run(&ExecRequest::code("echo served")).await.err().expect("never");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Refused, "memory"), "{refused}");
    });
}

/// Concurrent requests cannot exceed the limit together: check and reservation are atomic.
#[test]
fn concurrent_worker_quota() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("ignored, because only root starts a system-wide daemon");
    }
    for pool in [0, 3] {
        let config = format!("[limits]\nworkers_per_user = 2\n[pool]\npool_size = {pool}\nmin_idle = 0\n");
        let system = SystemWide::start(&config);
        let names: Vec<String> = (0..8).map(|n| format!("k{n}")).collect();
        for name in &names {
            assert!(system.cli(UNPRIVILEGED, &["new", name]).status.success(), "{}", system.log());
        }
        let outputs: Vec<Output> = std::thread::scope(|scope| {
            let exec = |name: &String| system.cli(UNPRIVILEGED, &["exec", name, "sleep 3; echo served"]);
            let running: Vec<_> = names.iter().map(|name| scope.spawn(move || exec(name))).collect();
            running.into_iter().map(|one| one.join().expect("ran")).collect()
        });
        let served = outputs.iter().filter(|output| output.stdout == b"served\n").count();
        assert_eq!(served, 2, "{outputs:?}\n{}", system.log());
        for refused in outputs.iter().filter(|output| output.stdout != b"served\n") {
            let said = String::from_utf8_lossy(&refused.stderr);
            assert!(said.contains("you have 2 workers already"), "{said}");
        }
        // None of the kernels is marked as crashed.
        let listed = system.cli(UNPRIVILEGED, &["ls", "--json"]);
        assert!(!String::from_utf8_lossy(&listed.stdout).contains("\"crashed\""), "{listed:?}");
    }
}
