//! Effects of time: expired warm workers, shrinking after bursts, idle kernels.

use ryokan::core::checkpoint::CheckpointType;
use ryokan::core::engine::EngineName;
use ryokan::core::info::PoolInfo;
use ryokan::rpc::client::HostClient;

use super::load::Holdings;
use super::worker_failures::inits;
use super::{pool_of, pooled, ready, until, worker_of};
use crate::support::{Host, User, eventually, kernel, out, run, spec, users};

/// A daemon with one kaish pool and these rules.
fn with_rules(user: User, rules: &str) -> Host {
    let mut host = Host::prepare(user);
    host.configure(&format!(
        "[pool]\nmaintenance_interval = \"1s\"\n{rules}[pool.engines.python]\npool_size = 0\nmin_idle = 0\n"
    ));
    host.launch();
    host
}

/// Waits until the daemon holds its former resources again.
async fn holds(host: &Host, before: &Holdings) {
    eventually("nothing of the removed workers is left", async || {
        let now = Holdings::of(host);
        // One or two files of the daemon may be open or not.
        now.is_but_for_descriptors(before) && now.descriptors <= before.descriptors + 2
    })
    .await;
}

#[test]
fn expired_worker_replaced_first() {
    const WAIT: u32 = 2;
    for user in users() {
        let host = with_rules(user, "pool_size = 2\nmin_idle = 2\nmax_pool_size = 4\nmax_uptime = \"4s\"\n");
        host.with(async |client| {
            // On a slow host, a replacement may be under way as soon as the pool is full.
            until(&client, "kaish", |pool| pool.idle == WAIT && inits(&host).len() as u32 == WAIT).await;
            let (before, mut seen) = (Holdings::of(&host), inits(&host));
            // Three generations: none has fewer workers than configured.
            for generation in 1..=3 {
                let are_others = |pool: &PoolInfo| {
                    assert!(pool.idle >= WAIT, "generation {generation}: {pool:?}");
                    let now = inits(&host);
                    pool.idle == WAIT && pool.creating == 0 && seen.iter().all(|pid| !now.contains(pid))
                };
                until(&client, "kaish", are_others).await;
                seen = inits(&host);
            }
            // Replaced workers count once they have ended.
            let pool = until(&client, "kaish", |pool| pool.total_destroyed >= u64::from(3 * WAIT)).await;
            assert!(pool.total_created >= pool.total_destroyed + u64::from(WAIT), "{pool:?}");
            assert_eq!((pool.creation_errors, pool.trouble.as_str(), pool.missed), (0, "", 0), "{pool:?}");
            holds(&host, &before).await;
            // New kernels get one of them.
            assert_eq!(out(&kernel(&client, "k", EngineName::Kaish).await, "echo well").await, "well");
            assert_eq!(pool_of(&client, "kaish").await.taken, 1);
        });
    }
}

#[test]
fn pool_shrinks_after_burst() {
    const BURST: u32 = 5;
    // The pool is full before it shrinks, on a slow host too.
    let host = with_rules(User::Own, "pool_size = 1\nmin_idle = 1\nmax_pool_size = 6\nmax_idle_time = \"20s\"\n");
    let one = async |client: &HostClient, n: u32| {
        let name = format!("k{n}");
        assert_eq!(out(&kernel(client, &name, EngineName::Kaish).await, "echo well").await, "well");
        client.remove_kernel(&name, 0).await.expect("removed");
    };
    host.with(async |client| {
        ready(&client, "kaish").await;
        one(&client, 0).await;
        let quiet = |pool: &PoolInfo| (pool.target, pool.idle, pool.total) == (1, 1, 1);
        until(&client, "kaish", quiet).await;
        let before = Holdings::of(&host);
        futures::future::join_all((1..=BURST).map(|n| one(&client, n))).await;
        let grown = until(&client, "kaish", |pool| pool.target >= BURST && pool.idle >= BURST).await;
        assert!(grown.idle <= 6, "{grown:?}");
        // No further requests. Removed workers count once they have ended.
        let shrunk = until(&client, "kaish", |pool| {
            assert!(pool.idle >= 1, "{pool:?}");
            quiet(pool) && pool.total_created - pool.total_destroyed == 1
        })
        .await;
        assert_eq!((shrunk.creation_errors, shrunk.trouble.as_str()), (0, ""), "{shrunk:?}");
        holds(&host, &before).await;
    });
}

#[test]
fn idle_kernel_resumes_warm() {
    for user in users() {
        let host = pooled(user);
        for engine in [EngineName::Kaish, EngineName::Python] {
            host.with(async |client| {
                ready(&client, engine.name()).await;
                let mut wanted = spec(&format!("idle-{engine}"), engine);
                wanted.idle_timeout_ms = Some(300);
                let (k, _) = client.create_kernel(&wanted, "").await.expect("made");
                let (set, get) = match engine {
                    EngineName::Python => (
                        "x = 41\ndef twice(n): return 2 * n\nprint('kept', file=open('f', 'w'))",
                        "print(x, twice(4), open('f').read(), end='')",
                    ),
                    EngineName::Kaish | EngineName::Bash | EngineName::Node => {
                        ("x=41; twice() { echo $(($1 * 2)); }; echo kept > f", "echo $x $(twice 4) $(cat f)")
                    }
                };
                run(&k, set).await;
                for round in 1..=2 {
                    let worker = worker_of(&host, wanted.name.as_str());
                    let is_stopped = async || k.info().await.expect("info").state == "stopped";
                    eventually("it stops by itself", is_stopped).await;
                    eventually("its worker ends", async || !Host::is_alive(worker)).await;
                    let mut taken = Vec::new();
                    let listed = k.checkpoints(0, async |one, _| {
                        taken.push((one.name, one.kind));
                        Ok(())
                    });
                    listed.await.expect("a list");
                    // Every execution may have changed something.
                    let each = ("before idle stop".to_owned(), CheckpointType::Auto);
                    assert_eq!(taken, vec![each; round], "{engine} {round}");
                    let (before, waiting) = (ready(&client, engine.name()).await, inits(&host));
                    assert_eq!(out(&k, get).await, "41 8 kept", "{user:?} {engine} {round}");
                    let after = pool_of(&client, engine.name()).await;
                    let difference = (after.taken - before.taken, after.missed - before.missed);
                    assert_eq!(difference, (1, 0), "{user:?} {engine} {round}: {before:?} {after:?}");
                    assert!(waiting.contains(&worker_of(&host, wanted.name.as_str())), "{engine} {round}");
                }
            });
        }
    }
}
