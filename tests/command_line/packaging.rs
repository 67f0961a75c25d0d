//! What a package holds: man pages, completions, units, and every file that its description names.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{Host, User};

#[test]
fn package_files_are_complete() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let host = Host::prepare(User::Own);
    let made =
        Command::new(root.join("scripts/package")).arg("--files").arg(host.path("bin")).output().expect("it runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let made = root.join("target/package");
    let exec = fs::read_to_string(made.join("man/ryokan-exec.1")).expect("a page");
    assert!(exec.contains(".TH ryokan-exec 1") && exec.contains("\\-\\-timeout"), "{exec}");
    let pages: BTreeSet<String> = fs::read_dir(made.join("man"))
        .expect("pages")
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .collect();
    let helps = fs::read_dir(root.join("tests/cli/golden")).expect("goldens").flatten();
    let helps = helps.filter_map(|entry| entry.file_name().into_string().ok());
    let wanted: BTreeSet<String> =
        helps.filter_map(|name| Some(format!("{}.1", name.strip_prefix("help-")?.strip_suffix(".txt")?))).collect();
    assert_eq!(pages, wanted, "a page for each command");
    for kind in ["system", "user"] {
        let unit = fs::read_to_string(made.join("units").join(kind).join("ryokand.service")).expect("a unit");
        assert!(unit.contains("\nExecStart=/usr/bin/ryokand"), "{unit}");
        assert!(made.join("units").join(kind).join("ryokand.socket").exists());
    }
    let description = fs::read_to_string(root.join("Cargo.toml")).expect("read");
    let section = description.split("[package.metadata.deb]").nth(1).expect("a section");
    let assets = section.split_once("assets = [").and_then(|(_, rest)| rest.split_once("\n]")).expect("a list").0;
    let sources: Vec<&str> = assets.lines().filter_map(|line| line.split('"').nth(1)).collect();
    assert!(sources.len() > 10 && sources.contains(&"docs/examples/*"), "{assets}");
    for source in sources.into_iter().filter(|source| !source.starts_with("target/release/")) {
        let folder = source.rsplit_once('/').map_or("", |(folder, _)| folder);
        let is_there = match source.contains('*') {
            true => fs::read_dir(root.join(folder)).is_ok_and(|mut files| files.next().is_some()),
            false => root.join(source).exists(),
        };
        assert!(is_there, "{source}");
    }
}

#[test]
fn schema_is_printed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let schema = fs::read_to_string(root.join("schema/ryokan.capnp")).expect("read");
    assert_eq!(Host::prepare(User::Own).ok(&["schema"]), schema);
}
