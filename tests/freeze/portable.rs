//! A group as a file: exported on one host, imported on another, and brought into place there.

use std::path::{Path, PathBuf};

use ryokan::core::engine::EngineName;

use super::Shop;
use super::crash_safety::{killed, points};
use crate::support::{Host, User, kernel, out, users};

/// A frozen group with a Python kernel and a directory, too, and its file; the present is another state since.
fn frozen(user: User) -> (Shop, Vec<u8>) {
    let shop = Shop::new(user);
    let uploads = shop.host.path("home").join("uploads");
    std::fs::create_dir(&uploads).unwrap();
    std::fs::write(uploads.join("one"), "first").unwrap();
    // A restore prepares the database beside its place, which may be in the repository: that is no change of it.
    shop.write(".gitignore", "shop.db*\n");
    shop.commit("ignore");
    shop.work();
    shop.git(&["remote", "add", "origin", "https://user:secret-token@example.org/shop.git"]);
    shop.host.with(async |client| {
        let lab = kernel(&client, "lab", EngineName::Python).await;
        out(&lab, "rows = {'a': [1, 2]}; open('notes', 'w').write('kept')").await;
    });
    shop.host.ok(&["group", "add", "shop", "--kernel", "lab"]);
    shop.host.ok(&["group", "add", "shop", "--directory", uploads.to_str().unwrap()]);
    shop.host.ok(&["freeze", "shop", "-m", "one"]);
    let file = exported(&shop.host, &["shop", "-"]);
    (shop, file)
}

pub fn exported(host: &Host, args: &[&str]) -> Vec<u8> {
    let output = host.cli(&[&["export"][..], args].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// The public key of a host.
fn key_of(host: &Host) -> String {
    let keys: serde_json::Value = serde_json::from_str(&host.ok(&["trust", "list", "--json"])).unwrap();
    let own = keys.as_array().unwrap().iter().find(|key| key["standing"] == "own").expect("a key of its own");
    own["key"].as_str().unwrap().to_owned()
}

/// Lets a host import groups that the other one sealed.
pub fn trust(host: &Host, name: &str, other: &Host) {
    host.ok(&["trust", "add", name, &key_of(other)]);
}

/// A host that trusts the source of a file.
pub fn trusting(user: User, source: &Host) -> Host {
    let host = Host::start_as(user);
    trust(&host, "source", source);
    host
}

/// Everything that the freeze holds, as text.
fn state(shop: &Shop) -> String {
    let lab = shop.host.with(async |client| {
        let lab = client.open_kernel("lab").await.expect("it is there").0;
        out(&lab, "print(rows, open('notes').read())").await
    });
    let uploads = shop.host.path("home").join("uploads");
    let one = std::fs::read_to_string(uploads.join("one")).ok();
    format!("{} | {lab} | {one:?} {}", shop.state(), uploads.read_dir().unwrap().count())
}

pub fn put(host: &Host, bytes: &[u8]) -> PathBuf {
    let path = host.path("home").join("shop.ryokan");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The places of all members outside of kernels.
fn places(host: &Host) -> Vec<String> {
    let place = |member: &str, name: &str| {
        ["--place".to_owned(), format!("{member}={}", host.path("home").join(name).display())]
    };
    [place("code", "code"), place("data", "shop.db"), place("uploads", "uploads")].concat()
}

/// Imports a file; returns whether it succeeded, the exit code, and everything printed.
pub fn import(host: &Host, file: &Path, args: &[String]) -> (Option<i32>, String) {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let output = host.cli(&[&["import", file.to_str().unwrap()][..], &args[..]].concat());
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

/// What an import that did not happen leaves: nothing.
pub fn is_untouched(host: &Host) -> bool {
    let home: Vec<String> = std::fs::read_dir(host.path("home"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name != "shop.ryokan" && !name.starts_with("kept"))
        .filter(|name| name.contains("ryokan") || ["code", "shop.db", "uploads"].contains(&name.as_str()))
        .collect();
    let kernels = std::fs::read_dir(host.data().join("kernels")).map_or(0, Iterator::count);
    let groups = host.ok(&["group", "show", "--json"]);
    home.is_empty() && kernels == 0 && host.ok(&["ls", "--quiet"]).is_empty() && groups.trim() == "[]"
}

#[test]
fn group_lives_elsewhere() {
    for user in users() {
        let (shop, file) = frozen(user);
        let frozen = state(&shop);
        shop.wreck();
        let there = Shop { host: trusting(user, &shop.host), user };
        let path = put(&there.host, &file);
        let (code, text) = import(&there.host, &path, &places(&there.host));
        assert_eq!(code, Some(0), "{user:?}: {text}\n{}", there.host.log());
        assert!(text.contains("signed by source, trusted") && text.contains("ryokan restore shop 1"), "{text}");
        assert!(!there.data().exists(), "a restore brings it");
        there.host.ok(&["--yes", "restore", "shop", "1"]);
        assert_eq!(state(&there), frozen, "{user:?}");
        // Nothing of the source's configuration came along.
        let config = std::fs::read_to_string(there.code().join(".git/config")).unwrap();
        assert!(!config.contains("secret-token") && !there.code().join(".git/hooks").exists(), "{config}");
        let entries = std::fs::read_dir(there.code().join(".git")).unwrap();
        assert!(entries.flatten().all(|entry| !entry.file_name().to_string_lossy().contains("ryokan")));
        let said = there.host.ok(&["verify", "--provenance", "shop"]);
        assert!(said.contains("signed by this host") && said.contains("sealed by source, trusted"), "{said}");
        there.host.ok(&["verify"]);
        // Life goes on: a freeze, a wreck, a restore and its undo.
        there.host.ok(&["freeze", "shop", "-m", "two"]);
        there.wreck_data();
        there.host.ok(&["--yes", "restore", "shop", "two"]);
        assert_eq!(state(&there), frozen, "{user:?}");
        there.host.ok(&["--yes", "undo", "shop"]);
        assert_eq!(there.amounts(), (900, 100));
        // And back again, beside the first one.
        trust(&shop.host, "there", &there.host);
        let back = put(&shop.host, &exported(&there.host, &["shop", "-", "--freeze", "two"]));
        let args = ["--as", "copy", "--place", "agent=agent-2", "--place", "lab=lab-2", "--leave-out", "code"];
        let more = ["--leave-out", "data", "--leave-out", "uploads"];
        let args: Vec<String> = args.iter().chain(&more).map(ToString::to_string).collect();
        let (code, text) = import(&shop.host, &back, &args);
        assert!(code == Some(0) && text.contains("left out: code"), "{text}");
        let lab = shop.host.ok(&["exec", "lab-2", "print(rows)"]);
        assert_eq!(lab.trim(), "{'a': [1, 2]}");
        assert_eq!(shop.host.ok(&["exec", "lab", "print(rows)"]), lab);
    }
}

/// The work of the freeze is brought into a clone that has another history.
#[test]
fn existing_repository_is_completed() {
    let (shop, file) = frozen(users()[0]);
    let there = Shop { host: trusting(users()[0], &shop.host), user: users()[0] };
    std::fs::create_dir(there.code()).unwrap();
    there.git(&["init", "-q", "-b", "other"]);
    there.write("own", "of this host");
    let own = there.commit("own");
    let path = put(&there.host, &file);
    let mut args = vec!["--place".to_owned(), format!("code={}", there.code().display())];
    args.extend(["data", "uploads"].iter().flat_map(|name| ["--leave-out".to_owned(), (*name).to_owned()]));
    assert_eq!(import(&there.host, &path, &args).0, Some(0));
    assert_eq!(there.git(&["rev-parse", "HEAD"]), own, "an import changes nothing of it");
    there.host.ok(&["--yes", "restore", "shop", "1"]);
    assert_eq!(there.git(&["rev-parse", "HEAD"]), shop.git(&["rev-parse", "HEAD"]));
    assert_eq!((there.read("new.txt"), there.read("own")), (Some("untracked".into()), None));
    let kept = || there.git(&["for-each-ref", "refs/ryokan"]);
    assert!(kept().contains(&shop.git(&["rev-parse", "HEAD"])), "git keeps the history");
    there.host.ok(&["--yes", "undo", "shop"]);
    assert_eq!((there.git(&["rev-parse", "HEAD"]), there.read("own")), (own, Some("of this host".into())));
    there.host.ok(&["--yes", "group", "rm", "shop"]);
    assert_eq!(kept(), "");
}

/// The database is in a repository that the import makes.
#[test]
fn nested_database_is_placed() {
    let (shop, file) = frozen(users()[0]);
    let there = trusting(users()[0], &shop.host);
    let (path, code) = (put(&there, &file), there.path("home").join("code"));
    let place = |member: &str, at: &Path| ["--place".to_owned(), format!("{member}={}", at.display())];
    let out = ["--leave-out".to_owned(), "uploads".to_owned()];
    let data = code.join("shop.db");
    let args = [place("code", &code), place("data", &data), out].concat();
    let (status, said) = import(&there, &path, &args);
    assert_eq!(status, Some(0), "{said}");
    there.ok(&["--yes", "restore", "shop", "1"]);
    assert_eq!(super::amounts(&data).unwrap(), (500, 500));
    assert_eq!(std::fs::read_to_string(code.join("new.txt")).unwrap(), "untracked");
}

#[test]
fn bad_group_exports_are_refused() {
    let shop = Shop::new(users()[0]);
    let refused = |args: &[&str]| {
        let output = shop.host.cli(&[&["export"][..], args].concat());
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = refused(&["shop", "-"]);
    assert!(code == Some(3) && said.contains("ryokan freeze shop"), "{said}");
    shop.host.ok(&["freeze", "shop"]);
    let (code, said) = refused(&["shop", "-", "--freeze", "9"]);
    assert!(code == Some(3) && said.contains("no freeze"), "{said}");
    assert_eq!(refused(&["shop", "-", "--checkpoint", "1"]).0, Some(2));
    assert_eq!(refused(&["agent", "-", "--freeze", "1"]).0, Some(2));
    // A safety freeze of a missing database cannot live elsewhere.
    std::fs::rename(shop.data(), shop.host.path("home").join("away")).unwrap();
    shop.host.ok(&["--yes", "restore", "shop", "1"]);
    let (code, said) = refused(&["shop", "-", "--freeze", "2"]);
    assert!(code == Some(4) && said.contains("member data was missing"), "{said}");
    // The commit is gone with the repository.
    std::fs::remove_dir_all(shop.code()).unwrap();
    let (code, said) = refused(&["shop", "-"]);
    assert!(code == Some(3) && said.contains("member code"), "{said}");
    let (code, said) = {
        let output = shop.host.cli(&["teleport", "shop", "--to", "exec:true"]);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert!(code == Some(4) && said.contains("--place MEMBER=PATH"), "{said}");
}

#[test]
fn bad_group_imports_leave_nothing() {
    let (shop, file) = frozen(users()[0]);
    shop.host.ok(&["new", "other"]);
    let single = exported(&shop.host, &["other", "-"]);
    let there = trusting(users()[0], &shop.host);
    let home = there.path("home");
    std::fs::write(home.join("kept.txt"), "no database, but a text that is long enough to be looked at").unwrap();
    std::fs::create_dir(home.join("kept")).unwrap();
    let path = put(&there, &file);
    let place = |member: &str, at: &Path| ["--place".to_owned(), format!("{member}={}", at.display())];
    let with = |without: &str, further: &[String]| {
        let kept = places(&there).chunks(2).filter(|pair| !pair[1].starts_with(without)).flatten().cloned().collect();
        [kept, further.to_vec()].concat()
    };
    let code = |at: &Path| with("code=", &place("code", at));
    let data = |at: &Path| with("data=", &place("data", at));
    let out = |name: &str| ["--leave-out".to_owned(), name.to_owned()];
    let inside = code(&home.join("kept/code"));
    let inside =
        [&inside[..inside.len() - 4], &inside[inside.len() - 2..], &place("uploads", &home.join("kept"))].concat();
    let all: Vec<String> = ["agent", "lab", "code", "data", "uploads"].iter().flat_map(|name| out(name)).collect();
    let cases: Vec<(Vec<String>, i32, &str)> = vec![
        (vec![], 4, "code (repository /"),
        (with("data=", &[]), 4, "data (database /"),
        (with("", &place("nothing", &home)), 2, "no member \"nothing\""),
        (with("none", &out("code")), 2, "named twice"),
        (with("none", &place("lab", Path::new("agent"))), 4, "agent"),
        (with("none", &["--as".into(), "agent".into()]), 4, "agent"),
        (code(&home.join("kept")), 3, "not the work tree of a git repository"),
        (code(&home.join("absent/code")), 3, "there is no"),
        (code(&there.data().join("code")), 4, "ryokan's own folder"),
        (inside, 4, "overlap"),
        (data(&home.join("kept.txt")), 4, "kept.txt"),
        (data(&home.join("code")), 4, "another one has its place"),
        (with("none", &["--allow-path".into(), "/srv:ro".into()]), 2, "does not request"),
        (all, 2, "no member is left"),
    ];
    for (args, expected, why) in cases {
        let (code, said) = import(&there, &path, &args);
        assert!(code == Some(expected) && said.contains(why), "{args:?}: {code:?} {said}");
        assert!(is_untouched(&there), "{args:?}: {said}");
    }
    // The file itself.
    let mut flipped = file.clone();
    flipped[file.len() / 2] ^= 0x10;
    let longer = [&file[..], b"x"].concat();
    let damaged = [&file[..file.len() / 2], &file[..file.len() - 1], &flipped[..], &longer[..]];
    for bytes in damaged {
        let path = put(&there, bytes);
        let (code, said) = import(&there, &path, &places(&there));
        assert!(code != Some(0) && (said.contains("not whole") || said.contains("damaged")), "{said}");
        assert!(is_untouched(&there));
    }
    let path = put(&there, &single);
    assert_eq!(import(&there, &path, &out("code")).0, Some(2));
    assert!(is_untouched(&there));
    // Names that are taken.
    let path = put(&there, &file);
    there.ok(&["new", "lab"]);
    let (code, said) = import(&there, &path, &places(&there));
    assert!(code == Some(4) && said.contains("lab already"), "{said}");
    there.ok(&["--yes", "rm", "lab"]);
    there.ok(&["group", "new", "shop"]);
    let (code, said) = import(&there, &path, &places(&there));
    assert!(code == Some(4) && said.contains("group shop already"), "{said}");
    there.ok(&["--yes", "group", "rm", "shop"]);
    assert!(is_untouched(&there));
}

/// This host or a trusted one must have sealed the freeze of a file.
#[test]
fn unknown_sealer_is_refused() {
    for user in users() {
        let (shop, file) = frozen(user);
        let there = Host::start_as(user);
        let (path, key) = (put(&there, &file), key_of(&shop.host));
        let (code, said) = import(&there, &path, &places(&there));
        assert!(code == Some(4) && said.contains(&format!("ryokan trust add NAME {key}")), "{said}");
        assert!(is_untouched(&there));
        assert!(there.ok(&["audit", "--json"]).contains("untrusted_sealer"));
        // The key of another host does not help.
        trust(&there, "third", &Host::start_as(user));
        assert_eq!(import(&there, &path, &places(&there)).0, Some(4));
        trust(&there, "source", &shop.host);
        let (code, said) = import(&there, &path, &places(&there));
        assert!(code == Some(0) && said.contains("the freeze is signed by source, trusted"), "{said}");
        // Its own freezes a host imports without.
        let again = put(&shop.host, &file);
        let args = ["--as", "copy", "--place", "agent=agent-2", "--place", "lab=lab-2", "--leave-out", "code"];
        let more = ["--leave-out", "data", "--leave-out", "uploads"];
        let args: Vec<String> = args.iter().chain(&more).map(ToString::to_string).collect();
        let (code, said) = import(&shop.host, &again, &args);
        assert_eq!(code, Some(0), "{said}");
        // A freeze of one kernel needs no checkpoint of the other, although both have its id.
        shop.host.ok(&["--yes", "group", "rm", "copy"]);
        let ids = |name: &str| -> Vec<String> {
            let of =
                |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["id"].as_str().unwrap().into();
            shop.host.ok(&["log", name, "--json"]).lines().map(of).collect()
        };
        let shared = ids("agent-2").into_iter().find(|id| ids("agent").contains(id)).expect("a checkpoint of both");
        shop.host.with(async |client| {
            let removed = async |name: &str| {
                let kernel = client.open_kernel(name).await.expect("it is there").0;
                kernel.remove_checkpoint(&shared, 0).await.err().map(|error| error.reason)
            };
            assert_eq!(removed("agent").await.as_deref(), Some("freeze"));
            assert_ne!(removed("agent-2").await.as_deref(), Some("freeze"));
        });
    }
}

#[test]
fn trusted_commands_are_restored() {
    let user = users()[0];
    let configuration = "[sources.queue]\ncapture = [\"/bin/echo\", \"content\"]\nrestore = [\"/bin/cat\"]\n";
    let start = || {
        let mut host = Host::prepare(user);
        host.configure(configuration);
        host.launch();
        host
    };
    let (here, there) = (start(), start());
    here.ok(&["new", "k"]);
    here.ok(&["group", "new", "shop"]);
    here.ok(&["group", "add", "shop", "--kernel", "k"]);
    here.ok(&["group", "add", "shop", "--command", "queue"]);
    here.ok(&["freeze", "shop"]);
    let path = put(&there, &exported(&here, &["shop", "-"]));
    let place = |source: &str| ["--place".to_owned(), format!("queue={source}")];
    trust(&there, "alpha", &here);
    assert_eq!(import(&there, &path, &place("other")).0, Some(3));
    let (code, said) = import(&there, &path, &place("queue"));
    assert!(code == Some(0) && said.contains("the freeze is signed by alpha, trusted"), "{said}");
    there.ok(&["--yes", "restore", "shop", "1"]);
}

#[test]
fn killed_import_leaves_nothing() {
    let user = *users().last().unwrap();
    let (source, file) = frozen(user);
    let frozen = state(&source);
    let mut there = Shop { host: trusting(user, &source.host), user };
    let path = put(&there.host, &file);
    let all = places(&there.host);
    let args: Vec<&str> =
        ["import", path.to_str().unwrap()].into_iter().chain(all.iter().map(String::as_str)).collect();
    let labels = [
        "catalog.group.arrive",
        "catalog.kernel.insert",
        "repository.history.checkout",
        "freeze.import.kernel",
        "freeze.import.seal",
        "freeze.import.sync",
        "catalog.group.adopt",
        "freeze.import.place",
        "catalog.group.clear",
    ];
    // From the commit on, the import is completed.
    let is_visible = |point: &str| {
        ["catalog.group.adopt.after_commit", "freeze.import.place", "catalog.group.clear"]
            .iter()
            .any(|label| point.starts_with(label))
    };
    // The second kernel, too.
    let all_points = points(&labels).into_iter().chain(["freeze.import.kernel:2".to_owned()]);
    for point in all_points.flat_map(|point| [format!("{point}=kill"), format!("{point}=eio")]) {
        if point.ends_with("after_commit=eio") {
            continue;
        }
        if point.ends_with("=kill") {
            killed(&mut there, &point, &args);
        } else {
            there.host.kill();
            there.host.env(ryokan::sys::fault::VARIABLE, &point);
            there.host.launch();
            let done = there.host.cli(&args);
            assert!(!done.status.success(), "{point}");
            assert!(is_visible(&point) || is_untouched(&there.host), "{point}: {}", there.host.log());
            there.host.kill();
            there.host.env(ryokan::sys::fault::VARIABLE, "");
        }
        there.host.launch();
        if is_visible(&point) {
            assert!(!there.host.ok(&["group", "show", "shop"]).contains("interrupted"), "{point}");
            there.host.ok(&["--yes", "restore", "shop", "1"]);
            assert_eq!(state(&there), frozen, "{point}");
            there.host.ok(&["--yes", "group", "rm", "shop"]);
            there.host.ok(&["--yes", "rm", "agent"]);
            there.host.ok(&["--yes", "rm", "lab"]);
            for name in ["code", "uploads"] {
                std::fs::remove_dir_all(there.host.path("home").join(name)).unwrap();
            }
            std::fs::remove_file(there.data()).unwrap();
        }
        assert!(is_untouched(&there.host), "{point}: {}", there.host.log());
    }
    let (code, text) = import(&there.host, &path, &all);
    assert_eq!(code, Some(0), "{text}");
    there.host.ok(&["--yes", "restore", "shop", "1"]);
    assert_eq!(state(&there), frozen);
}
