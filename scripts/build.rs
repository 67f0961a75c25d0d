//! Hashes the sources and packs the engine drivers.
//!
//! Daemon and worker of one build recognise each other by the hash. Each driver in source text
//! becomes one JSON object.

use std::env;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Engine, and the extension of its driver's modules.
const DRIVERS: [(&str, &str); 2] = [("python", "py"), ("node", "js")];

fn main() -> io::Result<()> {
    let mut hasher = DefaultHasher::new();
    for root in ["Cargo.toml", "Cargo.lock", "schema", "scripts/build.rs", "src"] {
        println!("cargo::rerun-if-changed={root}");
        add(Path::new(root), &mut hasher)?;
    }
    println!("cargo::rustc-env=RYOKAN_SOURCES={:016x}", hasher.finish());
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or(io::ErrorKind::NotFound)?);
    DRIVERS.into_iter().try_for_each(|(engine, extension)| {
        let folder = format!("src/worker/engines/{engine}/driver");
        fs::write(out.join(format!("{engine}_driver.json")), pack(Path::new(&folder), extension)?)
    })
}

fn add(path: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    if !path.is_dir() {
        path.hash(hasher);
        fs::read(path)?.hash(hasher);
        return Ok(());
    }
    inside(path)?.iter().try_for_each(|path| add(path, hasher))
}

fn inside(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut inside = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    inside.sort();
    Ok(inside)
}

/// `{"module": "source", …}` of every module except `bootstrap` and `compile`, which process them.
fn pack(folder: &Path, extension: &str) -> io::Result<String> {
    let mut modules = Vec::new();
    for path in inside(folder)? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_some_and(|found| found == extension) && name != "bootstrap" && name != "compile" {
            modules.push(format!("{}:{}", quoted(&name), quoted(&fs::read_to_string(&path)?)));
        }
    }
    Ok(format!("{{{}}}", modules.join(",")))
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => quoted.push_str(&format!("\\u{:04x}", c as u32)),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
