//! Daemons that go and come back, and those that are none.

use std::rc::Rc;
use std::time::{Duration, Instant};

use capnp_rpc::RpcSystem;
use capnp_rpc::rpc_twoparty_capnp::Side;
use nix::unistd::Uid;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecStatus, Stream};
use ryokan::core::ids::{Epoch, ExecId, KernelId, WorkerId};
use ryokan::link::connector::unix;
use ryokan::link::connector::unix::UnixConnector;
use ryokan::link::host::{WorkerIdentity, WorkerLink};
use ryokan::link::schema::worker_capnp::worker;

use super::code;
use super::fake::{Fake, Plan, identity};
use super::listener::{Recorder, local};

#[test]
fn reattach_replays_output() {
    local(async {
        let fake = Fake::start().await;
        let first = Recorder::new();
        let (link, _) = fake.attach(&first).await.unwrap();
        link.start(code(1, "out(b'one'); err(b'two')")).await.unwrap();
        first.end(1).await;
        let go = fake.folder.path().join("go");
        let waits = format!("out(b'three')\nwhile not os.path.exists({go:?}): time.sleep(0.01)\nout(b'four')");
        link.start(code(2, &waits)).await.unwrap();
        first.until("output", |s| s.out.get(&ExecId(2)).map(drop)).await;
        drop(link);
        tokio::time::sleep(Duration::from_millis(50)).await;
        std::fs::write(&go, "").unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;

        let second = Recorder::new();
        let (link, report) = fake.attach(&second).await.unwrap();
        assert_eq!(report.executions.iter().map(|(exec, _)| exec.0).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(second.end(1).await.status, ExecStatus::Done);
        assert_eq!(second.end(2).await.status, ExecStatus::Done);
        assert_eq!((second.out(1), second.err(1)), ("one".into(), "two".into()));
        assert_eq!(second.out(2), "threefour");
        link.acknowledge(ExecId(1)).await.unwrap();
        link.acknowledge(ExecId(2)).await.unwrap();
        let third = Recorder::new();
        let (_link, report) = fake.attach(&third).await.unwrap();
        assert_eq!(report.executions, []);
        // The newest wins, and the one before learns of it.
        second.gone().await;
        assert_eq!(link.usage().await.unwrap_err().code, ErrorCode::Lost);
    });
}

#[test]
fn unreceived_end_redelivered() {
    local(async {
        let fake = Fake::start().await;
        // Replaced at every moment around the answer.
        for (round, pause) in (1..=40).zip((0..4).cycle()) {
            let (first, second) = (Recorder::new(), Recorder::new());
            let (link, _) = fake.attach(&first).await.unwrap();
            let started = tokio::task::spawn_local(link.start(code(round, "out(b'x')")));
            tokio::time::sleep(Duration::from_micros(pause * 400)).await;
            let (link, report) = fake.attach(&second).await.unwrap();
            let told_before = first.seen.borrow().ends.contains_key(&ExecId(round));
            match report.executions.iter().any(|(exec, _)| *exec == ExecId(round)) {
                true => second.end(round).await,
                false => {
                    assert!(!told_before, "an end that was not acknowledged is kept");
                    link.start(code(round, "out(b'x')")).await.unwrap();
                    second.end(round).await
                }
            };
            assert_eq!(second.out(round), "x");
            link.acknowledge(ExecId(round)).await.unwrap();
            let _ = started.await;
        }
    });
}

#[test]
fn detached_output_waits() {
    local(async {
        let fake = Fake::with(Plan { output_buffer_bytes: 1 << 20, ..Plan::default() }).await;
        let first = Recorder::new();
        let (link, _) = fake.attach(&first).await.unwrap();
        let mark = fake.folder.path().join("mark");
        let program = format!(
            "time.sleep(0.2)\nfor i in range(20):\n out(bytes([65 + i]) * (1 << 20))\n open({mark:?}, 'w').write(str(i))"
        );
        let mut exec = code(1, &program);
        exec.output_kept = 64 << 20;
        link.start(exec).await.unwrap();
        drop(link);
        tokio::time::sleep(Duration::from_millis(800)).await;
        let far: u32 = std::fs::read_to_string(&mark).unwrap_or_default().parse().unwrap_or(0);
        assert!(far <= 3, "the code wrote {far} MiB without a reader");
        let second = Recorder::new();
        let (_link, _) = fake.attach(&second).await.unwrap();
        second.end(1).await;
        let out = second.out(1);
        assert_eq!(out.len(), 20 << 20);
        assert!(out.as_bytes().chunks(1 << 20).enumerate().all(|(i, mib)| mib.iter().all(|b| *b == 65 + i as u8)));
    });
}

#[test]
fn orphan_saves_and_exits() {
    local(async {
        // Time for the first daemon.
        let orphan_grace = Duration::from_secs(3);
        let mut fake = Fake::with(Plan { orphan_grace, ..Plan::default() }).await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        link.start(code(1, "entries['var/unsaved'] = ({}, b'body')\ntime.sleep(0.5)")).await.unwrap();
        let left = Instant::now();
        drop(link);
        assert_eq!(fake.status().await, 0);
        assert!(left.elapsed() >= orphan_grace);
        assert_eq!(fake.state(), [("var/unsaved".to_owned(), b"body".to_vec())]);
    });
}

#[test]
fn never_attached_worker_is_orphan() {
    local(async {
        let mut fake = Fake::with(Plan { orphan_grace: Duration::from_millis(100), ..Plan::default() }).await;
        assert_eq!(fake.status().await, 0);
    });
}

#[test]
fn attach_requires_secret() {
    local(async {
        let fake = Fake::start().await;
        let good = Recorder::new();
        let (link, _) = fake.attach(&good).await.unwrap();
        type Change = fn(&mut WorkerIdentity);
        let changes: [(&str, Change); 5] = [
            ("worker_identity", |i| i.secret[0] ^= 1),
            ("worker_identity", |i| i.worker = WorkerId::from_bytes([9; 16])),
            ("worker_identity", |i| i.kernel = KernelId::from_bytes([9; 16])),
            ("worker_identity", |i| i.epoch = Epoch(99)),
            ("worker_build", |i| i.build = "other".into()),
        ];
        for (reason, change) in changes {
            let mut other = identity();
            change(&mut other);
            let error = fake.attach_as(&other, &Recorder::new()).await.map(drop).unwrap_err();
            assert_eq!((error.code, error.reason.as_str()), (ErrorCode::Refused, reason), "{error}");
        }
        // The right one was not disturbed.
        link.usage().await.unwrap();
    });
}

async fn raw_client(fake: &Fake) -> worker::Client {
    let stream = unix::connect(&fake.socket()).await.unwrap();
    let mut rpc = RpcSystem::new(Box::new(unix::network(stream, Side::Client).unwrap()), None);
    let client = rpc.bootstrap(Side::Server);
    tokio::task::spawn_local(rpc);
    client
}

#[test]
fn calls_require_proof_first() {
    local(async {
        let fake = Fake::start().await;
        let client: worker::Client = raw_client(&fake).await;
        let refused = |outcome: Result<(), capnp::Error>| {
            let error = outcome.expect_err("refused");
            assert!(error.to_string().contains("worker_identity"), "{error}");
        };
        refused(client.usage_request().send().promise.await.map(drop));
        refused(client.load_begin_request().send().promise.await.map(drop));
        refused(client.stop_request().send().promise.await.map(drop));
        let mut start = client.start_request();
        start.get().init_exec().set_request_json(br#"{"op":"exec","exec":1,"code":""}"#);
        refused(start.send().promise.await.map(drop));
        let mut challenge = client.challenge_request();
        challenge.get().set_nonce(b"short");
        assert!(challenge.send().promise.await.is_err());
        let mut challenge = client.challenge_request();
        challenge.get().set_nonce(&[1; 32]);
        challenge.send().promise.await.unwrap();
        refused(client.usage_request().send().promise.await.map(drop));
        let mut again = client.challenge_request();
        again.get().set_nonce(&[1; 32]);
        refused(again.send().promise.await.map(drop));
    });
}

#[test]
fn other_user_is_rejected() {
    local(async {
        let stranger = Uid::effective().as_raw().wrapping_add(1);
        let fake = Fake::with(Plan { daemon_uid: stranger, ..Plan::default() }).await;
        let error = fake.attach(&Recorder::new()).await.map(drop).unwrap_err();
        assert_eq!(error.code, ErrorCode::Unavailable);
    });
}

#[test]
fn worker_socket_ignores_garbage() {
    local(async {
        use tokio::io::AsyncWriteExt;
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        for garbage in [&[0xff; 4096][..], b"GET / HTTP/1.1\r\n\r\n", &[0; 8]] {
            let mut stream = unix::connect(&fake.socket()).await.unwrap();
            stream.write_all(garbage).await.unwrap();
            let mut stream = unix::connect(&unix::descriptor_path(&fake.socket())).await.unwrap();
            stream.write_all(garbage).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        link.start(code(1, "out(b'ok')")).await.unwrap();
        seen.end(1).await;
    });
}

#[test]
fn discarded_output_counted() {
    local(async {
        let fake = Fake::start().await;
        let first = Recorder::new();
        let (link, _) = fake.attach(&first).await.unwrap();
        let mut exec = code(1, "out(b'x' * 1000)");
        exec.output_kept = 10;
        link.start(exec).await.unwrap();
        first.end(1).await;
        let second = Recorder::new();
        let (_link, _) =
            WorkerLink::attach(Rc::new(UnixConnector::new(fake.socket())), &fake.identity, Rc::clone(&second) as _)
                .await
                .unwrap();
        second.end(1).await;
        assert_eq!(second.out(1), "x".repeat(10));
        assert_eq!(second.seen.borrow().ends[&ExecId(1)].1, 1000);
        assert_eq!(Stream::Stdout as usize, 0, "the recorder relies on it");
    });
}
