//! Damage is found and reported with the affected kernels; other kernels are unharmed.

use ryokan::core::engine::EngineName;
use serde_json::Value;

use super::{edit, gc, host, manual, packs, sound, verify};
use crate::support::{Host, User, kernel, out, users};

/// A kernel with two checkpoints whose files share nothing, an output and a blob; its daemon has stopped.
fn prepared(user: User) -> Host {
    let mut host = host(user);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        for name in ["first", "second"] {
            let code = format!("import os\nopen('{name}', 'wb').write(b'{name} of all ' + os.urandom(200_000))");
            out(&k, &code).await;
            manual(&k, name).await;
            out(&k, &format!("os.remove('{name}')")).await;
        }
        k.put_blob(b"a blob to be found").await.expect("stored");
        let other = kernel(&client, "other", EngineName::Kaish).await;
        out(&other, "seq 1 20000").await;
        manual(&other, "others").await;
        gc(&client, false).await;
    });
    sound(&host, "before anything is damaged");
    host.kill();
    host
}

/// Flips a bit of the first occurrence of these bytes in a pack.
fn flip(host: &Host, bytes: &[u8]) {
    for path in packs(host) {
        let mut pack = std::fs::read(&path).unwrap();
        if let Some(at) = pack.windows(bytes.len()).position(|window| window == bytes) {
            pack[at] ^= 0x10;
            return std::fs::write(&path, pack).unwrap();
        }
    }
    panic!("no pack holds {:?}", String::from_utf8_lossy(bytes));
}

fn id_of(host: &Host, kernel: &str) -> String {
    serde_json::from_str::<Value>(&host.ok(&["show", kernel, "--json"])).unwrap()["id"].as_str().unwrap().into()
}

fn affects(shown: &[Value], what: &str) -> Vec<(String, String)> {
    let affected = shown.iter().flat_map(|damage| damage["affects"].as_array().cloned().unwrap_or_default());
    let text = |one: &Value, key: &str| one[key].as_str().unwrap().to_owned();
    affected.filter(|one| one["what"] == what).map(|one| (text(&one, "kernel"), text(&one, "name"))).collect()
}

#[test]
fn verify_finds_flipped_bit() {
    for user in users() {
        let mut host = prepared(user);
        flip(&host, b"first of all");
        host.launch();
        let (is_sound, shown) = verify(&host);
        assert!(!is_sound, "{shown:?}");
        assert_eq!(affects(&shown, "checkpoint"), [("k".to_owned(), "1".to_owned())], "{shown:?}");
        assert_eq!(shown[0]["what"], "object");
        assert_eq!(shown.last().unwrap()["checkpoints"], 2, "the other two are whole");
        let text = String::from_utf8(host.cli(&["verify"]).stdout).unwrap();
        assert!(text.contains("affects checkpoint 1 of kernel k"), "{text}");
        host.with(async |client| {
            let k = client.open_kernel("k").await.expect("there").0;
            assert!(k.restore_checkpoint("first", 0).await.is_err(), "a damaged checkpoint is refused");
            k.restore_checkpoint("second", 0).await.expect("an intact checkpoint is restored");
            assert_eq!(out(&k, "print(open('second', 'rb').read(6))").await, "b'second'");
            let other = client.open_kernel("other").await.expect("there").0;
            other.restore_checkpoint("others", 0).await.expect("other kernels are unharmed");
        });
        // Once the checkpoint is removed, the damaged object is only garbage.
        host.ok(&["checkpoint", "k", "--delete", "first", "--yes"]);
        host.ok(&["gc"]);
        sound(&host, "after the removal of the damaged one");
    }
}

#[test]
fn verify_names_damaged_blob() {
    let mut host = prepared(User::Own);
    flip(&host, b"a blob to be found");
    host.launch();
    let (is_sound, shown) = verify(&host);
    let blobs = affects(&shown, "blob");
    assert!(!is_sound && blobs.len() == 1 && blobs[0].0 == "k", "{shown:?}");
    assert!(affects(&shown, "checkpoint").is_empty());
}

#[test]
fn verify_finds_truncated_pack() {
    let mut host = prepared(User::Own);
    let mut all = packs(&host);
    all.sort();
    let first = all.first().unwrap();
    let length = std::fs::metadata(first).unwrap().len();
    let file = std::fs::File::options().write(true).open(first).unwrap();
    file.set_len(length / 2).unwrap();
    drop(file);
    host.launch();
    let (is_sound, shown) = verify(&host);
    assert!(!is_sound, "{shown:?}");
    let broken = affects(&shown, "checkpoint");
    assert!(!broken.is_empty(), "{shown:?}");
    // Nothing is collected while references are unknown.
    let before = super::bytes_of(&packs(&host));
    let refused = host.cli(&["gc"]);
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(super::bytes_of(&packs(&host)), before);
    // Kernels that were not reported can be restored.
    host.with(async |client| {
        for (name, number, reference) in [("k", "1", "first"), ("k", "2", "second"), ("other", "1", "others")] {
            let k = client.open_kernel(name).await.expect("there").0;
            let is_named = broken.contains(&(name.to_owned(), number.to_owned()));
            assert_eq!(k.restore_checkpoint(reference, 0).await.is_err(), is_named, "{name} {reference}: {broken:?}");
        }
    });
}

#[test]
fn verify_names_damaged_database() {
    let mut host = prepared(User::Own);
    host.launch();
    host.ok(&["stop", "k"]);
    let id = id_of(&host, "k");
    sound(&host, "with a stopped kernel and a live one");
    let engine_db = host.data().join("kernels").join(&id).join("engine.db");
    let mut bytes = std::fs::read(&engine_db).unwrap();
    // The first page lists the contents.
    bytes[100..600].fill(0xa5);
    std::fs::write(&engine_db, bytes).unwrap();
    let (is_sound, shown) = verify(&host);
    assert!(!is_sound, "{shown:?}");
    assert!(
        shown.iter().any(|one| one["what"] == "database" && one["name"].as_str().unwrap().contains(&id)),
        "{shown:?}"
    );
    assert_eq!(affects(&shown, "all"), [("k".to_owned(), String::new())]);
    host.ok(&["exec", "other", "echo fine"]);
}

#[test]
fn verify_names_changed_history() {
    let mut host = prepared(User::Own);
    host.launch();
    let database = host.data().join("kernels").join(id_of(&host, "k")).join("state.db");
    host.kill();
    edit(&database, "UPDATE journal SET text = 'other' WHERE sequence = 3");
    host.launch();
    let (is_sound, shown) = verify(&host);
    assert!(!is_sound, "{shown:?}");
    assert_eq!(affects(&shown, "all"), [("k".to_owned(), String::new())]);
    assert!(shown[0]["why"].as_str().unwrap().contains("entry 3 of the journal"), "{shown:?}");
}

#[test]
fn verify_during_work_finds_nothing() {
    let host = host(User::Own);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        k.set_retention(&ryokan::core::retention::Retention { newest: Some(2), keep_for_ms: None }, 0)
            .await
            .expect("set");
        let done = std::cell::Cell::new(false);
        let work = async {
            for n in 0..15 {
                out(&k, &format!("open('f', 'w').write(str({n}) * 100_000)\nx = {n}")).await;
                super::auto(&k, &format!("a{n}")).await;
                // One collection at a time: another may be running.
                let _ = client.gc(false, async |_| Ok(())).await;
            }
            done.set(true);
        };
        let watch = async {
            let mut rounds = 0;
            while !done.get() || rounds == 0 {
                match client.verify(async |shown| panic_on_damage(shown)).await {
                    Ok(report) => {
                        assert_eq!(report.damaged, 0);
                        rounds += 1;
                    }
                    Err(error) => assert_eq!(error.reason, "upkeep", "{error:?}"),
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        };
        futures::join!(work, watch);
    });
}

fn panic_on_damage(shown: ryokan::core::upkeep::VerifyEvent) -> ryokan::core::error::Result<()> {
    match shown {
        ryokan::core::upkeep::VerifyEvent::Progress(_) => Ok(()),
        ryokan::core::upkeep::VerifyEvent::Damage(damage) => panic!("{damage:?}"),
    }
}

/// An archived kernel has no engine database: that is no damage.
#[test]
fn archived_kernel_verifies() {
    for user in users() {
        let host = host(user);
        for engine in ["kaish", "python"] {
            host.ok(&["new", engine, "--engine", engine]);
        }
        host.ok(&["exec", "kaish", "x=1; echo 1 > f"]);
        for engine in ["kaish", "python"] {
            host.ok(&["archive", engine, "--yes"]);
        }
        super::sound(&host, "an archived kernel");
    }
}
