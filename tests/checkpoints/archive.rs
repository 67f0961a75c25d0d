//! An archived kernel exists in the store only, and returns unchanged.

use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::fork::Forking;
use ryokan::rpc::client::{HostClient, run_local};
use ryokan::session::Session as _;
use ryokan::sys::fault;

use crate::support::{Host, User, kernel, out, users};

/// Entries of a kernel's directory.
fn left(host: &Host) -> Vec<String> {
    let kernels = host.data().join("kernels");
    let folder = kernels.read_dir().unwrap().next().expect("a kernel").unwrap().path();
    let mut names: Vec<String> =
        folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.starts_with("state.db"));
    names.sort();
    names
}

fn code(host: &Host, args: &[&str]) -> Option<i32> {
    host.cli(args).status.code()
}

#[test]
fn archive_round_trip() {
    for user in users() {
        for (engine, first, look) in [
            ("kaish", "x=41; mkdir -p d; echo one > d/f; chmod 600 d/f; ln -s d/f l", "echo $x $(cat l)"),
            (
                "python",
                "import os; x = 41; os.mkdir('d'); open('d/f', 'w').write('one'); os.symlink('d/f', 'l')",
                "print(x, open('l').read())",
            ),
        ] {
            let mut host = Host::start_as(user);
            host.ok(&["new", "k", "--engine", engine]);
            host.ok(&["exec", "k", first]);
            let said = host.ok(&["archive", "k"]);
            assert!(said.contains("is archived in checkpoint"), "{said}");
            assert_eq!(left(&host), Vec::<String>::new(), "{user:?}, {engine}");
            for _ in 0..2 {
                let shown: serde_json::Value = serde_json::from_str(&host.ok(&["show", "k", "--json"])).unwrap();
                assert_eq!(shown["state"], "archived", "{user:?}, {engine}");
                for args in
                    [&["exec", "k", "1"][..], &["start", "k"], &["archive", "k"], &["restore", "k", "latest", "--yes"]]
                {
                    let refused = host.cli(args);
                    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
                    let code = if args[0] == "exec" { 125 } else { 4 };
                    assert_eq!(refused.status.code(), Some(code), "{args:?}: {said}");
                    assert!(said.contains("archived"), "{args:?}: {said}");
                }
                assert!(host.ok(&["journal", "k"]).contains("archived in"), "{user:?}, {engine}");
                assert!(!host.ok(&["log", "k"]).is_empty());
                host.restart();
            }
            host.ok(&["gc", "--yes"]);
            host.ok(&["unarchive", "k"]);
            assert_eq!(host.ok(&["exec", "k", look]).trim(), "41 one", "{user:?}, {engine}");
            assert_eq!(code(&host, &["unarchive", "k"]), Some(4), "{user:?}, {engine}: not twice");
            host.ok(&["archive", "k"]);
            host.ok(&["rm", "k", "--yes"]);
            assert_eq!(host.data().join("kernels").read_dir().unwrap().count(), 0, "{user:?}, {engine}");
        }
    }
}

#[test]
fn archive_preconditions() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        out(&k, "x=1; echo one > f").await;
        let thread = k.thread(&"t".parse().unwrap(), None, "").await.unwrap().0;
        let refused = k.archive(0).await.unwrap_err();
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Conflict, "threads"));
        assert_eq!(k.info().await.unwrap().state, "ready", "it was not stopped for that");
        assert_eq!(thread.archive(0).await.unwrap_err().reason, "thread");
        thread.remove(0).await.unwrap();
        assert_eq!(k.archive(1_000).await.unwrap_err().code, ErrorCode::Conflict);
        assert_eq!(out(&k, "echo $x $(cat f)").await, "1 one", "a refusal took nothing");
        let (held_by, version) = k.archive(0).await.unwrap();
        assert_eq!(k.info().await.unwrap().version, version);
        let removed = k.remove_checkpoint(&held_by.id.to_string(), 0).await.unwrap_err();
        assert_eq!(removed.code, ErrorCode::Conflict, "the archive is the only copy of the kernel");
        assert_eq!(k.thread(&"t".parse().unwrap(), None, "").await.err().unwrap().reason, "archived");
        let (child, _) = k.fork(&Forking::of("child")).await.unwrap().children.remove(0).1.unwrap();
        assert_eq!(out(&child, "echo $x $(cat f)").await, "1 one");
    });
    let file = host.path("home").join("file");
    host.ok(&["export", "k", file.to_str().unwrap()]);
    host.ok(&["import", file.to_str().unwrap(), "--as", "copy"]);
    assert_eq!(host.ok(&["exec", "copy", "echo $x $(cat f)"]), "1 one\n");
    assert_eq!(code(&host, &["unarchive", "copy"]), Some(4));
}

/// Refused, because files outside the checkpoint would be lost: a user's daemon cannot read files that their owner
/// locked.
#[test]
fn unreadable_file_blocks_archive() {
    for user in users() {
        let host = Host::start_as(user);
        host.ok(&["new", "k"]);
        host.ok(&[
            "exec",
            "k",
            "mkdir -p mod/in; echo one > mod/in/f; chmod 555 mod/in mod; echo two > locked; chmod 000 locked",
        ]);
        if user == User::Unprivileged || !nix::unistd::geteuid().is_root() {
            let refused = host.cli(&["archive", "k"]);
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert_eq!(refused.status.code(), Some(4), "{said}");
            assert!(said.contains("locked (not readable)") && said.contains("chmod u+r"), "{said}");
            assert_eq!(host.ok(&["exec", "k", "chmod 600 locked; cat locked mod/in/f"]), "two\none\n", "{user:?}");
        }
        // Read-only directories are removed nevertheless, and return unchanged.
        host.ok(&["archive", "k"]);
        assert_eq!(left(&host), Vec::<String>::new(), "{user:?}");
        host.ok(&["unarchive", "k"]);
        assert_eq!(host.ok(&["exec", "k", "/usr/bin/stat -c '%a' mod/in; cat mod/in/f"]), "555\none\n", "{user:?}");
        host.ok(&["rm", "k", "--yes"]);
        assert_eq!(host.data().join("kernels").read_dir().unwrap().count(), 0, "{user:?}: nothing is left");
    }
}

/// Code that runs during the archiving is in the archive, or prevents it: never neither.
#[test]
fn archive_races_with_execution() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        out(&k, "n=0").await;
        for round in 1..=8 {
            let (archived, ran) = futures::join!(k.archive(0), async {
                tokio::time::sleep(std::time::Duration::from_millis(round * 7)).await;
                k.execute(ryokan::core::exec::ExecRequest::code(format!("n={round}"))).await
            });
            if archived.is_ok() {
                k.unarchive(0).await.expect("comes back");
            }
            let now = out(&k, "echo $n").await;
            let done = ran.is_ok_and(|result| result.end.code == 0);
            assert_eq!(now == round.to_string(), done, "round {round}: {now}, {done}");
            out(&k, &format!("n={round}")).await;
        }
    });
}

#[test]
fn daemon_kill_during_archive() {
    let mut host = Host::prepare(User::Own);
    host.configure("[daemon]\ndurability = \"power\"\n");
    host.launch();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        out(&k, "x=1; mkdir d; echo one > d/f").await;
    });
    let families = [
        "kernel.files.clear",
        "kernel.files.engine",
        "catalog.kernel.update",
        "engine.state.replace",
        "state.transition.",
        "workspace.",
    ];
    let points: Vec<_> =
        fault::points().filter(|(label, _)| families.iter().any(|family| label.name.starts_with(family))).collect();
    let mut killed = Vec::new();
    for (label, point) in points {
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.spawn();
        super::until_served(&host);
        let answered = run_local(async {
            let client = HostClient::connect(&host.socket(), "test").await?;
            let k = client.open_kernel("k").await?.0;
            k.archive(0).await?;
            k.unarchive(0).await
        })
        .unwrap();
        if !Host::is_alive(host.pid() as u32) || (answered.is_err() && host.ends_soon()) {
            killed.push(label.name);
        }
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        host.with(async |client| {
            let k = client.open_kernel("k").await.unwrap().0;
            if k.info().await.unwrap().state == "archived" {
                assert_eq!(left(&host), Vec::<String>::new(), "{point}: nothing lies about");
                k.unarchive(0).await.expect("comes back");
            }
            assert_eq!(out(&k, "echo $x $(cat d/f)").await, "1 one", "{point}");
        });
    }
    for label in [
        "kernel.files.clear",
        "kernel.files.engine",
        "catalog.kernel.update",
        "engine.state.replace",
        "state.transition.begin",
        "state.transition.commit",
        "state.transition.clear",
    ] {
        assert!(killed.contains(&label), "{label} was not reached: {killed:?}");
    }
}

/// A change of the kernel ends an interrupted archiving before it takes effect.
#[test]
fn change_ends_interrupted_archive() {
    let mut host = Host::start_as(User::Own);
    host.ok(&["new", "k"]);
    host.ok(&["exec", "k", "x=41"]);
    host.kill();
    host.env(fault::VARIABLE, "state.transition.commit.before_commit=eio");
    host.launch();
    let failed = host.cli(&["archive", "k"]);
    assert!(!failed.status.success(), "{failed:?}");
    let given = host.path("given");
    std::fs::create_dir(&given).unwrap();
    host.ok(&["mount", "k", "/data", &given.display().to_string()]);
    assert_eq!(host.ok(&["exec", "k", "echo $x"]), "41\n");
}
