//! The contract of [`Session`]: one suite, run against each implementation.
//!
//! The language is kaish. `root` is a directory that the kernel can see and write; `other` creates
//! a second kernel.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ryokan::core::error::{ErrorCode, Result};
use ryokan::core::exec::{ExecRequest, ExecResult, ExecStatus, OutputEvent, Work};
use ryokan::core::ids::{Digest, ExecId};
use ryokan::core::value::Value;
use ryokan::session::{OutputSink, Session};

/// Collects every event.
#[derive(Default)]
pub struct Events {
    pub seen: RefCell<Vec<OutputEvent>>,
    exec: RefCell<Option<ExecId>>,
    /// A file that is created at the first output.
    releases: Option<PathBuf>,
}

#[async_trait::async_trait(?Send)]
impl OutputSink for Events {
    async fn take(&self, exec: ExecId, event: OutputEvent) -> Result<()> {
        *self.exec.borrow_mut() = Some(exec);
        if let (OutputEvent::Stdout(_), Some(file)) = (&event, &self.releases) {
            std::fs::write(file, "").expect("written");
        }
        self.seen.borrow_mut().push(event);
        Ok(())
    }
}

impl Events {
    /// Creates this file at the first output, for which the code waits.
    pub fn releasing(file: PathBuf) -> Events {
        Events { releases: Some(file), ..Events::default() }
    }

    /// The whole standard output.
    pub fn stdout(&self) -> Vec<u8> {
        let events = self.seen.borrow();
        events
            .iter()
            .filter_map(|event| if let OutputEvent::Stdout(b) = event { Some(b.clone()) } else { None })
            .flatten()
            .collect()
    }
}

/// Runs code and returns its result.
pub async fn run(session: &dyn Session, code: &str) -> ExecResult {
    session.execute(ExecRequest::code(code)).await.unwrap_or_else(|error| panic!("{code}: {error}"))
}

/// Runs code that must succeed and returns its standard output.
pub async fn out(session: &dyn Session, code: &str) -> String {
    let result = run(session, code).await;
    assert_eq!(
        result.end.status,
        ExecStatus::Done,
        "{code}: {} {}",
        result.end.err,
        String::from_utf8_lossy(&result.stderr)
    );
    String::from_utf8(result.stdout).expect("text")
}

async fn statuses(session: &dyn Session) {
    assert_eq!(out(session, "echo hi").await, "hi\n");
    let failed = run(session, "echo before; ls /nowhere-at-all; exit 3").await;
    assert_eq!((failed.end.status, failed.end.code), (ExecStatus::Failed, 3));
    assert_eq!(failed.stdout, b"before\n");
    assert!(String::from_utf8_lossy(&failed.stderr).contains("nowhere-at-all"), "{failed:?}");
    assert!(failed.end.err.contains("nowhere-at-all"), "{}", failed.end.err);
    let external = run(session, "/bin/sh -c 'exit 7'").await;
    assert_eq!((external.end.status, external.end.code), (ExecStatus::Failed, 7));
    let absent = run(session, "no-such-command-anywhere").await;
    assert_eq!((absent.end.status, absent.end.code), (ExecStatus::Failed, 127));
    for refused in ["if true; then", "for in do", "echo ${"] {
        let result = run(session, refused).await;
        assert_eq!(result.end.status, ExecStatus::Refused, "{refused}");
        assert!(!result.end.err.is_empty() && !result.end.err.contains('\n'), "{:?}", result.end.err);
        assert!(result.stdout.is_empty());
    }
    assert_eq!(
        out(session, "echo a; echo b >/dev/stderr 2>&1 || true; /bin/echo c; echo d").await.lines().last(),
        Some("d")
    );
}

async fn streaming(session: &dyn Session, root: &str) {
    // Each writes its first line, and waits for a file that is created when the line has arrived.
    let go = format!("{root}/go");
    let waits = format!("until test -e {go}; do sleep 0.05; done");
    let lines = format!("for i in 1 2 3; do echo $i; {waits}; done");
    for code in [
        format!("for i in 1 2 3; do echo $i; /bin/sh -c '{waits}'; done"),
        format!("/bin/sh -c '{lines}'"),
        format!("f() {{ for i in 1 2 3; do /bin/echo $i; /bin/sh -c '{waits}'; done; }}; f"),
        format!("/bin/sh -c '{lines}' | /bin/cat"),
        format!("timeout 300 /bin/sh -c '{lines}'"),
        format!("/bin/sh -c 'for i in 1 2 3; do echo $i >/dev/stderr; {waits}; done' 2>&1"),
    ] {
        let events = Events::releasing(PathBuf::from(&go));
        let running = session.execute_streaming(ExecRequest::code(&code), &events);
        let result = tokio::time::timeout(Duration::from_secs(180), running).await;
        let result = result.unwrap_or_else(|_| panic!("{code}: the first line waits")).expect("runs");
        std::fs::remove_file(&go).expect("removed");
        assert_eq!(result.end.status, ExecStatus::Done, "{code}: {result:?}");
        assert_eq!(events.stdout(), b"1\n2\n3\n", "{code}");
        assert_eq!(events.seen.borrow().last(), Some(&OutputEvent::ExitCode(0)), "{code}");
        assert_eq!(result.stdout, b"1\n2\n3\n", "{code}");
    }
    let mixed =
        out(session, "echo 1; /bin/echo 2; for i in 3 4; do printf \"$i\\n\"; done; x=$(echo 5); echo $x; /bin/echo 6")
            .await;
    assert_eq!(mixed, "1\n2\n3\n4\n5\n6\n");
}

async fn interrupting(session: &dyn Session) {
    assert_eq!(session.interrupt(ExecId(u64::MAX - 5)).await.map_err(|e| e.code), Err(ErrorCode::NotFound));
    for code in [
        "sleep 30",
        "while true; do x=1; done",
        "/bin/sleep 30",
        "for i in 1 2; do /bin/sh -c 'sleep 30'; done",
        "/bin/sleep 30 | cat",
        "while true; do echo x; done",
    ] {
        let events = Events::default();
        let began = Instant::now();
        let request = ExecRequest::code(format!("echo go\n{code}"));
        let running = session.execute_streaming(request, &events);
        let interrupting = async {
            while events.exec.borrow().is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            let exec = events.exec.borrow().expect("just seen");
            session.interrupt(exec).await.expect("it runs");
        };
        let (result, ()) = tokio::join!(running, interrupting);
        let result = result.expect("ends");
        assert_eq!((result.end.status, result.end.code), (ExecStatus::Interrupted, 130), "{code}: {:?}", result.end);
        // Before the code that sleeps would end.
        assert!(began.elapsed() < Duration::from_secs(25), "{code}: {:?}", began.elapsed());
        assert_eq!(out(session, "echo after").await, "after\n", "{code}");
    }
    let request = ExecRequest { timeout_ms: 200, ..ExecRequest::code("sleep 30") };
    let result = session.execute(request).await.expect("ends");
    assert_eq!((result.end.status, result.end.code), (ExecStatus::Timeout, 124));
}

async fn values(session: &dyn Session) {
    for value in [
        Value::Null,
        Value::Bool(true),
        Value::Int(i64::MIN),
        Value::Float(1.0),
        Value::Float(-0.0),
        Value::Float(f64::INFINITY),
        Value::String("é \"quoted\"\n".into()),
        Value::String("42".into()),
        Value::Bytes(vec![0, 159, 255]),
        Value::Array(vec![Value::Int(1), Value::Float(1.0), Value::String("1".into()), Value::Null]),
        Value::Object(vec![("b".into(), Value::Int(1)), ("a".into(), Value::Array(vec![]))]),
    ] {
        session.set_var("v", value.clone()).await.expect("kaish holds it");
        let back = session.get_var("v").await.expect("just set");
        assert!(same(&back, &value), "{value:?} came back as {back:?}");
    }
    session.set_var("v", Value::Float(f64::NAN)).await.expect("kaish holds it");
    assert!(matches!(session.get_var("v").await, Ok(Value::Float(f)) if f.is_nan()));
    for value in [
        Value::BigInt("123456789012345678901234567890".into()),
        Value::Opaque { type_name: "socket".into(), repr: "<s>".into() },
        Value::Array(vec![Value::Bytes(vec![1])]),
    ] {
        assert_eq!(session.set_var("v", value).await.map_err(|e| e.code), Err(ErrorCode::InvalidArgument));
    }
    assert_eq!(session.set_var("not a name", Value::Null).await.map_err(|e| e.code), Err(ErrorCode::InvalidArgument));
    assert_eq!(session.get_var("never_set").await.map_err(|e| e.code), Err(ErrorCode::NotFound));
    assert_eq!(out(session, "n=41; s=\"41\"; l=[1 2]; r={k: \"v\"}; echo $((n + 1))").await, "42\n");
    assert_eq!(session.get_var("n").await, Ok(Value::Int(41)));
    assert_eq!(session.get_var("s").await, Ok(Value::String("41".into())));
    assert_eq!(session.get_var("l").await, Ok(Value::Array(vec![Value::Int(1), Value::Int(2)])));
    assert_eq!(session.get_var("r").await, Ok(Value::Object(vec![("k".into(), Value::String("v".into()))])));
    let vars = session.list_vars().await.expect("lists");
    let l = vars.iter().find(|var| var.name == "l").expect("listed");
    assert_eq!((l.type_name.as_str(), l.summary.as_str()), ("list", "[1, 2]"));
    assert!(!vars.iter().any(|var| ["PWD", "PIPESTATUS", "PATH"].contains(&var.name.as_str())), "{vars:?}");
}

/// Equality that distinguishes -0.0 from 0.0; records are unordered.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => a.to_bits() == b.to_bits(),
        (Value::Object(a), Value::Object(b)) => a.len() == b.len() && a.iter().all(|f| b.contains(f)),
        _ => a == b,
    }
}

async fn stdin_and_env(session: &dyn Session) {
    for (code, expected) in [
        ("cat", "one\ntwo\nthree\n"),
        ("/bin/cat", "one\ntwo\nthree\n"),
        ("wc -l", "3"),
        ("read x; echo \"<$x>\"; cat", "<one>\ntwo\nthree\n"),
        ("read x; /bin/cat", "two\nthree\n"),
        ("/bin/cat | /usr/bin/tr a-z A-Z", "ONE\nTWO\nTHREE\n"),
        ("echo no input wanted", "no input wanted\n"),
    ] {
        let request = ExecRequest { stdin: b"one\ntwo\nthree\n".to_vec(), ..ExecRequest::code(code) };
        let result = session.execute(request).await.expect("runs");
        assert_eq!(String::from_utf8_lossy(&result.stdout).trim(), expected.trim(), "{code}: {result:?}");
    }
    assert_eq!(out(session, "cat; /bin/cat").await, "");
    let big = vec![b'x'; 3 << 20];
    let request = ExecRequest { stdin: big.clone(), ..ExecRequest::code("/bin/cat | /usr/bin/wc -c") };
    let result = session.execute(request).await.expect("runs");
    assert_eq!(String::from_utf8_lossy(&result.stdout).trim(), big.len().to_string());

    let request = ExecRequest {
        env: vec![("ONCE".into(), "it is $HOME".into())],
        ..ExecRequest::code("echo $ONCE; /usr/bin/printenv ONCE")
    };
    let result = session.execute(request).await.expect("runs");
    assert_eq!(String::from_utf8_lossy(&result.stdout), "it is $HOME\nit is $HOME\n");
    assert_ne!(run(session, "/usr/bin/printenv ONCE").await.end.code, 0);
    assert_eq!(session.get_var("ONCE").await.map_err(|e| e.code), Err(ErrorCode::NotFound));
}

async fn tools(session: &dyn Session) {
    run(session, "greet() { echo \"hello $1\"; }").await;
    let tools = session.list_tools().await.expect("lists");
    assert!(tools.iter().filter(|tool| tool.source == "builtin").count() > 60);
    let ls = tools.iter().find(|tool| tool.name == "ls").expect("there is ls");
    assert!(ls.schema_json.contains("\"properties\""), "{}", ls.schema_json);
    assert!(tools.iter().any(|tool| tool.name == "greet" && tool.source == "user"));
    assert!(!tools.iter().any(|tool| tool.name.starts_with("__")), "hidden tools stay hidden");
    let text = |result: ExecResult| String::from_utf8_lossy(&result.stdout).into_owned();
    let words = |words: &[&str]| Value::Array(words.iter().map(|w| Value::String((*w).into())).collect());
    let literal = session.call_tool("echo", words(&["$HOME", "*", "a b", "$(ls)"])).await.expect("calls");
    assert_eq!(text(literal), "$HOME * a b $(ls)\n");
    assert_eq!(text(session.call_tool("greet", words(&["you"])).await.expect("calls")), "hello you\n");
    let seq = tools.iter().find(|tool| tool.name == "seq").expect("there is seq");
    let by_position = session.call_tool("seq", Value::Array(vec![Value::Int(1), Value::Int(3)])).await.expect("calls");
    assert_eq!(text(by_position), "1\n2\n3\n", "{}", seq.schema_json);
    let schema = &tools.iter().find(|tool| tool.name == "head").expect("there is head").schema_json;
    let schema: serde_json::Value = serde_json::from_str(schema).expect("a schema");
    let operands = schema["properties"].as_object().expect("an object");
    let operand = operands.iter().find(|(_, p)| p["x-positional"] == true).expect("takes files").0.clone();
    let flags = Value::Object(vec![(operand, Value::String("/etc/passwd".into())), ("lines".into(), Value::Int(1))]);
    let head = session.call_tool("head", flags).await.expect("calls");
    assert_eq!(text(head.clone()).lines().count(), 1, "{head:?}");
    let absent = session.call_tool("no_such_tool", Value::Null).await.expect("answers");
    assert_eq!(absent.end.status, ExecStatus::Refused);
    let structured = run(session, "ls /etc").await;
    let output = structured.end.output.expect("ls gives a structure");
    assert!(output.root.iter().any(|node| node.name == "passwd"), "{output:?}");
}

async fn state(session: &dyn Session, other: &dyn Session, root: &str) {
    run(session, &format!("mkdir -p {root}/sub; cd {root}/sub")).await;
    let program = "greet() {\n  # keeps its comment\n  echo \"hi $1\"\n}\nalias ll='ls -la'\nset -o pipefail\nexport SHOWN=yes\n\
                   x=1.5\nl=[1 \"two\" null]\nb=$(printf 'x')\nfalse";
    let result = run(session, program).await;
    assert_eq!(result.end.code, 1, "{result:?}");
    session.set_var("nan", Value::Float(f64::NAN)).await.expect("sets");
    session.set_var("raw", Value::Bytes(vec![0, 255])).await.expect("sets");
    assert_eq!(out(session, "echo $?").await, "1\n", "looking at the state leaves the last status alone");
    let snapshot = session.snapshot().await.expect("snapshots");
    assert!(snapshot.data.starts_with(b"RYKS"));
    assert_eq!(snapshot.missed, []);
    let again = session.snapshot().await.expect("snapshots");
    assert_eq!(again.data, snapshot.data, "equal states have equal bytes");

    run(other, "only_here=1; alias gone='x'").await;
    let missed = other.restore(&snapshot.data).await.expect("restores");
    assert_eq!(missed, []);
    assert_eq!(out(other, "greet you").await, "hi you\n");
    assert_eq!(out(other, "pwd").await.trim_end(), format!("{root}/sub"));
    assert_eq!(out(other, "alias").await.split_whitespace().collect::<Vec<_>>(), ["ll", "ls", "-la"]);
    assert_eq!(out(other, "/usr/bin/printenv SHOWN").await, "yes\n");
    assert_eq!(other.get_var("x").await, Ok(Value::Float(1.5)));
    assert_eq!(other.get_var("raw").await, Ok(Value::Bytes(vec![0, 255])));
    assert!(matches!(other.get_var("nan").await, Ok(Value::Float(f)) if f.is_nan()));
    assert_eq!(other.get_var("l").await, session.get_var("l").await);
    assert_eq!(other.get_var("only_here").await.map_err(|e| e.code), Err(ErrorCode::NotFound));
    assert_eq!(run(other, "false | true").await.end.code, 1, "pipefail is restored");
    // Not compared whole: reading changed only `PIPESTATUS`, which is not an entry.
    assert_eq!(other.snapshot().await.expect("snapshots").data, snapshot.data);

    let mut broken = snapshot.data.clone();
    let middle = broken.len() / 2;
    broken[middle] ^= 1;
    assert_eq!(other.restore(&broken).await.map_err(|e| e.code), Err(ErrorCode::Corrupt));
    assert_eq!(other.restore(b"nothing of ours").await.map_err(|e| e.code), Err(ErrorCode::InvalidArgument));
    let foreign = ryokan::core::state::EngineState { engine: "python".into(), ..Default::default() };
    let foreign = foreign.pack().expect("packs");
    assert_eq!(other.restore(&foreign).await.map_err(|e| e.code), Err(ErrorCode::Refused));
    assert_eq!(out(other, "greet again").await, "hi again\n", "a refused snapshot leaves the kernel alone");
}

async fn blobs(session: &dyn Session) {
    let hash = session.write_blob(b"content").await.expect("stores");
    assert_eq!(hash, Digest::from_bytes(*blake3::hash(b"content").as_bytes()));
    assert_eq!(session.read_blob(hash).await.as_deref(), Ok(&b"content"[..]));
    assert_eq!(session.read_blob(Digest::from_bytes([7; 32])).await.map_err(|e| e.code), Err(ErrorCode::NotFound));
}

async fn bounds(session: &dyn Session) {
    let nul = session.execute(ExecRequest::code("a\0b")).await;
    assert_eq!(nul.map_err(|e| e.code), Err(ErrorCode::InvalidArgument));
    let unnamed = ExecRequest { what: Work::Call { name: String::new(), args: Value::Null }, ..ExecRequest::default() };
    assert_eq!(session.execute(unnamed).await.map_err(|e| e.code), Err(ErrorCode::InvalidArgument));
    let request = ExecRequest { output_limit_bytes: 1000, ..ExecRequest::code("seq 1 10000") };
    let result = session.execute(request).await.expect("runs");
    assert_eq!(result.stdout.len() as u64 + result.truncated_bytes, 48894);
    assert_eq!(result.stdout.len(), 1000);
}

/// Runs every test. `other` is a second, fresh kernel of the same kind; both see `root`.
pub async fn suite(session: &dyn Session, other: &dyn Session, root: &str) {
    statuses(session).await;
    streaming(session, root).await;
    interrupting(session).await;
    values(session).await;
    stdin_and_env(session).await;
    tools(session).await;
    blobs(session).await;
    bounds(session).await;
    state(session, other, root).await;
}
