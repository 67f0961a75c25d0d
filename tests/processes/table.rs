//! What a process beside the engine has everywhere: arguments, directory, environment, streams, end.

use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecStatus, OutputEvent, Work};
use ryokan::rpc::client::KernelClient;

use super::{Inside, bash, detached, each_user, finish, program, script};
use crate::support::eventually;

/// Arguments, directory, environment and input arrive; the exit status is the program's.
pub(crate) async fn starts(kernel: &KernelClient) {
    let result = finish(kernel, &program(&["printf", "<%s>", "a b", "$HOME", "*", "", "\u{fc}\n"])).await;
    assert_eq!(String::from_utf8_lossy(&result.stdout), "<a b><$HOME><*><><\u{fc}\n>");
    let mut request = script("echo \"$A $B in $PWD\"; exit 7");
    if let Work::Process(program) = &mut request.what {
        program.cwd = "/tmp".into();
    }
    request.env = vec![("A".into(), "one".into()), ("B".into(), "=two".into())];
    let result = finish(kernel, &request).await;
    assert_eq!((&result.stdout[..], result.end.code), (&b"one =two in /tmp\n"[..], 7), "{:?}", result.end);
    let request = ExecRequest { stdin_open: true, ..script("wc -c; echo err >&2; kill -KILL $$") };
    let process = kernel.spawn(&request).await.expect("accepted");
    process.execution.stdin(&vec![7; 1_000_000]).await.expect("taken");
    process.execution.close_stdin().await.expect("closed");
    let result = process.execution.result().await.expect("a result");
    assert_eq!((&result.stdout[..], &result.stderr[..]), (&b"1000000\n"[..], &b"err\n"[..]));
    assert_eq!((result.end.status, result.end.code), (ExecStatus::Failed, 137), "{:?}", result.end);
    let missing = finish(kernel, &program(&["nothing-here"])).await.end;
    assert_eq!((missing.status, missing.code), (ExecStatus::Refused, 127), "{missing:?}");
}

/// A timeout and a kill end the whole tree, also what left its session; a signal reaches the program.
pub(crate) async fn ends(inside: &Inside<'_>, timeout_ms: u64) {
    let kernel = inside.kernel;
    // An image has no `setsid`.
    let tree = r#"(python3 -SE -c 'import os; os.setsid(); os.execlp("sh", "sh", "-c", "while :; do echo x >> ticks; sleep 0.05; done")' &); trap '' TERM INT; echo up; while :; do sleep 1; done"#;
    let is_over = "a=$(wc -c < ticks); sleep 0.5; [ $a = $(wc -c < ticks) ] && rm ticks && echo over";
    let ticks = async || inside.sh("[ -s ticks ] && echo yes || true").await == "yes";
    let process = kernel.spawn(&ExecRequest { timeout_ms, ..script(tree) }).await.expect("accepted");
    eventually("its child runs", &ticks).await;
    let result = process.execution.result().await.expect("a result");
    assert_eq!((result.end.status, result.end.code), (ExecStatus::Timeout, 124), "{:?}", result.end);
    assert_eq!(result.stdout, b"up\n");
    assert_eq!(inside.sh(is_over).await, "over");
    let killed = kernel.spawn(&script(tree)).await.expect("accepted");
    eventually("its child runs", &ticks).await;
    kernel.interrupt_execution(killed.execution.exec()).await.expect("ended");
    assert_eq!(killed.execution.result().await.expect("a result").end.code, 137);
    assert_eq!(inside.sh(is_over).await, "over");
    let waiting = "trap 'echo got it; exit 3' USR1; echo ready > up; while :; do sleep 0.05; done";
    let process = kernel.spawn(&script(waiting)).await.expect("accepted");
    eventually("it waits", || async { inside.sh("cat up || true").await == "ready" }).await;
    kernel.signal_process(process.execution.exec(), 10).await.expect("sent");
    let result = process.execution.result().await.expect("a result");
    assert_eq!((result.end.code, &result.stdout[..]), (3, &b"got it\n"[..]));
}

/// A later client reads the output from any of its bytes.
pub(crate) async fn attaches(kernel: &KernelClient) {
    let request = detached(script("printf 0123456789; sleep 0.3; printf abc"));
    let exec = kernel.spawn(&request).await.expect("accepted").execution.exec();
    for (offset, text) in [(0, "0123456789abc"), (4, "456789abc"), (12, "c")] {
        let mut read = Vec::new();
        let attached = kernel.execution(exec).await.expect("known");
        let output = attached.output(offset, async |event| {
            if let OutputEvent::Stdout(data) = event {
                read.extend_from_slice(&data);
            }
            Ok(())
        });
        output.await.expect("delivered");
        assert_eq!(String::from_utf8_lossy(&read), text, "from {offset}");
    }
}

#[test]
fn table_holds_for_processes() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            starts(&kernel).await;
            ends(&Inside { kernel: &kernel, engine: EngineName::Bash }, 15_000).await;
            attaches(&kernel).await;
        });
    });
}
