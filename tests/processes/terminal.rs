//! Processes on a terminal: a shell as on this host, and a terminal that is as before after every end.

use nix::sys::signal::{Signal, kill};
use nix::sys::termios::LocalFlags;
use nix::unistd::Pid;
use ryokan::core::exec::{ExecRequest, Program, TerminalSize, Work};
use ryokan::rpc::client::KernelClient;

use super::{bash, each_user, finish, script};
use crate::support::{Host, Terminal, until};

fn on_terminal(text: &str) -> ExecRequest {
    let Work::Process(program) = script(text).what else { panic!("a process") };
    let terminal = Some(TerminalSize { rows: 11, columns: 22 });
    ExecRequest { what: Work::Process(Program { terminal, ..program }), stdin_open: true, ..ExecRequest::default() }
}

fn is_usual(terminal: &Terminal) -> bool {
    terminal.settings().local_flags.contains(LocalFlags::ECHO | LocalFlags::ICANON | LocalFlags::ISIG)
}

/// Keys, jobs and the size of a shell's terminal. The shell ends with a job in the background.
pub(crate) fn job_control(host: &Host, kernel: &str, job: &str) {
    let mut shell = Terminal::start(host, &["shell", kernel]);
    shell.enter("$ ", "stty size; tty; echo $TERM");
    shell.wait_for("50 200");
    shell.wait_for("/dev/pts/0");
    shell.wait_for("xterm");
    assert!(!is_usual(&shell), "keys pass through");
    shell.enter("$ ", "sh -c 'echo u\"\"p; exec sleep 1234'");
    shell.wait_for("up\r");
    shell.press("\x1a");
    shell.wait_for("Stopped");
    shell.enter("$ ", "bg; jobs");
    shell.wait_for("Running");
    shell.enter("$ ", "fg");
    shell.wait_for("sleep 1234");
    // The shell names the job before it gives it the terminal.
    shell.press_until("\x03", "$ ");
    shell.enter("$ ", "echo code=$?");
    shell.wait_for("code=130");
    shell.resize(33, 44);
    let arrives = r#"until [ "$(stty size < /dev/tty | tr ' ' x)" = 33x44 ]; do sleep 0.1; done"#;
    shell.enter("$ ", &format!("{arrives}; stty size < /dev/tty"));
    shell.wait_for("33 44");
    shell.enter("$ ", &format!("{job} &"));
    shell.enter("$ ", "exit 7");
    shell.ended_with(7);
    assert!(is_usual(&shell));
}

/// A terminal that closes ends its program only. A detached program goes on, and is attached by its number.
pub(crate) fn closes(host: &Host, kernel: &str) {
    let text = "printf 0123456789; until [ -e go ]; do sleep 0.1; done; printf abc";
    let exec = host.ok(&["spawn", kernel, "-d", "--", "sh", "-c", text]);
    let mut terminal =
        Terminal::start(host, &["spawn", kernel, "-t", "--", "sh", "-c", "echo up; while :; do sleep 0.1; done"]);
    terminal.wait_for("up");
    assert!(host.ok(&["ps", kernel]).contains("echo up"));
    terminal.close();
    terminal.ended_with(129);
    until("the program ends", || !host.ok(&["ps", kernel]).contains("echo up"));
    assert!(host.ok(&["ps", kernel]).contains("printf 0123456789"));
    host.ok(&["spawn", kernel, "--", "touch", "go"]);
    assert_eq!(host.ok(&["exec", kernel, "--attach", exec.trim(), "--offset", "4"]), "456789abc");
}

#[test]
fn closed_terminal_ends_its_program() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        closes(&host, "k");
    });
}

#[test]
fn shell_on_terminal_has_job_control() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        // Its jobs stay in the kernel, as after the end of a shell on the host.
        job_control(&host, "k", "sleep 2345");
        until("it is its program", || super::count("sleep 2345") == 1);
        host.ok(&["stop", "k"]);
        until("nothing is left", || super::count("sleep 2345") == 0);
    });
}

#[test]
fn full_screen_programs_work() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        let mut top = Terminal::start(&host, &["spawn", "k", "-t", "--", "top", "-d", "0.3"]);
        top.wait_for_raw("load average");
        top.press("q");
        top.ended_with(0);
        let mut vi = Terminal::start(&host, &["spawn", "k", "-t", "--", "vi", "-u", "NONE", "-i", "NONE", "note"]);
        vi.wait_for_raw("note");
        vi.press("ihello\x1b:wq\r");
        vi.ended_with(0);
        assert!(is_usual(&vi));
        assert_eq!(host.ok(&["cp", "k:note", "-"]), "hello\n");
    });
}

#[test]
fn terminal_is_restored_after_every_end() {
    each_user(|mut host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        let start = |host: &_| {
            let mut terminal =
                Terminal::start(host, &["spawn", "k", "-t", "--", "sh", "-c", "printf '\\033[?1049hup'; sleep 3456"]);
            terminal.wait_for_raw("\u{1b}[?1049hup");
            assert!(!is_usual(&terminal));
            terminal
        };
        let check = |mut terminal: Terminal, code: i32| {
            terminal.wait_for_raw("\u{1b}[?1049l");
            terminal.ended_with(code);
            assert!(is_usual(&terminal));
            until("the program ends", || super::count("sleep 3456") == 0);
        };
        let terminal = start(&host);
        let pid = Pid::from_raw(i32::try_from(terminal.pid()).expect("a process id"));
        kill(pid, Signal::SIGTERM).expect("sent");
        check(terminal, 143);
        let mut terminal = start(&host);
        terminal.press("\x03");
        check(terminal, 130);
        let terminal = start(&host);
        host.kill();
        check(terminal, 125);
        host.launch();
    });
}

/// Every byte arrives before the end.
pub(crate) async fn output(kernel: &KernelClient) {
    let result = finish(kernel, &on_terminal("stty size; seq 1 20000; exit 3")).await;
    assert_eq!(result.end.code, 3, "{:?}", result.end);
    let lines: Vec<String> = (1..=20000).map(|number| number.to_string()).collect();
    let whole = format!("11 22\r\n{}\r\n", lines.join("\r\n"));
    assert!(String::from_utf8_lossy(&result.stdout) == whole && result.stderr.is_empty());
}

#[test]
fn terminal_output_is_complete() {
    each_user(|host| host.with(async |client| output(&bash(&client, "k").await).await));
}

#[test]
fn terminal_takes_input_and_size() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let text = "trap 'stty size; exit 5' WINCH; stty -echo; echo ready; read a; echo got=$a; while :; do sleep 0.05; done";
            let process = kernel.spawn(&on_terminal(text)).await.expect("accepted");
            process.execution.stdin(b"typed\r").await.expect("taken");
            let exec = process.execution.exec();
            let mut size = 6;
            let result = process.execution.result();
            let again = async {
                loop {
                    size += 1;
                    let _ = kernel.resize_terminal(exec, TerminalSize { rows: 5, columns: size }).await;
                    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                }
            };
            let result = tokio::select! {
                result = result => result.expect("a result"),
                () = again => unreachable!("it goes on"),
            };
            let shown = String::from_utf8_lossy(&result.stdout).into_owned();
            assert!(shown.contains("got=typed") && shown.contains("\n5 "), "{shown:?}");
            assert_eq!(result.end.code, 5);
            let gone = kernel.resize_terminal(exec, TerminalSize { rows: 5, columns: 6 }).await;
            assert!(gone.is_err());
        });
    });
}

/// Calls that would type for another program, or change the console.
pub(crate) async fn tricks(kernel: &KernelClient) {
    let text = r#"python3 -c "
import fcntl, os, termios
for fd in (0, os.open('/dev/tty', os.O_RDWR)):
    for trick in (termios.TIOCSTI, termios.TIOCSETD, termios.TIOCCONS):
        try: fcntl.ioctl(fd, trick, b'x' * 8); print('done', trick)
        except PermissionError: print('refused')
        except OSError as error: print(error)
print(os.ttyname(0), os.listdir('/dev/pts'))""#;
    let result = finish(kernel, &on_terminal(text)).await;
    let shown = String::from_utf8_lossy(&result.stdout).into_owned();
    assert_eq!(shown.matches("refused").count(), 6, "{shown}");
    assert!(shown.contains("/dev/pts/0"), "{shown}");
}

#[test]
fn terminal_tricks_are_refused() {
    each_user(|host| host.with(async |client| tricks(&bash(&client, "k").await).await));
}
