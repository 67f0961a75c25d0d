//! Places of clients: nobody takes those of others, and whoever has not said hello takes little.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::core::limits;

use super::system::SystemWide;
use crate::support::{Host, UNPRIVILEGED, User, kernel, users};

/// A message of one segment as it begins on the wire.
fn table(words: usize) -> Vec<u8> {
    [0, words as u32].iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn a_large_message_before_hello_ends_the_connection() {
    for user in users() {
        let host = Host::start_as(user);
        let connect = || {
            let stream = UnixStream::connect(host.socket()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            stream
        };
        // What it announces is enough: nothing of it is waited for.
        let mut large = connect();
        large.write_all(&table(limits::HELLO_WORDS + 1)).unwrap();
        let began = Instant::now();
        // Perhaps after a word about it.
        let over = large.read_to_end(&mut Vec::new());
        assert!(!over.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "it is over");
        assert!(began.elapsed() < Duration::from_secs(4), "at once, not when the time to say hello is over");
        // One as large as may be is awaited, as any client's is.
        let mut small = connect();
        small.write_all(&table(limits::HELLO_WORDS)).unwrap();
        small.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let waits = small.read(&mut [0; 64]).expect_err("nothing to read yet");
        assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock, "{waits}");
        // After hello large ones are welcome.
        host.with(async |client| {
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            let code = format!("echo large # {}", "x".repeat(limits::HELLO_WORDS * 8 * 4));
            let result = shell.run(&ExecRequest::code(code)).await.expect("accepted").result().await.expect("a result");
            assert_eq!(result.stdout, b"large\n");
        });
    }
}

#[test]
fn a_client_without_a_place_is_told_so() {
    let mut host = Host::prepare(User::Own);
    host.configure("[limits]\nclients = 2\n");
    host.launch();
    let mut taken = Vec::new();
    let said = until_refused(|| {
        // One of those that came before may have been leaving still, and so turned away this one.
        taken.push(UnixStream::connect(host.socket()).unwrap());
        host.cli(&["ls"])
    });
    assert!(said.contains("has 2 clients already"), "{said}");
    drop(taken);
    until_served(|| host.cli(&["ls"]));
}

/// Repeats until it fails: a connection counts when the daemon has accepted it. Gives what was said.
fn until_refused(mut run: impl FnMut() -> Output) -> String {
    let began = Instant::now();
    for tries in 0.. {
        let output = run();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            assert_eq!(output.status.code(), Some(4), "a refusal, as its code says: {said}");
            return said;
        }
        assert!(began.elapsed() < Duration::from_secs(8), "it is served still, {tries} times");
    }
    unreachable!("it is refused, or the test fails")
}

fn until_served(mut run: impl FnMut() -> Output) {
    let deadline = Instant::now() + Duration::from_secs(20);
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
fn one_user_of_a_system_wide_daemon_leaves_places_to_others() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("ignored, because only root starts a system-wide daemon");
    }
    let system = SystemWide::start("[limits]\nclients = 20\nclients_per_user = 3\n");
    let (greedy, other) = (UNPRIVILEGED, UNPRIVILEGED + 1);
    let made = system.cli(other, &["new", "mine"]);
    assert!(made.status.success(), "{}\n{}", String::from_utf8_lossy(&made.stderr), system.log());
    let script = "import socket, sys\nheld = [socket.socket(socket.AF_UNIX) for _ in range(40)]\n\
        for one in held: one.connect(sys.argv[1])\nprint('held', flush=True)\nsys.stdin.read()";
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
