//! Speed of the store: `cargo bench --bench store [-- FOLDER]`.
//!
//! Makes a tree of 10,000 mixed files, 500 MB, the same each time, below FOLDER or a temporary
//! directory. Stores it, stores it again, and reads it; then opens a store of 1,000,000 objects.
//! With FOLDER the tree is kept for comparison with other tools.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ryokan::core::ids::Digest;
use ryokan::store::{GcOptions, Reader, Store};

const FILES: usize = 10_000;
const BYTES: usize = 500_000_000;
const OBJECTS: u32 = 1_000_000;

/// A generator: the same numbers for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 11) % bound
    }
}

/// Lines of words, like source and data. They compress to about a quarter.
fn text(random: &mut Random, words: &[String], length: usize) -> Vec<u8> {
    let mut text = Vec::with_capacity(length + 64);
    while text.len() < length {
        // Smaller numbers are more frequent.
        let most = 1 + random.below(words.len() as u64);
        text.extend_from_slice(words[random.below(most) as usize].as_bytes());
        text.push(if random.below(9) == 0 { b'\n' } else { b' ' });
    }
    text.truncate(length);
    text
}

fn noise(random: &mut Random, length: usize) -> Vec<u8> {
    (0..length.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(length).collect()
}

/// File sizes of a project's tree: most files are small, most bytes are in large ones.
fn tree(folder: &Path) -> Vec<PathBuf> {
    let mut random = Random(0x5eed);
    let words: Vec<String> = (0..5000)
        .map(|_| (0..2 + random.below(9)).map(|_| (b'a' + random.below(26) as u8) as char).collect())
        .collect();
    let mut paths = Vec::with_capacity(FILES);
    let mut left = BYTES;
    for n in 0..FILES {
        let size = match n % 100 {
            0 => 1_000_000 + random.below(3_000_000) as usize,
            1..10 => 50_000 + random.below(300_000) as usize,
            _ => 200 + random.below(15_000) as usize,
        };
        let size = if n + 1 == FILES { left } else { size.min(left) };
        left -= size;
        let path = folder.join(format!("{:02}/{n:05}", n % 50));
        paths.push(path.clone());
        if path.metadata().is_ok_and(|meta| meta.len() == size as u64) {
            continue;
        }
        // A third is incompressible, like pictures and archives.
        let content = if n % 3 == 0 { noise(&mut Random(n as u64 + 1), size) } else { text(&mut random, &words, size) };
        std::fs::create_dir_all(path.parent().expect("the path has a parent")).expect("made");
        std::fs::write(path, content).expect("written");
    }
    paths
}

fn bytes_below(folder: &Path) -> u64 {
    let entries = folder.read_dir().expect("there").map(|entry| entry.expect("there"));
    entries.map(|e| if e.path().is_dir() { bytes_below(&e.path()) } else { e.metadata().expect("there").len() }).sum()
}

fn store_tree(store: &Store, paths: &[PathBuf]) -> (Vec<Digest>, Duration) {
    let began = Instant::now();
    let batch = store.batch();
    let stored =
        batch.put_parallel::<_, anyhow::Error>(paths.len(), |n| Ok(Some(File::open(&paths[n])?))).expect("stored");
    batch.commit().expect("durable");
    let digests = stored.into_iter().map(|named| named.expect("every object was stored").0).collect();
    (digests, began.elapsed())
}

fn report(what: &str, took: Duration, bytes: u64) {
    let seconds = took.as_secs_f64();
    println!("{what:44} {:9.1} ms {:8.1} MB/s", seconds * 1e3, bytes as f64 / 1e6 / seconds);
}

fn files(folder: &Path, stores: &Path) {
    let paths = tree(folder);
    let bytes = bytes_below(folder);
    println!(
        "{} files, {bytes} bytes, {} processors",
        paths.len(),
        std::thread::available_parallelism().map_or(1, usize::from)
    );
    for round in 0..3 {
        let dir = stores.join(format!("files{round}"));
        let store = Store::open(&dir).expect("opened");
        let (digests, took) = store_tree(&store, &paths);
        report("first store of the tree", took, bytes);
        println!("{:44} {:9} bytes", "size of the store", bytes_below(&dir));
        let (_, took) = store_tree(&store, &paths);
        report("the same again: read, hash, find", took, bytes);
        let began = Instant::now();
        let read = |_: usize, reader: &mut Reader| -> anyhow::Result<()> {
            let mut room = Vec::with_capacity(reader.size() as usize);
            reader.read_to_end(&mut room)?;
            Ok(())
        };
        store.read_parallel(&digests, read).expect("whole");
        report("reading all of it", began.elapsed(), bytes);
        let began = Instant::now();
        let verified = store.verify(|_| ()).expect("readable");
        assert!(verified.damaged.is_empty());
        report("verify", began.elapsed(), bytes);
        std::fs::remove_dir_all(dir).expect("removed");
    }
}

fn many(stores: &Path) {
    let dir = stores.join("many");
    let store = Store::open(&dir).expect("opened");
    let began = Instant::now();
    let batch = store.batch();
    let mut some = Vec::new();
    for n in 0..OBJECTS {
        let digest = batch.put(format!("object {n}, small as they are").as_bytes()).expect("stored");
        if n.is_multiple_of(10) {
            some.push(digest);
        }
    }
    batch.commit().expect("durable");
    println!("storing {OBJECTS} small objects: {:.1} s", began.elapsed().as_secs_f64());
    drop(store);
    for _ in 0..3 {
        let began = Instant::now();
        let store = Store::open(&dir).expect("opened");
        let opened = began.elapsed();
        let began = Instant::now();
        assert!(some.iter().all(|digest| store.contains(*digest)));
        let found = began.elapsed() / some.len() as u32;
        let absent = Digest::from_bytes([7; 32]);
        assert!(!store.contains(absent));
        println!("opening it: {:.1} ms; one look: {:.1} µs", opened.as_secs_f64() * 1e3, found.as_secs_f64() * 1e6);
    }
    let store = Store::open(&dir).expect("opened");
    let began = Instant::now();
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    let report = store.gc(options, |digest| digest.as_bytes()[0] & 1 == 0, |_| ()).expect("collected");
    println!("collecting half of them: {:.1} s, {} dropped", began.elapsed().as_secs_f64(), report.dropped);
}

fn main() {
    let given = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let temporary = tempfile::tempdir_in(".").expect("a temporary directory");
    let folder = given.map_or_else(|| temporary.path().join("tree"), PathBuf::from);
    files(&folder, temporary.path());
    many(temporary.path());
}
