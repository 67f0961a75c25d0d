//! Memory pressure.
//!
//! A real shortage of memory would affect the whole host. The daemon accepts any PSI file, so the CPU pressure of one
//! cgroup replaces it: two loops on one processor, one of which always waits.

use std::path::PathBuf;
use std::process::{Child, Command};

use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::session::Session as _;

use super::{pool_of, pooled_with, ready, until};
use crate::support::{User, WAITS, kernel, out, run};

/// A cgroup whose tasks stall while its loops run.
struct Short {
    folder: PathBuf,
    loops: Vec<Child>,
}

impl Short {
    fn new() -> Short {
        let mounts = std::fs::read_to_string("/proc/mounts").expect("the mounts");
        let root = mounts.lines().find_map(|line| {
            let mut words = line.split(' ');
            let (at, kind) = (words.nth(1)?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(at))
        });
        let folder = root.expect("a host with cgroup v2").join(format!("ryokan-test-short-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("a cgroup");
        Short { folder, loops: Vec::new() }
    }

    fn begin(&mut self) {
        for _ in 0..2 {
            let looping =
                Command::new("taskset").args(["1", "/bin/sh", "-c", "while :; do :; done"]).spawn().expect("runs");
            std::fs::write(self.folder.join("cgroup.procs"), looping.id().to_string()).expect("moved");
            self.loops.push(looping);
        }
    }

    fn end(&mut self) {
        for mut looping in self.loops.drain(..) {
            looping.kill().expect("killed");
            looping.wait().expect("ended");
        }
    }
}

impl Drop for Short {
    fn drop(&mut self) {
        self.end();
        let _ = std::fs::remove_dir(&self.folder);
    }
}

#[test]
fn memory_pressure_eviction_order() {
    let mut short = Short::new();
    let file = short.folder.join("cpu.pressure");
    let host = pooled_with(User::Own, &format!("[daemon]\npressure_file = \"{}\"\n", file.display()));
    host.with(async |client| {
        ready(&client, "kaish").await;
        // The least recently used kernel has a job: others are stopped nevertheless.
        let works = kernel(&client, "works", EngineName::Kaish).await;
        run(&works, "/bin/sleep 600 &").await;
        let first = kernel(&client, "first", EngineName::Kaish).await;
        run(&first, "x=kept").await;
        let second = kernel(&client, "second", EngineName::Kaish).await;
        run(&second, "x=kept").await;
        let busy = kernel(&client, "busy", EngineName::Kaish).await;
        let code = ExecRequest::code(format!("{WAITS}; echo done"));
        let (running, ()) = tokio::join!(busy.execute(code), async {
            ready(&client, "kaish").await;
            short.begin();
            let gone = until(&client, "kaish", |pool| pool.idle == 0 && pool.creating == 0).await;
            assert!(gone.trouble.contains("memory is short"), "{gone:?}");
            crate::support::eventually("both idle kernels are stopped", async || {
                let stopped = host.ok(&["ls", "--json"]);
                stopped.matches("\"stopped\"").count() == 2
            })
            .await;
            assert_eq!(pool_of(&client, "kaish").await.idle, 0);
            short.end();
            until(&client, "kaish", |pool| pool.idle > 0 && pool.trouble.is_empty()).await;
            host.release(&busy).await;
        });
        assert_eq!(String::from_utf8_lossy(&running.expect("ran").stdout), "done\n", "running code is not affected");
        let events = host.ok(&["events", "--json"]);
        let at = |what: &str, of: &str| {
            let found = events.lines().position(|line| line.contains(what) && line.contains(of));
            found.unwrap_or_else(|| panic!("no {what} of {of:?} in {events}"))
        };
        assert!(at("memory_pressure_started", "") < at("kernel_stopped", "\"first\""), "{events}");
        assert!(
            at("kernel_stopped", "\"first\"") < at("kernel_stopped", "\"second\""),
            "the longest unused first: {events}"
        );
        assert!(!events.lines().any(|line| line.contains("kernel_stopped") && line.contains("\"busy\"")), "{events}");
        assert!(!events.lines().any(|line| line.contains("kernel_stopped") && line.contains("\"works\"")), "{events}");
        assert!(host.ok(&["show", "first"]).contains("memory was short"));
        assert!(host.ok(&["log", "first"]).contains("before a stop for want of memory"));
        // The stop left no trace.
        assert_eq!(out(&first, "echo $x").await, "kept");
    });
    // The PSI file is removed: that is no shortage, and another source is used from then on.
    drop(short);
    crate::support::until("it is noticed", || host.log().contains("the host no longer says when memory is short"));
}
