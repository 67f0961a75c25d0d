//! The source's end of a connection: one method per step of the protocol.

use std::time::Duration;

use super::transfer::{self, Sent};
use super::transport::Connection;
use super::wire::{Accept, Frame, Held, Message, Offer, bounded, unexpected};
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
    /// Time for a decision and its acknowledgement, whatever else the other host sends.
    pub(super) decision: Duration,
}

/// Bounds the whole time of a step.
async fn within<T>(most: Duration, step: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(most, step).await {
        Ok(done) => done,
        Err(_) => Err(Error::unavailable("the other host does not acknowledge in time").reason("connection")),
    }
}

impl Session {
    /// Greets the other host.
    ///
    /// # Errors
    /// `unavailable` if the transport fails, `unsupported` for another version of the protocol.
    pub async fn open(mut connection: Connection, own: HostId) -> Result<Session> {
        match connection.wire().greet(own).await {
            Ok(host) => Ok(Session { connection, host, sent: Sent::default(), decision: limits::HANDOVER_DECISION }),
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
        let wire = self.connection.wire();
        wire.send(Message::Offer(Box::new(offer))).await?;
        let answering = async {
            loop {
                match wire.message(limits::HANDOVER_FRAME).await? {
                    // It looks for what it has of the kernel's owner.
                    Message::Working => {}
                    Message::Accept(accept) => return Ok(accept),
                    other => return Err(unexpected(&other)),
                }
            }
        };
        within(limits::HANDOVER_STEP, answering).await
    }

    /// Sends the objects that the target lacks, at most `limit_rate` bytes a second (0: no limit); they are durable there
    /// when this returns.
    ///
    /// # Errors
    /// A missing object, and failures of the connection or the target.
    pub async fn transfer(
        &mut self,
        store: &StoreHandle,
        digests: &[Digest],
        limit_rate: u64,
        progress: &dyn Fn(Sent),
    ) -> Result<()> {
        let wire = self.connection.wire();
        match transfer::send(wire, store, digests, &mut self.sent, limit_rate, progress).await {
            Err(error) if error.reason == "connection" => Err(wire.refusal().await.unwrap_or(error)),
            sent => sent,
        }
    }

    /// Has the target write the files of a tree that was sent; returns when it has, or does so later.
    ///
    /// # Errors
    /// A lost connection.
    pub async fn preview(&mut self, tree: Digest) -> Result<()> {
        self.written(Message::Preview { tree }).await
    }

    /// The same with the engine state of a list that was sent.
    ///
    /// # Errors
    /// A lost connection.
    pub async fn preview_state(&mut self, list: Digest) -> Result<()> {
        self.written(Message::PreviewState { list }).await
    }

    async fn written(&mut self, preview: Message) -> Result<()> {
        self.connection.wire().send(preview).await?;
        match self.connection.wire().answer().await? {
            Message::Previewed => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Shortens the deadlines up to the decision: the kernel is held, and must not stand still for a connection that does.
    pub fn hold(&mut self, stall: Duration) {
        self.connection.wire().hold(Some(Held { stall, step: limits::HANDOVER_HELD }));
    }

    /// Sends the seal; returns when the target is prepared.
    ///
    /// # Errors
    /// The target's refusal, or a lost connection: the target may be prepared nevertheless.
    pub async fn seal(&mut self, description: Digest) -> Result<()> {
        self.connection.wire().send(Message::Seal { description }).await?;
        match self.connection.wire().answer().await? {
            Message::Prepared => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Sends the commit; returns when the kernel lives on the target.
    ///
    /// # Errors
    /// A lost connection, and failures of the target: the commit must be repeated.
    pub async fn commit(&mut self, handover: HandoverId, kernel: KernelId, epoch: Epoch) -> Result<()> {
        let wire = self.connection.wire();
        wire.hold(None);
        let committing = async {
            wire.send(Message::Commit { handover, kernel, epoch }).await?;
            match wire.message(limits::HANDOVER_STEP).await? {
                Message::Live => Ok(()),
                other => Err(unexpected(&other)),
            }
        };
        within(self.decision, committing).await
    }

    /// Sends the abort; returns when the target has deleted what it received.
    ///
    /// # Errors
    /// A lost connection, and failures of the target: the abort must be repeated.
    pub async fn abort(&mut self, handover: HandoverId) -> Result<()> {
        let wire = self.connection.wire();
        wire.hold(None);
        let aborting = async {
            wire.send(Message::Abort { handover }).await?;
            loop {
                // Answers to earlier steps of an interrupted transfer may precede this one.
                match wire.frame(limits::HANDOVER_STEP).await? {
                    Some(Frame::Message(Message::Aborted)) => return Ok(()),
                    Some(Frame::Message(Message::Refused { error })) if error.code == ErrorCode::Conflict => {
                        return Err(bounded(error));
                    }
                    Some(_) => {}
                    None => {
                        return Err(Error::unavailable("the other host closed the connection").reason("connection"));
                    }
                }
            }
        };
        within(self.decision, aborting).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::snapshot::PortableKind;
    use crate::teleport::wire::Wire;

    const KIND: PortableKind = PortableKind::Checkpoint;

    /// The two ends of a connection without a command.
    fn ends() -> (Connection, Wire) {
        let (near, far) = tokio::io::duplex(1 << 16);
        let ((near_read, near_write), (far_read, far_write)) = (tokio::io::split(near), tokio::io::split(far));
        (Connection::of(Wire::new(near_read, near_write)), Wire::new(far_read, far_write))
    }

    /// Each frame of the other host comes in time, but no acknowledgement.
    #[tokio::test]
    async fn decisions_are_bounded_in_time() {
        let (own, other) = (HostId::from_bytes([1; 16]), HostId::from_bytes([2; 16]));
        let (connection, mut far) = ends();
        let talks = async {
            far.greet(own).await.expect("a greeting");
            loop {
                far.send(Message::Flushed).await.expect("sent");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let decides = async {
            let mut session = Session::open(connection, other).await.expect("a session");
            session.decision = Duration::from_millis(100);
            let (handover, kernel) = (HandoverId::from_bytes([3; 16]), KernelId::from_bytes([4; 16]));
            let aborted = session.abort(handover).await.expect_err("no acknowledgement");
            assert_eq!((aborted.code, aborted.reason.as_str()), (ErrorCode::Unavailable, "connection"));
            // Any other answer ends a commit.
            assert!(session.commit(handover, kernel, Epoch(2)).await.is_err());
        };
        tokio::select! {
            () = talks => unreachable!("it talks for ever"),
            ended = tokio::time::timeout(Duration::from_secs(60), decides) => ended.expect("it ends"),
        }
    }

    /// A target that looks for what it has of a user's history.
    #[tokio::test]
    async fn reporting_admission_is_awaited() {
        let (connection, mut far) = ends();
        let answering = async {
            far.greet(HostId::from_bytes([1; 16])).await.expect("a greeting");
            far.message(Duration::from_secs(60)).await.expect("an offer");
            for _ in 0..3 {
                far.send(Message::Working).await.expect("sent");
            }
            let (missing, why) = (Vec::new(), String::new());
            let accept = Accept { missing, kind: KIND, why };
            far.send(Message::Accept(accept)).await.expect("sent");
            std::future::pending::<()>().await;
        };
        let offering = async {
            let mut session = Session::open(connection, HostId::from_bytes([2; 16])).await.expect("a session");
            let offer = crate::teleport::target::tests::offer(true);
            session.offer(offer).await
        };
        tokio::select! {
            () = answering => unreachable!("it waits"),
            accepted = offering => assert_eq!(accepted.expect("accepted").kind, KIND),
        }
    }

    /// Seals with short deadlines while the far end reports `reports` times, and then answers if `answers`.
    async fn sealed(stall_ms: u64, step_ms: u64, reports: u32, answers: bool) -> Result<()> {
        let (connection, mut far) = ends();
        let held = Held { stall: Duration::from_millis(stall_ms), step: Duration::from_millis(step_ms) };
        let answering = async {
            far.greet(HostId::from_bytes([1; 16])).await.expect("a greeting");
            far.message(Duration::from_secs(60)).await.expect("a seal");
            for _ in 0..reports {
                tokio::time::sleep(Duration::from_millis(5)).await;
                far.send(Message::Working).await.expect("sent");
            }
            if answers {
                far.send(Message::Prepared).await.expect("sent");
            }
            std::future::pending::<()>().await;
        };
        let sealing = async {
            let mut session = Session::open(connection, HostId::from_bytes([2; 16])).await.expect("a session");
            session.connection.wire().hold(Some(held));
            session.seal(Digest::from_bytes([3; 32])).await
        };
        tokio::select! {
            () = answering => unreachable!("it waits"),
            done = tokio::time::timeout(Duration::from_secs(60), sealing) => done.expect("it ends"),
        }
    }

    #[tokio::test]
    async fn held_kernel_outwaits_reports_only() {
        sealed(2_000, 60_000, 20, true).await.expect("a target that reports is awaited");
        for (stall, step, reports) in [(100, 60_000, 0), (100, 60_000, 5), (10_000, 100, 1_000_000)] {
            let error = sealed(stall, step, reports, false).await.expect_err("it is not awaited for ever");
            assert_eq!((error.code, error.reason.as_str()), (ErrorCode::Unavailable, "connection"), "{error}");
        }
    }
}
