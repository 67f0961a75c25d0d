//! Traces that a kernel leaves in any reachable place are invisible to later kernels, during and
//! after its life.

use std::collections::BTreeMap;
use std::time::SystemTime;

use ryokan::core::engine::EngineName;
use ryokan::rpc::client::KernelClient;

use super::worker_failures::inits;
use super::{READY, pool_of, pooled, ready, worker_of};
use crate::support::{Host, eventually, kernel, out, users};

/// The System V key and the listening port.
const PLACES: &str = "KEY = 0x5ec2e7\nPORT = 47131\n";

/// Places that always accept a trace; the sandbox of some hosts refuses further ones.
const ALWAYS: [&str; 9] = [
    "files /workspace/kept",
    "files /tmp/kept",
    "files /dev/shm/kept",
    "abstract",
    "listens",
    "cmdline",
    "environ",
    "variables SECRET",
    "memory",
];

/// A text that is unique on this host.
fn secret() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    format!("secret{:08x}{:016x}", std::process::id(), now.as_nanos() as u64)
}

/// Leaves the secret in all places; returns the places.
async fn leave(kernel: &KernelClient, secret: &str) -> Vec<String> {
    let said = out(kernel, &format!("SECRET = {secret:?}\n{PLACES}{}", include_str!("leaves.py"))).await;
    said.lines().filter_map(|line| Some(line.strip_prefix("left ")?.to_owned())).collect()
}

/// Places where the secret is found, and the number of lookups per kind.
async fn look(kernel: &KernelClient, secret: &str) -> (Vec<String>, BTreeMap<String, u64>) {
    let shifted: String = secret.bytes().map(|byte| format!("{:02x}", byte + 1)).collect();
    let code = format!("SHIFTED = bytes.fromhex({shifted:?})\n{PLACES}{}", include_str!("looks.py"));
    let (mut found, mut looked) = (Vec::new(), BTreeMap::new());
    for line in out(kernel, &code).await.lines() {
        match (line.strip_prefix("found "), line.strip_prefix("looked ").and_then(|rest| rest.split_once(' '))) {
            (Some(place), _) => found.push(place.to_owned()),
            (_, Some((kind, times))) => drop(looked.insert(kind.to_owned(), times.parse().expect("a number"))),
            (None, None) => panic!("{line:?}"),
        }
    }
    (found, looked)
}

/// Processes of this host that were given the secret.
fn processes_with(secret: &str) -> Vec<String> {
    let has = |path: &std::path::Path| {
        let read = std::fs::read(path).unwrap_or_default();
        read.windows(secret.len()).any(|piece| piece == secret.as_bytes())
    };
    let all = std::fs::read_dir("/proc").expect("readable").flatten().map(|entry| entry.path());
    let with = all.filter(|process| has(&process.join("cmdline")) || has(&process.join("environ")));
    with.map(|process| process.display().to_string()).collect()
}

#[test]
fn secrets_never_reach_next_kernel() {
    for (user, removed) in users().into_iter().flat_map(|user| [(user, true), (user, false)]) {
        let host = pooled(user);
        host.with(async |client| {
            ready(&client, "python").await;
            let first = kernel(&client, "first", EngineName::Python).await;
            ready(&client, "python").await;
            let waited = inits(&host);
            let secret = secret();
            let left = leave(&first, &secret).await;
            assert!(ALWAYS.iter().all(|place| left.iter().any(|of| of == place)), "{user:?}: {left:?}");
            // The kernel itself finds all of it.
            let (found, _) = look(&first, &secret).await;
            for place in &left {
                assert!(found.iter().any(|of| of.starts_with(place)), "{user:?}: {place} is none of {found:?}");
            }
            assert!(!processes_with(&secret).is_empty());
            if removed {
                client.remove_kernel("first", 0).await.expect("removed");
                eventually("what it ran has ended", async || processes_with(&secret).is_empty()).await;
            }
            nowhere(&host, &client, &secret, &waited).await;
        });
    }
}

/// Later kernels do not find it, with a worker that was warm at that time or with a newer one.
async fn nowhere(host: &Host, client: &ryokan::rpc::client::HostClient, secret: &str, waited: &[u32]) {
    let mut workers = Vec::new();
    let before = ready(client, "python").await;
    for round in 0..2 {
        for n in 0..READY {
            let name = format!("next-{round}-{n}");
            let next = kernel(client, &name, EngineName::Python).await;
            let (found, looked) = look(&next, secret).await;
            assert_eq!(found, [""; 0], "{name}, of {looked:?}");
            for kind in ["memory", "variables", "environment", "names", "files", "cmdline", "environ", "maps"] {
                assert!(looked.get(kind).is_some_and(|times| *times > 0), "no {kind}: {looked:?}");
            }
            workers.push(worker_of(host, &name));
        }
        ready(client, "python").await;
    }
    let after = pool_of(client, "python").await;
    assert_eq!((after.taken - before.taken, after.missed), (u64::from(2 * READY), before.missed));
    assert!(workers.iter().any(|worker| waited.contains(worker)), "{workers:?} {waited:?}");
    assert!(workers.iter().any(|worker| !waited.contains(worker)), "{workers:?} {waited:?}");
}
