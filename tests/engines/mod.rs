//! The common contract of all engines through the public interface: one suite, with a dialect for
//! each.
//!
//! A missing interpreter is a failure here: `scripts/check` installs the requirements.

pub mod contract;
pub mod dialect;
mod unsaved_state;
pub(crate) mod venv;

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, OutputEvent};
use ryokan::core::fork::Forking;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::session::Session as _;

use self::dialect::Dialect;
use crate::pool::worker_of;
use crate::session_suite::Events;
use crate::support::{Host, eventually, kernel, out, spec, users};

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
    each("ends", async |_, _, k, d| contract::ends(k, d).await);
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
    each("interrupts", async |_, _, k, d| contract::interrupts(k, d).await);
}

#[test]
fn stdin_and_environment_scope() {
    each("inputs", async |_, _, k, d| contract::inputs(k, d).await);
}

#[test]
fn variables_round_trip() {
    each("values", async |_, _, k, d| contract::values(k, d).await);
}

#[test]
fn engine_state_survives_restarts() {
    each("state", async |host, client, k, d| {
        contract::state(k, d).await;
        let name = k.info().await.expect("info").spec.name.to_string();
        let worker = worker_of(host, &name);
        kill(Pid::from_raw(worker as i32), Signal::SIGKILL).expect("there");
        eventually("a new worker is up", || async { worker_of(host, &name) != worker }).await;
        contract::is_whole(k, d, "after its worker was killed").await;
        let name = format!("child-{}", d.engine);
        k.fork(&Forking::of(&name)).await.expect("forked");
        let child = client.open_kernel(&name).await.expect("there").0;
        contract::is_whole(&child, d, "in a fork").await;
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
    each("edits", async |_, _, k, d| contract::edits(k, d).await);
}
