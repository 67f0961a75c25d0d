//! Restores of a Python kernel, from a forked snapshot in memory and from saved state.

use std::time::Instant;

use anyhow::Context as _;
use ryokan::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType, RestoredFrom};
use ryokan::core::engine::EngineName;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::rpc::convert::spec::SpecRequest;

use crate::World;
use crate::daemon::{Daemon, run};
use crate::report::{Report, Samples, Target};

/// A process size, by its content.
struct Size {
    name: &'static str,
    megabytes: usize,
    most_ms: f64,
}

const SIZES: &[Size] = &[
    Size { name: "30 MB process", megabytes: 16, most_ms: 5.0 },
    Size { name: "200 MB of objects", megabytes: 200, most_ms: 15.0 },
];
/// Memory limit with room for the snapshots of the larger size.
const MEMORY_BYTES: u64 = 2 << 30;

pub fn rollback(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let daemon = Daemon::start(world)?;
    daemon.with(async |host| {
        for (at, size) in SIZES.iter().enumerate() {
            measure(world, report, &host, size, &format!("k{at}")).await.context(size.name)?;
        }
        Ok(())
    })
}

async fn measure(world: &World, report: &mut Report, host: &HostClient, size: &Size, name: &str) -> anyhow::Result<()> {
    let mut spec = SpecRequest::new(name.parse()?);
    spec.engine = Some(EngineName::Python);
    spec.memory_bytes = Some(MEMORY_BYTES);
    let kernel = host.create_kernel(&spec, "").await?.0;
    let fill = format!("held = [bytes(1000) + str(i).encode() for i in range({} * 950)]; n = 0", size.megabytes);
    run(&kernel, &fill).await?;
    let mut taken = Samples::default();
    let mut last = None;
    for _ in 0..world.times(5, 2) {
        let begun = Instant::now();
        last = Some(take(&kernel, CheckpointType::Manual).await?);
        taken.add(begun.elapsed());
    }
    let last = last.context("no checkpoint was taken")?;
    let (mut memory, mut saved) = (Samples::default(), Samples::default());
    for _ in 0..world.times(30, 5) {
        restore(&kernel, &last, &mut memory, true).await?;
    }
    // Automatic checkpoints keep no snapshot.
    let automatic = take(&kernel, CheckpointType::Auto).await?;
    for _ in 0..world.times(5, 2) {
        restore(&kernel, &automatic, &mut saved, false).await?;
    }
    let (inside, inside_saved, keeping, pause) = reported(host, name, memory.count() + saved.count()).await?;
    let at = |what: &str| format!("{}: {what}", size.name);
    report.times(&at("roll-back of the engine, inside the daemon"), &inside, Some(Target::AtMost(size.most_ms)));
    report.times(&at("restore, seen by a client"), &memory, None);
    report.note("with the safety checkpoint before it, durable");
    report.times(&at("  from saved state: the engine"), &inside_saved, None);
    report.times(&at("  from saved state: seen by a client"), &saved, None);
    report.times(&at("checkpoint, seen by a client"), &taken, None);
    report.times(&at("  of that, the copy"), &keeping, None);
    report.times(&at("  pause of everything inside"), &pause, Some(Target::AtMost(10.0)));
    kernel.stop(true).await?;
    Ok(())
}

async fn take(kernel: &KernelClient, kind: CheckpointType) -> anyhow::Result<Checkpoint> {
    Ok(kernel.checkpoint(&CheckpointRequest::new(kind, "")).await?)
}

async fn restore(kernel: &KernelClient, to: &Checkpoint, took: &mut Samples, memory: bool) -> anyhow::Result<()> {
    run(kernel, "n += 1").await?;
    let begun = Instant::now();
    let done = kernel.restore_checkpoint(&to.id.to_string(), 0).await?;
    took.add(begun.elapsed());
    anyhow::ensure!((done.engine == RestoredFrom::Memory) == memory, "restored from {:?}", done.engine);
    let result = run(kernel, "print(n)").await?;
    anyhow::ensure!(result.stdout == b"0\n", "n is {:?}", String::from_utf8_lossy(&result.stdout));
    Ok(())
}

/// Times from the events of one kernel's checkpoints and restores: engine restores from memory and
/// from saved state, snapshots, pauses.
async fn reported(
    host: &HostClient,
    name: &str,
    restores: usize,
) -> anyhow::Result<(Samples, Samples, Samples, Samples)> {
    let (mut memory, mut saved) = (Samples::default(), Samples::default());
    let (mut keeping, mut pause) = (Samples::default(), Samples::default());
    let mut events = host.events(0).await?;
    while memory.count() + saved.count() < restores {
        let event = events.next().await?;
        let detail: serde_json::Value = serde_json::from_str(&event.detail_json)?;
        let ms = |field: &str| detail[field].as_f64().map(|us| us / 1000.0);
        if event.kernel != name {
            continue;
        }
        match &*event.kind {
            "checkpoint_restored" => {
                let of = if detail["engine"]["engine_from"] == "memory" { &mut memory } else { &mut saved };
                of.add_ms(ms("engine_us").context("the event has no time")?);
            }
            "checkpoint_created" => {
                ms("copy_us").into_iter().for_each(|ms| keeping.add_ms(ms));
                ms("pause_us").into_iter().for_each(|ms| pause.add_ms(ms));
            }
            _ => {}
        }
    }
    Ok((memory, saved, keeping, pause))
}
