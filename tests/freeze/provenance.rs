//! Signatures over freezes and exported files, and the keys that users trust.

use std::os::unix::fs::PermissionsExt as _;

use rusqlite::Connection;

use super::Shop;
use super::crash_safety::{killed, points};
use crate::support::{Host, users};

/// What `verify --provenance` prints, and whether it succeeds.
fn verified(host: &Host, args: &[&str]) -> (bool, String) {
    let output = host.cli(&[&["verify", "--provenance"][..], args].concat());
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The host's own key.
fn own_key(host: &Host) -> String {
    let known: serde_json::Value = serde_json::from_str(&host.ok(&["trust", "list", "--json"])).unwrap();
    let own: Vec<_> = known.as_array().unwrap().iter().filter(|key| key["standing"] == "own").collect();
    assert_eq!(own.len(), 1, "{known}");
    own[0]["key"].as_str().unwrap().to_owned()
}

fn key_file(host: &Host) -> std::path::PathBuf {
    host.data().join("host.key")
}

/// Two freezes of different states.
fn frozen_twice() -> Shop {
    let shop = Shop::new(users()[0]);
    shop.work();
    shop.host.ok(&["freeze", "shop", "-m", "one"]);
    shop.wreck();
    shop.host.ok(&["freeze", "shop", "-m", "two"]);
    shop
}

#[test]
fn freezes_are_signed() {
    let shop = frozen_twice();
    for args in [&[][..], &["shop"], &["shop", "one"], &["agent"]] {
        let (whole, text) = verified(&shop.host, args);
        assert!(whole && text.contains("signed by this host"), "{args:?}: {text}");
    }
    assert_eq!(verified(&shop.host, &["shop"]).1.lines().count(), 2);
    // A checkpoint outside of a freeze has no signature, which is no damage.
    shop.host.ok(&["checkpoint", "agent", "-m", "alone"]);
    let (whole, text) = verified(&shop.host, &["agent", "alone"]);
    assert!(whole && text.contains("not signed"), "{text}");
    assert_eq!(shop.host.cli(&["verify", "--provenance", "nothing"]).status.code(), Some(3));
    // The private key is in no output.
    let secret = std::fs::read_to_string(key_file(&shop.host)).unwrap().lines().nth(1).unwrap().to_owned();
    let told = [shop.host.log(), shop.host.ok(&["audit", "--json"]), shop.host.ok(&["events", "--json"])].concat();
    assert!(told.contains("host_key_created") && !told.contains(&secret));
}

#[test]
fn changed_seals_are_damaged() {
    let mut shop = frozen_twice();
    let changes = [
        "UPDATE freezes SET signature = zeroblob(64) WHERE number = 2",
        "UPDATE freezes SET signer = zeroblob(32) WHERE number = 2",
        "UPDATE freezes SET manifest = (SELECT manifest FROM freezes WHERE number = 1) WHERE number = 2",
        // A whole seal, of another freeze.
        "UPDATE freezes SET (manifest, signer, signature) =
         (SELECT manifest, signer, signature FROM freezes WHERE number = 1) WHERE number = 2",
    ];
    let path = shop.host.data().join("catalog.db");
    let change = |text: &str| {
        Connection::open(&path).unwrap().execute_batch(text).unwrap();
    };
    for text in changes {
        shop.host.kill();
        change(&format!("CREATE TABLE kept AS SELECT * FROM freezes; {text}"));
        shop.host.launch();
        let (whole, text) = verified(&shop.host, &["shop", "2"]);
        assert!(!whole && text.contains("damaged"), "{text}");
        let state = shop.state();
        let refused = shop.host.cli(&["--yes", "restore", "shop", "2"]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains("freeze"), "{said}");
        assert_eq!(shop.state(), state);
        assert!(verified(&shop.host, &["shop", "1"]).0);
        shop.host.kill();
        change(
            "UPDATE freezes SET (manifest, signer, signature) =
             (SELECT manifest, signer, signature FROM kept WHERE kept.id = freezes.id); DROP TABLE kept;",
        );
        shop.host.launch();
        assert!(verified(&shop.host, &[]).0);
    }
    // A checkpoint that is another one than the freeze holds.
    let agent: serde_json::Value = serde_json::from_str(&shop.host.ok(&["show", "agent", "--json"])).unwrap();
    let state = shop.host.data().join("kernels").join(agent["id"].as_str().unwrap()).join("state.db");
    shop.host.kill();
    Connection::open(state)
        .unwrap()
        .execute_batch(
            "DROP TRIGGER sum_of_changed_checkpoints;
             UPDATE checkpoints SET manifest = (SELECT manifest FROM checkpoints ORDER BY number LIMIT 1)
             WHERE number = (SELECT max(number) FROM checkpoints);",
        )
        .unwrap();
    shop.host.launch();
    let (whole, text) = verified(&shop.host, &["agent"]);
    assert!(!whole && text.contains("another manifest"), "{text}");
    assert!(!shop.host.cli(&["--yes", "restore", "shop", "2"]).status.success());
}

/// A seal that was removed or made with another key fits, and restores nothing.
#[test]
fn foreign_seals_restore_nothing() {
    use ring::signature::{Ed25519KeyPair, KeyPair as _};
    use ryokan::core::ids::Digest;
    use ryokan::core::signature::Subject;
    let mut shop = frozen_twice();
    let state = shop.state();
    let path = shop.host.data().join("catalog.db");
    let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
    let key = pair.public_key().as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let read = "SELECT manifest FROM freezes WHERE number = 1";
    shop.host.kill();
    let manifest: [u8; 32] = Connection::open(&path).unwrap().query_row(read, [], |row| row.get(0)).unwrap();
    shop.host.launch();
    let signature = pair.sign(&Subject::Freeze.statement(Digest::from_bytes(manifest)));
    let seal = |signer: Option<&[u8]>, signature: Option<&[u8]>| {
        let sql = "UPDATE freezes SET signer = ?, signature = ? WHERE number = 1";
        Connection::open(&path).unwrap().execute(sql, (signer, signature)).unwrap();
    };
    for (signer, signature, part) in [
        (None, None, "no host sealed it"),
        (Some(pair.public_key().as_ref()), Some(signature.as_ref()), "a host that you do not trust sealed it"),
    ] {
        shop.host.kill();
        seal(signer, signature);
        shop.host.launch();
        let refused = shop.host.cli(&["--yes", "restore", "shop", "1"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(4) && said.contains(part), "{said}");
        assert_eq!((shop.state(), shop.freezes()), (state.clone(), 2));
    }
    // As for an import, the user may trust the key.
    shop.host.ok(&["trust", "add", "peer", &key]);
    shop.host.ok(&["--yes", "restore", "shop", "1"]);
    assert_ne!(shop.state(), state);
}

#[test]
fn imports_show_the_signer() {
    let (here, there) = (Host::start(), Host::start());
    here.ok(&["new", "k"]);
    let file = there.path("home").join("file");
    std::fs::write(&file, here.cli(&["export", "k", "-"]).stdout).unwrap();
    let file = file.to_str().unwrap();
    let key = own_key(&here);
    let text = there.ok(&["import", file, "--as", "first"]);
    assert!(text.contains(&format!("signed by an unknown key: {key}")), "{text}");
    for (args, code) in [(["alpha", "no key"], 2), (["a/b", &key], 2)] {
        let refused = there.cli(&[&["trust", "add"], &args[..]].concat());
        assert_eq!(refused.status.code(), Some(code), "{refused:?}");
    }
    there.ok(&["trust", "add", "alpha", &key]);
    for args in [["alpha", &"ab".repeat(32)], ["beta", &key]] {
        let refused = there.cli(&[&["trust", "add"], &args[..]].concat());
        assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    }
    assert!(there.ok(&["trust", "list"]).contains("alpha"));
    let made: serde_json::Value =
        serde_json::from_str(&there.ok(&["import", file, "--as", "second", "--json"])).unwrap();
    assert_eq!(made["signer"], serde_json::json!({ "standing": "trusted", "name": "alpha", "key": key }));
    let audit = there.ok(&["audit", "--json"]);
    assert!(audit.contains(&format!("signed by {key} (trusted)")) && audit.contains("trust.add"), "{audit}");
    there.ok(&["trust", "rm", "alpha"]);
    assert_eq!(there.cli(&["trust", "rm", "alpha"]).status.code(), Some(3));
    assert!(there.ok(&["import", file, "--as", "third"]).contains("unknown key"));
}

#[test]
fn exposed_key_signs_nothing() {
    let mut shop = Shop::new(users()[0]);
    shop.host.ok(&["freeze", "shop"]);
    let mode = |mode: u32| {
        std::fs::set_permissions(key_file(&shop.host), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(0o644);
    shop.host.restart();
    let state = shop.state();
    for args in [&["freeze", "shop"][..], &["export", "agent", "-"], &["trust", "list"]] {
        let refused = shop.host.cli(args);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(4) && said.contains("chmod 600"), "{args:?}: {said}");
    }
    assert_eq!((shop.state(), shop.freezes()), (state, 1));
    // What was signed is still verified.
    assert!(verified(&shop.host, &["shop"]).1.contains("signed by this host"));
    std::fs::set_permissions(key_file(&shop.host), std::fs::Permissions::from_mode(0o600)).unwrap();
    shop.host.ok(&["freeze", "shop"]);
}

#[test]
fn lost_key_is_replaced() {
    let mut shop = Shop::new(users()[0]);
    shop.host.ok(&["freeze", "shop"]);
    let former = own_key(&shop.host);
    shop.host.kill();
    std::fs::remove_file(key_file(&shop.host)).unwrap();
    shop.host.launch();
    shop.host.ok(&["freeze", "shop"]);
    assert_ne!(own_key(&shop.host), former);
    let reported = [shop.host.ok(&["events", "--json"]), shop.host.ok(&["audit", "--json"])].concat();
    assert!(reported.contains("host_key_replaced") && reported.contains("key.replace"), "{reported}");
    assert!(reported.contains(&former), "{reported}");
    let (whole, text) = verified(&shop.host, &["shop"]);
    assert!(whole && text.contains("this host") && text.contains("a former key of this host"), "{text}");
    let refused = shop.host.cli(&["--yes", "restore", "shop", "1"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(4) && said.contains(&format!("trust add NAME {former}")), "{said}");
    shop.host.ok(&["trust", "add", "before", &former]);
    let text = verified(&shop.host, &["shop", "1"]).1;
    assert!(text.contains("signed by before, trusted"), "{text}");
    shop.host.ok(&["--yes", "restore", "shop", "1"]);
}

#[test]
fn killed_key_creation_is_whole() {
    let mut shop = Shop::new(users()[0]);
    let freezes = shop.freezes();
    for point in points(&["host.key.write", "catalog.host.key"]) {
        let _ = std::fs::remove_file(key_file(&shop.host));
        let path = shop.host.data().join("catalog.db");
        shop.host.kill();
        Connection::open(path).unwrap().execute_batch("DELETE FROM host_keys").unwrap();
        shop.host.launch();
        assert!(!killed(&mut shop, &format!("{point}=kill"), &["freeze", "shop"]), "{point}");
        shop.host.launch();
        assert_eq!(shop.freezes(), freezes, "{point}");
        let temps = std::fs::read_dir(shop.host.data()).unwrap().flatten();
        let temps: Vec<_> = temps.filter(|entry| entry.file_name().to_string_lossy().contains("-tmp-")).collect();
        assert!(temps.is_empty(), "{point}: {temps:?}");
        own_key(&shop.host);
        let known = shop.host.ok(&["trust", "list"]);
        assert!(!known.contains("former"), "{point}: {known}");
    }
    shop.host.ok(&["freeze", "shop"]);
    assert!(verified(&shop.host, &["shop"]).1.contains("signed by this host"));
}

#[test]
fn killed_trust_is_whole() {
    let mut shop = Shop::new(users()[0]);
    let key = "ab".repeat(32);
    let (add, remove) = (["trust", "add", "peer", &key], ["trust", "rm", "peer"]);
    for (label, command, back) in
        [("catalog.trust.add", &add[..], &remove[..]), ("catalog.trust.remove", &remove, &add)]
    {
        if label.ends_with("remove") {
            shop.host.ok(&add);
        }
        for point in points(&[label]) {
            killed(&mut shop, &format!("{point}=kill"), command);
            shop.host.launch();
            let is_there = shop.host.ok(&["trust", "list"]).contains("peer");
            let is_done = is_there == label.ends_with("add");
            assert_eq!(is_done, point.ends_with("after_commit"), "{point}");
            if is_done {
                shop.host.ok(back);
            }
        }
    }
}
