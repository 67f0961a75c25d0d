//! Checkpoints and restores of a kernel through the public interface, compared with other tools on
//! the same files.

mod files;
pub mod keepers;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::core::fork::Forking;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::rpc::convert::spec::SpecRequest;
use ryokan::session::Session as _;

use self::files::Size;
use self::keepers::Kept;
use crate::daemon::{create, run};
use crate::report::{Report, Samples, Target};
use crate::{Daemon, World, process};

const TOUCHED: usize = 10;
/// Longest pause that counts as none for the code inside, seconds.
const PAUSE: f64 = 0.0015;

/// 10,000 files of 500 MB.
pub fn ten_thousand(world: &World, report: &mut Report) -> anyhow::Result<()> {
    measure(world, report, if world.quick { files::QUICK } else { files::TEN_THOUSAND })
}

/// 100,000 files of 500 MB.
pub fn hundred_thousand(world: &World, report: &mut Report) -> anyhow::Result<()> {
    if world.quick {
        return Ok(());
    }
    measure(world, report, files::HUNDRED_THOUSAND)
}

/// Medians of one kernel, milliseconds.
struct Ours {
    first: f64,
    again: f64,
    back: f64,
    fork: f64,
    bytes: u64,
}

fn measure(world: &World, report: &mut Report, size: Size) -> anyhow::Result<()> {
    let base = std::env::var_os("RYOKAN_BENCH_DIR").map_or_else(std::env::temp_dir, Into::into);
    let dir = tempfile::Builder::new().prefix("rbc").tempdir_in(base)?;
    let source = dir.path().join("source");
    let bytes = files::make(&source, size)?;
    report.figure(&format!("{}: their bytes", size.name), bytes as f64 / 1e6, "MB", None);
    let ours = ours(world, report, size, &source)?;
    if world.alone {
        return Ok(());
    }
    let mut all: Vec<Kept> = Vec::new();
    keepers::all(size, &source, dir.path(), world.times(5, 2) as u64, &mut |kept| {
        tell(report, size, &ours, &kept);
        all.push(kept);
    })?;
    against(report, size, &ours, &all);
    Ok(())
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

fn tell(report: &mut Report, size: Size, ours: &Ours, kept: &Kept) {
    let what = |what: &str| format!("{}: {}: {what}", size.name, kept.name);
    if let Some(lacks) = &kept.lacks {
        report.figure(&what("not measured"), f64::NAN, "", None);
        return report.note(lacks.clone());
    }
    let ratio = |theirs: f64, ours: f64| format!("{:.1} times ours", theirs / ours);
    if let Some(first) = kept.first {
        report.figure(&what("first"), seconds(first), "s", None);
        report.note(ratio(seconds(first) * 1e3, ours.first));
    }
    report.times(&what("after 10 files were touched"), &kept.again, None);
    report.note(ratio(kept.again.p50(), ours.again));
    report.times(&what("back, after 10 files were touched"), &kept.back, None);
    report.note(format!("{}; {}", ratio(kept.back.p50(), ours.back), kept.note));
    match kept.bytes {
        Some(bytes) => {
            report.figure(&what("size after the first"), bytes as f64 / 1e6, "MB", None);
            report.note(ratio(bytes as f64, ours.bytes as f64));
        }
        None => report.note("it shares blocks with the folder: no size of its own"),
    }
}

/// Ratios to tools made for backups.
fn against(report: &mut Report, size: Size, ours: &Ours, all: &[Kept]) {
    let made_for_it = |name: &str| matches!(name, "restic" | "borg");
    let measured: Vec<&Kept> = all.iter().filter(|kept| kept.lacks.is_none() && made_for_it(kept.name)).collect();
    let least = |of: &dyn Fn(&Kept) -> f64| measured.iter().map(|kept| of(kept)).fold(f64::INFINITY, f64::min);
    for copied in all.iter().filter(|kept| kept.lacks.is_none() && kept.name.starts_with("cp ")) {
        let what = format!("{}: {} ÷ fork", size.name, copied.name);
        report.figure(&what, copied.again.p50() / ours.fork, "", Some(Target::AtLeast(5.0)));
    }
    if measured.is_empty() {
        return;
    }
    let first = least(&|kept| kept.first.map_or(f64::INFINITY, |first| seconds(first) * 1e3));
    let again = least(&|kept| kept.again.p50());
    let bytes = least(&|kept| kept.bytes.map_or(f64::INFINITY, |bytes| bytes as f64));
    let what = |what: &str| format!("{}: {what}", size.name);
    report.figure(
        &what("first: the faster of restic and borg ÷ ours"),
        first / ours.first,
        "",
        Some(Target::AtLeast(1.0)),
    );
    report.figure(&what("after 10: the faster of them ÷ ours"), again / ours.again, "", Some(Target::AtLeast(40.0)));
    let faster = measured.iter().filter(|kept| kept.first.is_some()).min_by_key(|kept| kept.first);
    if let Some((name, theirs)) = faster.and_then(|kept| Some((kept.name, kept.bytes?))) {
        let ratio = ours.bytes as f64 / theirs as f64;
        report.figure(&what("size: ours ÷ the faster one's"), ratio, "", Some(Target::AtMost(1.0)));
        report.note(name);
    }
    report.figure(&what("size: ours ÷ the smaller of them"), ours.bytes as f64 / bytes, "", None);
}

fn ours(world: &World, report: &mut Report, size: Size, source: &Path) -> anyhow::Result<Ours> {
    let daemon = Daemon::start(world)?;
    let store = daemon.data().join("store");
    daemon.with(async |host| {
        let mut spec = SpecRequest::new("k".parse()?);
        spec.engine = Some(EngineName::Python);
        spec.from_dir = Some(source.to_owned());
        spec.idle_timeout_ms = Some(0);
        let (kernel, _) = host.create_kernel(&spec, "").await?;
        run(&kernel, TOUCH).await?;
        nix::unistd::sync();
        let what = |what: &str| format!("{}: {what}", size.name);
        let begun = Instant::now();
        checkpoint(&kernel, "first").await?;
        let first = begun.elapsed();
        let bytes = files::on_disk(&store);
        report.figure(&what("first checkpoint"), seconds(first), "s", None);
        let pause = daemon_pauses(&host, 1).await?.pop().unwrap_or_default();
        report.figure(&what("first checkpoint: pause"), pause, "ms", Some(Target::AtMost(10.0)));
        report.note("as the daemon tells it");
        report.figure(&what("size of the store after it"), bytes as f64 / 1e6, "MB", None);
        report.figure(&what("daemon after it, RSS"), process::rss_mib(daemon.pid()), "MiB", None);
        let mut rounds = Rounds::default();
        for round in 0..world.times(30, 5) as u64 {
            rounds.one(&kernel, size, round).await?;
        }
        let (again, back) = (rounds.taken.p50(), rounds.back.p50());
        report.times(&what("checkpoint, 10 files touched"), &rounds.taken, Some(Target::AtMost(25.0)));
        report.times(&what("checkpoint, nothing touched"), &rounds.idle, None);
        report.times(&what("restore, 10 files touched"), &rounds.back, Some(Target::AtMost(25.0)));
        report.times(&what("undo of it"), &rounds.undone, None);
        report.times(&what("diff to now, 10 files touched"), &rounds.compared, None);
        pauses(world, report, size, &host, &kernel).await?;
        let fork = forks(world, report, size, &host, &kernel, &daemon.data().join("prepared")).await?;
        report.figure(&what("daemon in the end, RSS"), process::rss_mib(daemon.pid()), "MiB", None);
        report.figure(&what("size of the store in the end"), files::on_disk(&store) as f64 / 1e6, "MB", None);
        Ok(Ours { first: seconds(first) * 1e3, again, back, fork, bytes })
    })
}

/// Code inside the kernel that touches files.
const TOUCH: &str = "def touch(paths, line):\n    for path in paths:\n        with open(path, 'a') as file:\n            file.write(line)\n";

async fn touch(kernel: &KernelClient, size: Size, round: u64) -> anyhow::Result<()> {
    let paths: Vec<String> =
        files::touched(size, round, TOUCHED).into_iter().map(|n| files::path(n).display().to_string()).collect();
    run(kernel, &format!("touch({paths:?}, 'one line more in round {round}\\n')")).await.map(drop)
}

async fn checkpoint(kernel: &KernelClient, name: &str) -> anyhow::Result<()> {
    kernel.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, name)).await?;
    Ok(())
}

#[derive(Default)]
struct Rounds {
    taken: Samples,
    idle: Samples,
    compared: Samples,
    back: Samples,
    undone: Samples,
}

impl Rounds {
    async fn one(&mut self, kernel: &KernelClient, size: Size, round: u64) -> anyhow::Result<()> {
        crate::go_on()?;
        let name = format!("round {round}");
        touch(kernel, size, 2 * round).await?;
        let begun = Instant::now();
        checkpoint(kernel, &name).await?;
        self.taken.add(begun.elapsed());
        let begun = Instant::now();
        checkpoint(kernel, "").await?;
        self.idle.add(begun.elapsed());
        touch(kernel, size, 2 * round + 1).await?;
        let begun = Instant::now();
        let mut files = 0;
        kernel
            .diff(&name, "", async |difference| {
                files += u64::from(difference.area == ryokan::core::diff::Area::File);
                Ok(())
            })
            .await?;
        self.compared.add(begun.elapsed());
        anyhow::ensure!(files > 0, "nothing differs after files were touched");
        let begun = Instant::now();
        let restored = kernel.restore_checkpoint(&name, 0).await?;
        self.back.add(begun.elapsed());
        anyhow::ensure!(restored.files_changed >= files, "{} of {files} files were restored", restored.files_changed);
        let begun = Instant::now();
        kernel.undo(0).await?;
        self.undone.add(begun.elapsed());
        Ok(())
    }
}

/// A background job that polls the clock and records gaps.
const WATCH: &str = "import subprocess
watcher = subprocess.Popen(['python3', '-c', '''
import time
last = time.monotonic()
with open(\"/tmp/gaps\", \"w\") as gaps:
    while True:
        time.sleep(0.0002)
        now = time.monotonic()
        if now - last > LEAST:
            print(last, now - last, file=gaps, flush=True)
        last = now
'''])
import time; time.sleep(0.3)
";

/// The clock that the job polls, seconds.
async fn clock(kernel: &KernelClient) -> anyhow::Result<f64> {
    let result = kernel.execute(ExecRequest::code("print(time.monotonic())")).await?;
    Ok(String::from_utf8_lossy(&result.stdout).trim().parse()?)
}

/// The longest gap that the job recorded in a span of time, milliseconds.
async fn stood_still(kernel: &KernelClient, from: f64, to: f64) -> anyhow::Result<f64> {
    let result = kernel.execute(ExecRequest::code("print(open('/tmp/gaps').read())")).await?;
    let text = String::from_utf8_lossy(&result.stdout).into_owned();
    let gap = |line: &str| -> Option<f64> {
        let (at, gap) = line.split_once(' ')?;
        let (at, gap): (f64, f64) = (at.parse().ok()?, gap.parse().ok()?);
        (at + gap >= from && at <= to).then_some(gap * 1e3)
    };
    Ok(text.lines().filter_map(gap).fold(PAUSE * 1e3, f64::max))
}

async fn pauses(
    world: &World,
    report: &mut Report,
    size: Size,
    host: &HostClient,
    kernel: &KernelClient,
) -> anyhow::Result<()> {
    run(kernel, &WATCH.replace("LEAST", &PAUSE.to_string())).await?;
    let (mut seen, mut reported, mut idle) = (Samples::default(), Samples::default(), Samples::default());
    for round in 1000..1000 + world.times(20, 4) as u64 {
        touch(kernel, size, round).await?;
        let from = clock(kernel).await?;
        let begun = Instant::now();
        checkpoint(kernel, "").await?;
        let took = begun.elapsed();
        let to = clock(kernel).await?;
        seen.add_ms(stood_still(kernel, from, to).await?);
        // For comparison, the same time without a checkpoint.
        let from = clock(kernel).await?;
        tokio::time::sleep(took).await;
        idle.add_ms(stood_still(kernel, from, clock(kernel).await?).await?);
    }
    run(kernel, "watcher.kill(); watcher.wait(); None").await?;
    for pause in daemon_pauses(host, seen.count()).await? {
        reported.add_ms(pause);
    }
    report.times(&format!("{}: pause as the code inside sees it", size.name), &seen, Some(Target::AtMost(10.0)));
    report.note(format!("{:.2} ms at p50, {:.2} ms at p99 without a checkpoint", idle.p50(), idle.quantile(0.99)));
    report.times(&format!("{}: of it, looking at the files", size.name), &reported, None);
    report.note("as the daemon tells it");
    Ok(())
}

/// Forks of this kernel. Returns the median of all but the first, milliseconds.
async fn forks(
    world: &World,
    report: &mut Report,
    size: Size,
    host: &HostClient,
    kernel: &KernelClient,
    spares: &Path,
) -> anyhow::Result<f64> {
    let (mut first, mut next) = (Samples::default(), Samples::default());
    let mut children = Vec::new();
    let is_making = || spares.read_dir().is_ok_and(|mut all| all.next().is_some());
    for n in 0..=world.times(5, 2) as u64 {
        crate::go_on()?;
        touch(kernel, size, 1000 + n).await?;
        let name = format!("fork-{n}");
        let begun = Instant::now();
        let forks = kernel.fork(&Forking::of(&name)).await?;
        if n == 0 { &mut first } else { &mut next }.add(begun.elapsed());
        forks.children.into_iter().try_for_each(|(_, made)| made.map(drop))?;
        children.push(name);
        // Waits for the prepared copy, if one is made.
        tokio::time::sleep(Duration::from_millis(200)).await;
        while is_making() && spares_made(host).await? <= n {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    report.times(&format!("{}: first fork of the live kernel", size.name), &first, None);
    report.times(&format!("{}: fork, 10 files touched since the one before", size.name), &next, None);
    report.note("where a copy is kept ready, it was made meanwhile");
    // Not in between: the file system would be busy during the next measurement.
    for name in children {
        host.remove_kernel(&name, 0).await?;
    }
    Ok(next.p50())
}

async fn spares_made(host: &HostClient) -> anyhow::Result<u64> {
    let (mut events, mut made) = (host.events(0).await?, 0);
    while let Ok(event) = tokio::time::timeout(Duration::from_millis(300), events.next()).await {
        made += u64::from(event?.kind == "copy_prepared");
    }
    Ok(made)
}

/// Pauses of the newest checkpoints according to their events, milliseconds.
async fn daemon_pauses(host: &HostClient, count: usize) -> anyhow::Result<Vec<f64>> {
    let mut events = host.events(0).await?;
    let mut pauses = Vec::new();
    while let Ok(event) = tokio::time::timeout(Duration::from_millis(500), events.next()).await {
        let event = event?;
        if event.kind == "checkpoint_created" {
            let detail: serde_json::Value = serde_json::from_str(&event.detail_json)?;
            pauses.extend(detail["pause_us"].as_f64().map(|pause| pause / 1e3));
        }
    }
    anyhow::ensure!(pauses.len() >= count, "{} events of {count} checkpoints", pauses.len());
    Ok(pauses.split_off(pauses.len() - count))
}

/// 1,000 checkpoints of one kernel: listing, and comparison over all of them.
pub fn history(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let count = world.times(1000, 100);
    let daemon = Daemon::start(world)?;
    daemon.with(async |host| {
        let kernel = create(&host, "k", EngineName::Python).await?;
        run(&kernel, TOUCH).await?;
        run(&kernel, "for n in range(1000):\n    with open(f'f{n}', 'w') as file: file.write(f'{n}\\n' * 20)\n")
            .await?;
        let mut taken = Samples::default();
        for n in 0..count {
            crate::go_on()?;
            run(&kernel, &format!("touch(['f{}'], 'line {n}\\n'); x{} = {n}", n * 7 % 1000, n % 50)).await?;
            let begun = Instant::now();
            checkpoint(&kernel, &format!("c{n}")).await?;
            taken.add(begun.elapsed());
        }
        report.times(&format!("one of {count} checkpoints, a file and a variable touched"), &taken, None);
        let (mut listed, mut compared, mut found) = (Samples::default(), Samples::default(), Samples::default());
        for _ in 0..world.times(20, 5) {
            let (begun, mut seen) = (Instant::now(), 0);
            kernel
                .checkpoints(0, async |_, _| {
                    seen += 1;
                    Ok(())
                })
                .await?;
            listed.add(begun.elapsed());
            anyhow::ensure!(seen == count, "{seen} of {count} checkpoints are listed");
            let (begun, mut kinds) = (Instant::now(), BTreeMap::<_, u64>::new());
            kernel
                .diff("c0", "latest", async |difference| {
                    *kinds.entry((difference.area, difference.deed)).or_default() += 1;
                    Ok(())
                })
                .await?;
            compared.add(begun.elapsed());
            anyhow::ensure!(!kinds.is_empty(), "nothing differs over {count} checkpoints");
            let begun = Instant::now();
            kernel.find_checkpoint("c0").await?;
            found.add(begun.elapsed());
        }
        report.times(&format!("log of {count}"), &listed, Some(Target::AtMost(50.0)));
        report.times(&format!("diff over {count}"), &compared, Some(Target::AtMost(50.0)));
        report.times("find the oldest by its name", &found, None);
        anyhow::Ok(())
    })?;
    let mut command_line = |what: &str, arguments: &[&str], target| -> anyhow::Result<()> {
        let mut took = Samples::default();
        for _ in 0..world.times(20, 5) {
            let begun = Instant::now();
            let status = daemon.cli(arguments).stdout(Stdio::null()).status()?;
            took.add(begun.elapsed());
            anyhow::ensure!(status.success(), "{arguments:?} failed");
        }
        report.times(what, &took, target);
        Ok(())
    };
    command_line("ryokan log: the program", &["log", "k"], Some(Target::AtMost(50.0)))?;
    command_line(
        "ryokan diff --stat: the program",
        &["diff", "k", "c0", "latest", "--stat"],
        Some(Target::AtMost(50.0)),
    )?;
    command_line("ryokan --version, for comparison", &["--version"], None)
}
