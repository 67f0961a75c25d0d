//! One kernel, or its client, attacks; another kernel's latency, and memory of the daemon and of the attacker's init.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::core::limits;
use ryokan::core::value::Value;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::session::Session as _;

use crate::daemon::{create, newest_worker_pid, run};
use crate::report::{Report, Samples, Target};
use crate::{Daemon, World, go_on, process};

/// A fork bomb: as many processes as the kernel may have, all of them busy.
const FORKS: &str = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass";

/// Memory up to the limit and back, with every page touched.
const MEMORY: &str = "\
held = []
while True:
    try:
        held.append(bytearray(b'x') * (8 << 20))
    except MemoryError:
        held.clear()";

const OUTPUT: &str = "import os\nwhile True:\n    os.write(1, b'x' * 65536)";

/// State entries without a body on the engine's socket, each with 60 kB of description.
const FRAMES: &str = "\
import os, socket, stat, struct, json
for fd in range(3, 1024):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            break
    except OSError:
        pass
else:
    raise SystemExit('no socket')
link, n = socket.socket(fileno=os.dup(fd)), 0
while True:
    n += 1
    text = json.dumps({'ev': 'put', 'key': f'var/x{n}', 'meta': {'type': 'int', 'summary': 'x' * 60000}, 'more': False}).encode()
    link.sendall(struct.pack('<II', len(text), 0) + text)";

/// Longest time until a kernel that attacked may run again.
const BREAKER: Duration = Duration::from_secs(180);

/// Connections with as many subscriptions as the daemon accepts.
const CONNECTIONS: usize = 64;

/// What attacks.
#[derive(Clone, Copy)]
enum Attack {
    None,
    /// Code in a Python kernel. Its end is repeated.
    Code(&'static str),
    /// Values through the interface, the largest that are accepted and larger ones.
    Values,
    /// Subscriptions that are never read, on connections of their own.
    Subscriptions,
}

const ATTACKS: &[(&str, Attack)] = &[
    ("nothing", Attack::None),
    ("a fork bomb", Attack::Code(FORKS)),
    ("memory up to the limit", Attack::Code(MEMORY)),
    ("output without end, read", Attack::Code(OUTPUT)),
    ("large values", Attack::Values),
    ("forged frames", Attack::Code(FRAMES)),
    ("unread subscriptions", Attack::Subscriptions),
];

/// Latency of a kernel beside each attack, and memory before, during and after it.
pub fn hostile(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let attacked = Duration::from_secs(world.times(15, 3) as u64);
    let rest = Duration::from_secs(world.times(60, 5) as u64);
    for (name, attack) in ATTACKS {
        go_on()?;
        one(world, report, name, *attack, (attacked, rest))?;
    }
    Ok(())
}

fn one(
    world: &World,
    report: &mut Report,
    name: &str,
    attack: Attack,
    (attacked, rest): (Duration, Duration),
) -> anyhow::Result<()> {
    let daemon = Daemon::start(world)?;
    daemon.with(async |host| {
        run(&create(&host, "victim", EngineName::Kaish).await?, "echo hi").await?;
        run(&create(&host, "attacker", EngineName::Python).await?, "1").await?;
        Ok(())
    })?;
    std::thread::sleep(Duration::from_secs(1));
    let newest_init = || daemon.with(async |host| newest_worker_pid(&host, "attacker").await);
    let memory = |init: u32| (process::rss_mib(daemon.pid()), process::rss_mib(init));
    let first_init = newest_init()?;
    let before = memory(first_init);
    let ends = AtomicBool::new(false);
    let (latency, counts, during) = std::thread::scope(|scope| {
        let victim = scope.spawn(|| daemon.with(async |host| victim(&host, &ends).await));
        let attacker = scope.spawn(|| daemon.with(async |host| attacker(&daemon, &host, attack, &ends).await));
        let (begun, mut during) = (Instant::now(), before);
        while begun.elapsed() < attacked && go_on().is_ok() {
            std::thread::sleep(Duration::from_millis(100));
            during.0 = during.0.max(process::rss_mib(daemon.pid()));
        }
        // Refused where the attack holds every subscription that a user may have.
        let measured = memory(newest_init().unwrap_or(first_init));
        ends.store(true, Ordering::Relaxed);
        let gone = || anyhow::anyhow!("a thread of the benchmark panicked");
        during.1 = during.1.max(measured.1);
        let latency = victim.join().map_err(|_| gone())??;
        Ok::<_, anyhow::Error>((latency, attacker.join().map_err(|_| gone())??, during))
    })?;
    std::thread::sleep(rest);
    // An attack may have ended its worker, and opened its circuit breaker.
    let begun = Instant::now();
    while let Err(error) = daemon.with(async |host| run(&host.open_kernel("attacker").await?.0, "1").await) {
        anyhow::ensure!(begun.elapsed() < BREAKER, "the attacker's kernel is unusable: {error:#}");
        std::thread::sleep(Duration::from_secs(1));
    }
    let after = memory(newest_init()?);
    report.tail(&format!("victim, beside {name}"), &latency, Some(Target::AtMost(20.0)));
    report.note(counts);
    let most = |before: f64| Some(Target::AtMost((before * 1.2 * 100.0).ceil() / 100.0));
    for (what, before, during, after) in
        [("daemon", before.0, during.0, after.0), ("attacker's init", before.1, during.1, after.1)]
    {
        report.figure(&format!("  {what}, RSS after"), after, "MiB", most(before));
        report.note(format!("{before:.1} before, {during:.1} during, after {} s", rest.as_secs()));
    }
    Ok(())
}

/// Executes until the attack ends.
async fn victim(host: &HostClient, ends: &AtomicBool) -> anyhow::Result<Samples> {
    let (kernel, _) = host.open_kernel("victim").await?;
    let mut latency = Samples::default();
    while !ends.load(Ordering::Relaxed) {
        let begun = Instant::now();
        run(&kernel, "echo hi").await?;
        latency.add(begun.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(latency)
}

/// Attacks until the end; returns what it could do.
async fn attacker(daemon: &Daemon, host: &HostClient, attack: Attack, ends: &AtomicBool) -> anyhow::Result<String> {
    let (kernel, _) = host.open_kernel("attacker").await?;
    let (done, refused) = (Cell::new(0), Cell::new(0));
    let count = |works: bool| if works { done.set(done.get() + 1) } else { refused.set(refused.get() + 1) };
    let mut held = Vec::new();
    while !ends.load(Ordering::Relaxed) {
        match attack {
            Attack::Subscriptions if held.len() == CONNECTIONS => tokio::time::sleep(Duration::from_millis(50)).await,
            Attack::None => tokio::time::sleep(Duration::from_millis(50)).await,
            Attack::Code(code) => count(code_until(&kernel, code, ends).await),
            Attack::Values => values(&kernel, ends, &count).await,
            Attack::Subscriptions => {
                let host = HostClient::connect(&daemon.socket(), "bench").await?;
                let mut events = Vec::new();
                while let Ok(one) = host.events(0).await {
                    count(true);
                    events.push(one);
                }
                count(false);
                held.push((host, events));
                // Events to deliver.
                let _ = kernel.execute(ExecRequest::code("1")).await;
            }
        }
    }
    Ok(format!("{} done, {} refused or ended", done.get(), refused.get()))
}

/// Runs code and reads its output until the attack ends; returns whether it was still running then.
async fn code_until(kernel: &KernelClient, code: &str, ends: &AtomicBool) -> bool {
    let Ok(execution) = kernel.run(&ExecRequest::code(code)).await else {
        tokio::time::sleep(Duration::from_millis(100)).await;
        return false;
    };
    let end = async {
        while !ends.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let ran_on = tokio::select! {
        _ = execution.output(0, async |_| Ok(())) => false,
        () = end => true,
    };
    if ran_on {
        let _ = kernel.interrupt_execution(execution.exec()).await;
        let _ = execution.result().await;
    }
    ran_on
}

async fn values(kernel: &KernelClient, ends: &AtomicBool, count: &impl Fn(bool)) {
    let code = |bytes: usize| format!("_ = '{}'", "x".repeat(bytes));
    let dicts = "d, e = [[{'a': i, 'b': str(i)} for i in range(n)] for n in (10_000, 150_000)]";
    count(kernel.execute(ExecRequest::code(dicts)).await.is_ok());
    while !ends.load(Ordering::Relaxed) {
        for (items, variable, bytes) in
            [(limits::VALUE_PARTS - 10, "d", limits::CODE_BYTES - 10), (900_000, "e", 8 << 20)]
        {
            let large = Value::Array((0..items as i64).map(Value::Int).collect());
            count(kernel.put_var("x", &large, 0).await.is_ok());
            count(kernel.var(variable).await.is_ok());
            count(kernel.execute(ExecRequest::code(code(bytes))).await.is_ok());
        }
    }
}
