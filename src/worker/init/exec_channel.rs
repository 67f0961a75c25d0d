//! The lane as init serves it: a start is held until its beginning is in the daemon's journal, then begun.
//!
//! It belongs to the attached daemon and goes with it, and with it what is held: that never ran, and its daemon knows.

use std::io;
use std::task::{Context, Poll};

use super::Worker;
use super::executions::StartAnswer;
use crate::core::error::{Error, Result};
use crate::core::ids::ExecId;
use crate::link::guest::{LaneCall, LaneService, Start, Started};

/// The attached daemon's lane.
pub(super) struct Lane {
    service: LaneService,
    held: Option<Start>,
}

impl Worker {
    /// Takes the descriptor of that token as the lane.
    pub(super) fn open_lane(&mut self, token: u64) -> Result<()> {
        let socket =
            self.descriptors.take(token).ok_or_else(|| Error::invalid("the lane's descriptor did not come"))?;
        let unwatched = |e: io::Error| Error::internal(format!("the lane cannot be watched: {e}"));
        self.lane = Some(Lane { service: LaneService::new(socket).map_err(unwatched)?, held: None });
        Ok(())
    }

    /// Takes what came on the lane; whether there was something.
    pub(super) fn poll_lane(&mut self, cx: &mut Context<'_>) -> bool {
        let mut progressed = false;
        while self.takes_calls()
            && let Some(lane) = &self.lane
            && let Poll::Ready(call) = lane.service.poll_call(cx)
        {
            progressed = true;
            self.on_lane(call);
        }
        progressed
    }

    /// Takes what was said on the lane before a call that came beside it.
    pub(super) fn catch_up_with_lane(&mut self) {
        while let Some(lane) = &self.lane
            && let Some(call) = lane.service.call_now().transpose()
        {
            self.on_lane(call);
        }
    }

    fn on_lane(&mut self, call: io::Result<LaneCall>) {
        match call {
            Ok(LaneCall::Start(start)) => self.start(start, StartAnswer::Lane),
            Ok(LaneCall::Hold(start)) => {
                // Those are in the journal, whatever becomes of this one.
                self.forget_acknowledged(&start);
                if let Some(lane) = &mut self.lane {
                    lane.held = Some(start);
                }
            }
            Ok(LaneCall::Go(exec)) => match self.take_held(exec) {
                Some(start) => self.start(start, StartAnswer::Lane),
                None => {
                    let error = Error::internal(format!("execution {exec} is not held"));
                    self.answer_start(exec, StartAnswer::Lane, Err(error));
                }
            },
            Ok(LaneCall::Withdraw(exec)) => drop(self.take_held(exec)),
            Err(error) => {
                // The daemon sees its end of it close.
                tracing::debug!(%error, "the lane ends");
                self.lane = None;
            }
        }
    }

    fn take_held(&mut self, exec: ExecId) -> Option<Start> {
        self.lane.as_mut()?.held.take_if(|held| held.exec == exec)
    }

    /// Answers a start where it came from. Whoever asked may be gone: a daemon that comes back gets all from the ledger.
    pub(super) fn answer_start(&mut self, exec: ExecId, to: StartAnswer, outcome: Result<Started>) {
        match to {
            StartAnswer::Call(answer) => drop(answer.send(outcome)),
            StartAnswer::Lane => {
                if let Some(lane) = &self.lane
                    && let Err(error) = lane.service.answer(exec, &outcome)
                {
                    tracing::warn!(%exec, %error, "the daemon does not take an answer on the lane");
                    self.lane = None;
                }
            }
        }
    }
}
