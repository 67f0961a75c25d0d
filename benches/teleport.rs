//! Moves of a kernel between two daemons on this machine, beside rsync and a plain pipe.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ryokan::core::engine::EngineName;
use ryokan::core::fork::Forking;
use ryokan::core::handover::MoveOptions;
use ryokan::core::info::TeleportReport;

use crate::World;
use crate::daemon::{Daemon, create, run};
use crate::report::{Report, Samples, Target};

/// Bytes of a file in the workspace.
const FILE: usize = 1 << 20;
/// Bytes changed before a later move.
const CHANGED: u64 = 4 << 20;

pub fn teleport(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let files = world
        .size
        .map_or_else(|| world.times(500, 50), |bytes| bytes as usize / FILE)
        .max((CHANGED / FILE as u64) as usize);
    // Their logs hold the steps of each pause.
    let (here, there) = (Daemon::start_at(world, "info", "")?, Daemon::start_at(world, "info", "")?);
    let fill = format!(
        "import os\nfor i in range({files}):\n with open(f'f{{i}}', 'wb') as file: file.write(os.urandom({FILE}))\n"
    );
    here.with(async |host| {
        let kernel = create(&host, "moved", EngineName::Python).await?;
        run(&kernel, &fill).await?;
        kernel.fork(&Forking::of("sibling")).await?;
        let (sibling, _) = host.open_kernel("sibling").await?;
        run(&sibling, &change("sibling")).await.map(drop)
    })?;
    let total = (files * FILE) as u64;
    let at = |what: &str| format!("{} MB of files: {what}", total / 1_000_000);
    report.figure(&at("a plain pipe"), rate(total, ms(pipe(total)?)), "MB/s", None);
    match rsync(&here.data().join("kernels"))? {
        Some(took) => report.figure(&at("rsync -a of the same files"), rate(total, ms(took)), "MB/s", None),
        None => report.failed("rsync is not installed"),
    }
    let first = moved(&here, &there, "moved")?;
    report.figure(&at("to an empty host"), rate(total, first.elapsed_ms), "MB/s", None);
    report.figure(&at("  bytes sent, of all"), share(first.wire_bytes, total), "", Some(Target::AtMost(1.1)));
    let sibling = moved(&here, &there, "sibling")?;
    report.figure(&at("to a host with a sibling, 4 MB changed"), sibling.elapsed_ms as f64, "ms", None);
    let sent = share(sibling.wire_bytes, CHANGED);
    report.figure(&at("  bytes sent, of those changed"), sent, "", Some(Target::AtMost(1.1)));
    let mut pauses = Samples::default();
    pauses.add_ms(first.pause_ms as f64);
    let (mut back, mut factors) = (Samples::default(), Samples::default());
    let mut at_here = false;
    for round in 0..world.times(10, 4) {
        let (source, target) = if at_here { (&here, &there) } else { (&there, &here) };
        source
            .with(async |host| run(&host.open_kernel("moved").await?.0, &change(&round.to_string())).await.map(drop))?;
        let again = moved(source, target, "moved")?;
        back.add_ms(again.elapsed_ms as f64);
        factors.add_ms(share(again.wire_bytes, CHANGED));
        pauses.add_ms(again.pause_ms as f64);
        at_here = !at_here;
        crate::go_on()?;
    }
    report.times(&at("the way back, 4 MB changed"), &back, None);
    report.figure(&at("  bytes sent, of those changed"), factors.p50(), "", Some(Target::AtMost(1.1)));
    report.times(&at("pause"), &pauses, Some(Target::AtMost(100.0)));
    report.note(format!("the last one: {}; of it {}", steps(&here, "a kernel moved"), steps(&there, "is prepared")));
    Ok(())
}

/// Code that changes files, and a variable.
fn change(value: &str) -> String {
    let files = CHANGED / FILE as u64;
    format!("import os\nfor i in range({files}): open(f'f{{i}}', 'wb').write(os.urandom({FILE}))\nvalue = {value:?}")
}

/// The steps that a daemon logged last, in milliseconds.
fn steps(daemon: &Daemon, what: &str) -> String {
    let log = daemon.log_text();
    let line = log.lines().rev().find(|line| line.contains(what) && line.contains("steps="));
    let text = line.and_then(|line| Some(line.split_once("steps=\"")?.1.split_once('"')?.0));
    text.unwrap_or("not logged").to_owned()
}

/// The time of as many bytes through a pipe to another process.
fn pipe(bytes: u64) -> anyhow::Result<Duration> {
    let piece = vec![7; FILE];
    let mut reader = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let mut to = reader.stdin.take().context("a pipe")?;
    let begun = Instant::now();
    for _ in 0..bytes / FILE as u64 {
        to.write_all(&piece)?;
    }
    drop(to);
    anyhow::ensure!(reader.wait()?.success(), "cat failed");
    Ok(begun.elapsed())
}

fn moved(source: &Daemon, target: &Daemon, name: &str) -> anyhow::Result<TeleportReport> {
    let pipe = target.cli(&["--no-autostart", "pipe"]);
    let variables = pipe.get_envs().filter_map(|(name, value)| Some((name.to_str()?, value?.to_str()?)));
    let variables: Vec<String> = variables.map(|(name, value)| format!("{name}='{value}'")).collect();
    let program = Path::new(pipe.get_program()).display().to_string();
    let to = format!("exec:exec env {} '{program}' --no-autostart pipe", variables.join(" "));
    let moved =
        source.with(async |host| Ok(host.teleport(name, &to, MoveOptions::default(), |_: &str, _, _| {}).await?))?;
    anyhow::ensure!(moved.acknowledged, "the target did not acknowledge");
    Ok(moved)
}

/// Copies a kernel's files with rsync, whose processes are connected by pipes, and syncs.
fn rsync(kernels: &Path) -> anyhow::Result<Option<Duration>> {
    let folder = std::fs::read_dir(kernels)?.flatten().map(|entry| entry.path().join("workspace"));
    let folder = folder.max_by_key(|path| std::fs::read_dir(path).map_or(0, Iterator::count));
    let folder = folder.context("no kernel has files")?;
    let to = tempfile::tempdir_in(kernels.parent().unwrap_or(kernels))?;
    let begun = Instant::now();
    let copied = Command::new("rsync").arg("-a").arg(&folder).arg(to.path()).status();
    match copied {
        Ok(status) => {
            anyhow::ensure!(status.success(), "rsync ended with {status}");
            nix::unistd::sync();
            Ok(Some(begun.elapsed()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Megabytes a second.
fn rate(bytes: u64, ms: u64) -> f64 {
    bytes as f64 / 1000.0 / ms.max(1) as f64
}

fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}
