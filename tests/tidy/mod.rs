//! The rules that no compiler checks: who may depend on whom, where `unsafe`, SQL and Cap'n Proto may be, how long a file
//! may be, and that documents name tests which exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(below: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(below)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().display().to_string()
}

fn is_generated(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().ends_with("_capnp.rs"))
}

/// Code without comments and doc comments; strings stay.
fn code_of(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| match line.find("//") {
            Some(at) if !line[..at].contains('"') => &line[..at],
            _ => line,
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// Which top-level modules each may use. `core` uses nothing of ours; binaries' modules may use what is below them.
const LAYERS: &[(&str, &[&str])] = &[
    ("core", &["core"]),
    ("sys", &["sys", "core"]),
    ("session.rs", &["core"]),
    ("catalog", &["catalog", "sys", "core"]),
    ("store", &["store", "sys", "core"]),
    ("workspace", &["workspace", "store", "sys", "core"]),
    ("bundle", &["bundle", "workspace", "store", "sys", "core"]),
    ("sandbox", &["sandbox", "sys", "core"]),
    ("mcp", &["mcp", "core", "sys"]),
    ("config", &["config", "mcp", "sandbox", "core"]),
    ("rpc", &["rpc", "supervisor", "session", "store", "worker", "sys", "core"]),
    ("worker", &["worker", "rpc", "session", "catalog", "sandbox", "sys", "core"]),
    (
        "supervisor",
        &[
            "supervisor",
            "session",
            "rpc",
            "worker",
            "bundle",
            "catalog",
            "store",
            "workspace",
            "sandbox",
            "config",
            "mcp",
            "sys",
            "core",
        ],
    ),
    (
        "daemon",
        &[
            "daemon",
            "supervisor",
            "rpc",
            "worker",
            "catalog",
            "store",
            "workspace",
            "config",
            "sandbox",
            "mcp",
            "sys",
            "core",
        ],
    ),
    ("cli", &["cli", "rpc", "session", "sys", "core", "daemon"]),
];

#[test]
fn layers_point_downwards() {
    let mut wrong = Vec::new();
    for path in files("src", "rs") {
        let name = relative(&path);
        let module = name.trim_start_matches("src/").split('/').next().unwrap().to_owned();
        if module == "lib.rs" || is_generated(&path) {
            continue;
        }
        let Some((_, allowed)) = LAYERS.iter().find(|(layer, _)| *layer == module) else {
            wrong.push(format!("{name}: module {module:?} has no line in LAYERS"));
            continue;
        };
        for (_, rest) in
            code_of(&path).match_indices("crate::").map(|(at, _)| ((), code_of(&path)[at + 7..].to_owned()))
        {
            let used: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if !used.is_empty() && !allowed.contains(&used.as_str()) {
                wrong.push(format!("{name} uses {used}"));
            }
        }
    }
    wrong.dedup();
    assert!(wrong.is_empty(), "against the layers:\n{}", wrong.join("\n"));
}

#[test]
fn restricted_apis_stay_in_modules() {
    let rules: &[(&[&str], &[&str], &str)] = &[
        (&["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"], &["src/sys/"], "unsafe code"),
        (&["capnp::", "capnp_rpc::", "_capnp::"], &["src/rpc/"], "Cap'n Proto"),
        (&["rusqlite::"], &["src/catalog/", "src/sys/sqlite_vfs.rs"], "SQLite"),
        (&["\"SELECT ", "\"INSERT ", "\"UPDATE ", "\"DELETE FROM", "\"CREATE TABLE"], &["src/catalog/"], "SQL"),
        (&["kaish_kernel::"], &["src/worker/"], "kaish"),
        (&["anyhow::"], &["src/daemon/", "src/cli/", "src/worker/"], "anyhow"),
    ];
    let mut wrong = Vec::new();
    for path in files("src", "rs").into_iter().filter(|path| !is_generated(path)) {
        let name = relative(&path);
        let code = code_of(&path);
        for (words, places, what) in rules {
            let found = words.iter().any(|word| code.contains(word));
            if found && !places.iter().any(|place| name.starts_with(place)) {
                wrong.push(format!("{name}: {what}"));
            }
        }
    }
    assert!(wrong.is_empty(), "out of place:\n{}", wrong.join("\n"));
}

/// Clock, randomness and I/O would make `core` differ from run to run (invariant 2).
#[test]
fn core_is_pure() {
    let forbidden = [
        "std::fs",
        "std::net",
        "std::process",
        "std::thread",
        "std::env",
        "SystemTime",
        "Instant::",
        "tokio",
        "async fn",
        "getrandom",
    ];
    for path in files("src/core", "rs") {
        let code = code_of(&path);
        for word in forbidden {
            assert!(!code.contains(word), "{} uses {word}", relative(&path));
        }
    }
}

#[test]
fn files_stay_small() {
    let long: Vec<String> = ["src", "tests"]
        .iter()
        .flat_map(|folder| files(folder, "rs"))
        .filter(|path| !is_generated(path))
        .filter_map(|path| {
            let lines = fs::read_to_string(&path).unwrap().lines().count();
            (lines > 600).then(|| format!("{} has {lines} lines", relative(&path)))
        })
        .collect();
    assert!(long.is_empty(), "{}", long.join("\n"));
}

#[test]
fn every_test_folder_runs() {
    let runner = fs::read_to_string(root().join("tests/runner.rs")).unwrap();
    let listed: BTreeSet<&str> =
        runner.lines().filter_map(|line| line.trim().strip_prefix("mod ")?.strip_suffix(';')).collect();
    for entry in fs::read_dir(root().join("tests")).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        if entry.path().join("mod.rs").exists() {
            assert!(listed.contains(name.as_str()), "tests/{name} is not listed in tests/runner.rs");
        }
    }
}

#[test]
fn documented_tests_exist() {
    let mut names = BTreeSet::new();
    for path in ["src", "tests"].iter().flat_map(|folder| files(folder, "rs")) {
        let text = fs::read_to_string(&path).unwrap();
        for (at, _) in text.match_indices("fn ") {
            let name: String = text[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            names.insert(name);
        }
    }
    let text = fs::read_to_string(root().join("docs/ARCHITECTURE.md")).unwrap();
    let invariants = text.split("## Invariants").nth(1).expect("docs/ARCHITECTURE.md has a part on invariants");
    let mut named = 0;
    for word in invariants.split('`').skip(1).step_by(2).filter(|word| word.starts_with("test:")) {
        let name = word.trim_start_matches("test:");
        assert!(names.contains(name), "docs/ARCHITECTURE.md names the test {name}, which does not exist");
        named += 1;
    }
    assert!(named >= 8, "only {named} invariants name a test");
}

#[test]
fn no_unfinished_code() {
    for path in ["src", "tests"].iter().flat_map(|folder| files(folder, "rs")).filter(|path| !is_generated(path)) {
        if path.ends_with("tidy/mod.rs") {
            continue;
        }
        let code = code_of(&path);
        for word in ["todo!(", "unimplemented!(", "#[ignore]"] {
            assert!(!code.contains(word), "{} holds {word}", relative(&path));
        }
    }
}
