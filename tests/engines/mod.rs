//! The common contract of all engines through the public interface: one suite, with a dialect for
//! each.
//!
//! A missing interpreter is a failure here: `scripts/check` installs the requirements.

mod dialect;
mod unsaved_state;

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus, OutputEvent};
use ryokan::core::fork::Forking;
use ryokan::core::info::CodeStatus;
use ryokan::core::value::Value;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::session::Session as _;

use self::dialect::Dialect;
use crate::pool::worker_of;
use crate::session_suite::Events;
use crate::support::{Host, eventually, kernel, out, run, spec, users};

/// Each engine, as each kind of user, with its own kernel.
fn each(name: &str, test: impl AsyncFn(&Host, &HostClient, &KernelClient, &Dialect)) {
    for user in users() {
        let host = Host::start_as(user);
        for engine in EngineName::ALL {
            host.with(async |client| {
                let name = format!("{name}-{engine}");
                let k = kernel(&client, &name, engine).await;
                test(&host, &client, &k, &Dialect::of(engine)).await;
                client.remove_kernel(&name, 0).await.expect("removed");
            });
        }
    }
}

#[test]
fn execution_status_matches_code() {
    each("ends", async |_, _, k, d| {
        assert_eq!(out(k, d.hi).await, "hi", "{}", d.engine);
        let failed = run(k, d.fails).await;
        assert_eq!(
            (failed.end.status, failed.end.code),
            (ExecStatus::Failed, d.fails_with),
            "{}: {failed:?}",
            d.engine
        );
        let refused = run(k, d.wrong).await;
        assert_eq!(refused.end.status, ExecStatus::Refused, "{}: {refused:?}", d.engine);
        assert!(!refused.end.err.is_empty() && refused.stdout.is_empty(), "{}: {refused:?}", d.engine);
        run(k, d.set).await;
        let left = run(k, d.leaves).await;
        assert_eq!((left.end.status, left.end.code), (ExecStatus::Failed, 3), "{}: {left:?}", d.engine);
        assert_eq!(out(k, d.show).await, "41", "{}: the code left, the session did not", d.engine);
    });
}

#[test]
fn output_streams_during_execution() {
    each("streams", async |host, _, k, d| {
        let events = Events::releasing(host.workspace(k.info().await.expect("info").id).join("go"));
        let running = k.execute_streaming(ExecRequest::code(d.slowly), &events);
        let result = tokio::time::timeout(Duration::from_secs(180), running).await;
        let result = result.unwrap_or_else(|_| panic!("{}: the first line waits", d.engine)).expect("runs");
        assert_eq!(String::from_utf8_lossy(&result.stdout), "1\n2\n3\n", "{}: {result:?}", d.engine);
        let seen = events.seen.borrow().iter().filter(|event| matches!(event, OutputEvent::Stdout(_))).count();
        assert!(seen >= 2, "{}: in pieces", d.engine);
    });
}

#[test]
fn interrupt_keeps_session_usable() {
    each("interrupts", async |_, _, k, d| {
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
    });
}

#[test]
fn stdin_and_environment_scope() {
    each("inputs", async |_, _, k, d| {
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
    });
}

#[test]
fn variables_round_trip() {
    each("values", async |_, _, k, d| {
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
    });
}

#[test]
fn engine_state_survives_restarts() {
    each("state", async |host, client, k, d| {
        run(k, d.set).await;
        run(k, d.function).await;
        run(k, d.goes).await;
        let is_whole = async |k: &KernelClient, when: &str| {
            assert_eq!(out(k, d.show).await, "41", "{} {when}", d.engine);
            assert_eq!(out(k, d.calls).await, "called you", "{} {when}", d.engine);
            assert_eq!(out(k, d.where_).await, "/workspace/sub", "{} {when}", d.engine);
        };
        is_whole(k, "as it was set").await;
        k.stop(false).await.expect("stopped");
        is_whole(k, "after a stop").await;
        let name = k.info().await.expect("info").spec.name.to_string();
        let worker = worker_of(host, &name);
        kill(Pid::from_raw(worker as i32), Signal::SIGKILL).expect("there");
        eventually("a new worker is up", || async { worker_of(host, &name) != worker }).await;
        is_whole(k, "after its worker was killed").await;
        k.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, "here")).await.expect("taken");
        run(k, d.spoils).await;
        assert_ne!(out(k, d.show).await, "41", "{}", d.engine);
        k.restore_checkpoint("here", 0).await.expect("restored");
        is_whole(k, "after a restore").await;
        let name = format!("child-{}", d.engine);
        k.fork(&Forking::of(&name)).await.expect("forked");
        let child = client.open_kernel(&name).await.expect("there").0;
        is_whole(&child, "in a fork").await;
        client.remove_kernel(&name, 0).await.expect("removed");
    });
}

/// Node's default limit follows the memory of the host.
#[test]
fn node_heap_fits_memory_limit() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = kernel(&client, "heap", EngineName::Node).await;
            let limit = out(&k, "console.log(require('v8').getHeapStatistics().heap_size_limit)").await;
            let memory = client.open_kernel("heap").await.expect("there").0.info().await.expect("info").spec.limits;
            let limit: u64 = limit.trim().parse().expect("a number");
            assert!((memory.memory_bytes / 2..memory.memory_bytes).contains(&limit), "{limit}");
        });
    }
}

/// The other engines continue; the missing one is reported when requested, with a hint.
#[test]
fn missing_interpreter_reported() {
    for engine in [EngineName::Python, EngineName::Bash, EngineName::Node] {
        let mut host = Host::prepare(crate::support::User::Own);
        host.configure(&format!("[engines.{engine}]\ncommand = \"/usr/bin/no-such-{engine}\"\n"));
        host.launch();
        host.with(async |client| {
            let made = client.create_kernel(&spec("lacks", engine), "").await;
            let refused = match made {
                Err(refused) => refused,
                Ok((k, _)) => k.run(&ExecRequest::code("1")).await.err().unwrap_or_else(|| panic!("{engine} ran")),
            };
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Unsupported, engine.name()), "{refused}");
            assert!(refused.hint.contains("install") && refused.hint.contains("command"), "{refused}");
            let k = kernel(&client, "other", EngineName::Kaish).await;
            assert_eq!(out(&k, "echo well").await, "well");
        });
    }
}

/// A kernel with the interpreter's folder mounted runs it; no other kernel sees it.
#[test]
fn custom_interpreter_visibility() {
    for user in crate::support::users() {
        let mut host = Host::prepare(user);
        let folder = host.given(user);
        let own = folder.join("own-bash");
        // By `cp`: a fork of another test could hold a copy of our own open for writing ("text file busy").
        let copied = std::process::Command::new("cp").arg("/bin/bash").arg(&own).status().expect("cp runs");
        assert!(copied.success());
        host.configure(&format!("[engines.bash]\ncommand = {own:?}\n"));
        host.launch();
        host.with(async |client| {
            let refused = client.create_kernel(&spec("hidden", EngineName::Bash), "").await.err().expect("refused");
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Unsupported, "bash"), "{refused}");
            assert!(refused.message.contains("cannot see") && refused.hint.contains("system_paths"), "{refused}");
            let mut sees = spec("sees", EngineName::Bash);
            sees.paths.push(ryokan::core::spec::AllowedPath::new(&folder, false));
            let (k, _) = client.create_kernel(&sees, "").await.expect("made");
            assert_eq!(out(&k, "basename $(readlink /proc/$$/exe)").await, "own-bash");
        });
    }
}

#[test]
fn code_check_and_completion() {
    each("edits", async |_, _, k, d| {
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
    });
}
