//! Executions: streams, order, back-pressure, interrupt, timeout, input, tools, death.

use std::time::Duration;

use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus, OutputEvent, Work};
use ryokan::core::ids::ExecId;
use ryokan::core::kernel::CrashCause;
use ryokan::core::value::Value;
use ryokan::link::host::WorkerExec;

use super::code;
use super::fake::{Fake, Plan};
use super::listener::{Recorder, local};

#[test]
fn output_precedes_end() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, report) = fake.attach(&seen).await.unwrap();
        assert_eq!((report.engine.as_str(), report.engine_version.as_str()), ("python", "fake 1"));
        link.start(code(1, "out(b'a' * 3_000_000); err(b'b' * 70_000); out(b'c'); value = {'i': '7'}")).await.unwrap();
        let end = seen.end(1).await;
        assert_eq!((end.status, end.code, end.value), (ExecStatus::Done, 0, Some(Value::Int(7))));
        assert_eq!(seen.out(1).len(), 3_000_001);
        assert!(seen.out(1).ends_with('c'));
        assert_eq!(seen.err(1), "b".repeat(70_000));
        assert_eq!(seen.seen.borrow().ends[&ExecId(1)].1, 3_070_001);
        link.acknowledge(ExecId(1)).await.unwrap();
    });
}

#[test]
fn short_execution_in_reply() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        // A busy machine may take longer than the moment for which init waits.
        let mut at_once = 0;
        for exec in 1..=2000 {
            if exec > 60 && at_once > 0 {
                break;
            }
            link.start(code(exec, "out(b'a'); err(b'b'); value = {'i': '7'}")).await.unwrap();
            at_once += usize::from(seen.seen.borrow().ends.contains_key(&ExecId(exec)));
            assert_eq!(seen.end(exec).await.value, Some(Value::Int(7)));
            assert_eq!((seen.out(exec), seen.err(exec)), ("a".into(), "b".into()));
            assert_eq!(seen.seen.borrow().ends[&ExecId(exec)].1, 2);
            link.acknowledge(ExecId(exec)).await.unwrap();
        }
        assert!(at_once > 0, "no end was part of the answer to its start");
        link.start(code(3000, "out(b'first')\ntime.sleep(30)")).await.unwrap();
        seen.until("the first output", |seen| seen.out.get(&ExecId(3000)).map(|_| ())).await;
        assert!(!seen.seen.borrow().ends.contains_key(&ExecId(3000)));
        link.interrupt(ExecId(3000)).await.unwrap();
        seen.end(3000).await;
    });
}

#[test]
fn displays_keep_order_with_output() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let program = r#"
out(b'before')
send({"ev": "display", "exec": current, "mime": "text/html"}, b"<b>")
send({"ev": "structured", "exec": current, "output": {"headers": ["h"], "root": []}})
send({"ev": "display", "exec": 99, "mime": "of/another"}, b"")
raise ValueError("no")
"#;
        link.start(code(1, program)).await.unwrap();
        let end = seen.end(1).await;
        assert_eq!((end.status, end.code, end.err.as_str()), (ExecStatus::Failed, 1, "ValueError('no')"));
        let seen = seen.seen.borrow();
        assert_eq!(seen.events.len(), 2);
        assert_eq!(seen.events[0].1, OutputEvent::Display { mime: "text/html".into(), data: b"<b>".to_vec() });
        assert!(matches!(&seen.events[1].1, OutputEvent::Structured(data) if data.headers == ["h"]));
    });
}

#[test]
fn engine_tool_called_by_name() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let args = Value::Array(vec![Value::Int(1), Value::Null]);
        let what = Work::Call { name: "t".into(), args: args.clone() };
        let request = ExecRequest { what, ..ExecRequest::default() };
        link.start(WorkerExec { exec: ExecId(5), request, output_kept: 0 }).await.unwrap();
        assert_eq!(seen.end(5).await.value, Some(args));
    });
}

#[test]
fn slow_reader_blocks_code() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        // The code notes how far it got.
        let mark = fake.folder.path().join("mark");
        let program = format!("for i in range(64):\n out(b'x' * (1 << 20))\n open({mark:?}, 'w').write(str(i))");
        seen.stalled.set(true);
        seen.counting.set(true);
        link.start(code(1, &program)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(700)).await;
        let far: u32 = std::fs::read_to_string(&mark).unwrap_or_default().parse().unwrap_or(0);
        assert!(far < 16, "the code wrote {far} MiB to a reader that does not read");
        seen.resume();
        seen.end(1).await;
        assert_eq!(seen.counted.get(), 64 << 20, "nothing is lost");
    });
}

#[test]
fn one_execution_runs_at_a_time() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let go = fake.folder.path().join("go");
        link.start(code(1, &format!("while not os.path.exists({go:?}): time.sleep(0.01)"))).await.unwrap();
        assert_eq!(link.start(code(2, "1")).await.unwrap_err().code, ErrorCode::Busy);
        assert_eq!(link.vars().await.unwrap_err().code, ErrorCode::Busy);
        // The same again is no second start.
        link.start(code(1, "out(b'never')")).await.unwrap();
        std::fs::write(&go, "").unwrap();
        seen.end(1).await;
        link.start(code(1, "out(b'never')")).await.unwrap();
        assert_eq!(seen.out(1), "");
        // Eight unacknowledged ends are the limit of what is remembered.
        for exec in 2..=8 {
            link.start(code(exec, "1")).await.unwrap();
            seen.end(exec).await;
        }
        assert_eq!(link.start(code(9, "1")).await.unwrap_err().code, ErrorCode::Busy);
        link.acknowledge(ExecId(1)).await.unwrap();
        link.start(code(9, "1")).await.unwrap();
        seen.end(9).await;
    });
}

#[test]
fn interrupt_keeps_engine_alive() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        assert_eq!(link.interrupt(ExecId(1)).await.unwrap_err().code, ErrorCode::NotFound);
        link.start(code(1, "out(b'on')\ntime.sleep(30)")).await.unwrap();
        seen.until("output", |s| (s.chunks > 0).then_some(())).await;
        link.interrupt(ExecId(1)).await.unwrap();
        let end = seen.end(1).await;
        assert_eq!((end.status, end.code), (ExecStatus::Interrupted, 130));
        link.start(code(2, "out(b'still here')")).await.unwrap();
        seen.end(2).await;
        assert_eq!(seen.out(2), "still here");
    });
}

#[test]
fn execution_times_out() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let mut exec = code(1, "time.sleep(30)");
        exec.request.timeout_ms = 150;
        link.start(exec).await.unwrap();
        let end = seen.end(1).await;
        assert_eq!((end.status, end.code), (ExecStatus::Timeout, 124));
        assert_eq!(end.err, "timed out after 150 ms");
        assert!(end.duration_us >= 150_000);
        link.start(code(2, "out(b'ok')")).await.unwrap();
        seen.end(2).await;
    });
}

#[test]
fn unresponsive_engine_killed() {
    local(async {
        let mut fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let stubborn = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nout(b'no')\ntime.sleep(60)";
        link.start(code(1, stubborn)).await.unwrap();
        seen.until("output", |s| (s.chunks > 0).then_some(())).await;
        link.interrupt(ExecId(1)).await.unwrap();
        assert_eq!(seen.cause().await, CrashCause::Unresponsive);
        let end = seen.end(1).await;
        assert_eq!((end.status, end.code), (ExecStatus::Interrupted, 130));
        assert_eq!(seen.out(1), "no");
        link.acknowledge(ExecId(1)).await.unwrap();
        assert_eq!(fake.status().await, 1);
    });
}

#[test]
fn killed_engine_loses_execution() {
    local(async {
        let mut fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        link.start(code(1, "out(b'last words'); os.kill(os.getpid(), 9)")).await.unwrap();
        let end = seen.end(1).await;
        assert_eq!((end.status, end.code), (ExecStatus::Lost, 137));
        assert_eq!(seen.out(1), "last words");
        assert_eq!(seen.cause().await, CrashCause::Signalled(9));
        assert_eq!(link.start(code(2, "1")).await.unwrap_err().code, ErrorCode::Lost);
        link.acknowledge(ExecId(1)).await.unwrap();
        seen.gone().await;
        assert_eq!(fake.status().await, 1);
    });
}

#[test]
fn engine_exit_after_end_frame() {
    local(async {
        let mut fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let program = "send({'ev':'end','id':frame['id'],'exec':current,'status':'done','code':0}); os._exit(5)";
        link.start(code(1, program)).await.unwrap();
        assert_eq!(seen.end(1).await.status, ExecStatus::Done);
        assert_eq!(seen.cause().await, CrashCause::Exited(5));
        drop(link);
        fake.status().await;
    });
}

#[test]
fn exceeded_limit_ends_engine() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(fake.notes.borrow().watched, 0, "nothing is watched while nothing runs");
        link.start(code(1, "time.sleep(30)")).await.unwrap();
        fake.notes.borrow_mut().beyond = Some(CrashCause::OutOfMemory);
        assert_eq!(seen.cause().await, CrashCause::OutOfMemory);
        assert_eq!(seen.end(1).await.err, "the kernel's memory limit was reached");
    });
}

#[test]
fn background_work_limited() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        fake.notes.borrow_mut().has_activity = true;
        link.start(code(1, "pass")).await.unwrap();
        assert_eq!(seen.end(1).await.status, ExecStatus::Done);
        let before = fake.notes.borrow().watched;
        crate::support::eventually("it is checked again", async || fake.notes.borrow().watched > before + 2).await;
        fake.notes.borrow_mut().beyond = Some(CrashCause::DiskFull);
        assert_eq!(seen.cause().await, CrashCause::DiskFull);
    });
}

#[test]
fn execution_owns_stdin() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let mut exec =
            code(1, "out(sys.stdin.buffer.raw.read(5)); out(os.read(0, 100)); out(b'|'); out(os.read(0, 100))");
        exec.request.stdin = b"hello".to_vec();
        exec.request.stdin_open = true;
        let started = link.start(exec);
        link.stdin(ExecId(1), b" live", false).await.unwrap();
        started.await.unwrap();
        seen.until("live input", |s| s.out.get(&ExecId(1)).filter(|o| o[0].ends_with(b"|")).map(drop)).await;
        link.stdin(ExecId(1), b"", true).await.unwrap();
        seen.end(1).await;
        assert_eq!(seen.out(1), "hello live|");
        assert_eq!(link.stdin(ExecId(1), b"x", true).await.unwrap_err().code, ErrorCode::NotFound);
        // Larger than the pipe, all at once, and code that reads it late.
        let mut exec = code(
            2,
            "time.sleep(0.1)\nn = 0\nwhile True:\n d = os.read(0, 1 << 20)\n n += len(d)\n if not d: break\nout(str(n).encode())",
        );
        exec.request.stdin = vec![b'x'; 4 << 20];
        link.start(exec).await.unwrap();
        seen.end(2).await;
        assert_eq!(seen.out(2), (4 << 20).to_string());
        // Code that never reads blocks nothing else.
        let mut exec = code(3, "out(b'done')");
        exec.request.stdin = vec![b'x'; 4 << 20];
        exec.request.stdin_open = true;
        link.start(exec).await.unwrap();
        let more = link.stdin(ExecId(3), b"more", false).await;
        assert!(more.is_err(), "the execution ended before its input was read");
        seen.end(3).await;
    });
}

#[test]
fn engine_calls_daemon_tools() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let program = r#"
good = tool("srv__good", {"o": [["a", {"i": "1"}]]})
bad = tool("bad", None, 2)
out(json.dumps([good["ok"], good["value"], good["text"], bad["ok"], bad["message"]]).encode())
"#;
        link.start(code(1, program)).await.unwrap();
        seen.end(1).await;
        assert_eq!(seen.out(1), r#"[true, {"o": [["a", {"i": "1"}]]}, "srv__good called", false, "not today"]"#);
        assert_eq!(seen.seen.borrow().tool_calls[0].0, ExecId(1));
    });
}

#[test]
fn interrupt_cancels_tool_calls() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        seen.tools_hang.set(true);
        link.start(code(1, "tool('slow', None)")).await.unwrap();
        seen.until("the call", |s| (!s.tool_calls.is_empty()).then_some(())).await;
        link.interrupt(ExecId(1)).await.unwrap();
        assert_eq!(seen.end(1).await.status, ExecStatus::Interrupted);
        seen.until("the cancellation", |s| (s.tool_calls_dropped == 1).then_some(())).await;
        // Code that catches the interrupt sees a failed call.
        let program = r#"
signal.signal(signal.SIGINT, signal.SIG_IGN)
answer = tool('slow', None, 7)
out(json.dumps(answer['message']).encode())
"#;
        link.start(code(2, program)).await.unwrap();
        seen.until("the second call", |s| (s.tool_calls.len() == 2).then_some(())).await;
        link.interrupt(ExecId(2)).await.unwrap();
        seen.end(2).await;
        assert_eq!(seen.out(2), "\"interrupted\"");
    });
}

#[test]
fn background_job_output_is_separate() {
    local(async {
        let fake = Fake::with(Plan { prelude: "import threading".into(), ..Plan::default() }).await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let program = r#"
send({"ev": "jobs", "jobs": [{"id": "1", "command": "sleep 60"}]})
threading.Timer(1, lambda: out(b"from a job")).start()
"#;
        link.start(code(1, program)).await.unwrap();
        seen.end(1).await;
        seen.until("background output", |s| (s.background == b"from a job").then_some(())).await;
        assert_eq!(seen.seen.borrow().jobs.last().unwrap()[0].command, "sleep 60");
        assert_eq!(seen.out(1), "");
    });
}
