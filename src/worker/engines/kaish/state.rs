//! The session's state as entries: changes since the last look, and restoring a session from
//! entries.
//!
//! | key | body after the format byte |
//! |---|---|
//! | `var/NAME` | the value (`values::encode`) |
//! | `unset/NAME`, `unexport/NAME` | empty: a removed variable or export mark of the start |
//! | `export/NAME` | empty: the export mark |
//! | `fn/NAME` | source text |
//! | `alias/NAME` | replacement |
//! | `opt/NAME` | a number, 8 bytes little-endian |
//! | `cwd`, `prev_cwd` | path |
//! | `positional` | length-prefixed texts: the script's name, then its arguments |
//! | `file/PATH` | content of a file in a memory file system |
//!
//! Only differences from a fresh session are entries, so a session restored elsewhere uses the
//! local `PATH` and name unless the user changed them. `PWD`, `OLDPWD` and `PIPESTATUS` are derived
//! and never entries.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kaish_kernel::Kernel;
use kaish_kernel::ast::{ToolDef, Value as Kv};
use kaish_kernel::interpreter::Scope;
use kaish_kernel::output_limit::OutputLimitConfig;
use kaish_kernel::parser;
use kaish_kernel::vfs::Filesystem as _;

use super::program::{self, Definition, Found};
use super::tools::Inside;
use super::values::{self, FORMAT};
use crate::link::frames::{EndStatus, EntryMeta, Missed};

/// One state entry.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// `kind/name`.
    pub key: String,
    /// Metadata for people.
    pub meta: EntryMeta,
    /// Format byte and content.
    pub body: Vec<u8>,
}

impl Entry {
    fn new(key: String, type_name: &str, summary: String, content: &[u8]) -> Self {
        let mut body = vec![FORMAT];
        body.extend(content);
        let meta = EntryMeta { type_name: type_name.to_owned(), summary, more: serde_json::Map::new() };
        Entry { key, meta, body }
    }

    /// The entry as one that could not be restored.
    pub fn missed(&self, reason: impl Into<String>) -> Missed {
        Missed { key: self.key.clone(), type_name: self.meta.type_name.clone(), reason: reason.into() }
    }
}

/// A difference from the sent state.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// New or changed.
    Put(Entry),
    /// Removed.
    Del(String),
}

/// Derived variables.
const REGENERATED: [&str; 3] = ["PWD", "OLDPWD", "PIPESTATUS"];
/// Folder of kaish's files in memory.
const MEMORY: &str = "/v/blobs";
/// Limit of captured memory files in total, bytes.
const MEMORY_BYTES: usize = 64 << 20;

#[derive(Debug, Clone)]
enum Function {
    /// Its source text.
    Text(String),
    /// Why there is no text.
    Unknown(&'static str),
}

/// The known state, and its sent part.
#[derive(Default)]
pub struct State {
    initial: Option<Initial>,
    vars: HashMap<String, Kv>,
    sent: HashMap<String, blake3::Hash>,
    functions: BTreeMap<String, Function>,
    aliases: Vec<String>,
    too_large: Vec<Missed>,
}

/// A fresh session's state.
struct Initial {
    vars: HashMap<String, Kv>,
    exported: Vec<String>,
    options: Vec<(&'static str, u64)>,
    cwd: PathBuf,
    prev_cwd: Option<PathBuf>,
    positional: (String, Vec<String>),
}

fn options(scope: &Scope, limit: &OutputLimitConfig) -> Vec<(&'static str, u64)> {
    vec![
        ("errexit", scope.error_exit_flag().into()),
        ("pipefail", scope.pipefail_enabled().into()),
        ("glob", scope.glob_enabled().into()),
        ("crossmounts", scope.cross_mounts_enabled().into()),
        ("trash", scope.trash_enabled().into()),
        ("trash_max_size", scope.trash_max_size()),
        ("show_ast", scope.show_ast().into()),
        ("output_limit", limit.max_bytes().map_or(0, |bytes| bytes as u64)),
        ("output_head", limit.head_bytes() as u64),
        ("output_tail", limit.tail_bytes() as u64),
    ]
}

fn same(a: &Kv, b: &Kv) -> bool {
    match (a, b) {
        (Kv::Float(a), Kv::Float(b)) => a.to_bits() == b.to_bits(),
        _ => a == b,
    }
}

impl State {
    /// Records the state of a fresh session.
    pub fn set_initial(&mut self, inside: Option<Inside>) {
        self.initial = inside.map(|inside| Initial {
            vars: inside.scope.all().into_iter().collect(),
            exported: inside.scope.exported_names().into_iter().map(str::to_owned).collect(),
            options: options(&inside.scope, &inside.output_limit),
            positional: inside.scope.save_positional(),
            cwd: inside.cwd,
            prev_cwd: inside.prev_cwd,
        });
    }

    /// A fresh session has this variable, too.
    pub fn add_initial(&mut self, name: String, value: Kv) {
        if !self.vars.is_empty() {
            self.vars.insert(name.clone(), value.clone());
        }
        if let Some(initial) = &mut self.initial {
            initial.vars.insert(name, value);
        }
    }

    /// Whether the variable is unchanged from a fresh session or derived.
    pub fn is_initial(&self, name: &str, value: &Kv) -> bool {
        REGENERATED.contains(&name)
            || self.initial.as_ref().and_then(|initial| initial.vars.get(name)).is_some_and(|at| same(at, value))
    }

    /// Names of the functions.
    pub fn functions(&self) -> impl Iterator<Item = &str> {
        self.functions.keys().map(String::as_str)
    }

    /// Names of the aliases at the last look.
    pub fn aliases(&self) -> impl Iterator<Item = &str> {
        self.aliases.iter().map(String::as_str)
    }

    /// Records a function's text.
    pub fn define(&mut self, name: &str, text: &str) {
        self.functions.insert(name.to_owned(), Function::Text(text.to_owned()));
    }

    /// Marks everything as changed.
    pub fn forget_sent(&mut self) {
        self.sent.clear();
        self.vars.clear();
    }

    /// Records the functions defined by a program.
    pub async fn saw_program(
        &mut self,
        code: &str,
        found: &Found,
        sources: &[String],
        session: &Arc<Kernel>,
        status: EndStatus,
    ) {
        if status == EndStatus::Refused {
            return;
        }
        let mut defined: BTreeMap<String, Vec<(&Definition, &str)>> = BTreeMap::new();
        let read: Vec<(Found, &String)> = sources
            .iter()
            .filter_map(|text| parser::parse(text).ok().map(|program| (program::walk(&program), text)))
            .collect();
        for (found, text) in std::iter::once((found, code)).chain(read.iter().map(|(f, t)| (f, t.as_str()))) {
            for definition in &found.definitions {
                defined.entry(definition.def.name.clone()).or_default().push((definition, text));
            }
        }
        let several_programs = !read.is_empty();
        for (name, definitions) in defined {
            if session.has_function(&name).await {
                let known = self.settle(&name, &definitions, several_programs, status);
                self.functions.insert(name, known);
            }
        }
        let mut gone = Vec::new();
        for name in self.functions.keys() {
            if !session.has_function(name).await {
                gone.push(name.clone());
            }
        }
        gone.iter().for_each(|name| drop(self.functions.remove(name)));
    }

    /// Which of these definitions is in force.
    fn settle(
        &self,
        name: &str,
        definitions: &[(&Definition, &str)],
        several_programs: bool,
        status: EndStatus,
    ) -> Function {
        let Some(((last, text), others)) = definitions.split_last() else {
            return Function::Unknown("its definition was not seen");
        };
        let mut distinct: Vec<&ToolDef> = vec![&last.def];
        distinct.extend(others.iter().map(|(definition, _)| &definition.def).filter(|def| **def != last.def));
        let former = match self.functions.get(name) {
            Some(Function::Text(text)) => program::single_definition(text),
            Some(Function::Unknown(_)) | None => None,
        };
        let was_unknown = matches!(self.functions.get(name), Some(Function::Unknown(_)));
        let only_one = distinct.len() == 1 && !was_unknown && former.as_ref().is_none_or(|former| *former == last.def);
        let surely_last = last.unconditional
            && !several_programs
            && (status == EndStatus::Done || last.leading && others.iter().all(|(other, _)| other.leading));
        if !only_one && !surely_last {
            return Function::Unknown("it was defined in several ways, and which one holds is not known");
        }
        match program::text_of(text, &last.def) {
            Some(text) => Function::Text(text),
            None => Function::Unknown("its source text could not be found in the program"),
        }
    }

    /// The differences from the sent state; `inside` if it was read again.
    pub async fn changes(&mut self, session: &Arc<Kernel>, inside: Option<Inside>) -> Vec<Change> {
        let mut changes = Vec::new();
        self.var_changes(session.list_vars().await, &mut changes);
        let functions: Vec<Entry> = self
            .functions
            .iter()
            .filter_map(|(name, function)| match function {
                Function::Text(text) => {
                    Some(Entry::new(format!("fn/{name}"), "function", values::one_line(text), text.as_bytes()))
                }
                Function::Unknown(_) => None,
            })
            .collect();
        self.kind_changes(&["fn/"], functions, &mut changes);
        let files = self.memory_files(session).await;
        self.kind_changes(&["file/"], files, &mut changes);
        if let Some(inside) = inside {
            self.aliases = inside.aliases.keys().cloned().collect();
            self.aliases.sort();
            let kinds = ["alias/", "opt/", "export/", "unexport/", "cwd", "prev_cwd", "positional"];
            let entries = self.inside_entries(&inside);
            self.kind_changes(&kinds, entries, &mut changes);
        }
        changes
    }

    fn var_changes(&mut self, vars: Vec<(String, Kv)>, changes: &mut Vec<Change>) {
        let is_known = |(name, value): &(String, Kv)| self.vars.get(name).is_some_and(|before| same(before, value));
        if !vars.is_empty() && vars.len() == self.vars.len() && vars.iter().all(is_known) {
            return;
        }
        let mut entries = Vec::new();
        let mut now = HashMap::with_capacity(vars.len());
        for (name, value) in vars {
            if self.vars.get(&name).is_none_or(|before| !same(before, &value)) && !self.is_initial(&name, &value) {
                let meta = EntryMeta {
                    type_name: values::type_name(&value).to_owned(),
                    summary: values::summary(&value),
                    more: serde_json::Map::new(),
                };
                entries.push(Entry { key: format!("var/{name}"), meta, body: values::encode(&value) });
            }
            now.insert(name, value);
        }
        for entry in entries {
            self.put(entry, changes);
        }
        let initial = self.initial.as_ref().map(|initial| &initial.vars);
        let unset: Vec<Entry> = initial
            .into_iter()
            .flat_map(HashMap::keys)
            .filter(|name| !now.contains_key(*name) && !REGENERATED.contains(&name.as_str()))
            .map(|name| Entry::new(format!("unset/{name}"), "unset", String::new(), &[]))
            .collect();
        self.kind_changes(&["unset/"], unset, changes);
        let mut gone: Vec<String> = self
            .sent
            .keys()
            .filter_map(|key| key.strip_prefix("var/"))
            .filter(|name| now.get(*name).is_none_or(|value| self.is_initial(name, value)))
            .map(|name| format!("var/{name}"))
            .collect();
        gone.sort();
        for key in gone {
            self.sent.remove(&key);
            changes.push(Change::Del(key));
        }
        self.vars = now;
    }

    fn put(&mut self, entry: Entry, changes: &mut Vec<Change>) {
        let hash = blake3::hash(&entry.body);
        if self.sent.insert(entry.key.clone(), hash) != Some(hash) {
            changes.push(Change::Put(entry));
        }
    }

    /// `entries` are all entries of these kinds.
    fn kind_changes(&mut self, kinds: &[&str], entries: Vec<Entry>, changes: &mut Vec<Change>) {
        let of_kind =
            |key: &str| kinds.iter().any(|kind| if kind.ends_with('/') { key.starts_with(kind) } else { key == *kind });
        let mut gone: Vec<String> = self
            .sent
            .keys()
            .filter(|key| of_kind(key) && !entries.iter().any(|entry| entry.key == **key))
            .cloned()
            .collect();
        gone.sort();
        for entry in entries {
            self.put(entry, changes);
        }
        for key in gone {
            self.sent.remove(&key);
            changes.push(Change::Del(key));
        }
    }

    fn inside_entries(&self, inside: &Inside) -> Vec<Entry> {
        let mut entries = Vec::new();
        for (name, value) in &inside.aliases {
            entries.push(Entry::new(format!("alias/{name}"), "alias", values::one_line(value), value.as_bytes()));
        }
        let initial = self.initial.as_ref();
        for (name, value) in options(&inside.scope, &inside.output_limit) {
            if initial.is_none_or(|initial| !initial.options.contains(&(name, value))) {
                let summary = value.to_string();
                entries.push(Entry::new(format!("opt/{name}"), "option", summary, &value.to_le_bytes()));
            }
        }
        let exported = inside.scope.exported_names();
        let at_start = initial.map(|initial| initial.exported.as_slice()).unwrap_or_default();
        for name in exported.iter().filter(|name| !at_start.iter().any(|at| at == *name)) {
            entries.push(Entry::new(format!("export/{name}"), "export", String::new(), &[]));
        }
        for name in at_start.iter().filter(|name| !exported.contains(&name.as_str())) {
            entries.push(Entry::new(format!("unexport/{name}"), "export", String::new(), &[]));
        }
        let path = |key: &str, path: &Path| {
            let text = path.to_string_lossy();
            Entry::new(key.to_owned(), "path", values::one_line(&text), text.as_bytes())
        };
        if initial.is_none_or(|initial| initial.cwd != inside.cwd) {
            entries.push(path("cwd", &inside.cwd));
        }
        if let Some(prev) = &inside.prev_cwd
            && initial.is_none_or(|initial| initial.prev_cwd != inside.prev_cwd)
        {
            entries.push(path("prev_cwd", prev));
        }
        let positional = inside.scope.save_positional();
        if initial.is_none_or(|initial| initial.positional != positional) {
            let mut texts = vec![positional.0.as_str()];
            texts.extend(positional.1.iter().map(String::as_str));
            let body = values::encode_texts(&texts);
            let meta = Entry::new("positional".into(), "list", values::one_line(&texts[1..].join(" ")), &[]).meta;
            entries.push(Entry { key: "positional".into(), meta, body });
        }
        entries.sort_by(|a, b| a.key.cmp(&b.key));
        entries
    }

    async fn memory_files(&mut self, session: &Arc<Kernel>) -> Vec<Entry> {
        self.too_large.clear();
        let vfs = session.vfs();
        let mut entries = Vec::new();
        let mut bytes = 0;
        let mut folders = vec![PathBuf::from(MEMORY)];
        while let Some(folder) = folders.pop() {
            for found in vfs.list(&folder).await.unwrap_or_default() {
                let path = folder.join(&found.name);
                if found.is_dir() {
                    folders.push(path);
                    continue;
                }
                let key = format!("file{}", path.display());
                match vfs.read(&path).await {
                    Ok(content) if bytes + content.len() <= MEMORY_BYTES => {
                        bytes += content.len();
                        entries.push(Entry::new(key, "file", format!("{} bytes", content.len()), &content));
                    }
                    Ok(_) => self.too_large.push(Missed {
                        key,
                        type_name: "file".into(),
                        reason: format!("files in memory are captured up to {} MiB in all", MEMORY_BYTES >> 20),
                    }),
                    // Removed meanwhile: a background job may be running.
                    Err(_) => {}
                }
            }
        }
        entries
    }

    /// The list of unsaved entries.
    pub fn missed(&self) -> Vec<Missed> {
        let functions = self.functions.iter().filter_map(|(name, function)| match function {
            Function::Unknown(reason) => {
                Some(Missed { key: format!("fn/{name}"), type_name: "function".into(), reason: (*reason).into() })
            }
            Function::Text(_) => None,
        });
        functions.chain(self.too_large.iter().cloned()).collect()
    }

    /// Builds a session's state from `fresh` and the entries. Also returns the functions and files
    /// to add, and the entries that could not be restored.
    pub fn load(&mut self, entries: Vec<Entry>, fresh: Inside) -> Loaded {
        self.sent.clear();
        self.vars.clear();
        self.functions.clear();
        let mut loaded = Loaded { inside: fresh, functions: Vec::new(), files: Vec::new(), missed: Vec::new() };
        for entry in entries {
            match loaded.put(&entry) {
                // Stored already: not sent again unless it changes.
                Ok(()) => drop(self.sent.insert(entry.key.clone(), blake3::hash(&entry.body))),
                // Not in `sent`, so it is never reported as removed: it stays stored.
                Err(reason) => loaded.missed.push(entry.missed(reason)),
            }
        }
        loaded
    }
}

/// The result of reading entries.
pub struct Loaded {
    /// State of the session.
    pub inside: Inside,
    /// Names and source texts.
    pub functions: Vec<(String, String)>,
    /// Files in memory.
    pub files: Vec<(PathBuf, Vec<u8>)>,
    /// Entries that could not be restored.
    pub missed: Vec<Missed>,
}

impl Loaded {
    fn put(&mut self, entry: &Entry) -> Result<(), String> {
        let (&version, content) = entry.body.split_first().ok_or("the entry is empty")?;
        if version != FORMAT {
            return Err(format!("format version {version} is unknown"));
        }
        let text = || String::from_utf8(content.to_vec()).map_err(|_| "the content is not UTF-8".to_owned());
        let (kind, name) = entry.key.split_once('/').unwrap_or((&entry.key, ""));
        let scope = &mut self.inside.scope;
        match (kind, name.is_empty()) {
            ("var", false) => {
                let value = values::decode(&entry.body).map_err(|error| error.to_string())?;
                scope.set_global(name, value);
            }
            ("unset", false) => drop(scope.remove(name)),
            ("export", false) => scope.export(name),
            ("unexport", false) => scope.unexport(name),
            ("fn", false) => self.functions.push((name.to_owned(), text()?)),
            ("alias", false) => drop(self.inside.aliases.insert(name.to_owned(), text()?)),
            ("opt", false) => {
                let bytes = content.try_into().map_err(|_| "an option is a number of 8 bytes".to_owned())?;
                self.option(name, u64::from_le_bytes(bytes))?;
            }
            ("file", false) => self.files.push((Path::new("/").join(name), content.to_vec())),
            ("cwd", true) => {
                let path = PathBuf::from(text()?);
                if !path.starts_with("/v") && !path.is_dir() {
                    return Err(format!("{} is no directory now", path.display()));
                }
                self.inside.cwd = path;
            }
            ("prev_cwd", true) => self.inside.prev_cwd = Some(text()?.into()),
            ("positional", true) => {
                let mut texts = values::decode_texts(&entry.body).map_err(|error| error.to_string())?.into_iter();
                let script = texts.next().ok_or("the script's name is missing")?;
                scope.set_positional(script, texts.collect());
            }
            _ => return Err("unknown kind of entry".into()),
        }
        Ok(())
    }

    fn option(&mut self, name: &str, value: u64) -> Result<(), String> {
        let scope = &mut self.inside.scope;
        let limit = &mut self.inside.output_limit;
        let size = usize::try_from(value).unwrap_or(usize::MAX);
        match name {
            "errexit" => scope.set_error_exit(value != 0),
            "pipefail" => scope.set_pipefail_enabled(value != 0),
            "glob" => scope.set_glob_enabled(value != 0),
            "crossmounts" => scope.set_cross_mounts_enabled(value != 0),
            "trash" => scope.set_trash_enabled(value != 0),
            "trash_max_size" => scope.set_trash_max_size(value),
            "show_ast" => scope.set_show_ast(value != 0),
            "output_limit" => limit.set_limit((size > 0).then_some(size)),
            "output_head" => limit.set_head_bytes(size),
            "output_tail" => limit.set_tail_bytes(size),
            _ => return Err("unknown option".into()),
        }
        Ok(())
    }
}
