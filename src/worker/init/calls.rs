//! Dispatches the daemon's calls. Runs in init.

use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::enclosure::MountSource;
use super::executions::StartAnswer;
use super::forked_snapshots::Hold;
use super::{Life, Worker};
use crate::catalog::EntryHead;
use crate::core::error::{Error, Result};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::link::guest::{Answer, Bind, Call, Report, StatePiece, ToolAnswer, WorkerCall};
use crate::link::types::{StateBefore, StateHead, StateHeads};

impl Worker {
    pub(super) fn on_call(&mut self, call: WorkerCall) {
        let WorkerCall { connection, what } = call;
        match what {
            Call::Attach { daemon, answer } => {
                self.forget_start();
                self.exec_channel = None;
                self.processes.end_all();
                self.thaw();
                let lost = self.outbox.attach(connection, daemon, &mut self.ledger);
                self.lose_tools(lost);
                self.orphan_at = None;
                reply(answer, Ok(self.report()));
            }
            Call::Gone => {
                if self.outbox.connection() == Some(connection) {
                    self.on_detached();
                }
            }
            // The newest attachment wins: the previous daemon may still be calling.
            other if self.outbox.connection() != Some(connection) => {
                other.refuse(Error::refused("another daemon has attached").reason("worker_replaced"));
            }
            other if matches!(self.life, Life::Unbound) => self.on_unbound_call(other),
            other => self.on_attached_call(other),
        }
    }

    fn on_attached_call(&mut self, call: Call) {
        self.drain_exec_channel();
        match call {
            Call::Attach { .. } | Call::Gone => {}
            Call::BindKernel(binding, answer) if binding.copy.is_some() => self.become_copy(*binding, answer),
            Call::BindKernel(_, answer) => {
                let why = match self.life {
                    Life::Leaving(_) => Error::lost("this worker is ending"),
                    _ => Error::refused("this worker has a kernel already").reason("bound"),
                };
                reply(answer, Err(why));
            }
            Call::Start(start, answer) => self.start(start, StartAnswer::Call(answer)),
            Call::ExecChannel(token, answer) => reply(answer, self.open_exec_channel(token)),
            Call::Spawn(start, sink, answer) => reply(answer, self.spawn(start, sink)),
            Call::Signal(_, _, answer) if self.suspended => {
                reply(answer, Err(Error::busy("the kernel is suspended").reason("suspended").hint("resume it first")));
            }
            Call::Signal(exec, signal, answer) => reply(answer, self.processes.signal(exec, signal)),
            Call::Resize(exec, size, answer) => reply(answer, self.processes.resize(exec, size)),
            Call::Connect(port, answer) => self.connect(port, answer),
            Call::EndProcesses(answer) => self.processes.end_all_then(answer),
            Call::Stdin { exec, data, end, answer } if self.processes.has(exec) => {
                self.processes.stdin(exec, data, end, answer);
            }
            Call::Interrupt(exec, answer) if self.processes.has(exec) => {
                self.processes.end(exec);
                reply(answer, Ok(()));
            }
            Call::Stdin { exec, data, end, answer } => match self.stdin(exec) {
                Ok(stdin) => stdin.take(data, end, answer),
                Err(error) => reply(answer, Err(error)),
            },
            Call::Interrupt(exec, answer) => reply(answer, self.interrupt(exec)),
            Call::Acknowledge(exec, answer) => {
                self.ledger.acknowledge(exec);
                reply(answer, Ok(()));
                if self.run.is_none() {
                    self.state.tidy();
                }
            }
            Call::Request(json, answer) => self.request(&json, answer),
            Call::DynamicTools(json, answer) => reply(answer, self.dynamic_tools(&json)),
            Call::LoadBegin(answer) => reply(answer, self.load_begin()),
            Call::LoadEntry(chunk, answer) => self.load_entry(&chunk, answer),
            Call::LoadEnd(answer) => self.load_end(answer),
            Call::Bind(bind, answer) => reply(answer, self.bind(bind)),
            Call::Unbind(path, answer) => reply(answer, self.enclosure.unbind(Path::new(&path))),
            Call::Keep { of, spare, transient, answer } => self.keep(of, spare, transient, answer),
            Call::Wake(of, answer) => self.wake(&of, answer),
            Call::Revise(revision, answer) => reply(answer, self.revise(revision)),
            Call::Freeze(at_work, answer) => self.hold_after_snapshot(Hold::Capture { at_work }, answer),
            Call::Thaw(answer) => {
                let stood = self.thaw();
                let moved = || Error::conflict("a stop resumed the kernel's processes").reason("thawed");
                reply(answer, if stood { Ok(()) } else { Err(moved()) });
            }
            Call::Suspend { copied, answer } => self.hold_after_snapshot(Hold::Suspension { copied }, answer),
            Call::Resume(answer) => {
                self.resume();
                reply(answer, Ok(()));
            }
            Call::Usage(answer) => reply(answer, Ok(self.enclosure.usage())),
            Call::Heads(answer) => reply(answer, self.heads()),
            Call::Entry(key, offset, answer) => reply(answer, self.entry(&key, offset)),
            Call::Stop { grace_ms, answer } => {
                let grace = Duration::from_millis(grace_ms).min(limits::WORKER_STOP);
                self.stop(grace, Some(answer));
            }
        }
    }

    pub(super) fn report(&self) -> Report {
        let (jobs, missed) = self.outbox.lists();
        let (engine, engine_version) = match &self.engine {
            Some(engine) => (engine.engine.clone(), engine.version.clone()),
            None => (self.settings.engine.name().to_owned(), String::new()),
        };
        Report {
            engine,
            engine_version,
            sandbox: self.enclosure.layers(),
            executions: self.ledger.list(),
            jobs_json: jobs.to_vec(),
            missed_json: missed.to_vec(),
            mounts: self.enclosure.bound(),
            is_suspended: self.suspended && !self.is_copied,
            restored_entries: self.restored_entries,
            not_restored_json: serde_json::to_vec(&self.not_restored).unwrap_or_default(),
        }
    }

    /// Handles a disconnect of the daemon: running work continues.
    fn on_detached(&mut self) {
        self.forget_start();
        self.exec_channel = None;
        self.processes.end_all();
        // The daemon that would thaw it is gone.
        self.thaw();
        let lost = self.outbox.detach();
        self.lose_tools(lost);
        if self.loading.is_some() {
            self.break_load("the daemon disconnected during a load");
        }
        if self.goes_with_daemon() {
            return self.leave_unsaved();
        }
        if matches!(self.life, Life::Serving) {
            self.orphan_at = Some(Instant::now() + self.settings.orphan_grace);
        }
    }

    fn lose_tools(&mut self, calls: Vec<u64>) {
        for call in calls {
            self.on_tool_answer(call, &ToolAnswer::Failed("the daemon disconnected during the call".into()));
        }
    }

    fn dynamic_tools(&mut self, json: &[u8]) -> Result<()> {
        match &self.life {
            Life::Serving => {
                self.snapshots.note_tools(json);
                self.control.send(json, &[], None).map_err(Error::internal)
            }
            Life::Starting(_) | Life::Unbound | Life::Stopping(_) | Life::Leaving(_) => {
                Err(Error::unavailable("the worker is ending"))
            }
        }
    }

    fn heads(&self) -> Result<StateHeads> {
        let head = |head: EntryHead| StateHead {
            key: head.key,
            meta_json: head.meta_json,
            digest: head.digest,
            size: head.size,
            exec: Some(head.exec).filter(|exec| *exec != 0).map(ExecId),
        };
        let heads = self.state.heads()?.into_iter().map(head).collect();
        let (under_way, before) = match &self.run {
            Some(run) => (Some(run.exec), run.before),
            None => (None, StateBefore::Saved),
        };
        Ok(StateHeads { heads, under_way, before })
    }

    fn entry(&self, key: &str, offset: u64) -> Result<Option<StatePiece>> {
        let piece = |(head, data): (EntryHead, _)| StatePiece { meta_json: head.meta_json, size: head.size, data };
        Ok(self.state.piece(key, offset)?.map(piece))
    }

    /// Stops every process.
    pub(super) fn hold(&mut self, hold: Hold) -> Result<()> {
        match hold {
            Hold::Capture { at_work } => self.freeze(at_work),
            Hold::Suspension { copied } => self.suspend(copied),
        }
    }

    fn freeze(&mut self, at_work: bool) -> Result<()> {
        // Only writes matter for a capture of shared files, not this engine's requests.
        let serves_others = at_work && matches!(self.life, Life::Serving) && !self.frozen;
        if !serves_others {
            self.check_quiet()?;
        }
        self.enclosure.freeze()?;
        self.frozen = true;
        Ok(())
    }

    /// Whether the engine neither runs nor answers anything.
    fn check_quiet(&self) -> Result<()> {
        self.check_idle()?;
        match self.asked.is_empty() {
            true => Ok(()),
            false => Err(Error::busy("the engine is answering a request")),
        }
    }

    fn suspend(&mut self, copied: bool) -> Result<()> {
        if !self.suspended {
            self.is_copied = copied;
            self.check_quiet()?;
            self.enclosure.freeze()?;
            self.suspended = true;
            self.processes.pauses.begin();
        }
        Ok(())
    }

    /// Ends the pause, if there is one.
    pub(super) fn resume(&mut self) {
        if std::mem::take(&mut self.suspended) {
            self.processes.pauses.end();
            if !self.frozen {
                self.enclosure.thaw();
            }
        }
    }

    /// Ends a freeze; returns whether there was one until now. The processes of a suspended kernel stay stopped.
    pub(super) fn thaw(&mut self) -> bool {
        let frozen = std::mem::take(&mut self.frozen);
        if frozen && !self.suspended {
            self.enclosure.thaw();
        }
        frozen
    }

    fn bind(&mut self, bind: Bind) -> Result<()> {
        let Bind { path, source, writable, token } = bind;
        let source = match token {
            0 => MountSource::Path(source.into()),
            token => {
                let tree = self.descriptors.take(token);
                let tree = tree.ok_or_else(|| Error::invalid("the mount's descriptor did not arrive"))?;
                MountSource::Tree { tree, shows: source.into() }
            }
        };
        self.enclosure.bind(Path::new(&path), source, writable)
    }
}

fn reply<T>(answer: Answer<T>, outcome: Result<T>) {
    // The caller may have gone.
    let _ = answer.send(outcome);
}
