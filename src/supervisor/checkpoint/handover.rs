//! The last checkpoint of a kernel before it moves: its code stays frozen until the move has succeeded or failed.

use std::rc::Rc;
use std::time::Instant;

use super::gather::gather_quiesced;
use super::queue_ticket;
use super::quiesce::Stop;
use super::take::seal;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType};
use crate::core::error::Result;
use crate::core::limits;
use crate::core::snapshot::PortableKind;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Change, Trace};

/// The begin of a pause.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pause {
    /// Before the freeze.
    pub begun: Instant,
    /// After the capture, before the objects and the checkpoint were stored.
    pub captured: Instant,
}

/// Takes a checkpoint between two executions, and runs `work` with it while the
/// kernel's code is frozen and nothing else starts. If `work` fails, the code resumes where it was; if it succeeds, the
/// worker must have ended.
///
/// # Errors
/// `deadline` if the kernel did not become idle, capture errors, and those of `work`: the kernel is unchanged.
pub(crate) async fn while_frozen<T, F>(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    (change, kind): (Change, PortableKind),
    work: impl FnOnce(Checkpoint, Pause) -> F + 'static,
) -> Result<T>
where
    T: 'static,
    F: Future<Output = Result<T>> + 'static,
{
    let (host, own, actor) = (Rc::clone(host), Rc::clone(kernel), change.actor.clone());
    let ticket = queue_ticket::Ticket::new(kernel);
    queue_ticket::take(ticket, Trace::Transition(change), limits::CHECKPOINT_WAIT, move |link| async move {
        let begun = Instant::now();
        // A daemon that is killed after the departure leaves no code that runs on here.
        let (gathering, still) = gather_quiesced(&host, &own, Some(&link), None, (kind, Stop::Suspend)).await?;
        let pause = Pause { begun, captured: Instant::now() };
        let taking = CheckpointRequest::new(CheckpointType::Auto, "teleport");
        let done = async {
            let (checkpoint, _) = seal(&host, &own, gathering.finish(&host).await?, &taking, &actor, None).await?;
            work(checkpoint, pause).await
        };
        let done = done.await;
        if done.is_err()
            && let Err(error) = still.end().await
        {
            // It may be stopped for ever; the kernel goes on with a new one.
            tracing::warn!(kernel = %own.spec().name, %error, "a worker did not resume after a failed move: it is ended");
            own.release_worker();
        }
        done
    })
    .await
}
