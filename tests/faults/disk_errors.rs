//! A full or failing disk at one step: the client gets an error, kernel and daemon survive, a retry
//! works.

use ryokan::core::engine::EngineName;
use ryokan::core::error::{Error, ErrorCode};
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::rpc::client::KernelClient;
use ryokan::sys::fault;

use super::{Bystander, remove_all};
use crate::support::{Host, User, kernel, out, spec};

fn is_clear(point: &str, error: &Error) {
    let text = format!("{error} {}", error.hint);
    let codes = [ErrorCode::Unavailable, ErrorCode::Internal, ErrorCode::Busy];
    assert!(codes.contains(&error.code), "{point}: {error:?}");
    assert!(
        text.contains("No space left")
            || text.contains("no room")
            || text.contains("nput/output error")
            || text.contains("full")
            || text.contains("os error"),
        "{point}: nothing tells of the disk: {error:?}"
    );
    assert!(
        error.code != ErrorCode::Internal || !text.contains("enospc"),
        "{point}: a full disk is no fault of ryokan's"
    );
}

/// Runs an operation twice: the first try meets the fault.
async fn twice<T>(point: &str, mut operation: impl AsyncFnMut() -> ryokan::core::error::Result<T>) -> T {
    let error = operation().await.err().unwrap_or_else(|| panic!("{point}: the fault was not met"));
    is_clear(point, &error);
    operation().await.unwrap_or_else(|error| panic!("{point}: the second try fails too: {error:?}"))
}

async fn meet(host: &Host, label: &str, point: &str, k: &KernelClient, client: &ryokan::rpc::client::HostClient) {
    let given = host.path("given");
    match label {
        "state.journal.append" => drop(twice(point, async || k.message("user", "text").await).await),
        // A full disk must not forbid code that deletes: the reserve is released for an idle kernel.
        "state.exec.begin" if point.ends_with("enospc") => {
            assert_eq!(out(k, "echo ran").await, "ran", "{point}");
        }
        "state.exec.begin" => {
            let running = twice(point, async || k.run(&ExecRequest::code("echo ran")).await).await;
            assert_eq!(running.result().await.expect("a result").stdout, b"ran\n", "{point}");
        }
        "state.exec.end" => {
            // The write is retried, so the client sees no error.
            let result =
                k.run(&ExecRequest::code("echo ran")).await.expect("accepted").result().await.expect("a result");
            assert_eq!((result.end.status, &result.stdout[..]), (ExecStatus::Done, &b"ran\n"[..]), "{point}");
        }
        "state.workflow.change" => {
            let opened = twice(point, async || k.open_decision("which way", "", point, 0).await).await;
            assert_eq!(k.open_decision("which way", "", point, 0).await.expect("the same").id, opened.id, "{point}");
        }
        "state.messages.add" => drop(twice(point, async || k.message_once("user", "text", point, 0).await).await),
        "state.mounts.put" => {
            twice(point, async || k.mount_at("/given", given.to_str().unwrap(), false, 0).await).await;
            assert_eq!(out(k, "cat /given/seen").await, "seen");
            k.unmount_at("/given", 0).await.expect("unmounted");
        }
        "catalog.kernel.insert"
        | "kernel.files.dir"
        | "kernel.files.state"
        | "kernel.files.engine"
        | "kernel.files.sync" => {
            twice(point, async || client.create_kernel(&spec("new", EngineName::Kaish), point).await.map(drop)).await;
            let (new, _) = client.open_kernel("new").await.expect("there");
            assert_eq!(out(&new, "echo whole").await, "whole", "{point}");
            client.remove_kernel("new", 0).await.expect("removed");
        }
        "catalog.worker.put" => {
            let (new, _) = client.create_kernel(&spec("new", EngineName::Kaish), "").await.expect("made");
            // The start is retried automatically, or fails with an error.
            if let Err(error) = new.start().await {
                is_clear(point, &error);
                new.start().await.expect("the second try");
            }
            assert_eq!(out(&new, "echo whole").await, "whole", "{point}");
            client.remove_kernel("new", 0).await.expect("removed");
        }
        _ => {
            let blob = format!("{point} ").repeat(4000).into_bytes();
            let digest = twice(point, async || k.put_blob(&blob).await).await;
            assert_eq!(k.blob(digest).await.expect("readable"), blob, "{point}");
        }
    }
}

const LABELS: &[&str] = &[
    "catalog.kernel.insert",
    "catalog.worker.put",
    "kernel.files.dir",
    "kernel.files.engine",
    "kernel.files.state",
    "state.blobs.grant",
    "state.exec.begin",
    "state.exec.end",
    "state.journal.append",
    "state.messages.add",
    "state.mounts.put",
    "state.workflow.change",
    "store.pack.write",
];

#[test]
fn disk_errors_survived() {
    let mut host = Host::prepare(User::Unprivileged);
    host.configure("[daemon]\ndurability = \"power\"\n");
    host.launch();
    let bystander = Bystander::new();
    let given = host.path("given");
    std::fs::create_dir(&given).unwrap();
    std::fs::write(given.join("seen"), "seen").unwrap();
    let worker = host.with(async |client| {
        out(&kernel(&client, "k", EngineName::Kaish).await, "x=kept").await;
        host.workers()
    });
    let steps = |label: &str| match fault::LABELS.iter().find(|row| row.name == label).expect("in the table").steps {
        fault::Steps::Commit => vec![format!("{label}.before_commit")],
        fault::Steps::Dir => vec![format!("{label}.create")],
        _ => vec![label.to_owned()],
    };
    for (label, point) in LABELS.iter().flat_map(|label| steps(label).into_iter().map(move |point| (*label, point))) {
        for error in ["enospc", "eio"] {
            host.kill();
            host.env(fault::VARIABLE, &format!("{point}={error}"));
            host.launch();
            let pid = host.pid();
            let point = format!("{point}={error}");
            host.with(async |client| {
                let (k, _) = client.open_kernel("k").await.expect("there");
                meet(&host, label, &point, &k, &client).await;
                assert_eq!(out(&k, "echo $x").await, "kept", "{point}");
            });
            assert!(host.pid() == pid && Host::is_alive(pid as u32), "{point}: the daemon died");
            assert!(worker.iter().all(|pid| Host::is_alive(*pid)), "{point}: the kernel's worker died");
        }
    }
    bystander.check();
    host.kill();
    host.env(fault::VARIABLE, "");
    host.launch();
    remove_all(&host);
}

/// Output that does not fit into the journal is reported as lost, even when the retries fail.
#[test]
fn large_output_loss_reported() {
    let mut host = Host::start();
    host.with(async |client| {
        out(&kernel(&client, "k", EngineName::Kaish).await, "x=kept").await;
    });
    for point in ["store.pack.write=enospc", "store.pack.create=enospc", "store.pack.write=eio"] {
        host.kill();
        host.env(fault::VARIABLE, point);
        host.launch();
        host.with(async |client| {
            let (k, _) = client.open_kernel("k").await.expect("there");
            let running =
                k.run(&ExecRequest::code("for i in $(seq 1 5000); do echo $i; done; x=after")).await.expect("accepted");
            let result = running.result().await.expect("an end, not a hang");
            let all = result.stdout.len() as u64 + result.truncated_bytes;
            assert_eq!(result.end.status, ExecStatus::Done, "{point}: {:?}", result.end);
            assert_eq!(
                all,
                (1..=5000).map(|i: u32| i.to_string().len() as u64 + 1).sum::<u64>(),
                "{point}: bytes are counted"
            );
            assert_eq!(out(&k, "echo $x").await, "after", "{point}");
        });
    }
    host.kill();
    host.env(fault::VARIABLE, "");
    host.launch();
    remove_all(&host);
}
