//! Many kernels, many clients, and the cost of idling.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use ryokan::core::engine::EngineName;
use ryokan::core::info::KernelFilter;
use ryokan::core::value::Value;
use ryokan::rpc::client::HostClient;

use crate::daemon::{create, run, worker_pid};
use crate::report::{Report, Samples, Target};
use crate::{Daemon, World, process};

/// Memory of one idle worker: all of its processes, shared pages counted once.
pub fn worker_memory(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let daemon = Daemon::start(world)?;
    report.figure("fresh daemon, RSS", process::rss_mib(daemon.pid()), "MiB", None);
    daemon.with(async |host| {
        for (engine, code) in [(EngineName::Kaish, "echo hi"), (EngineName::Python, "1+1")] {
            let name = format!("one-{engine}");
            let kernel = create(&host, &name, engine).await?;
            run(&kernel, code).await?;
            tokio::time::sleep(Duration::from_secs(1)).await;
            let init = worker_pid(&host, &name).await?;
            let mut parts: Vec<(String, f64)> =
                process::tree(init).into_iter().map(|pid| (process::name(pid), process::pss_mib(pid))).collect();
            // The parent of init, which waits for it, is outside of its tree.
            parts.extend(parent_of(init).map(|pid| (format!("outer {}", process::name(pid)), process::pss_mib(pid))));
            let whole: f64 = parts.iter().map(|(_, mib)| mib).sum();
            report.figure(&format!("one idle {engine} worker, PSS"), whole, "MiB", None);
            let parts: Vec<String> = parts.iter().map(|(name, mib)| format!("{name} {mib:.1}")).collect();
            report.note(parts.join(", "));
        }
        Ok(())
    })
}

/// The parent of a worker's init, if it belongs to the worker.
fn parent_of(init: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{init}/status")).ok()?;
    let parent: u32 = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
    process::name(parent).starts_with("ryokan-worker").then_some(parent)
}

/// Idle live kernels.
pub fn idle(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (kernels, seconds) = (world.times(100, 10), world.times(30, 5) as u64);
    let daemon = Daemon::start(world)?;
    daemon.with(async |host| {
        let mut pids = Vec::new();
        for i in 0..kernels {
            let name = format!("k{i}");
            let kernel = create(&host, &name, EngineName::Kaish).await?;
            run(&kernel, "x=1").await?;
            pids.extend(process::tree(worker_pid(&host, &name).await?));
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let workers = || pids.iter().map(|pid| process::cpu(*pid)).sum::<Duration>();
        let (before, workers_before, begun) = (process::cpu(daemon.pid()), workers(), Instant::now());
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let share = |cpu: Duration| cpu.as_secs_f64() / begun.elapsed().as_secs_f64() * 100.0;
        let (own, theirs) = (share(process::cpu(daemon.pid()) - before), share(workers() - workers_before));
        report.figure(&format!("daemon, {kernels} idle live kernels"), own, "% of a core", Some(Target::AtMost(0.5)));
        report.note(format!("over {seconds} s; /proc counts in 10 ms"));
        report.figure(&format!("their {kernels} workers together"), theirs, "% of a core", None);
        report.figure("daemon, RSS", process::rss_mib(daemon.pid()), "MiB", None);
        Ok(())
    })
}

/// 64 concurrent clients, each with its own connection.
pub fn clients(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let clients = 64;
    let time = Duration::from_secs(world.times(10, 3) as u64);
    let daemon = Daemon::start(world)?;
    let socket = daemon.socket();
    for own_kernels in [true, false] {
        let (done, latency) = daemon.with(async |host| {
            let mut kernels = Vec::new();
            for i in 0..if own_kernels { clients } else { 1 } {
                let name = format!("k{own_kernels}{i}");
                run(&create(&host, &name, EngineName::Kaish).await?, "echo hi").await?;
                kernels.push(name);
            }
            let until = Instant::now() + time;
            let mut tasks = Vec::new();
            for i in 0..clients {
                let (socket, name) = (socket.clone(), kernels[i % kernels.len()].clone());
                tasks.push(tokio::task::spawn_local(async move {
                    let host = HostClient::connect(&socket, "bench").await?;
                    let (kernel, _) = host.open_kernel(&name).await?;
                    let mut took = Vec::new();
                    while Instant::now() < until {
                        let begun = Instant::now();
                        run(&kernel, "echo hi").await?;
                        took.push(begun.elapsed());
                    }
                    anyhow::Ok(took)
                }));
            }
            let (mut done, mut latency) = (0, Samples::default());
            for task in tasks {
                let took = task.await??;
                done += took.len();
                took.into_iter().for_each(|took| latency.add(took));
            }
            for name in kernels {
                host.remove_kernel(&name, 0).await?;
            }
            Ok((done, latency))
        })?;
        let what = if own_kernels { "64 clients, a kernel each" } else { "64 clients, one kernel" };
        report.figure(what, done as f64 / time.as_secs_f64(), "executions/s", None);
        report.times(&format!("{what}: one execution"), &latency, None);
    }
    Ok(())
}

/// A new daemon adopts live workers.
pub fn restart(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let kernels = world.times(32, 8);
    let mut daemon = Daemon::start(world)?;
    daemon.with(async |host| {
        for i in 0..kernels {
            let kernel = create(&host, &format!("k{i}"), EngineName::Kaish).await?;
            run(&kernel, "echo hi").await?;
            kernel.put_var("x", &Value::Int(i as i64), 0).await?;
        }
        Ok(())
    })?;
    for (what, signal) in [("orderly", Signal::SIGHUP), ("kill -9", Signal::SIGKILL)] {
        let ended = daemon.end(signal)?;
        let begun = Instant::now();
        let answered = daemon.start_again()?;
        let (adopted, all_used) = daemon.with(async |host| {
            let infos = host.list_kernels(&KernelFilter::default()).await?;
            let live = infos.iter().filter(|info| matches!(&*info.state, "ready" | "busy")).count();
            for i in 0..kernels {
                let (kernel, _) = host.open_kernel(&format!("k{i}")).await?;
                let value = kernel.var("x").await?;
                anyhow::ensure!(value == Value::Int(i as i64), "k{i} has {value:?} after the restart");
            }
            Ok((live, begun.elapsed()))
        })?;
        report.figure(&format!("{what}: new daemon answers"), answered.as_secs_f64() * 1000.0, "ms", None);
        report.note(format!("{adopted} of {kernels} live workers adopted; the former one ended in {ended:.0?}"));
        report.figure(&format!("{what}: every kernel answered"), all_used.as_secs_f64() * 1000.0, "ms", None);
        anyhow::ensure!(adopted == kernels, "{adopted} of {kernels} live workers were adopted");
    }
    Ok(())
}

/// Kernels without a worker.
pub fn kernels(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (kernels, used) = (world.times(1000, 100), world.times(100, 10));
    let mut daemon = Daemon::start(world)?;
    let mut creating = Samples::default();
    daemon.with(async |host| {
        for i in 0..kernels {
            let begun = Instant::now();
            let kernel = create(&host, &format!("k{i:04}"), EngineName::Kaish).await?;
            creating.add(begun.elapsed());
            if i < used {
                run(&kernel, "echo hi").await?;
                kernel.stop(true).await?;
            }
        }
        Ok(())
    })?;
    report.times("create a kernel", &creating, None);
    let most = Some(Target::AtMost(60.0));
    report.figure(&format!("daemon with {kernels} stopped kernels, RSS"), process::rss_mib(daemon.pid()), "MiB", most);
    report.note(format!("{used} of them ran once and were stopped, the others were only created"));
    daemon.end(Signal::SIGINT)?;
    let answered = daemon.start_again()?;
    report.figure(&format!("start with {kernels} kernels"), answered.as_secs_f64() * 1000.0, "ms", None);
    report.figure("  RSS after that", process::rss_mib(daemon.pid()), "MiB", most);
    daemon.with(async |host| {
        let begun = Instant::now();
        let listed = host.list_kernels(&KernelFilter::default()).await?.len();
        report.figure("list them", begun.elapsed().as_secs_f64() * 1000.0, "ms", None);
        anyhow::ensure!(listed == kernels, "{listed} of {kernels} kernels are listed");
        Ok(())
    })
}
