//! One execution. Dropping the client does not stop it.

use std::rc::Rc;

use super::connection::{Link, answer, fields};
use super::feed::feed;
use crate::core::error::Result;
use crate::core::exec::{ExecResult, OutputEvent};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::rpc::convert::exec::read_exec_result;
use crate::rpc::schema::ryokan_capnp as wire;

/// A handle to one execution.
#[derive(Clone)]
pub struct ExecutionClient {
    cap: wire::execution::Client,
    exec: ExecId,
    link: Rc<Link>,
}

impl ExecutionClient {
    pub(super) fn new(cap: wire::execution::Client, exec: ExecId, link: Rc<Link>) -> Self {
        ExecutionClient { cap, exec, link }
    }

    /// The execution's number in its kernel.
    pub fn exec(&self) -> ExecId {
        self.exec
    }

    /// Waits for the execution's end.
    ///
    /// # Errors
    /// The daemon's errors. A failed execution is a result, not an error.
    pub async fn result(&self) -> Result<ExecResult> {
        let response = self.link.wait(self.cap.result_request().send().promise).await?;
        answer(read_exec_result(fields(fields(response.get())?.get_result())?))
    }

    /// Passes the output from byte `from` of both streams together to `take`, live until the end.
    ///
    /// A slow `take` slows the execution. An error of `take` ends the delivery, not the execution.
    ///
    /// # Errors
    /// The errors of the daemon and of `take`.
    pub async fn output(&self, from: u64, mut take: impl AsyncFnMut(OutputEvent) -> Result<()>) -> Result<()> {
        let (inlet, feed) = feed::<(ExecId, OutputEvent)>();
        let mut request = self.cap.output_request();
        request.get().set_from(from);
        request.get().set_callback(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        feed.pump(&self.link, async { self.link.wait(call).await.map(drop) }, async |(_, event)| take(event).await)
            .await
    }

    /// Stops the execution.
    ///
    /// The call queues behind input that the code has not read;
    /// [`KernelClient::interrupt_execution`](super::KernelClient::interrupt_execution) does not.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn cancel(&self) -> Result<()> {
        self.link.call(self.cap.cancel_request().send().promise).await.map(drop)
    }

    /// Feeds standard input, in order; returns when the daemon is ready for more.
    ///
    /// # Errors
    /// `refused` if the request did not leave its input open.
    pub async fn stdin(&self, data: &[u8]) -> Result<()> {
        for chunk in data.chunks(limits::CHUNK_BYTES) {
            let mut request = self.cap.stdin_request();
            request.get().set_data(chunk);
            self.link.wait(request.send()).await?;
        }
        Ok(())
    }

    /// Ends standard input, after all earlier data.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn close_stdin(&self) -> Result<()> {
        self.link.wait(self.cap.close_stdin_request().send().promise).await.map(drop)
    }
}
