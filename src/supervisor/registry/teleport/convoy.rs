//! The kernels of a group that moves: they wait for each other, and for the decision about all of them.

use std::cell::RefCell;
use std::rc::Rc;

use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::outgoing::Move;
use super::precopy::COPYING;
use crate::core::checkpoint::Checkpoint;
use crate::core::error::{Error, Result};
use crate::core::handover::{Convoy as Machine, MoveEvent, Next};
use crate::core::ids::{Epoch, HandoverId, KernelId};
use crate::core::limits;
use crate::supervisor::kernel::transition::ExclusiveTransition;
use crate::teleport::source::Session;

/// A kernel that is held, and prepared at the target.
#[derive(Debug, Clone)]
pub(crate) struct PreparedKernel {
    pub kernel: KernelId,
    pub handover: HandoverId,
    pub epoch: Epoch,
    /// Its state.
    pub checkpoint: Checkpoint,
}

/// The kernels of one group.
pub(crate) struct Convoy {
    machine: RefCell<Machine>,
    next: watch::Sender<Next>,
    prepared: RefCell<Vec<PreparedKernel>>,
    /// Ends the move before its decision.
    pub cancel: CancellationToken,
}

impl Convoy {
    /// A move of this number of kernels.
    pub fn new(kernels: usize, cancel: CancellationToken) -> Convoy {
        let machine = Machine::new(kernels);
        Convoy {
            next: watch::Sender::new(machine.next()),
            machine: machine.into(),
            prepared: RefCell::default(),
            cancel,
        }
    }

    /// Takes an event.
    pub fn take(&self, event: MoveEvent) -> Next {
        let next = self.machine.borrow_mut().step(event);
        self.next.send_replace(next);
        next
    }

    /// Waits until the move is so far, or has failed.
    ///
    /// # Errors
    /// `conflict` if it has failed.
    pub async fn reached(&self, is_so_far: impl Fn(Next) -> bool) -> Result<()> {
        let mut next = self.next.subscribe();
        let found =
            next.wait_for(|next| *next == Next::Stay || is_so_far(*next)).await.map_or(Next::Stay, |next| *next);
        match found {
            Next::Stay => {
                Err(Error::conflict("the move of the group ended; the kernel continues here").reason("cancelled"))
            }
            _ => Ok(()),
        }
    }

    /// A kernel is copied while it runs; returns when all are.
    ///
    /// # Errors
    /// As [`Self::reached`].
    pub async fn copied(&self) -> Result<()> {
        self.take(MoveEvent::Copied);
        self.reached(|next| next != Next::Wait).await
    }

    /// A kernel is prepared; returns when the group has moved.
    ///
    /// # Errors
    /// As [`Self::reached`].
    pub async fn prepared(&self, kernel: PreparedKernel) -> Result<()> {
        self.prepared.borrow_mut().push(kernel);
        self.take(MoveEvent::Prepared);
        self.reached(|next| next == Next::Depart).await
    }

    /// The kernels that are prepared.
    pub fn kernels(&self) -> Vec<PreparedKernel> {
        self.prepared.borrow().clone()
    }
}

impl Move {
    /// Waits, copied, for the other kernels of the group. What is stored meanwhile is sent: the target ends a silent session.
    pub(super) async fn await_others(&self, session: &mut Session, convoy: &Convoy) -> Result<()> {
        let copied = convoy.copied();
        tokio::pin!(copied);
        loop {
            tokio::select! {
                all = &mut copied => return all,
                () = tokio::time::sleep(limits::HANDOVER_SILENCE / 4) => {}
            }
            self.copy(session, COPYING).await.map(drop)?;
        }
    }

    /// Records the departure that its group's decision has made: the kernel is held until that has succeeded.
    pub(super) async fn depart_for_certain(
        &self,
        text: &str,
        transition: &Rc<ExclusiveTransition>,
        decided: oneshot::Sender<()>,
    ) -> Result<()> {
        loop {
            let (sender, synced) = oneshot::channel();
            let departed = self.kernel.depart(self.actor.clone(), text.to_owned(), Rc::clone(transition), sender).await;
            if self.kernel.has_departed(self.row.id) {
                if synced.await.is_ok() {
                    let _ = decided.send(());
                }
                return Ok(());
            }
            if let Err(error) = departed {
                tracing::error!(kernel = %self.kernel.spec().name, %error, "a departure with a group is tried again");
            }
            tokio::time::sleep(limits::HANDOVER_REPEAT_FIRST).await;
        }
    }
}
