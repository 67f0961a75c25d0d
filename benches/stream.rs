//! Bulk output.

use std::path::Path;
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, OutputEvent};
use ryokan::rpc::client::KernelClient;

use crate::daemon::{create, run, worker_pid};
use crate::peers::pipe_throughput;
use crate::report::{Report, Target};
use crate::{Daemon, World, process};

fn event_bytes(event: &OutputEvent) -> u64 {
    match event {
        OutputEvent::Stdout(data) | OutputEvent::Stderr(data) => data.len() as u64,
        OutputEvent::Truncated(bytes) => *bytes,
        OutputEvent::Display { .. } | OutputEvent::Structured(_) | OutputEvent::ExitCode(_) => 0,
    }
}

/// Runs code and reads its output without delay; returns bytes and time.
async fn drain(kernel: &KernelClient, code: &str) -> anyhow::Result<(u64, Duration)> {
    let begun = Instant::now();
    let execution = kernel.run(&ExecRequest::code(code)).await?;
    let (mut bytes, mut truncated) = (0, 0);
    execution
        .output(0, async |event| {
            match event {
                OutputEvent::Truncated(lost) => truncated += lost,
                other => bytes += event_bytes(&other),
            }
            Ok(())
        })
        .await?;
    let took = begun.elapsed();
    let result = execution.result().await?;
    anyhow::ensure!(result.end.code == 0, "{code:?}: {}", result.end.err);
    anyhow::ensure!(truncated == 0, "{truncated} bytes were lost to a reader that was there from the start");
    Ok((bytes, took))
}

fn megabytes_per_second((bytes, took): (u64, Duration)) -> f64 {
    bytes as f64 / 1e6 / took.as_secs_f64()
}

/// Throughput from the code to the client, through init and daemon.
pub fn throughput(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let mib = world.times(1000, 100);
    let python_code = format!("import sys\nfor _ in range({mib}): sys.stdout.write('x' * 1048576)");
    let head = format!("head -c {} /dev/zero", mib << 20);
    let daemon = Daemon::start(world)?;
    daemon.with(async |host| {
        let py = create(&host, "py", EngineName::Python).await?;
        let shell = create(&host, "shell", EngineName::Kaish).await?;
        run(&py, "1").await?;
        run(&shell, "echo hi").await?;
        let target = Some(Target::AtLeast(200.0));
        let before = process::rss_mib(daemon.pid());
        for (what, kernel, code) in
            [("python writes 1 MiB at a time", &py, &*python_code), ("kaish `head -c … /dev/zero`", &shell, &*head)]
        {
            let taken = drain(kernel, code).await?;
            anyhow::ensure!(taken.0 == (mib as u64) << 20, "{} bytes received of {mib} MiB", taken.0);
            report.figure(what, megabytes_per_second(taken), "MB/s", target);
            report.note(format!("{mib} MiB"));
            let begun = Instant::now();
            run(kernel, code).await?;
            report.figure(
                &format!("{what}, nobody reads"),
                megabytes_per_second(((mib as u64) << 20, begun.elapsed())),
                "MB/s",
                None,
            );
        }
        report.figure("the daemon grew meanwhile", process::rss_mib(daemon.pid()) - before, "MiB", None);
        Ok(())
    })?;
    let plain = pipe_throughput(&world.python, &["-c", &python_code])?;
    report.figure("the same python into a plain pipe", megabytes_per_second(plain), "MB/s", None);
    let plain = pipe_throughput(Path::new("head"), &["-c", &format!("{mib}M"), "/dev/zero"])?;
    report.figure("the same head into a plain pipe", megabytes_per_second(plain), "MB/s", None);
    Ok(())
}

/// A reader at 1 MB/s of code that writes without delay.
pub fn slow_client(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let seconds = world.times(5, 2) as u32;
    let daemon = Daemon::start(world)?;
    daemon.with(async |host| {
        let shell = create(&host, "shell", EngineName::Kaish).await?;
        run(&shell, "head -c 67108864 /dev/zero").await?;
        let init = worker_pid(&host, "shell").await?;
        let inside = || process::tree(init).into_iter().map(process::rss_mib).filter(|m| m.is_finite()).sum::<f64>();
        let (before, worker_before) = (process::rss_mib(daemon.pid()), inside());
        let (mut most, mut worker_most) = (before, worker_before);
        let execution = shell.run(&ExecRequest::code("head -c 1048576000000 /dev/zero")).await?;
        let begun = Instant::now();
        let mut bytes = 0u64;
        let reading = execution.output(0, async |event| {
            bytes += event_bytes(&event);
            tokio::time::sleep_until((begun + Duration::from_secs_f64(bytes as f64 / 1e6)).into()).await;
            most = most.max(process::rss_mib(daemon.pid()));
            worker_most = worker_most.max(inside());
            Ok(())
        });
        let _ = tokio::time::timeout(Duration::from_secs(u64::from(seconds)), reading).await;
        shell.interrupt_execution(execution.exec()).await?;
        let result = execution.result().await?;
        report.figure("the daemon grew by", most - before, "MiB", Some(Target::AtMost(16.0)));
        report.note(format!("from {before:.1} MiB; the client took {:.1} MB in {seconds} s", bytes as f64 / 1e6));
        report.figure("the worker grew by", worker_most - worker_before, "MiB", Some(Target::AtMost(16.0)));
        let written = result.stdout.len() as u64 + result.truncated_bytes;
        report.figure("the code got ahead of the client by", (written.saturating_sub(bytes)) as f64 / 1e6, "MB", None);
        report.note(format!("ended as {}", result.end.status.name()));
        Ok(())
    })
}
