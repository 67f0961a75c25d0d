//! The measured files: text, code and incompressible data, the same in each run.

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// A directory of files: their number and approximate total size.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub name: &'static str,
    pub files: usize,
    /// The largest of a hundred has about so many times four megabytes; the others are smaller in the same way.
    scale: f64,
}

pub const TEN_THOUSAND: Size = Size { name: "10,000 files", files: 10_000, scale: 1.0 };
pub const HUNDRED_THOUSAND: Size = Size { name: "100,000 files", files: 100_000, scale: 0.1 };
pub const QUICK: Size = Size { name: "1,000 files", files: 1_000, scale: 1.0 };

/// Files of one directory, and subdirectories of one directory.
const FOLDER: usize = 50;

/// xorshift64*: the same numbers for the same seed.
#[derive(Debug, Clone)]
pub struct Seed(u64);

impl Seed {
    pub fn new(n: u64) -> Seed {
        // Neighbouring seeds must yield unrelated numbers.
        let mut seed = Seed((n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        seed.next();
        seed
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        ((self.next() >> 11) % bound.max(1) as u64) as usize
    }
}

/// Words, the first of which are common.
struct Words(Vec<String>);

impl Words {
    fn new() -> Words {
        let mut seed = Seed::new(0x5eed);
        let word = |seed: &mut Seed| -> String {
            let length = 2 + seed.below(9);
            (0..length).map(|_| char::from(b'a' + seed.below(26) as u8)).collect()
        };
        Words((0..5000).map(|_| word(&mut seed)).collect())
    }

    fn pick(&self, seed: &mut Seed) -> &str {
        let most = 1 + seed.below(self.0.len());
        &self.0[seed.below(most)]
    }
}

fn text(words: &Words, seed: &mut Seed, length: usize) -> Vec<u8> {
    let mut text = Vec::with_capacity(length + 64);
    while text.len() < length {
        text.extend_from_slice(words.pick(seed).as_bytes());
        text.push(if seed.below(12) == 0 { b'\n' } else { b' ' });
    }
    text.truncate(length);
    text
}

/// Functions that resemble each other, as in real code.
fn code(words: &Words, seed: &mut Seed, length: usize) -> Vec<u8> {
    let mut text = Vec::with_capacity(length + 256);
    while text.len() < length {
        let (name, argument) = (words.pick(seed).to_owned(), words.pick(seed).to_owned());
        let _ = writeln!(text, "def {name}_{}({argument}, options=None):", seed.below(100));
        for _ in 0..2 + seed.below(12) {
            let value = words.pick(seed);
            let _ = match seed.below(4) {
                0 => writeln!(text, "    if {argument} is None or {value} > {}:", seed.below(1000)),
                1 => writeln!(text, "        return self.{value}({argument}, options)"),
                2 => writeln!(text, "    {value} = {argument}.{}(\"{value}\")", words.pick(seed)),
                _ => writeln!(text, "    # {} {} {}", words.pick(seed), words.pick(seed), words.pick(seed)),
            };
        }
        text.push(b'\n');
    }
    text.truncate(length);
    text
}

fn noise(seed: &mut Seed, length: usize) -> Vec<u8> {
    (0..length.div_ceil(8)).flat_map(|_| seed.next().to_le_bytes()).take(length).collect()
}

/// Measurements: series of numbers with small steps.
fn numbers(seed: &mut Seed, length: usize) -> Vec<u8> {
    let mut value = 1_000_000.0f64;
    let mut next = || {
        value += seed.below(1000) as f64 - 499.5;
        (value as i32).to_le_bytes()
    };
    (0..length.div_ceil(4)).flat_map(|_| next()).take(length).collect()
}

/// Path of a numbered file, below the directory.
pub fn path(n: usize) -> PathBuf {
    PathBuf::from(format!("d{:03}/e{:02}/f{n:06}", n / (FOLDER * FOLDER), n / FOLDER % FOLDER))
}

fn content(size: Size, words: &Words, n: usize) -> Vec<u8> {
    let mut seed = Seed::new(n as u64);
    let length = match n % 100 {
        0 => 1_000_000 + seed.below(3_000_000),
        1..10 => 50_000 + seed.below(300_000),
        _ => 200 + seed.below(15_000),
    };
    let length = (length as f64 * size.scale) as usize + seed.below(200);
    match n % 10 {
        // A fifth is incompressible, like pictures, archives and models.
        0 if n.is_multiple_of(200) => noise(&mut seed, length),
        1 => noise(&mut seed, length),
        2 => numbers(&mut seed, length),
        3..6 => text(words, &mut seed, length),
        _ => code(words, &mut seed, length),
    }
}

/// Writes the files below a new directory; returns their total size, bytes.
pub fn make(folder: &Path, size: Size) -> std::io::Result<u64> {
    let (words, mut bytes) = (Words::new(), 0);
    for n in 0..size.files {
        let file = folder.join(path(n));
        if n % FOLDER == 0
            && let Some(parent) = file.parent()
        {
            std::fs::create_dir_all(parent)?;
        }
        let content = content(size, &words, n);
        bytes += content.len() as u64;
        std::fs::write(file, content)?;
    }
    nix::unistd::sync();
    Ok(bytes)
}

/// Numbers of the files that a round touches.
pub fn touched(size: Size, round: u64, count: usize) -> Vec<usize> {
    let mut seed = Seed::new(round ^ 0x70c4);
    (0..count).map(|_| seed.below(size.files)).collect()
}

/// Touches files as an editor does: one more line at the end.
pub fn touch(folder: &Path, size: Size, round: u64, count: usize) -> std::io::Result<()> {
    for n in touched(size, round, count) {
        let mut file = std::fs::File::options().append(true).open(folder.join(path(n)))?;
        writeln!(file, "one line more in round {round}")?;
    }
    Ok(())
}

/// Bytes on the device of everything below a directory.
pub fn on_disk(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let of = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => on_disk(&entry.path()),
        Ok(meta) => meta.blocks() * 512,
        Err(_) => 0,
    };
    entries.map(of).sum()
}
