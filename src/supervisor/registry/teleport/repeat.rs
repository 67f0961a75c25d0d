//! Repeats the decision about an outgoing move until the target acknowledges it.

use super::{Outgoing, read};
use crate::catalog::HandoverRow;
use crate::core::error::Result;
use crate::core::handover::{Side, Source, SourceAction, SourceEvent};
use crate::core::limits;
use crate::supervisor::registry::Supervisor;
use crate::teleport::source::Session;
use crate::teleport::transport::Transport;

/// Repeats all decisions, with growing pauses, while the supervisor exists.
pub(super) fn run(supervisor: &Supervisor) {
    let (weak, registry) = (supervisor.downgrade(), std::rc::Rc::downgrade(supervisor.registry()));
    tokio::task::spawn_local(async move {
        let mut pause = limits::HANDOVER_REPEAT_FIRST;
        loop {
            let Some(supervisor) = weak.upgrade() else { return };
            if supervisor.host().is_stopping() {
                return;
            }
            let open = deliver_all(&supervisor).await;
            drop(supervisor);
            let Some(registry) = registry.upgrade() else { return };
            // With nothing to repeat, only a new record or the end of the supervisor matters.
            let wait = if open { pause } else { limits::HANDOVER_REPEAT_MAX };
            let woken = tokio::time::timeout(wait, registry.handovers.wake.notified()).await.is_ok();
            pause = if woken || !open {
                limits::HANDOVER_REPEAT_FIRST
            } else {
                (pause * 2).min(limits::HANDOVER_REPEAT_MAX)
            };
        }
    });
}

/// Delivers every decision; returns whether some are left.
async fn deliver_all(supervisor: &Supervisor) -> bool {
    let rows = match supervisor.host().catalog.handovers().await {
        Ok(rows) => rows,
        Err(error) => {
            tracing::warn!(%error, "the records of moves could not be read");
            return true;
        }
    };
    let mut is_open = false;
    for row in rows.into_iter().filter(|row| row.side == Side::Out) {
        let is_active = supervisor.registry().handovers.active.borrow().values().any(|(id, _)| *id == row.id);
        if is_active {
            continue;
        }
        if let Err(error) = deliver(supervisor, &row).await {
            tracing::info!(handover = %row.id, kernel = %row.kernel, %error, "a decision about a move is repeated later");
            is_open = true;
        }
    }
    is_open
}

/// Delivers one decision over a new connection, and forgets the move once the target has acknowledged it.
pub(super) async fn deliver(supervisor: &Supervisor, row: &HandoverRow) -> Result<()> {
    let outgoing: Outgoing = read(row)?;
    let connection = Transport::parse(&outgoing.to)?.connect()?;
    let mut session = Session::open(connection, supervisor.host().id()).await?;
    let (mut machine, _) = Source::restarted(supervisor.has_departed(row));
    for action in machine.step(SourceEvent::Reconnected) {
        let acknowledged = match action {
            SourceAction::SendCommit => {
                session.commit(row.id, row.kernel, outgoing.epoch).await?;
                SourceEvent::Live
            }
            SourceAction::SendAbort => {
                session.abort(row.id).await?;
                SourceEvent::Aborted
            }
            _ => continue,
        };
        if machine.step(acknowledged).contains(&SourceAction::Forget) {
            let host = supervisor.host();
            host.making_room(async || Ok(host.catalog.forget_handover(row.id).await?)).await?;
        }
    }
    Ok(())
}
