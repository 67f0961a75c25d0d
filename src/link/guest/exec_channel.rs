//! Init's end of the lane: starts in, their answers out.

use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll};

use capnp::message::Builder;

use super::daemon::{write_chunks, write_end};
use super::{Start, Started, read_start};
use crate::core::error::Result;
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::link::exec_channel::{Lane, Message};
use crate::link::schema::worker_capnp::{lane_answer, lane_call};

/// What the daemon says on the lane.
#[derive(Debug)]
pub enum LaneCall {
    /// Start it.
    Start(Start),
    /// Start it when told to go.
    Hold(Start),
    /// The one that is held may begin.
    Go(ExecId),
    /// The one that is held is not to run.
    Withdraw(ExecId),
}

/// What an end beside its output may take of a message, bytes.
const END_BYTES: usize = limits::EXEC_CHANNEL_BYTES - limits::OUTPUT_BATCH_BYTES as usize - (4 << 10);

/// Init's end.
#[derive(Debug)]
pub struct LaneService(Lane);

impl LaneService {
    /// Takes over init's end. Must be called inside a runtime.
    ///
    /// # Errors
    /// If it cannot be watched.
    pub fn new(socket: OwnedFd) -> io::Result<LaneService> {
        Ok(LaneService(Lane::new(socket)?))
    }

    /// Waits for a call.
    ///
    /// # Errors
    /// If the daemon closed the lane or does not keep to it.
    pub fn poll_call(&self, cx: &mut Context<'_>) -> Poll<io::Result<LaneCall>> {
        self.0.poll_message(cx, read_call).map_err(io::Error::other)
    }

    /// The call that is there already, if any.
    ///
    /// # Errors
    /// As [`Self::poll_call`].
    pub fn call_now(&self) -> io::Result<Option<LaneCall>> {
        self.0.message_now(&read_call).map_err(io::Error::other)
    }

    /// Whether an end is small enough for the lane, whatever it wrote within
    /// [`OUTPUT_BATCH_BYTES`](limits::OUTPUT_BATCH_BYTES).
    pub fn fits(err: &str, frame_json: &[u8]) -> bool {
        err.len() + frame_json.len() <= END_BYTES
    }

    /// Answers a start.
    ///
    /// # Errors
    /// If the daemon is gone or does not read.
    pub fn answer(&self, exec: ExecId, outcome: &Result<Started>) -> io::Result<()> {
        let mut message = Builder::new_default();
        let mut answer = message.init_root::<lane_answer::Builder<'_>>();
        answer.set_exec_id(exec.0);
        match outcome {
            Ok(Started::Runs) => answer.set_runs(()),
            Ok(Started::Ended(finish, output)) => {
                let mut over = answer.init_over();
                write_end(over.reborrow().init_end(), finish);
                write_chunks(over.init_output(output.len() as u32), output);
            }
            Err(error) => answer.set_refused(error.to_line()),
        }
        match self.0.send(&message)? {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::EMSGSIZE)),
        }
    }
}

fn read_call(message: &Message<'_>) -> capnp::Result<LaneCall> {
    Ok(match message.get_root::<lane_call::Reader<'_>>()?.which()? {
        lane_call::Start(exec) => LaneCall::Start(read_start(exec?)?),
        lane_call::Hold(exec) => LaneCall::Hold(read_start(exec?)?),
        lane_call::Go(exec) => LaneCall::Go(ExecId(exec)),
        lane_call::Withdraw(exec) => LaneCall::Withdraw(ExecId(exec)),
    })
}
