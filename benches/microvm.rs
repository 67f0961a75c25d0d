//! Kernels in virtual machines: cold boot, restore from a template, warm machine, suspension, forks, checkpoints, idle
//! memory.
//!
//! Every time begins with the request for a kernel. Where QEMU or an image is missing, the report says so.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::fork::{ForkWay, Forking};
use ryokan::core::name::KernelName;
use ryokan::core::snapshot::{KindRequest, PortableKind};
use ryokan::core::spec::Isolation;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::rpc::convert::spec::SpecRequest;

use crate::daemon::run;
use crate::report::{Report, Samples, Target};
use crate::{Daemon, World, go_on, process};

/// Deadline for a template and for warm machines.
const FILLED: Duration = Duration::from_secs(300);
/// Pause before each measurement, as in the benchmarks of the pool.
const REST: Duration = Duration::from_millis(20);
/// Memory of the measured kernels. No other pool of the daemon has it.
const MEMORY: u64 = 256 << 20;
/// Memory of the kernels that show whether times grow with it.
const LARGE: u64 = 8 * MEMORY;
/// Warm machines.
const WARM: u32 = 2;
/// Machines that are restored at the same time.
const AT_ONCE: usize = 8;
/// Files of a guest, and those among them that change between two checkpoints.
const FILES: usize = 10_000;
const TOUCHED: usize = 10;
const CODE: &str = "print('hi')";

/// Builds an image with the measured daemon's worker, and returns the folder of images. The error is for the report.
pub fn image(world: &World) -> Result<PathBuf, String> {
    built(world, "python,bash,node").map(|image| image.parent().map_or(image.clone(), Path::to_owned))
}

/// Builds an image with these engines.
fn built(world: &World, engines: &str) -> Result<PathBuf, String> {
    let found = Command::new("qemu-system-x86_64").arg("--version").output();
    if !found.is_ok_and(|found| found.status.success()) {
        return Err(String::from("no qemu-system-x86_64: install qemu-system-x86"));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = root.join("target/bench-images");
    let worker = world.daemon.with_file_name("ryokan-worker");
    let mut command = Command::new(root.join("scripts/build-image"));
    command.arg("--worker").arg(&worker).arg("--out").arg(&out).args(["--engines", engines]);
    let built = command.output();
    let built = built.map_err(|error| format!("scripts/build-image: {error}"))?;
    match built.status.success() {
        true => Ok(PathBuf::from(String::from_utf8_lossy(&built.stdout).trim())),
        false => {
            let said = String::from_utf8_lossy(&built.stderr);
            Err(format!("no image: {}", said.lines().last().unwrap_or("scripts/build-image failed")))
        }
    }
}

/// A daemon with the images, and without a template.
pub fn daemon(world: &World, images: &Path, config: &str) -> anyhow::Result<Daemon> {
    let daemon = Daemon::start_with(world, config)?;
    std::os::unix::fs::symlink(images, daemon.data().join("images"))
        .or_else(|_| {
            std::fs::remove_dir(daemon.data().join("images"))?;
            std::os::unix::fs::symlink(images, daemon.data().join("images"))
        })
        .context("the folder of images")?;
    Ok(daemon)
}

async fn create(host: &HostClient, name: &str) -> ryokan::core::error::Result<KernelClient> {
    create_with(host, name, MEMORY).await
}

async fn create_with(host: &HostClient, name: &str, memory: u64) -> ryokan::core::error::Result<KernelClient> {
    let name = name.parse::<KernelName>().map_err(|error| ryokan::core::error::Error::internal(error.to_string()))?;
    let mut spec = SpecRequest::new(name);
    (spec.engine, spec.isolation) = (Some(EngineName::Python), Some(Isolation::Microvm));
    spec.memory_bytes = Some(memory);
    Ok(host.create_kernel(&spec, "").await?.0)
}

/// Creates a kernel and runs its first code.
async fn first_result(host: &HostClient, name: &str) -> anyhow::Result<(KernelClient, Duration)> {
    let begun = Instant::now();
    let kernel = create(host, name).await?;
    run(&kernel, CODE).await?;
    Ok((kernel, begun.elapsed()))
}

/// Waits for a published template.
async fn template_built(daemon: &Daemon) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    loop {
        let folders = std::fs::read_dir(daemon.data().join("templates")).into_iter().flatten().flatten();
        let is_published = |folder: &std::fs::DirEntry| {
            !folder.file_name().to_string_lossy().starts_with('.') && folder.path().join("template.json").exists()
        };
        if folders.into_iter().any(|folder| is_published(&folder)) {
            return Ok(begun.elapsed());
        }
        anyhow::ensure!(begun.elapsed() < FILLED, "no template is built");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits for warm machines of a size, which are restored from a template.
async fn filled(host: &HostClient, memory: u64, count: u32) -> anyhow::Result<()> {
    let deadline = Instant::now() + FILLED;
    loop {
        let pools = host.pools().await?;
        let pool = pools.iter().find(|pool| pool.memory_bytes == memory).context("no pool of machines")?;
        if pool.idle >= count && pool.creating == 0 {
            tokio::time::sleep(REST).await;
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "the pool does not fill: {pool:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Measures machines.
pub fn microvm(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let images = match image(world) {
        Ok(images) => images,
        Err(why) => {
            report.figure("virtual machines", f64::NAN, "", None);
            report.note(why);
            return Ok(());
        }
    };
    let Some(cold) = without_pool(world, report, &images)? else { return Ok(()) };
    with_pool(world, report, &images, &cold)?;
    taken_at_once(world, report, &images)?;
    second_version(world, report, &images)
}

/// Cold boots, each with a daemon of its own, and restores. `None` if this host cannot run machines.
fn without_pool(world: &World, report: &mut Report, images: &Path) -> anyhow::Result<Option<Samples>> {
    let [mut cold, mut built, mut ready, mut restored, mut at_once]: [Samples; 5] = Default::default();
    let rounds = world.times(5, 2);
    for round in 0..rounds {
        let daemon = daemon(world, images, "[pool]\npool_size = 0\n")?;
        let ran = daemon.with(async |host| {
            go_on()?;
            match create(&host, "probe").await {
                Err(error) if error.code == ErrorCode::Unsupported => return Ok(Some(error.to_string())),
                other => other?.remove(0).await?,
            }
            cold.add(first_result(&host, "cold").await?.1);
            built.add(template_built(&daemon).await?);
            if round + 1 < rounds {
                return Ok(None);
            }
            let restores = world.times(20, 5);
            for n in 0..=restores {
                go_on()?;
                tokio::time::sleep(REST).await;
                let begun = Instant::now();
                let kernel = create(&host, &format!("restored-{n}")).await?;
                kernel.start().await?;
                let started = begun.elapsed();
                run(&kernel, CODE).await?;
                // The first one verifies the template.
                if n > 0 {
                    ready.add(started);
                    restored.add(begun.elapsed());
                }
                kernel.remove(0).await?;
            }
            let begun = Instant::now();
            let names: Vec<String> = (0..AT_ONCE).map(|n| format!("at-once-{n}")).collect();
            futures::future::try_join_all(names.iter().map(|name| first_result(&host, name))).await?;
            at_once.add(begun.elapsed());
            Ok(None)
        })?;
        if let Some(why) = ran {
            report.figure("virtual machines", f64::NAN, "", None);
            report.note(why);
            return Ok(None);
        }
    }
    report.times("python: cold boot, create and first result", &cold, None);
    report.times("build of a template", &built, None);
    report.note("boot, warm-up, save, digests, test start; beside an idle kernel");
    report.times("python: restore from a template, create and ready", &ready, None);
    report.times("python: restore from a template, create and first result", &restored, Some(Target::AtMost(120.0)));
    report.times(&format!("python: {AT_ONCE} restores at once, to the last result"), &at_once, None);
    Ok(Some(cold))
}

/// Warm machines, their memory, and suspension.
fn with_pool(world: &World, report: &mut Report, images: &Path, cold: &Samples) -> anyhow::Result<()> {
    let sizes = format!("[pool]\npool_size = {WARM}\n");
    let daemon = daemon(world, images, &sizes)?;
    let [mut warm, mut suspended, mut resumed]: [Samples; 3] = Default::default();
    let private = daemon.with(async |host| {
        first_result(&host, "first").await?.0.remove(0).await?;
        for n in 0..=world.times(30, 8) {
            go_on()?;
            filled(&host, MEMORY, WARM).await?;
            let (kernel, took) = first_result(&host, &format!("warm-{n}")).await?;
            // The first one warms caches.
            if n > 0 {
                warm.add(took);
            }
            filled(&host, MEMORY, WARM).await?;
            let begun = Instant::now();
            kernel.suspend(false, false, false).await?;
            suspended.add(begun.elapsed());
            let begun = Instant::now();
            run(&kernel, CODE).await?;
            resumed.add(begun.elapsed());
            kernel.remove(0).await?;
        }
        filled(&host, MEMORY, WARM).await?;
        let private = private_memory(&daemon);
        forks(world, &host, report).await?;
        let [small, large] =
            [released(world, &host, MEMORY, report).await?, released(world, &host, LARGE, report).await?];
        let what = format!("  {} ÷ {} MiB", LARGE >> 20, MEMORY >> 20);
        report.figure(&format!("{what}: suspend"), large[0] / small[0], "×", None);
        report.figure(&format!("{what}: resume and next result"), large[1] / small[1], "×", None);
        checkpoints(world, &host, report).await?;
        Ok(private)
    })?;
    report.times("python: warm machine, create and first result", &warm, Some(Target::AtMost(15.0)));
    report.figure("  cold boot ÷ warm machine", cold.p50() / warm.p50(), "×", Some(Target::AtLeast(150.0)));
    report.times("python: suspend in memory", &suspended, None);
    report.note("state saved, processes and machine stopped; the machine keeps its memory");
    report.times("python: resume from memory and next result", &resumed, None);
    report.figure("private memory of an idle warm machine", private, "MiB", Some(Target::AtMost(30.0)));
    report.note(format!("mean of {WARM}; {} MiB of guest memory and more, shared with the template", MEMORY >> 20));
    Ok(())
}

/// Suspension to the disk: the machine ends, and its memory returns from a file.
///
/// Returns the medians of both ways, milliseconds.
async fn released(world: &World, host: &HostClient, memory: u64, report: &mut Report) -> anyhow::Result<[f64; 2]> {
    // The first machine of a size boots: no template shares its memory.
    let first = create_with(host, "first", memory).await?;
    run(&first, CODE).await?;
    first.remove(0).await?;
    filled(host, memory, WARM).await?;
    let kernel = create_with(host, "released", memory).await?;
    run(&kernel, CODE).await?;
    // The next warm machine is restored before anything is measured.
    filled(host, memory, WARM).await?;
    let [mut suspended, mut resumed]: [Samples; 2] = Default::default();
    for _ in 0..world.times(8, 2) {
        go_on()?;
        tokio::time::sleep(REST).await;
        let begun = Instant::now();
        kernel.suspend(false, true, false).await?;
        suspended.add(begun.elapsed());
        let begun = Instant::now();
        run(&kernel, CODE).await?;
        resumed.add(begun.elapsed());
    }
    let at = format!("python, {} MiB", memory >> 20);
    report.times(&format!("{at}: suspend with the memory released"), &suspended, Some(Target::AtMost(30.0)));
    report.times("  resume and next result", &resumed, Some(Target::AtMost(120.0)));
    kernel.remove(0).await?;
    Ok([suspended.p50(), resumed.p50()])
}

/// Warm machines that are taken at the same time.
fn taken_at_once(world: &World, report: &mut Report, images: &Path) -> anyhow::Result<()> {
    let daemon = daemon(world, images, &format!("[pool]\npool_size = {AT_ONCE}\n"))?;
    let mut taken = Samples::default();
    daemon.with(async |host| {
        // The pool grows to the machines that were asked for at once.
        let names: Vec<String> = (0..AT_ONCE).map(|n| format!("first-{n}")).collect();
        for (kernel, _) in futures::future::try_join_all(names.iter().map(|name| first_result(&host, name))).await? {
            kernel.remove(0).await?;
        }
        for round in 0..world.times(5, 2) {
            go_on()?;
            filled(&host, MEMORY, AT_ONCE as u32).await?;
            let names: Vec<String> = (0..AT_ONCE).map(|n| format!("warm-{round}-{n}")).collect();
            let begun = Instant::now();
            let made = futures::future::try_join_all(names.iter().map(|name| first_result(&host, name))).await?;
            taken.add(begun.elapsed());
            for (kernel, _) in made {
                kernel.remove(0).await?;
            }
        }
        Ok(())
    })?;
    report.times(&format!("python: {AT_ONCE} warm machines at once, to the last result"), &taken, None);
    Ok(())
}

/// How much a machine's memory and disk take in the store for a second version of the image.
fn second_version(world: &World, report: &mut Report, images: &Path) -> anyhow::Result<()> {
    let versions = ["python,bash,node", "python"].map(|engines| built(world, engines).map_err(anyhow::Error::msg));
    let daemon = daemon(world, images, "[pool]\npool_size = 0\n[limits]\nteleport_snapshot = \"2GiB\"\n")?;
    let packs = daemon.data().join("store/packs");
    let stored = || -> anyhow::Result<u64> {
        let mut bytes = 0;
        for entry in std::fs::read_dir(&packs)? {
            bytes += entry?.metadata()?.len();
        }
        Ok(bytes)
    };
    let mut grown = Vec::new();
    for (at, image) in versions.into_iter().enumerate() {
        let image = image?;
        let version = image.file_name().context("a version")?.to_string_lossy().into_owned();
        let before = stored()?;
        daemon.with(async |host| {
            let mut spec = SpecRequest::new(format!("version-{at}").parse()?);
            (spec.engine, spec.isolation) = (Some(EngineName::Python), Some(Isolation::Microvm));
            (spec.memory_bytes, spec.image) = (Some(MEMORY), Some(version.clone()));
            let (kernel, _) = host.create_kernel(&spec, "").await?;
            run(&kernel, CODE).await?;
            let mut whole = CheckpointRequest::new(CheckpointType::Manual, "");
            whole.snapshot = KindRequest::Only(PortableKind::Teleport);
            kernel.checkpoint(&whole).await?;
            Ok(())
        })?;
        grown.push((stored()? - before) as f64 / f64::from(1 << 20));
    }
    report.figure("memory and disk of a machine in the store", grown[0], "MiB", None);
    let (what, share) = ("  of one with another version of the image ÷ the first", grown[1] / grown[0]);
    report.figure(what, share, "×", Some(Target::AtMost(0.2)));
    Ok(())
}

/// Checkpoints of a guest with many files.
async fn checkpoints(world: &World, host: &HostClient, report: &mut Report) -> anyhow::Result<()> {
    let kernel = create(host, "files").await?;
    run(&kernel, &format!("for n in range({FILES}): open(f'f{{n}}', 'w').write(str(n) * 100)")).await?;
    let begun = Instant::now();
    kernel.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, "")).await?;
    report.figure(&format!("first checkpoint of {FILES} guest files"), ms(begun.elapsed()), "ms", None);
    let mut touched = Samples::default();
    for round in 0..world.times(8, 2) {
        go_on()?;
        run(&kernel, &format!("for n in range({TOUCHED}): open(f'f{{n}}', 'w').write('{round}' * 100)")).await?;
        tokio::time::sleep(REST).await;
        let begun = Instant::now();
        kernel.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, "")).await?;
        touched.add(begun.elapsed());
    }
    report.times(&format!("  the next with {TOUCHED} touched"), &touched, Some(Target::AtMost(300.0)));
    kernel.remove(0).await?;
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Forks of a running machine with its memory. Each round ends the copies.
async fn forks(world: &World, host: &HostClient, report: &mut Report) -> anyhow::Result<()> {
    let (kernel, _) = first_result(host, "forked").await?;
    filled(host, MEMORY, WARM).await?;
    for count in [4, 8] {
        let [mut answered, mut paused]: [Samples; 2] = Default::default();
        for round in 0..world.times(5, 2) {
            go_on()?;
            tokio::time::sleep(REST).await;
            let begun = Instant::now();
            let done = kernel.fork(&Forking { count, ..Forking::of(format!("copy-{round}")) }).await?;
            let mut children = Vec::new();
            for (_, made) in done.children {
                let (child, _) = made?;
                run(&child, CODE).await?;
                children.push(child);
            }
            answered.add(begun.elapsed());
            let Some(ForkWay::Machine { pause }) = done.way else { anyhow::bail!("no machine was copied") };
            paused.add(pause);
            for child in children {
                child.remove(0).await?;
            }
        }
        report.times(&format!("python: fork of a running machine ×{count}, to the last result"), &answered, None);
        report.times("  pause of the forked machine", &paused, Some(Target::AtMost(30.0)));
    }
    report.note("memory, processors and disk of one moment; each copy seeded anew");
    kernel.remove(0).await?;
    Ok(())
}

/// The mean private memory of a daemon's machines.
fn private_memory(daemon: &Daemon) -> f64 {
    let machines: Vec<f64> = process::tree(daemon.pid())
        .into_iter()
        .filter(|pid| process::name(*pid).starts_with("qemu"))
        .map(process::private_mib)
        .collect();
    machines.iter().sum::<f64>() / machines.len() as f64
}
