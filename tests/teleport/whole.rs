//! All that moves with a kernel, compared on the other side; and what is named before because it stays.

use std::path::Path;

use ryokan::core::handover::Excerpt;
use ryokan::core::info::McpTransport;
use ryokan::core::workflow::Source;
use ryokan::rpc::client::{HostClient, KernelClient};

use super::*;

/// What a client can read of a kernel's records.
#[derive(Debug, PartialEq)]
struct Records {
    limits: Value,
    version: u64,
    journal: Vec<Value>,
    checkpoints: Vec<Value>,
    decisions: Vec<String>,
    artifacts: Vec<String>,
    contents: Vec<Vec<u8>>,
}

fn lines(host: &Host, command: &str) -> Vec<Value> {
    let text = host.ok(&["--json", command, "demo"]);
    text.lines().map(|line| serde_json::from_str(line).expect("a line")).collect()
}

async fn artifact(kernel: &KernelClient, version: u32) -> Vec<u8> {
    let (_, mut download) = kernel.artifact("report", version).await.expect("there");
    let mut all = Vec::new();
    while let Some(part) = download.next().await.expect("readable") {
        all.extend(part);
    }
    all
}

async fn workflow(client: &HostClient) -> (Vec<String>, Vec<String>, Vec<Vec<u8>>) {
    let (kernel, _) = client.open_kernel("demo").await.expect("there");
    let (mut decisions, mut artifacts) = (Vec::new(), Vec::new());
    let listed = kernel.decisions(async |one| {
        decisions.push(format!("{one:?}"));
        Ok(())
    });
    listed.await.expect("decisions");
    let listed = kernel.artifacts("report", async |one| {
        artifacts.push(format!("{one:?}"));
        Ok(())
    });
    listed.await.expect("artifacts");
    let contents = vec![artifact(&kernel, 1).await, artifact(&kernel, 2).await];
    (decisions, artifacts, contents)
}

fn records(host: &Host) -> Records {
    let shown = show(host, "demo");
    let mut checkpoints = lines(host, "log");
    // The newest first; which one is the head changes with each new one.
    checkpoints.reverse();
    checkpoints.iter_mut().for_each(|one| one["is_head"] = Value::Null);
    let (decisions, artifacts, contents) = host.with(async |client| workflow(&client).await);
    Records {
        limits: shown["limits"].clone(),
        version: shown["version"].as_u64().expect("a version"),
        journal: lines(host, "journal"),
        checkpoints,
        decisions,
        artifacts,
        contents,
    }
}

/// A kernel with records of every kind; returns a blob that it may read.
fn fill(host: &Host) -> ryokan::core::ids::Digest {
    host.ok(&["new", "demo", "--memory", "300M", "--workspace", "200M"]);
    host.with(async |client| {
        let (k, _) = client.open_kernel("demo").await.expect("there");
        assert_eq!(out(&k, "x=1; mkdir -p d/e; echo one > d/e/f; ln -s d/e/f l; echo hello").await, "hello");
        k.begin_step("first", 0).await.expect("begun");
        let locked = k.open_decision("store", "in one file\nfor now", "", 0).await.expect("opened");
        let open = k.open_decision("open", "later", "", 0).await.expect("opened");
        k.lock_decision(locked.id, 0).await.expect("locked");
        k.supersede_decision(locked.id, 0).await.expect("superseded");
        assert_ne!(open.id, locked.id);
        let blob = k.put_blob(&b"a blob ".repeat(20_000)).await.expect("stored");
        k.put_artifact("report", &Source::Blob(blob), "text/plain", "", 0).await.expect("put");
        let file = Source::File(b"/workspace/d/e/f".to_vec());
        k.put_artifact("report", &file, "text/plain", "", 0).await.expect("put");
        k.complete_step(0).await.expect("completed");
        host.ok(&["checkpoint", "demo", "-m", "one", "--description", "the first"]);
        k.pin_checkpoint("one", true).await.expect("pinned");
        host.ok(&["message", "demo", "--role", "user", "what now?"]);
        // Its checkpoint stays.
        host.ok(&["archive", "demo"]);
        host.ok(&["unarchive", "demo"]);
        out(&k, "x=2; echo two > d/e/f; echo new > n").await;
        k.put_blob(b"not in an artifact").await.expect("stored")
    })
}

#[test]
fn all_records_move() {
    let (here, there) = pair(User::Own);
    let blob = fill(&here);
    let before = records(&here);
    for (what, count) in [
        ("journal", before.journal.len()),
        ("checkpoints", before.checkpoints.len()),
        ("decisions", before.decisions.len()),
        ("artifacts", before.artifacts.len()),
    ] {
        assert!(count >= 2, "{count} {what}");
    }
    assert!(before.checkpoints.iter().any(|one| one["pinned"] == true), "{:?}", before.checkpoints);
    moved(&here, "demo", &there, &[]);
    let mut after = records(&there);
    assert!(after.version >= before.version && after.journal.len() > before.journal.len());
    // Those of the move follow.
    after.version = before.version;
    after.journal.truncate(before.journal.len());
    after.checkpoints.truncate(before.checkpoints.len());
    assert_eq!(after, before);
    there.with(async |client| {
        let (k, _) = client.open_kernel("demo").await.expect("there");
        assert_eq!(k.blob(blob).await.expect("readable"), b"not in an artifact");
        assert_eq!(out(&k, "echo $x; cat l n").await, "2\ntwo\nnew");
    });
    // The old checkpoints are whole, the pinned one too.
    there.ok(&["restore", "demo", "one", "--yes"]);
    assert_eq!(there.ok(&["exec", "demo", "echo $x; cat l"]), "1\none\n");
    there.ok(&["verify"]);
}

fn with_server() -> Host {
    let mut host = Host::prepare(User::Own);
    let server = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mcp/server.py");
    host.configure(&format!("[mcp.servers.s]\ncommand = \"python3\"\nargs = [{server:?}, \"ok\"]\n"));
    host.launch();
    host
}

/// Each kind of what belongs to a host is named before the move, also if the target has one of the same name.
#[test]
fn what_stays_is_named() {
    let (here, there) = (with_server(), with_server());
    let given = here.given(User::Own);
    let path = format!("{}:ro", given.display());
    for name in ["server", "mount", "process"] {
        here.ok(&["new", name]);
    }
    here.ok(&["new", "path", "--allow-path", &path]);
    let venv = crate::engines::venv::made_in(&here.path("home"));
    here.ok(&["new", "venv", "--venv", venv.to_str().expect("a path")]);
    here.ok(&["new", "network", "--net", "host"]);
    here.ok(&["mount", "mount", "/given", given.to_str().expect("a path")]);
    here.with(async |client| {
        let by_name = McpTransport::Stdio { command: String::new(), args: Vec::new(), env: Vec::new() };
        let (k, _) = client.open_kernel("server").await.expect("there");
        k.register_mcp("s", &by_name, 0).await.expect("registered");
    });
    here.ok(&["spawn", "process", "-d", "--", "sleep", "3334"]);
    let cases = [
        ("server", "MCP server s".to_owned()),
        ("mount", format!("mount /given of {}", given.display())),
        ("process", "sleep 3334".to_owned()),
        ("path", format!("host path {}", given.display())),
        ("venv", format!("virtual environment {}", venv.display())),
        ("network", "network host".to_owned()),
    ];
    for (name, missing) in cases {
        let refused = teleport(&here, name, &there, &[]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(4) && said.contains(&missing), "{name}: {said}");
        assert_eq!((is_live(&here, name), state(&there, name)), (true, None), "{name}");
        let report = moved(&here, name, &there, &["--allow-missing"]);
        let named = report["missing"].to_string();
        assert!(named.contains(&missing), "{name}: {named}");
        let shown = show(&there, name);
        assert_eq!((&shown["net"], shown["paths"].as_array().map(Vec::len)), (&"none".into(), Some(0)), "{shown}");
        assert!(shown["venv"].is_null(), "{shown}");
    }
    there.with(async |client| {
        let (k, _) = client.open_kernel("server").await.expect("there");
        assert_eq!(k.mcp_servers().await.expect("a list").len(), 0, "a name grants nothing");
        let by_name = McpTransport::Stdio { command: String::new(), args: Vec::new(), env: Vec::new() };
        k.register_mcp("s", &by_name, 0).await.expect("it is added again by hand");
    });
    assert_eq!(there.ok(&["ps", "process", "--json"]).trim().trim_matches(['[', ']']), "");
}

/// Only what is named may be missing, and a refusal says how it is named.
#[test]
fn only_named_things_are_missing() {
    let (here, there) = pair(User::Own);
    let given = here.given(User::Own);
    here.ok(&["new", "k", "--allow-path", &format!("{}:ro", given.display())]);
    here.ok(&["mount", "k", "/given", given.to_str().expect("a path")]);
    let cases = [
        (&["--allow-missing=mounts"][..], "host path", "--allow-missing=paths moves"),
        (&["--allow-missing=paths"], "mount /given", "--allow-missing=mounts moves"),
        (&["--allow-missing=mcp"], "mount /given", "--allow-missing=paths --allow-missing=mounts moves"),
    ];
    for (allowed, named, hint) in cases {
        let refused = teleport(&here, "k", &there, allowed);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(4) && said.contains(named) && said.contains(hint), "{allowed:?}: {said}");
        assert_eq!((is_live(&here, "k"), state(&there, "k")), (true, None), "{allowed:?}");
    }
    let unknown = teleport(&here, "k", &there, &["--allow-missing=everything"]);
    assert_eq!(unknown.status.code(), Some(2), "{unknown:?}");
    let report = moved(&here, "k", &there, &["--allow-missing=paths", "--allow-missing=mounts"]);
    assert_eq!(report["missing"].as_array().map(Vec::len), Some(2), "{report}");
}

/// The excerpts of other hosts' audit logs about the kernel, in the order of its arrivals.
fn evidence(host: &Host) -> Vec<Excerpt> {
    let lines = host.ok(&["--json", "audit", show(host, "demo")["id"].as_str().expect("an id")]);
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line"));
    let arrivals = lines.filter(|line| line["action"] == "kernel.arrive");
    let named = arrivals.map(|line| {
        let detail = line["detail"].as_str().expect("a text").to_owned();
        let digest = detail.split("blob ").nth(1).and_then(|rest| rest.split(':').next()).expect("a blob");
        digest.to_owned()
    });
    named.map(|digest| serde_json::from_str(&host.ok(&["blob", "get", "demo", &digest])).expect("an excerpt")).collect()
}

#[test]
fn audit_excerpt_moves() {
    let (here, there) = pair(User::Own);
    set_up(&here, "demo");
    here.ok(&["new", "other"]);
    let refused = here.cli(&["restore", "demo", "nothing", "--yes"]);
    assert!(!refused.status.success());
    let id = show(&here, "demo")["id"].as_str().expect("an id").to_owned();
    let lines = here.ok(&["--json", "audit", &id]);
    let before: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("a line")).collect();
    moved(&here, "demo", &there, &[]);
    let excerpts = evidence(&there);
    assert_eq!(excerpts.len(), 1);
    let first = &excerpts[0];
    let kernel = id.parse().expect("an id");
    first.check(first.host, kernel).expect("it is linked to the chain");
    let hashes = |list: &[Value]| list.iter().map(|line| line["hash"].to_string()).collect::<Vec<_>>();
    let moved_hashes: Vec<String> = first.lines.iter().map(|line| format!("\"{}\"", line.hash)).collect();
    assert!(before.len() >= 2 && moved_hashes.starts_with(&hashes(&before)), "{before:?}\n{first:?}");
    // The source's log has them, and goes on from the head that the target knows.
    here.ok(&["audit", "--verify", "--known", &first.head.to_string()]);
    // Further hosts get the lines of both.
    there.ok(&["exec", "demo", "x=3"]);
    moved(&there, "demo", &here, &[]);
    let excerpts = evidence(&here);
    let last = excerpts.last().expect("one");
    last.check(last.host, kernel).expect("it is linked to the chain");
    assert!(last.host != first.host && last.lines.iter().any(|line| line.what.action == "kernel.arrive"), "{last:?}");
    let named = last.lines.iter().find_map(|line| line.what.detail.split("blob ").nth(1)).expect("the first excerpt");
    let digest = named.split(':').next().expect("a digest");
    assert!(here.ok(&["blob", "get", "demo", digest]).contains("checkpoint.create"), "it is kept with the kernel");
}
