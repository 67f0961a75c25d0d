//! The bash process and its channels.
//!
//! ```text
//!            script  ──▶ fd 0 between executions: the lines that bash runs, one for each step
//!            payload ──▶ 250, a file in memory: what a step needs, read by `source`
//!            stdin   ──▶ 252: an execution's standard input
//!  Shell     report  ◀── 251: bash's state after it
//!            calls   ◀── 254, answers ──▶ 245, tokens ◀▶ 244: tools that code calls
//!            246 renew, 247 end, 248 leave: the machinery's texts; 249: nothing; 253: the script again; 242, 243: 1 and 2 again
//! ```
//!
//! All are close-on-exec, so no program sees them. bash makes a copy of a close-on-exec descriptor
//! close-on-exec, and always a descriptor saved during a redirection. `boot.bash` relies on that.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, Stdio};

use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::quote::quoted;
use super::snapshot;
use super::unnamed::unnamed;
use crate::sys::{pidfd, process, random};

/// How bash is started.
#[derive(Debug, Clone)]
pub struct Program {
    /// Its path and first arguments.
    pub argv: Vec<String>,
    /// Its working directory.
    pub cwd: std::path::PathBuf,
}

/// A running bash.
pub struct Shell {
    child: Child,
    pidfd: OwnedFd,
    script: File,
    payload: File,
    report: File,
    bell: File,
    /// Received bytes before a whole report.
    pub received: Vec<u8>,
    read_to: u64,
    stdin: File,
    calls: File,
    answers: File,
    asked: (File, File),
    tokens: File,
    renewing: File,
    renew: String,
    mark: String,
    exit: Option<i32>,
}

/// Time between a shell's report and its closing of the report descriptor.
const SETTLING: Duration = Duration::from_millis(100);
/// Size limit of a report, bytes.
const REPORT_BYTES: u64 = 256 << 20;
const READ_BYTES: usize = 64 << 10;

const LEAVE: &str = include_str!("leave.bash");
const END: &str = include_str!("end.bash");
const RENEW: &str = include_str!("renew.bash");
const DUMP: &str = include_str!("dump.bash");
/// A shell that exits with success but not by `exit` was ended by a signal: it re-raises that, so
/// its status shows it.
const GUARD: &str = "case $__ryokan_s:$BASH_COMMAND in 0:*exit*) ;; 0:*) \\builtin return ;; esac";
const TOGETHER: &str = "\\builtin declare -f; \\builtin printf '\\0'";
const EACH: &str = "while \\builtin read -r __ryokan_name; do \\builtin printf '%s\\0' \"$__ryokan_name\"; \
                    \\builtin declare -f -- \"$__ryokan_name\"; \\builtin printf '\\0'; \
                    done < <(IFS=$' \\t\\n'; \\builtin compgen -A function)";

impl Shell {
    /// Starts bash, which then reads the script.
    ///
    /// # Errors
    /// If the program does not exist or no descriptors are left.
    pub fn start(program: &Program, stdout: &OwnedFd, stderr: &OwnedFd) -> io::Result<Shell> {
        let mark = format!("ryokan-{:016x}-", u64::from_le_bytes(random::bytes()));
        let ((script_out, script), (bell, bell_in)) = (io::pipe()?, io::pipe()?);
        let ((answers_out, answers), (tokens_out, tokens)) = (io::pipe()?, io::pipe()?);
        // Without a writer: readers see the end of input.
        let (stdin_out, _) = io::pipe()?;
        let (calls, calls_in) = io::pipe()?;
        for ours in [bell.as_fd(), answers.as_fd(), calls.as_fd()] {
            fcntl(ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        let stdin = File::from(OwnedFd::from(stdin_out.try_clone()?));
        let asked =
            (File::from(OwnedFd::from(answers_out.try_clone()?)), File::from(OwnedFd::from(tokens_out.try_clone()?)));
        // Kept open, so that waiting for a token does not see an end of input.
        let mut tokens = File::from(OwnedFd::from(tokens));
        tokens.write_all(TOKEN)?;
        let payload = unnamed(b"")?;
        // A pipe would be written line by line, waking this process each time.
        let report = unnamed(b"")?;
        fcntl(report.as_fd(), FcntlArg::F_SETFL(OFlag::O_APPEND))?;
        let leave = LEAVE.replace("@DUMP@", &DUMP.replace("@KIND@", "R").replace("@FUNCTIONS@", TOGETHER));
        let end = END.replace("@DUMP@", &DUMP.replace("@KIND@", "X").replace("@FUNCTIONS@", EACH));
        let argv: Vec<String> =
            program.argv.iter().map(|word| String::from_utf8_lossy(&quoted(word.as_bytes())).into_owned()).collect();
        let options = OPTIONS.join(" ");
        let renew = RENEW.replace("@BASH@", &format!("{} {options}", argv.join(" ")));
        let marked = |text: String| unnamed(text.replace("@MARK@", &mark).as_bytes());
        let renew = renew.replace("@MARK@", &mark);
        let renewing = unnamed(renew.replace("@GUARD@", GUARD).as_bytes())?;
        let nothing = File::open("/dev/null")?;
        let given: Vec<(OwnedFd, i32)> = vec![
            (stdout.try_clone()?, 222),
            (stderr.try_clone()?, 223),
            (tokens_out.into(), 224),
            (answers_out.into(), 225),
            (renewing.try_clone()?.into(), 226),
            (marked(end)?.into(), 227),
            (marked(leave)?.into(), 228),
            (nothing.into(), 229),
            (payload.try_clone()?.into(), 230),
            (report.try_clone()?.into(), 231),
            (bell_in.into(), 221),
            (stdin_out.into(), 232),
            (script_out.try_clone()?.into(), 233),
            (calls_in.into(), 234),
        ];
        let (path, arguments) = program.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(path);
        command.arg0("bash").args(arguments).args(OPTIONS).env_clear().current_dir(&program.cwd);
        command.stdin(Stdio::from(OwnedFd::from(script_out)));
        command.stdout(stdout.try_clone()?).stderr(stderr.try_clone()?).process_group(0);
        process::end_with_parent(&mut command);
        process::give_descriptors(&mut command, given);
        let child = process::unblocked(&mut command).spawn()?;
        drop(command);
        let pidfd = pidfd::open(pid_of(&child))?;
        Ok(Shell {
            child,
            pidfd,
            script: File::from(OwnedFd::from(script)),
            payload,
            report,
            bell: File::from(OwnedFd::from(bell)),
            received: Vec::new(),
            read_to: 0,
            stdin,
            calls: File::from(OwnedFd::from(calls)),
            answers: File::from(OwnedFd::from(answers)),
            asked,
            tokens,
            renewing,
            renew: renew.replace("@GUARD@", ""),
            mark,
            exit: None,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        pid_of(&self.child)
    }

    /// Readable when it has ended.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Readable when bash reports.
    pub fn reports(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Readable when code calls a tool.
    pub fn calls(&self) -> BorrowedFd<'_> {
        self.calls.as_fd()
    }

    /// Reads the code's tool requests.
    ///
    /// # Errors
    /// If the pipe fails.
    pub fn take_calls(&self, into: &mut Vec<u8>) -> io::Result<()> {
        let mut buffer = [0; READ_BYTES];
        match (&self.calls).read(&mut buffer) {
            Ok(count) => into.extend_from_slice(&buffer[..count]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Writable when an answer can be written.
    pub fn takes_answers(&self) -> BorrowedFd<'_> {
        self.answers.as_fd()
    }

    /// The marker of the machinery's own reports.
    pub fn mark(&self) -> &str {
        &self.mark
    }

    /// Makes bash run a line, whose `source` of 250 finds the payload. An empty line follows: once
    /// bash has read that, the first is done.
    ///
    /// # Errors
    /// If bash is gone.
    pub fn run(&mut self, line: &str, payload: &[u8]) -> io::Result<()> {
        // bash is idle and silent: pending reports are discarded now, not later when new ones may
        // arrive.
        self.report.set_len(0)?;
        self.read_to = 0;
        self.received.clear();
        self.payload.set_len(0)?;
        self.payload.write_all_at(payload, 0)?;
        self.script.write_all(format!("{line}\n\n").as_bytes())
    }

    /// Whether bash has read every line and waits for more, or is gone.
    pub fn waits(&self) -> bool {
        process::unread(self.script.as_fd()).is_ok_and(|bytes| bytes == 0)
    }

    /// Waits briefly until bash is idle; returns whether it is.
    pub fn settled(&self) -> bool {
        let until = Instant::now() + SETTLING;
        while !self.waits() {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }

    /// Reads bash's reports if it rang; returns whether it did.
    ///
    /// # Errors
    /// If a report exceeds the limit.
    pub fn receive(&mut self) -> io::Result<bool> {
        let mut rung = [0; 512];
        match (&self.bell).read(&mut rung) {
            Ok(0) => return Ok(false),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        self.check_room()?;
        let mut buffer = vec![0; READ_BYTES];
        loop {
            match self.report.read_at(&mut buffer, self.read_to)? {
                0 => return Ok(true),
                count => {
                    self.read_to += count as u64;
                    self.received.extend_from_slice(&buffer[..count]);
                }
            }
        }
    }

    /// Reads without a ring; false if a report exceeds the limit.
    ///
    /// # Errors
    /// If it did.
    pub fn check_room(&self) -> io::Result<()> {
        if self.report.metadata()?.len() > REPORT_BYTES { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
    }

    /// Takes the last whole report from the received bytes, with everything before it.
    pub fn take_report(&mut self) -> Option<Vec<u8>> {
        let (start, end) = snapshot::find(&self.received, &self.mark)?;
        let report = self.received[start..end].to_vec();
        self.received.clear();
        self.received.shrink_to(READ_BYTES);
        Some(report)
    }

    /// Whether bash reported that it is being replaced by a new bash.
    pub fn take_renewal(&mut self) -> bool {
        let said = format!("\0{}N\0", self.mark).into_bytes();
        let renewed = self.received.ends_with(&said);
        if renewed {
            self.received.truncate(self.received.len() - said.len());
        }
        renewed
    }

    /// A writer of the next execution's standard input. Input ends when it is dropped.
    ///
    /// # Errors
    /// If there are no descriptors.
    pub fn feeding(&self) -> io::Result<File> {
        use std::os::unix::fs::OpenOptionsExt as _;
        let path = format!("/proc/self/fd/{}", self.stdin.as_raw_fd());
        std::fs::OpenOptions::new().write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)
    }

    /// Discards unread input and tool answers, and releases the next tool call.
    pub fn forget_leftovers(&mut self, called: bool) {
        drain(&self.stdin);
        if called {
            drain(&self.asked.0);
            drain(&self.asked.1);
            // Otherwise the next call would wait forever, and be interrupted like any other wait.
            let _ = self.tokens.write_all(TOKEN);
        }
    }

    /// Writes as much of an answer as there is room for; returns the number of bytes.
    pub fn answer(&self, bytes: &[u8]) -> usize {
        (&self.answers).write(bytes).unwrap_or(0)
    }

    /// Its status if it has ended: 128 plus the signal if a signal ended it.
    pub fn exit_status(&mut self) -> Option<i32> {
        if self.exit.is_none() {
            let status = self.child.try_wait().ok()??;
            self.exit = Some(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)));
        }
        self.exit
    }

    /// Before an interrupt: bash will be replaced in place although a signal ends it.
    ///
    /// # Errors
    /// If memory is short.
    pub fn expect_interrupt(&self) -> io::Result<()> {
        self.renewing.set_len(0)?;
        self.renewing.write_all_at(self.renew.as_bytes(), 0)
    }

    /// Restores the default effect of signals.
    ///
    /// # Errors
    /// If memory is short.
    pub fn expect_none(&self) -> io::Result<()> {
        let guarded = format!("{GUARD}{}", self.renew);
        self.renewing.set_len(0)?;
        self.renewing.write_all_at(guarded.as_bytes(), 0)
    }

    /// Signals bash itself.
    pub fn signal(&self, signal: Signal) {
        // An ended process needs no signal.
        let _ = pidfd::signal(self.pidfd.as_fd(), signal);
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A token that a tool call takes before its request and returns afterwards, so calls happen one at
/// a time.
const TOKEN: &[u8] = b"t";
const OPTIONS: [&str; 3] = ["--noprofile", "--norc", "-s"];

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

/// Reads the current content of a pipe. Setting it non-blocking would affect its other readers.
fn drain(mut pipe: &File) {
    let mut buffer = [0; READ_BYTES];
    while process::unread(pipe.as_fd()).is_ok_and(|bytes| bytes > 0) {
        if !matches!(pipe.read(&mut buffer), Ok(1..)) {
            return;
        }
    }
}
