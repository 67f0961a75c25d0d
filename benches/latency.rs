//! Latency of single operations for one client.

use std::time::Instant;

use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::core::value::Value;
use ryokan::rpc::client::KernelClient;
use ryokan::session::Session as _;

use crate::daemon::{create, run};
use crate::peers::{Ipykernel, bubblewrap};
use crate::report::{Report, Samples, Target};
use crate::{Daemon, World};

/// Rounds. In each, everything compared runs one block, so that other load affects all alike.
const ROUNDS: usize = 8;

/// Round trip of one execution in a live kernel.
pub fn roundtrip(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let daemon = Daemon::start(world)?;
    let mut ipykernel = Ipykernel::start(world)?;
    let each = world.times(2000, 240) / ROUNDS;
    let mut times: [Samples; 7] = Default::default();
    let [ping, kaish, inside, python, python_inside, peer, peer_shell] = &mut times;
    daemon.with(async |host| {
        let shell = create(&host, "shell", EngineName::Kaish).await?;
        let py = create(&host, "py", EngineName::Python).await?;
        for _ in 0..100 {
            run(&shell, "echo hi").await?;
            run(&py, "1+1").await?;
        }
        for _ in 0..ROUNDS {
            for _ in 0..each {
                let begun = Instant::now();
                host.ping().await?;
                ping.add(begun.elapsed());
            }
            several(&shell, "echo hi", each, kaish, inside).await?;
            several(&py, "1+1", each, python, python_inside).await?;
            if let Some(ipykernel) = &mut ipykernel {
                ipykernel.run("1+1", each.min(world.times(125, 30)), peer)?;
                ipykernel.run("!echo hi", world.times(12, 3), peer_shell)?;
            }
        }
        Ok(())
    })?;
    report.times("ping", ping, None);
    report.note("the protocol alone: no task, no database, no worker");
    report.times("kaish `echo hi`", kaish, Some(Target::AtMost(0.4)));
    report.times("  of that, inside the worker", inside, None);
    report.times("python `1+1`", python, None);
    report.times("  of that, inside the worker", python_inside, None);
    if peer.count() > 0 {
        report.times("ipykernel `1+1`", peer, None);
        report.times("ipykernel `!echo hi`", peer_shell, None);
        report.note("the same work as in kaish: a shell's command, its output to the client");
        let (kaish, python, peer, peer_shell) = (kaish.p50(), python.p50(), peer.p50(), peer_shell.p50());
        report.figure("ipykernel `1+1` ÷ python `1+1`", peer / python, "×", Some(Target::AtLeast(20.0)));
        report.figure("ipykernel `!echo hi` ÷ kaish `echo hi`", peer_shell / kaish, "×", Some(Target::AtLeast(20.0)));
        report.figure("ipykernel `1+1` ÷ kaish `echo hi`", peer / kaish, "×", None);
        report.note("not the same work: no shell has a part in the peer's");
    }
    Ok(())
}

async fn several(
    kernel: &KernelClient,
    code: &str,
    times: usize,
    whole: &mut Samples,
    inside: &mut Samples,
) -> anyhow::Result<()> {
    for _ in 0..times {
        let begun = Instant::now();
        let result = kernel.execute(ExecRequest::code(code)).await?;
        whole.add(begun.elapsed());
        anyhow::ensure!(result.end.code == 0, "{code:?}: {}", result.end.err);
        inside.add_ms(result.end.duration_us as f64 / 1000.0);
    }
    Ok(())
}

/// Time from the creation of a kernel to its first result, and its removal.
pub fn start(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let daemon = Daemon::start(world)?;
    let mut ipykernel = Ipykernel::start(world)?;
    let rounds = world.times(40, 8);
    let mut times: [Samples; 6] = Default::default();
    let [kaish, python, remove, bwrap, peer, create_only] = &mut times;
    daemon.with(async |host| {
        for round in 0..=rounds {
            for (engine, code, into) in
                [(EngineName::Kaish, "echo hi", &mut *kaish), (EngineName::Python, "print(1+1)", &mut *python)]
            {
                let begun = Instant::now();
                let kernel = create(&host, &format!("k{round}-{engine}"), engine).await?;
                let created = begun.elapsed();
                run(&kernel, code).await?;
                let took = begun.elapsed();
                let ending = Instant::now();
                kernel.remove(0).await?;
                // The first round warms caches for all of them.
                if round > 0 {
                    into.add(took);
                    create_only.add(created);
                    remove.add(ending.elapsed());
                }
            }
            let took = bubblewrap(&world.python, &["-c", "print(1+1)"])?;
            if round > 0 {
                bwrap.add(took);
            }
            if let Some(ipykernel) = ipykernel.as_mut().filter(|_| round > 0 && round % 4 == 0) {
                ipykernel.start_fresh("1+1", peer)?;
            }
        }
        Ok(())
    })?;
    report.times("kaish: create, start, first result", kaish, Some(Target::AtMost(25.0)));
    report.times("python: create, start, first result", python, Some(Target::AtMost(60.0)));
    report.times("  of both, create", create_only, None);
    report.times("remove", remove, None);
    report.times("bwrap + python", bwrap, None);
    report.note("namespaces alone: no seccomp, no Landlock, nothing durable, gone after one run");
    report.figure("bwrap + python ÷ python", bwrap.p50() / python.p50(), "×", None);
    if peer.count() > 0 {
        report.times("ipykernel: start, first result", peer, None);
        report.figure("ipykernel ÷ kaish", peer.p50() / kaish.p50(), "×", None);
        report.figure("ipykernel ÷ python", peer.p50() / python.p50(), "×", None);
    }
    Ok(())
}

/// Variables, set and read from outside.
pub fn vars(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let daemon = Daemon::start(world)?;
    let times = world.times(1000, 100);
    daemon.with(async |host| {
        for engine in [EngineName::Kaish, EngineName::Python] {
            let kernel = create(&host, &format!("vars-{engine}"), engine).await?;
            let (mut set, mut get) = (Samples::default(), Samples::default());
            for i in 0..times + 50 {
                let begun = Instant::now();
                kernel.put_var("x", &Value::Int(i as i64), 0).await?;
                let was_set = begun.elapsed();
                let begun = Instant::now();
                let value = kernel.var("x").await?;
                let was_read = begun.elapsed();
                anyhow::ensure!(value == Value::Int(i as i64), "{engine}: {value:?} is not {i}");
                if i >= 50 {
                    set.add(was_set);
                    get.add(was_read);
                }
            }
            report.times(&format!("{engine}: set a variable"), &set, None);
            report.times(&format!("{engine}: get a variable"), &get, None);
        }
        Ok(())
    })
}
