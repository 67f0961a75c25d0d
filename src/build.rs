//! Hashes the sources: daemon and worker of one build know each other by it, and those of two builds do not.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::{fs, io};

fn main() -> io::Result<()> {
    let mut hasher = DefaultHasher::new();
    for root in ["Cargo.toml", "Cargo.lock", "schema", "src"] {
        println!("cargo::rerun-if-changed={root}");
        add(Path::new(root), &mut hasher)?;
    }
    println!("cargo::rustc-env=RYOKAN_SOURCES={:016x}", hasher.finish());
    Ok(())
}

fn add(path: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    if !path.is_dir() {
        path.hash(hasher);
        fs::read(path)?.hash(hasher);
        return Ok(());
    }
    let mut inside = fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    inside.sort();
    inside.iter().try_for_each(|path| add(path, hasher))
}
