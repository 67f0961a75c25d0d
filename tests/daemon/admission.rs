//! Admission limits as clients see them: of one kernel, and of each user of a system-wide daemon.

use std::process::{Child, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus};

use super::system_wide::SystemWide;
use crate::support::{Host, UNPRIVILEGED, User, eventually, kernel, out, until};

const ONE: u32 = UNPRIVILEGED;
const OTHER: u32 = UNPRIVILEGED + 1;
/// Exit status of the command line after a refusal.
const REFUSED: Option<i32> = Some(4);

#[test]
fn full_queue_rejects_executions() {
    const QUEUE: usize = 3;
    for engine in [EngineName::Kaish, EngineName::Python] {
        let mut host = Host::prepare(User::Own);
        host.configure(&format!("[limits]\nexecutions_queued = {QUEUE}\n"));
        host.launch();
        host.with(async |client| {
            let k = kernel(&client, "k", engine).await;
            let code = |n: usize| match engine {
                EngineName::Python => format!("print({n}, file=open('order', 'a')); print('ran', {n})"),
                EngineName::Kaish | EngineName::Bash | EngineName::Node => {
                    format!("echo {n} >> order; echo ran {n}")
                }
            };
            let waits = "while ! test -e go; do sleep 0.05; done";
            let gate = match engine {
                EngineName::Python => format!("import subprocess; subprocess.run(['/bin/sh', '-c', {waits:?}]); "),
                EngineName::Kaish | EngineName::Bash | EngineName::Node => format!("/bin/sh -c '{waits}'; "),
            };
            let mut asked = vec![k.run(&ExecRequest::code(gate + &code(0))).await.expect("accepted")];
            eventually("it runs", async || k.info().await.expect("info").state == "busy").await;
            for n in 1..=QUEUE {
                asked.push(k.run(&ExecRequest::code(code(n))).await.expect("accepted"));
            }
            // None of these ends before the first, so a request that waited for room would never
            // return.
            for n in [98, 99] {
                let more = ExecRequest::code(code(n));
                let asking = tokio::time::timeout(Duration::from_secs(120), k.run(&more)).await;
                let refused = asking.expect("refused at once").err().expect("the queue is full");
                assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
                assert!(refused.message.contains(&format!("has {QUEUE} pieces of work waiting")), "{refused}");
                assert!(refused.hint.contains("wait for some of them to end"), "{refused}");
            }
            assert_eq!(k.info().await.expect("info").executions, 1 + QUEUE as u64, "a refused execution has no number");
            let folder = host.data().join("kernels").join(k.info().await.expect("info").id.to_string());
            std::fs::write(folder.join("workspace/go"), "").expect("written");
            for (n, asked) in asked.into_iter().enumerate() {
                let ended = asked.result().await.expect("a result");
                assert_eq!(ended.end.status, ExecStatus::Done, "{engine} {n}: {:?}", ended.end);
                assert_eq!(String::from_utf8_lossy(&ended.stdout), format!("ran {n}\n"), "{engine}");
            }
            // There is room again, and the refused executions never ran.
            let read = match engine {
                EngineName::Python => "print(open('order').read().split())",
                EngineName::Kaish | EngineName::Bash | EngineName::Node => "cat order",
            };
            let order: String = out(&k, read).await.chars().filter(char::is_ascii_digit).collect();
            assert_eq!(order, "0123", "{engine}");
        });
    }
}

/// A system-wide daemon with these limits; `None`, with a notice, unless run as root.
fn system(limits: &str) -> Option<SystemWide> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("ignored, because only root starts a system-wide daemon");
        return None;
    }
    Some(SystemWide::start(&format!("[limits]\n{limits}\n[pool]\npool_size = 0\nmin_idle = 0\n")))
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[track_caller]
fn ok(system: &SystemWide, uid: u32, args: &[&str]) -> String {
    let output = system.cli(uid, args);
    assert!(output.status.success(), "{uid} {args:?}: {}\n{}", said(&output), system.log());
    String::from_utf8(output.stdout).expect("text")
}

/// Expects a refusal whose message contains these words.
#[track_caller]
fn refused(system: &SystemWide, uid: u32, args: &[&str], words: &[&str]) {
    let output = system.cli(uid, args);
    let said = said(&output);
    // These exit with the status of the code, and report their own failures with one code.
    let code = if ["exec", "run"].contains(&args[0]) { Some(125) } else { REFUSED };
    assert_eq!(output.status.code(), code, "{uid} {args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{uid} {args:?}: {said}");
}

fn spawn(system: &SystemWide, uid: u32, args: &[&str]) -> Child {
    let mut command = system.cli_command(uid, args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs")
}

/// A field of a kernel as its owner sees it.
fn shown(system: &SystemWide, uid: u32, kernel: &str, field: &str) -> serde_json::Value {
    let text = ok(system, uid, &["show", kernel, "--json"]);
    serde_json::from_str::<serde_json::Value>(&text).expect("JSON")[field].clone()
}

#[test]
fn per_user_kernel_quota() {
    let Some(system) = system("kernels_per_user = 2") else { return };
    for name in ["a", "b"] {
        ok(&system, ONE, &["new", name]);
    }
    refused(&system, ONE, &["new", "c"], &["2 kernels already", "hint: remove some"]);
    refused(&system, ONE, &["fork", "a", "c"], &["2 kernels already"]);
    refused(&system, ONE, &["run", "echo never"], &["2 kernels already"]);
    // The limit is the user's own, and the existing kernels still work.
    assert_eq!(ok(&system, ONE, &["exec", "a", "echo well"]), "well\n");
    for name in ["a", "b"] {
        ok(&system, OTHER, &["new", name]);
    }
    refused(&system, OTHER, &["new", "c"], &["2 kernels already"]);
    ok(&system, ONE, &["rm", "--yes", "b"]);
    ok(&system, ONE, &["new", "c"]);
    refused(&system, ONE, &["new", "d"], &["2 kernels already"]);
    refused(&system, OTHER, &["new", "d"], &["2 kernels already"]);
}

#[test]
fn per_user_memory_quota() {
    let Some(system) = system("memory_per_user = \"700M\"") else { return };
    for uid in [ONE, OTHER] {
        for (name, memory) in [("a", "300M"), ("b", "300M"), ("c", "300M"), ("small", "100M"), ("large", "800M")] {
            ok(&system, uid, &["new", name, "--memory", memory]);
        }
    }
    for uid in [ONE, OTHER] {
        // Memory is reserved for the kernel's worker, not for the kernel.
        for name in ["a", "b"] {
            assert_eq!(ok(&system, uid, &["exec", name, "x=41; echo well"]), "well\n");
        }
        let words = ["promised 600 MiB", "wants 300 MiB", "memory_per_user", "hint: stop one of your kernels"];
        refused(&system, uid, &["exec", "c", "echo never"], &words);
        assert_eq!(ok(&system, uid, &["exec", "small", "echo well"]), "well\n");
        // A kernel with a worker needs no other.
        assert_eq!(ok(&system, uid, &["exec", "a", "echo $x"]), "41\n");
        let words = ["more than 700 MiB", "limits.memory_per_user"];
        refused(&system, uid, &["exec", "large", "echo never"], &words);
    }
    ok(&system, ONE, &["stop", "b"]);
    assert_eq!(ok(&system, ONE, &["exec", "c", "echo well"]), "well\n");
    refused(&system, OTHER, &["exec", "c", "echo never"], &["promised 700 MiB"]);
    refused(&system, ONE, &["exec", "b", "echo never"], &["promised 700 MiB"]);
}

#[test]
fn per_user_worker_quota() {
    let Some(system) = system("workers_per_user = 1") else { return };
    for uid in [ONE, OTHER] {
        for name in ["a", "b"] {
            ok(&system, uid, &["new", name]);
        }
        assert_eq!(ok(&system, uid, &["exec", "a", "x=41; echo well"]), "well\n");
        refused(&system, uid, &["exec", "b", "echo never"], &["you have 1 workers already", "workers_per_user"]);
    }
    ok(&system, ONE, &["stop", "a"]);
    assert_eq!(ok(&system, ONE, &["exec", "b", "echo well"]), "well\n");
    refused(&system, ONE, &["exec", "a", "echo never"], &["workers_per_user"]);
    ok(&system, ONE, &["stop", "b"]);
    assert_eq!(ok(&system, ONE, &["exec", "a", "echo $x"]), "41\n");
}

#[test]
fn per_user_execution_quota() {
    let Some(system) = system("executions_in_flight_per_user = 1") else { return };
    for (uid, name) in [(ONE, "a"), (ONE, "b"), (OTHER, "c")] {
        ok(&system, uid, &["new", name]);
        ok(&system, uid, &["exec", name, "x=1"]);
    }
    let first = spawn(&system, ONE, &["exec", "a", "sleep 300"]);
    until("the first runs", || shown(&system, ONE, "a", "state") == "busy");
    let mut second = spawn(&system, ONE, &["exec", "b", "echo ran > f; echo second"]);
    until("the second is accepted", || shown(&system, ONE, "b", "executions") == 2);
    // The other user's execution is later and takes longer: an execution beside the first would
    // have ended.
    assert_eq!(ok(&system, OTHER, &["exec", "c", "sleep 1; echo other"]), "other\n");
    assert_eq!(second.try_wait().expect("asked"), None, "the second runs beside the first");
    assert!(ok(&system, ONE, &["journal", "b"]).contains("#2"));
    kill(Pid::from_raw(first.id() as i32), Signal::SIGINT).expect("there");
    assert_eq!(first.wait_with_output().expect("ended").status.code(), Some(130));
    let second = second.wait_with_output().expect("ended");
    assert_eq!((second.status.code(), said(&second).as_str()), (Some(0), "second\n"));
}
