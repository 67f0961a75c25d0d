//! Sources of code: the command line, a file, or standard input.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;

use super::failure::Failure;
use crate::core::engine::EngineName;
use crate::core::limits;
use crate::core::quantity::format_size;

/// The code to execute.
#[derive(Debug, Clone, Default, Args)]
pub struct CodeArgs {
    /// The code; - reads standard input
    #[arg(value_name = "CODE", conflicts_with = "file")]
    pub code: Option<String>,
    /// Read the code from a file
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
}

/// Code, and the language that its source indicates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The code.
    pub code: String,
    /// The language indicated by the file's name or first line.
    pub language: Language,
}

/// The language of code, as indicated by its file's name or first line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Language {
    /// Not indicated: the kernel's own engine executes it.
    Unsaid,
    /// The language of this engine.
    Engine(EngineName),
    /// A language without an engine, as the file's name or first line writes it.
    Foreign(String),
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
            return Ok(Source { language: Language::of_first_line(&code), code });
        }
        if let Some(path) = &self.file {
            let shown = path.display();
            let file = std::fs::File::open(path).map_err(|e| Failure::of_file("read the code from", path, &e))?;
            let code = text(file, &shown.to_string())?;
            return Ok(Source { language: Language::of_file(path, &code), code });
        }
        match &self.code {
            Some(code) => Ok(Source { code: code.clone(), language: Language::Unsaid }),
            None => Err(Failure::usage("there is no code to execute", "give CODE, -f FILE, or - for standard input")),
        }
    }
}

fn text(from: impl Read, what: &str) -> Result<String, Failure> {
    let wrong = |why: &dyn std::fmt::Display, hint: &str| Failure::usage(format!("code from {what}: {why}"), hint);
    let mut bytes = Vec::new();
    let read = from.take(limits::CODE_BYTES as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|e| wrong(&e, "name a file that can be read, or - for standard input"))?;
    if bytes.len() > limits::CODE_BYTES {
        let most = format_size(limits::CODE_BYTES as u64);
        let hint = "put it into a file in the kernel's workspace, and give code that runs or reads that file";
        return Err(wrong(&format!("more than {most}, which is the most that code may have"), hint));
    }
    String::from_utf8(bytes).map_err(|e| wrong(&e, "code is UTF-8 text"))
}

impl Language {
    /// The language of a file: by its extension, or by its first line if the extension is missing
    /// or unknown.
    fn of_file(path: &Path, code: &str) -> Language {
        let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
        match extension.as_deref() {
            Some("py" | "pyw") => Language::Engine(EngineName::Python),
            Some("bash") => Language::Engine(EngineName::Bash),
            Some("js" | "mjs" | "cjs") => Language::Engine(EngineName::Node),
            // A first line that names bash overrides the extension.
            Some("sh") if Language::of_first_line(code) == Language::Engine(EngineName::Bash) => {
                Language::Engine(EngineName::Bash)
            }
            Some("sh" | "kai" | "kaish") => Language::Engine(EngineName::Kaish),
            None => Language::of_first_line(code),
            Some(extension) => match Language::of_first_line(code) {
                Language::Unsaid => Language::Foreign(format!("the extension .{extension}")),
                said => said,
            },
        }
    }

    fn of_first_line(code: &str) -> Language {
        let Some(interpreter) = interpreter(code) else { return Language::Unsaid };
        match interpreter.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.') {
            "python" => Language::Engine(EngineName::Python),
            "kaish" | "sh" => Language::Engine(EngineName::Kaish),
            "bash" => Language::Engine(EngineName::Bash),
            "node" | "nodejs" => Language::Engine(EngineName::Node),
            _ => Language::Foreign(format!("the first line's interpreter {interpreter}")),
        }
    }

    /// The engine to use if the user names none.
    ///
    /// # Errors
    /// For a language without an engine: any choice would be a guess.
    pub fn engine(&self) -> Result<Option<EngineName>, Failure> {
        match self {
            Language::Unsaid => Ok(None),
            Language::Engine(engine) => Ok(Some(*engine)),
            Language::Foreign(said) => {
                let names: Vec<&str> = EngineName::ALL.iter().map(|engine| engine.name()).collect();
                let hint = format!("if it is code of an engine, name that: --engine {}", names.join(" or --engine "));
                Err(Failure::usage(format!("no engine goes with {said}"), hint))
            }
        }
    }
}

fn interpreter(code: &str) -> Option<&str> {
    let first = code.strip_prefix("#!")?.lines().next()?;
    let mut words = first.split_whitespace();
    let program = words.next()?.rsplit('/').next()?;
    if program == "env" { words.find(|word| !word.starts_with('-')) } else { Some(program) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_by_name_or_shebang() {
        let (python, kaish) = (Language::Engine(EngineName::Python), Language::Engine(EngineName::Kaish));
        let (bash, node) = (Language::Engine(EngineName::Bash), Language::Engine(EngineName::Node));
        let foreign = |said: &str| Language::Foreign(said.into());
        for (name, code, language) in [
            ("a.py", "", python.clone()),
            ("dir.py/a.kai", "", kaish.clone()),
            ("a.sh", "echo", kaish.clone()),
            ("a.sh", "#!/bin/bash\n", bash.clone()),
            ("a.bash", "", bash.clone()),
            ("py", "", Language::Unsaid),
            ("py", "#!/usr/bin/python3\n", python.clone()),
            ("a.mjs", "1", node.clone()),
            ("a.rb", "1", foreign("the extension .rb")),
            ("a.tool", "#!/usr/bin/env python3\n", python.clone()),
            ("a.tool", "#!/usr/bin/env node\n", node.clone()),
            ("a.tool", "#!/usr/bin/env ruby\n", foreign("the first line's interpreter ruby")),
        ] {
            assert_eq!(Language::of_file(Path::new(name), code), language, "{name} {code:?}");
        }
        for (code, language) in [
            ("#!/usr/bin/env python3\n1", python.clone()),
            ("#!/usr/bin/env -S python3.12 -u\n1", python.clone()),
            ("#!/usr/bin/python\n", python),
            ("#!/usr/local/bin/kaish", kaish.clone()),
            ("#!/bin/sh\n", kaish),
            ("#!/usr/bin/env bash\n", bash),
            ("#!/usr/bin/nodejs\n", node),
            ("#!/usr/bin/perl\n", foreign("the first line's interpreter perl")),
            ("print('#!python')", Language::Unsaid),
            ("#!", Language::Unsaid),
        ] {
            assert_eq!(Language::of_first_line(code), language, "{code:?}");
        }
    }
}
