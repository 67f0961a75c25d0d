//! The store against a map, damage, full devices, and measurements.

use std::collections::HashMap;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::sys::fault::tests::with_fault;

fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = Store::open(&dir.path().join("store")).expect("opened");
    (dir, store)
}

/// Changes an object's bytes behind the store's back.
fn damage(store: &Store, digest: Digest, change: impl FnOnce(&mut Vec<u8>)) {
    let path = store.shared.layout.object(digest);
    let mut bytes = std::fs::read(&path).expect("readable");
    change(&mut bytes);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("set");
    std::fs::write(&path, bytes).expect("written");
}

#[derive(Debug, Clone)]
enum Op {
    Put(Vec<u8>),
    Pieces(Vec<Vec<u8>>),
    Batch(Vec<Vec<u8>>),
    Remove(usize),
    Get(usize),
    Range(usize, u64, usize),
    Reopen,
}

fn any_op() -> impl Strategy<Value = Op> {
    // Few different contents, so that the same comes again.
    let content = || prop::collection::vec(0u8..3, 0..6);
    prop_oneof![
        3 => content().prop_map(Op::Put),
        1 => prop::collection::vec(content(), 0..4).prop_map(Op::Pieces),
        1 => prop::collection::vec(content(), 0..4).prop_map(Op::Batch),
        1 => any::<usize>().prop_map(Op::Remove),
        3 => any::<usize>().prop_map(Op::Get),
        2 => (any::<usize>(), 0u64..8, 0usize..8).prop_map(|(at, from, length)| Op::Range(at, from, length)),
        1 => Just(Op::Reopen),
    ]
}

fn run(store: &mut Option<Store>, root: &std::path::Path, model: &mut HashMap<Digest, Vec<u8>>, op: Op) -> Result<()> {
    let known = |at: usize, model: &HashMap<Digest, Vec<u8>>| {
        let mut all: Vec<_> = model.keys().copied().collect();
        all.sort();
        all.get(at % all.len().max(1)).copied()
    };
    if let Op::Reopen = op {
        *store = None;
        *store = Some(Store::open(root)?);
    }
    let open = store.as_ref().expect("a store is open");
    match op {
        Op::Put(bytes) => drop(model.insert(open.put(&bytes)?, bytes)),
        Op::Pieces(pieces) => {
            let mut writer = open.writer(1000)?;
            pieces.iter().try_for_each(|piece| writer.write(piece))?;
            let (digest, size) = writer.finish()?;
            assert_eq!(size as usize, pieces.concat().len());
            model.insert(digest, pieces.concat());
        }
        Op::Batch(contents) => {
            let mut batch = open.batch();
            for content in contents {
                model.insert(batch.put(&content)?, content);
            }
            batch.commit()?;
        }
        Op::Remove(at) => {
            if let Some(digest) = known(at, model) {
                assert!(open.remove(digest)?);
                model.remove(&digest);
                assert!(matches!(open.get(digest, 1000), Err(StoreError::NotFound(_))));
            }
        }
        Op::Get(at) => {
            if let Some(digest) = known(at, model) {
                assert_eq!(open.get(digest, 1000)?, model[&digest]);
            }
        }
        Op::Range(at, from, length) => {
            if let Some(digest) = known(at, model) {
                let content = &model[&digest];
                match open.get_range(digest, from, length) {
                    Ok(bytes) => {
                        let end = (from as usize + length).min(content.len());
                        assert_eq!(bytes, content[from as usize..end]);
                    }
                    Err(error) => {
                        assert!(matches!(error, StoreError::Range { .. }) && from as usize > content.len(), "{error}");
                    }
                }
            }
        }
        Op::Reopen => {}
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn the_store_is_a_map(ops in prop::collection::vec(any_op(), 1..30)) {
        let (dir, store) = store();
        let mut model = HashMap::new();
        let mut store = Some(store);
        for op in ops {
            run(&mut store, &dir.path().join("store"), &mut model, op).map_err(|e| TestCaseError::fail(e.to_string()))?;
        }
        let store = store.expect("a store is open");
        let mut found: Vec<_> = store.objects().collect::<Result<_>>().map_err(|e| TestCaseError::fail(e.to_string()))?;
        let mut due: Vec<_> = model.iter().map(|(digest, bytes)| (*digest, bytes.len() as u64)).collect();
        found.sort();
        due.sort();
        prop_assert_eq!(found, due);
    }
}

#[test]
fn damage_is_seen_before_the_last_byte_and_named() {
    let (_dir, store) = store();
    let content = vec![7u8; 600_000];
    let good = store.put(b"good").expect("stored");
    for change in [
        (|bytes: &mut Vec<u8>| bytes[0] ^= 1) as fn(&mut Vec<u8>),
        |bytes| bytes[599_999] ^= 1,
        |bytes| bytes.truncate(1000),
        |bytes| bytes.push(7),
        |bytes| bytes.clear(),
    ] {
        let digest = store.put(&content).expect("stored, or healed");
        assert_eq!(store.get(digest, 1 << 20).expect("whole"), content);
        assert_eq!(store.get_range(digest, 5, 5).expect("whole"), [7; 5]);
        damage(&store, digest, change);
        let is_damaged = |error: StoreError| matches!(error, StoreError::Damaged { digest: d, .. } if d == digest);
        assert!(is_damaged(store.get(digest, 1 << 20).expect_err("damaged")));
        assert!(is_damaged(store.get_range(digest, 5, 5).expect_err("damaged")));
        let mut streamed = Vec::new();
        let error = store.open_object(digest).expect("opens").read_to_end(&mut streamed).expect_err("damaged");
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
        let verified = store.verify().expect("readable");
        assert_eq!((verified.good, verified.damaged.len()), (1, 1));
        assert_eq!(store.get(good, 10).expect("unharmed"), b"good");
    }
}

#[test]
fn nothing_is_left_of_what_failed() {
    let (dir, store) = store();
    for label in ["store.temp.create", "store.object.write", "store.object.sync", "store.object.rename"] {
        for (deed, full) in [("enospc", true), ("eio", false)] {
            let failed = with_fault(&format!("{label}={deed}"), || store.put(b"content").expect_err("armed"));
            assert_eq!(matches!(failed, StoreError::Full { .. }), full, "{label}: {failed}");
            assert_eq!(store.objects().count(), 0);
            let temps = &dir.path().join("store/tmp");
            let files = temps.read_dir().expect("there").filter_map(Result::ok).filter(|e| e.path().is_dir());
            assert!(files.into_iter().all(|d| d.path().read_dir().expect("there").count() == 0), "{label}");
        }
    }
    assert!(store.put(b"content").is_ok());
}

#[test]
fn limits_hold() {
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
fn a_newer_store_is_refused_and_not_touched() {
    let (dir, store) = store();
    drop(store);
    let root = dir.path().join("store");
    std::fs::write(root.join("format"), "2\n").expect("written");
    let error = Store::open(&root).expect_err("newer");
    assert!(matches!(&error, StoreError::Newer { found, .. } if found == "2"), "{error}");
    assert_eq!(crate::core::error::Error::from(error).code, crate::core::error::ErrorCode::Unsupported);
}

#[test]
fn a_live_writer_of_another_store_is_not_swept() {
    let (dir, store) = store();
    let mut writer = store.writer(100).expect("begun");
    writer.write(b"half").expect("written");
    let other = Store::open(&dir.path().join("store")).expect("opened beside the first");
    writer.write(b" and half").expect("still there");
    let (digest, _) = writer.finish().expect("finished");
    assert_eq!(other.get(digest, 100).expect("there"), b"half and half");
}

#[test]
#[ignore = "a measurement"]
fn speed_of_the_store() {
    let (_dir, store) = store();
    for (name, size, times) in [("1 KiB", 1usize << 10, 200), ("1 MiB", 1 << 20, 50), ("100 MiB", 100 << 20, 5)] {
        let mut put = Vec::new();
        let mut get = Vec::new();
        let mut again = Vec::new();
        for n in 0..times as u64 {
            let mut bytes = vec![5u8; size];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            let ms = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
            let start = Instant::now();
            let digest = store.put(&bytes).expect("stored");
            put.push(ms(start));
            let start = Instant::now();
            store.put(&bytes).expect("stored");
            again.push(ms(start));
            let start = Instant::now();
            store.get(digest, u64::MAX).expect("there");
            get.push(ms(start));
        }
        let p50 = |list: &mut Vec<f64>| {
            list.sort_by(f64::total_cmp);
            list[list.len() / 2]
        };
        println!(
            "{name:8} put {:8.3} ms, again {:8.3} ms, get {:8.3} ms",
            p50(&mut put),
            p50(&mut again),
            p50(&mut get)
        );
    }
    let start = Instant::now();
    let mut batch = store.batch();
    for n in 0..200u32 {
        batch.put(&[&n.to_le_bytes()[..], &[1; 1020]].concat()).expect("stored");
    }
    batch.commit().expect("durable");
    println!("batch of 200 of 1 KiB: {:.3} ms each", start.elapsed().as_secs_f64() * 1e3 / 200.0);
}
