//! The source's end of a connection: one method per step of the protocol.

use super::transfer::{self, Sent};
use super::transport::Connection;
use super::wire::{Accept, Message, Offer};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::{Digest, Epoch, HandoverId, HostId, KernelId};
use crate::core::limits;
use crate::store::StoreHandle;

/// A connection to a target.
pub struct Session {
    connection: Connection,
    host: HostId,
    /// Totals of all transfers.
    pub sent: Sent,
}

fn unexpected(message: &Message) -> Error {
    Error::corrupt(format!("the other host answered {message:?}")).reason("protocol")
}

impl Session {
    /// Greets the other host.
    ///
    /// # Errors
    /// `unavailable` if the transport fails, `unsupported` for another version of the protocol.
    pub async fn open(mut connection: Connection, own: HostId) -> Result<Session> {
        match connection.wire().greet(own).await {
            Ok(host) => Ok(Session { connection, host, sent: Sent::default() }),
            Err(error) => Err(connection.explain(error).await),
        }
    }

    /// The other host.
    pub fn host(&self) -> HostId {
        self.host
    }

    /// Offers a kernel.
    ///
    /// # Errors
    /// The target's refusal; the target keeps nothing then.
    pub async fn offer(&mut self, offer: Offer) -> Result<Accept> {
        self.connection.wire().send(Message::Offer(Box::new(offer))).await?;
        match self.connection.wire().message(limits::HANDOVER_FRAME).await? {
            Message::Accept(accept) => Ok(accept),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends the objects that the target lacks; they are durable there when this returns.
    ///
    /// # Errors
    /// A missing object, and failures of the connection or the target.
    pub async fn transfer(&mut self, store: &StoreHandle, digests: &[Digest], progress: &dyn Fn(u64)) -> Result<()> {
        transfer::send(self.connection.wire(), store, digests, &mut self.sent, progress).await
    }

    /// Sends the seal; returns when the target is prepared.
    ///
    /// # Errors
    /// The target's refusal, or a lost connection: the target may be prepared nevertheless.
    pub async fn seal(&mut self, description: Digest) -> Result<()> {
        self.connection.wire().send(Message::Seal { description }).await?;
        match self.connection.wire().message(limits::HANDOVER_STEP).await? {
            Message::Prepared => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends the commit; returns when the kernel lives on the target.
    ///
    /// # Errors
    /// A lost connection, and failures of the target: the commit must be repeated.
    pub async fn commit(&mut self, handover: HandoverId, kernel: KernelId, epoch: Epoch) -> Result<()> {
        self.connection.wire().send(Message::Commit { handover, kernel, epoch }).await?;
        match self.connection.wire().message(limits::HANDOVER_STEP).await? {
            Message::Live => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends the abort; returns when the target has deleted what it received.
    ///
    /// # Errors
    /// A lost connection, and failures of the target: the abort must be repeated.
    pub async fn abort(&mut self, handover: HandoverId) -> Result<()> {
        self.connection.wire().send(Message::Abort { handover }).await?;
        loop {
            // Answers to earlier steps of an interrupted transfer may precede this one.
            match self.connection.wire().frame(limits::HANDOVER_STEP).await? {
                Some(super::wire::Frame::Message(Message::Aborted)) => return Ok(()),
                Some(super::wire::Frame::Message(Message::Refused { error })) if error.code == ErrorCode::Conflict => {
                    return Err(error);
                }
                Some(_) => {}
                None => return Err(Error::unavailable("the other host closed the connection").reason("connection")),
            }
        }
    }
}
