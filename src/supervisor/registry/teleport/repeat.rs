//! Repeats the decision about an outgoing move until the target acknowledges it.
//!
//! Each target has its own task and its own pauses, so a target that does not answer delays no other.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Outgoing, read, settings};
use crate::catalog::HandoverRow;
use crate::core::error::{Error, Result};
use crate::core::handover::{Side, Source, SourceAction, SourceEvent};
use crate::core::limits;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::transition::Departure;
use crate::supervisor::registry::{Registry, Supervisor};
use crate::teleport::source::Session;
use crate::teleport::transport::{Transport, is_unreachable};

/// The next attempt at a target.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    pause: Duration,
    due: Instant,
    failures: usize,
    is_running: bool,
}

impl Attempt {
    fn first() -> Attempt {
        Attempt { pause: limits::HANDOVER_REPEAT_FIRST, due: Instant::now(), failures: 0, is_running: false }
    }

    fn failed(&mut self) {
        self.failures += 1;
        self.due = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(limits::HANDOVER_REPEAT_MAX);
    }
}

/// Repeats all decisions, with growing pauses, while the supervisor exists.
pub(super) fn run(supervisor: &Supervisor) {
    let (weak, registry) = (supervisor.downgrade(), Rc::downgrade(supervisor.registry()));
    tokio::task::spawn_local(async move {
        let mut attempts = HashMap::new();
        let mut running = JoinSet::new();
        loop {
            let Some(supervisor) = weak.upgrade() else { return };
            if supervisor.host().is_stopping() {
                return;
            }
            let due = start_due(&supervisor, &mut attempts, &mut running).await;
            drop(supervisor);
            let Some(registry) = registry.upgrade() else { return };
            wait(&registry, due, &mut attempts, &mut running).await;
        }
    });
}

/// Starts the attempts that are due; returns when the next one is.
async fn start_due(
    supervisor: &Supervisor,
    attempts: &mut HashMap<String, Attempt>,
    running: &mut JoinSet<(String, bool)>,
) -> Instant {
    let last = Instant::now() + limits::HANDOVER_REPEAT_MAX;
    let open = match open_rows(supervisor).await {
        Ok(open) => {
            let is_open = |id| open.values().flatten().any(|row: &HandoverRow| row.id == id);
            supervisor.registry().handovers.problems.borrow_mut().retain(|id, _| is_open(*id));
            open
        }
        Err(error) => {
            tracing::warn!(%error, "the records of moves could not be read");
            return Instant::now() + limits::HANDOVER_REPEAT_FIRST;
        }
    };
    attempts.retain(|to, attempt| attempt.is_running || open.contains_key(to));
    let mut waiting: Vec<(Instant, String, Vec<HandoverRow>)> = Vec::new();
    for (to, rows) in open {
        let attempt = attempts.entry(to.clone()).or_insert_with(Attempt::first);
        if !attempt.is_running {
            waiting.push((attempt.due, to, rows));
        }
    }
    // The longest wait first: a free place goes to no target twice while another waits.
    waiting.sort_by_key(|(due, ..)| *due);
    let (now, mut next) = (Instant::now(), last);
    for (due, to, mut rows) in waiting {
        if due > now {
            next = next.min(due);
            break;
        }
        if running.len() >= limits::HANDOVERS_CONCURRENT {
            break;
        }
        if let Some(attempt) = attempts.get_mut(&to) {
            attempt.is_running = true;
            // An attempt ends with the first decision that is not answered: another one is first next time.
            let first = attempt.failures % rows.len().max(1);
            rows.rotate_left(first);
        }
        let supervisor = supervisor.clone();
        running.spawn_local(async move {
            let is_open = deliver_to_one(&supervisor, &rows).await;
            (to, is_open)
        });
    }
    next
}

/// Waits for a new record, the end of an attempt or the next one's time.
async fn wait(
    registry: &Registry,
    due: Instant,
    attempts: &mut HashMap<String, Attempt>,
    running: &mut JoinSet<(String, bool)>,
) {
    tokio::select! {
        () = registry.handovers.wake.notified() => {
            attempts.retain(|_, attempt| attempt.is_running);
        }
        Some(ended) = running.join_next() => match ended {
            Ok((to, true)) => {
                let attempt = attempts.entry(to).or_insert_with(Attempt::first);
                attempt.is_running = false;
                attempt.failed();
            }
            Ok((to, false)) => {
                attempts.remove(&to);
            }
            Err(error) => {
                tracing::error!(%error, "an attempt to deliver decisions about moves ended");
                attempts.clear();
            }
        },
        () = tokio::time::sleep_until(due) => {}
    }
}

/// The decisions that wait for an acknowledgement, by target.
async fn open_rows(supervisor: &Supervisor) -> Result<BTreeMap<String, Vec<HandoverRow>>> {
    let mut open: BTreeMap<String, Vec<HandoverRow>> = BTreeMap::new();
    let handovers = &supervisor.registry().handovers;
    let kernels = supervisor.host().catalog.handovers().await?;
    for row in supervisor.group_rows().await?.into_iter().chain(kernels).filter(|row| row.side == Side::Out) {
        let is_active = handovers.active.borrow().values().any(|active| active.id == row.id)
            || handovers.convoys.borrow().contains_key(&row.id);
        // Its group's commit is that of the kernel.
        let is_of_group = handovers.departed.borrow().values().any(|departed| departed.handover == row.id);
        if is_active || is_of_group {
            continue;
        }
        match read::<Outgoing>(&row) {
            Ok(outgoing) => open.entry(outgoing.to).or_default().push(row),
            Err(error) => tracing::warn!(handover = %row.id, %error, "the record of a move is damaged"),
        }
    }
    Ok(open)
}

/// Delivers the decisions for one target; returns whether some are left.
async fn deliver_to_one(supervisor: &Supervisor, rows: &[HandoverRow]) -> bool {
    for row in rows {
        if let Err(error) = deliver(supervisor, row).await {
            tracing::info!(handover = %row.id, kernel = %row.kernel, %error, "a decision about a move is repeated later");
            // A target that cannot be reached is not tried for each kernel.
            if is_unreachable(&error) {
                return true;
            }
        }
    }
    let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
    match open_rows(supervisor).await {
        Ok(left) => left.values().flatten().any(|row| ids.contains(&row.id)),
        Err(_) => true,
    }
}

/// Delivers one decision over a new connection, and forgets the move once the target has acknowledged it.
pub(crate) async fn deliver(supervisor: &Supervisor, row: &HandoverRow) -> Result<()> {
    let delivered = match tokio::time::timeout(limits::HANDOVER_DECISION, deliver_now(supervisor, row)).await {
        Ok(done) => done,
        Err(_) => Err(Error::unavailable("the other host does not acknowledge in time").reason("connection")),
    };
    let mut problems = supervisor.registry().handovers.problems.borrow_mut();
    match &delivered {
        Ok(()) => drop(problems.remove(&row.id)),
        Err(error) => drop(problems.insert(row.id, bounded(error.message.clone()))),
    }
    drop(problems);
    delivered
}

/// Ends the record of a departure that failed: it may be in the database nevertheless, and a loss of the daemon would find
/// it there after the target deleted the kernel.
async fn end_failed_departure(supervisor: &Supervisor, row: &HandoverRow) -> Result<()> {
    let is_undecided = supervisor.departure(row) == Departure::Undecided;
    let Some(kernel) = supervisor.get(row.kernel).filter(|kernel| is_undecided && kernel.leaves_by(row.id)) else {
        return Ok(());
    };
    kernel.settle().await?;
    match kernel.leaves_by(row.id) {
        true => Err(Error::unavailable("the record of the failed departure has not ended").reason("departure")),
        false => Ok(()),
    }
}

async fn deliver_now(supervisor: &Supervisor, row: &HandoverRow) -> Result<()> {
    let host = supervisor.host();
    let outgoing: Outgoing = read(row)?;
    end_failed_departure(supervisor, row).await?;
    let has_departed = match supervisor.departure(row) {
        Departure::Decided => true,
        Departure::Undecided => false,
        // An abort would delete the only copy of a kernel that has departed.
        Departure::Unknown => return Err(super::unknown_departure(&outgoing.name)),
    };
    let (mut machine, _) = Source::restarted(has_departed);
    if has_departed {
        supervisor.check_kernels_left(row.id).await?;
    }
    if machine == Source::Departed {
        let kernel = supervisor.get(row.kernel);
        // The target acts on the commit: it must not be older than what a loss of power leaves here. The decision is in the
        // kernel's record until its consequences are in the catalog.
        let decided = kernel.as_ref().filter(|kernel| kernel.is_changing()).map(|kernel| kernel.id);
        host.sync_decision_again(decided).await?;
        if let Some(kernel) = kernel
            && let Err(error) = kernel.settle().await
        {
            tracing::warn!(kernel = %outgoing.name, %error, "the rest of a departure is left to recovery");
        }
    }
    let connection = Transport::parse(&outgoing.to)?.connect(&settings(host))?;
    let mut session = Session::open(connection, host.id()).await?;
    // Another host has nothing of the move, and would acknowledge that nothing is left of it.
    outgoing.check_target(session.host())?;
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
            match supervisor.forget_group_move(row.id).await? {
                true => {}
                false => host.making_room(async || Ok(host.catalog.forget_handover(row.id).await?)).await?,
            }
        }
    }
    Ok(())
}
