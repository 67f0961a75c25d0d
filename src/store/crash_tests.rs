//! A child runs a script over a store and is killed, or meets an error, at each labelled point in turn. Whatever happened: what
//! it acknowledged is there and whole, nothing is damaged, no temporary file is left after the next opening.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Store, StoreError};
use crate::core::ids::Digest;
use crate::sys::fault::points;
use crate::sys::fault::tests::{crash_dir, run_child};

const CHILD: &str = "store::crash_tests::child";

fn digest(bytes: &[u8]) -> Digest {
    Digest::from_bytes(*blake3::hash(bytes).as_bytes())
}

/// One step of the script; `None` beyond its end.
fn step(n: usize, store: &mut Option<Store>, dir: &Path) -> Result<Option<()>, StoreError> {
    let open = || Store::open(dir);
    match (n, store.as_ref()) {
        (0, _) => *store = Some(open()?),
        (1, Some(store)) => drop(store.put(b"one")?),
        (2, Some(store)) => {
            let mut writer = store.writer(1 << 20)?;
            for piece in 0..4u8 {
                writer.write(&[piece; 1000])?;
            }
            writer.finish().map(drop)?;
        }
        (3, Some(store)) => {
            let mut batch = store.batch();
            for content in ["three", "four", "five"] {
                batch.put(content.as_bytes())?;
            }
            batch.commit()?;
        }
        (4, Some(store)) => drop(store.put(b"one")?),
        (5, Some(store)) => drop(store.remove(digest(b"three"))?),
        (6, _) => {
            *store = None;
            std::fs::create_dir_all(dir.join("tmp/dead")).expect("made");
            std::fs::write(dir.join("tmp/dead/0"), "x").expect("written");
            *store = Some(open()?);
        }
        (7, Some(store)) => drop(store.put(b"six")?),
        _ => return Ok(None),
    }
    Ok(Some(()))
}

fn observe(store: &Store) -> BTreeSet<Digest> {
    let found = store.objects().collect::<Result<Vec<_>, _>>().expect("listed");
    found.into_iter().map(|(digest, _)| digest).collect()
}

fn expected() -> Vec<BTreeSet<Digest>> {
    let dir = crash_dir();
    let mut store = None;
    let mut seen = vec![BTreeSet::new()];
    for n in 0.. {
        match step(n, &mut store, &dir.path().join("store")).expect("no fault is armed") {
            Some(()) => seen.push(store.as_ref().map(observe).unwrap_or_default()),
            None => break,
        }
    }
    seen
}

#[test]
fn child() {
    let Some(dir) = std::env::var_os("RYOKAN_CRASH_DIR") else { return };
    println!();
    let mut store = None;
    for n in 0.. {
        match step(n, &mut store, &Path::new(&dir).join("store")) {
            Ok(Some(())) => println!("ack {n}"),
            Ok(None) => break,
            Err(error) => return println!("fail {n} {error}"),
        }
    }
}

#[test]
fn nothing_acknowledged_is_lost_and_nothing_is_left() {
    let seen = expected();
    for (_, point) in points().filter(|(label, _)| label.name.starts_with("store.")) {
        for (deed, passes) in [("kill", 1..=3), ("eio", 1..=1), ("enospc", 1..=1)] {
            for pass in passes {
                let fault = format!("{point}:{pass}={deed}");
                let dir = crash_dir();
                let ran = run_child(CHILD, dir.path(), Some(&fault), &[]);
                let hit = ran.killed || ran.failed.is_some();
                assert!(hit || pass > 1, "{fault} was never passed: {}", ran.all);
                assert_eq!(ran.killed, hit && deed == "kill", "{fault}");
                let root = dir.path().join("store");
                let store = Store::open(&root).expect("opens after the crash");
                let now = observe(&store);
                let before = &seen[ran.acks.len()];
                let after = seen.get(ran.acks.len() + 1).unwrap_or(before);
                let least: BTreeSet<_> = before.intersection(after).copied().collect();
                let most: BTreeSet<_> = before.union(after).copied().collect();
                assert!(now.is_superset(&least) && now.is_subset(&most), "{fault}: {now:?}");
                assert!(store.verify().expect("readable").damaged.is_empty(), "{fault}");
                drop(store);
                let left: Vec<_> = root.join("tmp").read_dir().expect("there").filter_map(Result::ok).collect();
                assert!(left.is_empty(), "{fault}: {left:?}");
                let names = root.read_dir().expect("there").filter_map(Result::ok).count();
                assert_eq!(names, 3, "{fault}: format, objects, tmp");
            }
        }
    }
}
