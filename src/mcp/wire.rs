//! A bounded transport between rmcp and a possibly hostile or broken server.
//!
//! rmcp starts a task for each request and notification of a server, and drops an overlong line
//! while its call waits. Here requests are answered one at a time before the next message is read,
//! notifications other than "tools changed" are dropped, and an overlong message or a server that
//! does not read ends the connection.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::BoxFuture;
use rmcp::RoleClient;
use rmcp::model::{ClientResult, ErrorCode, ErrorData, JsonRpcMessage, ServerNotification, ServerRequest};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

use super::limits;

/// The state of a connection, shared by its users.
#[derive(Debug, Default)]
pub(super) struct Health {
    why: Mutex<Option<String>>,
    /// Cancelled once the connection is unusable.
    pub(super) broken: CancellationToken,
    /// Signals that the server's tools changed.
    pub(super) tools_changed: Notify,
}

impl Health {
    /// Ends the connection; the first reason is kept.
    pub(super) fn fail(&self, why: impl Into<String>) {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| why.into());
        self.broken.cancel();
    }

    /// The reason of the end.
    pub(super) fn why(&self) -> Option<String> {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Why a message did not reach the server.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    /// Too many messages are waiting.
    #[error("the server is {} messages behind", limits::SENDS_IN_FLIGHT)]
    Behind,
    /// The server does not read.
    #[error("the server did not read its input within {0:?}")]
    Stuck(Duration),
    /// The connection has ended.
    #[error("the connection ended")]
    Ended,
    /// The transport's own error.
    #[error("{0}")]
    Transport(String),
}

/// A transport with bounds.
pub(super) struct Guarded<T: Transport<RoleClient>> {
    inner: T,
    health: Arc<Health>,
    sends: Arc<Semaphore>,
    /// The pending answer to a server's request; nothing is read before it is sent.
    reply: Option<BoxFuture<'static, Result<(), WireError>>>,
    send_within: Option<Duration>,
    fatal: fn(&T::Error) -> bool,
}

impl<T: Transport<RoleClient>> Guarded<T> {
    /// Wraps `inner`. `fatal` decides which send errors end the connection; `send_within` bounds a
    /// send unless a send lasts as long as its call.
    pub(super) fn new(
        inner: T,
        health: Arc<Health>,
        send_within: Option<Duration>,
        fatal: fn(&T::Error) -> bool,
    ) -> Self {
        let sends = Arc::new(Semaphore::new(limits::SENDS_IN_FLIGHT));
        Self { inner, health, sends, reply: None, send_within, fatal }
    }

    fn answer(&mut self, request: ServerRequest, id: rmcp::model::RequestId) {
        let answer = match request {
            ServerRequest::PingRequest(_) => TxJsonRpcMessage::<RoleClient>::response(ClientResult::empty(()), id),
            // We announce no capability, so a server has nothing else to request.
            _ => {
                let error = ErrorData::new(ErrorCode::METHOD_NOT_FOUND, "this client offers nothing to servers", None);
                TxJsonRpcMessage::<RoleClient>::error(error, Some(id))
            }
        };
        self.reply = Some(Box::pin(self.send(answer)));
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for Guarded<T> {
    type Error = WireError;

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), WireError>> + Send + 'static {
        let permit = Arc::clone(&self.sends).try_acquire_owned();
        let send = self.inner.send(item);
        let (health, within, fatal) = (Arc::clone(&self.health), self.send_within, self.fatal);
        async move {
            let _permit = permit.map_err(|_| WireError::Behind)?;
            let bounded = async {
                match within {
                    Some(within) => tokio::time::timeout(within, send).await.map_err(|_| WireError::Stuck(within)),
                    None => Ok(send.await),
                }
            };
            let sent = tokio::select! {
                sent = bounded => sent,
                () = health.broken.cancelled() => Err(WireError::Ended),
            };
            match sent {
                Ok(Ok(())) => Ok(()),
                Ok(Err(e)) => {
                    let text = chain(&e);
                    if fatal(&e) {
                        health.fail(text.clone());
                    }
                    Err(WireError::Transport(text))
                }
                Err(e) => {
                    if matches!(e, WireError::Stuck(_)) {
                        health.fail(e.to_string());
                    }
                    Err(e)
                }
            }
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        let broken = self.health.broken.clone();
        loop {
            if let Some(reply) = &mut self.reply {
                tokio::select! {
                    // The connection's health already records a send error.
                    _ = reply => self.reply = None,
                    () = broken.cancelled() => return None,
                }
            }
            let message = tokio::select! {
                message = self.inner.receive() => message,
                () = broken.cancelled() => return None,
            };
            match message {
                None => {
                    self.health.fail("closed the connection");
                    return None;
                }
                Some(JsonRpcMessage::Request(request)) => self.answer(request.request, request.id),
                Some(JsonRpcMessage::Notification(message)) => {
                    if matches!(message.notification, ServerNotification::ToolListChangedNotification(_)) {
                        self.health.tools_changed.notify_one();
                    }
                }
                Some(message @ (JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_))) => return Some(message),
            }
        }
    }

    async fn close(&mut self) -> Result<(), WireError> {
        self.reply = None;
        self.inner.close().await.map_err(|e| WireError::Transport(chain(&e)))
    }
}

/// An error with its causes, as one line.
pub(super) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    super::convert::printable(&text, limits::ERROR_BYTES)
}

/// Ends the stream at a line above the message limit.
pub(super) struct LineLimit<R> {
    inner: R,
    line_bytes: usize,
    max_bytes: usize,
    health: Arc<Health>,
}

impl<R> LineLimit<R> {
    /// Limits the lines of `inner`.
    pub(super) fn new(inner: R, max_bytes: usize, health: Arc<Health>) -> Self {
        Self { inner, line_bytes: 0, max_bytes, health }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for LineLimit<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        let new = &buf.filled()[before..];
        let first_line = new.iter().position(|byte| *byte == b'\n').unwrap_or(new.len());
        let last_line = new.iter().rev().position(|byte| *byte == b'\n');
        if self.line_bytes + first_line > self.max_bytes {
            self.health.fail(format!("sent a message of more than {} bytes", self.max_bytes));
            // Nothing was filled: this is the end of the stream.
            buf.set_filled(before);
            return Poll::Ready(Ok(()));
        }
        self.line_bytes = last_line.unwrap_or(self.line_bytes + new.len());
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    #[tokio::test]
    async fn overlong_line_ends_stream() {
        for (text, whole) in [
            ("0123456789\n0123456789\n", true),
            ("\n\n\n", true),
            ("0123456789a\n", false),
            ("01\n0123456789a", false),
            ("0123456789", true),
        ] {
            for step in 1..text.len() {
                let health = Arc::new(Health::default());
                let (mut writer, reader) = tokio::io::duplex(64);
                let mut limited = LineLimit::new(reader, 10, Arc::clone(&health));
                let write = async {
                    use tokio::io::AsyncWriteExt;
                    for chunk in text.as_bytes().chunks(step) {
                        writer.write_all(chunk).await.expect("open");
                        tokio::task::yield_now().await;
                    }
                    drop(writer);
                };
                let mut got = String::new();
                let (_, read) = tokio::join!(write, limited.read_to_string(&mut got));
                read.expect("readable");
                assert_eq!((got == text, health.why().is_none()), (whole, whole), "{text:?} by {step}");
            }
        }
    }
}
