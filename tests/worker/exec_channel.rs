//! The execution channel: starts that are sent ahead, and starts beside calls.

use std::rc::Rc;
use std::time::Duration;

use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::core::ids::ExecId;
use ryokan::core::limits;
use ryokan::link::host::WorkerLink;

use super::code;
use super::fake::Fake;
use super::listener::{Recorder, local};

/// Attaches and waits for the execution channel, which is opened after the first acknowledged end.
async fn with_exec_channel(fake: &Fake, seen: &Rc<Recorder>, first: u64) -> Rc<WorkerLink> {
    let (link, _) = fake.attach(seen).await.unwrap();
    let link = Rc::new(link);
    assert!(
        !link.prepare(ExecId(first), &ExecRequest::code("out(b'early')"), 0),
        "no execution channel before it is opened"
    );
    link.start(code(first, "out(b'called')")).await.unwrap();
    assert_eq!(seen.end(first).await.status, ExecStatus::Done);
    link.acknowledge_later(ExecId(first));
    let next = ExecId(first + 1);
    crate::support::eventually("the channel is open", async || link.prepare(next, &ExecRequest::code("-"), 0)).await;
    link.abort(next);
    link
}

#[test]
fn held_start_waits_for_go() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let link = with_exec_channel(&fake, &seen, 1).await;
        let mark = fake.folder.path().join("mark");
        let marks = |text: &str| ExecRequest::code(format!("open({mark:?}, 'a').write({text:?})\nout(b'done')"));

        assert!(link.prepare(ExecId(2), &marks("two"), 1 << 20));
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!mark.exists(), "it waits");
        link.commit(ExecId(2)).await.unwrap();
        assert_eq!(seen.end(2).await.status, ExecStatus::Done);
        assert_eq!((seen.out(2), std::fs::read_to_string(&mark).unwrap()), ("done".into(), "two".into()));
        link.acknowledge(ExecId(2)).await.unwrap();

        // Taken back, another takes its place and its number.
        assert!(link.prepare(ExecId(3), &marks("three"), 1 << 20));
        link.abort(ExecId(3));
        assert_eq!(link.commit(ExecId(3)).await.unwrap_err().code, ErrorCode::Internal, "it is not held any more");
        assert!(link.prepare(ExecId(3), &marks("-"), 1 << 20));
        assert!(link.prepare(ExecId(3), &marks("other"), 1 << 20));
        link.commit(ExecId(3)).await.unwrap();
        seen.end(3).await;
        assert_eq!(std::fs::read_to_string(&mark).unwrap(), "twoother");
    });
}

#[test]
fn held_start_dropped_with_daemon() {
    local(async {
        let fake = Fake::start().await;
        let mark = fake.folder.path().join("mark");
        let request = ExecRequest::code(format!("open({mark:?}, 'w')"));
        for round in 0..4 {
            let (seen, next) = (Recorder::new(), Recorder::new());
            let link = with_exec_channel(&fake, &seen, round * 2 + 1).await;
            let held = ExecId(round * 2 + 2);
            assert!(link.prepare(held, &request, 1 << 20));
            if round % 2 == 0 {
                drop(link);
            }
            let (link, report) = fake.attach(&next).await.unwrap();
            assert!(!report.executions.iter().any(|(exec, _)| *exec == held), "it never began");
            link.start(code(held.0, "out(b'another')")).await.unwrap();
            next.end(held.0).await;
            assert_eq!(next.out(held.0), "another");
            link.acknowledge(held).await.unwrap();
            assert!(!mark.exists());
        }
    });
}

#[test]
fn exec_channel_start_equals_call_start() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let link = with_exec_channel(&fake, &seen, 1).await;
        // A long execution: its end arrives as an ordinary call, and calls about it find it at
        // once.
        let long = link.start(code(2, "time.sleep(30)"));
        link.interrupt(ExecId(2)).await.unwrap();
        long.await.unwrap();
        seen.end(2).await;
        // Loud: more than the answer may take along.
        link.start(code(3, "for i in range(100): out(b'x' * 1000)")).await.unwrap();
        seen.end(3).await;
        assert_eq!(seen.out(3).len(), 100_000);
        // Larger than a packet: it goes as a call.
        let padded = format!("out(b'large')\n#{}", "#".repeat(limits::EXEC_CHANNEL_BYTES));
        assert!(!link.prepare(ExecId(4), &ExecRequest::code(&padded), 0));
        link.start(code(4, &padded)).await.unwrap();
        seen.end(4).await;
        assert_eq!(seen.out(4), "large");
        // One at a time, also across the two ways.
        let go = fake.folder.path().join("go");
        let busy = link.start(code(5, &format!("while not os.path.exists({go:?}): time.sleep(0.01)")));
        assert_eq!(link.start(code(6, "out(b'no')")).await.unwrap_err().code, ErrorCode::Busy);
        std::fs::write(&go, "").unwrap();
        busy.await.unwrap();
        seen.end(5).await;
        // Many in a row, some of which are over at once.
        for exec in 7..200 {
            let wait = if exec % 10 == 0 { "time.sleep(0.003)\n" } else { "" };
            link.start(code(exec, &format!("{wait}out(b'{exec}')"))).await.unwrap();
            seen.end(exec).await;
            assert_eq!(seen.out(exec), exec.to_string());
            link.acknowledge_later(ExecId(exec));
        }
    });
}
