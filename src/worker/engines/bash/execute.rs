//! An execution from the code to its end, with interrupts, standard input and tool calls meanwhile.
//!
//! ```text
//!   running ─ report ─▶ over                               the shell continues
//!      │ ─ last report ─▶ leaving ─ renewed or ended ─▶ over    `exit`, an interrupt: a new bash inherits the state
//!      │ ─ ended ─▶ over                                   `exec`, SIGKILL: the state before it
//!      └ ─ waits for a line, no report ─▶ over             the machinery was broken: the state before it
//! ```

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::entries::missed_entry;
use super::feeding::Feeding;
use super::jobs;
use super::link::{Link, Stop};
use super::session::Session;
use super::steps::{self, Entering};
use super::syntax::{self, Syntax};
use super::toolcalls::Calls;
use crate::link::frames::{EndStatus, Event, Missed, Request};

/// How an execution ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The status of the `end` frame.
    pub status: EndStatus,
    /// bash's exit status.
    pub code: i32,
    /// The error text.
    pub err: String,
}

impl Outcome {
    /// Nothing ran.
    pub fn refused(code: i32, err: impl Into<String>) -> Outcome {
        Outcome { status: EndStatus::Refused, code, err: err.into() }
    }

    fn ended(code: i32) -> Outcome {
        let status = if code == 0 { EndStatus::Done } else { EndStatus::Failed };
        Outcome { status, code, err: String::new() }
    }
}

/// The context of an execution.
pub struct Execution<'a> {
    /// Its number.
    pub exec: u64,
    /// Its environment.
    pub env: &'a [(String, String)],
    /// Its standard input.
    pub stdin: Option<OwnedFd>,
}

/// The escalation after an interrupt, while the execution continues.
const INTERRUPTION: [(Duration, Force); 4] = [
    (Duration::ZERO, Force::Ask(Signal::SIGINT)),
    (Duration::from_millis(300), Force::Ask(Signal::SIGTERM)),
    (Duration::from_millis(550), Force::Ask(Signal::SIGKILL)),
    (Duration::from_millis(800), Force::Shell),
];

#[derive(Debug, Clone, Copy)]
enum Force {
    /// Signal the shell and each process that it waits for. The shell itself handles the signal and
    /// survives.
    Ask(Signal),
    /// Kill the shell.
    Shell,
}

/// bash's exit status after Ctrl-C.
const INTERRUPTED: i32 = 130;

/// Poll interval for a silent shell.
const WATCH: Duration = Duration::from_millis(200);

struct Drive<'a> {
    session: &'a mut Session,
    link: &'a mut Link,
    exec: u64,
    feeding: Option<Feeding>,
    calls: Calls,
    interrupted: Option<(Instant, usize)>,
    left: Option<i32>,
    leaving: Option<Stop>,
}

enum Over {
    /// The shell continues.
    Reported,
    /// The shell became a new bash, with its exit status.
    Renewed(i32),
    /// The shell is gone; with its status, and whether it reported its state.
    Gone(i32, bool),
    /// The shell waits, and its report was unreadable.
    Broken,
}

/// Runs code to its end. When this returns the shell is alive and its state has been read.
///
/// # Errors
/// If serving must end; the outcome is set nevertheless.
pub fn run(
    session: &mut Session,
    link: &mut Link,
    code: &str,
    execution: Execution<'_>,
) -> Result<(Outcome, Option<Stop>), Stop> {
    if code.contains('\0') {
        return Ok((Outcome::refused(2, "a program cannot hold a zero byte"), None));
    }
    let plain = syntax::is_plain(code) && session.snapshot.aliases.is_empty();
    let asked = !plain && syntax::may_ask(code) && !reading_is_changed(session);
    if !plain
        && !asked
        && let Some(refusal) = refusal(session, code)?
    {
        return Ok((refusal, None));
    }
    session.lost.clear();
    let (outcome, stop) = attempt(session, link, code, &execution, asked)?;
    if !session.snapshot.refused || outcome.status == EndStatus::Interrupted {
        return Ok((outcome, stop));
    }
    if stop.is_some() {
        return Ok((Outcome::refused(2, "not a program"), stop));
    }
    match refusal(session, code)? {
        Some(refusal) => Ok((refusal, None)),
        None => attempt(session, link, code, &execution, false),
    }
}

/// Whether aliases could alter the text surrounding the code.
fn reading_is_changed(session: &Session) -> bool {
    let words = ["}", "esac", "fi", "done", "until", "if", "case", "{", ";", "in", "then", "do"];
    let posix = session.snapshot.options.iter().any(|on| on == "set.posix");
    posix
        || session.snapshot.aliases.iter().any(|(name, value)| {
            let (name, value) = (String::from_utf8_lossy(name), String::from_utf8_lossy(value));
            words.contains(&name.as_ref()) || words[..4].iter().any(|word| value.contains(word))
        })
}

/// Why the code cannot run, if a second bash says so and nothing in the code can change that.
fn refusal(session: &Session, code: &str) -> Result<Option<Outcome>, Stop> {
    let asked = syntax::ask(&session.program(), &session.snapshot.options, code).map_err(|_| Stop::NoShell)?;
    let words = match asked {
        Syntax::Whole => return Ok(None),
        Syntax::Begun if !heredoc_only(code) => String::from("syntax error: unexpected end of file"),
        Syntax::Begun => return Ok(None),
        Syntax::Wrong(words) => words,
    };
    // Only bash can tell, while running it, how earlier lines or aliases affect the parsing of this
    // one.
    if syntax::changes_reading(code) || !session.snapshot.aliases.is_empty() {
        return Ok(None);
    }
    Ok(Some(Outcome::refused(2, words)))
}

/// bash treats the end of a program as the end of a here-document.
fn heredoc_only(code: &str) -> bool {
    code.contains("<<")
}

fn attempt(
    session: &mut Session,
    link: &mut Link,
    code: &str,
    execution: &Execution<'_>,
    read_first: bool,
) -> Result<(Outcome, Option<Stop>), Stop> {
    let stdin = execution.stdin.as_ref().map(OwnedFd::try_clone).transpose()?;
    let feeding = match stdin {
        Some(from) => Some(Feeding::new(from, session.shell.feeding()?)),
        None => None,
    };
    let tools: &[_] = if session.tools_changed { &session.tools } else { &[] };
    let entering = Entering {
        code,
        read_first,
        env: execution.env,
        otherwise: &session.snapshot.variables,
        status: session.snapshot.status,
        last: &session.snapshot.last,
        options: &session.snapshot.options,
        traps: &session.snapshot.traps,
        disabled: &session.snapshot.disabled,
        tools,
        gone_tools: &session.gone_tools,
        stdin: feeding.is_some(),
        has_trap_function: session.functions.contains_key(&b"trap"[..]),
    };
    let (line, payload) = steps::execution(&entering);
    session.tools_changed = false;
    session.gone_tools.clear();
    // A shell that ended between executions is detected at once.
    let _ = session.shell.run(&line, &payload);
    let mut drive = Drive {
        session,
        link,
        exec: execution.exec,
        feeding,
        calls: Calls::default(),
        interrupted: None,
        left: None,
        leaving: None,
    };
    let over = drive.until_over()?;
    let Drive { interrupted, leaving, calls, .. } = drive;
    if interrupted.is_some() {
        session.shell.expect_none()?;
    }
    let mut outcome = settle(session, &over, code)?;
    session.shell.forget_leftovers(calls.any());
    if interrupted.is_some() {
        outcome = Outcome { status: EndStatus::Interrupted, code: INTERRUPTED, err: String::new() };
        // `$?` for the next execution, as at the prompt.
        session.ended_with(INTERRUPTED);
    }
    Ok((outcome, leaving))
}

/// Ensures a living shell with the latest available state.
fn settle(session: &mut Session, over: &Over, code: &str) -> Result<Outcome, Stop> {
    let known = session.snapshot.jobs.clone();
    session.jobs.look(session.shell.pid(), &known);
    let lost = |reason: &str| missed_entry("execution", "changes of an execution", reason);
    let (missed, outcome) = match over {
        Over::Reported => {
            let outcome = Outcome::ended(session.snapshot.status);
            (Vec::new(), outcome)
        }
        Over::Renewed(status) => {
            let missed = match session.boot() {
                Ok(missed) => missed,
                Err(_) => start(session)?,
            };
            (missed, Outcome::ended(*status))
        }
        Over::Gone(status, true) => (start(session)?, Outcome::ended(*status)),
        Over::Gone(status, false) => {
            let mut missed = start(session)?;
            let what = if code.contains("exec") { "the shell was replaced or ended" } else { "the shell ended" };
            missed.push(lost(&format!("{what} before it could report its state; the earlier state is kept")));
            let err = format!("{what}: this execution's changes to the shell are lost");
            (missed, Outcome { err, ..Outcome::ended(*status) })
        }
        Over::Broken => {
            let mut missed = start(session)?;
            missed.push(lost("the shell could no longer report its state; the earlier state is kept"));
            let err = "the commands that report the shell's state were replaced or disabled; the shell was restarted";
            (missed, Outcome { status: EndStatus::Failed, code: 1, err: err.into() })
        }
    };
    session.lost.extend(missed);
    Ok(outcome)
}

fn start(session: &mut Session) -> Result<Vec<Missed>, Stop> {
    let wanted = session.entries.clone();
    session.start_with(&wanted).map_err(|_| Stop::NoShell)
}

impl Drive<'_> {
    fn until_over(&mut self) -> Result<Over, Stop> {
        let mut quiet_since = Instant::now();
        loop {
            match self.session.shell.receive() {
                Ok(true) => quiet_since = Instant::now(),
                Ok(false) => {}
                // Larger than a report may be.
                Err(_) => return Ok(Over::Broken),
            }
            if let Some(over) = self.look()? {
                return Ok(over);
            }
            self.escalate();
            if quiet_since.elapsed() >= WATCH {
                quiet_since = Instant::now();
                if self.session.shell.check_room().is_err() {
                    return Ok(Over::Broken);
                }
                if self.session.shell.waits() {
                    // Its reports from before the last line have arrived by now.
                    self.session.shell.receive().map_err(|_| Stop::NoShell)?;
                    return Ok(self.look()?.unwrap_or(Over::Broken));
                }
            }
            self.wait()?;
        }
    }

    /// Reads the shell's new reports.
    fn look(&mut self) -> Result<Option<Over>, Stop> {
        let renewed = self.session.shell.take_renewal();
        if let Some(report) = self.session.shell.take_report() {
            let mark = self.session.shell.mark().to_owned();
            let kind = [b"\0", mark.as_bytes(), b"X\0"].concat();
            if report.windows(kind.len()).any(|window| window == kind) {
                if self.session.take_last(&report).is_err() {
                    return Ok(Some(Over::Broken));
                }
                self.left = Some(self.session.snapshot.status);
            } else {
                let taken = self.session.take(&report);
                return Ok(Some(if taken.is_ok() { Over::Reported } else { Over::Broken }));
            }
        }
        if let (true, Some(status)) = (renewed, self.left) {
            return Ok(Some(Over::Renewed(status)));
        }
        if let Some(status) = self.session.shell.exit_status() {
            self.session.shell.receive().map_err(|_| Stop::NoShell)?;
            if let Some(report) = self.session.shell.take_report()
                && self.session.take_last(&report).is_ok()
            {
                self.left = Some(self.session.snapshot.status);
            }
            return Ok(Some(Over::Gone(status, self.left.is_some())));
        }
        Ok(None)
    }

    fn escalate(&mut self) {
        let Some((since, next)) = &mut self.interrupted else { return };
        while let Some((at, force)) = INTERRUPTION.get(*next)
            && since.elapsed() >= *at
        {
            *next += 1;
            let shell = self.session.shell.pid();
            let below = jobs::foreground(shell, &self.session.jobs);
            match force {
                Force::Ask(signal) => {
                    // The shell first: it must not continue when its current process has ended.
                    self.session.shell.signal(if *signal == Signal::SIGKILL { Signal::SIGTERM } else { *signal });
                    for pid in below {
                        let _ = kill(Pid::from_raw(pid), *signal);
                    }
                }
                Force::Shell => self.session.shell.signal(Signal::SIGKILL),
            }
        }
    }

    fn timeout(&self) -> Duration {
        let next = self.interrupted.and_then(|(since, next)| {
            let (at, _) = INTERRUPTION.get(next)?;
            Some(at.saturating_sub(since.elapsed()))
        });
        next.map_or(WATCH, |next| next.min(WATCH))
    }

    fn wait(&mut self) -> Result<(), Stop> {
        let timeout = self.timeout();
        let shell = &self.session.shell;
        let mut waiting: Vec<(PollFd<'_>, Source)> = vec![
            (PollFd::new(shell.reports(), PollFlags::POLLIN), Source::Shell),
            (PollFd::new(shell.ended(), PollFlags::POLLIN), Source::Shell),
            (PollFd::new(shell.calls(), PollFlags::POLLIN), Source::Calls),
        ];
        if self.leaving.is_none() {
            waiting.push((PollFd::new(self.link.socket(), PollFlags::POLLIN), Source::Link));
        }
        if self.calls.has_answers() {
            waiting.push((PollFd::new(shell.takes_answers(), PollFlags::POLLOUT), Source::Answers));
        }
        if let Some(feeding) = &self.feeding {
            waiting.push((feeding.waits_for(), Source::Feeding));
        }
        let mut fds: Vec<PollFd<'_>> = waiting.iter().map(|(fd, _)| fd.clone()).collect();
        match poll(&mut fds, PollTimeout::try_from(timeout).unwrap_or(PollTimeout::ZERO)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(std::io::Error::from(error).into()),
        }
        let ready: Vec<Source> = fds
            .iter()
            .zip(&waiting)
            .filter(|(fd, _)| fd.revents().is_some_and(|events| !events.is_empty()))
            .map(|(_, (_, source))| *source)
            .collect();
        for source in ready {
            match source {
                Source::Shell => {}
                Source::Link => self.requests(),
                Source::Calls => self.calls.read(&self.session.shell, &self.session.tools, self.exec, self.link)?,
                Source::Answers => self.calls.write(&self.session.shell),
                Source::Feeding => {
                    if self.feeding.as_mut().is_some_and(|feeding| feeding.turn()) {
                        self.feeding = None;
                    }
                }
            }
        }
        Ok(())
    }

    /// Handles requests during the execution. A contract violation ends the execution first.
    fn requests(&mut self) {
        loop {
            let stop = match self.link.try_next() {
                Ok(None) => return,
                Ok(Some((request, tail))) => match self.request(request, tail) {
                    Ok(()) => continue,
                    Err(stop) => stop,
                },
                Err(stop) => stop,
            };
            self.leaving = Some(stop);
            self.interrupt();
            return;
        }
    }

    fn request(&mut self, request: Request, tail: Vec<u8>) -> Result<(), Stop> {
        match request {
            Request::Interrupt { exec } => {
                if exec == self.exec {
                    self.interrupt();
                }
            }
            Request::ToolResult { call, ok, value, text, message } => {
                self.calls.answer(call, ok, &value, &text, &message);
                self.calls.write(&self.session.shell);
            }
            Request::DynamicTools { tools } => super::serve::announce(self.session, tools),
            other => {
                if matches!(other, Request::Shutdown) {
                    self.interrupt();
                }
                if self.link.waiting.len() >= super::link::WAITING {
                    return Err(Stop::Protocol);
                }
                self.link.waiting.push_back((other, tail));
            }
        }
        Ok(())
    }

    fn interrupt(&mut self) {
        if self.interrupted.is_none() {
            // Without memory for a restart in place, a new shell is started instead.
            let _ = self.session.shell.expect_interrupt();
            self.interrupted = Some((Instant::now(), 0));
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Source {
    Shell,
    Link,
    Calls,
    Answers,
    Feeding,
}

/// Sends init a tool call.
pub fn tell(link: &mut Link, event: &Event) -> Result<(), Stop> {
    link.put(event, &[])?;
    Ok(link.send()?)
}
