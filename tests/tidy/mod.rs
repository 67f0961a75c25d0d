//! Rules of the repository that the compiler does not check.
//!
//! Here: lengths of files, lines of documents and names of tests; plain file names; links of documents; and that
//! documents and `scripts/check` name existing tests. `imports`: dependencies between modules, and the places of
//! `unsafe`, SQL and Cap'n Proto.

mod imports;
mod source;

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

/// All tests, including those of the drivers' Python parts.
fn all_tests() -> BTreeSet<String> {
    let folders = ["src", "tests", "clients/python/tests"];
    let files = folders.iter().flat_map(|folder| files(folder, "rs").into_iter().chain(files(folder, "py")));
    files.flat_map(|path| tests_in(&path)).collect()
}

/// Documents that list tests, with the number of tests that they name at least.
const DOCUMENTS_OF_TESTS: &[(&str, usize)] = &[("docs/invariants.md", 40), ("docs/threat-model.md", 14)];

#[test]
fn documented_tests_exist() {
    let tests = all_tests();
    for (document, least) in DOCUMENTS_OF_TESTS {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let named: Vec<&str> =
            text.split('`').skip(1).step_by(2).filter_map(|word| word.strip_prefix("test:")).collect();
        let missing: Vec<&&str> = named.iter().filter(|name| !tests.contains(**name)).collect();
        assert!(missing.is_empty(), "{document} names tests that do not exist: {missing:?}");
        assert!(named.len() >= *least, "{document} names only {} tests", named.len());
    }
}

/// A filter that matches nothing passes; so each name in `scripts/check` must exist.
#[test]
fn checked_tests_exist() {
    let script = fs::read_to_string(root().join("scripts/check")).unwrap();
    let runner = fs::read_to_string(root().join("tests/runner.rs")).unwrap();
    let mut named = Vec::new();
    for word in script.split_whitespace().map(|word| word.trim_matches(['(', ')', '"'])).filter(|w| w.contains("::")) {
        let parts: Vec<&str> = word.split("::").collect();
        match parts.as_slice() {
            [module, ""] => assert!(runner.contains(&format!("mod {module};")), "scripts/check: no module {word}"),
            [modules @ .., test] => {
                let path = root().join("src").join(modules.join("/")).with_extension("rs");
                let exists = path.exists() && tests_in(&path).iter().any(|name| name == test);
                assert!(exists, "scripts/check: no test {word} in {}", relative(&path));
                named.push(*test);
            }
            [] => {}
        }
    }
    let mut marked = 0;
    for path in ["src", "tests"].iter().flat_map(|folder| files(folder, "rs")).filter(|path| !is_tidy(path)) {
        let text = fs::read_to_string(&path).unwrap();
        for (_, after) in text.split("#[ignore").skip(1).filter_map(|rest| rest.split_once("scripts/check runs it")) {
            let name = after.split_once("fn ").and_then(|(_, rest)| rest.split_once('(')).map_or("", |(name, _)| name);
            assert!(named.contains(&name), "{}: scripts/check does not run {name}", relative(&path));
            marked += 1;
        }
    }
    assert_eq!((marked, named.len()), (5, 5), "ignored tests, and those that scripts/check runs");
}

fn is_tidy(path: &Path) -> bool {
    relative(path).starts_with("tests/tidy/")
}

#[test]
fn no_unfinished_code() {
    for path in ["src", "tests"].iter().flat_map(|folder| files(folder, "rs")).filter(|path| !is_generated(path)) {
        if is_tidy(&path) {
            continue;
        }
        let (code, _) = source::scan(&fs::read_to_string(&path).unwrap());
        for word in ["todo!(", "unimplemented!(", "#[ignore]"] {
            assert!(!code.contains(word), "{} holds {word}", relative(&path));
        }
    }
}

/// All documents.
fn documents() -> Vec<PathBuf> {
    let top = [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "systemd/README.md",
        "clients/python/README.md",
    ];
    top.iter().map(|name| root().join(name)).chain(files("docs", "md")).collect()
}

/// Links to files in a document: inline ones, and the definitions of labels such as `[ADR 0013]`.
fn links_of(text: &str) -> Vec<&str> {
    let inline = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    let defined = definitions_of(text).into_iter().map(|(_, target)| target);
    let files = inline.chain(defined).filter_map(|target| target.split('#').next());
    files.filter(|target| !target.is_empty() && !target.contains("://")).collect()
}

/// Labels and targets of the lines `[label]: target`.
fn definitions_of(text: &str) -> Vec<(&str, &str)> {
    text.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: ")).collect()
}

#[test]
fn document_links_resolve() {
    let mut found = 0;
    let mut wrong = Vec::new();
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        for target in links_of(&text) {
            found += 1;
            if !path.parent().unwrap().join(target).exists() {
                wrong.push(format!("{}: no file {target}", relative(&path)));
            }
        }
        let definitions = definitions_of(&text);
        for (label, after) in text.split("[ADR ").skip(1).filter_map(|rest| rest.split_once(']')) {
            let label = format!("ADR {label}");
            if !after.starts_with(['(', ':']) && !definitions.iter().any(|(defined, _)| *defined == label) {
                wrong.push(format!("{}: [{label}] has no definition", relative(&path)));
            }
        }
        for (label, _) in definitions {
            if text.matches(&format!("[{label}]")).count() < 2 {
                wrong.push(format!("{}: [{label}] is defined but not used", relative(&path)));
            }
        }
    }
    assert!(found > 50, "only {found} links were found");
    assert!(wrong.is_empty(), "links:\n{}", wrong.join("\n"));
}

/// Longest line of a document outside tables and code blocks, characters.
const DOCUMENT_COLUMNS: usize = 100;

#[test]
fn documents_wrap() {
    let mut long = Vec::new();
    for path in documents() {
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
    let folders = ["src", "tests", "benches", "fuzz/inputs", "clients/python/tests"];
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
    let folders = ["src", "tests", "benches", "fuzz", "clients"];
    let all = folders.iter().flat_map(|folder| extensions.iter().flat_map(|extension| files(folder, extension)));
    let vague: Vec<String> = all
        .filter(|path| path.file_stem().is_some_and(|stem| VAGUE_NAMES.contains(&stem.to_string_lossy().as_ref())))
        .map(|path| relative(&path))
        .collect();
    assert!(vague.is_empty(), "name them after their content:\n{}", vague.join("\n"));
}
