//! Tokens and paths of Rust source, as far as the rules need them.
//!
//! A scanner, not a parser: it knows comments, literals, modules with a body, and trees of `use`.

use std::collections::BTreeMap;
use std::fs;
use std::sync::LazyLock;

use super::{files, is_generated, relative};

#[derive(Clone, Debug, PartialEq)]
pub enum Token {
    Word(String),
    Text(String),
    PathSeparator,
    Sign(char),
    /// A number, a character or a lifetime.
    Other,
}

/// A path in source, resolved against the module around it.
#[derive(Debug, PartialEq)]
pub struct Found {
    /// Absolute: starts with `crate` or with the name of another crate or item.
    pub path: Vec<String>,
    /// Part of a `use` or `extern crate`.
    pub is_import: bool,
    /// Ends with `*`.
    pub is_glob: bool,
}

impl Found {
    /// Whether the path is in `module`, or brings `module` itself into scope, perhaps under another name.
    pub fn reaches(&self, module: &str) -> bool {
        let module: Vec<&str> = module.split("::").collect();
        let common = self.path.iter().zip(&module).take_while(|(own, other)| own == other).count();
        common == module.len() || (self.is_import && common == self.path.len())
    }

    pub fn text(&self) -> String {
        self.path.join("::") + if self.is_glob { "::*" } else { "" }
    }
}

/// One file of Rust source.
pub struct Source {
    /// Relative to the repository.
    pub name: String,
    /// Without comments; literals stay.
    pub code: String,
    pub tokens: Vec<Token>,
    pub paths: Vec<Found>,
    /// The module's path from the root of the crate, without `crate`.
    pub module: Vec<String>,
}

impl Source {
    pub fn new(name: &str, module: Vec<String>, text: &str) -> Source {
        let (code, tokens) = scan(text);
        let paths = Paths::of(name, &tokens, &module);
        Source { name: name.to_owned(), code, tokens, paths, module }
    }
}

/// The module of a file below `src`, by its name alone.
pub fn module_of(name: &str) -> Vec<String> {
    let mut parts: Vec<String> =
        name.trim_start_matches("src/").trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    parts.pop_if(|last| matches!(last.as_str(), "mod" | "lib" | "main"));
    parts
}

/// All source of the crate, without generated files.
pub fn crate_sources() -> &'static [Source] {
    static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(read_sources);
    &SOURCES
}

fn read_sources() -> Vec<Source> {
    let texts: Vec<(String, String)> = files("src", "rs")
        .into_iter()
        .filter(|path| !is_generated(path))
        .map(|path| (relative(&path), fs::read_to_string(&path).unwrap()))
        .collect();
    let placed: BTreeMap<_, _> = texts.iter().flat_map(|(name, text)| modules_elsewhere(name, text)).collect();
    texts
        .iter()
        .map(|(name, text)| Source::new(name, placed.get(name).cloned().unwrap_or_else(|| module_of(name)), text))
        .collect()
}

/// Files and modules of the `#[path = "…"] mod …;` in a file.
pub fn modules_elsewhere(name: &str, text: &str) -> Vec<(String, Vec<String>)> {
    if !text.contains("path = \"") {
        return Vec::new();
    }
    let (_, tokens) = scan(text);
    let is_word = |at: usize, expected: &str| matches!(tokens.get(at), Some(Token::Word(word)) if word == expected);
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let Token::Text(file) = token else { continue };
        let is_attribute = at >= 3
            && tokens[at - 1] == Token::Sign('=')
            && is_word(at - 2, "path")
            && matches!(tokens[at - 3], Token::Sign('[' | '(' | ','));
        if !is_attribute {
            continue;
        }
        assert!(!file.contains('/'), "{name}: the file of a module is in the same directory, not {file}");
        let module = (at..tokens.len()).find(|at| is_word(*at, "mod")).and_then(|at| tokens.get(at + 1));
        let Some(Token::Word(module)) = module else { panic!("{name}: no module follows the path {file}") };
        let mut path = module_of(name);
        path.push(module.clone());
        let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
        found.push((format!("{folder}/{file}"), path));
    }
    found
}

/// The code without comments, and its tokens.
pub fn scan(text: &str) -> (String, Vec<Token>) {
    let mut scanner = Scanner { chars: text.chars().collect(), at: 0, code: String::new(), tokens: Vec::new() };
    while scanner.at < scanner.chars.len() {
        scanner.step();
    }
    (scanner.code, scanner.tokens)
}

struct Scanner {
    chars: Vec<char>,
    at: usize,
    code: String,
    tokens: Vec<Token>,
}

impl Scanner {
    fn peek(&self, ahead: usize) -> char {
        self.chars.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn take(&mut self) -> char {
        let next = self.peek(0);
        self.at += 1;
        self.code.push(next);
        next
    }

    fn take_word(&mut self) -> String {
        let mut word = String::new();
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            word.push(self.take());
        }
        word
    }

    fn step(&mut self) {
        match (self.peek(0), self.peek(1)) {
            ('/', '/') => {
                while self.at < self.chars.len() && self.peek(0) != '\n' {
                    self.at += 1;
                }
            }
            ('/', '*') => self.skip_block_comment(),
            ('"', _) => self.take_text(),
            ('\'', _) => self.take_character_or_lifetime(),
            (':', ':') => {
                self.take();
                self.take();
                self.tokens.push(Token::PathSeparator);
            }
            (c, _) if c.is_alphabetic() || c == '_' => self.take_word_or_literal(),
            (c, _) if c.is_ascii_digit() => {
                self.take_word();
                self.tokens.push(Token::Other);
            }
            _ => {
                let sign = self.take();
                if !sign.is_whitespace() {
                    self.tokens.push(Token::Sign(sign));
                }
            }
        }
    }

    fn skip_block_comment(&mut self) {
        let mut depth = 0_u32;
        loop {
            match (self.peek(0), self.peek(1)) {
                ('/', '*') => depth += 1,
                ('*', '/') => depth -= 1,
                _ => {
                    self.at += 1;
                    assert!(self.at < self.chars.len(), "a comment does not end");
                    continue;
                }
            }
            self.at += 2;
            if depth == 0 {
                self.code.push(' ');
                return;
            }
        }
    }

    fn take_text(&mut self) {
        let mut text = String::new();
        self.take();
        while self.at < self.chars.len() {
            match self.take() {
                '"' => break,
                '\\' => text.push(self.take()),
                other => text.push(other),
            }
        }
        self.tokens.push(Token::Text(text));
    }

    fn take_raw_text(&mut self) {
        let mut hashes = 0;
        while self.peek(0) == '#' {
            self.take();
            hashes += 1;
        }
        self.take();
        let mut text = String::new();
        while self.at < self.chars.len() {
            if self.peek(0) == '"' && (1..=hashes).all(|ahead| self.peek(ahead) == '#') {
                (0..=hashes).for_each(|_| _ = self.take());
                break;
            }
            text.push(self.take());
        }
        self.tokens.push(Token::Text(text));
    }

    fn take_character_or_lifetime(&mut self) {
        self.take();
        if self.peek(0) == '\\' {
            self.take();
            self.take();
            while self.take() != '\'' {
                assert!(self.at < self.chars.len(), "a character does not end");
            }
        } else if self.peek(1) == '\'' {
            self.take();
            self.take();
        } else {
            self.take_word();
        }
        self.tokens.push(Token::Other);
    }

    fn take_word_or_literal(&mut self) {
        let word = self.take_word();
        match (word.as_str(), self.peek(0), self.peek(1)) {
            ("r" | "br" | "cr", '"', _) | ("r" | "br" | "cr", '#', '"' | '#') => self.take_raw_text(),
            ("b" | "c", '"', _) => self.take_text(),
            ("b", '\'', _) => self.take_character_or_lifetime(),
            // A raw identifier: the word itself comes next.
            ("r", '#', _) => _ = self.take(),
            _ => self.tokens.push(Token::Word(word)),
        }
    }
}

/// Collects the paths of a file and follows its modules with a body.
struct Paths<'a> {
    tokens: &'a [Token],
    at: usize,
    module: Vec<String>,
    found: Vec<Found>,
}

impl<'a> Paths<'a> {
    fn of(name: &str, tokens: &'a [Token], module: &[String]) -> Vec<Found> {
        let mut paths = Paths { tokens, at: 0, module: module.to_vec(), found: Vec::new() };
        // For each open brace, whether a module began there.
        let mut braces = Vec::new();
        while let Some(token) = tokens.get(paths.at) {
            match token {
                Token::Sign('{') => braces.push(false),
                Token::Sign('}') => {
                    let was_module = braces.pop().unwrap_or_else(|| panic!("{name}: more braces close than open"));
                    if was_module {
                        paths.module.pop();
                    }
                }
                Token::Word(word) => match (word.as_str(), paths.word(1)) {
                    ("mod", Some(inner)) if paths.is_sign(2, '{') => {
                        paths.module.push(inner.to_owned());
                        braces.push(true);
                        paths.at += 2;
                    }
                    ("pub", _) if paths.is_sign(1, '(') => paths.skip_visibility(),
                    // Here `self` is the crate, in whichever module.
                    ("extern", Some("crate")) if paths.word(2) == Some("self") => {
                        paths.found.push(Found { path: vec!["crate".to_owned()], is_import: true, is_glob: false });
                        paths.at += 2;
                    }
                    ("extern", Some("crate")) => {
                        paths.at += 2;
                        paths.tree(&[], true);
                        continue;
                    }
                    // `use<'a>` in a type is no import.
                    ("use", _) if !paths.is_sign(1, '<') => {
                        paths.at += 1;
                        paths.tree(&[], true);
                        continue;
                    }
                    _ => {
                        paths.tree(&[], false);
                        continue;
                    }
                },
                _ => {}
            }
            paths.at += 1;
        }
        assert!(braces.is_empty(), "{name}: a brace does not close");
        paths.found
    }

    fn word(&self, ahead: usize) -> Option<&'a str> {
        match self.tokens.get(self.at + ahead) {
            Some(Token::Word(word)) => Some(word),
            _ => None,
        }
    }

    fn is_sign(&self, ahead: usize, sign: char) -> bool {
        self.tokens.get(self.at + ahead) == Some(&Token::Sign(sign))
    }

    fn is_separator(&self) -> bool {
        self.tokens.get(self.at) == Some(&Token::PathSeparator)
    }

    /// Leaves `at` at the closing bracket of `pub(crate)` or `pub(in …)`, at `pub` before other brackets.
    fn skip_visibility(&mut self) {
        let is_scope = matches!(self.word(2), Some("crate" | "super" | "self")) && self.is_sign(3, ')');
        if is_scope || self.word(2) == Some("in") {
            while !self.is_sign(0, ')') && self.at < self.tokens.len() {
                self.at += 1;
            }
        }
    }

    /// Reads one path or tree of `use`, and what follows `prefix` in a group.
    fn tree(&mut self, prefix: &[String], is_import: bool) {
        let mut path = prefix.to_vec();
        let mut is_glob = false;
        if self.is_separator() {
            self.at += 1;
        }
        loop {
            if is_import && self.is_sign(0, '{') {
                return self.group(&path);
            }
            if is_import && self.is_sign(0, '*') {
                is_glob = true;
                self.at += 1;
                break;
            }
            let Some(word) = self.word(0) else { break };
            path.push(word.to_owned());
            self.at += 1;
            if !self.is_separator() {
                break;
            }
            self.at += 1;
        }
        if is_import && self.word(0) == Some("as") {
            self.at += 2;
        }
        // Single words that are no import are variables, keywords and types.
        if is_import || path.len() > 1 {
            self.found.push(Found { path: self.resolve(&path), is_import, is_glob });
        }
    }

    fn group(&mut self, prefix: &[String]) {
        self.at += 1;
        while self.at < self.tokens.len() && !self.is_sign(0, '}') {
            let before = self.at;
            self.tree(prefix, true);
            if self.is_sign(0, ',') || self.at == before {
                self.at += 1;
            }
        }
        self.at += 1;
    }

    fn resolve(&self, path: &[String]) -> Vec<String> {
        let mut absolute = Vec::new();
        let mut is_local = false;
        for (at, part) in path.iter().enumerate() {
            match (at, part.as_str()) {
                // The binaries and the tests in documents name the library.
                (0, "crate" | "ryokan") => is_local = true,
                (0, "self" | "super") => {
                    is_local = true;
                    absolute.clone_from(&self.module);
                    if part == "super" {
                        absolute.pop();
                    }
                }
                (_, "super") => drop(absolute.pop()),
                (_, "self") => {}
                _ => absolute.push(part.clone()),
            }
        }
        if is_local {
            absolute.insert(0, "crate".to_owned());
        }
        absolute
    }
}
