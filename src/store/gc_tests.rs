//! Garbage collection beside writers and readers: which objects are kept, and why.

use std::collections::{HashMap, HashSet};
use std::io::Read as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::format::digest_of;
use super::store_tests::{SMALL, at_once, fill, noise, store};
use super::*;
use crate::sys::fault::tests::with_fault;

fn fates(store: &Store, options: GcOptions, live: impl FnMut(Digest) -> bool) -> HashMap<Digest, Fate> {
    let mut fates = HashMap::new();
    store
        .gc(options, live, |item| {
            fates.insert(item.digest, item.fate);
        })
        .expect("collected");
    fates
}

fn disk_bytes(store: &Store) -> u64 {
    let dir = store.shared.layout.packs.read_dir().expect("there");
    dir.map(|entry| entry.expect("there").metadata().expect("there").len()).sum()
}

#[test]
fn gc_frees_only_dead_space() {
    let (dir, store) = store();
    let mut model = fill(&store);
    let before = disk_bytes(&store);
    model.retain(|digest, _| digest.as_bytes()[0] < 64);
    let dry = store
        .gc(
            GcOptions { dry_run: true, grace: Duration::ZERO, ..GcOptions::default() },
            |d| model.contains_key(&d),
            |_| (),
        )
        .expect("looked");
    assert_eq!(disk_bytes(&store), before, "a dry run changes nothing");
    let report = at_once(|digest| model.contains_key(&digest), &store);
    assert_eq!((dry.kept, dry.dropped, dry.packs_removed), (report.kept, report.dropped, report.packs_removed));
    assert_eq!((report.kept, report.dropped), (model.len() as u64, 150 - model.len() as u64));
    let live: u64 = model.values().map(|content| content.len() as u64).sum();
    assert!(disk_bytes(&store) < live * 10 / 7 + 100_000, "{} bytes for {live}", disk_bytes(&store));
    assert!(before - disk_bytes(&store) > before / 2);
    drop(store);
    let store = Store::open_sized(&dir.path().join("store"), SMALL).expect("opens");
    assert_eq!(store.objects().count(), model.len());
    for (digest, content) in &model {
        assert_eq!(store.get(*digest, u64::MAX).expect("whole"), *content);
    }
    let report = at_once(|_| false, &store);
    assert_eq!(report.dropped, model.len() as u64);
    assert_eq!(disk_bytes(&store), 0);
}

/// A pack without live objects may gain some before it is removed.
#[test]
fn claim_in_dead_pack_stays() {
    let (_dir, store) = store();
    let again = store.put(b"used again").expect("stored");
    store.state().close_head();
    let lives = store.put(b"lives").expect("stored, and the other pack gets its table");
    std::thread::sleep(Duration::from_millis(5));
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    let mut was_there = None;
    // Packs are weighed in order: the first one was found dead before this one is reported.
    let shown = |item: GcItem| {
        if item.digest == lives {
            was_there.get_or_insert(store.claim(again));
        }
    };
    store.gc(options, |digest| digest == lives, shown).expect("collected");
    assert_eq!(was_there, Some(true), "the writer finds the object in the store");
    assert_eq!(store.get(again, 100).expect("still there"), b"used again");
    at_once(|digest| digest == lives, &store);
    assert!(!store.contains(again), "an unused object is collected");
}

/// Each lifetime of a store whose pack cannot be continued leaves a small pack.
#[test]
fn gc_merges_small_packs() {
    let (_dir, store) = store();
    let mut live = HashMap::new();
    for n in 0..12u64 {
        live.insert(store.put(&noise(n, 1000)).expect("stored"), noise(n, 1000));
        store.state().close_head();
    }
    store.put(b"").expect("stored, and the others get their tables");
    assert_eq!(store.state().packs.len(), 13);
    at_once(|_| true, &store);
    assert!(store.state().packs.len() <= 2, "{:?}", store.state().packs);
    at_once(|_| true, &store);
    assert_eq!(store.objects().count(), 13);
    for (digest, content) in &live {
        assert_eq!(store.get(*digest, u64::MAX).expect("whole"), *content);
    }
}

#[test]
fn gc_fates_have_reasons() {
    let (_dir, store) = store();
    let long = noise(1, 1_000_000);
    let list = store.put(&long).expect("stored");
    let (chunk, length) = store.chunks(list).expect("a list").chunks[0];
    let dead = store.put(b"dead").expect("stored");
    // First an object that is later a part of another one, then the reverse order.
    let other = noise(2, 1_000_000);
    let other_list = digest_of(&other);
    let first_chunk = {
        let (_dir, elsewhere) = self::store();
        let digest = elsewhere.put(&other).expect("stored");
        elsewhere.chunks(digest).expect("a list").chunks[0].1 as usize
    };
    let (small, is_small) = (&other[..first_chunk], first_chunk <= limits::STORE_UNCHUNKED_BYTES);
    let shared = store.put(small).expect("stored");
    store.put(&other).expect("stored");
    let options = GcOptions { grace: Duration::from_secs(60), dry_run: true, ..GcOptions::default() };
    let all = fates(&store, options, |digest| digest == list);
    assert_eq!((all[&list], all[&dead]), (Fate::Live, Fate::Recent));
    let options = GcOptions { grace: Duration::ZERO, ..options };
    let all = fates(&store, options, |digest| digest == list || digest == other_list);
    assert_eq!((all[&list], all[&dead]), (Fate::Live, Fate::Unreferenced));
    assert!(!is_small || all[&shared] == Fate::Shared);
    assert!(!all.contains_key(&chunk), "a chunk is no object");
    // A chunk that is put by itself becomes an object.
    let part = long[..length as usize].to_vec();
    assert_eq!(store.put(&part).expect("stored"), chunk);
    assert!(store.contains(chunk));
    at_once(|digest| digest == chunk, &store);
    assert_eq!(store.get(chunk, u64::MAX).expect("whole"), part);
    assert!(!store.contains(list) && !store.contains(dead));
}

#[test]
fn writer_hold_keeps_objects() {
    let (_dir, store) = store();
    let old = store.put(b"old").expect("stored");
    let long = noise(3, 2_000_000);
    let list = store.put(&long).expect("stored");
    let batch = store.batch();
    batch.put(b"old").expect("used again");
    let mut writer = store.writer(u64::MAX).expect("begun");
    writer.write(&long).expect("used again");
    writer.write(&noise(4, 5_000_000)).expect("written");
    let unused = store.put(b"unused").expect("stored by another writer");
    at_once(|_| false, &store);
    assert!(store.contains(old) && store.contains(unused), "kept while an older writer is active");
    let (longer, _) = writer.finish().expect("its chunks are there");
    batch.commit().expect("durable");
    assert_eq!(store.get(longer, u64::MAX).expect("whole").len(), 7_000_000);
    at_once(|digest| digest == longer, &store);
    assert!(!store.contains(old) && !store.contains(list) && store.contains(longer));
    assert_eq!(store.get(longer, u64::MAX).expect("whole")[..2_000_000], long);
}

#[test]
fn open_reader_survives_gc() {
    let (_dir, store) = store();
    let content = noise(5, 3_000_000);
    let digest = store.put(&content).expect("stored");
    let mut reader = store.open_object(digest).expect("opened");
    let mut read = vec![0; 100_000];
    reader.read_exact(&mut read).expect("read");
    at_once(|_| false, &store);
    assert!(!store.contains(digest));
    reader.read_to_end(&mut read).expect("to the end");
    assert!(read == content);
}

#[test]
fn gc_beside_writers() {
    let (dir, store) = store();
    let named = std::sync::Mutex::new(HashSet::new());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3u64)
            .map(|writer| {
                let (store, named) = (&store, &named);
                scope.spawn(move || {
                    for round in 0..40u64 {
                        let guard = store.guard();
                        let batch = store.batch();
                        let contents =
                            (0..4).map(|n| noise((writer + round + n) % 12, 300_000 * (n as usize % 2) + 3000));
                        let digests: Vec<_> = contents.map(|content| batch.put(&content).expect("stored")).collect();
                        batch.commit().expect("durable");
                        let mut named = lock(named);
                        // Objects that another round named are dropped: they are reused or
                        // collected.
                        named.retain(|digest: &Digest| !(digest.as_bytes()[1] as u64 + round).is_multiple_of(3));
                        named.extend(digests.iter().copied());
                        drop(named);
                        drop(guard);
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                at_once(|digest| lock(&named).contains(&digest), &store);
            }
        });
        for writer in writers {
            writer.join().expect("no writer failed");
        }
        done.store(true, Ordering::Relaxed);
    });
    let named = named.into_inner().expect("not poisoned");
    let check = |store: &Store| {
        for digest in &named {
            let content = store.get(*digest, u64::MAX).expect("named and there");
            assert_eq!(digest_of(&content), *digest);
        }
        assert!(store.verify(|_| ()).expect("readable").damaged.is_empty());
    };
    check(&store);
    drop(store);
    check(&Store::open_sized(&dir.path().join("store"), SMALL).expect("opens"));
}

/// Objects that become durable while their pack is examined are not duplicates.
#[test]
fn object_synced_during_gc_stays() {
    let (_dir, store) = store();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                at_once(|_| false, &store);
            }
        });
        let _guard = store.guard();
        let digests: Vec<Digest> = (0..1500u64).map(|n| store.put(&n.to_le_bytes()).expect("stored")).collect();
        let gone = digests.iter().filter(|digest| !store.contains(**digest)).count();
        done.store(true, Ordering::Relaxed);
        assert_eq!(gone, 0, "of 1500 that a writer guards");
    });
}

#[test]
fn failed_gc_keeps_live_objects() {
    let labels = [
        "store.dropped.write.sync",
        "store.pack.write",
        "store.pack.sync",
        "store.pack.remove",
        "store.index.write.sync",
    ];
    for label in labels {
        for deed in ["enospc", "eio"] {
            let (dir, store) = store();
            let mut model = fill(&store);
            model.retain(|digest, _| digest.as_bytes()[0] < 100);
            let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
            let failed = with_fault(&format!("{label}={deed}"), || {
                store.gc(options, |digest| model.contains_key(&digest), |_| ()).expect_err("armed")
            });
            assert_eq!(matches!(failed, StoreError::Full { .. }), deed == "enospc", "{label}: {failed}");
            let check = |store: &Store| {
                for (digest, content) in &model {
                    assert_eq!(store.get(*digest, u64::MAX).expect("whole"), *content, "{label}");
                }
                assert!(store.verify(|_| ()).expect("readable").damaged.is_empty(), "{label}");
            };
            check(&store);
            drop(store);
            let store = Store::open_sized(&dir.path().join("store"), SMALL).expect("opens");
            check(&store);
            at_once(|digest| model.contains_key(&digest), &store);
            assert_eq!(store.objects().count(), model.len(), "{label}: the next run continues");
            check(&store);
        }
    }
}

/// The writer names the object after the list was made, and releases it before the list is used.
#[test]
fn late_named_object_stays() {
    let (_dir, store) = store();
    let garbage = store.put(&noise(1, 1000)).expect("stored");
    let writer = store.guard();
    let named = store.put(&noise(2, 1000)).expect("stored");
    let lister = store.guard_before_all(Duration::ZERO);
    let listed: HashSet<Digest> = HashSet::new();
    drop(writer);
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    let found = fates(&store, options, |digest| listed.contains(&digest));
    assert_eq!((found[&named], found[&garbage]), (Fate::Recent, Fate::Unreferenced));
    drop(lister);
    let found = fates(&store, options, |_| false);
    assert_eq!(found[&named], Fate::Unreferenced);
}
