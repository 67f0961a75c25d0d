//! The warm pool: time to a new kernel's first result, compared with other sandboxes.
//!
//! Also the cost of warm workers, and the cost of many idle kernels.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::core::name::KernelName;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::rpc::convert::spec::SpecRequest;
use ryokan::session::Session as _;

use crate::daemon::{create, run, worker_pids};
use crate::peers::{Ipykernel, Runc, bubblewrap, run_alone};
use crate::report::{Report, Samples, Target};
use crate::{Daemon, World, go_on, process};

/// Deadline for a full pool.
const FILLED: Duration = Duration::from_secs(60);

/// Pause before each measurement. Processors are then asleep and caches cold, as for a real
/// request.
const REST: Duration = Duration::from_millis(20);

/// Rounds. In each, everything compared runs one block, so that other load affects all alike.
const ROUNDS: usize = 8;

/// Targets for an ephemeral and a durable kernel of an engine, milliseconds.
type Wanted = Option<(f64, f64)>;

/// The first code of each engine.
const ENGINES: [(EngineName, &str, Wanted); 4] = [
    (EngineName::Kaish, "echo hi", Some((1.0, 1.5))),
    (EngineName::Python, "print('hi')", Some((2.0, 2.5))),
    (EngineName::Bash, "echo hi", None),
    (EngineName::Node, "console.log('hi')", None),
];

/// The same interpreter with the same code, as a separate program.
fn alone(world: &World, engine: EngineName, code: &str) -> anyhow::Result<(PathBuf, [String; 2])> {
    let (program, option) = match engine {
        EngineName::Kaish => (std::env::current_exe()?, "--kaish"),
        EngineName::Python => (world.python.clone(), "-c"),
        EngineName::Bash => (PathBuf::from("/bin/bash"), "-c"),
        EngineName::Node => (PathBuf::from("node"), "-e"),
    };
    Ok((program, [option.to_owned(), code.to_owned()]))
}

/// Waits until an engine's pool is full and no creation is in progress.
async fn filled(host: &HostClient, engine: EngineName) -> anyhow::Result<()> {
    let deadline = Instant::now() + FILLED;
    loop {
        let pools = host.pools().await?;
        let pool =
            pools.iter().find(|pool| pool.engine == engine.name()).with_context(|| format!("no pool of {engine}"))?;
        if pool.idle >= pool.target && pool.creating == 0 {
            tokio::time::sleep(REST).await;
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "the pool does not fill: {pool:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A way to create a kernel.
#[derive(Clone, Copy)]
struct Beginning {
    name: &'static str,
    ephemeral: bool,
    /// The first execution is part of the creation request.
    at_once: bool,
}

const BEGINNINGS: [Beginning; 3] = [
    Beginning { name: "ephemeral", ephemeral: true, at_once: false },
    Beginning { name: "durable", ephemeral: false, at_once: false },
    Beginning { name: "ephemeral, asked for at once", ephemeral: true, at_once: true },
];

/// Time to create a kernel and receive its first result, from a full pool. Excludes its removal.
async fn begin(
    host: &HostClient,
    name: &str,
    engine: EngineName,
    beginning: Beginning,
    code: &str,
) -> anyhow::Result<Duration> {
    filled(host, engine).await?;
    let (kernel, took) = first_words(host, name, engine, beginning, code).await?;
    kernel.remove(0).await?;
    Ok(took)
}

/// Creates a kernel and runs its first code.
async fn first_words(
    host: &HostClient,
    name: &str,
    engine: EngineName,
    beginning: Beginning,
    code: &str,
) -> anyhow::Result<(KernelClient, Duration)> {
    let mut spec = SpecRequest::new(name.parse::<KernelName>()?);
    (spec.engine, spec.ephemeral) = (Some(engine), beginning.ephemeral);
    let begun = Instant::now();
    let kernel = if beginning.at_once {
        let (kernel, _, ran) = host.create_and_run(&spec, "", &ExecRequest::code(code)).await?;
        anyhow::ensure!(ran?.end.code == 0, "{code:?} failed");
        kernel
    } else {
        let kernel = host.create_kernel(&spec, "").await?.0;
        run(&kernel, code).await?;
        kernel
    };
    Ok((kernel, begun.elapsed()))
}

/// Time from the request for a kernel to its first result.
pub fn first_result(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let sizes = ENGINES.map(|(engine, ..)| format!("[pool.engines.{engine}]\npool_size = 3\nmin_idle = 2\n")).concat();
    let daemon = Daemon::start_with(world, &sizes)?;
    let mut ipykernel = if world.alone { None } else { Ipykernel::start(world)? };
    let runc = Runc::prepare()?;
    let wanted = |engine: &EngineName| world.engine.is_none_or(|only| only == *engine);
    let each = world.times(96, 24) / ROUNDS;
    let mut times: [[Samples; BEGINNINGS.len()]; ENGINES.len()] = Default::default();
    let [mut fork_exec, mut bwrap, mut runs, mut peer]: [Samples; 4] = Default::default();
    let mut bwrap_same: [Samples; ENGINES.len()] = Default::default();
    let [mut pings, mut live]: [Samples; 2] = Default::default();
    let after_rest = |samples: &mut Samples, run: &mut dyn FnMut() -> anyhow::Result<Duration>| {
        std::thread::sleep(REST);
        samples.add(run()?);
        Ok::<_, anyhow::Error>(())
    };
    daemon.with(async |host| {
        let lives = create(&host, "lives", EngineName::Kaish).await?;
        run(&lives, "echo hi").await?;
        for round in 0..=ROUNDS {
            for (at, (engine, code, _)) in ENGINES.into_iter().enumerate().filter(|(_, (engine, ..))| wanted(engine)) {
                for (kind, beginning) in BEGINNINGS.into_iter().enumerate() {
                    let mut block = Samples::default();
                    for n in 0..each {
                        go_on()?;
                        let name = format!("k{round}-{engine}-{kind}-{n}");
                        block.add(begin(&host, &name, engine, beginning, code).await?);
                    }
                    // The first round warms caches for all of them.
                    if round > 0 {
                        times[at][kind].append(block);
                    }
                }
            }
            let peers = if round == 0 || world.alone { 0 } else { each };
            for _ in 0..peers {
                tokio::time::sleep(REST).await;
                let begun = Instant::now();
                host.ping().await?;
                pings.add(begun.elapsed());
                tokio::time::sleep(REST).await;
                let begun = Instant::now();
                run(&lives, "echo hi").await?;
                live.add(begun.elapsed());
            }
            for _ in 0..peers {
                after_rest(&mut fork_exec, &mut || run_alone("/bin/echo".as_ref(), &["hi"]))?;
            }
            for _ in 0..peers {
                after_rest(&mut bwrap, &mut || bubblewrap("/bin/echo".as_ref(), &["hi"]))?;
            }
            for (samples, (engine, code, _)) in bwrap_same.iter_mut().zip(ENGINES) {
                let (program, arguments) = alone(world, engine, code)?;
                for _ in 0..if wanted(&engine) { peers } else { 0 } {
                    after_rest(samples, &mut || bubblewrap(&program, &arguments.each_ref().map(String::as_str)))?;
                }
            }
            for runc in runc.iter().cycle().take(peers) {
                after_rest(&mut runs, &mut || runc.run(&["/bin/echo", "hi"]))?;
            }
            if let Some(ipykernel) = ipykernel.as_mut().filter(|_| round > 0) {
                ipykernel.start_fresh("print('hi')", &mut peer)?;
            }
        }
        Ok(())
    })?;
    for ((engine, _, most), times) in ENGINES.into_iter().zip(&times).filter(|((engine, ..), _)| wanted(engine)) {
        for (Beginning { name: kind, ephemeral, .. }, samples) in BEGINNINGS.into_iter().zip(times) {
            let most = most.map(|most| if ephemeral { most.0 } else { most.1 });
            report.times(&format!("{engine}, {kind}: create and first result"), samples, most.map(Target::AtMost));
            let (p50, p99) = (samples.p50(), samples.quantile(0.99));
            report.figure(&format!("  p99 ÷ p50, {engine}, {kind}"), p99 / p50, "×", Some(Target::AtMost(5.0)));
        }
    }
    if world.alone {
        return Ok(());
    }
    let [kaish, python] = [times[0][0].p50(), times[1][0].p50()];
    report.times("ping, after the same rest", &pings, None);
    report.note("two processes that wake each other, once each");
    report.times("echo hi in a kaish kernel that lives, after the same rest", &live, None);
    report.times("fork and exec of /bin/echo, no box at all", &fork_exec, None);
    report.times("bwrap --unshare-all /bin/echo", &bwrap, None);
    report.note("namespaces alone: no seccomp, no Landlock, no interpreter, nothing durable, gone after one run");
    report.figure("  ÷ kaish, ephemeral", bwrap.p50() / kaish, "×", None);
    let same = ENGINES.into_iter().zip(&bwrap_same).zip(&times);
    for (((engine, _, most), bwrap), times) in same.filter(|(((engine, ..), _), _)| wanted(engine)) {
        report.times(&format!("bwrap --unshare-all {engine}, the same words"), bwrap, None);
        let least = most.map(|_| Target::AtLeast(10.0));
        report.figure(&format!("  ÷ {engine}, ephemeral"), bwrap.p50() / times[0].p50(), "×", least);
    }
    match runs.count() {
        0 => report.figure("runc run /bin/echo", f64::NAN, "", None),
        _ => {
            report.times("runc run /bin/echo", &runs, None);
            report.figure("  ÷ kaish, ephemeral", runs.p50() / kaish, "×", None);
        }
    }
    if peer.count() > 0 {
        report.times("ipykernel: start, first result", &peer, None);
        report.figure("  ÷ python, ephemeral", peer.p50() / python, "×", None);
    }
    Ok(())
}

/// Kernels requested one right after the other: as many as are warm, while the processors are
/// awake.
const BURST: usize = 8;

/// Time to the first result of kernels requested back to back.
///
/// The next request follows each answer at once, up to the pool's size; the same for bubblewrap.
/// During the later requests the pool already creates the next workers, while bubblewrap has the
/// processors to itself.
pub fn burst(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let engines = || ENGINES.into_iter().filter(|(engine, ..)| world.engine.is_none_or(|only| only == *engine));
    let sizes = ENGINES.map(|(engine, ..)| {
        format!("[pool.engines.{engine}]\npool_size = {BURST}\nmin_idle = {BURST}\nmax_pool_size = {BURST}\n")
    });
    let daemon = Daemon::start_with(world, &sizes.concat())?;
    let mut times: [[Samples; BEGINNINGS.len()]; ENGINES.len()] = Default::default();
    let mut bwrap: [Samples; ENGINES.len()] = Default::default();
    daemon.with(async |host| {
        for round in 0..=world.times(2 * ROUNDS, 3) {
            for (at, (engine, code, _)) in engines().enumerate() {
                for (kind, beginning) in BEGINNINGS.into_iter().enumerate() {
                    // Wait until no engine's pool creates workers.
                    for (engine, ..) in engines() {
                        filled(&host, engine).await?;
                    }
                    let (mut block, mut kernels) = (Samples::default(), Vec::new());
                    for n in 0..BURST {
                        go_on()?;
                        let name = format!("k{round}-{engine}-{kind}-{n}");
                        let (kernel, took) = first_words(&host, &name, engine, beginning, code).await?;
                        // The first one followed a pause.
                        if n > 0 {
                            block.add(took);
                        }
                        kernels.push(kernel);
                    }
                    for kernel in kernels {
                        kernel.remove(0).await?;
                    }
                    if round > 0 {
                        times[at][kind].append(block);
                    }
                }
                let (program, arguments) = alone(world, engine, code)?;
                tokio::time::sleep(REST).await;
                for n in 0..if round == 0 || world.alone { 0 } else { BURST } {
                    let took = bubblewrap(&program, &arguments.each_ref().map(String::as_str))?;
                    if n > 0 {
                        bwrap[at].add(took);
                    }
                }
            }
        }
        Ok(())
    })?;
    for ((engine, _, most), (times, bwrap)) in engines().zip(times.iter().zip(&bwrap)) {
        for (Beginning { name: kind, ephemeral, .. }, samples) in BEGINNINGS.into_iter().zip(times) {
            let what = format!("{engine}, {kind}, one after the other");
            let most = most.map(|most| if ephemeral { most.0 } else { most.1 });
            report.times(&format!("{what}: create and first result"), samples, most.map(Target::AtMost));
            let (p50, p99) = (samples.p50(), samples.quantile(0.99));
            report.figure(&format!("  p99 ÷ p50, {what}"), p99 / p50, "×", Some(Target::AtMost(5.0)));
        }
        if bwrap.count() > 0 {
            report.times(&format!("bwrap --unshare-all {engine}, one after the other"), bwrap, None);
            let least = most.map(|_| Target::AtLeast(10.0));
            report.figure(&format!("  ÷ {engine}, ephemeral"), bwrap.p50() / times[0].p50(), "×", least);
        }
    }
    Ok(())
}

/// Processor time of the whole machine for the creation of one warm worker, less the idle load.
pub fn refill(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let slots = world.times(40, 10) as u32;
    for (engine, ..) in ENGINES {
        let of = |size: u32| {
            format!(
                "[pool]\npool_size = 0\nmin_idle = 0\nmax_pool_size = 0\n[pool.engines.{engine}]\npool_size = {size}\nmin_idle = {size}\nmax_pool_size = {size}\n"
            )
        };
        let took = |size: u32| -> anyhow::Result<Duration> {
            let before = process::machine_cpu();
            let daemon = Daemon::start_with(world, &of(size))?;
            daemon.with(async |host| filled(&host, engine).await)?;
            let took = process::machine_cpu().saturating_sub(before);
            drop(daemon);
            Ok(took)
        };
        // Subtracts the cost of a daemon with one warm worker.
        let (one, many) = (took(1)?, took(slots + 1)?);
        let each = many.saturating_sub(one).as_secs_f64() * 1000.0 / f64::from(slots);
        let most = (engine == EngineName::Kaish).then_some(Target::AtMost(10.0));
        report.figure(&format!("a {engine} slot made ready, processor time"), each, "ms", most);
    }
    report.note(format!("all processors of the machine, over {slots} slots; /proc counts in 10 ms"));
    Ok(())
}

/// Many idle live kernels.
pub fn many_idle(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let kernels = world.times(500, 50);
    let daemon = Daemon::start_with(world, "[pool.engines.python]\npool_size = 0\nmin_idle = 0\nmax_pool_size = 0\n")?;
    daemon.with(async |host| {
        let (mut all, mut pss) = (Vec::with_capacity(kernels), 0.0);
        for n in 0..kernels {
            go_on()?;
            let mut spec = SpecRequest::new(format!("k{n}").parse::<KernelName>()?);
            spec.engine = Some(EngineName::Kaish);
            let kernel = host.create_kernel(&spec, "").await?.0;
            run(&kernel, &format!("x={n}")).await?;
            all.push(kernel);
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        for worker in worker_pids(&host, kernels).await?.into_values() {
            pss += process::tree(worker).into_iter().map(process::pss_mib).sum::<f64>();
        }
        let each = pss * 1.048_576 / kernels as f64;
        report.figure(&format!("one of {kernels} idle kaish kernels, PSS"), each, "MB", Some(Target::AtMost(5.0)));
        report.note("every process of its worker");
        let mut answers = Samples::default();
        for (n, kernel) in all.iter().enumerate() {
            let begun = Instant::now();
            let said = run(kernel, "echo $x").await?;
            answers.add(begun.elapsed());
            anyhow::ensure!(
                said.stdout.trim_ascii_end() == n.to_string().as_bytes(),
                "kernel {n} says {:?}",
                said.stdout
            );
        }
        report.times(&format!("each of them answers, one after another, all {kernels}"), &answers, None);
        report.figure("daemon, RSS", process::rss_mib(daemon.pid()), "MiB", None);
        Ok(())
    })
}

/// One kernel runs a fork bomb while another one works.
pub fn fork_bomb(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let daemon = Daemon::start(world)?;
    let times = world.times(400, 50);
    daemon.with(async |host| {
        let bomber = create(&host, "bomber", EngineName::Python).await?;
        let other = create(&host, "other", EngineName::Kaish).await?;
        let each = async || {
            let mut samples = Samples::default();
            for _ in 0..times {
                let begun = Instant::now();
                run(&other, "echo hi").await?;
                samples.add(begun.elapsed());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok::<_, anyhow::Error>(samples)
        };
        run(&bomber, "import os, time").await?;
        run(&other, "echo hi").await?;
        let quiet = each().await?;
        // The maximum number of processes, each of which tries to fork.
        let bomb = "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass";
        let exploding = bomber.execute(ExecRequest::code(bomb));
        let measured = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let beside = each().await;
            bomber.stop(true).await?;
            beside
        };
        let (_, beside) = futures::join!(exploding, measured);
        let beside = beside?;
        report.times("kaish `echo hi`, nothing beside", &quiet, None);
        report.times("kaish `echo hi` beside a fork bomb", &beside, None);
        report.note("as many processes as that kernel may have, all of them busy; by weight of cgroup v2 where that is delegated, else by the host's scheduler");
        report.figure("  ÷ nothing beside", beside.p50() / quiet.p50(), "×", None);
        Ok(())
    })
}

/// Resources that a daemon holds.
struct Holdings {
    rss_mib: f64,
    descriptors: usize,
    threads: usize,
    processes: usize,
    mounts: usize,
    folders: usize,
}

impl Holdings {
    fn of(daemon: &Daemon) -> Holdings {
        let pid = daemon.pid();
        let count = |path: std::path::PathBuf| path.read_dir().map_or(0, Iterator::count);
        Holdings {
            rss_mib: process::rss_mib(pid),
            descriptors: count(format!("/proc/{pid}/fd").into()),
            threads: count(format!("/proc/{pid}/task").into()),
            processes: process::tree(pid).len(),
            mounts: std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default().lines().count(),
            folders: count(daemon.data().join("kernels")),
        }
    }
}

/// Creates and removes many kernels, sequentially and concurrently. The resources held at the end
/// equal those held at the beginning.
pub fn soak(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (lives, at_once) = (world.times(10_000, 200), 8);
    let daemon = Daemon::start(world)?;
    daemon.with(async |host| {
        let settled = async || {
            filled(&host, EngineName::Kaish).await?;
            filled(&host, EngineName::Python).await?;
            tokio::time::sleep(Duration::from_secs(2)).await;
            Ok::<_, anyhow::Error>(Holdings::of(&daemon))
        };
        let life = async |n: usize| {
            go_on()?;
            let (engine, code) = match n % 4 {
                0 => (EngineName::Python, format!("x = {n}; open('f', 'w').write('{n}'); print(x)")),
                _ => (EngineName::Kaish, format!("x={n}; echo {n} > f; echo $x")),
            };
            let mut spec = SpecRequest::new(format!("k{n}").parse::<KernelName>()?);
            (spec.engine, spec.ephemeral) = (Some(engine), n.is_multiple_of(2));
            let kernel = host.create_kernel(&spec, "").await?.0;
            let said = run(&kernel, &code).await?;
            anyhow::ensure!(said.stdout.trim_ascii_end() == n.to_string().as_bytes(), "kernel {n}: {:?}", said.stdout);
            kernel.remove(0).await?;
            Ok::<_, anyhow::Error>(())
        };
        let several = async |from: usize, to: usize| {
            let next = std::cell::Cell::new(from);
            let one = async || {
                while next.get() < to {
                    let n = next.replace(next.get() + 1);
                    life(n).await?;
                }
                Ok::<_, anyhow::Error>(())
            };
            futures::future::try_join_all((0..at_once).map(|_| one())).await.map(drop)
        };
        // The first kernels fill caches and grow the pools to their final size.
        let first = (lives / 10).max(100);
        several(0, first).await?;
        let before = settled().await?;
        let begun = Instant::now();
        several(first, lives).await?;
        let took = begun.elapsed();
        let after = settled().await?;
        report.figure(
            &format!("{} lives, {at_once} at once: each", lives - first),
            took.as_secs_f64() * 1000.0 / (lives - first) as f64,
            "ms",
            None,
        );
        report.note("create, one execution, remove; three of four kaish, one Python; half of them ephemeral");
        report.figure("daemon, RSS before", before.rss_mib, "MiB", None);
        report.figure("daemon, RSS after", after.rss_mib, "MiB", Some(Target::AtMost(before.rss_mib * 1.1 + 2.0)));
        for (what, before, after) in [
            ("descriptors", before.descriptors, after.descriptors),
            ("threads", before.threads, after.threads),
            ("processes", before.processes, after.processes),
            ("mounts of the host", before.mounts, after.mounts),
            ("folders of kernels", before.folders, after.folders),
        ] {
            report.figure(&format!("daemon, {what} after"), after as f64, "", Some(Target::AtMost(before as f64)));
            report.note(format!("{before} before"));
        }
        Ok(())
    })
}
