//! Files of kernels from hosts of both architectures: kind checkpoint holds nothing of a machine.
//!
//! The files in `fixtures/` were exported once and are imported by every later release; `RYOKAN_BLESS=1` writes them anew.

use std::path::{Path, PathBuf};

use ryokan::core::limits;

use super::hostile_fuzz::objects::{Objects, close_bundle, open_bundle};
use super::*;

const ARCHITECTURES: [&str; 2] = ["x86_64", "aarch64"];

fn fixture(architecture: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/teleport/fixtures").join(format!("{architecture}.ryokan"))
}

/// The objects of a file that begin and contain a text.
fn found(objects: &Objects, begins: &str, contains: &str) -> Vec<([u8; 32], String)> {
    let all = objects.all().filter_map(|(at, bytes)| Some((*at, String::from_utf8(bytes.clone()).ok()?)));
    all.filter(|(_, text)| text.starts_with(begins) && text.contains(contains)).collect()
}

/// A file whose checkpoints were taken on that architecture.
pub(crate) fn marked(file: &[u8], architecture: &str) -> Vec<u8> {
    let (mut head, mut objects) = open_bundle(file);
    let pieces = objects.without_large();
    // Lines of the audit log name manifests, and follow from each other.
    let mut about: Value = serde_json::from_slice(&head).expect("JSON");
    about["audit"].take();
    head = serde_json::to_vec(&about).expect("JSON");
    let [own, other] = [std::env::consts::ARCH, architecture].map(|name| format!("\"arch\":\"{name}\""));
    let manifests = found(&objects, "{", &own);
    assert!(!manifests.is_empty(), "no manifests with {own}");
    for (at, text) in manifests.into_iter().filter(|_| own != other) {
        objects.replace(at, text.replace(&own, &other).into_bytes(), &mut head);
    }
    assert!(found(&objects, "{", &own).is_empty() || own == other);
    pieces.into_iter().for_each(|piece| _ = objects.add(piece));
    close_bundle(&head, &objects)
}

/// Exports a kernel with two checkpoints.
fn exported() -> Vec<u8> {
    let here = Host::start();
    set_up(&here, "demo");
    let file = here.cli(&["export", "demo", "-"]);
    assert!(file.status.success());
    file.stdout
}

fn import(host: &Host, bytes: &[u8], name: &str) -> Output {
    let at = host.path("home").join("file");
    std::fs::write(&at, bytes).expect("written");
    host.cli(&["import", at.to_str().expect("a path"), "--as", name])
}

/// The kernel is that of [`set_up`], and goes on.
fn is_whole(host: &Host, name: &str) {
    assert_eq!(host.ok(&["exec", name, VIEW]), "2 two deep\n", "{name}");
    host.ok(&["exec", name, "x=3; echo three > f"]);
    host.ok(&["restore", name, "one", "--yes"]);
    assert_eq!(host.ok(&["exec", name, "echo $x $(cat f)"]), "1 one\n", "{name}");
    host.ok(&["undo", name, "--yes"]);
    assert_eq!(host.ok(&["exec", name, VIEW]), "3 three deep\n", "{name}");
}

#[test]
fn files_of_both_architectures() {
    if std::env::var_os("RYOKAN_BLESS").is_some() {
        let file = exported();
        for architecture in ARCHITECTURES {
            let at = fixture(architecture);
            std::fs::create_dir_all(at.parent().expect("a folder")).expect("made");
            std::fs::write(&at, marked(&file, architecture)).expect("written");
        }
    }
    let host = Host::start();
    for architecture in ARCHITECTURES {
        let file = std::fs::read(fixture(architecture)).expect("the fixture; RYOKAN_BLESS=1 writes it");
        let (_, objects) = open_bundle(&file);
        assert_eq!(found(&objects, "{", &format!("\"arch\":\"{architecture}\"")).len(), 2, "{architecture}");
        let name = architecture.replace('_', "-");
        let imported = import(&host, &file, &name);
        assert!(imported.status.success(), "{architecture}: {}", String::from_utf8_lossy(&imported.stderr));
        is_whole(&host, &name);
        // A kernel that came from the other architecture moves on, with checkpoints of both.
        let there = Host::start();
        moved(&host, &name, &there, &[]);
        assert_eq!(there.ok(&["exec", &name, VIEW]), "3 three deep\n", "{architecture}");
    }
}

#[test]
fn long_image_version_is_refused() {
    let host = Host::start();
    let (mut head, mut objects) = open_bundle(&std::fs::read(fixture("x86_64")).expect("the fixture"));
    let own = "\"base_image_version\":\"\"";
    for (at, text) in found(&objects, "{", own) {
        let long = own.replace("\"\"", &format!("\"{}\"", "7".repeat(limits::IMAGE_VERSION_CHARS + 1)));
        objects.replace(at, text.replace(own, &long).into_bytes(), &mut head);
    }
    let refused = import(&host, &close_bundle(&head, &objects), "brought");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("base_image_version has at most 64 characters"), "{said}");
    assert_eq!(state(&host, "brought"), None);
}

/// The limit of kind checkpoint, with few bytes: many entries of the state name one object.
#[test]
fn import_limits_engine_state() {
    let here = Host::start();
    here.ok(&["new", "demo", "--memory", "2G"]);
    here.ok(&["exec", "demo", "x=1"]);
    let file = here.cli(&["export", "demo", "-"]).stdout;
    let import_with = |entries: u64| {
        let (mut head, mut objects) = open_bundle(&file);
        let size: u64 = 1 << 20;
        let body = objects.add(vec![0; size as usize]);
        let body = blake3::Hash::from_bytes(body).to_hex().to_string();
        let (at, text) = found(&objects, "{\"entries\":", "\"key\"").pop().expect("the state");
        let mut state: Value = serde_json::from_str(&text).expect("JSON");
        let list = state["entries"].as_array_mut().expect("a list");
        let like = list[0].clone();
        for number in 0..entries {
            let mut entry = like.clone();
            entry["key"] = format!("zz/{number:05}").into();
            entry["body"] = body.clone().into();
            entry["bytes"] = size.into();
            list.push(entry);
        }
        objects.replace(at, serde_json::to_vec(&state).expect("JSON"), &mut head);
        let refused = import(&here, &close_bundle(&head, &objects), "brought");
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    let said = import_with(limits::SNAPSHOT_CHECKPOINT_BYTES >> 20);
    assert!(said.contains("kind checkpoint") && said.contains("at most"), "{said}");
    assert_eq!(state(&here, "brought"), None);
    let said = import_with(3000);
    assert!(said.contains("memory limit"), "{said}");
}
