//! Executes the model's actions on the daemon: each is one task, whose answer is an input of the
//! model.
//!
//! Tasks end with the connection that they use; answers of a lost connection are discarded.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::model::{Action, Deed, Input, Inspection, Look, Question};
use crate::cli::context::CLIENT;
use crate::core::checkpoint::{CheckpointRequest, CheckpointType};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::{ExecId, KernelId};
use crate::core::info::{HostInfo, JournalEntry, KernelFilter};
use crate::rpc::client::{HostClient, JournalSeen, KernelClient};

/// How long an attempt to connect may take.
const CONNECT: Duration = Duration::from_secs(3);
/// Time without an answer after which the connection counts as lost.
const ANSWER: Duration = Duration::from_secs(30);
/// Kernels queried in parallel.
const AT_ONCE: usize = 8;
/// Journal entries shown.
const ENTRIES: u64 = 30;
/// Answers that wait for the model.
const WAITING: usize = 256;

/// The connection and its pending tasks.
pub struct Asker {
    socket: PathBuf,
    host: Option<Rc<HostClient>>,
    tasks: JoinSet<()>,
    answers: mpsc::Sender<Input>,
    waiting: mpsc::Receiver<Input>,
}

impl Asker {
    /// Starts to follow the events of a connected daemon.
    pub fn new(socket: PathBuf, host: HostClient) -> Asker {
        let (answers, waiting) = mpsc::channel(WAITING);
        let mut asker = Asker { socket, host: None, tasks: JoinSet::new(), answers, waiting };
        asker.attach(host, 0);
        asker
    }

    /// Switches to this connection, with events after number `since`.
    fn attach(&mut self, host: HostClient, since: u64) {
        let host = Rc::new(host);
        let (answers, followed) = (self.answers.clone(), Rc::clone(&host));
        self.tasks.spawn_local(async move {
            if let Err(error) = follow(&followed, since, &answers).await {
                let _ = answers.send(Input::Lost(error.message)).await;
            }
        });
        self.host = Some(host);
    }

    /// The next answer.
    pub async fn answer(&mut self) -> Input {
        // `self` holds a sender, so the channel does not end.
        let Some(input) = self.waiting.recv().await else { return std::future::pending().await };
        if matches!(input, Input::Lost(_)) {
            self.let_go();
        }
        input
    }

    fn let_go(&mut self) {
        self.host = None;
        self.tasks = JoinSet::new();
        // Discard the remaining answers of the old connection.
        while self.waiting.try_recv().is_ok() {}
    }

    /// Tries to reach a daemon.
    pub async fn connect(socket: PathBuf) -> Result<HostClient> {
        HostClient::connect_within(&socket, CLIENT, CONNECT).await
    }

    /// The daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.socket.clone()
    }

    /// Switches to a new connection, with events after number `since`, and returns its host.
    pub fn connected(&mut self, host: HostClient, since: u64) -> HostInfo {
        let info = host.info().clone();
        self.attach(host, since);
        info
    }

    /// Starts an action. Ignores actions that do not concern the daemon.
    pub fn ask(&mut self, action: Action) {
        let Some(host) = self.host.clone() else { return };
        let answers = self.answers.clone();
        // Drop completed tasks.
        while self.tasks.try_join_next().is_some() {}
        self.tasks.spawn_local(async move {
            let input = match action {
                Action::List => timely(host.list_kernels(&KernelFilter::default()))
                    .await
                    .map_or_else(|error| failed(Question::List, error), Input::Listed),
                Action::Pools => {
                    timely(host.pools()).await.map_or_else(|error| failed(Question::Pools, error), Input::PoolsTold)
                }
                Action::Look { kernels, with_usage } => {
                    timely(look(&host, kernels, with_usage)).await.unwrap_or_else(|error| failed(Question::Look, error))
                }
                Action::Inspect(id) => match timely(inspect(&host, id)).await {
                    Err(error) if is_lost(&error) => Input::Lost(error.message),
                    found => Input::Inspected(id, found),
                },
                Action::Do(id, deed) => match perform(&host, id, &deed).await {
                    Err(error) if is_lost(&error) => Input::Lost(error.message),
                    result => Input::Done { id, deed, result },
                },
                Action::Connect | Action::Suspend | Action::Redraw | Action::Quit => return,
            };
            let _ = answers.send(input).await;
        });
    }
}

/// Whether an error means a lost connection. Other errors concern the request alone.
fn is_lost(error: &Error) -> bool {
    (error.code == ErrorCode::Unavailable && error.reason.is_empty()) || error.code == ErrorCode::Deadline
}

fn failed(question: Question, error: Error) -> Input {
    if is_lost(&error) { Input::Lost(error.message) } else { Input::Failed(question, error) }
}

async fn timely<T>(answer: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Err(Error::deadline(format!("the daemon gave no answer in {ANSWER:?}")));
    tokio::time::timeout(ANSWER, answer).await.unwrap_or_else(late)
}

async fn follow(host: &HostClient, since: u64, answers: &mpsc::Sender<Input>) -> Result<()> {
    let mut events = host.events(since).await?;
    let gone = |_| Error::unavailable("the receiver of events has ended");
    while let Some(event) = events.next_past().await? {
        answers.send(Input::Happened { event, past: true }).await.map_err(gone)?;
    }
    answers.send(Input::CaughtUp).await.map_err(gone)?;
    loop {
        let event = events.next().await?;
        answers.send(Input::Happened { event, past: false }).await.map_err(gone)?;
    }
}

async fn look(host: &HostClient, kernels: Vec<String>, with_usage: bool) -> Result<Input> {
    let each = kernels.into_iter().map(|name| async move {
        let looked = look_at(host, &name, with_usage).await;
        (name, looked)
    });
    let mut answers = futures::stream::iter(each).buffer_unordered(AT_ONCE);
    let (mut looks, mut gone) = (Vec::new(), Vec::new());
    while let Some((name, looked)) = answers.next().await {
        match looked {
            Ok(look) => looks.push(look),
            Err(error) if error.code == ErrorCode::NotFound => gone.push(name),
            Err(error) => return Err(error),
        }
    }
    Ok(Input::Looked { looks, gone })
}

async fn look_at(host: &HostClient, name: &str, with_usage: bool) -> Result<Look> {
    let (kernel, info) = host.open_kernel(name).await?;
    let jobs = kernel.jobs().await?.len();
    let info = if with_usage { kernel.info().await? } else { info };
    Ok(Look { info, with_usage, jobs })
}

async fn inspect(host: &HostClient, id: KernelId) -> Result<Inspection> {
    let (kernel, info) = host.open_kernel(&id.to_string()).await?;
    let mut journal = Vec::new();
    // The version is one more than the newest entry's number, and numbers have no gaps.
    let since = info.version.saturating_sub(ENTRIES + 1);
    let take = async |entry: JournalEntry| {
        journal.push(entry);
        Ok(())
    };
    kernel.each_entry_seen(JournalSeen::Compacted, since, 0, take).await?;
    let more = journal.len().saturating_sub(ENTRIES as usize);
    Ok(Inspection { jobs: kernel.jobs().await?, journal: journal.split_off(more) })
}

async fn perform(host: &HostClient, id: KernelId, deed: &Deed) -> Result<String> {
    // By id: a new kernel may have the same name meanwhile.
    let (kernel, info) = host.open_kernel(&id.to_string()).await?;
    match deed {
        Deed::Start => kernel.start().await.map(|()| "started".into()),
        Deed::Stop { force } => {
            // Must precede the stop, which ends the engine that knows them.
            let missed = kernel.missed().await.unwrap_or_default();
            kernel.stop(*force).await?;
            let missed: Vec<String> = missed.iter().map(|entry| format!("{} ({})", entry.key, entry.reason)).collect();
            Ok(match missed.is_empty() {
                true => "stopped".into(),
                false => format!("stopped; not kept: {}", missed.join(", ")),
            })
        }
        Deed::Checkpoint(name) => {
            let request = CheckpointRequest::new(CheckpointType::Manual, name);
            let checkpoint = kernel.checkpoint(&request).await?;
            Ok(format!("checkpoint {} {}", checkpoint.short_id(), checkpoint.name).trim_end().to_owned())
        }
        Deed::Interrupt => interrupt(&kernel, info.version).await,
    }
}

/// Interrupts the running execution; the next queued one then runs.
async fn interrupt(kernel: &KernelClient, version: u64) -> Result<String> {
    // The running execution is usually among the newest entries; behind a long queue it is further
    // back.
    for newest in [64, 4096, u64::MAX] {
        let since = version.saturating_sub(newest);
        let mut running = Vec::new();
        let take = async |entry: JournalEntry| {
            if entry.status == "running" && entry.exec > 0 {
                running.push(ExecId(entry.exec));
            }
            Ok(())
        };
        kernel.each_journal_entry(since, 0, take).await?;
        for exec in &running {
            kernel.interrupt_execution(*exec).await?;
        }
        if !running.is_empty() {
            let names: Vec<String> = running.iter().map(|exec| format!("#{exec}")).collect();
            return Ok(format!("execution {} was interrupted", names.join(", ")));
        }
        if since == 0 {
            break;
        }
    }
    Ok("nothing runs".into())
}
