//! Licences and sources of all dependencies, by the rules of `deny.toml`, also without cargo-deny.
//!
//! `deny.toml` is the only list. A package passes if its licence expression can be satisfied with
//! licences of the list, and if it comes from the registry of its lock file; no package comes from
//! a repository.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The strings of `allow = [ … ]` in the section `[licenses]` of `deny.toml`.
fn allowed() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("deny.toml")).expect("deny.toml is there");
    let part = text.split("[licenses]").nth(1).expect("deny.toml has a part [licenses]");
    let list = part.split_once("allow = [").and_then(|(_, rest)| rest.split_once(']')).expect("it has a list").0;
    let code = list.lines().map(|line| line.split('#').next().unwrap_or_default()).collect::<String>();
    code.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Whether a licence expression (SPDX, or the old form with `/`) can be satisfied: `OR` needs one
/// side, `AND` both.
fn can_be_met(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    any_of(&words, &mut at, allowed) && at == words.len()
}

fn any_of(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut met = all_of(words, at, allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        met |= all_of(words, at, allowed);
    }
    met
}

fn all_of(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut met = one(words, at, allowed);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        met &= one(words, at, allowed);
    }
    met
}

fn one(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let met = any_of(words, at, allowed);
        // Any word other than the bracket is left over, or fails.
        *at += usize::from(words.get(*at) == Some(&")"));
        return met;
    }
    if words.get(*at) == Some(&"WITH") {
        let exception = words.get(*at + 1).copied().unwrap_or_default();
        *at += 2;
        return allowed.contains(&format!("{word} WITH {exception}"));
    }
    allowed.contains(*word)
}

/// The fields of a package that matter here.
#[derive(serde::Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
}

#[derive(serde::Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

fn packages() -> Vec<Package> {
    let cargo = option_env!("CARGO").unwrap_or("cargo");
    let output = Command::new(cargo)
        .args(["metadata", "--offline", "--locked", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<Metadata>(&output.stdout).expect("cargo writes JSON").packages
}

#[test]
fn package_licences_and_sources() {
    let allowed = allowed();
    let packages = packages();
    let registry = packages
        .iter()
        .filter_map(|package| package.source.as_deref())
        .find(|source| source.starts_with("registry+"))
        .expect("some package comes from the registry");
    let mut wrong = Vec::new();
    for package in &packages {
        let what = format!("{} {}", package.name, package.version);
        match &package.license {
            Some(licence) if can_be_met(licence, &allowed) => {}
            Some(licence) => wrong.push(format!("{what}: {licence} cannot be met with the list in deny.toml")),
            None => wrong.push(format!("{what}: no licence expression")),
        }
        match &package.source {
            None if [env!("CARGO_PKG_NAME"), "ryokan-schema"].contains(&package.name.as_str()) => {}
            None => wrong.push(format!("{what}: from a folder")),
            Some(source) if source == registry => {}
            Some(source) => wrong.push(format!("{what}: from {source}")),
        }
    }
    assert!(packages.len() > 100, "only {} packages: is that all?", packages.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Unused licences must leave the list, which would otherwise allow unreviewed packages.
#[test]
fn allowed_licences_all_used() {
    let allowed = allowed();
    let packages = packages();
    for licence in &allowed {
        let mut without = allowed.clone();
        without.remove(licence);
        let needed =
            packages.iter().filter_map(|p| p.license.as_deref()).any(|expression| !can_be_met(expression, &without));
        assert!(needed, "deny.toml allows {licence}, which no package needs");
    }
}

#[test]
fn licence_expressions_parse() {
    let allowed: BTreeSet<String> = ["MIT", "X", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned).into();
    for (expression, met) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("GPL-3.0 / MIT", true),
        ("GPL-3.0 AND MIT", false),
        ("(GPL-3.0 OR MIT) AND X", true),
        ("(GPL-3.0 OR MIT) AND Y", false),
        ("Y OR X AND MIT", true),
        ("X AND MIT OR Y", true),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
        ("MIT WITH LLVM-exception", false),
        ("", false),
        ("MIT MIT", false),
        ("MIT OR", true),
    ] {
        assert_eq!(can_be_met(expression, &allowed), met, "{expression:?}");
    }
}
