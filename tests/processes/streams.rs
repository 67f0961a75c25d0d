//! Input and output, and the command line.

use std::io::Write as _;
use std::process::Stdio;

use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, OutputEvent};

use super::{Inside, bash, each_user, finish, program, says, script};
use crate::support::run;

#[test]
fn output_is_byte_exact() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let all: Vec<u8> = (0..=255).collect();
            let code = "import sys; b = bytes(range(256)); sys.stdout.buffer.write(b * 1000); sys.stderr.buffer.write(b[::-1] * 500)";
            let result = finish(&kernel, &program(&["python3", "-c", code])).await;
            let reversed: Vec<u8> = all.iter().rev().copied().collect();
            assert_eq!(result.end.code, 0, "{:?}", result.end);
            assert!(result.stdout == all.repeat(1000) && result.stderr == reversed.repeat(500), "the bytes differ");
        });
    });
}

#[test]
fn large_output_is_streamed() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let request = ExecRequest { output_limit_bytes: 1000, ..script("head -c 20000000 /dev/zero") };
            let process = kernel.spawn(&request).await.expect("accepted");
            let (mut bytes, mut code) = (0, None);
            let read = process.execution.output(0, async |event| {
                match event {
                    OutputEvent::Stdout(data) => bytes += data.len(),
                    OutputEvent::ExitCode(exit) => code = Some(exit),
                    other => panic!("{other:?}"),
                }
                Ok(())
            });
            read.await.expect("delivered");
            assert_eq!((bytes, code), (20_000_000, Some(0)));
            let result = process.execution.result().await.expect("a result");
            assert_eq!((result.stdout.len(), result.truncated_bytes), (1000, 19_999_000));
        });
    });
}

#[test]
fn stdin_reaches_its_end() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let request = ExecRequest { stdin_open: true, ..script("wc -c; cat") };
            let process = kernel.spawn(&request).await.expect("accepted");
            process.execution.stdin(&vec![7; 3_000_000]).await.expect("taken");
            process.execution.close_stdin().await.expect("closed");
            let result = process.execution.result().await.expect("a result");
            assert_eq!(String::from_utf8_lossy(&result.stdout), "3000000\n");
            assert_eq!(says(&kernel, "wc -c").await, "0", "without input it is empty");
        });
    });
}

/// A reader that takes nothing holds its process, and nothing else.
pub(crate) async fn slow_reader(inside: &Inside<'_>) {
    let kernel = inside.kernel;
    let request = ExecRequest { output_limit_bytes: 1, ..script("yes") };
    let process = kernel.spawn(&request).await.expect("accepted");
    // The reader takes one piece and then nothing.
    let reading = process.execution.output(0, async |_| {
        std::future::pending::<()>().await;
        Ok(())
    });
    let others = async {
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        assert_eq!(says(kernel, "echo fine").await, "fine");
        assert_eq!(inside.sh("seq 200000 | wc -l").await, "200000");
        kernel.files().await.expect("its files").write(b"beside", b"x").await.expect("written");
        kernel.interrupt_execution(process.execution.exec()).await.expect("ended");
        process.execution.result().await.expect("a result")
    };
    tokio::select! {
        _ = reading => panic!("the reader never returns"),
        result = others => assert_eq!(result.end.code, 137, "{:?}", result.end),
    }
}

#[test]
fn slow_reader_blocks_only_its_process() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            slow_reader(&Inside { kernel: &kernel, engine: EngineName::Bash }).await;
        });
    });
}

#[test]
fn cwd_and_environment_are_set() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            run(&kernel, "mkdir -p sub && echo 'echo \"$A $B in $PWD as $RYOKAN_KERNEL, home $HOME\"' > sub/tool && chmod +x sub/tool").await;
            let mut request = script("tool 'a b'");
            if let ryokan::core::exec::Work::Process(program) = &mut request.what {
                program.cwd = "/workspace/sub".into();
            }
            request.env = vec![("A".into(), "one".into()), ("B".into(), "=two".into()), ("C".into(), "nine-lives".into()), ("PATH".into(), ".:/usr/bin:/bin".into())];
            let result = finish(&kernel, &request).await;
            assert_eq!(
                String::from_utf8_lossy(&result.stdout),
                "one =two in /workspace/sub as k, home /workspace\n",
                "{result:?}"
            );
        });
        let journal = host.ok(&["journal", "k", "--json"]);
        assert!(journal.contains("\"process\"") && journal.contains("tool"), "{journal}");
        let found =
            std::process::Command::new("grep").args(["-rc", "nine-lives"]).arg(host.data().join("kernels")).output();
        let found = String::from_utf8(found.expect("grep runs").stdout).expect("text");
        assert!(found.lines().all(|line| line.ends_with(":0")), "a variable's value was kept: {found}");
    });
}

#[test]
fn command_line_passes_everything_through() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        let spawn = |args: &[&str]| host.cli(&[&["spawn", "k"], args].concat());
        let output = spawn(&["--cwd", "/tmp", "--env", "A=b", "--", "sh", "-c", "echo $A $PWD; echo err >&2; exit 42"]);
        assert_eq!(output.status.code(), Some(42));
        assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"b /tmp\n"[..], &b"err\n"[..]));
        assert_eq!(spawn(&["sh", "-c", "kill -TERM $$"]).status.code(), Some(143));
        assert_eq!(spawn(&["--timeout", "200ms", "sleep", "60"]).status.code(), Some(124));
        assert_eq!(spawn(&["no-such-program"]).status.code(), Some(127));
        assert_eq!(spawn(&["/etc/hostname"]).status.code(), Some(126));
        let mut command = host.command("ryokan");
        command.args(["--no-autostart", "spawn", "k", "--stdin", "--", "sort", "-r"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        child.stdin.take().expect("piped").write_all(b"a\nc\nb\n").expect("written");
        assert_eq!(child.wait_with_output().expect("ended").stdout, b"c\nb\na\n");
    });
}

#[test]
fn attached_output_begins_at_offset() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        let exec = host.ok(&["spawn", "k", "-d", "--", "sh", "-c", "printf 0123456789; sleep 0.2; printf abc"]);
        assert_eq!(host.ok(&["exec", "k", "--attach", exec.trim(), "--offset", "4"]), "456789abc");
        assert_eq!(host.ok(&["exec", "k", "--attach", exec.trim(), "--offset", "12"]), "c");
        assert_eq!(host.ok(&["exec", "k", "--attach", exec.trim()]), "0123456789abc");
    });
}
