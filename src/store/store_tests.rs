//! The store compared to a map, and its behaviour with damage, full devices and other formats.

use std::collections::HashMap;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;

use super::format::{Kind, digest_of};
use super::*;
use crate::sys::fault::tests::with_fault;

/// Small enough that a few hundred kilobytes fill packs, and a few entries an index file.
pub(super) const SMALL: Sizes = Sizes { pack_bytes: 600_000, pack_entries: 40, unindexed: 30 };

pub(super) fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = Store::open_sized(&dir.path().join("store"), SMALL).expect("opened");
    (dir, store)
}

/// Returns the same incompressible bytes for the same seed.
pub(super) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

pub(super) fn at_once(live: impl FnMut(Digest) -> bool, store: &Store) -> GcReport {
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    store.gc(options, live, |_| ()).expect("collected")
}

/// Flips a bit of the stored form of an object, bypassing the store.
pub(super) fn flip(store: &Store, digest: Digest, want: Want, at: u32) {
    let slot = store.slots(digest, want).expect("read")[0];
    let path = pack::path(&store.shared.layout.packs, slot.pack);
    let file = std::fs::File::options().read(true).write(true).open(path).expect("opened");
    let mut byte = [0];
    file.read_exact_at(&mut byte, u64::from(slot.offset + at)).expect("read");
    file.write_all_at(&[byte[0] ^ 1], u64::from(slot.offset + at)).expect("written");
}

#[derive(Debug, Clone)]
enum Op {
    Put(Vec<u8>),
    Pieces(Vec<Vec<u8>>),
    Batch(Vec<Vec<u8>>),
    Each(Vec<Vec<u8>>),
    Gc(u8, u8),
    DryGc(u8),
    Get(usize),
    Range(usize, u64, usize),
    Reopen,
}

fn any_op() -> impl Strategy<Value = Op> {
    // Few different contents, so that some repeat; some are cut into chunks, which they share.
    let small = prop::collection::vec(0u8..3, 0..6);
    let large = (0u64..2, 0usize..3, 200_000usize..900_000).prop_map(|(seed, insert, length)| {
        let mut bytes = noise(seed, length / 100_000 * 100_000);
        bytes.splice(1000..1000, vec![7; insert]);
        bytes
    });
    let content = || prop_oneof![4 => small.clone(), 1 => large.clone()];
    let contents = || prop::collection::vec(content(), 0..4);
    prop_oneof![
        4 => content().prop_map(Op::Put),
        2 => contents().prop_map(Op::Pieces),
        2 => contents().prop_map(Op::Batch),
        2 => contents().prop_map(Op::Each),
        2 => (any::<u8>(), 0u8..=100).prop_map(|(mask, percent)| Op::Gc(mask, percent)),
        1 => any::<u8>().prop_map(Op::DryGc),
        3 => any::<usize>().prop_map(Op::Get),
        2 => (any::<usize>(), 0u64..500_000, 0usize..400_000).prop_map(|(at, from, length)| Op::Range(at, from, length)),
        2 => Just(Op::Reopen),
    ]
}

type Model = HashMap<Digest, Vec<u8>>;

fn known(at: usize, model: &Model) -> Option<Digest> {
    let mut all: Vec<_> = model.keys().copied().collect();
    all.sort();
    all.get(at % all.len().max(1)).copied()
}

fn collect(store: &Store, model: &mut Model, mask: u8, percent: u8, dry_run: bool) -> Result<()> {
    let is_live = |digest: Digest| digest.as_bytes()[0] & mask != 0;
    let options = GcOptions { dry_run, grace: Duration::ZERO, live_percent: percent, ..GcOptions::default() };
    let mut fates = HashMap::new();
    let report = store.gc(options, is_live, |item| assert!(fates.insert(item.digest, item).is_none()))?;
    assert_eq!(report.kept + report.dropped, model.len() as u64);
    for (digest, bytes) in &*model {
        let item = fates[digest];
        assert_eq!(item.bytes, bytes.len() as u64);
        assert_eq!(item.fate == Fate::Live, is_live(*digest));
        assert!(item.fate != Fate::Recent, "no writer is active");
    }
    if dry_run {
        return Ok(());
    }
    model.retain(|digest, _| fates[digest].fate.is_kept());
    for (digest, item) in &fates {
        assert_eq!(store.contains(*digest), item.fate.is_kept());
        if !item.fate.is_kept() {
            assert!(matches!(store.get(*digest, u64::MAX), Err(StoreError::NotFound(_))));
        }
    }
    Ok(())
}

fn read_range(store: &Store, digest: Digest, content: &[u8], from: u64, length: usize) {
    match store.get_range(digest, from, length) {
        Ok(bytes) => {
            let end = (from as usize + length).min(content.len());
            assert_eq!(bytes, content[from as usize..end]);
        }
        Err(error) => {
            assert!(matches!(error, StoreError::Range { .. }) && from as usize > content.len(), "{error}");
        }
    }
}

fn run(store: &mut Option<Store>, root: &Path, model: &mut Model, op: Op) -> Result<()> {
    if let Op::Reopen = op {
        *store = None;
        *store = Some(Store::open_sized(root, SMALL)?);
    }
    let open = store.as_ref().expect("a store is open");
    match op {
        Op::Put(bytes) => drop(model.insert(open.put(&bytes)?, bytes)),
        Op::Pieces(pieces) => {
            let mut writer = open.writer(10_000_000)?;
            pieces.iter().try_for_each(|piece| writer.write(piece))?;
            let (digest, size) = writer.finish()?;
            assert_eq!((digest, size as usize), (digest_of(&pieces.concat()), pieces.concat().len()));
            model.insert(digest, pieces.concat());
        }
        Op::Batch(contents) => {
            let batch = open.batch();
            for content in contents {
                model.insert(batch.put(&content)?, content);
            }
            batch.commit()?;
        }
        Op::Each(contents) => {
            let batch = open.batch();
            let source = |n: usize| Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Some(&contents[n][..]));
            let stored = batch.put_parallel(contents.len(), source).expect("stored");
            batch.commit()?;
            for (named, content) in stored.into_iter().zip(&contents) {
                assert_eq!(named, Some((digest_of(content), content.len() as u64)));
                model.insert(digest_of(content), content.clone());
            }
        }
        Op::Gc(mask, percent) => collect(open, model, mask, percent, false)?,
        Op::DryGc(mask) => collect(open, model, mask, 50, true)?,
        Op::Get(at) => {
            if let Some(digest) = known(at, model) {
                assert_eq!(open.get(digest, u64::MAX)?, model[&digest]);
            }
        }
        Op::Range(at, from, length) => {
            if let Some(digest) = known(at, model) {
                read_range(open, digest, &model[&digest], from, length);
            }
        }
        Op::Reopen => {}
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn store_matches_map_model(ops in prop::collection::vec(any_op(), 1..40)) {
        let (dir, store) = store();
        let mut model = Model::new();
        let mut store = Some(store);
        for op in ops {
            run(&mut store, &dir.path().join("store"), &mut model, op).map_err(|e| TestCaseError::fail(e.to_string()))?;
        }
        let store = store.expect("a store is open");
        let mut found: Vec<_> = store.objects().collect::<Result<_>>().map_err(|e| TestCaseError::fail(e.to_string()))?;
        let mut due: Vec<_> = model.iter().map(|(digest, bytes)| (*digest, bytes.len() as u64)).collect();
        found.sort();
        due.sort();
        prop_assert_eq!(&found, &due);
        let verified = store.verify(|_| ()).map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert!(verified.damaged.is_empty(), "{:?}", verified.damaged);
        prop_assert_eq!(verified.good, due.len() as u64);
        let digests: Vec<_> = due.iter().map(|(digest, _)| *digest).collect();
        store.read_parallel(&digests, |n, reader| -> Result<()> {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).expect("whole");
            assert_eq!(bytes, model[&digests[n]]);
            Ok(())
        }).map_err(|e| TestCaseError::fail(e.to_string()))?;
    }
}

/// Bytes written for a content of 10 MB that differs in one byte from a stored one.
#[test]
fn inserted_byte_adds_few_chunks() {
    let (_dir, store) = store();
    let mut content = noise(1, 20_000_000);
    store.put(&content).expect("stored");
    let entries = |store: &Store| store.state().packs.keys().copied().collect::<Vec<_>>().into_iter();
    let parts = |store: &Store| -> Vec<Digest> {
        let slots = entries(store).flat_map(|number| store.entries(number).expect("read"));
        slots.filter(|slot| slot.kind == Kind::Part).map(|slot| slot.digest).collect()
    };
    let before = parts(&store);
    assert!((20..=80).contains(&before.len()), "{} chunks", before.len());
    content.insert(4_000_000, 7);
    let digest = store.put(&content).expect("stored");
    let added = parts(&store).len() - before.len();
    assert!((1..=3).contains(&added), "{added} chunks more");
    assert_eq!(store.get(digest, u64::MAX).expect("whole"), content);
}

#[test]
fn damaged_object_is_healed() {
    let (_dir, store) = store();
    let good = store.put(b"good").expect("stored");
    for (content, want, at) in [
        (noise(1, 100), Want::Data, 64),
        (noise(2, 100), Want::Data, 163),
        (noise(3, 100), Want::Data, 30),
        (noise(4, 100), Want::Data, 0),
        (vec![7; 200_000], Want::Data, 70),
        (noise(5, 1_000_000), Want::Object, 100),
    ] {
        let digest = store.put(&content).expect("stored");
        assert_eq!(store.get(digest, 1 << 20).expect("whole"), content);
        flip(&store, digest, want, at);
        let is_damaged = |error: StoreError| matches!(error, StoreError::Damaged { digest: d, .. } if d == digest);
        assert!(is_damaged(store.get(digest, 1 << 20).expect_err("damaged")));
        assert!(is_damaged(store.get_range(digest, 5, 5).expect_err("damaged")));
        let verified = store.verify(|_| ()).expect("readable");
        assert_eq!(verified.damaged.len(), 1, "{:?}", verified.damaged);
        assert!(is_damaged(verified.damaged.into_iter().next().expect("one")));
        assert_eq!(store.get(good, 10).expect("unharmed"), b"good");
        // A known damaged object is written again.
        assert_eq!(store.put(&content).expect("healed"), digest);
        assert_eq!(store.get(digest, 1 << 20).expect("whole"), content);
        assert!(store.verify(|_| ()).expect("readable").damaged.is_empty());
    }
}

#[test]
fn chunk_damage_is_contained() {
    let (dir, store) = store();
    let (mut first, other) = (noise(1, 4_000_000), noise(2, 4_000_000));
    let one = store.put(&first).expect("stored");
    first.extend_from_slice(b"and more");
    let two = store.put(&first).expect("stored");
    let three = store.put(&other).expect("stored");
    let (chunk, _) = store.chunks(one).expect("a list").chunks[3];
    flip(&store, chunk, Want::Data, 1000);
    let place = store.slots(chunk, Want::Data).expect("read")[0];
    let mut seen = Vec::new();
    let verified = store.verify(|progress| seen.push(progress)).expect("readable");
    assert!(seen.last().is_some_and(|last| last.packs == last.of_packs && last.bytes > 8_000_000), "{seen:?}");
    let mut named: Vec<_> = verified
        .damaged
        .iter()
        .map(|error| match error {
            StoreError::Damaged { digest, path, offset } => {
                assert_eq!((pack::number(path), *offset), (Some(place.pack), u64::from(place.offset)));
                *digest
            }
            other => panic!("{other}"),
        })
        .collect();
    let mut affected = store.affected(&[chunk].into()).expect("readable");
    named.sort();
    affected.sort();
    let mut both = vec![one, two];
    both.sort();
    assert_eq!((&named, &affected, verified.good), (&both, &both, 1));
    assert_eq!(store.get(three, u64::MAX).expect("unharmed"), other);
    let mut streamed = Vec::new();
    let error = store.open_object(one).expect("opens").read_to_end(&mut streamed).expect_err("damaged");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    assert_eq!(streamed[..], first[..streamed.len()], "the data before the damage is right");
    // A range without the damaged chunk can be read.
    assert_eq!(store.get_range(one, 0, 1000).expect("whole"), first[..1000]);
    drop(store);
    let store = Store::open(&dir.path().join("store")).expect("opens");
    assert!(matches!(store.get(two, u64::MAX), Err(StoreError::Damaged { digest, .. }) if digest == two));
}

/// Fills several packs, so that some are full and an index file covers them.
pub(super) fn fill(store: &Store) -> Model {
    let mut model = Model::new();
    let batch = store.batch();
    for n in 0..150 {
        let content = noise(n, 20_000 + n as usize);
        model.insert(batch.put(&content).expect("stored"), content);
    }
    batch.commit().expect("durable");
    assert!(!store.state().segments.is_empty() && store.state().packs.len() > 3);
    model
}

fn whole(store: &Store, model: &Model) -> usize {
    model.iter().filter(|(digest, content)| store.get(**digest, u64::MAX).is_ok_and(|found| found == **content)).count()
}

#[test]
fn file_damage_is_contained() {
    let (dir, store) = store();
    let model = fill(&store);
    let root = dir.path().join("store");
    let newest = *store.state().packs.keys().last().expect("packs");
    let in_newest = store.entries(newest).expect("read").len();
    drop(store);
    let indexes = || std::fs::read_dir(root.join("index")).expect("there").map(|e| e.expect("there").path());
    // Damaged index files are rebuilt.
    let harms: [fn(&mut Vec<u8>); 4] =
        [|_| (), |b| b[40] ^= 1, |b| b.truncate(100), |b| *b.last_mut().expect("bytes") ^= 1];
    for harm in harms {
        for path in indexes() {
            let mut bytes = std::fs::read(&path).expect("read");
            harm(&mut bytes);
            std::fs::write(&path, bytes).expect("written");
        }
        let store = Store::open_sized(&root, SMALL).expect("opens");
        assert_eq!(whole(&store, &model), model.len());
        assert!(store.verify(|_| ()).expect("readable").damaged.is_empty());
    }
    indexes().for_each(|path| std::fs::remove_file(path).expect("removed"));
    assert_eq!(whole(&Store::open_sized(&root, SMALL).expect("opens"), &model), model.len());
    // The pack that was being written loses only its last entry.
    let head = pack::path(&root.join("packs"), newest);
    let length = std::fs::metadata(&head).expect("there").len();
    std::fs::File::options().write(true).open(&head).expect("opened").set_len(length - 1).expect("cut");
    let store = Store::open_sized(&root, SMALL).expect("opens");
    assert_eq!(whole(&store, &model), model.len() - 1);
    assert!(store.verify(|_| ()).expect("readable").damaged.is_empty());
    drop(store);
    // A full pack without its table or with a damaged header is read completely.
    for (from_end, at) in [(true, 5), (false, 20)] {
        let path = pack::path(&root.join("packs"), 1);
        let mut bytes = std::fs::read(&path).expect("read");
        let at = if from_end { bytes.len() - at } else { at };
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).expect("written");
        indexes().for_each(|path| std::fs::remove_file(path).expect("removed"));
        let store = Store::open_sized(&root, SMALL).expect("opens");
        assert_eq!(whole(&store, &model), model.len() - 1);
        let damaged = store.verify(|_| ()).expect("readable").damaged;
        assert_eq!(damaged.len(), usize::from(!from_end), "{damaged:?}");
    }
    assert!(in_newest > 1);
}

#[test]
fn reopened_pack_damage_is_reported() {
    let (dir, store) = store();
    let contents: Vec<Vec<u8>> = (0..5).map(|n| noise(n, 5000)).collect();
    let digests: Vec<_> = contents.iter().map(|content| store.put(content).expect("stored")).collect();
    flip(&store, digests[2], Want::Data, 100);
    flip(&store, digests[4], Want::Data, 100);
    drop(store);
    let store = Store::open_sized(&dir.path().join("store"), SMALL).expect("opens");
    for (n, digest) in digests.iter().enumerate() {
        match store.get(*digest, u64::MAX) {
            Ok(found) => assert!(found == contents[n] && n != 2 && n != 4),
            Err(error) => {
                assert!(matches!(error, StoreError::Damaged { digest: d, .. } if d == *digest), "{n}: {error}")
            }
        }
    }
    assert_eq!(store.verify(|_| ()).expect("readable").damaged.len(), 2);
    store.put(&contents[4]).expect("healed");
    assert_eq!(store.get(digests[4], u64::MAX).expect("whole"), contents[4]);
}

#[test]
fn failed_write_leaves_no_object() {
    let (_dir, store) = store();
    for label in ["store.pack.create", "store.pack.write", "store.pack.sync", "store.pack.sync_dir"] {
        for (deed, full) in [("enospc", true), ("eio", false)] {
            let failed = with_fault(&format!("{label}={deed}"), || store.put(b"content").expect_err("armed"));
            assert_eq!(matches!(failed, StoreError::Full { .. }), full, "{label}: {failed}");
            assert_eq!(store.objects().count(), 0, "{label}");
            assert!(!store.contains(digest_of(b"content")));
        }
    }
    let digest = store.put(b"content").expect("stored");
    assert_eq!(store.get(digest, 10).expect("whole"), b"content");
}

#[test]
fn failed_sync_fails_sharing_batches() {
    let (_dir, store) = store();
    let batch = store.batch();
    batch.put(b"shared").expect("written, not yet durable");
    assert!(!store.contains(digest_of(b"shared")), "objects that are not durable are invisible");
    let other = store.batch();
    other.put(b"shared").expect("already written");
    with_fault("store.pack.sync=eio", || batch.commit().expect_err("armed"));
    assert!(matches!(other.commit(), Err(StoreError::Unsynced)));
    assert!(!store.contains(digest_of(b"shared")));
    assert!(store.put(b"shared").is_ok() && store.contains(digest_of(b"shared")));
}

#[test]
fn parallel_put_stops_on_error() {
    let (_dir, store) = store();
    let contents: Vec<Vec<u8>> = (0..200).map(|n| noise(n % 150, 100 + n as usize % 150 * 300)).collect();
    type AnyError = Box<dyn std::error::Error + Send + Sync>;
    let source = |n: usize| -> Result<Option<&[u8]>, AnyError> { Ok((n % 10 != 3).then_some(&contents[n][..])) };
    let batch = store.batch();
    let stored = batch.put_parallel(contents.len(), source).expect("stored");
    batch.commit().expect("durable");
    for (n, named) in stored.iter().enumerate() {
        let due = (n % 10 != 3).then(|| (digest_of(&contents[n]), contents[n].len() as u64));
        assert_eq!(*named, due);
        assert!(due.is_none_or(|(digest, _)| store.get(digest, u64::MAX).is_ok_and(|found| found == contents[n])));
    }
    let entries: usize =
        store.state().packs.keys().map(|n| store.pack(*n).expect("there").slots().expect("read").len()).sum();
    assert_eq!(entries, 150 - 15, "objects are written once");
    let batch = store.batch();
    let failing = |n: usize| if n == 50 { Err("gone".into()) } else { source(n) };
    assert_eq!(batch.put_parallel(contents.len(), failing).expect_err("a failed write").to_string(), "gone");
    let digests: Vec<Digest> = stored.iter().flatten().map(|(digest, _)| *digest).collect();
    let refuse = |n: usize, _: &mut Reader| if n == 20 { Err(AnyError::from("no room")) } else { Ok(()) };
    assert_eq!(store.read_parallel(&digests, refuse).expect_err("a failed read").to_string(), "no room");
}

#[test]
fn store_size_limits_hold() {
    let (_dir, store) = store();
    let mut writer = store.writer(10).expect("begun");
    writer.write(&[0; 10]).expect("fits");
    assert!(matches!(writer.write(&[0]), Err(StoreError::TooLarge { limit: 10 })));
    assert!(matches!(writer.finish(), Err(StoreError::TooLarge { .. })));
    let digest = store.put(&[0; 100]).expect("stored");
    assert!(matches!(store.get(digest, 99), Err(StoreError::TooLarge { limit: 99 })));
    assert_eq!(store.get_range(digest, 90, usize::MAX).expect("to the end").len(), 10);
}

#[test]
fn unknown_format_is_refused() {
    let (dir, store) = store();
    drop(store);
    let root = dir.path().join("store");
    for other in ["1", "3"] {
        std::fs::write(root.join("format"), format!("{other}\n")).expect("written");
        let error = Store::open(&root).expect_err("another format");
        assert!(matches!(&error, StoreError::UnknownFormat { found, .. } if found == other), "{error}");
        let error = crate::core::error::Error::from(error);
        assert_eq!(error.code, crate::core::error::ErrorCode::Unsupported);
        assert!(!error.hint.is_empty(), "{error:?}");
    }
    std::fs::write(root.join("format"), "2\n").expect("written");
    assert!(Store::open(&root).is_ok());
}

#[test]
fn store_has_single_owner() {
    let (dir, store) = store();
    assert!(matches!(Store::open(&dir.path().join("store")), Err(StoreError::InUse { .. })));
    drop(store);
    assert!(Store::open(&dir.path().join("store")).is_ok());
}
