//! Deserialises the text to [`Config`] and reports every malformed value with its line.
//!
//! Deserialisation stops at the first error. To report all of them, the faulty key is removed and
//! the rest is read again until it succeeds. Each round removes a key, so the loop ends.

use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use super::Config;
use super::problem::{Fault, Problem};
use crate::core::nearest::nearest;

/// Maximum number of reported problems per file.
const PROBLEMS: usize = 50;

/// A parsed file with the lines of its values.
pub(super) struct Document<'t> {
    text: &'t str,
    table: Spanned<DeTable<'t>>,
}

impl<'t> Document<'t> {
    /// Parses TOML.
    ///
    /// # Errors
    /// The line and the message if the text is not TOML.
    pub(super) fn parse(text: &'t str) -> Result<Self, (usize, Fault)> {
        match DeTable::parse(text) {
            Ok(table) => Ok(Self { text, table }),
            Err(e) => Err((line(text, e.span()), Fault::new(&[], e.message()))),
        }
    }

    /// Deserialises the keys. Faulty ones are reported and keep their defaults.
    pub(super) fn read(&self) -> (Config, Vec<Fault>) {
        let mut table = self.table.clone();
        let mut faults = Vec::new();
        loop {
            let error = match Config::deserialize(Deserializer::from(table.clone())) {
                Ok(config) => return (config, faults),
                Err(error) => error,
            };
            let key = error.span().and_then(|span| locate(table.get_ref(), &span)).unwrap_or_default();
            faults.push(explain(error.message(), &key));
            if key.is_empty() || faults.len() >= PROBLEMS {
                return (Config::default(), faults);
            }
            remove(table.get_mut(), &key);
        }
    }

    /// Whether the file contains the key.
    pub(super) fn has(&self, key: &[&str]) -> bool {
        let Some((last, tables)) = key.split_last() else { return false };
        let mut table = self.table.get_ref();
        for part in tables {
            match table.get(*part).map(Spanned::get_ref) {
                Some(DeValue::Table(inner)) => table = inner,
                _ => return false,
            }
        }
        table.contains_key(*last)
    }

    /// The problem of a fault in this file.
    pub(super) fn place(&self, fault: Fault, file: &Path) -> Problem {
        let line = self.line_of(&fault.key);
        fault.at(file, line)
    }

    /// The line of a key, or of the nearest enclosing table; 0 if there is none.
    fn line_of(&self, key: &[String]) -> usize {
        let mut table = self.table.get_ref();
        let mut found = 0;
        for part in key {
            let Some((name, value)) = table.iter().find(|(name, _)| name.get_ref() == part) else { break };
            found = line(self.text, Some(name.span()));
            match value.get_ref() {
                DeValue::Table(inner) => table = inner,
                _ => break,
            }
        }
        found
    }
}

fn line(text: &str, span: Option<Range<usize>>) -> usize {
    span.map_or(0, |span| 1 + text.bytes().take(span.start).filter(|byte| *byte == b'\n').count())
}

/// The innermost key at `span`, which is the key itself or lies in its value.
fn locate(table: &DeTable<'_>, span: &Range<usize>) -> Option<Vec<String>> {
    table.iter().find_map(|(name, value)| {
        let below = match value.get_ref() {
            DeValue::Table(inner) => locate(inner, span),
            _ => None,
        };
        let own = || {
            let around = value.span();
            (name.span() == *span || (around.start <= span.start && span.end <= around.end)).then(Vec::new)
        };
        below.or_else(own).map(|mut key| {
            key.insert(0, name.get_ref().clone().into_owned());
            key
        })
    })
}

fn remove(table: &mut DeTable<'_>, key: &[String]) {
    match key {
        [] => {}
        [last] => {
            table.remove(last.as_str());
        }
        [first, rest @ ..] => {
            if let Some(DeValue::Table(inner)) = table.get_mut(first.as_str()).map(Spanned::get_mut) {
                remove(inner, rest);
            }
        }
    }
}

/// Rewords serde's message: the allowed values and the probable intention.
fn explain(message: &str, key: &[String]) -> Fault {
    let fault = |what: String| Fault { key: key.to_vec(), what, hint: String::new() };
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let Some((got, allowed)) = quoted.split_first() else { return fault(message.to_owned()) };
    let what = if message.starts_with("unknown field") {
        "unknown key".to_owned()
    } else if message.starts_with("unknown variant") {
        format!("{got:?} is not possible")
    } else {
        return fault(message.to_owned());
    };
    let meant = nearest(got, allowed).map(|near| format!("did you mean {near}? ")).unwrap_or_default();
    fault(what).hint(format!("{meant}possible: {}", allowed.join(", ")))
}
