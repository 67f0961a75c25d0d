//! Init's end of the execution channel: receives starts, sends answers.

use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll};

use capnp::message::Builder;

use super::daemon::{write_chunks, write_end};
use super::{Start, Started, read_start};
use crate::core::error::Result;
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::link::exec_channel::{ExecChannel, Message};
use crate::link::schema::worker_capnp::{exec_channel_answer, exec_channel_call};

/// A call on the execution channel.
#[derive(Debug)]
pub enum ExecChannelCall {
    /// Start the execution.
    Start(Start),
    /// Start the execution on commit.
    Prepare(Start),
    /// Start the prepared execution.
    Commit(ExecId),
    /// Drop the prepared execution.
    Abort(ExecId),
}

/// Limit of an end without its output, bytes.
const END_BYTES: usize = limits::EXEC_CHANNEL_BYTES - limits::OUTPUT_BATCH_BYTES as usize - (4 << 10);

/// Init's end of the execution channel.
#[derive(Debug)]
pub struct ExecChannelService(ExecChannel);

impl ExecChannelService {
    /// Wraps init's end. Must be called inside a runtime.
    ///
    /// # Errors
    /// If it cannot be watched.
    pub fn new(socket: OwnedFd) -> io::Result<ExecChannelService> {
        Ok(ExecChannelService(ExecChannel::new(socket)?))
    }

    /// Waits for a call.
    ///
    /// # Errors
    /// If the daemon closed the channel or sent an invalid message.
    pub fn poll_call(&self, cx: &mut Context<'_>) -> Poll<io::Result<ExecChannelCall>> {
        self.0.poll_message(cx, read_call).map_err(io::Error::other)
    }

    /// Returns a call that has already arrived.
    ///
    /// # Errors
    /// As [`Self::poll_call`].
    pub fn call_now(&self) -> io::Result<Option<ExecChannelCall>> {
        self.0.message_now(&read_call).map_err(io::Error::other)
    }

    /// Whether an end fits in a packet, with up to
    /// [`OUTPUT_GATHERED_BYTES`](limits::OUTPUT_BATCH_BYTES) of output.
    pub fn fits(err: &str, frame_json: &[u8]) -> bool {
        err.len() + frame_json.len() <= END_BYTES
    }

    /// Answers a start.
    ///
    /// # Errors
    /// If the daemon is gone or its buffer is full.
    pub fn answer(&self, exec: ExecId, outcome: &Result<Started>) -> io::Result<()> {
        let mut message = Builder::new_default();
        let mut answer = message.init_root::<exec_channel_answer::Builder<'_>>();
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

fn read_call(message: &Message<'_>) -> capnp::Result<ExecChannelCall> {
    Ok(match message.get_root::<exec_channel_call::Reader<'_>>()?.which()? {
        exec_channel_call::Start(exec) => ExecChannelCall::Start(read_start(exec?)?),
        exec_channel_call::Prepare(exec) => ExecChannelCall::Prepare(read_start(exec?)?),
        exec_channel_call::Commit(exec) => ExecChannelCall::Commit(ExecId(exec)),
        exec_channel_call::Abort(exec) => ExecChannelCall::Abort(ExecId(exec)),
    })
}
