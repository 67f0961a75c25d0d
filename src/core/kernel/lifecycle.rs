//! A kernel's life as a pure state machine: `Life::step(event, now) -> actions`.
//!
//! ```text
//!  created ─▶ starting ─▶ ready ⇄ busy        crashed{cause} ─(back-off)─▶ starting
//!               ▲           │   │                    └─(three in a minute: breaker; asked, or used after the minute)
//!               │           ▼   ▼
//!               └─stopped ◀─ stopping           ready ─▶ suspended ─▶ starting, stopping; stopped if its worker ends
//!                    ├─▶ archived ─▶ stopped        (from created and crashed, too)
//!                    └─▶ departed                   (from created, crashed and archived, too)
//! ```
//!
//! Owns the decisions; the kernel's task performs the actions, persists, and feeds back the results. Never uses
//! workers, sockets or clocks: `now_ms` comes with the event. Late reports of a former worker carry its attempt number
//! and are ignored.

use serde::{Deserialize, Serialize};

use super::causes::{CrashCause, StopReason};
use crate::core::ids::{CheckpointId, Epoch, ExecId, HandoverId, HostId};
use crate::core::limits;

/// When a crashed kernel is restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Restart {
    /// Automatically, when the back-off ends at this time.
    At(i64),
    /// The breaker is open: at a client's request, or at the first use after this time.
    Breaker {
        /// Milliseconds since 1970.
        until_ms: i64,
    },
}

/// Lifecycle state of a kernel. Each state carries only its own valid data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum State {
    /// Created, never started.
    Created,
    /// A worker is being started.
    Starting,
    /// A worker waits for work.
    Ready,
    /// A worker runs this execution.
    Busy {
        /// The execution.
        exec: ExecId,
    },
    /// The worker received a stop.
    Stopping {
        /// Reason of the stop.
        reason: StopReason,
        /// The execution that it still runs, if it was busy.
        exec: Option<ExecId>,
    },
    /// The worker is paused between two executions and keeps its memory; the next use resumes it.
    Suspended,
    /// No worker; the next use starts one.
    Stopped {
        /// Reason of the stop.
        reason: StopReason,
    },
    /// The worker ended unexpectedly.
    Crashed {
        /// Cause of the end.
        cause: CrashCause,
        /// Time of the restart.
        restart: Restart,
    },
    /// Archived: files and engine state exist in the store only. No worker starts until the kernel is unarchived.
    Archived {
        /// The checkpoint that holds them.
        checkpoint: CheckpointId,
    },
    /// Moved to another host: history and checkpoints remain, nothing can run here.
    Departed {
        /// The host.
        host: HostId,
        /// The kernel's epoch there.
        epoch: Epoch,
        /// The handover that moved it.
        handover: HandoverId,
    },
}

impl State {
    /// Every public name, in the order of a kernel's life.
    pub const NAMES: [&str; 10] =
        ["created", "starting", "ready", "busy", "stopping", "suspended", "stopped", "crashed", "archived", "departed"];

    /// The running execution.
    pub const fn running(&self) -> Option<ExecId> {
        match self {
            State::Busy { exec } => Some(*exec),
            _ => None,
        }
    }

    /// The state's public name.
    pub const fn name(&self) -> &'static str {
        match self {
            State::Created => "created",
            State::Starting => "starting",
            State::Ready => "ready",
            State::Busy { .. } => "busy",
            State::Stopping { .. } => "stopping",
            State::Suspended => "suspended",
            State::Stopped { .. } => "stopped",
            State::Crashed { .. } => "crashed",
            State::Archived { .. } => "archived",
            State::Departed { .. } => "departed",
        }
    }

    /// Reason of the state; empty if the name suffices.
    pub fn reason(&self) -> String {
        match self {
            State::Created | State::Starting | State::Ready | State::Suspended => String::new(),
            State::Busy { exec } => format!("execution {exec}"),
            State::Stopping { reason, exec: Some(exec) } => format!("{}, after execution {exec}", reason.name()),
            State::Stopping { reason, exec: None } | State::Stopped { reason } => reason.name().to_owned(),
            State::Crashed { cause, restart: Restart::At(_) } => cause.to_string(),
            State::Crashed { cause, restart: Restart::Breaker { .. } } => format!("{cause}; circuit breaker open"),
            State::Archived { checkpoint } => format!("in checkpoint {}", checkpoint.short()),
            State::Departed { host, epoch, .. } => format!("to host {host}, epoch {}", epoch.0),
        }
    }

    /// The running execution named by a state's public name and [`State::reason`].
    pub fn execution_in(name: &str, reason: &str) -> Option<ExecId> {
        let number = match name {
            "busy" => reason.strip_prefix("execution ")?,
            "stopping" => reason.rsplit_once(", after execution ")?.1,
            _ => return None,
        };
        number.parse().ok().map(ExecId)
    }
}

/// An event in a kernel's life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Work waits for a worker: an execution, or a request for a variable.
    Used,
    /// A client requested a start; closes the breaker.
    StartAsked,
    /// The worker of this attempt is ready.
    WorkerReady {
        /// The attempt.
        attempt: u64,
    },
    /// A worker of a former daemon was adopted, with its running execution, if any.
    WorkerAdopted {
        /// The running execution.
        running: Option<ExecId>,
    },
    /// The paused worker of a former daemon was adopted.
    SuspendedAdopted,
    /// The worker is paused.
    Suspended,
    /// The worker of this attempt is gone, or could not be started.
    WorkerEnded {
        /// The attempt.
        attempt: u64,
        /// Cause of the end; ignored if the end was requested.
        cause: CrashCause,
    },
    /// The worker of this attempt was not started, although the kernel is healthy: no fault, so no crash.
    WorkerRefused {
        /// The attempt.
        attempt: u64,
        /// Reason of the refusal: [`StopReason::NoPlace`], [`StopReason::NotGiven`] or [`StopReason::MemoryKept`].
        why: StopReason,
    },
    /// The next queued execution was handed to the worker.
    ExecutionStarted {
        /// The execution.
        exec: ExecId,
    },
    /// The running execution ended.
    ExecutionEnded {
        /// The execution.
        exec: ExecId,
    },
    /// No client used the kernel for its idle time.
    IdleElapsed,
    /// The worker must stop.
    StopAsked {
        /// Reason of the stop.
        reason: StopReason,
        /// Whether to interrupt the running execution.
        force: bool,
    },
    /// The back-off ended.
    BackoffElapsed,
    /// This checkpoint holds the files and the state, and must become their only copy.
    ArchiveAsked {
        /// The checkpoint.
        checkpoint: CheckpointId,
    },
    /// Files and state are back in place.
    Unarchived,
    /// The kernel lives on another host from now on.
    DepartureCommitted {
        /// The host.
        host: HostId,
        /// The kernel's epoch there.
        epoch: Epoch,
        /// The handover that moved it.
        handover: HandoverId,
    },
}

/// An action for the supervisor, performed in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Start a worker; report it under this attempt.
    StartWorker {
        /// The attempt.
        attempt: u64,
    },
    /// Resume the paused worker; report it ready under this attempt.
    ResumeWorker {
        /// The attempt.
        attempt: u64,
    },
    /// Ask the worker to save and exit.
    StopWorker,
    /// Interrupt the running execution.
    Interrupt {
        /// The execution.
        exec: ExecId,
    },
    /// Journal the running execution as lost.
    EndAsLost {
        /// The execution.
        exec: ExecId,
        /// Cause of the worker's end.
        cause: CrashCause,
    },
    /// Fail all queued work: no worker starts soon.
    FailQueued {
        /// Cause of the failure.
        cause: CrashCause,
    },
    /// Hand the next queued item to the worker, if there is one.
    Dispatch,
    /// Start the idle clock.
    ArmIdle,
    /// Stop the idle clock.
    DisarmIdle,
    /// Report `BackoffElapsed` after this delay.
    ArmBackoff {
        /// Milliseconds.
        delay_ms: u64,
    },
    /// Publish the state change under this name.
    Publish(&'static str),
}

/// A kernel's lifecycle state and the data its decisions depend on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// Lifecycle state.
    pub state: State,
    /// Number of the latest worker.
    pub attempt: u64,
    /// Times of recent crashes, milliseconds since 1970; at most [`limits::BREAKER_CRASHES`].
    pub crashes: Vec<i64>,
}

impl Default for Life {
    fn default() -> Self {
        Life { state: State::Created, attempt: 0, crashes: Vec::new() }
    }
}

impl Life {
    /// The life after a daemon start that found no worker of the kernel.
    #[must_use]
    pub fn without_worker(self) -> Self {
        let state = match self.state {
            State::Created => State::Created,
            State::Stopped { reason } | State::Stopping { reason, .. } => State::Stopped { reason },
            State::Starting | State::Ready | State::Busy { .. } => State::Stopped { reason: StopReason::Daemon },
            State::Suspended => State::Stopped { reason: StopReason::Suspended },
            State::Crashed { cause, restart } => State::Crashed { cause, restart },
            State::Archived { checkpoint } => State::Archived { checkpoint },
            State::Departed { host, epoch, handover } => State::Departed { host, epoch, handover },
        };
        Life { state, ..self }
    }

    /// Whether a worker runs, is paused or is starting.
    pub const fn has_worker(&self) -> bool {
        match self.state {
            State::Starting | State::Ready | State::Busy { .. } | State::Stopping { .. } | State::Suspended => true,
            State::Created
            | State::Stopped { .. }
            | State::Crashed { .. }
            | State::Archived { .. }
            | State::Departed { .. } => false,
        }
    }

    /// Whether work would fail now because of the breaker.
    pub fn breaker_is_open(&self, now_ms: i64) -> bool {
        matches!(self.state, State::Crashed { restart: Restart::Breaker { until_ms }, .. } if now_ms < until_ms)
    }

    /// Applies an event; returns the actions. Total: an event without meaning in a state changes nothing.
    #[must_use]
    pub fn step(&mut self, event: Event, now_ms: i64) -> Vec<Action> {
        match event {
            Event::Used => self.used(now_ms),
            Event::StartAsked => self.start_asked(),
            Event::WorkerReady { attempt } => self.worker_ready(attempt),
            Event::WorkerAdopted { running } => self.worker_adopted(running),
            Event::SuspendedAdopted => {
                self.attempt += 1;
                self.state = State::Suspended;
                vec![Action::DisarmIdle, Action::Publish("kernel_adopted")]
            }
            Event::Suspended => match self.state {
                State::Ready => {
                    self.state = State::Suspended;
                    vec![Action::DisarmIdle, Action::Publish("kernel_suspended")]
                }
                _ => Vec::new(),
            },
            Event::WorkerEnded { attempt, cause } => self.worker_ended(attempt, cause, now_ms),
            Event::WorkerRefused { attempt, why } => self.worker_refused(attempt, why, now_ms),
            Event::ExecutionStarted { exec } => self.execution_started(exec),
            Event::ExecutionEnded { exec } => self.execution_ended(exec),
            Event::IdleElapsed => match self.state {
                State::Ready => self.stop(StopReason::Idle, None, false),
                _ => Vec::new(),
            },
            Event::StopAsked { reason, force } => self.stop_asked(reason, force),
            Event::BackoffElapsed => match self.state {
                State::Crashed { restart: Restart::At(_), .. } => self.start(),
                _ => Vec::new(),
            },
            Event::ArchiveAsked { checkpoint } => match self.state {
                State::Created | State::Stopped { .. } | State::Crashed { .. } => {
                    self.state = State::Archived { checkpoint };
                    self.crashes.clear();
                    vec![Action::Publish("kernel_archived")]
                }
                _ => Vec::new(),
            },
            Event::Unarchived => match self.state {
                State::Archived { .. } => {
                    self.state = State::Stopped { reason: StopReason::Asked };
                    vec![Action::Publish("kernel_unarchived")]
                }
                _ => Vec::new(),
            },
            Event::DepartureCommitted { host, epoch, handover } => match self.state {
                State::Created | State::Stopped { .. } | State::Crashed { .. } | State::Archived { .. } => {
                    self.state = State::Departed { host, epoch, handover };
                    self.crashes.clear();
                    vec![Action::Publish("kernel_departed")]
                }
                _ => Vec::new(),
            },
        }
    }

    fn start(&mut self) -> Vec<Action> {
        self.attempt += 1;
        self.state = State::Starting;
        vec![Action::StartWorker { attempt: self.attempt }, Action::Publish("kernel_starting")]
    }

    fn resume(&mut self) -> Vec<Action> {
        self.state = State::Starting;
        vec![Action::ResumeWorker { attempt: self.attempt }, Action::Publish("kernel_resuming")]
    }

    fn used(&mut self, now_ms: i64) -> Vec<Action> {
        match &self.state {
            State::Created | State::Stopped { .. } => self.start(),
            State::Ready => vec![Action::DisarmIdle, Action::Dispatch],
            State::Suspended => {
                self.forget_old_crashes(now_ms);
                self.resume()
            }
            State::Crashed { restart: Restart::Breaker { until_ms }, .. } if now_ms >= *until_ms => {
                self.crashes.clear();
                self.start()
            }
            State::Crashed { cause, restart: Restart::Breaker { .. } } => {
                vec![Action::FailQueued { cause: cause.clone() }]
            }
            State::Crashed { restart: Restart::At(_), .. }
            | State::Starting
            | State::Busy { .. }
            | State::Stopping { .. }
            | State::Archived { .. }
            | State::Departed { .. } => Vec::new(),
        }
    }

    fn start_asked(&mut self) -> Vec<Action> {
        match self.state {
            State::Created | State::Stopped { .. } => self.start(),
            State::Suspended => self.resume(),
            State::Crashed { .. } => {
                self.crashes.clear();
                self.start()
            }
            State::Starting
            | State::Ready
            | State::Busy { .. }
            | State::Stopping { .. }
            | State::Archived { .. }
            | State::Departed { .. } => Vec::new(),
        }
    }

    fn worker_ready(&mut self, attempt: u64) -> Vec<Action> {
        match self.state {
            State::Starting if attempt == self.attempt => {
                self.state = State::Ready;
                vec![Action::ArmIdle, Action::Publish("kernel_ready"), Action::Dispatch]
            }
            _ => Vec::new(),
        }
    }

    fn worker_adopted(&mut self, running: Option<ExecId>) -> Vec<Action> {
        self.attempt += 1;
        match running {
            Some(exec) => {
                self.state = State::Busy { exec };
                vec![Action::Publish("kernel_adopted")]
            }
            None => {
                self.state = State::Ready;
                vec![Action::ArmIdle, Action::Publish("kernel_adopted"), Action::Dispatch]
            }
        }
    }

    fn worker_refused(&mut self, attempt: u64, why: StopReason, now_ms: i64) -> Vec<Action> {
        match self.state {
            State::Starting if attempt == self.attempt => {
                self.state = State::Stopped { reason: why };
                vec![Action::DisarmIdle, Action::Publish("kernel_stopped")]
            }
            // A stop was requested meanwhile: there is no worker, as intended.
            _ => self.worker_ended(attempt, CrashCause::NotStarted(String::from(why.name())), now_ms),
        }
    }

    fn execution_started(&mut self, exec: ExecId) -> Vec<Action> {
        match self.state {
            State::Ready => {
                self.state = State::Busy { exec };
                vec![Action::DisarmIdle]
            }
            _ => Vec::new(),
        }
    }

    fn execution_ended(&mut self, ended: ExecId) -> Vec<Action> {
        match &mut self.state {
            State::Busy { exec } if *exec == ended => {
                self.state = State::Ready;
                vec![Action::ArmIdle, Action::Dispatch]
            }
            State::Stopping { exec, .. } if *exec == Some(ended) => {
                *exec = None;
                vec![Action::StopWorker]
            }
            _ => Vec::new(),
        }
    }

    fn stop_asked(&mut self, reason: StopReason, force: bool) -> Vec<Action> {
        match self.state {
            State::Ready => self.stop(reason, None, force),
            State::Busy { exec } => self.stop(reason, Some(exec), force),
            State::Starting => {
                // The starting worker belongs to a former attempt and is stopped when it reports.
                self.state = State::Stopping { reason, exec: None };
                vec![Action::StopWorker, Action::Publish("kernel_stopping")]
            }
            State::Suspended => {
                self.state = State::Stopping { reason, exec: None };
                let resume = Action::ResumeWorker { attempt: self.attempt };
                vec![Action::Publish("kernel_stopping"), resume, Action::StopWorker]
            }
            State::Stopping { exec: Some(exec), .. } if force => vec![Action::Interrupt { exec }],
            State::Crashed { .. } => {
                self.state = State::Stopped { reason };
                vec![Action::Publish("kernel_stopped")]
            }
            State::Created
            | State::Stopped { .. }
            | State::Stopping { .. }
            | State::Archived { .. }
            | State::Departed { .. } => Vec::new(),
        }
    }

    fn stop(&mut self, reason: StopReason, exec: Option<ExecId>, force: bool) -> Vec<Action> {
        self.state = State::Stopping { reason, exec };
        let mut actions = vec![Action::DisarmIdle, Action::Publish("kernel_stopping")];
        match exec {
            None => actions.push(Action::StopWorker),
            Some(exec) if force => actions.push(Action::Interrupt { exec }),
            Some(_) => {}
        }
        actions
    }

    fn worker_ended(&mut self, attempt: u64, cause: CrashCause, now_ms: i64) -> Vec<Action> {
        if attempt != self.attempt {
            return Vec::new();
        }
        let running = match &self.state {
            State::Created
            | State::Stopped { .. }
            | State::Crashed { .. }
            | State::Archived { .. }
            | State::Departed { .. } => return Vec::new(),
            State::Stopping { reason, exec } => {
                let (reason, exec) = (*reason, *exec);
                self.state = State::Stopped { reason };
                self.forget_old_crashes(now_ms);
                let mut actions: Vec<Action> = exec.map(|exec| Action::EndAsLost { exec, cause }).into_iter().collect();
                // Work queued meanwhile starts the next worker.
                actions.extend([Action::Publish("kernel_stopped"), Action::Dispatch]);
                return actions;
            }
            State::Suspended => {
                self.state = State::Stopped { reason: StopReason::Suspended };
                self.forget_old_crashes(now_ms);
                return vec![Action::Publish("kernel_stopped"), Action::Dispatch];
            }
            State::Starting | State::Ready => None,
            State::Busy { exec } => Some(*exec),
        };
        self.crashed(running, cause, now_ms)
    }

    fn forget_old_crashes(&mut self, now_ms: i64) {
        let window_ms = limits::BREAKER_WINDOW.as_millis() as i64;
        // A clock that went backwards must not keep old crashes for ever: both bounds apply.
        self.crashes.retain(|at| (now_ms - window_ms..=now_ms).contains(at));
    }

    fn crashed(&mut self, running: Option<ExecId>, cause: CrashCause, now_ms: i64) -> Vec<Action> {
        let window_ms = limits::BREAKER_WINDOW.as_millis() as i64;
        // A start that fails continues the count of the crash before it, however long it took.
        if self.state != State::Starting {
            self.forget_old_crashes(now_ms);
        }
        self.crashes.push(now_ms);
        let mut actions = vec![Action::DisarmIdle];
        if let Some(exec) = running {
            actions.push(Action::EndAsLost { exec, cause: cause.clone() });
        }
        actions.push(Action::Publish("kernel_crashed"));
        if self.crashes.len() >= limits::BREAKER_CRASHES {
            let until_ms = now_ms.saturating_add(window_ms);
            self.state = State::Crashed { cause: cause.clone(), restart: Restart::Breaker { until_ms } };
            actions.extend([Action::FailQueued { cause }, Action::Publish("kernel_breaker_opened")]);
        } else {
            let delay_ms = backoff_ms(self.crashes.len());
            self.state = State::Crashed { cause, restart: Restart::At(now_ms.saturating_add(delay_ms as i64)) };
            actions.push(Action::ArmBackoff { delay_ms });
        }
        actions
    }
}

/// Pause before the start that follows the `crashes`-th crash of a window.
fn backoff_ms(crashes: usize) -> u64 {
    let first = limits::RESTART_BACKOFF_FIRST.as_millis() as u64;
    let most = limits::RESTART_BACKOFF_MAX.as_millis() as u64;
    let doublings = u32::try_from(crashes.saturating_sub(1)).unwrap_or(u32::MAX).min(20);
    first.saturating_mul(1 << doublings).min(most)
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
