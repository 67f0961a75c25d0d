//! Rules of the repository that the compiler does not check.
//!
//! Dependencies between modules; the places of `unsafe`, SQL and Cap'n Proto; lengths of files, lines of documents and
//! names of tests; plain file names; and that documents name existing tests.

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

/// Allowed imports between top-level modules, the lowest first. No module uses a later one.
const LAYERS: &[(&str, &[&str])] = &[
    ("core", &["core"]),
    ("session.rs", &["core"]),
    ("sys", &["sys", "core"]),
    ("store", &["store", "sys", "core"]),
    ("catalog", &["catalog", "sys", "core"]),
    ("workspace", &["workspace", "store", "sys", "core"]),
    ("bundle", &["bundle", "workspace", "store", "sys", "core"]),
    ("sandbox", &["sandbox", "sys", "core"]),
    ("mcp", &["mcp", "sys", "core"]),
    ("config", &["config", "mcp", "sandbox", "core"]),
    ("link", &["link", "sys", "core"]),
    ("worker", &["worker", "link", "session", "catalog", "sandbox", "sys", "core"]),
    ("isolation", &["isolation", "worker", "link", "catalog", "sandbox", "workspace", "sys", "core"]),
    (
        "supervisor",
        &[
            "supervisor",
            "isolation",
            "session",
            "link",
            "bundle",
            "catalog",
            "store",
            "workspace",
            "config",
            "mcp",
            "sys",
            "core",
        ],
    ),
    ("rpc", &["rpc", "supervisor", "link", "session", "store", "sys", "core"]),
    (
        "daemon",
        &[
            "daemon",
            "rpc",
            "supervisor",
            "isolation",
            "catalog",
            "store",
            "workspace",
            "config",
            "sandbox",
            "link",
            "mcp",
            "sys",
            "core",
        ],
    ),
    ("cli", &["cli", "daemon", "rpc", "session", "sys", "core"]),
];

#[test]
fn layers_have_no_exception() {
    let rank = |layer: &str| LAYERS.iter().position(|(name, _)| name.trim_end_matches(".rs") == layer);
    for (at, (layer, allowed)) in LAYERS.iter().enumerate() {
        for used in *allowed {
            assert!(rank(used).is_some_and(|used| used <= at), "{layer} may not use {used}, which comes later");
        }
    }
}

/// The rooms of `supervisor/`, the lowest first: imports lead downwards, so there is no circle between rooms.
const ROOMS: &[&str] = &["host", "workers", "kernel", "checkpoint", "registry", "maintenance"];

#[test]
fn rooms_have_no_circle() {
    let mut wrong = Vec::new();
    for path in files("src/supervisor", "rs") {
        let name = relative(&path);
        let within = name.trim_start_matches("src/supervisor/");
        let Some((room, _)) = within.split_once('/') else { continue };
        let own = ROOMS.iter().position(|known| *known == room);
        let own = own.unwrap_or_else(|| panic!("{name}: room {room:?} has no place in ROOMS"));
        let code = code_of(&path);
        for (at, _) in code.match_indices("crate::supervisor::") {
            let used: String = code[at + "crate::supervisor::".len()..]
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            match ROOMS.iter().position(|known| *known == used) {
                Some(used) if used <= own => {}
                _ => wrong.push(format!("{name} uses {used:?}")),
            }
        }
        assert!(!code.contains("super::super::super::"), "{name}: a path out of its room starts with crate::");
    }
    assert!(wrong.is_empty(), "against the order of the rooms:\n{}", wrong.join("\n"));
}

/// Only the isolation knows how a worker runs; the supervisor and the interface are independent of
/// it.
#[test]
fn only_isolation_knows_processes() {
    let words = ["std::process", "tokio::process", "/proc", "sandbox::", "pidfd", "start_ticks", "Pid::", "cgroup"];
    let mut wrong = Vec::new();
    for path in ["src/supervisor", "src/rpc"].iter().flat_map(|folder| files(folder, "rs")) {
        // Not about workers: the client's access to a socket with a long path.
        if is_generated(&path) || path.ends_with("rpc/client/connection.rs") {
            continue;
        }
        let code = code_of(&path);
        wrong.extend(
            words.iter().filter(|word| code.contains(**word)).map(|word| format!("{}: {word}", relative(&path))),
        );
    }
    assert!(wrong.is_empty(), "knows processes:\n{}", wrong.join("\n"));
}

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
        (&["capnp::", "capnp_rpc::", "_capnp::"], &["src/rpc/", "src/link/"], "Cap'n Proto"),
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
    let invariants = fs::read_to_string(root().join("docs/invariants.md")).unwrap();
    let mut named = 0;
    for word in invariants.split('`').skip(1).step_by(2).filter(|word| word.starts_with("test:")) {
        let name = word.trim_start_matches("test:");
        assert!(names.contains(name), "docs/invariants.md names the test {name}, which does not exist");
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

/// Longest line of a document outside tables and code blocks, characters.
const DOCUMENT_COLUMNS: usize = 100;

#[test]
fn documents_wrap() {
    let top = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "systemd/README.md"];
    let mut long = Vec::new();
    for path in top.iter().map(|name| root().join(name)).chain(files("docs", "md")) {
        let mut in_code = false;
        for (at, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
            let start = line.trim_start();
            if start.starts_with("```") {
                in_code = !in_code;
            } else if !in_code && !start.starts_with('|') && line.chars().count() > DOCUMENT_COLUMNS {
                long.push(format!("{}:{}", relative(&path), at + 1));
            }
        }
        assert!(!in_code, "{}: a code block does not end", relative(&path));
    }
    assert!(long.is_empty(), "longer than {DOCUMENT_COLUMNS} columns:\n{}", long.join("\n"));
}

/// Most words of a test's name.
const TEST_NAME_WORDS: usize = 6;

/// Words of a test's name, without its prefix and the account under which it runs.
fn words_of_test(name: &str) -> usize {
    let name = name.strip_prefix("test_").unwrap_or(name);
    name.strip_suffix("_as_user").unwrap_or(name).split('_').count()
}

/// The names of the tests in a file of Rust or Python.
fn tests_in(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    let mut found = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim_start) {
        let definition = if is_rust { "fn " } else { "def " };
        let defined = line.strip_prefix("async ").unwrap_or(line).strip_prefix(definition);
        match defined {
            Some(rest) => {
                let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if is_test || !is_rust && name.starts_with("test_") {
                    found.push(name);
                }
                is_test = false;
            }
            None => is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test"),
        }
    }
    found
}

#[test]
fn test_names_are_short() {
    let folders = ["src", "tests", "benches", "fuzz/inputs"];
    let all = folders.iter().flat_map(|folder| files(folder, "rs").into_iter().chain(files(folder, "py")));
    let mut found = 0;
    let mut long = Vec::new();
    for path in all.filter(|path| !is_generated(path)) {
        for name in tests_in(&path) {
            found += 1;
            if words_of_test(&name) > TEST_NAME_WORDS {
                long.push(format!("{}: {name}", relative(&path)));
            }
        }
    }
    assert!(found > 500, "only {found} tests were found");
    assert!(long.is_empty(), "names of more than {TEST_NAME_WORDS} words:\n{}", long.join("\n"));
}

/// File names of the past that have a proper name in the field.
const VAGUE_NAMES: &[&str] = &[
    "bank",
    "begin",
    "copies",
    "each",
    "ends",
    "given",
    "going_back",
    "held",
    "how",
    "keep",
    "keeping",
    "lane",
    "mistakes",
    "noted",
    "one",
    "place",
    "press",
    "privacy",
    "promise",
    "promises",
    "rest",
    "sibling",
    "small_world",
    "spares",
    "still",
    "stir",
    "sweep",
    "telling",
    "thinning",
    "touched",
    "turn",
    "turns",
];

#[test]
fn file_names_are_plain() {
    let extensions = ["rs", "py", "js", "bash"];
    let folders = ["src", "tests", "benches", "fuzz"];
    let all = folders.iter().flat_map(|folder| extensions.iter().flat_map(|extension| files(folder, extension)));
    let vague: Vec<String> = all
        .filter(|path| path.file_stem().is_some_and(|stem| VAGUE_NAMES.contains(&stem.to_string_lossy().as_ref())))
        .map(|path| relative(&path))
        .collect();
    assert!(vague.is_empty(), "name them after their content:\n{}", vague.join("\n"));
}
