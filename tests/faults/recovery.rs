//! Recovery at start: more kernels than are recovered concurrently, and records of workers that do
//! not exist.

use ryokan::catalog::{Catalog, CatalogConfig, Durability, WorkerRow};
use ryokan::core::engine::EngineName;
use ryokan::core::ids::{Epoch, HostId, KernelId, WorkerId};
use ryokan::core::spec::Isolation;
use ryokan::rpc::client::run_local;

use super::{Bystander, inits, remove_all};
use crate::support::{Host, kernel, out, spec, users};

/// Several times the number that is recovered concurrently.
const MANY: usize = 200;

#[test]
fn recovery_spans_several_batches() {
    let mut host = Host::start();
    let name = |number: usize| format!("k{number:03}");
    host.with(async |client| {
        for number in 0..MANY {
            let shell = kernel(&client, &name(number), EngineName::Kaish).await;
            shell.message("user", &format!("note {number}")).await.expect("noted");
        }
        // Some of them are live among the others.
        for number in [0, 63, 64, MANY - 1] {
            out(&client.open_kernel(&name(number)).await.expect("there").0, &format!("n={number}")).await;
        }
    });
    let live = inits(&host);
    host.restart();
    assert_eq!(inits(&host), live, "live workers survive");
    host.with(async |client| {
        let kernels = client.list_kernels(&Default::default()).await.expect("kernels");
        assert_eq!(kernels.len(), MANY);
        assert_eq!(kernels.iter().filter(|info| info.state == "ready").count(), live.len(), "{}", host.log());
        for number in 0..MANY {
            let (shell, info) = client.open_kernel(&name(number)).await.expect("there");
            let mut notes = Vec::new();
            let read = shell.each_journal_entry(0, 0, async |entry| {
                notes.extend((entry.kind == "message").then_some(entry.text));
                Ok(())
            });
            read.await.expect("its journal");
            assert_eq!(notes, [format!("user: note {number}")], "{info:?}");
        }
        for number in [0, 63, 64, MANY - 1] {
            let (shell, _) = client.open_kernel(&name(number)).await.expect("there");
            assert_eq!(out(&shell, "echo $n").await, number.to_string());
        }
        assert_eq!(out(&client.open_kernel(&name(100)).await.expect("there").0, "echo up").await, "up");
    });
    remove_all(&host);
}

/// Opens the databases of a stopped daemon.
fn with_catalog<T>(host: &Host, work: impl AsyncFnOnce(ryokan::catalog::CatalogHandle) -> T) -> T {
    let config = CatalogConfig {
        data: host.data(),
        durability: Durability::Process,
        fresh_host_id: HostId::from_bytes([7; 16]),
        now_ms: 1,
    };
    let catalog = Catalog::open(&config).expect("the catalog is not in use");
    let handle = catalog.handle();
    let done = run_local(work(handle)).unwrap();
    catalog.stop();
    done
}

#[test]
fn stale_worker_records_removed() {
    for user in users() {
        let mut host = Host::start_as(user);
        let bystander = Bystander::new();
        let kernels: Vec<KernelId> = host.with(async |client| {
            out(&kernel(&client, "live", EngineName::Kaish).await, "x=kept").await;
            client.create_kernel(&spec("idle", EngineName::Kaish), "").await.expect("made");
            let listed = client.list_kernels(&Default::default()).await.expect("kernels");
            ["live", "idle"].map(|name| listed.iter().find(|info| info.spec.name.as_str() == name).unwrap().id).into()
        });
        let live = inits(&host);
        host.kill();
        let run = host.path("run");
        let socket = |number: u8| run.join(format!("leaked-{number}.sock"));
        let leak = |number: u8, kernel: KernelId, pid: u32| WorkerRow {
            id: WorkerId::from_bytes([number; 16]),
            kernel,
            epoch: Epoch(1),
            build: "none".into(),
            secret: vec![number; 32],
            isolation: Isolation::Process,
            // The process of that number is another one.
            record: serde_json::json!({
                "socket": socket(number),
                "process": (pid != 0).then(|| serde_json::json!({ "pid": pid, "start_ticks": 1 })),
                "run_as": null,
            })
            .to_string(),
        };
        let leaked = [
            // Recorded before it had a process; beside a live one; of a stopped kernel; of a
            // removed one.
            leak(1, kernels[0], 0),
            leak(2, kernels[1], bystander.pid()),
            leak(3, kernels[1], 0),
            leak(4, KernelId::from_bytes([9; 16]), bystander.pid()),
            leak(5, KernelId::from_bytes([9; 16]), 0),
            // Of an ended process, beside a live one; the first in the catalog.
            leak(0, kernels[0], bystander.pid()),
            WorkerRow { record: "{".into(), ..leak(6, kernels[1], 0) },
        ];
        for number in 0..=5 {
            std::fs::write(socket(number), "").unwrap();
        }
        with_catalog(&host, async |catalog| {
            for row in &leaked {
                catalog.put_worker(row.clone()).await.expect("recorded");
            }
        });
        host.launch();
        assert_eq!(inits(&host), live, "{user:?}: the live worker is adopted");
        host.with(async |client| {
            assert_eq!(out(&client.open_kernel("live").await.expect("there").0, "echo $x").await, "kept");
            assert_eq!(out(&client.open_kernel("idle").await.expect("there").0, "echo up").await, "up");
        });
        bystander.check();
        for number in 0..=5 {
            assert!(!socket(number).exists(), "{user:?}: worker {number} left its socket");
        }
        host.kill();
        let left = with_catalog(&host, async |catalog| catalog.workers().await.expect("listed"));
        assert!(left.iter().all(|row| !leaked.contains(row)), "{user:?}: {left:?}");
        assert_eq!(left.len(), 2, "{user:?}: the live kernels");
        host.launch();
        remove_all(&host);
    }
}
