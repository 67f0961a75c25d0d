//! The client library against the fake.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use ryokan::core::error::{Error, ErrorCode, Result};
use ryokan::core::exec::{ExecRequest, ExecStatus, OutputEvent};
use ryokan::core::ids::ExecId;
use ryokan::core::info::KernelFilter;
use ryokan::core::value::Value;
use ryokan::rpc::client::{HostClient, KernelClient, run_local};
use ryokan::rpc::convert::spec::SpecRequest;
use ryokan::session::{OutputSink, Session};

use super::fake::Fake;

/// Runs a test body with a connection to a new fake.
fn with_host(body: impl AsyncFnOnce(HostClient, &Fake)) {
    let fake = Fake::start();
    run_local(async {
        let host = HostClient::connect(&fake.socket, "test 1").await.unwrap();
        body(host, &fake).await;
    })
    .unwrap();
}

fn with_kernel(body: impl AsyncFnOnce(KernelClient, &Fake)) {
    with_host(async |host, fake| body(host.open_kernel("demo").await.unwrap().0, fake).await);
}

#[test]
fn kernel_create_list_open_remove() {
    with_host(async |host, fake| {
        assert_eq!(host.info().name, "fake");
        assert!(fake.log.has("hello test 1"));
        let (_, info) = host.create_kernel(&SpecRequest::new("a".parse().unwrap()), "").await.unwrap();
        assert_eq!(info.spec.name.as_str(), "a");
        let names = |kernels: Vec<ryokan::core::info::KernelInfo>| {
            kernels.into_iter().map(|info| info.spec.name.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(host.list_kernels(&KernelFilter::default()).await.unwrap()), ["a", "demo"]);
        let only = KernelFilter { prefix: "d".into(), ..KernelFilter::default() };
        assert_eq!(names(host.list_kernels(&only).await.unwrap()), ["demo"]);
        host.remove_kernel("a", 0).await.unwrap();
        let error = host.open_kernel("a").await.err().unwrap();
        assert_eq!((error.code, error.hint.as_str()), (ErrorCode::NotFound, "ryokan ls lists them"));
    });
}

#[test]
fn values_pass_unchanged() {
    with_kernel(async |kernel, _| {
        let value = Value::Array(vec![Value::Float(f64::INFINITY), Value::Bytes(vec![0, 255]), Value::Null]);
        kernel.set_var("x", value.clone()).await.unwrap();
        assert_eq!(kernel.get_var("x").await, Ok(value));
        assert_eq!(kernel.get_var("y").await.unwrap_err().code, ErrorCode::NotFound);
        let deep = (0..200).fold(Value::Null, |inner, _| Value::Array(vec![inner]));
        assert_eq!(kernel.set_var("z", deep).await.unwrap_err().code, ErrorCode::InvalidArgument);
    });
}

#[test]
fn output_precedes_result() {
    with_kernel(async |kernel, _| {
        let execution = kernel.run(&ExecRequest::code("both")).await.unwrap();
        let mut events = Vec::new();
        let take = async |event| {
            events.push(event);
            Ok(())
        };
        execution.output(0, take).await.unwrap();
        let (out, err) = (OutputEvent::Stdout(b"out\n".to_vec()), OutputEvent::Stderr(b"err\n".to_vec()));
        assert_eq!(events, [out.clone(), err, out, OutputEvent::ExitCode(0)]);
        let result = execution.result().await.unwrap();
        assert_eq!((result.end.status, result.stdout.as_slice()), (ExecStatus::Done, b"out\nout\n".as_slice()));
    });
}

#[test]
fn slow_client_back_pressure() {
    with_kernel(async |kernel, fake| {
        let execution = kernel.run(&ExecRequest::code("flood")).await.unwrap();
        let exec = execution.exec();
        let taken = Cell::new(0);
        let flood = execution.output(0, async |_| {
            taken.set(taken.get() + 1);
            if taken.get() == 3 {
                // Output within the flow-control windows has arrived after this pause.
                let mut before = 0;
                while fake.log.lines().len() > before {
                    before = fake.log.lines().len();
                    assert!(before < 64, "{before} chunks of 64 KiB were in flight");
                    tokio::time::sleep(Duration::from_millis(300)).await;
                }
                kernel.interrupt_execution(exec).await?;
            }
            Ok(())
        });
        flood.await.unwrap();
        assert_eq!(execution.result().await.unwrap().end.status, ExecStatus::Interrupted);
    });
}

struct Sink {
    seen: RefCell<Vec<OutputEvent>>,
    most: usize,
}

#[async_trait::async_trait(?Send)]
impl OutputSink for Sink {
    async fn take(&self, _: ExecId, event: OutputEvent) -> Result<()> {
        if self.seen.borrow().len() == self.most {
            return Err(Error::internal("enough"));
        }
        self.seen.borrow_mut().push(event);
        Ok(())
    }
}

#[test]
fn failed_sink_detaches_from_execution() {
    with_kernel(async |kernel, _| {
        for (most, seen) in [(9, 4), (1, 1)] {
            let sink = Sink { seen: RefCell::default(), most };
            let result = kernel.execute_streaming(ExecRequest::code("both"), &sink).await.unwrap();
            assert_eq!((result.end.code, sink.seen.borrow().len()), (0, seen));
        }
    });
}

#[test]
fn stdin_is_sent_in_order() {
    with_kernel(async |kernel, _| {
        let request = ExecRequest { stdin: b"a".to_vec(), stdin_open: true, ..ExecRequest::code("cat") };
        let execution = kernel.run(&request).await.unwrap();
        execution.stdin(b"b").await.unwrap();
        execution.stdin(&vec![b'c'; 3 << 20]).await.unwrap();
        execution.close_stdin().await.unwrap();
        let mut got = Vec::new();
        let take = async |event| {
            if let OutputEvent::Stdout(bytes) = event {
                got.extend(bytes);
            }
            Ok(())
        };
        execution.output(0, take).await.unwrap();
        assert_eq!((got.len(), &got[..3]), ((3 << 20) + 2, b"abc".as_slice()));
    });
}

#[test]
fn lost_connection_fails_every_call() {
    with_kernel(async |kernel, _| {
        let waiting = kernel.run(&ExecRequest::code("wait")).await.unwrap();
        let mut events = kernel.events(3).await.unwrap();
        // The answer may or may not arrive before the connection closes.
        let _ = kernel.run(&ExecRequest::code("hang up")).await;
        let lost = waiting.result().await.unwrap_err();
        assert_eq!(lost.code, ErrorCode::Unavailable, "{lost:?}");
        assert!(!lost.hint.is_empty());
        assert_eq!(kernel.info().await.unwrap_err().code, ErrorCode::Unavailable);
        assert_eq!(events.next().await.unwrap_err().code, ErrorCode::Unavailable);
    });
}

#[test]
fn dropping_events_unsubscribes() {
    with_host(async |host, fake| {
        let mut events = host.events(1).await.unwrap();
        for sequence in 2..5 {
            assert_eq!(events.next().await.unwrap().sequence, sequence);
        }
        drop(events);
        tokio::task::spawn_blocking({
            let log = fake.log.clone();
            move || log.wait_for("unsubscribed")
        })
        .await
        .unwrap();
    });
}

#[test]
fn blob_streaming_round_trip() {
    with_kernel(async |kernel, _| {
        let data: Vec<u8> = (0..5 << 20).map(|i| (i / 7) as u8).collect();
        let hash = kernel.write_blob(&data).await.unwrap();
        assert_eq!(hash.as_bytes(), blake3::hash(&data).as_bytes());
        assert_eq!(kernel.read_blob(hash).await.unwrap(), data);
    });
}

#[test]
fn client_connects_to_long_path() {
    let folder = tempfile::tempdir().unwrap();
    let deep = folder.path().join("d".repeat(120));
    std::fs::create_dir(&deep).unwrap();
    let fake = Fake::start_at(deep.join("ryokand.sock"), folder);
    assert!(fake.socket.as_os_str().len() > 108);
    run_local(async { HostClient::connect(&fake.socket, "test").await.map(drop) }).unwrap().unwrap();
}

#[test]
fn unreachable_daemon_is_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let silent = std::os::unix::net::UnixListener::bind(folder.path().join("silent")).unwrap();
    for (name, deadline) in [("none", Duration::from_secs(5)), ("silent", Duration::from_millis(100))] {
        let socket = folder.path().join(name);
        let error = run_local(async { HostClient::connect_within(&socket, "test", deadline).await.err() });
        assert_eq!(error.unwrap().unwrap().code, ErrorCode::Unavailable, "{name}");
    }
    drop(silent);
}
