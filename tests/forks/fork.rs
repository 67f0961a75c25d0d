//! State that a child inherits from its parent, and state that it does not.

use std::collections::BTreeSet;
use std::time::Duration;

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::exec::{ExecRequest, ExecStatus};
use ryokan::core::fork::Forking;
use ryokan::core::rights::{Right, Rights};
use ryokan::core::spec::Net;
use ryokan::core::spec_update::SpecUpdate;
use serde_json::Value;

use super::{folders, log, show};
use crate::support::{Host, kernel, out, users};

/// Each engine: code for the first state, code that changes all of it, and code that shows it.
const ENGINES: [[&str; 4]; 2] = [
    [
        "kaish",
        "x=before\ngreet() { echo hello $1; }\nmkdir -p src/deep empty\necho one > src/deep/a.txt\necho '#!/bin/sh' > run.sh\nchmod 750 run.sh\nln -s deep/a.txt src/link\nln run.sh same.sh\ncd src",
        "cd /workspace\nx=after\ngreet() { echo broken; }\nrm -r src\nrm -r empty\necho no > run.sh\necho new > new.txt",
        "pwd; echo $x; greet you; cat /workspace/src/link /workspace/run.sh; ls /workspace; stat -c '%a %h' /workspace/run.sh",
    ],
    [
        "python",
        "import os\nx = {'n': [1, 2.5, None]}\ndef greet(who): return 'hello ' + who\nos.makedirs('src/deep'); os.mkdir('empty')\nopen('src/deep/a.txt', 'w').write('one\\n')\nopen('run.sh', 'w').write('#!/bin/sh\\n'); os.chmod('run.sh', 0o750)\nos.symlink('deep/a.txt', 'src/link'); os.link('run.sh', 'same.sh'); os.chdir('src')",
        "import shutil\nos.chdir('/workspace')\nx = 'after'\ngreet = None\nshutil.rmtree('src'); os.rmdir('empty')\nopen('run.sh', 'w').write('no\\n')\nopen('new.txt', 'w').write('new\\n')",
        "s = os.stat('/workspace/run.sh')\nprint(os.getcwd(), x, greet and greet('you'), sorted(os.listdir('/workspace')), open('/workspace/run.sh').read(), s.st_mode, s.st_nlink, os.path.exists('/workspace/src/link') and open('/workspace/src/link').read())",
    ],
];

#[test]
fn child_diverges_from_parent() {
    for user in users() {
        let host = Host::start_as(user);
        std::fs::create_dir(host.path("given")).unwrap();
        std::fs::write(host.path("given").join("who"), "given").unwrap();
        for [engine, set_up, change, view] in ENGINES {
            let child = &format!("{engine}-child");
            host.ok(&["new", engine, "--engine", engine, "--memory", "300M", "--label", "a=b"]);
            host.ok(&["mount", engine, "/given", host.path("given").to_str().unwrap()]);
            host.ok(&["exec", engine, set_up]);
            let before = host.ok(&["exec", engine, view]);
            host.ok(&["fork", engine, child]);
            assert_eq!(host.ok(&["exec", child, view]), before, "{user:?} {engine}: as the parent was");
            host.ok(&["exec", engine, change]);
            assert_eq!(host.ok(&["exec", child, view]), before, "{user:?} {engine}: and stays so");
            host.ok(&["exec", child, change]);
            assert_eq!(host.ok(&["exec", child, view]), host.ok(&["exec", engine, view]), "{user:?} {engine}");
            assert!(host.ok(&["mounts", child]).contains("/given"), "{user:?} {engine}");
            let reported = show(&host, child);
            assert_eq!(
                (&reported["limits"]["memory_bytes"], &reported["labels"]["a"]),
                (&(300 << 20).into(), &"b".into())
            );
            assert_eq!(
                (&reported["origin"]["from"]["name"], &reported["checkpoints"]),
                (&engine.into(), &1.into()),
                "{reported}"
            );
            // The child's journal is its own and names its origin; so does the parent's.
            let journal = host.ok(&["journal", child, "--json"]);
            assert!(journal.lines().next().unwrap().contains(&format!("forked from {engine} at checkpoint")));
            assert!(!journal.contains("greet you") || engine == "kaish", "{journal}");
            assert!(host.ok(&["journal", engine, "--json"]).contains(&format!("forked to {child}")));
            // The parent is removed; the child keeps everything.
            let point = &log(&host, engine)[0];
            assert!(host.ok(&["log", engine, "--graph"]).contains(&format!("⑂ {child}")));
            host.ok(&["rm", engine, "--yes"]);
            let own = log(&host, child);
            assert_eq!((own.len(), &own[0]["parent"]), (1, &point["id"]), "{user:?} {engine}");
            assert!(host.ok(&["log", child, "--graph"]).contains(&format!("of {engine}")), "{user:?} {engine}");
            assert!(host.ok(&["diff", child, "latest"]).contains("run.sh"), "{user:?} {engine}");
            host.ok(&["restore", child, "latest", "--yes"]);
            assert_eq!(host.ok(&["exec", child, view]), before, "{user:?} {engine}: back at the fork point");
            host.ok(&["stop", child]);
            assert_eq!(host.ok(&["exec", child, view]), before, "{user:?} {engine}: for good");
        }
    }
}

#[test]
fn children_share_one_fork_point() {
    for user in users() {
        let host = Host::start_as(user);
        host.ok(&["new", "k"]);
        host.ok(&["exec", "k", "x=1; echo 1 > f"]);
        host.ok(&["new", "c-2"]);
        let failed = host.cli(&["fork", "k", "c", "--count", "3", "--json"]);
        assert_eq!(failed.status.code(), Some(4), "{failed:?}");
        let reported: Value = serde_json::from_slice(&failed.stdout).unwrap();
        let children = reported["children"].as_array().unwrap();
        let names: Vec<_> = children.iter().map(|child| child["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["c-1", "c-2", "c-3"]);
        assert_eq!(children[1]["error"]["code"], "alreadyExists", "{user:?}: {reported}");
        for child in ["c-1", "c-3"] {
            assert_eq!(host.ok(&["exec", child, "echo $x; cat f"]), "1\n1\n", "{user:?}");
            assert_eq!(show(&host, child)["origin"]["from"]["checkpoint"], reported["checkpoint"]["id"], "{user:?}");
        }
        assert_eq!(host.ok(&["exec", "c-2", "ls"]), "", "{user:?}: not touched");
        assert_eq!(log(&host, "k").len(), 1, "{user:?}: one fork point");
        assert_eq!(folders(&host), 4, "{user:?}");
        // No child can be created: no fork point either.
        assert_eq!(host.cli(&["fork", "k", "c-2"]).status.code(), Some(4));
        assert_eq!(host.cli(&["fork", "k", "no/name"]).status.code(), Some(2));
        assert_eq!(host.cli(&["fork", "k", "d", "--count", "257"]).status.code(), Some(2));
        assert_eq!(log(&host, "k").len(), 1, "{user:?}");
    }
}

#[test]
fn fork_into_fifty_children() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&["exec", "k", "x = 7\nfor n in range(200): open(f'f{n}', 'w').write(str(n) * n)"]);
    host.ok(&["fork", "k", "c", "--count", "50"]);
    let listed: Value = serde_json::from_str(&host.ok(&["ls", "c-", "--json"])).unwrap();
    let listed = listed.as_array().unwrap();
    assert_eq!(listed.len(), 50);
    let points: BTreeSet<_> = listed.iter().map(|one| one["origin"]["from"]["checkpoint"].to_string()).collect();
    assert_eq!((points.len(), log(&host, "k").len(), folders(&host)), (1, 1, 51));
    for n in [1, 17, 50] {
        let name = format!("c-{n}");
        host.ok(&["exec", &name, &format!("open('own', 'w').write('{n}')")]);
        let shown = host.ok(&["exec", &name, "import os; print(x, len(os.listdir('.')), open('own').read())"]);
        assert_eq!(shown, format!("7 201 {n}\n"));
        host.ok(&["stop", &name]);
    }
}

#[test]
fn fork_during_execution() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let running = k.run(&ExecRequest::code("for i in $(seq 1 300); do echo $i; sleep 0.1; done")).await.unwrap();
        let short = Forking { wait: Duration::from_millis(200), ..Forking::of("short") };
        assert_eq!(k.fork(&short).await.err().unwrap().code, ErrorCode::Deadline);
        assert_eq!(client.open_kernel("short").await.err().unwrap().code, ErrorCode::NotFound);
        let now = Forking { interrupt: true, ..Forking::of("now") };
        assert!(k.fork(&now).await.unwrap().children[0].1.is_ok());
        assert_eq!(running.result().await.unwrap().end.status, ExecStatus::Interrupted);
        let running = k.run(&ExecRequest::code("sleep 0.5; x=done")).await.unwrap();
        let (child, _) = k.fork(&Forking::of("waits")).await.unwrap().children.remove(0).1.unwrap();
        assert_eq!(running.result().await.unwrap().end.status, ExecStatus::Done);
        assert_eq!(out(&child, "echo $x").await, "done");
    });
}

#[test]
fn fork_of_stopped_or_checkpoint() {
    for user in users() {
        let mut host = Host::start_as(user);
        host.ok(&["new", "k", "--engine", "python"]);
        host.ok(&["exec", "k", "x = 1; open('f', 'w').write('1')"]);
        host.ok(&["checkpoint", "k", "-m", "one"]);
        host.ok(&["exec", "k", "x = 2; open('f', 'w').write('2')"]);
        host.ok(&["stop", "k"]);
        host.restart();
        host.ok(&["fork", "k", "old", "--from", "one"]);
        assert_eq!(show(&host, "k")["state"], "stopped", "{user:?}: nothing has to run for that");
        host.ok(&["fork", "k", "new"]);
        host.restart();
        assert_eq!(host.ok(&["exec", "old", "print(x, open('f').read())"]), "1 1\n", "{user:?}");
        assert_eq!(host.ok(&["exec", "new", "print(x, open('f').read())"]), "2 2\n", "{user:?}");
        assert_eq!(host.ok(&["exec", "k", "print(x, open('f').read())"]), "2 2\n", "{user:?}");
        assert_eq!(host.cli(&["fork", "k", "none", "--from", "nothing"]).status.code(), Some(3));
        // A child of a child.
        host.ok(&["fork", "old", "older"]);
        assert_eq!(host.ok(&["exec", "older", "print(x)"]), "1\n", "{user:?}");
        assert_eq!(show(&host, "older")["generation"], 2, "{user:?}");
    }
}

#[test]
fn child_inherits_blobs_but_no_lease() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let early = k.put_blob(b"early").await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        k.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, "then")).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let late = k.put_blob(b"late").await.unwrap();
        k.publish(Rights::ALL, "window").await.unwrap();
        let then = Forking { from: "then".into(), ..Forking::of("then") };
        let (then, _) = k.fork(&then).await.unwrap().children.remove(0).1.unwrap();
        let (now, _) = k.fork(&Forking::of("now")).await.unwrap().children.remove(0).1.unwrap();
        assert_eq!(then.blob(early).await.unwrap(), b"early");
        assert_eq!(then.blob(late).await.unwrap_err().code, ErrorCode::NotFound);
        assert_eq!(now.blob(late).await.unwrap(), b"late");
        k.remove(0).await.unwrap();
        assert_eq!(now.blob(late).await.unwrap(), b"late", "its own grant");
        let held = now.lease("me", Duration::from_secs(60), &[]).await.unwrap();
        let refused = now.fork(&Forking::of("kept-out")).await.err().unwrap();
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Busy, "lease"));
        let (free, _) =
            held.kernel().await.unwrap().fork(&Forking::of("free")).await.unwrap().children.remove(0).1.unwrap();
        assert_eq!(out(&free, "echo no lease here").await, "no lease here");
    });
    assert!(!host.kernel_socket("window").exists());
}

#[test]
fn fork_key_is_idempotent() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let keyed = Forking { count: 2, key: "once".into(), ..Forking::of("c") };
        let first = k.fork(&keyed).await.unwrap();
        let again = k.fork(&keyed).await.unwrap();
        let ids = |forks: &ryokan::rpc::client::Forks| -> Vec<_> {
            forks.children.iter().map(|(_, made)| made.as_ref().unwrap().1.id).collect()
        };
        assert_eq!(ids(&first), ids(&again));
        assert_eq!(first.checkpoint.map(|one| one.id), again.checkpoint.map(|one| one.id));
        assert_eq!(log(&host, "k").len(), 1);
        let renamed = k.fork(&Forking { name: "d".into(), ..keyed.clone() }).await.unwrap();
        let refused = renamed.children[0].1.as_ref().err().map(|error| error.reason.as_str());
        assert_eq!(refused, Some("key_used"));
        k.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, "another")).await.unwrap();
        let elsewhere = k.fork(&Forking { from: "another".into(), ..keyed.clone() }).await.unwrap();
        let refused = elsewhere.children[0].1.as_ref().err().map(|error| error.reason.as_str());
        assert_eq!(refused, Some("key_used"), "from another checkpoint");
        let other = k.fork(&Forking { key: "twice".into(), ..keyed }).await.unwrap();
        assert!(other.children.iter().all(|(_, made)| made.is_err()), "their names are taken");
    });
}

#[test]
fn fork_requires_right_and_attenuates() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        let of = |rights: &[Right]| rights.iter().copied().collect::<Rights>();
        let none = k.attenuate(of(&[Right::Read, Right::Execute, Right::Admin]), "none").await.unwrap();
        for refused in
            [none.fork(&Forking::of("c")).await.err(), none.thread(&"t".parse().unwrap(), None, "").await.err()]
        {
            let refused = refused.unwrap();
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Refused, "rights"));
        }
        let few = k.attenuate(of(&[Right::Fork, Right::Read]), "few").await.unwrap();
        let (child, _) = few.fork(&Forking::of("c")).await.unwrap().children.remove(0).1.unwrap();
        assert_eq!(child.info_and_rights().await.unwrap().1, of(&[Right::Fork, Right::Read]));
        assert_eq!(child.submit("echo").await.unwrap_err().reason, "rights");
        // No capability of a kernel gives a child another specification, not even one with all rights.
        let update = SpecUpdate { net: Some(Net::Host), ..SpecUpdate::default() };
        let wider = Forking { update, ..Forking::of("e") };
        for capability in [&few, &k] {
            assert_eq!(capability.fork(&wider).await.err().unwrap().reason, "rights");
        }
        assert_eq!(client.open_kernel("e").await.err().unwrap().code, ErrorCode::NotFound);
        let version = k.info().await.unwrap().version;
        let stale = Forking { expected_version: version - 1, ..Forking::of("d") };
        assert_eq!(k.fork(&stale).await.err().unwrap().code, ErrorCode::Conflict);
        assert_eq!(client.open_kernel("d").await.err().unwrap().code, ErrorCode::NotFound);
    });
}

#[test]
fn fork_changes_limits_and_paths() {
    for user in users() {
        let host = Host::start_as(user);
        for folder in ["first", "second"] {
            std::fs::create_dir(host.path(folder)).unwrap();
            std::fs::write(host.path(folder).join("who"), folder).unwrap();
        }
        let (first, second) = (host.path("first").display().to_string(), host.path("second").display().to_string());
        host.ok(&["new", "k", "--engine", "bash", "--memory", "200M", "--allow-path", &format!("{first}:ro")]);
        let change = ["--memory", "300M", "--pids", "77", "--idle-timeout", "9m", "--remove-path", &first];
        let added = format!("{second}:ro");
        host.ok(&[&["fork", "k", "c", "--key", "once", "--allow-path", &added][..], &change].concat());
        let (child, parent) = (show(&host, "c"), show(&host, "k"));
        assert_eq!((&child["limits"]["memory_bytes"], &child["limits"]["pids"]), (&(300 << 20).into(), &77.into()));
        assert_eq!(parent["limits"]["memory_bytes"], 200 << 20, "{user:?}: the parent is as it was");
        let look = format!("cat {first}/who {second}/who");
        assert_eq!(String::from_utf8_lossy(&host.cli(&["exec", "c", &look]).stdout), "second", "{user:?}");
        assert_eq!(String::from_utf8_lossy(&host.cli(&["exec", "k", &look]).stdout), "first", "{user:?}");
        // The same request again, although the child has changed since.
        host.ok(&["update", "c", "--memory", "310M"]);
        host.ok(&[&["fork", "k", "c", "--key", "once", "--allow-path", &added][..], &change].concat());
        for (args, code) in
            [(["--remove-path", "/none"], 3), (["--memory", "9000G"], 2), (["--allow-path", "/no/such/path:ro"], 3)]
        {
            let refused = host.cli(&[&["fork", "k", "d"][..], &args].concat());
            assert_eq!(refused.status.code(), Some(code), "{user:?} {args:?}: {refused:?}");
        }
        assert_eq!(folders(&host), 2, "{user:?}: nothing is left");
    }
}

#[test]
fn fork_rechecks_mount_sources() {
    for user in users() {
        let host = Host::start_as(user);
        let given = host.path("given");
        std::fs::create_dir(&given).unwrap();
        host.ok(&["new", "k"]);
        host.ok(&["mount", "k", "/given", given.to_str().unwrap()]);
        host.ok(&["checkpoint", "k", "-m", "mounted"]);
        host.ok(&["unmount", "k", "/given"]);
        std::fs::remove_dir(&given).unwrap();
        std::os::unix::fs::symlink("/usr", &given).unwrap();
        let refused = host.cli(&["fork", "k", "c", "--from", "mounted", "--count", "2"]);
        assert_eq!(refused.status.code(), Some(4), "{user:?}: {refused:?}");
        assert_eq!((folders(&host), host.ok(&["ls", "--quiet"])), (1, "k\n".into()), "{user:?}: nothing is left");
        assert_eq!(host.ok(&["exec", "k", "echo well"]), "well\n");
    }
    // More children than the quota allows: those within the quota are created.
    let mut host = Host::prepare(crate::support::User::Own);
    host.configure("[limits]\nkernels = 3\n");
    host.launch();
    host.ok(&["new", "k"]);
    assert_eq!(host.cli(&["fork", "k", "c", "--count", "4"]).status.code(), Some(4));
    assert_eq!(folders(&host), 3);
}
