//! The daemon's end of the execution channel: sends starts, receives their answers.
//!
//! Where the worker or the connector has no execution channel, and for messages too large for a
//! packet, a start is an ordinary call.

use std::future::poll_fn;
use std::rc::Rc;

use capnp::message::Builder;

use super::calls::{answered, bounded, write_exec};
use super::{WorkerExec, WorkerLink, WorkerListener};
use crate::core::error::{Error, Result};
use crate::core::exec::ExecRequest;
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::link::exec_channel::{self, ExecChannel, Message};
use crate::link::host::callbacks::{self, Over};
use crate::link::schema::worker_capnp::{exec, exec_channel_answer, exec_channel_call};
use crate::link::types::from_capnp;

/// A worker's answer to a start.
enum Said {
    Runs,
    Over(Over),
    Refused(String),
}

impl WorkerLink {
    /// Opens the execution channel, once. Without one, starts are ordinary calls.
    ///
    /// # Errors
    /// `Unavailable` without descriptors; the worker's errors.
    pub async fn open_exec_channel(&self) -> Result<()> {
        if self.exec_channel_requested.replace(true) || !self.passes_descriptors() {
            return Ok(());
        }
        let unavailable = |error| Error::unavailable(format!("an execution channel to the worker: {error}"));
        let (ours, theirs) = exec_channel::pair().map_err(unavailable)?;
        let token = self.pass_descriptor(theirs).await?;
        let mut request = self.client.exec_channel_request();
        request.get().set_token(token);
        answered(request.send().promise).await?;
        *self.exec_channel.borrow_mut() = Some(Rc::new(ours));
        Ok(())
    }

    /// Sends an execution that waits for [`Self::commit`]. Returns whether it was sent.
    pub fn prepare(&self, exec: ExecId, request: &ExecRequest, output_kept: u64) -> bool {
        self.say_exec(exec, request, output_kept, |call| call.init_prepare()).is_some()
    }

    /// Starts the prepared execution. The commit is sent when this returns; the future is that of
    /// [`Self::start`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn commit(&self, exec: ExecId) -> impl Future<Output = Result<()>> + 'static {
        let channel = self.say(|mut call| {
            call.set_commit(exec.0);
            Ok(())
        });
        self.let_it_run();
        let listener = Rc::clone(&self.listener);
        async move {
            match channel {
                Some(channel) => bounded(limits::WORKER_CALL, received(channel, exec, listener)).await,
                None => {
                    // Init would wait for a commit that can no longer be sent.
                    listener.disconnected();
                    Err(Error::lost("the worker's execution channel has closed"))
                }
            }
        }
    }

    /// Drops the prepared execution.
    pub fn abort(&self, exec: ExecId) {
        self.say(|mut call| {
            call.set_abort(exec.0);
            Ok(())
        });
    }

    /// Starts an execution over the execution channel; `None`: use an ordinary call.
    pub(crate) fn start_on_exec_channel(&self, exec: &WorkerExec) -> Option<impl Future<Output = Result<()>> + use<>> {
        let channel = self.say_exec(exec.exec, &exec.request, exec.output_kept, |call| call.init_start())?;
        self.let_it_run();
        let answer = received(channel, exec.exec, Rc::clone(&self.listener));
        Some(async move { bounded(limits::WORKER_CALL, answer).await })
    }

    /// Yields once after the first start. The host kernel may have queued the new worker on this
    /// thread's processor beside an idle one (virtual machines whose processors sleep); without the
    /// yield it would run only when this thread sleeps.
    fn let_it_run(&self) {
        if !self.has_begun.replace(true) {
            std::thread::yield_now();
        }
    }

    /// Sends a message about an execution without input that fits a packet.
    fn say_exec(
        &self,
        id: ExecId,
        request: &ExecRequest,
        output_kept: u64,
        place: impl FnOnce(exec_channel_call::Builder<'_>) -> exec::Builder<'_>,
    ) -> Option<Rc<ExecChannel>> {
        let input = request.stdin_open || !request.stdin.is_empty();
        if input || request.memory_bytes() > limits::EXEC_CHANNEL_BYTES / 2 || self.exec_channel.borrow().is_none() {
            return None;
        }
        let acknowledged = self.acknowledged.take();
        let said = self.say(|call| write_exec(place(call), id, request, output_kept, &acknowledged));
        if said.is_none() {
            self.acknowledged.borrow_mut().extend(acknowledged);
        }
        said
    }

    /// Sends a message if there is a channel and the message fits. On failure the ordinary call
    /// reports the error.
    fn say(&self, write: impl FnOnce(exec_channel_call::Builder<'_>) -> Result<()>) -> Option<Rc<ExecChannel>> {
        let channel = self.exec_channel.borrow().clone()?;
        let mut message = Builder::new_default();
        write(message.init_root::<exec_channel_call::Builder<'_>>()).ok()?;
        match channel.send(&message) {
            Ok(sent) => sent.then_some(channel),
            Err(error) => {
                tracing::debug!(%error, "the execution channel to a worker closed");
                self.exec_channel.take();
                None
            }
        }
    }
}

/// Awaits the answer to a start, and reports the end to the listener if the answer contains it.
async fn received(channel: Rc<ExecChannel>, id: ExecId, listener: Rc<dyn WorkerListener>) -> Result<()> {
    loop {
        let (exec, said) = match poll_fn(|cx| channel.poll_message(cx, read_answer)).await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::debug!(%error, "the execution channel to a worker closed");
                // Without its answers the worker is useless; usually it has ended anyway.
                listener.disconnected();
                return Err(Error::lost("the worker ended during the call"));
            }
        };
        match said {
            // A late answer to another start.
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
    let answer = message.get_root::<exec_channel_answer::Reader<'_>>()?;
    let said = match answer.which()? {
        exec_channel_answer::Runs(()) => Said::Runs,
        exec_channel_answer::Over(over) => Said::Over(Over::read(over.get_end()?, over.get_output()?)?),
        exec_channel_answer::Refused(text) => Said::Refused(text?.to_string()?),
    };
    Ok((ExecId(answer.get_exec_id()), said))
}
