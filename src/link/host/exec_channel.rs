//! The daemon's end of the lane: starts out, their answers in.
//!
//! A worker of a former build has no lane; then, and for what is too large for a packet, a start is a call.

use std::future::poll_fn;
use std::rc::Rc;

use capnp::message::Builder;

use super::calls::{answered, bounded, write_exec};
use super::{WorkerExec, WorkerLink, WorkerListener};
use crate::core::error::{Error, Result};
use crate::core::exec::ExecRequest;
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::link::exec_channel::{self, Lane, Message};
use crate::link::host::callbacks::{self, Over};
use crate::link::schema::worker_capnp::{exec, lane_answer, lane_call};
use crate::link::types::from_capnp;

/// What a worker says of a start.
enum Said {
    Runs,
    Over(Over),
    Refused(String),
}

impl WorkerLink {
    /// Opens the lane, once; before, and without one, starts are calls.
    ///
    /// # Errors
    /// `Unsupported` if the worker is of a build that has none, `Unavailable` without descriptors.
    pub async fn open_lane(&self) -> Result<()> {
        if self.lane_asked.replace(true) || !self.passes_descriptors() {
            return Ok(());
        }
        let unavailable = |error| Error::unavailable(format!("a lane to the worker: {error}"));
        let (ours, theirs) = exec_channel::pair().map_err(unavailable)?;
        let token = self.pass_descriptor(theirs).await?;
        let mut request = self.client.lane_request();
        request.get().set_token(token);
        answered(request.send().promise).await?;
        *self.lane.borrow_mut() = Some(Rc::new(ours));
        Ok(())
    }

    /// Sends an execution ahead: it waits for [`Self::go`]. Whether it went.
    pub fn hold(&self, exec: ExecId, request: &ExecRequest, output_kept: u64) -> bool {
        self.say_exec(exec, request, output_kept, |call| call.init_hold()).is_some()
    }

    /// Lets the execution begin that was sent ahead. It begins when this returns; the future is that of [`Self::start`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn go(&self, exec: ExecId) -> impl Future<Output = Result<()>> + 'static {
        let lane = self.say(|mut call| {
            call.set_go(exec.0);
            Ok(())
        });
        self.let_it_run();
        let listener = Rc::clone(&self.listener);
        async move {
            match lane {
                Some(lane) => bounded(limits::WORKER_CALL, heard(lane, exec, listener)).await,
                None => {
                    // It waits for a word that it will not get.
                    listener.disconnected();
                    Err(Error::lost("the worker's lane has closed"))
                }
            }
        }
    }

    /// Takes back what was sent ahead: it does not run.
    pub fn withdraw(&self, exec: ExecId) {
        self.say(|mut call| {
            call.set_withdraw(exec.0);
            Ok(())
        });
    }

    /// Starts an execution on the lane; `None`: it has to be a call.
    pub(crate) fn start_on_lane(&self, exec: &WorkerExec) -> Option<impl Future<Output = Result<()>> + use<>> {
        let lane = self.say_exec(exec.exec, &exec.request, exec.output_kept, |call| call.init_start())?;
        self.let_it_run();
        let answer = heard(lane, exec.exec, Rc::clone(&self.listener));
        Some(async move { bounded(limits::WORKER_CALL, answer).await })
    }

    /// What a new worker was told to begin is what somebody waits for. Where the host kernel has put it on this thread's processor, beside one that
    /// is idle (virtual machines whose processors sleep), it would wait until this thread has nothing more to do.
    fn let_it_run(&self) {
        if !self.has_begun.replace(true) {
            std::thread::yield_now();
        }
    }

    /// Says something of an execution that fits a packet and has no input.
    fn say_exec(
        &self,
        id: ExecId,
        request: &ExecRequest,
        output_kept: u64,
        place: impl FnOnce(lane_call::Builder<'_>) -> exec::Builder<'_>,
    ) -> Option<Rc<Lane>> {
        let input = request.stdin_open || !request.stdin.is_empty();
        if input || request.memory_bytes() > limits::EXEC_CHANNEL_BYTES / 2 || self.lane.borrow().is_none() {
            return None;
        }
        let acknowledged = self.acknowledged.take();
        let said = self.say(|call| write_exec(place(call), id, request, output_kept, &acknowledged));
        if said.is_none() {
            self.acknowledged.borrow_mut().extend(acknowledged);
        }
        said
    }

    /// Sends a message, if it is small enough, there is a lane, and it can be written: why it cannot, the call tells.
    fn say(&self, write: impl FnOnce(lane_call::Builder<'_>) -> Result<()>) -> Option<Rc<Lane>> {
        let lane = self.lane.borrow().clone()?;
        let mut message = Builder::new_default();
        write(message.init_root::<lane_call::Builder<'_>>()).ok()?;
        match lane.send(&message) {
            Ok(sent) => sent.then_some(lane),
            Err(error) => {
                tracing::debug!(%error, "the lane to a worker closed");
                self.lane.take();
                None
            }
        }
    }
}

/// Waits for the answer to a start and tells the listener of the end, if the answer is that.
async fn heard(lane: Rc<Lane>, id: ExecId, listener: Rc<dyn WorkerListener>) -> Result<()> {
    loop {
        let (exec, said) = match poll_fn(|cx| lane.poll_message(cx, read_answer)).await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::debug!(%error, "the lane to a worker closed");
                // Without its answers the worker is of no use; usually it is gone anyway.
                listener.disconnected();
                return Err(Error::lost("the worker ended under the call"));
            }
        };
        match said {
            // The late answer to another.
            _ if exec != id => {}
            Said::Runs => return Ok(()),
            Said::Over(over) => {
                callbacks::tell_over(&*listener, id, over).await;
                return Ok(());
            }
            Said::Refused(text) => return Err(from_capnp(&capnp::Error::failed(text))),
        }
    }
}

fn read_answer(message: &Message<'_>) -> capnp::Result<(ExecId, Said)> {
    let answer = message.get_root::<lane_answer::Reader<'_>>()?;
    let said = match answer.which()? {
        lane_answer::Runs(()) => Said::Runs,
        lane_answer::Over(over) => Said::Over(Over::read(over.get_end()?, over.get_output()?)?),
        lane_answer::Refused(text) => Said::Refused(text?.to_string()?),
    };
    Ok((ExecId(answer.get_exec_id()), said))
}
