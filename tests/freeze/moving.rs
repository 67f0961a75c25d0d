//! Groups that move between two daemons: whole, on one host at a time, whatever is killed.

use ryokan::core::engine::EngineName;
use serde_json::Value;

use super::Shop;
use super::portable::trust;
use crate::support::{Host, User, kernel, out, until, users};
use crate::teleport::{arm, moved, state, teleport};

/// A group with two kernels, work in its repository, and a database.
fn shop(user: User) -> Shop {
    let shop = Shop::new(user);
    shop.work();
    shop.host.with(async |client| {
        out(&kernel(&client, "lab", EngineName::Kaish).await, "y=7; echo kept > note").await;
    });
    shop.host.ok(&["group", "add", "shop", "--kernel", "lab"]);
    shop
}

fn places(host: &Host) -> Vec<String> {
    let place = |member: &str, name: &str| {
        ["--place".to_owned(), format!("{member}={}", host.path("home").join(name).display())]
    };
    [place("code", "code"), place("data", "shop.db")].concat()
}

/// Everything of the group, as text.
fn whole(shop: &Shop) -> String {
    let lab = shop.host.with(async |client| {
        let lab = client.open_kernel("lab").await.expect("it is there").0;
        out(&lab, "echo $y $(cat note)").await
    });
    format!("{} {lab}", shop.state())
}

fn groups(host: &Host) -> Vec<Value> {
    serde_json::from_str(&host.ok(&["group", "show", "--json"])).expect("a list")
}

fn waits(host: &Host) -> Vec<Value> {
    let all: Vec<Value> = serde_json::from_str(&host.ok(&["--json", "teleport", "--status"])).expect("a list");
    all.into_iter().filter(|one| one["state"] != "live").collect()
}

fn states(host: &Host) -> [Option<String>; 2] {
    ["agent", "lab"].map(|name| state(host, name))
}

/// The group is here, whole, and nothing of it there.
fn stays(shop: &Shop, there: &Host, what: &str) {
    until(&format!("{what}: the abort reaches the other host"), || {
        waits(&shop.host).is_empty() && waits(there).is_empty()
    });
    assert!(states(&shop.host).iter().flatten().all(|state| state != "departed"), "{what}");
    assert_eq!((states(there), groups(there).len()), ([None, None], 0), "{what}");
    let entries = std::fs::read_dir(there.path("home")).unwrap().flatten();
    let left: Vec<_> =
        entries.map(|entry| entry.file_name()).filter(|name| *name == *"code" || *name == *"shop.db").collect();
    assert!(left.is_empty(), "{what}: {left:?}");
}

fn left(host: &Host) {
    assert_eq!(states(host), [Some("departed".into()), Some("departed".into())]);
}

#[test]
fn group_moves_as_one() {
    for user in users() {
        let shop = shop(user);
        let before = whole(&shop);
        let there = Shop { host: Host::start_as(user), user };
        let stranger = teleport(&shop.host, "shop", &there.host, &["--place", "code=/x", "--place", "data=/y"]);
        let said = String::from_utf8_lossy(&stranger.stderr).into_owned();
        assert!(!stranger.status.success() && said.contains("ryokan trust add"), "{said}");
        trust(&there.host, "source", &shop.host);
        let refused = teleport(&shop.host, "shop", &there.host, &[]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("--place"), "{said}");
        // Its place is taken: the target refuses it after its kernels are prepared.
        std::fs::create_dir(there.host.path("home").join("code")).unwrap();
        there.give();
        let args = places(&there.host);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let refused = teleport(&shop.host, "shop", &there.host, &args);
        assert!(!refused.status.success(), "{}", shop.host.log());
        std::fs::remove_dir(there.host.path("home").join("code")).unwrap();
        stays(&shop, &there.host, "a taken place");
        let report = moved(&shop.host, "shop", &there.host, &args);
        assert!(report["acknowledged"] == true && report["stays"].as_array().unwrap().len() == 2, "{report}");
        left(&shop.host);
        assert!(shop.data().exists() && shop.read("new.txt").is_some(), "the originals stay");
        assert_eq!(whole(&there), before, "{user:?}\n{}", there.host.log());
        // Life goes on there.
        there.host.ok(&["freeze", "shop", "-m", "two"]);
        there.wreck_data();
        there.host.ok(&["--yes", "restore", "shop", "two"]);
        assert_eq!(whole(&there), before, "{user:?}");
        there.host.ok(&["verify"]);
        assert_eq!((waits(&shop.host).len(), waits(&there.host).len()), (0, 0));
    }
}

#[test]
fn killed_moves_are_whole() {
    let user = users()[0];
    let mut here = shop(user);
    let before = whole(&here);
    let mut there = Shop { host: Host::start_as(user), user };
    trust(&there.host, "here", &here.host);
    let place = places(&there.host);
    let args: Vec<&str> = place.iter().map(String::as_str).collect();
    // Before the decision: of the source, then of the target.
    arm(&mut here.host, "catalog.groupmove.advance.before_commit:2=kill");
    assert!(!teleport(&here.host, "shop", &there.host, &args).status.success());
    arm(&mut here.host, "");
    stays(&here, &there.host, "the source");
    arm(&mut there.host, "catalog.groupmove.put.after_commit=kill");
    assert!(!teleport(&here.host, "shop", &there.host, &args).status.success());
    arm(&mut there.host, "");
    stays(&here, &there.host, "the target");
    assert_eq!(whole(&here), before);
    // The decision is durable, and nothing follows yet.
    arm(&mut here.host, "catalog.groupmove.advance.after_commit:2=kill");
    assert!(!teleport(&here.host, "shop", &there.host, &args).status.success());
    arm(&mut here.host, "");
    left(&here.host);
    until("the group arrives", || waits(&here.host).is_empty());
    left(&here.host);
    assert_eq!(whole(&there), before, "{}", there.host.log());
    // The target after the decision, twice: its record is read by a new daemon.
    let mut further = Shop { host: Host::start_as(user), user };
    trust(&further.host, "there", &there.host);
    let place = places(&further.host);
    let args: Vec<&str> = place.iter().map(String::as_str).collect();
    arm(&mut further.host, "catalog.groupmove.advance.before_commit:1=kill");
    let report = moved(&there.host, "shop", &further.host, &args);
    assert_eq!(report["acknowledged"], false);
    left(&there.host);
    for point in ["catalog.group.progress.before_commit:1=kill", "catalog.groupmove.advance.before_commit:1=kill"] {
        arm(&mut further.host, point);
        until("it is killed again", || !Host::is_alive(further.host.pid() as u32));
    }
    arm(&mut further.host, "");
    until("the group arrives", || waits(&there.host).is_empty());
    assert_eq!(whole(&further), before, "{}", further.host.log());
    assert_eq!(groups(&further.host).len(), 1);
}

/// A freeze of a move needs the checkpoints of its kernels: it fails if they cannot be pinned, and no pin is left of one
/// that was not sealed.
#[test]
fn moved_freezes_pin_checkpoints() {
    let user = users()[0];
    let mut here = shop(user);
    let there = Shop { host: Host::start_as(user), user };
    trust(&there.host, "here", &here.host);
    let place = places(&there.host);
    let args: Vec<&str> = place.iter().map(String::as_str).collect();
    let pins = |shop: &Shop| {
        let of = |name: &str| shop.host.ok(&["log", name, "--json"]);
        ["agent", "lab"].map(|name| of(name).lines().filter(|line| line.contains("\"pinned\":true")).count())
    };
    for fault in [
        "state.checkpoints.pin.before_commit:2=eio",
        "catalog.group.pins.before_commit=kill",
        "catalog.group.pins.after_commit=kill",
        "catalog.freeze.seal.before_commit=kill",
    ] {
        arm(&mut here.host, fault);
        let failed = teleport(&here.host, "shop", &there.host, &args);
        let said = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(!failed.status.success(), "{fault}");
        assert!(fault.ends_with("kill") || said.contains("is not pinned"), "{fault}: {said}");
        arm(&mut here.host, "");
        stays(&here, &there.host, fault);
        assert_eq!((here.freezes(), pins(&here)), (0, [0, 0]), "{fault}");
    }
    assert_eq!(moved(&here.host, "shop", &there.host, &args)["acknowledged"], true);
    assert_eq!(pins(&there), [1, 1]);
}

#[test]
fn taken_places_delay_arrivals() {
    let user = users()[0];
    let here = shop(user);
    let before = whole(&here);
    let mut there = Shop { host: Host::start_as(user), user };
    trust(&there.host, "here", &here.host);
    let place = places(&there.host);
    let args: Vec<&str> = place.iter().map(String::as_str).collect();
    arm(&mut there.host, "catalog.groupmove.advance.before_commit:1=kill");
    assert_eq!(moved(&here.host, "shop", &there.host, &args)["acknowledged"], false);
    left(&here.host);
    // Another program takes a place after the decision.
    let taken = there.host.path("home").join("code");
    std::fs::create_dir(&taken).unwrap();
    std::fs::write(taken.join("mine"), "kept").unwrap();
    there.give();
    arm(&mut there.host, "");
    let arriving = || waits(&there.host).into_iter().find(|one| one["state"] == "arriving" && one["problem"] != "");
    until("the arrival is delayed", || arriving().is_some());
    let arrival = arriving().unwrap();
    assert!(arrival["problem"].as_str().unwrap().contains("member code"), "{arrival}");
    let exec = there.host.cli(&["exec", "lab", "echo $y"]);
    let said = String::from_utf8_lossy(&exec.stderr);
    assert!(exec.status.code() == Some(125) && said.contains("ryokan teleport --status"), "{said}");
    assert!(!there.host.cli(&["--yes", "rm", "lab"]).status.success(), "it would be missing in its group");
    // An operator does without the rest.
    let id = arrival["id"].as_str().unwrap();
    let asked = there.host.cli(&["teleport", "--resolve", id, "--discard"]);
    assert!(String::from_utf8_lossy(&asked.stderr).contains("its kernels live here"), "{asked:?}");
    assert!(!there.host.cli(&["--yes", "teleport", "--resolve", id, "--activate"]).status.success(), "still taken");
    there.host.ok(&["--yes", "teleport", "--resolve", id, "--discard"]);
    until("the source is acknowledged", || waits(&here.host).is_empty());
    assert_eq!((waits(&there.host).len(), groups(&there.host).len()), (0, 0));
    assert_eq!(there.host.ok(&["exec", "lab", "echo $y $(cat note)"]), "7 kept\n");
    assert_eq!(std::fs::read_to_string(taken.join("mine")).unwrap(), "kept");
    assert!(here.data().exists() && before.contains("kept"));
}
