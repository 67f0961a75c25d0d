//! Time of one execution by step: system calls of daemon and worker with their times, and a
//! profile.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;

use crate::daemon::{create, run, worker_pid};
use crate::{Daemon, World, process};

/// Writes `strace.txt` (a few executions) and `perf.txt` (many) into `folder`, for a kaish kernel.
pub fn trace(world: &World, folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    let daemon = Daemon::start(world)?;
    daemon.with(async |host| {
        let kernel = create(&host, "traced", EngineName::Kaish).await?;
        for _ in 0..200 {
            run(&kernel, "echo hi").await?;
        }
        let mut pids = process::tree(worker_pid(&host, "traced").await?);
        pids.push(daemon.pid());
        for pid in &pids {
            println!("{pid} {}", process::name(*pid));
        }
        let list = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");

        let output = folder.join("strace.txt");
        let output = output.to_string_lossy();
        let strace = Watcher::start("strace", &["-f", "-ttt", "-T", "-yy", "-s", "24", "-o", &output, "-p", &list])?;
        for _ in 0..5 {
            run(&kernel, "echo hi").await?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        strace.end()?;

        let data = folder.join("perf.data");
        let arguments = ["record", "-q", "-F", "4999", "-g", "-o", &data.to_string_lossy(), "-p", &list];
        let perf = Watcher::start("perf", &arguments)?;
        for _ in 0..world.times(5000, 1000) {
            run(&kernel, "echo hi").await?;
        }
        perf.end()?;
        let text = Command::new("perf")
            .args([
                "report",
                "--stdio",
                "--no-children",
                "-g",
                "none",
                "--percent-limit",
                "0.5",
                "-s",
                "comm,dso,symbol",
                "-i",
            ])
            .arg(&data)
            .output()?;
        std::fs::write(folder.join("perf.txt"), text.stdout)?;
        println!("{} has strace.txt, perf.data and perf.txt", folder.display());
        Ok(())
    })
}

/// A tracing program, which runs until it is stopped.
struct Watcher(Child);

impl Watcher {
    fn start(program: &str, arguments: &[&str]) -> anyhow::Result<Watcher> {
        let child = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.with_context(|| format!("{program}: install it for --trace"))?;
        std::thread::sleep(Duration::from_millis(500));
        Ok(Watcher(child))
    }

    fn end(mut self) -> anyhow::Result<()> {
        kill(Pid::from_raw(self.0.id() as i32), Signal::SIGINT)?;
        self.0.wait()?;
        Ok(())
    }
}
