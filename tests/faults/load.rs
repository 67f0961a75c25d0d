//! Many concurrent kernels and clients.

use std::time::Instant;

use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::ExecStatus;
use ryokan::rpc::client::{HostClient, run_local};

use super::{Bystander, inits, remove_all, rss};
use crate::support::{Host, kernel, out, run, spec};

/// Concurrent kernels and clients. `RYOKAN_TEST_MANY` in the environment overrides the number.
const MANY: usize = 60;

#[test]
fn many_kernels_and_clients_at_once() {
    let many = std::env::var("RYOKAN_TEST_MANY").ok().and_then(|number| number.parse().ok()).unwrap_or(MANY);
    let mut host = Host::prepare(crate::support::User::Own);
    host.configure(&format!(
        "[limits]\nkernels = {many}\nworkers = {many}\nclients = {}\nexecutions_in_flight = {many}\n",
        many + 1
    ));
    host.launch();
    let bystander = Bystander::new();
    let before = rss(host.pid());
    let began = Instant::now();
    run_local(async {
        let one = async |number: usize| {
            let client = HostClient::connect(&host.socket(), &format!("client {number}")).await.expect("connects");
            let made = client.create_kernel(&spec(&format!("k{number}"), EngineName::Kaish), "").await;
            let (shell, _) = made.unwrap_or_else(|error| panic!("kernel {number}: {error:?}"));
            let first = run(&shell, &format!("n={number}; echo $n")).await;
            assert_eq!(first.end.status, ExecStatus::Done, "kernel {number}: {:?}", first.end);
            assert_eq!(out(&shell, "echo $n").await, number.to_string());
            (client, shell)
        };
        let clients = futures::future::join_all((0..many).map(one)).await;
        eprintln!("{many} kernels with a worker each after {:?}", began.elapsed());
        assert!(host.workers().len() >= many, "all of them live");
        // One request beyond the limit is refused and affects nothing else.
        let error = clients[0].0.create_kernel(&spec("more", EngineName::Kaish), "").await.err().expect("too many");
        assert_eq!(error.code, ErrorCode::Busy, "{error:?}");
        let again = Instant::now();
        futures::future::join_all(clients.iter().enumerate().map(async |(number, (_, shell))| {
            assert_eq!(out(shell, "echo $n").await, number.to_string());
        }))
        .await;
        eprintln!(
            "{many} executions at once in {:?}; the daemon has {} KiB, {before} KiB at first",
            again.elapsed(),
            rss(host.pid())
        );
    })
    .unwrap();
    let grown = rss(host.pid()).saturating_sub(before) / many as u64;
    assert!(grown < 1024, "{grown} KiB of the daemon's memory for each kernel");
    let restarted = Instant::now();
    host.restart();
    eprintln!("{many} workers taken over in {:?}", restarted.elapsed());
    host.with(async |client| {
        let kernels = client.list_kernels(&Default::default()).await.expect("kernels");
        assert_eq!(kernels.len(), many);
        assert!(kernels.iter().all(|info| info.state == "ready"), "every worker was adopted\n{}", host.log());
    });
    bystander.check();
    let removing = Instant::now();
    remove_all(&host);
    eprintln!("{many} kernels removed in {:?}, all in {:?}", removing.elapsed(), began.elapsed());
}

/// More kernels than the worker limit, started at once: the refused ones get `busy` and do not
/// count as crashes.
#[test]
fn worker_limit_is_not_a_crash() {
    const PLACES: usize = 3;
    let mut host = Host::prepare(crate::support::User::Own);
    host.configure(&format!("[limits]\nworkers = {PLACES}\n"));
    host.launch();
    host.with(async |client| {
        let mut kernels = Vec::new();
        for number in 0..12 {
            kernels.push(kernel(&client, &format!("k{number}"), EngineName::Kaish).await);
        }
        // More rounds than crashes are allowed.
        for round in 0..5 {
            let started = futures::future::join_all(kernels.iter().map(|k| k.start())).await;
            let inits = inits(&host).len();
            assert_eq!((started.iter().filter(|s| s.is_ok()).count(), inits), (PLACES, PLACES), "{round}: {started:?}");
            for (kernel, started) in kernels.iter().zip(started) {
                let state = kernel.info().await.expect("info").state;
                let Err(error) = started else {
                    assert_eq!(state, "ready");
                    continue;
                };
                assert_eq!((error.code, error.reason.as_str()), (ErrorCode::Busy, "workers"), "{error:?}");
                assert!(["created", "stopped"].contains(&state.as_str()), "{round}: {state}");
            }
            // Other kernels are first in the next round.
            for kernel in &kernels {
                kernel.stop(true).await.expect("stops");
            }
            kernels.rotate_left(PLACES);
        }
        assert_eq!(out(&kernels[0], "echo well").await, "well");
    });
}
