//! The engine's side of the contract: serves requests one at a time, sends state changes after
//! each, reports jobs that end in between.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use serde_json::{Value as Json, json};

use super::call::{self, Called};
use super::entries::{self, Entries, Entry};
use super::execute::{self, Execution, Outcome};
use super::link::{Link, Stop};
use super::session::{Session, Setup};
use super::syntax::{self, Syntax};
use super::{ENGINE, complete, restore, values};
use crate::core::error::ErrorCode;
use crate::core::limits;
use crate::core::value::Value;
use crate::link::frames::{DynamicTool, EntryMeta, Event, FrameError, InterruptWay, Job, Missed, Reply, Request};
use crate::worker::engines::answers::{bounded_value, larger_than, refusal, success};

/// Asked to end, or init is gone.
pub const EXIT_OK: i32 = 0;
/// init violated the contract.
pub const EXIT_PROTOCOL: i32 = 65;
/// No shell could be started or restarted.
pub const EXIT_SETUP: i32 = 71;

/// Serves one session until init closes the socket or asks for the end; returns the exit code.
pub fn serve(control: OwnedFd, stdout: OwnedFd, stderr: OwnedFd, setup: Setup) -> i32 {
    let (Ok(link), Ok(session)) = (Link::new(control), Session::start(setup, [stdout, stderr])) else {
        return EXIT_SETUP;
    };
    let mut server =
        Server { session, link, sent: Entries::new(), jobs: Vec::new(), missed: Vec::new(), loading: None };
    let stopped = server.run();
    server.end();
    match stopped {
        Ok(()) | Err(Stop::HungUp) => EXIT_OK,
        Err(Stop::Protocol) => EXIT_PROTOCOL,
        Err(Stop::NoShell) => EXIT_SETUP,
    }
}

/// The current tools.
pub fn announce(session: &mut Session, tools: Vec<DynamicTool>) {
    let sound = |tool: &DynamicTool| {
        tool.name.len() <= limits::IDENTIFIER_BYTES
            && !tool.name.is_empty()
            && tool.name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
    };
    let tools: Vec<DynamicTool> = tools.into_iter().filter(sound).collect();
    let gone = session.tools.iter().filter(|tool| !tools.iter().any(|now| now.name == tool.name));
    let gone: Vec<String> = gone.map(|tool| tool.name.clone()).collect();
    session.gone_tools.extend(gone);
    session.gone_tools.retain(|name| !tools.iter().any(|tool| tool.name == *name));
    session.tools = tools;
    session.tools_changed = true;
}

/// The server of one session.
struct Server {
    session: Session,
    link: Link,
    /// The state as sent to init.
    sent: Entries,
    jobs: Vec<Job>,
    missed: Vec<Missed>,
    /// Entries of a load so far, and whether the last one is incomplete.
    loading: Option<(Vec<(String, Entry)>, bool)>,
}

impl Server {
    /// Serves until the end; `Ok` after `shutdown`.
    fn run(&mut self) -> Result<(), Stop> {
        let version = self.session.snapshot.variables.get("BASH_VERSION").and_then(|v| entries::scalar(&v.content));
        let version = String::from_utf8_lossy(version.unwrap_or_default());
        // `5.2.15(1)-release`
        let version = version.split('(').next().unwrap_or_default().to_owned();
        let ready = Event::Ready { engine: ENGINE.into(), version, interrupt: InterruptWay::Frame };
        self.link.put(&ready, &[])?;
        self.link.send()?;
        loop {
            let next = match self.link.waiting.pop_front() {
                Some(next) => Some(next),
                None => self.link.try_next()?,
            };
            match next {
                Some((Request::Shutdown, _)) => return Ok(()),
                Some((request, tail)) => self.serve(request, tail)?,
                None => self.wait()?,
            }
        }
    }

    /// Waits for a request, the end of a job, or the shell's end.
    fn wait(&mut self) -> Result<(), Stop> {
        let (link, shell) = (self.link.socket(), self.session.shell.ended());
        let mut waiting = vec![PollFd::new(link, PollFlags::POLLIN), PollFd::new(shell, PollFlags::POLLIN)];
        waiting.extend(self.session.jobs.watched().map(|job| PollFd::new(job, PollFlags::POLLIN)));
        match poll(&mut waiting, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(std::io::Error::from(error).into()),
        }
        let ready: Vec<bool> = waiting.iter().map(|fd| fd.revents().is_some_and(|events| !events.is_empty())).collect();
        if ready[1] {
            // One of its own jobs may have ended it.
            let wanted = self.session.entries.clone();
            let mut lost = self.session.start_with(&wanted).map_err(|_| Stop::NoShell)?;
            lost.push(entries::missed_entry(
                "execution",
                "shell",
                "the shell ended between executions and was restarted",
            ));
            self.session.lost = lost;
            self.put_changes(false)?;
        }
        if ready[2..].contains(&true) && self.session.jobs.forget_ended() {
            self.put_jobs()?;
            self.put_changes(false)?;
        }
        Ok(self.link.send()?)
    }

    fn serve(&mut self, request: Request, tail: Vec<u8>) -> Result<(), Stop> {
        match request {
            Request::Exec { id, exec, code, env, stdin } => {
                let stdin = self.stdin(stdin)?;
                let execution = Execution { exec, env: &env, stdin };
                let (outcome, stop) = execute::run(&mut self.session, &mut self.link, &code, execution)?;
                self.end_of(id, exec, outcome, None, stop)
            }
            Request::Call { id, exec, name, args, env, stdin } => {
                let stdin = self.stdin(stdin)?;
                let execution = Execution { exec, env: &env, stdin };
                let Called { outcome, value, stop } =
                    call::run(&mut self.session, &mut self.link, &name, &args, execution)?;
                self.end_of(id, exec, outcome, value, stop)
            }
            Request::Interrupt { .. } | Request::Shutdown => Ok(()),
            Request::Get { id, name } => {
                let reply = match self.session.snapshot.variables.get(&name) {
                    Some(variable) => bounded_value(id, &values::of(variable)),
                    None => refusal(id, ErrorCode::NotFound, format!("there is no variable {name}")),
                };
                self.reply(reply)
            }
            Request::Set { id, name, value } => {
                let set = Value::from_json(&value).map_err(|error| error.to_string());
                let reply = match set.and_then(|value| self.set(&name, &value)) {
                    Ok(()) => success(id, []),
                    Err(message) => refusal(id, ErrorCode::InvalidArgument, message),
                };
                self.put_changes(false)?;
                self.reply(reply)
            }
            Request::Vars { id } => {
                let own = self
                    .session
                    .snapshot
                    .variables
                    .values()
                    .filter(|v| self.session.entries.contains_key(&format!("var/{}", v.name)));
                let vars: Vec<Json> = own
                    .map(|v| json!({ "name": v.name, "type": entries::type_name(v), "summary": entries::summary(v) }))
                    .collect();
                self.reply(success(id, [("vars", vars.into())]))
            }
            Request::Tools { id } => {
                let tools = call::tools(&self.session);
                self.reply(success(id, [("tools", tools.into())]))
            }
            Request::Complete { id, code, cursor } => {
                let (start, matches) = complete::complete(&self.session, &code, cursor);
                self.reply(success(id, [("start", start.into()), ("matches", matches.into())]))
            }
            Request::Check { id, code } => {
                let asked = syntax::ask(&self.session.program(), &self.session.snapshot.options, &code);
                let reply = match asked {
                    Ok(Syntax::Whole) => success(id, [("status", "complete".into())]),
                    // No indentation: the next line may belong to a here-document or a text, where
                    // blanks count.
                    Ok(Syntax::Begun) => success(id, [("status", "incomplete".into()), ("indent", "".into())]),
                    Ok(Syntax::Wrong(_)) => success(id, [("status", "invalid".into())]),
                    Err(error) => refusal(id, ErrorCode::Internal, format!("cannot ask bash: {error}")),
                };
                self.reply(reply)
            }
            Request::DynamicTools { tools } => {
                announce(&mut self.session, tools);
                Ok(())
            }
            // The answered call has ended.
            Request::ToolResult { .. } => Ok(()),
            Request::Save { id } => {
                self.put_changes(true)?;
                self.reply(success(id, []))
            }
            Request::Load { .. } => {
                self.loading = Some((Vec::new(), false));
                Ok(())
            }
            Request::Entry { key, meta, more } => self.entry(key, meta, more, tail),
            Request::Loaded { id } => self.loaded(id),
            Request::Preload { id, modules: _ } => {
                // Run an empty execution on the usual path.
                let reply = match self.session.command(b"\\builtin :\n") {
                    Ok(()) => success(id, [("missed", Json::Array(Vec::new()))]),
                    Err(error) => refusal(id, ErrorCode::Internal, format!("the shell does not answer: {error}")),
                };
                self.reply(reply)
            }
            Request::Bind { id, env } => {
                let bound = self.session.bind(env);
                self.confirm(id, bound, "cannot enter the workspace")
            }
            Request::Enter { id, env } => {
                let entered = self.session.bind(env).and_then(|()| self.session.become_copy(Vec::new()));
                self.confirm(id, entered, "cannot enter the workspace")
            }
            Request::Reseed { id, env } => {
                let seeded = self.session.become_copy(env);
                self.confirm(id, seeded, "cannot seed the generator")
            }
        }
    }

    fn confirm(&mut self, id: u64, done: std::io::Result<()>, what: &str) -> Result<(), Stop> {
        self.reply(match done {
            Ok(()) => success(id, []),
            Err(error) => refusal(id, ErrorCode::Internal, format!("{what}: {error}")),
        })
    }

    fn stdin(&mut self, wanted: bool) -> Result<Option<OwnedFd>, Stop> {
        if wanted { self.link.fds.pop_front().map(Some).ok_or(Stop::Protocol) } else { Ok(None) }
    }

    fn set(&mut self, name: &str, value: &Value) -> Result<(), String> {
        let variable = values::variable(name, value, self.session.snapshot.variables.get(name))?;
        let mut commands = format!("\\builtin unset -v {name}\n").into_bytes();
        restore::declare(&variable, &[], &mut commands);
        self.session.command(&commands).map_err(|error| format!("the shell did not take it: {error}"))
    }

    fn entry(&mut self, key: String, meta: EntryMeta, more: bool, tail: Vec<u8>) -> Result<(), Stop> {
        let (entries, open) = self.loading.as_mut().ok_or(Stop::Protocol)?;
        match entries.last_mut() {
            Some((last, entry)) if *open && *last == key => entry.body.extend(tail),
            _ => entries.push((key, Entry { meta, body: tail })),
        }
        *open = more;
        Ok(())
    }

    fn loaded(&mut self, id: u64) -> Result<(), Stop> {
        let (entries, _) = self.loading.take().ok_or(Stop::Protocol)?;
        let wanted: Entries = entries.into_iter().collect();
        self.session.lost.clear();
        // A readonly variable cannot be unset: restoring needs a new shell.
        let missed = self.session.start_with(&wanted).map_err(|_| Stop::NoShell)?;
        self.sent = self.session.entries.clone();
        let missed = serde_json::to_value(missed).unwrap_or_default();
        self.reply(success(id, [("missed", missed)]))
    }

    fn end_of(
        &mut self,
        id: u64,
        exec: u64,
        outcome: Outcome,
        value: Option<Value>,
        stop: Option<Stop>,
    ) -> Result<(), Stop> {
        self.put_changes(false)?;
        self.put_jobs()?;
        let mut err = outcome.err;
        let mut value = value.map(|value| value.to_json());
        if value.as_ref().is_some_and(|value| larger_than(value, limits::VALUE_BYTES)) {
            value = None;
            err.push_str("the value is larger than a value may be and is left out");
        }
        let end = Event::End { id, exec, status: outcome.status, code: outcome.code, err, value, output: None };
        self.link.put(&end, &[])?;
        self.link.send()?;
        stop.map_or(Ok(()), Err)
    }

    fn put_changes(&mut self, all: bool) -> Result<(), Stop> {
        if all {
            self.sent.clear();
        }
        let gone: Vec<String> =
            self.sent.keys().filter(|key| !self.session.entries.contains_key(*key)).cloned().collect();
        for key in gone {
            self.sent.remove(&key);
            self.link.put(&Event::Del { key }, &[])?;
        }
        for (key, entry) in &self.session.entries {
            if self.sent.get(key).is_none_or(|sent| sent.body != entry.body) {
                put_entry(&mut self.link, key, entry)?;
                self.sent.insert(key.clone(), entry.clone());
            }
        }
        let missed = self.session.missed();
        if missed != self.missed || all {
            self.missed.clone_from(&missed);
            self.link.put(&Event::Missed { entries: missed }, &[])?;
        }
        Ok(())
    }

    fn put_jobs(&mut self) -> Result<(), Stop> {
        let jobs = self.session.jobs.list();
        if jobs != self.jobs {
            self.jobs.clone_from(&jobs);
            self.link.put(&Event::Jobs { jobs }, &[])?;
        }
        Ok(())
    }

    fn reply(&mut self, reply: Reply) -> Result<(), Stop> {
        let id = reply.id;
        if let Err(FrameError::TooLarge { .. }) = self.link.put(&Event::Reply(reply), &[]) {
            let message = "the answer is larger than a frame".to_owned();
            self.link.put(&Event::Reply(refusal(id, ErrorCode::InvalidArgument, message)), &[])?;
        }
        Ok(self.link.send()?)
    }

    /// Ends background jobs and the shell: by request, then by force.
    fn end(&mut self) {
        let known = self.session.snapshot.jobs.clone();
        self.session.jobs.look(self.session.shell.pid(), &known);
        self.session.jobs.signal(Signal::SIGTERM);
        let until = Instant::now() + JOBS_END;
        while !self.session.jobs.is_empty() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            let mut waiting: Vec<PollFd<'_>> =
                self.session.jobs.watched().map(|job| PollFd::new(job, PollFlags::POLLIN)).collect();
            let _ = poll(&mut waiting, PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO));
            self.session.jobs.forget_ended();
        }
        self.session.jobs.signal(Signal::SIGKILL);
        self.session.shell.kill();
    }
}

/// Time for background jobs to end by themselves.
const JOBS_END: Duration = Duration::from_secs(1);

fn put_entry(link: &mut Link, key: &str, entry: &Entry) -> Result<(), Stop> {
    let mut meta = entry.meta.clone();
    let mut chunks = entry.body.chunks(limits::FRAME_TAIL_BYTES).peekable();
    while let Some(chunk) = chunks.next() {
        let event = Event::Put { key: key.to_owned(), meta: std::mem::take(&mut meta), more: chunks.peek().is_some() };
        link.put(&event, chunk)?;
        if link.unsent() > limits::FRAME_TAIL_BYTES {
            link.send()?;
        }
    }
    Ok(())
}
