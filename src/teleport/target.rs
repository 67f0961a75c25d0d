//! The target's end of a connection: receives one kernel, and decisions about earlier ones.

use std::rc::Rc;
use std::time::Duration;

use async_trait::async_trait;

use super::silence::Silence;
use super::transfer::{Received, Receiving, Reuse};
use super::wire::{Accept, Frame, Message, Offer, Wire, bounded};
use crate::core::error::{Error, Result};
use crate::core::handover::{Target, TargetAction, TargetEvent};
use crate::core::ids::{Digest, Epoch, HandoverId, HostId, KernelId};
use crate::core::limits;
use crate::store::{GcGuard, StoreHandle};

/// Longest pause between two reports while an offer is checked: the source waits for each no longer than for a frame.
const ADMISSION_REPORT_MS: u64 = limits::HANDOVER_FRAME.as_millis() as u64 / 4;

/// The conditions under which an offer is accepted.
pub struct Admission {
    /// The answer.
    pub accept: Accept,
    /// The objects here that the source may refer to.
    pub reuse: Reuse,
    /// Bytes that may arrive.
    pub most_bytes: u64,
    /// Ends the session if another kernel needs its place.
    pub silence: Rc<Silence>,
}

/// The host's part of a handover: checks, and records that survive a restart.
#[async_trait(?Send)]
pub trait TargetHost {
    /// This host.
    fn host(&self) -> HostId;

    /// The store that receives the objects.
    fn store(&self) -> &StoreHandle;

    /// Checks an offer. Nothing is recorded.
    async fn admit(&self, source: HostId, offer: &Offer) -> Result<Admission>;

    /// Takes room for an object that arrives.
    ///
    /// # Errors
    /// `refused` if all kernels that arrive have no more room together.
    fn take_room(&self, handover: HandoverId, bytes: u64) -> Result<()>;

    /// Writes the files of a tree, before the rest arrives. A failure only costs time later.
    async fn preview(&self, offer: &Offer, received: &Received, tree: Digest);

    /// The same with a list of engine state. A later one replaces it.
    async fn preview_state(&self, offer: &Offer, received: &Received, list: Digest);

    /// Verifies everything that arrived, and durably records the prepared kernel.
    async fn prepare(&self, source: HostId, offer: &Offer, received: &Received, description: Digest) -> Result<()>;

    /// The session of an offer has ended, with so many bytes in the store that it did not have before.
    fn end_session(&self, handover: HandoverId, stored: u64, whole: Vec<Digest>);

    /// The recorded state of a handover, and whether the kernel lives or lived here at this epoch.
    async fn recorded(&self, handover: HandoverId, kernel: Option<(KernelId, Epoch)>) -> Result<Target>;

    /// Durably activates a prepared kernel, or completes its activation.
    async fn activate(&self, handover: HandoverId, kernel: Option<(KernelId, Epoch)>) -> Result<()>;

    /// Ends a session of this handover, if there is one, and deletes the prepared kernel.
    async fn discard(&self, handover: HandoverId) -> Result<()>;
}

/// A kernel that arrives on this connection.
struct Session<'a> {
    host: &'a dyn TargetHost,
    offer: Offer,
    receiving: Receiving,
    state: Target,
    has_preview: bool,
    state_previews: u32,
    silence: Rc<Silence>,
    /// Keeps what arrives, and what the source refers to, until the record of the prepared kernel names it.
    guard: Option<GcGuard>,
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.host.end_session(self.offer.handover, self.receiving.stored(), self.receiving.whole());
    }
}

/// Serves one connection until the source closes it.
///
/// # Errors
/// A violation of the protocol, a lost connection, a failed step. Nothing but prepared kernels remains.
pub async fn serve(mut wire: Wire, host: &dyn TargetHost) -> Result<()> {
    let mut session = None;
    let served = match wire.greet(host.host()).await {
        Ok(source) => frames(&mut wire, host, source, &mut session).await,
        Err(error) => Err(error),
    };
    if let Err(error) = &served {
        // The connection may be lost.
        let _ = wire.send(Message::Refused { error: error.clone() }).await;
    }
    served
}

async fn frames<'a>(
    wire: &mut Wire,
    host: &'a dyn TargetHost,
    source: HostId,
    session: &mut Option<Session<'a>>,
) -> Result<()> {
    let wrong =
        |what: &str| bounded(Error::corrupt(format!("the source host sent {what} out of order")).reason("protocol"));
    while let Some(frame) = next_frame(wire, session.as_ref()).await? {
        if let Some(session) = session.as_ref().filter(|_| frame.is_content()) {
            session.silence.broken();
        }
        match (frame, session.as_mut()) {
            (Frame::Question(digests), Some(session)) => {
                let bits = session.receiving.question(digests).await?;
                wire.write_frame(&Frame::Answer(bits)).await?;
                wire.flush().await?;
            }
            (Frame::ChunkQuestion(digests), Some(session)) => {
                let bits = session.receiving.chunk_question(digests).await?;
                wire.write_frame(&Frame::Answer(bits)).await?;
                wire.flush().await?;
            }
            (Frame::Object { digest, size }, Some(session)) => {
                session.receiving.check_object(digest, size)?;
                host.take_room(session.offer.handover, size)?;
                session.receiving.object(digest, size).await?;
            }
            (Frame::Chunk(chunk), Some(session)) => session.receiving.chunk(chunk).await?,
            (Frame::Piece(piece), Some(session)) => session.receiving.piece(piece).await?,
            (Frame::Message(Message::Flush { objects }), Some(session)) => {
                let report = session.offer.report_ms;
                reporting(wire, report, session.receiving.flush(objects)).await?;
                wire.send(Message::Flushed).await?;
            }
            (Frame::Message(Message::Offer(offer)), None) => {
                // A user's history may be large.
                let report = if offer.awaits_admission { offer.report_ms.clamp(1, ADMISSION_REPORT_MS) } else { 0 };
                match reporting(wire, report, admit(host, source, *offer)).await {
                    Ok((admitted, accept)) => {
                        *session = Some(admitted);
                        wire.send(Message::Accept(accept)).await?;
                    }
                    Err(error) => wire.send(Message::Refused { error }).await?,
                }
            }
            (Frame::Message(Message::Preview { tree }), Some(session)) if !session.has_preview => {
                session.has_preview = true;
                let writing = host.preview(&session.offer, session.receiving.received()?, tree);
                previewed(wire, session.offer.report_ms, writing).await?;
            }
            (Frame::Message(Message::PreviewState { list }), Some(session))
                if session.state_previews < limits::HANDOVER_ROUNDS =>
            {
                session.state_previews += 1;
                let writing = host.preview_state(&session.offer, session.receiving.received()?, list);
                previewed(wire, session.offer.report_ms, writing).await?;
            }
            (Frame::Message(Message::Seal { description }), Some(session)) => {
                seal(wire, host, source, session, description).await?;
            }
            (Frame::Message(Message::Commit { handover, kernel, epoch }), _) => {
                *session = None;
                let kernel = Some((kernel, epoch));
                let state = host.recorded(handover, kernel).await?;
                decide(wire, host, state, TargetEvent::Commit, (handover, kernel)).await?;
            }
            (Frame::Message(Message::Abort { handover }), _) => {
                *session = None;
                // Waits for a session of this handover on another connection.
                let state = match host.recorded(handover, None).await? {
                    Target::Gone => Target::Receiving,
                    state => state,
                };
                decide(wire, host, state, TargetEvent::Abort, (handover, None)).await?;
            }
            (Frame::Answer(_), _) => return Err(wrong("an answer")),
            (Frame::Message(message), _) => return Err(wrong(&format!("{message:?}"))),
            (other, None) => return Err(wrong(other.name())),
        }
    }
    Ok(())
}

/// The next frame. A session, which has room and keeps objects, does not wait for it as long as a connection alone.
async fn next_frame(wire: &mut Wire, session: Option<&Session<'_>>) -> Result<Option<Frame>> {
    match session {
        Some(session) => session.silence.during(wire.frame(limits::HANDOVER_SILENCE)).await,
        None => wire.frame(limits::HANDOVER_STEP).await,
    }
}

/// Performs a step, and reports meanwhile to a source that expects it. A connection that is lost ends no step.
async fn reporting<T>(wire: &mut Wire, report_ms: u64, step: impl Future<Output = Result<T>>) -> Result<T> {
    let pause = Duration::from_millis(report_ms).max(limits::HANDOVER_REPORT_MIN);
    let reports = async {
        if report_ms > 0 {
            loop {
                tokio::time::sleep(pause).await;
                if wire.send(Message::Working).await.is_err() {
                    break;
                }
            }
        }
        std::future::pending().await
    };
    tokio::select! {
        biased;
        done = step => done,
        () = reports => unreachable!("reports go on until the step ends"),
    }
}

/// Answers once what was previewed is written, or is known to be written later.
async fn previewed(wire: &mut Wire, report_ms: u64, writing: impl Future<Output = ()>) -> Result<()> {
    let writing = async {
        writing.await;
        Ok(())
    };
    reporting(wire, report_ms, writing).await?;
    wire.send(Message::Previewed).await
}

async fn admit<'a>(host: &'a dyn TargetHost, source: HostId, offer: Offer) -> Result<(Session<'a>, Accept)> {
    let guard = Some(host.store().run(|store| Ok(store.guard())).await?);
    let Admission { accept, reuse, most_bytes, silence } = host.admit(source, &offer).await?;
    let receiving = Receiving::new(host.store().clone(), reuse, most_bytes);
    let (state, has_preview, state_previews) = (Target::Receiving, false, 0);
    Ok((Session { host, offer, receiving, state, has_preview, state_previews, silence, guard }, accept))
}

async fn seal(
    wire: &mut Wire,
    host: &dyn TargetHost,
    source: HostId,
    session: &mut Session<'_>,
    description: Digest,
) -> Result<()> {
    if session.state != Target::Receiving {
        return Err(Error::corrupt("the source host sent a second seal").reason("protocol"));
    }
    for action in session.state.step(TargetEvent::Sealed) {
        match action {
            TargetAction::RecordPrepared => {
                let received = session.receiving.received()?;
                let preparing = host.prepare(source, &session.offer, received, description);
                reporting(wire, session.offer.report_ms, preparing).await?;
                session.guard = None;
            }
            TargetAction::SendPrepared => wire.send(Message::Prepared).await?,
            other => return Err(Error::internal(format!("{other:?} after a seal"))),
        }
    }
    Ok(())
}

/// Takes the source's decision.
async fn decide(
    wire: &mut Wire,
    host: &dyn TargetHost,
    mut state: Target,
    event: TargetEvent,
    (handover, kernel): (HandoverId, Option<(KernelId, Epoch)>),
) -> Result<()> {
    for action in state.step(event) {
        match action {
            TargetAction::Activate => host.activate(handover, kernel).await?,
            TargetAction::SendLive => wire.send(Message::Live).await?,
            TargetAction::Discard => host.discard(handover).await?,
            TargetAction::SendAborted => wire.send(Message::Aborted).await?,
            TargetAction::SendRefused => {
                let error = match state {
                    Target::Live => Error::conflict(format!("the kernel of handover {handover} lives here"))
                        .reason("resolved")
                        .hint("an operator resolved it; remove one of the two kernels"),
                    _ => Error::not_found(format!("handover {handover} is unknown here")).reason("unknown_handover"),
                };
                wire.send(Message::Refused { error }).await?;
            }
            TargetAction::RecordPrepared | TargetAction::SendPrepared => {
                return Err(Error::internal("a decision prepares nothing"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "target_tests.rs"]
pub(super) mod tests;
