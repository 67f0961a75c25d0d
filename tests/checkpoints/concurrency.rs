//! Checkpoints under concurrent load: streaming executions, other kernels.

use std::time::Duration;

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus};

use super::log;
use crate::support::{Host, kernel, out, users};

fn named(name: &str) -> CheckpointRequest {
    CheckpointRequest::new(CheckpointType::Manual, name)
}

#[test]
fn fifty_concurrent_checkpoints() {
    const KERNELS: usize = 50;
    let host = Host::start();
    host.with(async |client| {
        let mut kernels = Vec::new();
        for n in 0..KERNELS {
            let engine = if n % 10 == 0 { EngineName::Python } else { EngineName::Kaish };
            let k = kernel(&client, &format!("k{n}"), engine).await;
            match engine {
                EngineName::Python => out(&k, &format!("x = {n}; size = open('f', 'w').write('{n} ' * 1000)")).await,
                _ => out(&k, &format!("x={n}; printf '%s' 'text of {n}' > f")).await,
            };
            kernels.push((k, engine));
        }
        let requests = vec![named("one"); KERNELS];
        let all = kernels.iter().zip(&requests).map(|((k, _), request)| k.checkpoint(request));
        let taken = futures::future::join_all(all).await;
        taken.into_iter().for_each(|taken| drop(taken.expect("taken")));
        let changed = kernels.iter().map(|(k, engine)| async {
            match engine {
                EngineName::Python => out(k, "x = 'changed'; size = open('f', 'w').write('changed')").await,
                _ => out(k, "x=changed; echo changed > f").await,
            };
        });
        futures::future::join_all(changed).await;
        let back = futures::future::join_all(kernels.iter().map(|(k, _)| k.restore_checkpoint("one", 0))).await;
        back.into_iter().for_each(|done| drop(done.expect("restored")));
        for (n, (k, engine)) in kernels.iter().enumerate() {
            let (show, expected) = match engine {
                EngineName::Python => {
                    ("print(x, open('f').read())", format!("{n} {}", format!("{n} ").repeat(1000).trim_end()))
                }
                _ => ("echo $x $(cat f)", format!("{n} text of {n}")),
            };
            assert_eq!(out(k, show).await, expected, "k{n}");
        }
    });
}

#[test]
fn checkpoint_waits_for_stream() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Python).await;
            let code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\nfor n in range(40):\n    print('line', n, flush=True); time.sleep(0.025)\nopen('done', 'w').write('yes'); x = 'done'";
            let running = k.run(&ExecRequest::code(code)).await.unwrap();
            let impatient = CheckpointRequest { wait: Duration::from_millis(100), ..named("impatient") };
            assert_eq!(k.checkpoint(&impatient).await.unwrap_err().code, ErrorCode::Deadline, "{user:?}");
            host.release(&k).await;
            let (patient, first) = (named("patient"), named("first"));
            let (taken, result) = futures::join!(k.checkpoint(&patient), running.result());
            let (taken, result) = (taken.expect("the queued checkpoint was taken"), result.unwrap());
            assert_eq!(result.end.status, ExecStatus::Done, "{user:?}");
            assert_eq!(String::from_utf8_lossy(&result.stdout).lines().count(), 40, "{user:?}: nothing of the stream is lost");
            assert_eq!(log(&host, "k").len(), 1, "{user:?}");
            out(&k, "import os; os.remove('done'); x = None").await;
            k.restore_checkpoint(&taken.id.to_string(), 0).await.unwrap();
            assert_eq!(out(&k, "print(x, open('done').read())").await, "done yes", "{user:?}: the state after the execution");
            // An execution requested meanwhile waits for the checkpoint.
            let behind = async {
                tokio::time::sleep(Duration::from_millis(1)).await;
                out(&k, "print('behind')").await
            };
            let (taken, behind) = futures::join!(k.checkpoint(&first), behind);
            taken.unwrap();
            assert_eq!(behind, "behind", "{user:?}");
        });
    }
}
