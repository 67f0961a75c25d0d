//! Moves of a kernel between two daemons on this machine, beside rsync and a plain pipe.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::fork::Forking;
use ryokan::core::handover::MoveOptions;
use ryokan::core::info::TeleportReport;
use ryokan::core::name::KernelName;
use ryokan::core::spec::Isolation;
use ryokan::rpc::convert::spec::SpecRequest;

use crate::World;
use crate::daemon::{Daemon, create, run};
use crate::microvm;
use crate::report::{Report, Samples, Target};

/// Bytes of a file in the workspace.
const FILE: usize = 1 << 20;
/// Bytes changed before a later move.
const CHANGED: u64 = 4 << 20;
/// Bytes of engine state.
const STATE: usize = 100_000_000;
/// Memory of a machine.
const MACHINE: u64 = 512 << 20;

pub fn teleport(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let files = world
        .size
        .map_or_else(|| world.times(500, 50), |bytes| bytes as usize / FILE)
        .max((CHANGED / FILE as u64) as usize);
    // Their logs hold the steps of each pause.
    let (here, there) = (Daemon::start_at(world, "info", "")?, Daemon::start_at(world, "info", "")?);
    here.with(async |host| {
        let kernel = create(&host, "moved", EngineName::Python).await?;
        run(&kernel, &fill(files)).await?;
        kernel.fork(&Forking::of("sibling")).await?;
        let (sibling, _) = host.open_kernel("sibling").await?;
        run(&sibling, &change("sibling")).await.map(drop)
    })?;
    let total = (files * FILE) as u64;
    let at = |what: &str| format!("{} MB of files: {what}", total / 1_000_000);
    report.figure(&at("a plain pipe"), rate(total, ms(pipe(total)?)), "MB/s", None);
    match rsync(&here.data().join("kernels"))? {
        Some(took) => report.figure(&at("rsync -a of the same files, by a pipe"), rate(total, ms(took)), "MB/s", None),
        None => report.failed("rsync is not installed: it is in the package rsync"),
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
    report.times(&at("pause, engine state of a few bytes"), &pauses, None);
    report.note(format!("the last one: {}; of it {}", steps(&here, "a kernel moved"), steps(&there, "is prepared")));
    Ok(())
}

/// Pauses of kernels with 100 MB of engine state that was copied before, and of workspaces of two sizes.
pub fn state(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (here, there) = (Daemon::start_at(world, "info", "")?, Daemon::start_at(world, "info", "")?);
    let bytes = world.times(STATE, STATE / 10);
    here.with(async |host| {
        let kernel = create(&host, "state", EngineName::Python).await?;
        run(&kernel, &format!("import os\ndata = os.urandom({bytes})\n")).await.map(drop)
    })?;
    let what = format!("teleport, {} MB of engine state", bytes / 1_000_000);
    let first = moved(&here, &there, "state")?;
    report.figure(&format!("{what}: to an empty host"), first.elapsed_ms as f64, "ms", None);
    report.note(format!("{} bytes sent", first.sent_bytes));
    let mut pauses = Samples::default();
    pauses.add_ms(first.pause_ms as f64);
    let rounds = world.times(10, 4);
    there_and_back((&there, &here), "state", rounds, "value = 'round'", &mut |again| {
        pauses.add_ms(again.pause_ms as f64);
    })?;
    report.times(&format!("{what}: pause"), &pauses, Some(Target::AtMost(100.0)));
    report.note(format!("the last one: {}; of it {}", steps(&there, "a kernel moved"), steps(&here, "is prepared")));
    for mb in [world.times(50, 10), world.times(500, 50)] {
        let (name, mut pauses) = (format!("files-{mb}"), Samples::default());
        here.with(async |host| {
            let kernel = create(&host, &name, EngineName::Python).await?;
            run(&kernel, &fill(mb)).await.map(drop)
        })?;
        pauses.add_ms(moved(&here, &there, &name)?.pause_ms as f64);
        // The same change whatever the size.
        there_and_back((&there, &here), &name, rounds, &change("round"), &mut |again| {
            pauses.add_ms(again.pause_ms as f64);
        })?;
        report.times(&format!("teleport, {mb} MiB of files, 4 MB changed: pause"), &pauses, None);
    }
    Ok(())
}

/// A virtual machine of 512 MB: bytes, pause and rate, there and back.
pub fn machine(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let images = match microvm::image(world) {
        Ok(images) => images,
        Err(why) => {
            report.failed(&why);
            return Ok(());
        }
    };
    let start = || microvm::daemon(world, &images, "[pool]\npool_size = 0\n");
    let (here, there) = (start()?, start()?);
    let made = here.with(async |host| {
        let mut spec = SpecRequest::new("lab".parse::<KernelName>()?);
        (spec.engine, spec.isolation) = (Some(EngineName::Python), Some(Isolation::Microvm));
        spec.memory_bytes = Some(MACHINE);
        let kernel = match host.create_kernel(&spec, "").await {
            Err(error) if error.code == ErrorCode::Unsupported => return Ok(Some(error.to_string())),
            made => made?.0,
        };
        // A quarter of its memory does not compress.
        run(&kernel, &format!("import os\ndata = os.urandom({})\n", MACHINE / 4)).await?;
        Ok(None)
    })?;
    if let Some(why) = made {
        report.failed(&why);
        return Ok(());
    }
    let what = format!("teleport, a machine of {} MiB", MACHINE >> 20);
    let mut show = |way: &str, moved: &TeleportReport| {
        let at = |figure: &str| format!("{what}, {way}: {figure}");
        report.figure(&at("sent"), moved.wire_bytes as f64 / 1e6, "MB", None);
        report.note(format!("{} of {} bytes; kind {}", moved.sent_bytes, moved.bytes, moved.kind.name()));
        report.figure(&at("pause"), moved.pause_ms as f64, "ms", None);
        report.figure(&at("whole move"), moved.elapsed_ms as f64, "ms", None);
        report.figure(&at("rate"), rate(moved.wire_bytes, moved.elapsed_ms), "MB/s", None);
    };
    show("to an empty host", &moved(&here, &there, "lab")?);
    crate::go_on()?;
    there.with(async |host| run(&host.open_kernel("lab").await?.0, "value = 1").await.map(drop))?;
    show("the way back", &moved(&there, &here, "lab")?);
    Ok(())
}

/// Moves a kernel to and fro, each time after a change.
fn there_and_back(
    (at, other): (&Daemon, &Daemon),
    name: &str,
    rounds: usize,
    code: &str,
    each: &mut dyn FnMut(TeleportReport),
) -> anyhow::Result<()> {
    // An odd number of moves ends where the next kernel is made.
    for round in 0..rounds | 1 {
        let (source, target) = if round % 2 == 0 { (at, other) } else { (other, at) };
        source.with(async |host| run(&host.open_kernel(name).await?.0, code).await.map(drop))?;
        each(moved(source, target, name)?);
        crate::go_on()?;
    }
    Ok(())
}

/// Code that writes files that do not compress.
fn fill(files: usize) -> String {
    format!(
        "import os\nfor i in range({files}):\n with open(f'f{{i}}', 'wb') as file: file.write(os.urandom({FILE}))\n"
    )
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

/// Copies a kernel's files with rsync to a process at the other end of a command's pipe, as the transport of a move is one,
/// and syncs.
fn rsync(kernels: &Path) -> anyhow::Result<Option<Duration>> {
    let folder = std::fs::read_dir(kernels)?.flatten().map(|entry| entry.path().join("workspace"));
    let folder = folder.max_by_key(|path| std::fs::read_dir(path).map_or(0, Iterator::count));
    let folder = folder.context("no kernel has files")?;
    let to = tempfile::tempdir_in(kernels.parent().unwrap_or(kernels))?;
    // In place of ssh: without the host's name, the rest is the command of the far end.
    let remote = to.path().join("remote");
    std::fs::write(&remote, "#!/bin/sh\nshift\nexec \"$@\"\n")?;
    std::fs::set_permissions(&remote, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let place = format!("peer:{}", to.path().join("copy").display());
    let begun = Instant::now();
    let copied = Command::new("rsync").arg("-a").arg("-e").arg(&remote).arg(&folder).arg(place).status();
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
