//! Random kills of daemon, spawner, init and engine under a mixed load, against a model of everything acknowledged.
//!
//! `RYOKAN_KILLS` sets the number of kills per user, `RYOKAN_KILL_SEED` the first seed; a failure names its seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::error::{Error, ErrorCode, Result};
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::core::fork::Forking;
use ryokan::core::ids::ExecId;
use ryokan::rpc::client::{HostClient, KernelClient};

use super::{Bystander, children, inits, remove_all};
use crate::support::{Host, Random, User, kernel, users};

/// Kills of one user's daemon within the whole test suite.
const KILLS: u64 = 30;
/// Time within which a kernel must answer after a kill, on a loaded machine.
const STUCK: Duration = Duration::from_secs(300);

/// Variable and file of a kernel: each holds the number of the execution that wrote it last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Content {
    variable: u64,
    file: u64,
}

/// What the clients of one kernel know about it.
struct Model {
    name: String,
    engine: EngineName,
    /// Every content that the kernel may have; more than one only while an operation is in doubt.
    possible: BTreeSet<Content>,
    next: u64,
    executions: Vec<ExecId>,
    checkpoints: Vec<(String, Content)>,
    /// The content before the last operation, if that was a restore.
    undo_to: Option<Content>,
    /// A fork that may exist, and its content.
    child: Option<Content>,
    /// The last operation.
    operation: &'static str,
    /// Successes of each operation.
    done: BTreeMap<&'static str, u64>,
}

fn writing(engine: EngineName, number: u64) -> String {
    match engine {
        EngineName::Python => format!("n = {number}\nopen('f', 'w').write(str(n))"),
        EngineName::Node => format!("n = {number}; require('fs').writeFileSync('f', String(n))"),
        EngineName::Kaish | EngineName::Bash => format!("n={number}; echo {number} > f"),
    }
}

fn reading(engine: EngineName) -> &'static str {
    match engine {
        EngineName::Python => "print(n, open('f').read())",
        EngineName::Node => "console.log(n, require('fs').readFileSync('f', 'utf8'))",
        EngineName::Kaish | EngineName::Bash => "echo $n; cat f",
    }
}

impl Model {
    fn new(engine: EngineName) -> Model {
        Model {
            name: format!("k-{}", engine.name()),
            engine,
            possible: BTreeSet::from([Content { variable: 0, file: 0 }]),
            next: 1,
            executions: Vec::new(),
            checkpoints: Vec::new(),
            undo_to: None,
            child: None,
            operation: "none",
            done: BTreeMap::new(),
        }
    }

    fn child_name(&self) -> String {
        format!("{}-child", self.name)
    }

    fn now(&self) -> Content {
        *self.possible.first().expect("a kernel has a content")
    }

    fn acknowledge(&mut self, content: Content) {
        self.possible = BTreeSet::from([content]);
    }

    /// One random operation. An error leaves it in doubt.
    async fn operate(&mut self, client: &HostClient, random: &mut Random) -> Result<()> {
        let (k, _) = client.open_kernel(&self.name).await?;
        match random.below(12) {
            0 | 1 => self.checkpoint(&k).await,
            2 | 3 if !self.checkpoints.is_empty() => self.restore(&k, random).await,
            4 if self.undo_to.is_some() || !self.checkpoints.is_empty() => self.undo(&k, random).await,
            5 => self.fork(client, &k).await,
            6 => {
                self.operation = "archive and unarchive";
                k.archive(0).await?;
                k.unarchive(0).await.map(drop)
            }
            7 => {
                self.operation = "gc";
                client.gc(false, async |_| Ok(())).await.map(drop)
            }
            _ => self.execute(&k).await,
        }
    }

    async fn execute(&mut self, k: &KernelClient) -> Result<()> {
        self.operation = "execute";
        let (before, number) = (self.now(), self.next);
        self.next += 1;
        self.undo_to = None;
        let after = Content { variable: number, file: number };
        self.possible.extend([
            after,
            Content { variable: number, ..before },
            Content { file: number, ..before },
            // The file is created before it is written.
            Content { file: EMPTY, ..before },
        ]);
        let execution = k.run(&ExecRequest::code(writing(self.engine, number))).await?;
        let result = execution.result().await?;
        if result.end.status == ExecStatus::Done && result.end.code == 0 {
            self.executions.push(execution.exec());
            self.acknowledge(after);
            return Ok(());
        }
        Err(Error::new(ErrorCode::Lost, result.end.err))
    }

    async fn checkpoint(&mut self, k: &KernelClient) -> Result<()> {
        self.operation = "checkpoint";
        let content = self.now();
        let taken = k.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, "")).await?;
        self.checkpoints.push((taken.id.to_string(), content));
        Ok(())
    }

    async fn restore(&mut self, k: &KernelClient, random: &mut Random) -> Result<()> {
        self.operation = "restore";
        let chosen = random.below(self.checkpoints.len() as u64) as usize;
        let (id, content) = self.checkpoints[chosen].clone();
        let before = self.now();
        self.undo_to = None;
        self.possible.insert(content);
        k.restore_checkpoint(&id, 0).await?;
        self.acknowledge(content);
        self.undo_to = Some(before);
        Ok(())
    }

    /// Undoes the last restore, or one that it begins with.
    async fn undo(&mut self, k: &KernelClient, random: &mut Random) -> Result<()> {
        if self.undo_to.is_none() {
            self.restore(k, random).await?;
        }
        self.operation = "undo";
        let content = self.undo_to.take().expect("a restore is the last operation");
        self.possible.insert(content);
        k.undo(0).await?;
        self.acknowledge(content);
        Ok(())
    }

    async fn fork(&mut self, client: &HostClient, k: &KernelClient) -> Result<()> {
        self.operation = "fork";
        let content = self.now();
        self.child = Some(content);
        k.fork(&Forking::of(self.child_name())).await?;
        let (child, _) = client.open_kernel(&self.child_name()).await?;
        let seen = self.content_of(&child).await?;
        assert_eq!(seen, content, "{}: content of an acknowledged fork", self.name);
        client.remove_kernel(&self.child_name(), 0).await?;
        self.child = None;
        Ok(())
    }

    async fn content_of(&self, k: &KernelClient) -> Result<Content> {
        let result = k.run_to_end(&ExecRequest::code(reading(self.engine))).await?;
        if matches!(result.end.status, ExecStatus::Refused | ExecStatus::Lost) {
            return Err(Error::new(ErrorCode::Lost, result.end.err));
        }
        let text = String::from_utf8_lossy(&result.stdout).into_owned();
        let mut numbers = text.split_whitespace().map(|number| number.parse().expect("a number"));
        let variable = numbers.next().unwrap_or_else(|| panic!("{}: no content: {:?} {text:?}", self.name, result.end));
        Ok(Content { variable, file: numbers.next().unwrap_or(EMPTY) })
    }

    /// The content after a kill. A start that the kill hit is repeated; kills of one kernel in quick succession open
    /// its breaker, which `start` closes.
    async fn content_after_kill(&self, k: &KernelClient) -> Content {
        for _ in 0..3 {
            match self.content_of(k).await {
                Ok(content) => return content,
                Err(error) if error.reason == "circuit_breaker" => k.start().await.expect("started"),
                Err(error) if error.code == ErrorCode::Lost => {}
                Err(error) => panic!("{}: {error:?}", self.name),
            }
        }
        self.content_of(k).await.unwrap_or_else(|error| panic!("{}: {error:?}", self.name))
    }

    /// Checks the kernel against the model after a kill.
    async fn check(&mut self, client: &HostClient) {
        let (k, info) = client.open_kernel(&self.name).await.expect("the kernel exists");
        if info.state == "archived" {
            k.unarchive(0).await.expect("unarchived");
        }
        let content = self.content_after_kill(&k).await;
        assert!(self.possible.contains(&content), "{}: {content:?} is none of {:?}", self.name, self.possible);
        if content.file == EMPTY {
            // Makes the content readable for checkpoints.
            self.acknowledge(Content { file: 0, ..content });
            self.execute(&k).await.expect("executed");
        } else {
            self.acknowledge(content);
        }
        self.check_records(&k).await;
        self.check_child(client).await;
    }

    async fn check_records(&mut self, k: &KernelClient) {
        let mut seen = BTreeSet::new();
        k.each_journal_entry(0, 0, async |entry| {
            if entry.status == ExecStatus::Done.name() {
                seen.insert(entry.exec);
            }
            Ok(())
        })
        .await
        .expect("a journal");
        for exec in &self.executions {
            assert!(seen.contains(&exec.0), "{}: execution {exec} was acknowledged", self.name);
        }
        for (id, _) in &self.checkpoints {
            k.find_checkpoint(id).await.unwrap_or_else(|error| panic!("{}: checkpoint {id}: {error:?}", self.name));
        }
        // Retention applies to automatic checkpoints only.
        if self.checkpoints.len() > 8 {
            let (id, content) = self.checkpoints.remove(0);
            match k.remove_checkpoint(&id, 0).await {
                Ok(_) => {}
                Err(error) if error.reason == "in_use" => self.checkpoints.push((id, content)),
                Err(error) => panic!("{}: {error:?}", self.name),
            }
        }
    }

    async fn check_child(&mut self, client: &HostClient) {
        let Some(content) = self.child.take() else { return };
        match client.open_kernel(&self.child_name()).await {
            Ok((child, _)) => {
                let seen = self.content_after_kill(&child).await;
                assert_eq!(seen, content, "{}: a fork is whole or absent", self.name);
                client.remove_kernel(&self.child_name(), 0).await.expect("removed");
            }
            Err(error) => assert_eq!(error.code, ErrorCode::NotFound, "{error:?}"),
        }
    }
}

/// The content of a file that was created and not yet written.
const EMPTY: u64 = u64::MAX;

/// The process to kill.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Victim {
    Daemon,
    Spawner,
    Init,
    Engine,
}

impl Victim {
    fn random(random: &mut Random) -> Victim {
        match random.below(6) {
            0..=2 => Victim::Daemon,
            3 => Victim::Spawner,
            4 => Victim::Init,
            _ => Victim::Engine,
        }
    }

    fn pid(self, host: &Host, random: &mut Random) -> Option<u32> {
        let inits = inits(host);
        let mut init = || (!inits.is_empty()).then(|| inits[random.below(inits.len() as u64) as usize]);
        match self {
            Victim::Daemon => Some(host.pid() as u32),
            Victim::Spawner => host.spawner(),
            Victim::Init => init(),
            Victim::Engine => children(init()?).first().copied(),
        }
    }
}

/// Progress of one kill.
#[derive(Default)]
struct Phase {
    /// The signal is sent, or about to be.
    has_struck: AtomicBool,
    is_over: AtomicBool,
}

/// Operates on one kernel until something fails or the kill is over.
async fn load(model: &mut Model, client: &HostClient, mut random: Random, phase: &Phase) {
    while !phase.is_over.load(Ordering::SeqCst) {
        match tokio::time::timeout(STUCK, model.operate(client, &mut random)).await {
            Ok(Ok(())) => *model.done.entry(model.operation).or_default() += 1,
            Ok(Err(_)) if phase.has_struck.load(Ordering::SeqCst) => return,
            // Another kernel's client collects at the moment.
            Ok(Err(error)) if model.operation == "gc" && error.code == ErrorCode::Busy => {}
            Ok(Err(error)) => panic!("{}: {} failed before the kill: {error:?}", model.name, model.operation),
            Err(_) => {
                let info = client.list_kernels(&Default::default()).await;
                panic!("{}: {} is stuck: {info:#?}", model.name, model.operation);
            }
        }
    }
}

/// One kill under load; then everything acknowledged is checked.
fn round(host: &mut Host, models: &mut [Model], seed: u64) {
    let mut random = Random(seed);
    let victim = Victim::random(&mut random);
    let delay = Duration::from_millis(random.below(250));
    let phase = Phase::default();
    std::thread::scope(|scope| {
        let mut choice = Random(random.below(u64::MAX));
        let (host, phase) = (&*host, &phase);
        let (connected, begins) = std::sync::mpsc::channel();
        scope.spawn(move || {
            begins.recv().expect("a client is connected");
            std::thread::sleep(delay);
            let pid = victim.pid(host, &mut choice);
            phase.has_struck.store(true, Ordering::SeqCst);
            if let Some(pid) = pid {
                // It may have ended on its own.
                let _ =
                    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(30));
            phase.is_over.store(true, Ordering::SeqCst);
        });
        host.with(async |client| {
            connected.send(()).expect("the killer waits");
            let loads = models.iter_mut().map(|model| {
                let random = Random(random.below(u64::MAX));
                load(model, &client, random, phase)
            });
            futures::future::join_all(loads).await;
        });
    });
    if victim == Victim::Daemon {
        host.wait();
        host.launch();
    }
    host.with(async |client| {
        for model in models.iter_mut() {
            let checked = tokio::time::timeout(STUCK, model.check(&client)).await;
            checked.unwrap_or_else(|_| panic!("{} is stuck", model.name));
        }
        let report = client.verify(async |_| Ok(())).await.expect("verified");
        assert!(report.damaged == 0, "{report:?}");
        assert!(client.verify_audit(None).await.expect("read").is_ok(), "the audit log is broken");
        let names: BTreeSet<String> = client
            .list_kernels(&Default::default())
            .await
            .expect("kernels")
            .into_iter()
            .map(|info| info.spec.name.to_string())
            .collect();
        assert_eq!(names, models.iter().map(|model| model.name.clone()).collect(), "kernels");
    });
}

const OPERATIONS: [&str; 7] = ["execute", "checkpoint", "restore", "undo", "fork", "archive and unarchive", "gc"];

fn successes(models: &[Model], operation: &str) -> u64 {
    models.iter().filter_map(|model| model.done.get(operation)).sum()
}

fn kill_at_random(user: User, kills: u64, first_seed: u64) {
    let mut host = Host::start_as(user);
    let bystander = Bystander::new();
    let mut models: Vec<Model> = EngineName::ALL.into_iter().map(Model::new).collect();
    host.with(async |client| {
        for model in &mut models {
            kernel(&client, &model.name, model.engine).await;
            let (k, _) = client.open_kernel(&model.name).await.expect("opened");
            model.execute(&k).await.expect("executed");
            assert_eq!(model.possible.len(), 1, "the first execution is acknowledged");
        }
    });
    for seed in first_seed..first_seed + kills {
        let round = std::panic::AssertUnwindSafe(|| round(&mut host, &mut models, seed));
        if let Err(failure) = std::panic::catch_unwind(round) {
            eprintln!("seed {seed}, {user:?}:\n{}", host.log());
            std::panic::resume_unwind(failure);
        }
    }
    // Few kills on a busy machine may leave an operation out; without kills each succeeds.
    host.with(async |client| {
        let mut random = Random(first_seed);
        for _ in 0..200 {
            if OPERATIONS.iter().all(|operation| successes(&models, operation) > 0) {
                break;
            }
            let model = &mut models[0];
            model.operate(&client, &mut random).await.unwrap_or_else(|error| panic!("{}: {error:?}", model.operation));
            *model.done.entry(model.operation).or_default() += 1;
        }
    });
    bystander.check();
    remove_all(&host);
    for operation in OPERATIONS {
        assert!(successes(&models, operation) > 0, "{operation} never succeeded");
    }
    let acknowledged: usize = models.iter().map(|model| model.executions.len()).sum();
    println!("{user:?}: {kills} kills from seed {first_seed}, {acknowledged} acknowledged executions");
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn random_kills_lose_nothing() {
    for user in users() {
        kill_at_random(user, number("RYOKAN_KILLS").unwrap_or(KILLS), number("RYOKAN_KILL_SEED").unwrap_or(1));
    }
}
