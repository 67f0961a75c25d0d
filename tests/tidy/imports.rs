//! Dependencies between modules, and the places of the restricted interfaces.

use super::source::{Source, Token, crate_sources, module_of, modules_elsewhere, scan};

/// Allowed imports between top-level modules, the lowest first. No module uses a later one.
const LAYERS: &[(&str, &[&str])] = &[
    ("core", &["core"]),
    ("session", &["core"]),
    ("sys", &["sys", "core"]),
    ("store", &["store", "sys", "core"]),
    ("programs", &["programs", "sys", "core"]),
    ("git", &["git", "programs", "sys", "core"]),
    ("catalog", &["catalog", "sys", "core"]),
    ("workspace", &["workspace", "store", "sys", "core"]),
    ("bundle", &["bundle", "workspace", "store", "sys", "core"]),
    ("teleport", &["teleport", "bundle", "store", "sys", "core"]),
    ("sandbox", &["sandbox", "sys", "core"]),
    ("mcp", &["mcp", "sys", "core"]),
    ("config", &["config", "mcp", "sandbox", "core"]),
    ("link", &["link", "sys", "core"]),
    ("worker", &["worker", "link", "session", "catalog", "sandbox", "workspace", "sys", "core"]),
    ("isolation", &["isolation", "worker", "link", "catalog", "sandbox", "workspace", "sys", "core"]),
    (
        "supervisor",
        &[
            "supervisor",
            "isolation",
            "session",
            "link",
            "teleport",
            "bundle",
            "catalog",
            "store",
            "git",
            "programs",
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

/// The rooms of `supervisor/`, the lowest first: imports lead downwards, so there is no circle between rooms.
const ROOMS: &[&str] = &["host", "workers", "kernel", "checkpoint", "registry", "freeze", "maintenance"];

/// What would make `core` differ from run to run (invariant 2): modules, and words.
const IMPURE_MODULES: &[&str] = &[
    "std::env",
    "std::fs",
    "std::io",
    "std::net",
    "std::os",
    "std::process",
    "std::thread",
    "std::time::SystemTime",
    "libc",
    "nix",
    "rustix",
    "tokio",
];
const IMPURE_WORDS: &[&str] = &["SystemTime", "Instant::", "Instant as", "async fn", "getrandom"];

/// What only the isolation uses: modules, parts of paths, and words.
const PROCESS_MODULES: &[&str] = &["std::process", "std::os::unix::process", "tokio::process", "crate::sandbox"];
const PROCESS_PARTS: &[&str] = &["Pid", "sandbox"];
const PROCESS_WORDS: &[&str] = &["/proc", "pidfd", "start_ticks", "cgroup"];

fn layer_violations(source: &Source) -> Vec<String> {
    let Some(layer) = source.module.first() else { return Vec::new() };
    let Some((_, allowed)) = LAYERS.iter().find(|(name, _)| name == layer) else {
        return vec![format!("{}: module {layer:?} has no line in LAYERS", source.name)];
    };
    let crossing = source.paths.iter().filter(|found| match found.path.as_slice() {
        [first, used, ..] if first == "crate" => !allowed.contains(&used.as_str()),
        // All of the crate in one name.
        [only] => only == "crate",
        _ => false,
    });
    crossing.map(|found| format!("{} uses {}", source.name, found.text())).collect()
}

fn room_violations(source: &Source) -> Vec<String> {
    let [top, room, ..] = source.module.as_slice() else { return Vec::new() };
    if top != "supervisor" {
        return Vec::new();
    }
    let rank = |room: &str| ROOMS.iter().position(|known| *known == room);
    let Some(own) = rank(room) else {
        return vec![format!("{}: room {room:?} has no place in ROOMS", source.name)];
    };
    let crossing = source.paths.iter().filter(|found| match found.path.as_slice() {
        [first, second, rest @ ..] if first == "crate" && second == "supervisor" => {
            // Without a room: all rooms in one name, or an item above them.
            rest.first().and_then(|used| rank(used)).is_none_or(|used| used > own)
        }
        _ => false,
    });
    crossing.map(|found| format!("{} uses {}", source.name, found.text())).collect()
}

fn impurities(source: &Source) -> Vec<String> {
    if source.module.first().is_none_or(|layer| layer != "core") {
        return Vec::new();
    }
    let modules = source.paths.iter().filter(|found| IMPURE_MODULES.iter().any(|module| found.reaches(module)));
    let modules = modules.map(|found| found.text());
    let words = IMPURE_WORDS.iter().filter(|word| source.code.contains(**word)).map(|word| (*word).to_owned());
    modules.chain(words).map(|what| format!("{} uses {what}", source.name)).collect()
}

fn process_knowledge(source: &Source) -> Vec<String> {
    // Not about workers: the client's access to a socket with a long path.
    let is_exempt = source.name.ends_with("rpc/client/connection.rs");
    if is_exempt || source.module.first().is_none_or(|layer| layer != "supervisor" && layer != "rpc") {
        return Vec::new();
    }
    let paths = source.paths.iter().filter(|found| {
        let has_part = || found.path.iter().any(|part| PROCESS_PARTS.contains(&part.as_str()));
        PROCESS_MODULES.iter().any(|module| found.reaches(module)) || has_part()
    });
    let paths = paths.map(|found| found.text());
    let words = PROCESS_WORDS.iter().filter(|word| source.code.contains(**word)).map(|word| (*word).to_owned());
    paths.chain(words).map(|what| format!("{} uses {what}", source.name)).collect()
}

/// A restricted interface: crates (`_capnp` stands for all generated modules), words, and the places that may use it.
struct Restricted {
    what: &'static str,
    crates: &'static [&'static str],
    words: &'static [&'static str],
    places: &'static [&'static str],
}

const RESTRICTED: &[Restricted] = &[
    Restricted {
        what: "Cap'n Proto",
        crates: &["capnp", "capnp_rpc", "_capnp"],
        words: &[],
        places: &["src/rpc/", "src/link/"],
    },
    Restricted {
        what: "SQLite",
        crates: &["rusqlite"],
        words: &[],
        places: &["src/catalog/", "src/sys/sqlite_vfs.rs"],
    },
    Restricted {
        what: "SQL",
        crates: &[],
        words: &["\"SELECT ", "\"INSERT ", "\"UPDATE ", "\"DELETE FROM", "\"CREATE TABLE"],
        // The others speak to the users' PostgreSQL servers, never to a database of ryokan.
        places: &["src/catalog/", "src/supervisor/freeze/sources/postgres"],
    },
    Restricted { what: "kaish", crates: &["kaish_kernel"], words: &[], places: &["src/worker/"] },
    Restricted { what: "anyhow", crates: &["anyhow"], words: &[], places: &["src/daemon/", "src/cli/", "src/worker/"] },
];

fn misplaced(source: &Source) -> Vec<String> {
    let uses_crate = |wanted: &&str| {
        source.paths.iter().any(|found| match *wanted {
            "_capnp" => found.path.iter().any(|part| part.ends_with("_capnp")),
            wanted => found.path.first().is_some_and(|first| first == wanted),
        })
    };
    let is_misplaced = |rule: &&Restricted| {
        let is_used = rule.crates.iter().any(uses_crate) || rule.words.iter().any(|word| source.code.contains(word));
        is_used && !rule.places.iter().any(|place| source.name.starts_with(place))
    };
    let mut wrong: Vec<String> =
        RESTRICTED.iter().filter(is_misplaced).map(|rule| format!("{}: {}", source.name, rule.what)).collect();
    if source.tokens.contains(&Token::Word("unsafe".to_owned())) && !source.name.starts_with("src/sys/") {
        wrong.push(format!("{}: unsafe code", source.name));
    }
    wrong
}

fn assert_none(what: &str, rule: impl Fn(&Source) -> Vec<String>) {
    let sources = crate_sources();
    assert!(sources.len() > 300, "only {} files were found", sources.len());
    let wrong: Vec<String> = sources.iter().flat_map(rule).collect();
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
}

#[test]
fn layers_have_no_exception() {
    let rank = |layer: &str| LAYERS.iter().position(|(name, _)| *name == layer);
    for (at, (layer, allowed)) in LAYERS.iter().enumerate() {
        for used in *allowed {
            assert!(rank(used).is_some_and(|used| used <= at), "{layer} may not use {used}, which comes later");
        }
    }
}

#[test]
fn layers_point_downwards() {
    assert_none("against the layers", layer_violations);
}

#[test]
fn rooms_have_no_circle() {
    assert_none("against the order of the rooms", room_violations);
}

/// Only the isolation knows how a worker runs; the supervisor and the interface are independent of it.
#[test]
fn only_isolation_knows_processes() {
    assert_none("knows processes", process_knowledge);
}

#[test]
fn core_is_pure() {
    assert_none("not pure", impurities);
}

#[test]
fn restricted_apis_stay_in_modules() {
    assert_none("out of place", misplaced);
}

type Rule = fn(&Source) -> Vec<String>;

/// Snippets that a rule must refuse: rule, file, code.
const REFUSED: &[(Rule, &str, &str)] = &[
    (layer_violations, "src/link/mod.rs", "use crate::supervisor::Supervisor;"),
    (layer_violations, "src/link/mod.rs", "use crate::{supervisor::Supervisor};"),
    (layer_violations, "src/link/mod.rs", "use crate::{core::limits, supervisor::{self, host}};"),
    (layer_violations, "src/link/mod.rs", "use crate::{\n    // first\n    core,\n    rpc as r,\n};"),
    (layer_violations, "src/link/mod.rs", "use super::supervisor;"),
    (layer_violations, "src/link/mod.rs", "use {std::fmt, super::{core, rpc::client}};"),
    (layer_violations, "src/link/mod.rs", "use super::*;"),
    (layer_violations, "src/link/mod.rs", "use super as root;"),
    (layer_violations, "src/link/mod.rs", "use crate as root;"),
    (layer_violations, "src/link/mod.rs", "use crate::{self as root};"),
    (layer_violations, "src/link/mod.rs", "use crate::*;"),
    (layer_violations, "src/link/mod.rs", "extern crate self as root;"),
    (layer_violations, "src/link/mod.rs", "use ryokan::rpc::client;"),
    (layer_violations, "src/link/mod.rs", "mod a { mod b { use super::super::super::rpc; } }"),
    (layer_violations, "src/link/mod.rs", "pub(crate) struct A(pub(super) crate::rpc::B);"),
    (layer_violations, "src/link/mod.rs", "pub struct A(pub (crate::rpc::B, u8));"),
    (layer_violations, "src/link/host/x.rs", "fn f() { let s = \"// {\"; super::super::super::rpc::f(s) }"),
    (layer_violations, "src/session.rs", "use super::store;"),
    (layer_violations, "src/session.rs", "macro_rules! m { ($a:ident) => { $crate::rpc::$a() } }"),
    (layer_violations, "src/novelty/mod.rs", ""),
    (room_violations, "src/supervisor/host/x.rs", "use crate::supervisor::kernel;"),
    (room_violations, "src/supervisor/host/x.rs", "use crate::supervisor::{kernel::Kernel};"),
    (room_violations, "src/supervisor/host/x.rs", "use crate::{supervisor::{host, registry}};"),
    (room_violations, "src/supervisor/host/x.rs", "use super::super::kernel;"),
    (room_violations, "src/supervisor/host/x.rs", "use super::{super::kernel};"),
    (room_violations, "src/supervisor/host/x.rs", "use super::super as rooms;"),
    (room_violations, "src/supervisor/host/x.rs", "use crate::supervisor;"),
    (room_violations, "src/supervisor/host/x.rs", "use crate::supervisor::*;"),
    (room_violations, "src/supervisor/host/x.rs", "mod tests { use super::super::super::kernel; }"),
    (room_violations, "src/supervisor/host/x.rs", "fn f() { super::super::kernel::f() }"),
    (room_violations, "src/supervisor/host/mod.rs", "use super::kernel;"),
    (room_violations, "src/supervisor/host/mod.rs", "use super::*;"),
    (room_violations, "src/supervisor/workers/mod.rs", "use super::{host, kernel::services};"),
    (room_violations, "src/supervisor/workers/deep/er.rs", "use self::super::super::super::kernel;"),
    (room_violations, "src/supervisor/novelty.rs", ""),
    (impurities, "src/core/x.rs", "use std::fs;"),
    (impurities, "src/core/x.rs", "use std::{fmt, process};"),
    (impurities, "src/core/x.rs", "use std::{fmt, {time::Duration, net::{IpAddr}}};"),
    (impurities, "src/core/x.rs", "use std::{self as s};"),
    (impurities, "src/core/x.rs", "use std as s;"),
    (impurities, "src/core/x.rs", "use std::*;"),
    (impurities, "src/core/x.rs", "use ::std::env;"),
    (impurities, "src/core/x.rs", "fn f() -> bool { ::std::thread::panicking() }"),
    (impurities, "src/core/x.rs", "use std::time::{Duration, Instant as Clock};"),
    (impurities, "src/core/x.rs", "fn f() { Instant::now(); }"),
    (process_knowledge, "src/supervisor/host/x.rs", "use std::{fs, process};"),
    (process_knowledge, "src/supervisor/host/x.rs", "use tokio::{process::Command, sync};"),
    (process_knowledge, "src/supervisor/host/x.rs", "use std::os::unix::{self, fs};"),
    (process_knowledge, "src/supervisor/host/x.rs", "use nix::unistd::{Pid as P, Uid};"),
    (process_knowledge, "src/supervisor/host/x.rs", "use super::super::super::sandbox;"),
    (process_knowledge, "src/rpc/server/x.rs", "fn f() { read(\"/proc/self/stat\") }"),
    (misplaced, "src/store/x.rs", "use rusqlite as sql;"),
    (misplaced, "src/store/x.rs", "use {anyhow};"),
    (misplaced, "src/store/x.rs", "use super::super::rpc::schema::{ryokan_capnp};"),
    (misplaced, "src/store/x.rs", "fn f() { unsafe /* checked */ { g() } }"),
    (misplaced, "src/store/x.rs", "const ALL: &str = \"SELECT 1\";"),
];

/// Snippets that a rule must accept: rule, file, code.
const ACCEPTED: &[(Rule, &str, &str)] = &[
    (layer_violations, "src/link/mod.rs", "use crate::{core::{self, limits}, sys};"),
    (layer_violations, "src/link/mod.rs", "use super::{core, sys::mount};"),
    (layer_violations, "src/link/mod.rs", "use self::rpc::Part; mod rpc {} use rpc::Other;"),
    (layer_violations, "src/link/mod.rs", "mod tests { use super::*; use super::rpc; }"),
    (layer_violations, "src/link/mod.rs", "mod a {} mod b { use super::super::core; }"),
    (layer_violations, "src/link/mod.rs", "pub(crate) fn f(self) {} pub(in crate::link) fn g() {}"),
    (layer_violations, "src/link/mod.rs", "// use crate::rpc;\n/* /* */ crate::rpc */\n/// [`crate::rpc`]\nfn f() {}"),
    (layer_violations, "src/link/mod.rs", "const A: &str = r#\"\"crate::rpc::x {\"#; const B: char = '{';"),
    (layer_violations, "src/link/mod.rs", "fn f<'a>(c: char) -> impl Sized + use<'a> { c == '\"' || c == '\\'' }"),
    (layer_violations, "src/link/host/x.rs", "use super::super::super::core;"),
    (layer_violations, "src/worker/main.rs", "fn main() { ryokan::worker::main() }"),
    (layer_violations, "src/lib.rs", "pub mod rpc;"),
    (room_violations, "src/supervisor/kernel/x.rs", "use crate::supervisor::{host::Host, kernel::{Kernel, View}};"),
    (room_violations, "src/supervisor/kernel/x.rs", "use super::super::{host, workers};"),
    (room_violations, "src/supervisor/kernel/mod.rs", "use super::workers::admission;"),
    (room_violations, "src/supervisor/host/x.rs", "use super::kernel; mod tests { use super::super::registry; }"),
    (room_violations, "src/supervisor/mod.rs", "pub mod registry; use self::registry::Supervisor;"),
    (room_violations, "src/rpc/server/x.rs", "use crate::supervisor::maintenance;"),
    (impurities, "src/core/x.rs", "use std::{collections::BTreeMap, fmt, time::Duration};"),
    (impurities, "src/core/x.rs", "// std::fs\nconst A: &str = \"std::process\"; mod process {} use self::process;"),
    (impurities, "src/store/x.rs", "use std::fs;"),
    (process_knowledge, "src/supervisor/host/x.rs", "fn f(c: &Config) { c.sandbox.clear(); std::fs::read(\"x\"); }"),
    (process_knowledge, "src/supervisor/host/x.rs", "use std::os::unix::fs::PermissionsExt as _;"),
    (process_knowledge, "src/isolation/process/x.rs", "use std::process::Command;"),
    (misplaced, "src/catalog/x.rs", "use rusqlite::{Connection, params}; const ALL: &str = \"SELECT 1\";"),
    (misplaced, "src/store/x.rs", "#![deny(unsafe_code)] // rusqlite::Connection\nuse std::fs;"),
];

#[test]
fn rules_refuse_violations() {
    for (rule, name, code) in REFUSED {
        let wrong = rule(&Source::new(name, module_of(name), code));
        assert!(!wrong.is_empty(), "{name}: not refused: {code}");
    }
}

#[test]
fn rules_accept_legal_imports() {
    for (rule, name, code) in ACCEPTED {
        let wrong = rule(&Source::new(name, module_of(name), code));
        assert!(wrong.is_empty(), "{name}: refused: {code}\n{wrong:?}");
    }
}

/// A file that another file names as its module is one level deeper than its own name says.
#[test]
fn path_attribute_places_module() {
    let owner = "#[cfg(test)]\n#[path = \"x_tests.rs\"]\nmod tests;\nfn f() { let path = \"y.rs\"; }";
    let placed = modules_elsewhere("src/supervisor/host/x.rs", owner);
    let module: Vec<String> = ["supervisor", "host", "x", "tests"].map(str::to_owned).to_vec();
    assert_eq!(placed, [("src/supervisor/host/x_tests.rs".to_owned(), module.clone())]);
    let up = "use super::super::super::kernel;";
    let name = &placed[0].0;
    assert!(!room_violations(&Source::new(name, module, up)).is_empty());
    assert!(room_violations(&Source::new(name, module_of(name), up)).is_empty(), "the name alone is not enough");
}

#[test]
fn scanner_removes_comments_only() {
    let (code, tokens) = scan("a /* b \"c\" /* d */ */ \"e // f\" // g\nr#mod::h '\\u{7d}' b'}' 1..2");
    assert_eq!(code, "a   \"e // f\" \nr#mod::h '\\u{7d}' b'}' 1..2");
    let word = |word: &str| Token::Word(word.to_owned());
    let dots = [Token::Sign('.'), Token::Sign('.')];
    let expected = [
        &[word("a"), Token::Text("e // f".to_owned()), word("mod"), Token::PathSeparator, word("h")][..],
        &[Token::Other, Token::Other, Token::Other],
        &dots,
        &[Token::Other],
    ];
    assert_eq!(tokens, expected.concat());
}
