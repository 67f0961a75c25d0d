//! Start-up is recovery: workers of a former daemon are adopted or ended, and every unfinished execution gets an end.
//!
//! ```text
//! workers in the catalog ─ attach ─▶ adopted: its executions go on, their output comes again from the beginning
//!                           └─fails─▶ ended (if it is still that very process), forgotten
//! executions without an end that no adopted worker knows ─▶ lost, in the journal
//! folders of kernels that the catalog does not know ─▶ removed
//! ```

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use futures::StreamExt as _;
use tokio::sync::mpsc;

use super::supervisor::Channel;
use crate::catalog::state::{EntryKind, NewEntry};
use crate::catalog::{KernelRow, WorkerRow, sweep_kernels};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::exec::ExecEnd;
use crate::core::ids::KernelId;
use crate::core::kernel::transition::{Decision, Kind, Record, Transition};
use crate::core::kernel::{CrashCause, Restart, State};
use crate::core::limits;
use crate::isolation::MachineCopy;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::execution::{Execution, NO_DAEMON};
use crate::supervisor::kernel::journal::{Loaded, Records, StateRecord};
use crate::supervisor::kernel::output::Kept;
use crate::supervisor::kernel::task::{Adopted, Listener};
use crate::supervisor::kernel::{Kernel, archive_steps};
use crate::supervisor::registry::Supervisor;
use crate::supervisor::workers::Workers;
use crate::supervisor::workers::admission::ResourceUse;
use crate::supervisor::workers::start::start_copied;
use crate::supervisor::workers::worker::KernelStart;

/// Number of kernels recovered concurrently.
const RECOVERED_AT_ONCE: usize = 64;

/// The result of recovery, for the log and `ryokan events`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Recovered {
    /// Kernels in the catalog.
    pub kernels: usize,
    /// Adopted workers.
    pub adopted: usize,
    /// Workers that were ended or had ended.
    pub ended: usize,
    /// Executions closed as lost.
    pub lost: usize,
    /// Kernels whose `state.db` is damaged.
    pub damaged: usize,
}

impl Supervisor {
    /// Brings back every kernel.
    ///
    /// # Errors
    /// Those of the catalog; a kernel's own damage concerns that kernel only.
    pub async fn recover(&self) -> Result<Recovered> {
        let host = self.host();
        // Of writes that a killed daemon began; without it they only take room.
        let _ = crate::sys::fs::sweep_temps(&host.environment.data);
        let prepared = self.recover_handovers().await?;
        let rows = host.catalog.kernels(None).await?;
        let known: HashSet<KernelId> =
            rows.iter().map(|row| row.id).chain(prepared.iter().flatten().copied()).collect();
        let mut done = Recovered { kernels: rows.len(), ..Recovered::default() };
        let mut workers: HashMap<KernelId, WorkerRow> = HashMap::new();
        let mut recorded = host.catalog.workers().await?;
        self.workers.take_reports();
        // Before any kernel gets a new worker.
        self.workers.sweep(&recorded.iter().map(|worker| worker.id).collect::<Vec<_>>());
        // A kernel may have rows of ended workers beside that of its live one.
        recorded.sort_by_cached_key(|worker| !self.workers.may_run(worker));
        for worker in recorded {
            if known.contains(&worker.kernel) && !workers.contains_key(&worker.kernel) {
                workers.insert(worker.kernel, worker);
            } else {
                self.workers.end_orphan(&worker).await;
                done.ended += 1;
            }
        }
        // Threads are recovered after the kernels whose workspace they share.
        let (threads, rows): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| row.thread_of.is_some());
        for rows in [rows, threads] {
            let recoveries: Vec<_> = rows
                .into_iter()
                .map(|row| {
                    let worker = workers.remove(&row.id);
                    self.recover_kernel(row, worker)
                })
                .collect();
            // Not all at once: the databases' queues are bounded.
            let mut recoveries = futures::stream::iter(recoveries).buffer_unordered(RECOVERED_AT_ONCE);
            while let Some(part) = recoveries.next().await {
                done.adopted += part.adopted;
                done.ended += part.ended;
                done.lost += part.lost;
                done.damaged += part.damaged;
            }
        }
        self.remove_all_ephemeral().await;
        match prepared {
            Some(_) => self.sweep(&known).await,
            None => tracing::warn!("leftover folders are kept: one may be a received kernel"),
        }
        host.prepared.sweep();
        crate::supervisor::workers::pool::run(&self.workers);
        crate::supervisor::workers::memory_pressure::run(&self.workers);
        self.await_arriving_groups().await?;
        self.start_handovers();
        host.events.publish("", "host_started", serde_json::json!(done));
        Ok(done)
    }

    /// Removes ephemeral kernels: no connection outlives a daemon.
    async fn remove_all_ephemeral(&self) {
        let mut ephemeral = self.kernels();
        ephemeral.retain(|kernel| kernel.spec().ephemeral);
        let gone = ephemeral.iter().map(|kernel| {
            self.remove_ephemeral(kernel, Actor { uid: kernel.uid, client: "ryokand".into(), lease: Vec::new() })
        });
        futures::stream::iter(gone).buffer_unordered(RECOVERED_AT_ONCE).collect::<Vec<()>>().await;
    }

    async fn sweep(&self, known: &HashSet<KernelId>) {
        let Some(kernels) =
            self.host().catalog.kernel_files(KernelId::from_bytes([0; 16])).dir.parent().map(|p| p.to_owned())
        else {
            return;
        };
        let known = known.clone();
        let swept = tokio::task::spawn_blocking(move || sweep_kernels(&kernels, &known)).await;
        match swept {
            Ok(Ok((gone, stuck))) => {
                for error in stuck {
                    tracing::warn!(%error, "a leftover folder could not be removed");
                }
                if !gone.is_empty() {
                    tracing::info!(folders = gone.len(), "removed folders of kernels that do not exist");
                }
            }
            Ok(Err(error)) => tracing::warn!(%error, "kernels' folders could not be swept"),
            Err(error) => tracing::warn!(%error, "kernels' folders could not be swept"),
        }
    }

    pub(crate) async fn recover_kernel(&self, row: KernelRow, worker: Option<WorkerRow>) -> Recovered {
        let host = self.host();
        let mut done = Recovered::default();
        let mut record: StateRecord = serde_json::from_str(&row.state_json).unwrap_or_default();
        let records = Records::new(row.id, row.epoch, &host.catalog, &host.store);
        let left = self.departed_with_group(&row);
        if let Some((state, _)) = &left {
            // Its group's decision is the kernel's, whatever is recorded here.
            record.life.state = state.clone();
            let saved = host.making_room(async || records.save_life(&record, row.last_used_at_ms).await).await;
            if let Err(error) = saved {
                tracing::error!(kernel = %row.spec.name, %error, "the departure with its group is recorded later");
            }
        }
        // An idle kernel has nothing open: its database stays closed until its next use.
        let at_rest = worker.is_none() && !record.life.has_worker();
        let homeless = row.thread_of.filter(|owner| self.get(*owner).is_none());
        let loaded = match homeless {
            Some(owner) => Err(Error::corrupt(format!("kernel {owner}, in whose workspace it works, is gone"))),
            None => load(&records).await,
        };
        let mut loaded = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                tracing::error!(kernel = %row.spec.name, %error, "the kernel's history is damaged");
                host.events.publish(
                    &host.event_name(row.uid, &row.spec.name),
                    "kernel_damaged",
                    serde_json::json!({ "error": error.message }),
                );
                done.damaged = 1;
                if let Some(worker) = worker {
                    self.workers.end_orphan(&worker).await;
                    done.ended = 1;
                }
                // What the catalog knows of a departure holds, whatever its record here says.
                if !matches!(record.life.state, State::Departed { .. }) {
                    record.life.state = damaged(&error);
                }
                let loaded = Loaded { damage: Some(error), ..Loaded::empty() };
                self.open(&row, record, loaded, |_| None);
                return done;
            }
        };
        if let (Some((_, by)), Some(found)) = (&left, &mut loaded.transition)
            && matches!(found.transition, Transition::HandoverOut { handover, .. } if handover == *by)
        {
            if found.decision == Decision::Open {
                let (kind, at_ms, text) = (EntryKind::Mark, host.now_ms(), String::from("moved with its group"));
                let entry = NewEntry { kind, at_ms, actor: found.actor.clone(), text, detail_json: String::new() };
                if let Err(error) = records.commit_transition(entry).await {
                    tracing::warn!(kernel = %row.spec.name, %error, "a departure has no entry in the journal");
                }
            }
            found.decision = Decision::Committed;
        }
        let has_departed = matches!(record.life.state, State::Departed { .. })
            || loaded.transition.as_ref().is_some_and(|found| {
                found.transition.kind() == Kind::HandoverOut && found.decision == Decision::Committed
            });
        let taken = match worker {
            Some(worker) if has_departed => {
                // The kernel lives on another host: this epoch has ended.
                self.workers.end_orphan(&worker).await;
                done.ended = 1;
                None
            }
            Some(worker) => match self.take_over(&row, &worker, &loaded, &records).await {
                Ok(taken) => {
                    done.adopted = 1;
                    Some(taken)
                }
                Err(error) => {
                    tracing::info!(kernel = %row.spec.name, %error, "its worker was not adopted");
                    self.workers.end_orphan(&worker).await;
                    done.ended = 1;
                    None
                }
            },
            None => None,
        };
        let alive: HashSet<_> =
            taken.iter().flat_map(|taken| taken.adopted.executions.iter().map(|(execution, _)| execution.id)).collect();
        let mut unclosed = Vec::new();
        for exec in std::mem::take(&mut loaded.running).into_iter().filter(|exec| !alive.contains(exec)) {
            let (end, at_ms) = (ExecEnd::lost(NO_DAEMON), host.now_ms());
            match host.making_room(async || records.end(exec, &end, &Kept::default(), at_ms).await).await {
                Ok(()) => done.lost += 1,
                Err(error) => {
                    tracing::error!(kernel = %row.spec.name, %exec, %error, "a lost execution could not be closed");
                    unclosed.push(exec);
                }
            }
        }
        // The kernel's task tries again.
        loaded.running = unclosed;
        if taken.is_none() {
            record.life = record.life.without_worker();
        }
        if let Some(transition) = loaded.transition.take() {
            record.life = archive_steps::life_after(&record.life, &transition, host.now_ms());
            // A restore, or a step that cannot be done now, is left to the kernel's task.
            if let Err(error) = self.carry_out(&records, &row, &record, &transition).await {
                tracing::info!(kernel = %row.spec.name, %error, "a transition awaits recovery");
                loaded.transition = Some(transition);
            }
        }
        if at_rest {
            records.close().await;
        }
        let worker_spec = record.worker_spec.take().filter(|_| taken.is_some());
        self.open(&row, record, loaded, |kernel| {
            kernel.worker_spec.replace(worker_spec.map(|spec| Rc::new(*spec)));
            taken.map(|taken| taken.bind(kernel))
        });
        done
    }

    /// Completes an interrupted archiving or unarchiving.
    async fn carry_out(
        &self,
        records: &Records,
        row: &KernelRow,
        state: &StateRecord,
        transition: &Record,
    ) -> Result<()> {
        let host = self.host();
        let save = async || records.save_life(state, row.last_used_at_ms).await;
        archive_steps::carry_out(host, records, transition, |_| Ok(()), save, true).await?;
        host.making_room(async || records.clear_transition().await).await
    }

    async fn take_over(
        &self,
        row: &KernelRow,
        worker: &WorkerRow,
        loaded: &Loaded,
        records: &Records,
    ) -> Result<TakenOver> {
        if worker.epoch != row.epoch {
            return Err(Error::refused("the worker is of an old epoch").reason("epoch"));
        }
        let record: StateRecord = serde_json::from_str(&row.state_json).unwrap_or_default();
        let (channel, listener) = self.channel(row, &record, loaded);
        let worker_limits = record.worker_spec.as_ref().map_or(row.spec.limits, |spec| spec.limits);
        let (admission, memory) = (&self.workers.admission, worker_limits.memory_bytes);
        let mut place = admission.place(memory);
        place.belongs(admission.share_anyway(row.uid, ResourceUse::one(memory)));
        let started = self.workers.adopt(place, worker, Rc::clone(&listener) as _).await?;
        let mut executions = Vec::new();
        for (exec, runs) in &started.report.executions {
            let asked = records.output_limit(*exec).await.unwrap_or(0);
            let keep = if asked == 0 { self.host().config.defaults.output_kept } else { asked };
            executions.push((Execution::adopted(*exec, keep.min(limits::OUTPUT_KEPT_MAX_BYTES)), *runs));
        }
        Ok(TakenOver { adopted: Adopted { started, executions }, channel, listener })
    }

    fn channel(&self, row: &KernelRow, record: &StateRecord, loaded: &Loaded) -> (Channel, Rc<Listener>) {
        let tools = self.tools(row, loaded.mcp.clone());
        let (reporter, reports) = mpsc::unbounded_channel();
        // The task will use this attempt number, the successor of the last.
        let listener = Rc::new(Listener::before_kernel(record.life.attempt + 1, reporter.clone(), Rc::clone(&tools)));
        (Channel { tools, reporter, reports }, listener)
    }

    /// Starts the worker of a kernel in creation in a copy of another kernel's machine. The kernel's task adopts it.
    ///
    /// # Errors
    /// Those of the start: the worker has ended then.
    pub(super) async fn start_copied(
        &self,
        row: &KernelRow,
        record: &StateRecord,
        loaded: &Loaded,
        machine: &MachineCopy,
    ) -> Result<TakenOver> {
        let (channel, listener) = self.channel(row, record, loaded);
        let origin = (loaded.origin.kind, loaded.origin.generation);
        let (id, epoch, uid, spec) = (row.id, row.epoch, row.uid, Rc::new(row.spec.clone()));
        let kernel = KernelStart { id, epoch, uid, spec, origin, workspace_of: None };
        let started = start_copied(&self.workers, &kernel, machine, Rc::clone(&listener) as _).await?;
        Ok(TakenOver { adopted: Adopted { started, executions: Vec::new() }, channel, listener })
    }
}

/// Loads the records. A busy database is tried again for a limited time, since it is not damaged.
async fn load(records: &Records) -> Result<Loaded> {
    let deadline = tokio::time::Instant::now() + limits::LOAD_RETRY;
    loop {
        match records.load().await {
            Err(error) if error.code == ErrorCode::Busy && tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(limits::RESTART_BACKOFF_FIRST).await;
            }
            loaded => return loaded,
        }
    }
}

fn damaged(error: &Error) -> State {
    let cause = CrashCause::NotStarted(error.message.clone());
    State::Crashed { cause, restart: Restart::Breaker { until_ms: i64::MAX } }
}

/// A worker that runs before its kernel's task exists.
pub(super) struct TakenOver {
    adopted: Adopted,
    channel: Channel,
    listener: Rc<Listener>,
}

impl TakenOver {
    /// Connects listener and kernel, so that further reports of the worker reach their executions.
    pub(super) fn bind(self, kernel: &Rc<Kernel>) -> (Adopted, Channel) {
        for (execution, _) in &self.adopted.executions {
            kernel.executions.borrow_mut().insert(execution.id, Rc::clone(execution));
        }
        self.listener.bind(kernel);
        (self.adopted, self.channel)
    }

    /// Ends the worker of a kernel that was not created.
    pub(super) async fn end(self, workers: &Workers) {
        workers.end(self.adopted.started.worker).await;
    }
}
