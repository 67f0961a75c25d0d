//! One execution. Dropping the client changes nothing: the execution goes on.

use std::rc::Rc;

use super::connection::{Link, answer, fields};
use super::feed::feed;
use crate::core::error::Result;
use crate::core::exec::{ExecResult, OutputEvent};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::rpc::convert::exec::read_exec_result;
use crate::rpc::schema::ryokan_capnp as wire;

/// A handle of one execution.
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

    /// Its number in the kernel.
    pub fn exec(&self) -> ExecId {
        self.exec
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// The daemon's. An execution that failed is a result, not an error.
    pub async fn result(&self) -> Result<ExecResult> {
        let response = self.link.wait(self.cap.result_request().send().promise).await?;
        answer(read_exec_result(fields(fields(response.get())?.get_result())?))
    }

    /// Gives `take` the output from byte `from` of both streams together, then live until the end. The execution goes on
    /// only as fast as `take` does. An error of `take` ends the delivery, not the execution.
    ///
    /// # Errors
    /// The daemon's and `take`'s.
    pub async fn output(&self, from: u64, mut take: impl AsyncFnMut(OutputEvent) -> Result<()>) -> Result<()> {
        let (inlet, feed) = feed::<(ExecId, OutputEvent)>();
        let mut request = self.cap.output_request();
        request.get().set_from(from);
        request.get().set_callback(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        feed.pump(&self.link, async { self.link.wait(call).await.map(drop) }, async |(_, event)| take(event).await)
            .await
    }

    /// Stops it. Waits behind input that the code has not read: then interrupt through the kernel.
    ///
    /// # Errors
    /// The daemon's.
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

    /// Ends standard input, after everything that was fed.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn close_stdin(&self) -> Result<()> {
        self.link.wait(self.cap.close_stdin_request().send().promise).await.map(drop)
    }
}
