//! Handles the engine's frames. Runs in init.

use std::task::{Context, Poll};

use serde_json::{Value as Json, json};

use super::control::Frame;
use super::engine_frames::EngineEvent;
use super::{Life, Worker};
use crate::core::engine::EngineName;
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::link::guest::ToolAnswer;

/// Frames handled per step before other sources are polled.
const FRAMES: usize = 256;

impl Worker {
    /// Reads frames unless there is no room for their effects; returns whether there were any.
    pub(super) fn poll_engine(&mut self, cx: &mut Context<'_>) -> bool {
        let mut progressed = false;
        for _ in 0..FRAMES {
            let gone = self.killed_for.is_some() || matches!(self.life, Life::Leaving(_));
            if gone || self.is_clogged() {
                return progressed;
            }
            match self.control.next() {
                Ok(Some(frame)) => self.on_frame(frame),
                Ok(None) => match self.control.poll_read(cx) {
                    Poll::Ready(()) => {}
                    Poll::Pending => return progressed,
                },
                Err(why) => self.kill(CrashCause::Protocol(why)),
            }
            progressed = true;
        }
        progressed
    }

    /// Whether the daemon is so far behind that the engine must wait.
    fn is_clogged(&self) -> bool {
        self.ledger.unsent_bytes() > self.settings.output_buffer_bytes + limits::FRAME_TAIL_BYTES
    }

    /// Handles a frame; a contract violation ends the engine.
    pub(super) fn on_frame(&mut self, frame: Frame) {
        if let Err(why) = self.take_frame(frame) {
            self.kill(CrashCause::Protocol(why));
        }
    }

    fn take_frame(&mut self, frame: Frame) -> Result<(), String> {
        let Frame { event, json, tail } = frame;
        match event {
            EngineEvent::Ready(ready) => self.on_engine_ready(ready),
            EngineEvent::Shown { exec } => {
                // Late frames of a finished execution are dropped.
                if let Some(run) = self.run.as_ref().filter(|run| run.exec.0 == exec) {
                    // Earlier output precedes the frame.
                    let (ledger, exec) = (&mut self.ledger, run.exec);
                    self.pipes.drain(|stream, data| ledger.output(exec, stream, data));
                    self.ledger.event(exec, json, tail);
                }
                Ok(())
            }
            EngineEvent::ToolCall { call, exec } => {
                if let Some(answer) = self.outbox.call_tool(call, exec, &json)? {
                    self.on_tool_answer(call, &answer);
                }
                Ok(())
            }
            EngineEvent::Jobs(jobs, threads) => {
                if !jobs.is_empty() {
                    self.start_watch();
                }
                self.state.set_works(match self.settings.engine {
                    EngineName::Python => threads,
                    // Its timers and callbacks run in the loop of the engine itself.
                    EngineName::Node => !jobs.is_empty(),
                    // Their jobs are processes.
                    EngineName::Kaish | EngineName::Bash => false,
                });
                self.state.set_jobs(jobs)?;
                self.outbox.set_jobs(json);
                Ok(())
            }
            EngineEvent::Put { key, meta_json, more } => {
                let listed = self.state.listed();
                self.state.put(key, meta_json, &tail, more)?;
                self.tell_bound(listed);
                Ok(())
            }
            EngineEvent::Del { key } => {
                let listed = self.state.listed();
                self.state.del(key)?;
                self.tell_bound(listed);
                Ok(())
            }
            EngineEvent::Missed(missed) => {
                self.state.set_missed(missed)?;
                self.report_missed();
                Ok(())
            }
            EngineEvent::End(end) => self.on_end(end, json),
            EngineEvent::Reply { id, ok } => self.on_reply(id, ok, json),
        }
    }

    /// Sends the list again if an entry left it: its name was bound again.
    fn tell_bound(&mut self, listed: usize) {
        if self.state.listed() != listed {
            self.report_missed();
        }
    }

    /// Sends the daemon the list of entries that cannot be saved.
    pub(super) fn report_missed(&mut self) {
        let list = json!({ "ev": "missed", "entries": self.state.missed() });
        self.outbox.set_missed(list.to_string().into_bytes());
    }

    /// Forwards a tool's answer to the engine.
    pub(super) fn on_tool_answer(&mut self, call: u64, answer: &ToolAnswer) {
        if matches!(self.life, Life::Leaving(_)) {
            return;
        }
        let failed = |message: &str| json!({ "op": "tool_result", "call": call, "ok": false, "message": message });
        let frame = match answer {
            ToolAnswer::Done { value_json, text } => match serde_json::from_slice::<Json>(value_json) {
                Ok(value) => json!({ "op": "tool_result", "call": call, "ok": true, "value": value, "text": text }),
                Err(error) => failed(&format!("the tool's value cannot be read: {error}")),
            },
            ToolAnswer::Failed(message) => failed(message),
        };
        if let Err(why) = self.control.send(frame.to_string().as_bytes(), &[], None) {
            self.kill(CrashCause::Protocol(why));
        }
    }
}
