//! What every engine does, wherever its kernel runs.

use std::time::{Duration, Instant};

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::core::info::CodeStatus;
use ryokan::core::value::Value;
use ryokan::rpc::client::KernelClient;
use ryokan::session::Session as _;

use super::dialect::Dialect;
use crate::support::{eventually, out, run};

/// How executions end.
pub async fn ends(k: &KernelClient, d: &Dialect) {
    assert_eq!(out(k, d.hi).await, "hi", "{}", d.engine);
    let failed = run(k, d.fails).await;
    assert_eq!((failed.end.status, failed.end.code), (ExecStatus::Failed, d.fails_with), "{}: {failed:?}", d.engine);
    let refused = run(k, d.wrong).await;
    assert_eq!(refused.end.status, ExecStatus::Refused, "{}: {refused:?}", d.engine);
    assert!(!refused.end.err.is_empty() && refused.stdout.is_empty(), "{}: {refused:?}", d.engine);
    run(k, d.set).await;
    let left = run(k, d.leaves).await;
    assert_eq!((left.end.status, left.end.code), (ExecStatus::Failed, 3), "{}: {left:?}", d.engine);
    assert_eq!(out(k, d.show).await, "41", "{}: the code left, the session did not", d.engine);
}

/// An interrupt and a deadline.
pub async fn interrupts(k: &KernelClient, d: &Dialect) {
    run(k, d.set).await;
    for code in [d.sleeps, d.loops] {
        let execution = k.run(&ExecRequest::code(code)).await.expect("accepted");
        eventually("it runs", || async { k.info().await.expect("info").state == "busy" }).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let begun = Instant::now();
        execution.cancel().await.expect("cancelled");
        let result = execution.result().await.expect("ends");
        let ended = (result.end.status, result.end.code);
        assert_eq!(ended, (ExecStatus::Interrupted, 130), "{} {code}: {result:?}", d.engine);
        // Before the code that sleeps would end.
        assert!(begun.elapsed() < Duration::from_secs(25), "{} {code}: {:?}", d.engine, begun.elapsed());
        assert_eq!(out(k, d.show).await, "41", "{} {code}", d.engine);
    }
    let request = ExecRequest { timeout_ms: 400, ..ExecRequest::code(d.sleeps) };
    let timed = k.run_to_end(&request).await.expect("ends");
    assert_eq!((timed.end.status, timed.end.code), (ExecStatus::Timeout, 124), "{}", d.engine);
    assert_eq!(out(k, d.show).await, "41", "{}", d.engine);
}

/// Standard input and environment of one execution.
pub async fn inputs(k: &KernelClient, d: &Dialect) {
    let given = ExecRequest { stdin: b"one\ntwo\n".to_vec(), ..ExecRequest::code(d.reads) };
    let read = k.run_to_end(&given).await.expect("runs");
    assert_eq!(String::from_utf8_lossy(&read.stdout).trim_end(), "one\ntwo", "{}: {read:?}", d.engine);
    let none = tokio::time::timeout(Duration::from_secs(180), run(k, d.reads)).await;
    let none = none.unwrap_or_else(|_| panic!("{}: a read without input waits", d.engine));
    assert_eq!(String::from_utf8_lossy(&none.stdout).trim_end(), d.reads_nothing, "{}: {none:?}", d.engine);
    let env = vec![("ONCE".into(), "it is $HOME".into())];
    let shown = k.run_to_end(&ExecRequest { env, ..ExecRequest::code(d.env) }).await.expect("runs");
    assert_eq!(String::from_utf8_lossy(&shown.stdout).trim_end(), "it is $HOME", "{}: {shown:?}", d.engine);
    assert_eq!(out(k, d.env).await, d.env_absent, "{}", d.engine);
}

/// Variables, from outside.
pub async fn values(k: &KernelClient, d: &Dialect) {
    run(k, d.set).await;
    let x = k.get_var("x").await.expect("there");
    assert!([Value::Int(41), Value::String("41".into()), Value::Float(41.0)].contains(&x), "{}: {x:?}", d.engine);
    let text = Value::String("é \"quoted\" $x\n".into());
    k.set_var("text", text.clone()).await.expect("set");
    assert_eq!(k.get_var("text").await, Ok(text), "{}", d.engine);
    let absent = k.get_var("never_set").await.map_err(|error| error.code);
    assert_eq!(absent, Err(ErrorCode::NotFound), "{}", d.engine);
    let vars = k.list_vars().await.expect("listed");
    let x = vars.iter().find(|var| var.name == "x").unwrap_or_else(|| panic!("{}: {vars:?}", d.engine));
    assert!(x.summary.contains("41"), "{}: {x:?}", d.engine);
    assert!(vars.iter().all(|var| !var.name.contains("ryokan")), "{}: {vars:?}", d.engine);
}

/// Checks and completes code.
pub async fn edits(k: &KernelClient, d: &Dialect) {
    run(k, d.set).await;
    run(k, d.long_name).await;
    for (code, status) in
        [(d.hi, CodeStatus::Complete), (d.begun, CodeStatus::Incomplete), (d.wrong, CodeStatus::Invalid)]
    {
        let checked = k.check(code).await.expect("judged");
        assert_eq!(checked.status, status, "{}: {code}", d.engine);
    }
    let found = k.complete(d.completes, d.completes.len()).await.expect("completed");
    assert!(found.matches.iter().any(|text| text.contains("remarkable")), "{}: {found:?}", d.engine);
}

/// The state that [`state`] makes.
pub async fn is_whole(k: &KernelClient, d: &Dialect, when: &str) {
    assert_eq!(out(k, d.show).await, "41", "{} {when}", d.engine);
    assert_eq!(out(k, d.calls).await, "called you", "{} {when}", d.engine);
    assert_eq!(out(k, d.where_).await, "/workspace/sub", "{} {when}", d.engine);
}

/// State that survives a stop and a restore.
pub async fn state(k: &KernelClient, d: &Dialect) {
    run(k, d.set).await;
    run(k, d.function).await;
    run(k, d.goes).await;
    is_whole(k, d, "as it was set").await;
    k.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, "here")).await.expect("taken");
    k.stop(false).await.expect("stopped");
    is_whole(k, d, "after a stop").await;
    run(k, d.spoils).await;
    assert_ne!(out(k, d.show).await, "41", "{}", d.engine);
    k.restore_checkpoint("here", 0).await.expect("restored");
    is_whole(k, d, "after a restore").await;
}
