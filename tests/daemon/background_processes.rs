//! Background processes that no engine reports are bound by the kernel's limits too.

use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;

use crate::pool::worker_of;
use crate::support::{Host, User, eventually, kernel, run, users};

#[test]
fn background_process_limits() {
    for user in users() {
        let mut host = Host::prepare(user);
        host.configure("[defaults]\nworkspace_size = \"32M\"\n");
        host.launch();
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Bash).await;
            // Not a child of the shell when its execution ends, and idle at first.
            let flood = "n=0; until test -e go; do sleep 0.2; done; \
                while [ $n -lt 200 ]; do head -c 4M /dev/zero > flood.$n; n=$((n + 1)); sleep 0.1; done";
            run(&k, &format!("kept=1; (setsid sh -c '{flood}' >/dev/null 2>&1 &)")).await;
            let info = k.info().await.expect("info");
            assert!(info.state == "ready", "{}", info.state);
            host.release(&k).await;
            let crashed = async || k.info().await.expect("info").state.starts_with("crashed");
            eventually("its limit holds", crashed).await;
            let events = host.ok(&["events", "--json"]);
            assert!(events.contains("workspace size"), "{user:?}: {events}");
            let size = std::process::Command::new("du").arg("-sm").arg(host.data().join("kernels")).output();
            let size = String::from_utf8(size.expect("du runs").stdout).expect("text");
            let mib: u64 = size.split_whitespace().next().and_then(|mib| mib.parse().ok()).expect("a number");
            assert!(mib < 600, "{user:?}: {mib} MiB");
            // With free space again, its state is there.
            for entry in std::fs::read_dir(host.data().join("kernels")).expect("kernels").flatten() {
                let files = std::fs::read_dir(entry.path().join("workspace")).into_iter().flatten().flatten();
                for file in files.filter(|file| file.file_name().to_string_lossy().starts_with("flood")) {
                    std::fs::remove_file(file.path()).expect("removed");
                }
            }
            let again = run(&k, "echo $kept").await;
            assert_eq!(String::from_utf8_lossy(&again.stdout), "1\n", "{again:?}");
        });
    }
}

/// Init polls a worker with running processes about twice a second, and an idle one every ten
/// seconds.
///
/// The daemon's requests wake it occasionally, too.
#[test]
fn idle_worker_sleeps() {
    let host = Host::without_pool(User::Own);
    host.with(async |client| {
        let mut inits = Vec::new();
        for engine in EngineName::ALL {
            let k = kernel(&client, engine.name(), engine).await;
            run(&k, "x=1").await;
            inits.push((engine, worker_of(&host, engine.name())));
        }
        // Writes are counted until the count is complete.
        tokio::time::sleep(Duration::from_secs(4)).await;
        let begun = Instant::now();
        let before: Vec<u64> = inits.iter().map(|(_, init)| wakes(*init)).collect();
        tokio::time::sleep(Duration::from_secs(11)).await;
        for ((engine, init), before) in inits.into_iter().zip(before) {
            let woken = wakes(init) - before;
            let time = begun.elapsed();
            assert!(woken <= time.as_secs() + 1, "the init of {engine} woke {woken} times in {time:?}");
            eventually("it wakes at all", async || wakes(init) > before).await;
        }
    });
}

/// Number of times that a process has slept.
fn wakes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it is there");
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).expect("a number")
}
