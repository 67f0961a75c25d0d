//! The session: a shell, its known state, and how it is restarted.
//!
//! ```text
//!            ┌──── report ─────┐
//!            ▼                 │
//!  fresh ─▶ known ─ execution ─┤── renewed in place: it reported its state and became a new bash
//!            ▲                 │
//!            └─ restarted ────┴── gone, or unreadable: the state before the execution
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::entries::{self, Entries, missed_entry};
use super::jobs::{self, Jobs};
use super::restore;
use super::shell::{Program, Shell};
use super::snapshot::{self, ExitTrap, Function, Functions, Snapshot};
use super::steps;
use crate::link::frames::{DynamicTool, Missed};
use crate::sys::random;

/// The start of a session.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Path and first arguments of bash.
    pub argv: Vec<String>,
    /// Its working directory.
    pub cwd: std::path::PathBuf,
    /// Its whole environment.
    pub vars: Vec<(String, String)>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup { argv: vec!["/bin/bash".into()], cwd: "/workspace".into(), vars: Vec::new() }
    }
}

/// Time limit of the machinery's own commands, in any state of the shell, which is abandoned
/// afterwards.
const PATIENCE: Duration = Duration::from_secs(30);

/// A shell with its known state.
pub struct Session {
    /// How to start it.
    pub setup: Setup,
    /// The output descriptors.
    outputs: [OwnedFd; 2],
    leads: Vec<(i32, String)>,
    led_elsewhere: Vec<i32>,
    /// The shell.
    pub shell: Shell,
    /// Its state at the last look.
    pub snapshot: Snapshot,
    /// Its functions.
    pub functions: BTreeMap<Vec<u8>, Function>,
    functions_read: Option<Functions>,
    fresh: Entries,
    fresh_limits: Vec<(String, String)>,
    /// The part of the state to be saved.
    pub entries: Entries,
    not_kept: Vec<Missed>,
    /// Losses of the last execution.
    pub lost: Vec<Missed>,
    /// Background jobs.
    pub jobs: Jobs,
    /// Tools that code can call.
    pub tools: Vec<DynamicTool>,
    /// Removed tools whose functions still exist.
    pub gone_tools: Vec<String>,
    /// Whether the tools' functions are out of date.
    pub tools_changed: bool,
}

impl Session {
    /// Starts a fresh shell.
    ///
    /// # Errors
    /// If bash is missing or does not become a session.
    pub fn start(setup: Setup, outputs: [OwnedFd; 2]) -> io::Result<Session> {
        let program = Program { argv: setup.argv.clone(), cwd: setup.cwd.clone() };
        let mut shell = Shell::start(&program, &outputs[0], &outputs[1])?;
        let (line, payload) = steps::boot(&setup.vars, "", b"", &[], 0);
        shell.run(&line, &payload)?;
        let (snapshot, functions) = look(&mut shell, None)?;
        let leads = (1..).zip(&outputs).map(|(number, fd)| (number, leads_to(fd))).collect();
        let mut session = Session {
            setup,
            outputs,
            leads,
            led_elsewhere: Vec::new(),
            fresh_limits: jobs::limits(shell.pid()),
            shell,
            snapshot,
            functions: BTreeMap::new(),
            functions_read: None,
            fresh: Entries::new(),
            entries: Entries::new(),
            not_kept: Vec::new(),
            lost: Vec::new(),
            jobs: Jobs::default(),
            tools: Vec::new(),
            gone_tools: Vec::new(),
            tools_changed: false,
        };
        session.adopt(functions);
        session.begin_anew();
        Ok(session)
    }

    /// Takes the current state as that of a fresh shell.
    fn begin_anew(&mut self) {
        self.not_kept.clear();
        self.fresh = entries::of(&self.snapshot, &self.functions, &mut self.not_kept);
        self.entries = Entries::new();
    }

    /// How bash is started.
    pub fn program(&self) -> Program {
        Program { argv: self.setup.argv.clone(), cwd: self.setup.cwd.clone() }
    }

    /// The destination of the engine's own messages.
    ///
    /// # Errors
    /// If no descriptors are left.
    pub fn stdout(&self) -> io::Result<std::fs::File> {
        Ok(self.outputs[0].try_clone()?.into())
    }

    fn adopt(&mut self, functions: BTreeMap<Vec<u8>, Function>) {
        self.functions_read =
            matches!(self.snapshot.functions, Functions::Together(..)).then(|| self.snapshot.functions.clone());
        self.functions = functions;
    }

    /// Takes a report of a continuing shell.
    ///
    /// # Errors
    /// If the report is invalid, or the shell does not list its functions.
    pub fn take(&mut self, report: &[u8]) -> io::Result<()> {
        let mut snapshot = snapshot::read(report, self.shell.mark()).map_err(io::Error::other)?;
        let functions = match &snapshot.functions {
            same if Some(same) == self.functions_read.as_ref() => None,
            _ => Some(functions_of(&mut self.shell, &snapshot)?),
        };
        self.settle_exit_trap(&mut snapshot);
        if snapshot.refused {
            snapshot.status = self.snapshot.status;
        }
        self.snapshot = snapshot;
        if let Some(functions) = functions {
            self.adopt(functions);
        }
        self.weigh();
        Ok(())
    }

    /// Takes the last report of an exiting shell.
    ///
    /// # Errors
    /// If the report is invalid.
    pub fn take_last(&mut self, report: &[u8]) -> io::Result<()> {
        let mut snapshot = snapshot::read(report, self.shell.mark()).map_err(io::Error::other)?;
        if snapshot.leaving.is_some_and(|depth| depth > 0) {
            // Local variables of active functions are not part of the session.
            snapshot.positional.clone_from(&self.snapshot.positional);
        }
        self.settle_exit_trap(&mut snapshot);
        let functions = match &snapshot.functions {
            Functions::Each(each) => {
                each.iter().filter(|(_, f)| !steps::is_tool(&f.text)).map(|(n, f)| (n.clone(), f.clone())).collect()
            }
            Functions::Together(..) => self.functions.clone(),
        };
        self.snapshot = snapshot;
        self.adopt(functions);
        self.weigh();
        Ok(())
    }

    /// The code's exit trap without the machinery's part.
    fn settle_exit_trap(&self, snapshot: &mut Snapshot) {
        let listed = snapshot.traps.remove("EXIT");
        let wanted = match &snapshot.exit_trap {
            ExitTrap::Set(action) => Some(action.clone()).filter(|action| !action.is_empty()),
            ExitTrap::Removed => None,
            ExitTrap::Listed if snapshot.leaving.is_some() => self.snapshot.traps.get("EXIT").cloned(),
            ExitTrap::Listed => listed.and_then(|action| steps::wanted_at_exit(&action)),
        };
        if let Some(action) = wanted {
            snapshot.traps.insert("EXIT".into(), action);
        }
    }

    /// `$?` for the next execution, independent of the shell's own exit status.
    pub fn ended_with(&mut self, status: i32) {
        self.snapshot.status = status;
        self.weigh();
    }

    fn weigh(&mut self) {
        self.not_kept.clear();
        let present = entries::of(&self.snapshot, &self.functions, &mut self.not_kept);
        self.entries = entries::since(present, &self.fresh);
    }

    /// The list of unsaved entries.
    pub fn missed(&mut self) -> Vec<Missed> {
        let mut missed = self.not_kept.clone();
        let mut open = jobs::open_descriptors(self.shell.pid(), &self.leads);
        if !open.is_empty() && self.shell.settled() {
            // The machinery's own redirections may just have been active.
            open = jobs::open_descriptors(self.shell.pid(), &self.leads);
        }
        self.led_elsewhere = open.iter().map(|(number, _)| *number).filter(|number| *number < 3).collect();
        for (number, leads) in open {
            let reason = format!("an open descriptor is not captured; it leads to {leads}");
            missed.push(missed_entry(&format!("descriptor/{number}"), "descriptor", &reason));
        }
        for job in self.jobs.list() {
            let reason = format!("a running process is not captured: {}", job.command);
            missed.push(missed_entry(&format!("job/{}", job.id), "job", &reason));
        }
        for (name, value) in jobs::limits(self.shell.pid()) {
            if !self.fresh_limits.contains(&(name.clone(), value)) {
                let reason = format!("what `ulimit` set is not captured: {}", name.to_lowercase());
                missed.push(missed_entry(
                    &format!("ulimit/{}", name.to_lowercase().replace(' ', "-")),
                    "limit",
                    &reason,
                ));
            }
        }
        missed.extend(self.lost.iter().cloned());
        missed
    }

    /// Makes the current bash, which has just started, the session.
    ///
    /// # Errors
    /// If it does not become one.
    pub fn boot(&mut self) -> io::Result<Vec<Missed>> {
        self.boot_with(&self.entries.clone())
    }

    fn boot_with(&mut self, wanted: &Entries) -> io::Result<Vec<Missed>> {
        let (commands, bad) = restore::commands(wanted);
        let status = wanted.get("status").and_then(|entry| std::str::from_utf8(&entry.body[1..]).ok()?.parse().ok());
        let (line, payload) =
            steps::boot(&self.setup.vars, &self.outputs_again(), &commands, &self.tools, status.unwrap_or(0));
        self.shell.run(&line, &payload)?;
        let (mut snapshot, functions) = look(&mut self.shell, None)?;
        self.tools_changed = false;
        self.gone_tools.clear();
        // State that would disturb the machinery waits for the next execution; its value is
        // recorded, not queried.
        let text = |key: &str| wanted.get(key).map(|entry| entry.body[1..].to_vec());
        for signal in restore::DEFERRED_TRAPS {
            snapshot.traps.remove(signal);
            if let Some(action) = text(&format!("trap/{signal}")) {
                snapshot.traps.insert(signal.to_owned(), action);
            }
        }
        for option in restore::DEFERRED_OPTIONS {
            if text(&format!("opt/{option}")).is_some_and(|on| on == b"1") {
                snapshot.options.push(option.to_owned());
            }
        }
        snapshot.options.sort();
        snapshot.disabled = wanted.keys().filter_map(|key| key.strip_prefix("builtin/")).map(str::to_owned).collect();
        self.snapshot = snapshot;
        self.adopt(functions);
        self.weigh();
        let mut missed: Vec<Missed> = Vec::new();
        for (key, entry) in wanted {
            if bad.contains(key) {
                missed.push(missed_entry(key, &entry.meta.type_name, "the entry is malformed"));
            } else if self.entries.get(key).is_none_or(|now| now.body != entry.body) && !self.is_as_wanted(key, entry) {
                missed.push(missed_entry(key, &entry.meta.type_name, "bash did not accept it"));
            }
        }
        Ok(missed)
    }

    /// A shell that exits inside a redirection keeps it: descriptors of the engine's outputs are
    /// restored.
    fn outputs_again(&self) -> String {
        let numbers = [1, 2].into_iter().filter(|number| !self.led_elsewhere.contains(number));
        numbers.map(|number| format!("\\command exec {number}>&{}; ", number + 241)).collect()
    }

    /// Whether a fresh shell here has the entry by itself.
    fn is_as_wanted(&self, key: &str, entry: &entries::Entry) -> bool {
        if let Some(gone) = key.strip_prefix("unset/") {
            return !self.fresh.contains_key(gone);
        }
        match key.strip_prefix("opt/") {
            Some(_) if entry.body == [entries::FORMAT, b'0'] => !self.fresh.contains_key(key),
            _ => self.fresh.get(key).is_some_and(|fresh| fresh.body == entry.body),
        }
    }

    /// Replaces the current bash by a new one with these entries, or with fewer if it does not
    /// become a session with all. Returns the entries left out.
    ///
    /// # Errors
    /// If no bash becomes a session.
    pub fn start_with(&mut self, wanted: &Entries) -> io::Result<Vec<Missed>> {
        let harmless = |key: &str| ["var/", "fn/", "cwd", "umask"].iter().any(|kind| key.starts_with(kind));
        let some: Entries =
            wanted.iter().filter(|(key, _)| harmless(key)).map(|(k, e)| (k.clone(), e.clone())).collect();
        let none = Entries::new();
        let mut last = io::Error::from(io::ErrorKind::Other);
        for tried in [wanted, &some, &none] {
            match self.restarted(tried) {
                Ok(mut missed) => {
                    let left_out = wanted.iter().filter(|(key, _)| !tried.contains_key(*key));
                    missed.extend(left_out.map(|(key, entry)| {
                        missed_entry(key, &entry.meta.type_name, "no shell could be started with the whole state")
                    }));
                    return Ok(missed);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn restarted(&mut self, wanted: &Entries) -> io::Result<Vec<Missed>> {
        let known = self.snapshot.jobs.clone();
        self.jobs.look(self.shell.pid(), &known);
        self.shell = Shell::start(&self.program(), &self.outputs[0], &self.outputs[1])?;
        self.led_elsewhere.clear();
        self.boot_with(wanted)
    }

    /// Runs commands of the machinery and reads the state again.
    ///
    /// # Errors
    /// If bash does not answer.
    pub fn command(&mut self, commands: &[u8]) -> io::Result<()> {
        let held = (self.snapshot.traps.clone(), self.snapshot.options.clone(), self.snapshot.disabled.clone());
        let last = self.snapshot.last.clone();
        let (line, payload) = steps::commands(commands, self.snapshot.status);
        self.shell.run(&line, &payload)?;
        let report = await_report(&mut self.shell)?;
        self.take(&report)?;
        // Between executions the shell has these set aside.
        (self.snapshot.traps, self.snapshot.options, self.snapshot.disabled) = held;
        self.snapshot.last = last;
        self.weigh();
        Ok(())
    }

    /// Sets the kernel's name and workspace.
    ///
    /// # Errors
    /// If the workspace cannot be entered.
    pub fn bind(&mut self, env: Vec<(String, String)>) -> io::Result<()> {
        self.set_up(env);
        std::env::set_current_dir(&self.setup.cwd)?;
        let mut commands = exports(&self.setup.vars);
        let cwd = self.setup.cwd.to_string_lossy().into_owned();
        commands.extend([b"\\builtin cd -- ", &super::quote::quoted(cwd.as_bytes())[..]].concat());
        commands.extend_from_slice(b"\n\\builtin unset -v OLDPWD; \\builtin declare -x OLDPWD\n");
        self.command(&commands)?;
        self.begin_anew();
        Ok(())
    }

    /// Seeds the generator anew and adopts the variables: the shell is a copy, and the original draws the same numbers.
    ///
    /// # Errors
    /// If bash does not answer, or code has made its generator read-only.
    pub fn become_copy(&mut self, env: Vec<(String, String)>) -> io::Result<()> {
        let mut commands = exports(&env);
        // Two numbers in turn differ, unless code has taken `RANDOM` for itself. `SRANDOM` is the system's.
        let seed = u32::from_ne_bytes(random::bytes());
        commands.extend_from_slice(
            format!("\\builtin test \"$RANDOM\" = \"$RANDOM\" || \\builtin printf -v RANDOM %s {seed}\n").as_bytes(),
        );
        self.command(&commands)?;
        if self.snapshot.variables.get("RANDOM").is_some_and(|generator| generator.is('r')) {
            return Err(io::Error::other("RANDOM is read-only"));
        }
        // The variables are no change by the kernel's code.
        let present = entries::of(&self.snapshot, &self.functions, &mut Vec::new());
        for key in env.iter().map(|(name, _)| format!("var/{name}")) {
            match present.get(&key) {
                Some(entry) => drop(self.fresh.insert(key, entry.clone())),
                None => drop(self.fresh.remove(&key)),
            }
        }
        self.set_up(env);
        self.weigh();
        Ok(())
    }

    /// Changes the variables with which a shell starts.
    fn set_up(&mut self, env: Vec<(String, String)>) {
        for (name, value) in env {
            match self.setup.vars.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => *known = value,
                None => self.setup.vars.push((name, value)),
            }
        }
    }
}

/// The commands that export variables.
fn exports(vars: &[(String, String)]) -> Vec<u8> {
    let named = vars.iter().filter(|(name, _)| restore::is_name(name));
    let one = |(name, value): &(String, String)| {
        [b"\\builtin export ", name.as_bytes(), b"=", &super::quote::quoted(value.as_bytes()), b"\n"].concat()
    };
    named.flat_map(one).collect()
}

fn leads_to(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::read_link(path).map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Waits for a report of the machinery's own commands.
fn await_report(shell: &mut Shell) -> io::Result<Vec<u8>> {
    let mut found = None;
    await_said(shell, |shell| {
        found = shell.take_report();
        found.is_some()
    })?;
    found.ok_or_else(|| io::ErrorKind::TimedOut.into())
}

fn await_said(shell: &mut Shell, mut done: impl FnMut(&mut Shell) -> bool) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        shell.receive()?;
        if done(shell) {
            return Ok(());
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut waiting =
            [PollFd::new(shell.reports(), PollFlags::POLLIN), PollFd::new(shell.ended(), PollFlags::POLLIN)];
        match poll(&mut waiting, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ended = waiting[1].revents().is_some_and(|events| !events.is_empty());
        if ended {
            shell.receive()?;
            return if done(shell) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) };
        }
    }
}

/// Waits for a report, and requests the functions unless they are unchanged.
fn look(shell: &mut Shell, known: Option<&Functions>) -> io::Result<(Snapshot, BTreeMap<Vec<u8>, Function>)> {
    let report = await_report(shell)?;
    let snapshot = snapshot::read(&report, shell.mark()).map_err(io::Error::other)?;
    let functions = if known == Some(&snapshot.functions) { BTreeMap::new() } else { functions_of(shell, &snapshot)? };
    Ok((snapshot, functions))
}

/// Requests each function separately: concatenated texts cannot be split reliably.
fn functions_of(shell: &mut Shell, snapshot: &Snapshot) -> io::Result<BTreeMap<Vec<u8>, Function>> {
    let Functions::Together(_, listed) = &snapshot.functions else {
        return Ok(BTreeMap::new());
    };
    if listed.is_empty() {
        return Ok(BTreeMap::new());
    }
    let names: Vec<&[u8]> = listed.iter().map(|(name, _)| &name[..]).collect();
    let (line, payload) = steps::functions(&names, shell.mark());
    shell.run(&line, &payload)?;
    let start = format!("\0{}Q\0", shell.mark()).into_bytes();
    let end = format!("\0{}E\0", shell.mark()).into_bytes();
    // Earlier output of a job is skipped.
    let begins = |said: &[u8]| said.windows(start.len()).rposition(|window| window == start);
    await_said(shell, |shell| shell.received.ends_with(&end) && begins(&shell.received).is_some())?;
    let said = std::mem::take(&mut shell.received);
    let from = begins(&said).unwrap_or(0) + start.len();
    let texts = said.get(from..said.len() - end.len()).unwrap_or_default();
    let texts: Vec<&[u8]> = texts.split(|b| *b == 0).collect();
    if texts.len() != listed.len() {
        return Err(io::Error::other("the functions are not as they were listed"));
    }
    Ok(listed
        .iter()
        .zip(texts)
        .filter(|(_, text)| !text.is_empty() && !steps::is_tool(text))
        .map(|((name, attributes), text)| {
            (name.clone(), Function { text: text.to_vec(), attributes: attributes.clone() })
        })
        .collect())
}
