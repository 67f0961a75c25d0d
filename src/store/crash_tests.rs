//! A child process runs a script over a store and is killed, or meets an error, at each labelled
//! point and at random ones.
//!
//! Afterwards every acknowledged object is present and intact, nothing is damaged, and the store
//! can be collected.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::format::digest_of;
use super::store_tests::{SMALL, noise};
use super::{GcOptions, Store, StoreError};
use crate::core::ids::Digest;
use crate::sys::fault::points;
use crate::sys::fault::tests::{crash_dir, run_child};

const CHILD: &str = "store::crash_tests::store_script_child";
const RANDOM_CHILD: &str = "store::crash_tests::store_random_work_child";

fn gc(store: &Store, live: impl FnMut(Digest) -> bool) -> Result<(), StoreError> {
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    store.gc(options, live, |_| ()).map(drop)
}

fn put_many(store: &Store, seeds: std::ops::Range<u64>) -> Result<(), StoreError> {
    let batch = store.batch();
    for seed in seeds {
        batch.put(&noise(seed, 30_000))?;
    }
    batch.commit()
}

/// Runs one step of the script; `None` beyond its end.
fn step(n: usize, store: &mut Option<Store>, dir: &Path) -> Result<Option<()>, StoreError> {
    let open = || Store::open_sized(dir, SMALL);
    let is_odd = |digest: Digest| digest.as_bytes()[0] % 2 == 1;
    match (n, store.as_ref()) {
        (0, _) => *store = Some(open()?),
        (1, Some(store)) => drop(store.put(b"one")?),
        (2, Some(store)) => {
            let mut writer = store.writer(1 << 20)?;
            for piece in 0..4u64 {
                writer.write(&noise(piece, 100_000))?;
            }
            writer.finish().map(drop)?;
        }
        (3, Some(store)) => put_many(store, 100..160)?,
        (4, Some(store)) => drop(store.put(b"one")?),
        (5, _) => {
            *store = None;
            // The partial entry of a writer that died.
            let packs = dir.join("packs");
            let newest = packs.read_dir().expect("there").map(|e| e.expect("there").path()).max().expect("a pack");
            let mut bytes = std::fs::read(&newest).expect("read");
            bytes.extend_from_slice(b"RYEN half an entry");
            std::fs::write(&newest, bytes).expect("written");
            *store = Some(open()?);
        }
        (6, Some(store)) => gc(store, is_odd)?,
        (7, Some(store)) => put_many(store, 130..200)?,
        (8, Some(store)) => gc(store, is_odd)?,
        (9, _) => {
            *store = None;
            *store = Some(open()?);
        }
        (10, Some(store)) => gc(store, |digest| !is_odd(digest))?,
        (11, Some(store)) => drop(store.put(b"six")?),
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
fn store_script_child() {
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

/// Checks the invariants of a store after any interruption.
fn is_sound(root: &Path, fault: &str) -> (Store, BTreeSet<Digest>) {
    let store = Store::open_sized(root, SMALL).expect("opens after the crash");
    let now = observe(&store);
    let verified = store.verify(|_| ()).expect("readable");
    assert!(verified.damaged.is_empty(), "{fault}: {:?}", verified.damaged);
    for digest in &now {
        let content = store.get(*digest, u64::MAX).expect("what is listed is there");
        assert_eq!(digest_of(&content), *digest, "{fault}");
    }
    (store, now)
}

/// Faults without an error for the caller: the objects are stored, and the next opening completes
/// the rest.
const SILENT: &[&str] = &["store.pack.seal", "store.index.write", "store.index.remove"];

#[test]
fn store_steps_are_atomic() {
    let seen = expected();
    for (label, point) in points().filter(|(label, _)| label.name.starts_with("store.")) {
        for (deed, passes) in [("kill", 1..=3), ("eio", 1..=1), ("enospc", 1..=1)] {
            for pass in passes {
                let fault = format!("{point}:{pass}={deed}");
                let dir = crash_dir();
                let ran = run_child(CHILD, dir.path(), Some(&fault), &[]);
                let hit = ran.killed || ran.failed.is_some();
                let silent = deed != "kill" && SILENT.contains(&label.name);
                assert!(hit || pass > 1 || silent, "{fault} was never passed: {}", ran.all);
                assert_eq!(ran.killed, hit && deed == "kill", "{fault}");
                let root = dir.path().join("store");
                let (store, now) = is_sound(&root, &fault);
                let before = &seen[ran.acks.len()];
                let after = seen.get(ran.acks.len() + 1).unwrap_or(before);
                let least: BTreeSet<_> = before.intersection(after).copied().collect();
                let most: BTreeSet<_> = before.union(after).copied().collect();
                assert!(now.is_superset(&least) && now.is_subset(&most), "{fault}: {now:?}");
                gc(&store, |digest| least.contains(&digest)).expect("collected");
                assert_eq!(observe(&store), least, "{fault}");
                drop(store);
                is_sound(&root, &fault);
                let names = |dir: &Path| -> BTreeSet<String> {
                    let entries = dir.read_dir().expect("there").map(|entry| entry.expect("there").file_name());
                    entries.map(|name| name.to_string_lossy().into_owned()).collect()
                };
                let mut due: BTreeSet<String> = ["format", "lock", "packs", "index"].map(str::to_owned).into();
                due.extend(names(&root).contains("dropped").then(|| "dropped".to_owned()));
                assert_eq!(names(&root), due, "{fault}");
                assert!(names(&root.join("packs")).iter().all(|name| name.ends_with(".pack")), "{fault}");
                assert!(names(&root.join("index")).iter().all(|name| name.ends_with(".index")), "{fault}");
            }
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Runs random operations from a seed. Prints each acknowledged object, and each intended removal
/// in advance.
#[test]
fn store_random_work_child() {
    let (Some(dir), Ok(seed)) = (std::env::var_os("RYOKAN_CRASH_DIR"), std::env::var("RYOKAN_CRASH_SEED")) else {
        return;
    };
    println!();
    let root = Path::new(&dir).join("store");
    let mut random = Random(seed.parse().expect("a number"));
    let mut store = Store::open_sized(&root, SMALL).expect("opens");
    let mut live: BTreeSet<Digest> = store.objects().map(|object| object.expect("listed").0).collect();
    for _ in 0..60 {
        match random.below(10) {
            0 => {
                drop(store);
                store = Store::open_sized(&root, SMALL).expect("opens");
            }
            1 => {
                let mask = random.below(256) as u8;
                live.retain(|digest| digest.as_bytes()[2] & mask != 0);
                println!("ack only {mask}");
                gc(&store, |digest| live.contains(&digest)).expect("collected");
            }
            2..=4 => {
                let batch = store.batch();
                let contents: Vec<_> = (0..random.below(20)).map(|_| noise(random.below(100), 20_000)).collect();
                for content in &contents {
                    batch.put(content).expect("stored");
                }
                batch.commit().expect("durable");
                for content in &contents {
                    live.insert(digest_of(content));
                    println!("ack put {}", digest_of(content));
                }
            }
            _ => {
                let mut content = noise(random.below(5), 400_000);
                content.truncate(random.below(400_000) as usize);
                let digest = store.put(&content).expect("stored");
                live.insert(digest);
                println!("ack put {digest}");
            }
        }
    }
}

#[test]
fn random_kills_lose_nothing() {
    let mut random = Random(7);
    let often = ["store.dropped", "store.index", "store.pack"];
    let all = points().filter(|(label, _)| often.iter().any(|family| label.name.starts_with(family)));
    let all: Vec<_> = all.map(|(_, point)| point).collect();
    let mut killed = 0;
    for _ in 0..6 {
        let dir = crash_dir();
        let mut live: BTreeSet<Digest> = BTreeSet::new();
        // Several lifetimes of the same store.
        for _ in 0..8 {
            let point = &all[random.below(all.len() as u64) as usize];
            let fault = format!("{point}:{}=kill", 1 + random.below(5));
            let seed = random.below(1 << 30).to_string();
            let ran = run_child(RANDOM_CHILD, dir.path(), Some(&fault), &[("RYOKAN_CRASH_SEED", &seed)]);
            killed += usize::from(ran.killed);
            for line in &ran.acks {
                match line.split_once(' ') {
                    Some(("put", digest)) => drop(live.insert(digest.parse().expect("a digest"))),
                    Some(("only", mask)) => {
                        let mask: u8 = mask.parse().expect("a number");
                        live.retain(|digest| digest.as_bytes()[2] & mask != 0);
                    }
                    other => panic!("{other:?}"),
                }
            }
            let root = dir.path().join("store");
            let (_store, now) = is_sound(&root, &fault);
            assert!(now.is_superset(&live), "{fault}, seed {seed}: {:?} are lost", live.difference(&now));
        }
    }
    assert!(killed >= 10, "only {killed} of 48 were killed");
}
