//! `serve` as seen by init: raw frames over a socket pair, output over two pipes.

use std::collections::{BTreeMap, VecDeque};
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use ryokan::link::frames::{Decoder, EndStatus, Event, Reply, Request, encode};
use ryokan::worker::engines::kaish::{Setup, serve};
use serde_json::{Value as Json, json};

/// An engine on a thread, with init's ends of its pipes and socket.
pub struct Engine {
    socket: UnixStream,
    decoder: Decoder,
    events: VecDeque<(Event, Vec<u8>)>,
    pub stdout: std::io::PipeReader,
    stderr: Option<std::io::PipeReader>,
    thread: Option<JoinHandle<i32>>,
    next: u64,
}

impl Engine {
    pub fn start() -> Engine {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let (stdout, stdout_in) = std::io::pipe().expect("a pipe");
        let (stderr, stderr_in) = std::io::pipe().expect("a pipe");
        let vars = [("PATH", "/usr/local/bin:/usr/bin:/bin"), ("HOME", "/tmp"), ("RYOKAN_KERNEL", "test")];
        let setup = Setup {
            cwd: "/tmp".into(),
            vars: vars.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            ..Setup::default()
        };
        let thread = std::thread::spawn(move || serve(theirs.into(), stdout_in.into(), stderr_in.into(), setup));
        ours.set_read_timeout(Some(Duration::from_secs(180))).expect("sets");
        let mut engine = Engine {
            socket: ours,
            decoder: Decoder::default(),
            events: VecDeque::new(),
            stdout,
            stderr: Some(stderr),
            thread: Some(thread),
            next: 1,
        };
        assert!(matches!(engine.event(), (Event::Ready { engine, .. }, _) if engine == "kaish"));
        engine
    }

    fn send(&mut self, request: &Request, tail: &[u8]) {
        let mut bytes = Vec::new();
        encode(request, tail, &mut bytes).expect("within limits");
        self.socket.write_all(&bytes).expect("the engine reads");
    }

    fn event(&mut self) -> (Event, Vec<u8>) {
        loop {
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            while let Some(event) = self.decoder.frame().expect("keeps the contract") {
                self.events.push_back(event);
            }
            if self.events.is_empty() {
                let mut buffer = [0; 65536];
                let n = match self.socket.read(&mut buffer) {
                    // A child of the engine ended; the engine runs in this process.
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                    read => read.expect("answers in time"),
                };
                assert!(n > 0, "the engine hung up");
                self.decoder.feed(&buffer[..n]);
            }
        }
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn exec(&mut self, code: &str) -> u64 {
        let id = self.id();
        self.send(&Request::Exec { id, exec: id, code: code.into(), env: Vec::new(), stdin: false }, &[]);
        id
    }

    /// Events up to the end of the execution; the end last.
    pub fn until_end(&mut self, wanted: u64) -> Vec<Event> {
        let mut events = Vec::new();
        loop {
            let (event, _) = self.event();
            let over = matches!(&event, Event::End { id, .. } if *id == wanted);
            events.push(event);
            if over {
                return events;
            }
        }
    }

    pub fn run(&mut self, code: &str) -> Vec<Event> {
        let id = self.exec(code);
        self.until_end(id)
    }

    fn reply(&mut self, request: &Request) -> Reply {
        self.send(request, &[]);
        loop {
            if let (Event::Reply(reply), _) = self.event() {
                return reply;
            }
        }
    }

    /// The available standard output; standard error is discarded.
    pub fn output(&mut self) -> String {
        if let Some(stderr) = &mut self.stderr {
            drain(stderr);
        }
        String::from_utf8(drain(&mut self.stdout)).expect("text")
    }

    fn exit(mut self) -> i32 {
        self.thread.take().expect("once").join().expect("serve never panics")
    }
}

fn drain(pipe: &mut std::io::PipeReader) -> Vec<u8> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    fcntl(&*pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).expect("sets");
    let mut bytes = Vec::new();
    let mut buffer = [0; 65536];
    while let Ok(n @ 1..) = pipe.read(&mut buffer) {
        bytes.extend(&buffer[..n]);
    }
    fcntl(&*pipe, FcntlArg::F_SETFL(OFlag::empty())).expect("sets");
    bytes
}

fn keys(events: &[Event]) -> Vec<String> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Put { key, .. } => Some(format!("+{key}")),
            Event::Del { key } => Some(format!("-{key}")),
            _ => None,
        })
        .collect()
}

#[test]
fn end_frames_report_status() {
    let mut engine = Engine::start();
    for (code, status, number) in [
        ("echo hi", EndStatus::Done, 0),
        ("false", EndStatus::Failed, 1),
        ("exit 4", EndStatus::Failed, 4),
        ("if", EndStatus::Refused, 2),
        ("ls --no-such-flag", EndStatus::Failed, 2),
        ("/bin/sh -c 'kill -9 $$'", EndStatus::Failed, 137),
    ] {
        let events = engine.run(code);
        let Some(Event::End { status: got, code: got_number, .. }) = events.last() else { panic!("{events:?}") };
        assert_eq!((*got, *got_number), (status, number), "{code}");
    }
    assert_eq!(engine.output(), "hi\n");
    let events = engine.run("echo '{\"a\": [1, 2.5]}' | jq .");
    let Some(Event::End { value, .. }) = events.last() else { panic!("{events:?}") };
    assert_eq!(value, &Some(json!({ "o": [["a", [{ "i": "1" }, { "f": "2.5" }]]] })));
}

#[test]
fn only_changed_state_sent() {
    let mut engine = Engine::start();
    assert_eq!(keys(&engine.run("echo hi")), [""; 0]);
    assert_eq!(keys(&engine.run("x=1; y=2")), ["+var/x", "+var/y"]);
    assert_eq!(keys(&engine.run("x=1; y=3")), ["+var/y"]);
    assert_eq!(keys(&engine.run("unset x")), ["-var/x"]);
    assert_eq!(
        keys(&engine.run("f() { true; }; alias a='b c'; set -o pipefail; export y")),
        ["+fn/f", "+alias/a", "+export/y", "+opt/pipefail"]
    );
    assert_eq!(keys(&engine.run("f() { true; }; f | cat; a=$(f)")), ["+var/a"]);
    assert_eq!(
        keys(&engine.run("unalias a; set +o pipefail; cd /")),
        ["+cwd", "+prev_cwd", "-alias/a", "-opt/pipefail"]
    );
    assert_eq!(keys(&engine.run("PATH=/bin")), ["+var/PATH"]);
    assert_eq!(keys(&engine.run("PATH=/usr/local/bin:/usr/bin:/bin")), ["-var/PATH"]);
    assert_eq!(keys(&engine.run("local_only() { local z=1; q=2; }; local_only")), ["+var/q", "+fn/local_only"]);
    assert_eq!(keys(&engine.run("echo text > /v/blobs/note")), ["+file/v/blobs/note"]);
    assert_eq!(keys(&engine.run("rm /v/blobs/note")), ["-file/v/blobs/note"]);
    let id = engine.id();
    engine.send(&Request::Set { id, name: "s".into(), value: json!("v") }, &[]);
    assert!(matches!(engine.event(), (Event::Put { key, .. }, _) if key == "var/s"), "state precedes the answer");
    assert!(matches!(engine.event(), (Event::Reply(Reply { ok: true, .. }), _)));
}

#[test]
fn last_status_survives_state_save() {
    let mut engine = Engine::start();
    engine.run("/bin/false | true | /bin/sh -c 'exit 3'");
    engine.run("true | false | true; alias q=r; false | true");
    let id = engine.id();
    engine.reply(&Request::Save { id });
    engine.run("echo $? ${PIPESTATUS[0]} ${PIPESTATUS[1]}");
    assert_eq!(engine.output(), "0 1 0\n");
    engine.run("/bin/sh -c 'exit 9'");
    engine.run("echo $?");
    assert_eq!(engine.output(), "9\n");
    engine.run("seq 1 3");
    engine.run("kaish-last");
    assert_eq!(engine.output(), "1\n2\n3\n[1,2,3]\n");
    engine.run("printf plain");
    engine.run("kaish-last");
    assert_eq!(engine.output(), "plainplain");
}

#[test]
fn ambiguous_functions_missed() {
    let mut engine = Engine::start();
    let events = engine.run("f() { echo 1; }\nif [[ -e /etc ]]; then f() { echo 2; }; fi");
    let missed = events.iter().find_map(|event| match event {
        Event::Missed { entries } => Some(entries.clone()),
        _ => None,
    });
    let missed = missed.expect("a report of missed entries");
    assert_eq!(missed.len(), 1);
    assert_eq!(missed[0].key, "fn/f");
    assert!(keys(&events).is_empty());
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "sourced() { echo from a file; }\n").expect("writes");
    let events = engine.run(&format!("source {}; sourced", file.path().display()));
    assert_eq!(keys(&events), ["+fn/sourced"]);
    let events = engine.run("f() { echo 3; }");
    assert_eq!(keys(&events), ["+fn/f"], "known again");
    assert!(events.iter().any(|event| matches!(event, Event::Missed { entries } if entries.is_empty())));
}

#[test]
fn state_save_and_load_frames() {
    let mut engine = Engine::start();
    engine.run("big=$(seq 1 400000); f() { echo $1; }; n=[1 {a: null}]");
    let id = engine.id();
    engine.send(&Request::Save { id }, &[]);
    let mut entries: BTreeMap<String, Vec<(Event, Vec<u8>)>> = BTreeMap::new();
    loop {
        match engine.event() {
            (Event::Reply(reply), _) => {
                assert!(reply.ok);
                break;
            }
            (event @ Event::Put { .. }, tail) => {
                let Event::Put { key, .. } = &event else { unreachable!() };
                entries.entry(key.clone()).or_default().push((event, tail));
            }
            _ => {}
        }
    }
    assert_eq!(entries.keys().collect::<Vec<_>>(), ["fn/f", "var/big", "var/n"]);
    assert!(entries["var/big"].len() > 2, "in chunks");
    engine.output();

    let mut other = Engine::start();
    let id = other.id();
    other.send(&Request::Load { id }, &[]);
    for chunks in entries.values() {
        for (event, tail) in chunks {
            let Event::Put { key, meta, more } = event else { unreachable!() };
            other.send(&Request::Entry { key: key.clone(), meta: meta.clone(), more: *more }, tail);
        }
    }
    for (key, body) in [("var/future", vec![9, 1, 2]), ("socket/x", vec![1]), ("cwd", b"\x01/nowhere/at/all".to_vec())]
    {
        other.send(&Request::Entry { key: key.into(), meta: Default::default(), more: false }, &body);
    }
    let reply = other.reply(&Request::Loaded { id: 77 });
    let missed: Vec<&str> =
        reply.fields["missed"].as_array().expect("a list").iter().filter_map(|m| m["key"].as_str()).collect();
    assert_eq!(missed, ["var/future", "socket/x", "cwd"]);
    let events = other.run("f ok; echo $big | wc -c; echo ${n[1][a]}; /bin/echo external");
    assert_eq!(keys(&events), [""; 0], "loaded and unloadable entries are not sent");
    assert!(other.output().starts_with("ok\n"), "works");
}

#[test]
fn kaish_awaits_tool_calls() {
    let mut engine = Engine::start();
    let schema = json!({ "type": "object", "properties": { "city": { "type": "string" }, "days": { "type": "integer" } }, "required": ["city"] });
    let tool = json!({ "name": "weather__forecast", "description": "tells", "schema": schema });
    let tools = vec![serde_json::from_value(tool).expect("a tool")];
    engine.send(&Request::DynamicTools { tools }, &[]);
    let id = engine.exec("r=$(weather__forecast --city Kyoto --days 3); echo got $r; weather__forecast Nara");
    let answer = |engine: &mut Engine, expected: Json, value: Json, text: &str| {
        let (event, _) = engine.event();
        let Event::ToolCall { call, name, args, exec } = event else { panic!("{event:?}") };
        assert_eq!((name.as_str(), exec, args), ("weather__forecast", id, expected));
        let frame = Request::ToolResult { call, ok: true, value, text: text.into(), message: String::new() };
        engine.send(&frame, &[]);
    };
    let three = json!({ "o": [["city", "Kyoto"], ["days", { "i": "3" }]] });
    answer(&mut engine, three, json!({ "o": [["sunny", true]] }), "");
    answer(&mut engine, json!({ "o": [["city", "Nara"]] }), json!("rain"), "rain");
    let events = engine.until_end(id);
    assert!(matches!(events.last(), Some(Event::End { status: EndStatus::Done, .. })), "{events:?}");
    assert_eq!(engine.output(), "got {\"sunny\":true}\nrain\n");

    let id = engine.exec("weather__forecast Kyoto || echo failed");
    let (event, _) = engine.event();
    let Event::ToolCall { call, .. } = event else { panic!("{event:?}") };
    let failure = Request::ToolResult { call, ok: false, value: Json::Null, text: String::new(), message: "no".into() };
    engine.send(&failure, &[]);
    engine.until_end(id);
    assert_eq!(engine.output(), "failed\n");

    let id = engine.exec("weather__forecast Kyoto");
    assert!(matches!(engine.event(), (Event::ToolCall { .. }, _)));
    engine.send(&Request::Interrupt { exec: id + 1 }, &[]);
    engine.send(&Request::Interrupt { exec: id }, &[]);
    let events = engine.until_end(id);
    assert!(matches!(events.last(), Some(Event::End { status: EndStatus::Interrupted, code: 130, .. })), "{events:?}");
}

#[test]
fn job_start_and_end_frames() {
    let mut engine = Engine::start();
    let events = engine.run("/bin/sleep 0.4 &");
    let jobs: Vec<_> = events
        .iter()
        .filter_map(|event| if let Event::Jobs { jobs } = event { Some(jobs.clone()) } else { None })
        .collect();
    assert_eq!(jobs.len(), 1, "{events:?}");
    assert!(jobs[0][0].command.contains("sleep 0.4"), "{jobs:?}");
    assert_eq!(jobs[0][0].id, "1");
    assert!(events.iter().any(|event| matches!(event, Event::Missed { entries } if entries[0].key == "job/1")));
    loop {
        if let (Event::Jobs { jobs }, _) = engine.event() {
            assert!(jobs.is_empty());
            break;
        }
    }
    engine.run("/bin/sleep 0.1 & wait; echo waited");
    assert!(engine.output().ends_with("waited\n"));
}

#[test]
fn stdin_is_passed_as_descriptor() {
    let mut engine = Engine::start();
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let mut bytes = Vec::new();
    let frame =
        Request::Exec { id: 5, exec: 5, code: "read a; echo \"a=$a\"; /bin/cat".into(), env: Vec::new(), stdin: true };
    encode(&frame, &[], &mut bytes).expect("within limits");
    let numbers = [reader.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&numbers)];
    sendmsg::<()>(engine.socket.as_raw_fd(), &[IoSlice::new(&bytes)], &rights, MsgFlags::empty(), None).expect("sends");
    drop(reader);
    writer.write_all(b"one\n").expect("writes");
    let mut seen = String::new();
    crate::support::until("what is there is read before the rest is", || {
        seen += &engine.output();
        seen == "a=one\n"
    });
    writer.write_all(b"two\n").expect("writes");
    drop(writer);
    engine.until_end(5);
    assert_eq!(engine.output(), "two\n");
}

#[test]
fn commands_inherit_no_descriptors() {
    let mut engine = Engine::start();
    // The test process may have inherited descriptors; none of the engine's are passed on.
    for fds in
        ["/bin/ls -l /proc/self/fd", "/bin/ls -l /proc/self/fd | /bin/cat", "x=$(/bin/ls -l /proc/self/fd); echo $x"]
    {
        engine.run(fds);
        let listed = engine.output();
        assert!(!listed.contains("socket:"), "{listed}");
        assert!(!listed.contains("anon_inode"), "{listed}");
    }
    engine.run("/usr/bin/readlink /proc/self/fd/0");
    assert_eq!(engine.output(), "/dev/null\n");
    engine.run("/usr/bin/env");
    let env = engine.output();
    assert!(env.contains("RYOKAN_KERNEL=test"), "{env}");
    assert!(!env.contains("CARGO"), "nothing of the host's: {env}");
}

/// A stopped reader blocks the code and loses nothing.
fn slow_reader(code: &str, expected: u64) {
    let mut engine = Engine::start();
    let id = engine.exec(code);
    let mut stdout = engine.stdout.try_clone().expect("clones");
    let (counted, count) = mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 20];
        let mut sum = 0u64;
        let mut paused = false;
        loop {
            let n = stdout.read(&mut buffer).unwrap_or(0);
            sum += n as u64;
            if !paused && sum > 1 << 18 {
                paused = true;
                std::thread::sleep(Duration::from_millis(1500));
            }
            if n == 0 || sum >= expected {
                break;
            }
        }
        counted.send(sum).expect("the receiver is there");
    });
    engine.until_end(id);
    let sum = count.recv_timeout(Duration::from_secs(300)).expect("all output arrived");
    assert_eq!(sum, expected, "{code}");
    assert_eq!(engine.output(), "", "{code}: not a byte more");
}

#[test]
fn slow_reader_loses_no_output() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), vec![b'x'; 40 << 20]).expect("writes");
    let path = file.path().display();
    slow_reader("/usr/bin/seq 1 5000000", 38_888_896);
    slow_reader("/usr/bin/seq 1 5000000 | /bin/cat", 38_888_896);
    slow_reader(&format!("cat {path}"), 40 << 20);
    slow_reader(&format!("/bin/cat {path}"), 40 << 20);
    slow_reader("head -c 40000000 /dev/zero", 40_000_000);
    let line = "x".repeat(99);
    slow_reader(&format!("for i in $(seq 1 6000); do echo {line}; done"), 600_000);
}

#[test]
fn captured_output_complete_or_error() {
    let mut engine = Engine::start();
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("out");
    let path = file.display();
    engine.run(&format!("/usr/bin/head -c 30000000 /dev/urandom > {path}; echo $?"));
    assert_eq!(engine.output(), "0\n");
    assert_eq!(std::fs::metadata(&file).expect("written").len(), 30_000_000, "binary, and beyond kaish's 10 MiB");
    engine.run(&format!("x=$(/usr/bin/seq 1 5000000); echo $?; echo \"$x\" | wc -c; /bin/sh -c 'echo e >&2; echo o' > {path} 2>&1; cat {path}"));
    assert_eq!(engine.output().split_whitespace().collect::<Vec<_>>(), ["0", "38888896", "o", "e"]);
    let events = engine.run(&format!("/usr/bin/head -c 100000000 /dev/zero > {path}"));
    let Some(Event::End { status, code, err, .. }) = events.last() else { panic!("{events:?}") };
    assert_eq!((*status, *code), (EndStatus::Failed, 3));
    assert!(err.contains("output truncated"), "{err}");
    engine.run("timeout 0.3 /bin/sleep 500; echo $?; timeout 500 /bin/echo in time");
    assert_eq!(engine.output(), "124\nin time\n");
}

#[test]
fn command_arguments_verbatim() {
    let mut engine = Engine::start();
    let words = "-la --foo=bar --k v a=b 1.50 007 -0 -- -x '*' \"a b\" -DX=1 --json $HOME $((1 + 2)) $(echo s u b)";
    engine.run(&format!("/usr/bin/printf '%s|' {words}"));
    assert_eq!(engine.output(), "-la|--foo=bar|--k|v|a=b|1.50|007|-0|--|-x|*|a b|-DX=1|--json|/tmp|3|s u b|");
    engine.run(&format!("x=$(/usr/bin/printf '%s|' {words}); echo $x"));
    assert_eq!(engine.output(), "-la|--foo=bar|--k|v|a=b|1.50|007|-0|--|-x|*|a b|-DX=1|--json|/tmp|3|s u b|\n");
    engine.run("/bin/cat <<EOF\nfrom $HOME\nEOF\n/bin/cat <<< 'a string'");
    assert_eq!(engine.output(), "from /tmp\na string\n");
    engine.run("l=[1 2]; /bin/echo $l || echo refused");
    assert_eq!(engine.output(), "refused\n");
    engine.run("/bin/sh -c 'yes | head -1'; /usr/bin/yes | /usr/bin/head -2; cd /usr; /bin/pwd; ./bin/echo here");
    assert_eq!(engine.output(), "y\ny\ny\n/usr\nhere\n");
    engine.run("printenv() { echo mine $1; }; printenv X; which sh; alias; type cd");
    let out = engine.output();
    assert!(out.starts_with("mine X\n"), "{out}");
    assert!(!out.contains("__ryokan"), "{out}");
    engine
        .run("/bin/sh -c 'echo e >&2; exit 2' 2>/dev/null; echo $?; /bin/nothing-here; echo $?; /etc/passwd; echo $?");
    assert_eq!(engine.output(), "2\n127\n126\n");
}

#[test]
fn exec_builtin_keeps_engine_running() {
    let mut engine = Engine::start();
    let events = engine.run("exec /bin/sh -c 'echo ran; exit 5'; echo not reached");
    assert!(matches!(events.last(), Some(Event::End { code: 5, .. })), "{events:?}");
    assert_eq!(engine.output(), "ran\n");
    engine.run("echo alive");
    assert_eq!(engine.output(), "alive\n");
}

#[test]
fn calls_accept_stdin_and_environment() {
    let mut engine = Engine::start();
    let env = vec![("ONCE".to_owned(), "yes".to_owned())];
    engine.run("f() { echo \"$1 $ONCE\"; }");
    let call =
        |id, name: &str, args| Request::Call { id, exec: id, name: name.into(), args, env: env.clone(), stdin: false };
    engine.send(&call(50, "f", json!(["*"])), &[]);
    engine.until_end(50);
    assert_eq!(engine.output(), "* yes\n");
    engine.send(&call(51, "seq", json!([{ "i": "2" }])), &[]);
    let events = engine.until_end(51);
    let Some(Event::End { value, .. }) = events.last() else { panic!("{events:?}") };
    assert_eq!(value, &Some(json!([{ "i": "1" }, { "i": "2" }])));
    for hidden in ["__ryokan-inside", "__ryokan-call", "no_such"] {
        engine.send(&call(52, hidden, Json::Null), &[]);
        let events = engine.until_end(52);
        assert!(matches!(events.last(), Some(Event::End { status: EndStatus::Refused, .. })), "{events:?}");
        let events = engine.run(hidden);
        assert!(matches!(events.last(), Some(Event::End { code: 127, .. })), "{events:?}");
    }
}

#[test]
fn engine_shutdown_exit_codes() {
    let mut engine = Engine::start();
    engine.send(&Request::Shutdown, &[]);
    assert_eq!(engine.exit(), 0);

    let mut engine = Engine::start();
    let began = Instant::now();
    engine.run("/bin/sleep 60 &");
    engine.send(&Request::Shutdown, &[]);
    assert_eq!(engine.exit(), 0);
    assert!(began.elapsed() < Duration::from_secs(50), "it waited for its job");
    let engine = Engine::start();
    engine.socket.shutdown(std::net::Shutdown::Both).expect("shuts");
    assert_eq!(engine.exit(), 0, "init is gone");

    let mut engine = Engine::start();
    engine.exec("/bin/sleep 60");
    std::thread::sleep(Duration::from_millis(100));
    engine.socket.shutdown(std::net::Shutdown::Both).expect("shuts");
    assert_eq!(engine.exit(), 0, "init is gone, and the command ends with it");

    let mut engine = Engine::start();
    engine.socket.write_all(&[0xff; 64]).expect("writes");
    assert_eq!(engine.exit(), 65, "no frame");
}

#[test]
fn infinite_recursion_fails_execution() {
    let mut engine = Engine::start();
    let events = engine.run("f() { f; }; f");
    assert!(matches!(events.last(), Some(Event::End { status: EndStatus::Failed, .. })), "{events:?}");
    engine.run("echo alive");
    assert_eq!(engine.output(), "alive\n");
}

#[test]
fn completion_and_check_requests() {
    let mut engine = Engine::start();
    engine.run("my_function() { true; }; my_variable=1");
    let id = engine.id();
    let reply = engine.reply(&Request::Complete { id, code: "my_f".into(), cursor: 4 });
    assert_eq!(reply.fields["matches"], json!(["my_function"]));
    let reply = engine.reply(&Request::Complete { id, code: "echo $my_v".into(), cursor: 10 });
    assert_eq!((&reply.fields["start"], &reply.fields["matches"]), (&json!(6), &json!(["my_variable"])));
    let reply = engine.reply(&Request::Complete { id, code: "cat /etc/pass".into(), cursor: 13 });
    assert!(reply.fields["matches"].as_array().expect("a list").contains(&json!("/etc/passwd")));
    for (code, status) in [("echo", "complete"), ("if true; then", "incomplete"), ("fi", "invalid")] {
        let reply = engine.reply(&Request::Check { id, code: code.into() });
        assert_eq!(reply.fields["status"], json!(status), "{code}");
    }
    let reply = engine.reply(&Request::Get { id, name: "nothing".into() });
    assert_eq!((reply.ok, reply.code.as_str()), (false, "notFound"));
    drop(engine.stderr.take());
    let _: Option<OwnedFd> = None;
}
