//! Random files, variables, checkpoints, restores and undos through a real daemon, beside a simple model.
//!
//! Restores bring back the complete former state, including modes and times. `RYOKAN_CHECKPOINT_CASES` sets the number
//! of cases; the default is small.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::rpc::client::KernelClient;

use crate::support::{Host, User, kernel, out};

const FOLDERS: [&str; 4] = [".", "a", "a/b", "c"];
const NAMES: [&str; 5] = ["one", "two", "three", "with space", "ü"];
const VARIABLES: [&str; 3] = ["x", "y", "z"];

#[derive(Debug, Clone)]
enum Op {
    /// Content of this size from a seed.
    Write(usize, usize, usize),
    Append(usize, usize),
    Remove(usize, usize),
    RemoveFolder(usize),
    Rename(usize, usize, usize, usize),
    Link(usize, usize, usize, usize),
    Mode(usize, usize, bool),
    Set(usize, u32),
    Unset(usize),
    Checkpoint,
    Restore(usize),
    Undo,
    Stop,
    Kill,
}

fn op() -> impl Strategy<Value = Op> {
    let n = || 0usize..20;
    prop_oneof![
        8 => (n(), n(), 0usize..3000).prop_map(|(d, f, size)| Op::Write(d, f, size)),
        3 => (n(), n()).prop_map(|(d, f)| Op::Append(d, f)),
        3 => (n(), n()).prop_map(|(d, f)| Op::Remove(d, f)),
        1 => n().prop_map(Op::RemoveFolder),
        3 => (n(), n(), n(), n()).prop_map(|(d, f, e, g)| Op::Rename(d, f, e, g)),
        1 => (n(), n(), n(), n()).prop_map(|(d, f, e, g)| Op::Link(d, f, e, g)),
        1 => (n(), n(), any::<bool>()).prop_map(|(d, f, x)| Op::Mode(d, f, x)),
        4 => (n(), any::<u32>()).prop_map(|(v, value)| Op::Set(v, value)),
        1 => n().prop_map(Op::Unset),
        5 => Just(Op::Checkpoint),
        5 => n().prop_map(Op::Restore),
        3 => Just(Op::Undo),
        1 => Just(Op::Stop),
        1 => Just(Op::Kill),
    ]
}

fn path(folder: usize, name: usize) -> String {
    format!("{}/{}", FOLDERS[folder % FOLDERS.len()], NAMES[name % NAMES.len()])
}

/// Code for an operation on files or variables, in each language. A missing target is no error.
fn code(engine: EngineName, op: &Op) -> String {
    let text = |size: usize| format!("{size:05} ").repeat(size / 6 + 1);
    let python = engine == EngineName::Python;
    let folder_of = |path: &str| path.rsplit_once('/').map_or(".", |(folder, _)| folder).to_owned();
    match op {
        Op::Write(d, f, size) => {
            let (path, text) = (path(*d, *f), text(*size));
            match python {
                true => format!(
                    "os.makedirs({:?}, exist_ok=True); n = open({path:?}, 'w').write({text:?}); del n",
                    folder_of(&path)
                ),
                false => format!("mkdir -p '{}'; printf '%s' '{text}' > '{path}'", folder_of(&path)),
            }
        }
        Op::Append(d, f) => match (path(*d, *f), python) {
            (path, true) => format!("n = os.path.isfile({path:?}) and open({path:?}, 'a').write('more'); del n"),
            (path, false) => format!("if [[ -f '{path}' ]]; then printf more >> '{path}'; fi"),
        },
        Op::Remove(d, f) => match (path(*d, *f), python) {
            (path, true) => format!("if os.path.isfile({path:?}): os.remove({path:?})"),
            (path, false) => format!("if [[ -f '{path}' ]]; then rm '{path}'; fi"),
        },
        Op::RemoveFolder(d) => match (FOLDERS[d % FOLDERS.len()], python) {
            (".", _) => "true = True".replace("true = True", if python { "None" } else { "true" }),
            (folder, true) => format!("shutil.rmtree({folder:?}, ignore_errors=True)"),
            (folder, false) => format!("if [[ -d '{folder}' ]]; then rm -r '{folder}'; fi"),
        },
        Op::Rename(d, f, e, g) | Op::Link(d, f, e, g) => {
            let (from, to, links) = (path(*d, *f), path(*e, *g), matches!(op, Op::Link(..)));
            // kaish makes no hard links.
            let (deed, command) = if links { ("os.link", "cp") } else { ("os.rename", "mv") };
            match python {
                true => format!(
                    "if os.path.isfile({from:?}) and os.path.isdir({:?}) and not os.path.exists({to:?}): {deed}({from:?}, {to:?})",
                    folder_of(&to)
                ),
                false => format!(
                    "if [[ -f '{from}' && -d '{}' && ! -e '{to}' ]]; then {command} '{from}' '{to}'; fi",
                    folder_of(&to)
                ),
            }
        }
        Op::Mode(d, f, executable) => {
            let (path, mode) = (path(*d, *f), if *executable { "755" } else { "600" });
            match python {
                true => format!("if os.path.isfile({path:?}): os.chmod({path:?}, 0o{mode})"),
                false => format!("if [[ -f '{path}' ]]; then chmod {mode} '{path}'; fi"),
            }
        }
        Op::Set(v, value) => format!("{}={value}", VARIABLES[v % VARIABLES.len()]),
        Op::Unset(v) => match (VARIABLES[v % VARIABLES.len()], python) {
            (name, true) => format!("n = globals().pop({name:?}, None); del n"),
            (name, false) => format!("unset {name}"),
        },
        Op::Checkpoint | Op::Restore(_) | Op::Undo | Op::Stop | Op::Kill => String::new(),
    }
}

/// A file, directory or link as the host's file system shows it: kind and permissions, time, bytes, number of names.
type Seen = (u32, i64, i64, Vec<u8>, u64);

/// State that a restore brings back.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Now {
    variables: BTreeMap<String, u32>,
    files: BTreeMap<PathBuf, Seen>,
}

fn look(root: &Path, below: &Path, found: &mut BTreeMap<PathBuf, Seen>) {
    for entry in std::fs::read_dir(root.join(below)).unwrap().flatten() {
        let (meta, path) = (entry.metadata().unwrap(), below.join(entry.file_name()));
        let bytes = if meta.is_file() { std::fs::read(entry.path()).unwrap() } else { Vec::new() };
        let names = if meta.is_file() { meta.nlink() } else { 0 };
        found.insert(path.clone(), (meta.permissions().mode(), meta.mtime(), meta.mtime_nsec(), bytes, names));
        if meta.is_dir() {
            look(root, &path, found);
        }
    }
}

/// A kernel, its expected variables, and the states to which it can return.
struct Run<'a> {
    host: &'a mut Host,
    name: String,
    engine: EngineName,
    workspace: PathBuf,
    variables: BTreeMap<String, u32>,
    checkpoints: Vec<(String, Now)>,
    before_restore: Option<Now>,
}

impl Run<'_> {
    fn with<T>(&self, work: impl AsyncFnOnce(KernelClient) -> T) -> T {
        self.host.with(async |client| work(client.open_kernel(&self.name).await.unwrap().0).await)
    }

    /// The present state: variables as the engine reports them, files as the host sees them.
    fn now(&self) -> Now {
        let show = match self.engine {
            EngineName::Python => "print(*(f'{v}={globals().get(v)}' for v in 'xyz'))",
            _ => "echo x=${x:-None} y=${y:-None} z=${z:-None}",
        };
        let shown = self.with(async |k| out(&k, show).await);
        let variable = |word: &str| -> Option<(String, u32)> {
            let (name, value) = word.split_once('=')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        let mut files = BTreeMap::new();
        look(&self.workspace, Path::new(""), &mut files);
        Now { variables: shown.split(' ').filter_map(variable).collect(), files }
    }

    fn checked_now(&self, what: &str) -> Now {
        let now = self.now();
        assert_eq!(now.variables, self.variables, "{what}");
        now
    }

    fn came_back(&mut self, what: &str, wanted: &Now) {
        self.variables = wanted.variables.clone();
        let now = self.checked_now(what);
        for path in now.files.keys().chain(wanted.files.keys()) {
            assert_eq!(now.files.get(path), wanted.files.get(path), "{what}: {path:?}");
        }
    }

    fn step(&mut self, n: usize, op: &Op) {
        let what = format!("{} after step {n}, {op:?}", self.name);
        match op {
            Op::Set(v, value) => drop(self.variables.insert(VARIABLES[v % VARIABLES.len()].to_owned(), *value)),
            Op::Unset(v) => drop(self.variables.remove(VARIABLES[v % VARIABLES.len()])),
            Op::Checkpoint => {
                let now = self.checked_now(&what);
                let name = format!("c{n}");
                self.with(async |k| {
                    k.checkpoint(&CheckpointRequest::new(CheckpointType::Manual, &name)).await.expect(&what)
                });
                return self.checkpoints.push((name, now));
            }
            Op::Restore(at) => {
                let Some((name, wanted)) = self.checkpoints.get(at % self.checkpoints.len().max(1)).cloned() else {
                    return;
                };
                let before = self.checked_now(&what);
                self.with(async |k| k.restore_checkpoint(&name, 0).await.expect(&what));
                self.came_back(&what, &wanted);
                self.before_restore = Some(before);
                return;
            }
            Op::Undo => {
                let Some(wanted) = self.before_restore.take() else { return };
                let before = self.checked_now(&what);
                self.with(async |k| k.undo(0).await.expect(&what));
                self.came_back(&what, &wanted);
                self.before_restore = Some(before);
                return;
            }
            Op::Stop => return self.with(async |k| k.stop(false).await.expect(&what)),
            Op::Kill => return self.host.restart(),
            _ => {}
        }
        self.with(async |k| out(&k, &code(self.engine, op)).await);
    }
}

fn check(engine: EngineName) {
    let cases = std::env::var("RYOKAN_CHECKPOINT_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(3);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 64, ..Config::default() };
    let host = std::cell::RefCell::new((Host::start_as(User::Unprivileged), 0));
    let outcome = TestRunner::new(config).run(&prop::collection::vec(op(), 20..50), |ops| {
        let (host, number) = &mut *host.borrow_mut();
        *number += 1;
        let name = format!("{engine}{number}");
        let id = host.with(async |client| {
            let k = kernel(&client, &name, engine).await;
            if engine == EngineName::Python {
                out(&k, "import os, shutil").await;
            }
            k.info().await.unwrap().id.to_string()
        });
        let workspace = host.data().join("kernels").join(id).join("workspace");
        let (variables, checkpoints) = (BTreeMap::new(), Vec::new());
        let mut run = Run { host, name, engine, workspace, variables, checkpoints, before_restore: None };
        ops.iter().enumerate().for_each(|(n, op)| run.step(n, op));
        // Restores every checkpoint once more.
        for (name, wanted) in run.checkpoints.clone() {
            run.with(async |k| k.restore_checkpoint(&name, 0).await.expect(&name));
            run.came_back(&format!("{name} in the end"), &wanted);
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn restore_matches_model_with_python() {
    check(EngineName::Python);
}

#[test]
fn restore_matches_model_with_kaish() {
    check(EngineName::Kaish);
}
