//! Init's handling of the execution channel: a prepared execution starts once the daemon's journal
//! has it. Runs in init.
//!
//! The channel and its prepared execution end with the attached daemon, which knows that the
//! execution never ran.

use std::io;
use std::task::{Context, Poll};

use super::Worker;
use super::executions::StartAnswer;
use crate::core::error::{Error, Result};
use crate::core::ids::ExecId;
use crate::link::guest::{ExecChannelCall, ExecChannelService, Start, Started};

/// The attached daemon's execution channel.
pub(super) struct ExecChannel {
    service: ExecChannelService,
    held: Option<Start>,
}

impl Worker {
    /// Opens the channel on the descriptor of that token.
    pub(super) fn open_exec_channel(&mut self, token: u64) -> Result<()> {
        let socket = self
            .descriptors
            .take(token)
            .ok_or_else(|| Error::invalid("the execution channel's descriptor did not arrive"))?;
        let unwatched = |e: io::Error| Error::internal(format!("the execution channel cannot be watched: {e}"));
        self.exec_channel =
            Some(ExecChannel { service: ExecChannelService::new(socket).map_err(unwatched)?, held: None });
        Ok(())
    }

    /// Handles calls on the channel; returns whether there were any.
    pub(super) fn poll_exec_channel(&mut self, cx: &mut Context<'_>) -> bool {
        let mut progressed = false;
        while self.takes_calls()
            && let Some(channel) = &self.exec_channel
            && let Poll::Ready(call) = channel.service.poll_call(cx)
        {
            progressed = true;
            self.on_exec_channel_call(call);
        }
        progressed
    }

    /// Handles earlier channel calls before an ordinary call.
    pub(super) fn drain_exec_channel(&mut self) {
        while let Some(channel) = &self.exec_channel
            && let Some(call) = channel.service.call_now().transpose()
        {
            self.on_exec_channel_call(call);
        }
    }

    fn on_exec_channel_call(&mut self, call: io::Result<ExecChannelCall>) {
        match call {
            Ok(ExecChannelCall::Start(start)) => self.start(start, StartAnswer::ExecChannel),
            Ok(ExecChannelCall::Prepare(start)) => {
                // Their ends are journalled, independent of this execution's outcome.
                self.forget_acknowledged(&start);
                if let Some(channel) = &mut self.exec_channel {
                    channel.held = Some(start);
                }
            }
            Ok(ExecChannelCall::Commit(exec)) => match self.take_held(exec) {
                Some(start) => self.start(start, StartAnswer::ExecChannel),
                None => {
                    let error = Error::internal(format!("execution {exec} is not prepared"));
                    self.answer_start(exec, StartAnswer::ExecChannel, Err(error));
                }
            },
            Ok(ExecChannelCall::Abort(exec)) => drop(self.take_held(exec)),
            Err(error) => {
                // The daemon sees its end close.
                tracing::debug!(%error, "the execution channel ends");
                self.exec_channel = None;
            }
        }
    }

    fn take_held(&mut self, exec: ExecId) -> Option<Start> {
        self.exec_channel.as_mut()?.held.take_if(|held| held.exec == exec)
    }

    /// Answers a start on its own path. The caller may be gone; a returning daemon reads everything
    /// from the ledger.
    pub(super) fn answer_start(&mut self, exec: ExecId, to: StartAnswer, outcome: Result<Started>) {
        match to {
            StartAnswer::Call(answer) => drop(answer.send(outcome)),
            StartAnswer::ExecChannel => {
                if let Some(channel) = &self.exec_channel
                    && let Err(error) = channel.service.answer(exec, &outcome)
                {
                    tracing::warn!(%exec, %error, "the daemon does not read answers on the execution channel");
                    self.exec_channel = None;
                }
            }
        }
    }
}
