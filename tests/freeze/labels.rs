//! Every labelled step of freezes, restores, exports and imports is where some test ends the daemon.

use std::collections::BTreeSet;
use std::path::Path;

use ryokan::sys::fault::LABELS;

use crate::faults::fault_points::ELSEWHERE;

/// What the labels of groups begin with, and those of what only groups use.
const OURS: [&str; 6] = ["catalog.freeze.", "catalog.group.", "database.files.", "freeze.", "repository.", "source."];

/// The labels that tests of this folder name in order to arm them: a literal `LABEL`, `LABEL.STEP=DEED` or `LABEL:N=DEED`.
fn armed(sources: &[String]) -> BTreeSet<&'static str> {
    let literals: Vec<&str> = sources.iter().flat_map(|source| source.split('"').skip(1)).collect();
    let names = |literal: &str, label: &str| {
        literal.strip_prefix(label).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ':', '=']))
    };
    let all = LABELS.iter().map(|label| label.name);
    all.filter(|label| literals.iter().any(|literal| names(literal, label))).collect()
}

fn sources() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/freeze");
    let files = std::fs::read_dir(folder).expect("the tests").map(|entry| entry.expect("an entry").path());
    let tests = files.filter(|path| path.extension().is_some_and(|ext| ext == "rs") && !path.ends_with("labels.rs"));
    tests.map(|path| std::fs::read_to_string(path).expect("readable")).collect()
}

fn unarmed(armed: &BTreeSet<&str>) -> Vec<&'static str> {
    let is_ours = |name: &str| {
        OURS.iter().any(|ours| name.starts_with(ours))
            || ELSEWHERE.iter().any(|(label, place)| *label == name && *place == "tests/freeze")
    };
    LABELS.iter().map(|label| label.name).filter(|name| is_ours(name) && !armed.contains(name)).collect()
}

#[test]
fn every_label_is_armed() {
    assert_eq!(unarmed(&armed(&sources())), [""; 0], "a test must end the daemon there");
}

/// A label that no test arms is found.
#[test]
fn unarmed_label_is_found() {
    let sources =
        [String::from(r#"armed(&mut shop, "freeze.member.store:2=kill"); points(&["freeze.member.switch"])"#)];
    let armed = armed(&sources);
    assert_eq!(armed.iter().copied().collect::<Vec<_>>(), ["freeze.member.store", "freeze.member.switch"]);
    assert!(unarmed(&armed).contains(&"freeze.member.snapshot"));
}
