//! An execution is sent ahead while its start is written, and runs only after the write succeeds.

use std::time::Duration;

use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::rpc::client::{HostClient, run_local};
use ryokan::sys::fault;

use super::until;
use crate::support::{Host, User, kernel, out, run};

/// Executions before the one that meets the fault: enough for the worker to accept executions ahead
/// by then.
const BEFORE: usize = 3;

/// A host whose daemon meets the fault while it writes the start of `touch ran`; returns the
/// client's result.
fn interrupted_at(host: &mut Host, engine: EngineName, fault: &str) -> ryokan::core::error::Result<ExecStatus> {
    host.env(fault::VARIABLE, &fault.replace('=', &format!(":{}=", BEFORE + 1)));
    host.launch();
    let (before, code) = match engine {
        EngineName::Kaish | EngineName::Bash => ("true", "touch ran"),
        EngineName::Python => ("1", "open('ran', 'w').close()"),
        EngineName::Node => ("1", "require('fs').writeFileSync('ran', '')"),
    };
    run_local(async {
        let client = HostClient::connect(&host.socket(), "test").await?;
        let k = kernel(&client, "k", engine).await;
        for _ in 0..BEFORE {
            assert_eq!(run(&k, before).await.end.status, ExecStatus::Done);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(k.run(&ExecRequest::code(code)).await?.result().await?.end.status)
    })
    .unwrap()
}

/// Whether the code ran, according to the kernel, and the statuses in its journal.
async fn seen(client: &HostClient, engine: EngineName) -> (bool, Vec<String>) {
    let k = client.open_kernel("k").await.expect("the kernel is there").0;
    // Waits for anything still in transit.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut statuses = Vec::new();
    k.each_journal_entry(0, 0, async |entry| {
        statuses.push(entry.status);
        Ok(())
    })
    .await
    .expect("readable");
    let there = match engine {
        EngineName::Kaish | EngineName::Bash => out(&k, "if test -e ran; then echo yes; else echo no; fi").await,
        EngineName::Node => out(&k, "console.log(require('fs').existsSync('ran') ? 'yes' : 'no')").await,
        EngineName::Python => out(&k, "import os; print('yes' if os.path.exists('ran') else 'no')").await,
    };
    (there == "yes", statuses)
}

#[test]
fn unjournalled_execution_never_starts() {
    for engine in EngineName::ALL {
        for (point, journalled) in [("before_commit", false), ("after_commit", true)] {
            let mut host = Host::prepare(User::Own);
            let reported = interrupted_at(&mut host, engine, &format!("state.exec.begin.{point}=kill"));
            assert!(reported.is_err(), "{engine} {point}: nothing was acknowledged");
            until("the daemon is dead", || !Host::is_alive(host.pid() as u32));
            host.kill();
            host.env(fault::VARIABLE, "");
            host.launch();
            host.with(async |client| {
                let (ran, statuses) = seen(&client, engine).await;
                assert!(!ran, "{engine} {point}: it was not committed");
                assert_eq!(statuses.len(), BEFORE + usize::from(journalled), "{engine} {point}: {statuses:?}");
                let last = statuses.last().map(String::as_str);
                assert_eq!(last == Some("lost"), journalled, "{engine} {point}: {statuses:?}");
            });
        }
    }
}

#[test]
fn journal_error_cancels_start() {
    for engine in EngineName::ALL {
        let mut host = Host::prepare(User::Own);
        let reported = interrupted_at(&mut host, engine, "state.exec.begin.before_commit=eio");
        assert!(reported.is_err(), "{engine}: the execution is refused");
        host.with(async |client| {
            let (ran, statuses) = seen(&client, engine).await;
            assert!(!ran, "{engine}: a refused execution does not run");
            assert_eq!(statuses.len(), BEFORE, "{engine}: {statuses:?}");
        });
    }
}
