//! What code leaves running behind its execution, and no engine tells of, is held to the kernel's limits too.

use ryokan::core::engine::EngineName;

use crate::support::{Host, User, eventually, kernel, out, run, users};

#[test]
fn a_process_that_fills_the_workspace_after_its_execution_ends_with_its_kernel() {
    for user in users() {
        let mut host = Host::prepare(user);
        host.configure("[defaults]\nworkspace_size = \"32M\"\n");
        host.launch();
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Bash).await;
            // No child of the shell by the time its execution ends, and nothing of it for a while.
            let flood =
                "n=0; sleep 3; while [ $n -lt 200 ]; do head -c 4M /dev/zero > flood.$n; n=$((n + 1)); sleep 0.1; done";
            run(&k, &format!("kept=1; (setsid sh -c '{flood}' >/dev/null 2>&1 &)")).await;
            let info = k.info().await.expect("info");
            assert!(info.state == "ready", "{}", info.state);
            let crashed = async || k.info().await.expect("info").state.starts_with("crashed");
            eventually("its limit holds", crashed).await;
            let events = host.ok(&["events", "--json"]);
            assert!(events.contains("workspace size"), "{user:?}: {events}");
            let size = std::process::Command::new("du").arg("-sm").arg(host.data().join("kernels")).output();
            let size = String::from_utf8(size.expect("du runs").stdout).expect("text");
            let mib: u64 = size.split_whitespace().next().and_then(|mib| mib.parse().ok()).expect("a number");
            assert!(mib < 600, "{user:?}: {mib} MiB");
            // Once there is room again, what it had is there.
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

#[test]
fn kernels_whose_code_has_ended_are_left_alone() {
    let host = Host::start_as(User::Own);
    host.with(async |client| {
        for engine in EngineName::ALL {
            let k = kernel(&client, engine.name(), engine).await;
            assert_eq!(
                out(
                    &k,
                    if engine == EngineName::Node {
                        "console.log(1)"
                    } else if engine == EngineName::Python {
                        "print(1)"
                    } else {
                        "echo 1"
                    }
                )
                .await,
                "1"
            );
        }
        // Longer than the pause between two looks.
        let before = used(&host);
        tokio::time::sleep(std::time::Duration::from_secs(25)).await;
        let spent = used(&host) - before;
        assert!(spent < 60, "{spent} ticks of 10 ms by idle workers");
    });
}

/// Processor time of every process of the worker binary, in ticks.
fn used(host: &Host) -> u64 {
    let ticks = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
    };
    host.workers().into_iter().filter_map(ticks).sum()
}
