//! Where code comes from: the command line, a file, or standard input.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;

use super::failure::Failure;
use crate::core::engine::EngineName;
use crate::core::limits;

/// What to execute.
#[derive(Debug, Clone, Default, Args)]
pub struct CodeArgs {
    /// The code; - reads it from standard input
    #[arg(value_name = "CODE", conflicts_with = "file")]
    pub code: Option<String>,
    /// Read the code from a file
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
}

/// Code, and what its source says about its language.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The code.
    pub code: String,
    /// The engine that its file's name or first line asks for.
    pub engine: Option<EngineName>,
}

impl CodeArgs {
    /// Whether standard input is the code.
    pub fn reads_stdin(&self) -> bool {
        self.file.is_none() && self.code.as_deref() == Some("-") || self.file.as_deref() == Some(Path::new("-"))
    }

    /// Reads the code.
    pub fn read(&self) -> Result<Source, Failure> {
        if self.reads_stdin() {
            let code = text(std::io::stdin().lock(), "standard input")?;
            return Ok(Source { engine: engine_of_shebang(&code), code });
        }
        if let Some(path) = &self.file {
            let shown = path.display();
            let file = std::fs::File::open(path).map_err(|e| {
                Failure::usage(format!("could not read the code from {shown}: {e}"), "name a file of this host")
            })?;
            let code = text(file, &shown.to_string())?;
            return Ok(Source { engine: engine_of_name(path).or_else(|| engine_of_shebang(&code)), code });
        }
        match &self.code {
            Some(code) => Ok(Source { code: code.clone(), engine: None }),
            None => Err(Failure::usage("there is no code to execute", "give CODE, -f FILE, or - for standard input")),
        }
    }
}

fn text(from: impl Read, what: &str) -> Result<String, Failure> {
    let wrong = |why: &dyn std::fmt::Display| Failure::usage(format!("code from {what}: {why}"), "code is UTF-8 text");
    let mut bytes = Vec::new();
    from.take(limits::CODE_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(|e| wrong(&e))?;
    if bytes.len() > limits::CODE_BYTES {
        return Err(wrong(&format!("more than {} bytes", limits::CODE_BYTES)));
    }
    String::from_utf8(bytes).map_err(|e| wrong(&e))
}

fn engine_of_name(path: &Path) -> Option<EngineName> {
    match path.extension()?.to_str()? {
        "py" | "pyw" => Some(EngineName::Python),
        "kai" | "kaish" => Some(EngineName::Kaish),
        _ => None,
    }
}

fn engine_of_shebang(code: &str) -> Option<EngineName> {
    let first = code.strip_prefix("#!")?.lines().next()?;
    let mut words = first.split_whitespace();
    let program = words.next()?.rsplit('/').next()?;
    let interpreter = if program == "env" { words.find(|word| !word.starts_with('-'))? } else { program };
    match interpreter.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.') {
        "python" => Some(EngineName::Python),
        "kaish" => Some(EngineName::Kaish),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_found_in_names_and_first_lines() {
        for (name, engine) in [
            ("a.py", Some(EngineName::Python)),
            ("dir.py/a.kai", Some(EngineName::Kaish)),
            ("a.sh", None),
            ("py", None),
        ] {
            assert_eq!(engine_of_name(Path::new(name)), engine, "{name}");
        }
        for (code, engine) in [
            ("#!/usr/bin/env python3\n1", Some(EngineName::Python)),
            ("#!/usr/bin/env -S python3.12 -u\n1", Some(EngineName::Python)),
            ("#!/usr/bin/python\n", Some(EngineName::Python)),
            ("#!/usr/local/bin/kaish", Some(EngineName::Kaish)),
            ("#!/bin/sh\n", None),
            ("print('#!python')", None),
            ("#!", None),
        ] {
            assert_eq!(engine_of_shebang(code), engine, "{code:?}");
        }
    }
}
