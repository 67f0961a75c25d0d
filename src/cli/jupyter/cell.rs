//! The output of one cell: from ryokan's events to Jupyter's messages.

use std::collections::{BTreeMap, HashSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value as Json, json};

use super::super::render;
use crate::core::engine::EngineName;
use crate::core::exec::{ExecResult, ExecStatus, OutputEvent};

/// Forms that a browser shows without running anything of theirs. Everything else could be a script, which would run
/// with the rights of Jupyter's page: outside of every sandbox.
const PASSIVE: [&str; 5] = ["text/plain", "image/png", "image/jpeg", "image/gif", "application/json"];

/// How a traceback of Python begins.
const TRACEBACK: [&str; 2] = ["Traceback (most recent call last):", "  File \""];

/// Bytes of a traceback that are held back until the end.
const HELD_BYTES: usize = 256 << 10;

/// A message for the front ends.
pub type Shown = (&'static str, Json);

/// The output of one cell.
#[derive(Default)]
pub struct Cell {
    /// Whether active forms (HTML, scripts) are passed on.
    with_html: bool,
    /// Bytes of both streams so far: where a new daemon continues.
    pub offset: u64,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// The end of stderr that looks like a traceback.
    held: String,
    /// Forms of one object.
    forms: BTreeMap<String, Vec<u8>>,
    /// Digests of the forms so far.
    seen: HashSet<[u8; 32]>,
    /// After a reconnection: forms so far that may come again.
    repeated: HashSet<[u8; 32]>,
}

/// How a cell ended.
pub enum Ended {
    /// Well.
    Ok,
    /// With an error: name, value, traceback.
    Error(Json),
}

impl Cell {
    /// Prepares for a cell's output.
    pub fn new(with_html: bool) -> Cell {
        Cell { with_html, ..Cell::default() }
    }

    /// Prepares for the same execution through a new daemon.
    pub fn reconnected(&mut self) {
        self.repeated = self.seen.clone();
    }

    /// Takes an event; returns what is to be shown.
    pub fn take(&mut self, event: OutputEvent) -> Vec<Shown> {
        let mut shown = Vec::new();
        match event {
            OutputEvent::Stdout(bytes) => {
                self.offset += bytes.len() as u64;
                self.flush_forms(&mut shown);
                self.flush_held(&mut shown);
                shown.extend(stream("stdout", text(&mut self.stdout, &bytes)));
            }
            OutputEvent::Stderr(bytes) => {
                self.offset += bytes.len() as u64;
                self.flush_forms(&mut shown);
                let text = text(&mut self.stderr, &bytes);
                self.take_stderr(text, &mut shown);
            }
            OutputEvent::Display { mime, data } => self.take_form(mime, data, &mut shown),
            OutputEvent::Truncated(bytes) => {
                shown.extend(stream("stderr", format!("[{bytes} bytes of output were dropped]\n")));
            }
            OutputEvent::Structured(_) | OutputEvent::ExitCode(_) => {}
        }
        shown
    }

    fn take_stderr(&mut self, text: String, shown: &mut Vec<Shown>) {
        if !self.held.is_empty() {
            self.held.push_str(&text);
            if self.held.len() > HELD_BYTES {
                self.flush_held(shown);
            }
            return;
        }
        let mut begins = text.split_inclusive('\n').scan(0, |at, line| {
            let begin = *at;
            *at += line.len();
            Some((begin, line))
        });
        let traceback = begins.find(|(_, line)| TRACEBACK.iter().any(|begin| line.starts_with(begin)));
        let at = traceback.map_or(text.len(), |(at, _)| at);
        shown.extend(stream("stderr", text[..at].to_owned()));
        text[at..].clone_into(&mut self.held);
    }

    fn take_form(&mut self, mime: String, data: Vec<u8>, shown: &mut Vec<Shown>) {
        let mut hasher = blake3::Hasher::new();
        hasher.update(mime.as_bytes()).update(&[0]).update(&data);
        let digest = *hasher.finalize().as_bytes();
        if self.repeated.remove(&digest) {
            return;
        }
        self.seen.insert(digest);
        if self.forms.contains_key(&mime) {
            self.flush_forms(shown);
        }
        let is_last = mime == "text/plain";
        self.forms.insert(mime, data);
        if is_last {
            self.flush_forms(shown);
        }
    }

    fn flush_held(&mut self, shown: &mut Vec<Shown>) {
        shown.extend(stream("stderr", std::mem::take(&mut self.held)));
    }

    fn flush_forms(&mut self, shown: &mut Vec<Shown>) {
        let data = self.bundle();
        if !data.is_empty() {
            shown.push(("display_data", json!({ "data": data, "metadata": {}, "transient": {} })));
        }
    }

    /// The forms of the object, as far as they may be shown.
    fn bundle(&mut self) -> Map<String, Json> {
        let forms = std::mem::take(&mut self.forms);
        let passed = forms.into_iter().filter(|(mime, _)| self.with_html || PASSIVE.contains(&mime.as_str()));
        passed.map(|(mime, data)| (mime.clone(), encoded(&mime, &data))).collect()
    }

    /// The end; `count` is the cell's number.
    pub fn end(&mut self, result: &ExecResult, engine: EngineName, count: u64) -> (Vec<Shown>, Ended) {
        let mut shown = Vec::new();
        for (name, rest) in [("stdout", std::mem::take(&mut self.stdout)), ("stderr", std::mem::take(&mut self.stderr))]
        {
            shown.extend(stream(name, String::from_utf8_lossy(&rest).into_owned()));
        }
        if result.end.status == ExecStatus::Done && result.end.code == 0 {
            self.flush_held(&mut shown);
            match render::value_of(result, engine) {
                Some(value) => {
                    let mut data = self.bundle();
                    data.entry("text/plain").or_insert_with(|| json!(value.trim_end_matches('\n')));
                    let content = json!({ "execution_count": count, "data": data, "metadata": {} });
                    shown.push(("execute_result", content));
                }
                None => self.flush_forms(&mut shown),
            }
            return (shown, Ended::Ok);
        }
        self.flush_forms(&mut shown);
        let held = std::mem::take(&mut self.held);
        let error = error(result, held.trim_end_matches('\n'));
        shown.push(("error", error.clone()));
        (shown, Ended::Error(error))
    }
}

/// Name, value and traceback of a failed execution.
fn error(result: &ExecResult, traceback: &str) -> Json {
    let said = match result.end.err.as_str() {
        "" => format!("exit code {}", result.end.code),
        said => said.to_owned(),
    };
    let is_name = |name: &&str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "._".contains(c));
    let (name, value) = match said.split_once(": ").filter(|(name, _)| is_name(name)) {
        Some((name, value)) => (name.to_owned(), value.to_owned()),
        None if is_name(&said.as_str()) => (said.clone(), String::new()),
        None => (result.end.status.name().to_owned(), said.clone()),
    };
    let traceback: Vec<&str> = if traceback.is_empty() { vec![&said] } else { traceback.split('\n').collect() };
    json!({ "ename": name, "evalue": value, "traceback": traceback })
}

fn stream(name: &str, text: String) -> Option<Shown> {
    (!text.is_empty()).then(|| ("stream", json!({ "name": name, "text": text })))
}

/// The text of a stream so far, without a character that is not whole yet.
fn text(rest: &mut Vec<u8>, bytes: &[u8]) -> String {
    rest.extend_from_slice(bytes);
    let whole = match std::str::from_utf8(rest) {
        Ok(_) => rest.len(),
        // An invalid byte is shown as such; only an unfinished character waits.
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        Err(_) => {
            let cut = rest.iter().rev().take(3).position(|byte| *byte >= 0xc0).map_or(0, |back| back + 1);
            let last = &rest[rest.len() - cut..];
            let is_cut = std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
            rest.len() - if is_cut { cut } else { 0 }
        }
    };
    let later = rest.split_off(whole);
    String::from_utf8_lossy(&std::mem::replace(rest, later)).into_owned()
}

fn encoded(mime: &str, data: &[u8]) -> Json {
    let is_text = mime.starts_with("text/") || mime.ends_with("+xml") || mime.ends_with("javascript");
    match mime {
        _ if mime.ends_with("json") => serde_json::from_slice(data).unwrap_or_default(),
        _ if is_text => json!(String::from_utf8_lossy(data)),
        _ => json!(STANDARD.encode(data)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams(shown: &[Shown]) -> String {
        shown.iter().filter_map(|(_, content)| content["text"].as_str()).collect()
    }

    #[test]
    fn split_characters_are_joined() {
        let (mut cell, mut seen) = (Cell::default(), String::new());
        for byte in "añ€😀\n".bytes() {
            seen += &streams(&cell.take(OutputEvent::Stdout(vec![byte])));
        }
        assert_eq!(seen, "añ€😀\n");
        assert_eq!(streams(&cell.take(OutputEvent::Stdout(vec![b'a', 0xff, 0xe2, 0x82]))), "a\u{fffd}");
        assert_eq!(streams(&cell.take(OutputEvent::Stdout(vec![0xac]))), "€");
        assert_eq!(cell.offset, 16);
    }

    #[test]
    fn active_forms_are_withheld() {
        for with_html in [false, true] {
            let mut cell = Cell { with_html, ..Cell::default() };
            let form = |mime: &str| OutputEvent::Display { mime: mime.into(), data: b"<script>".to_vec() };
            for mime in ["text/html", "image/svg+xml", "application/javascript", "text/markdown", "text/latex", "x/y"] {
                assert!(cell.take(form(mime)).is_empty());
            }
            let shown = cell.take(form("text/plain"));
            let data = shown[0].1["data"].as_object().expect("data").clone();
            assert_eq!(data.len(), if with_html { 7 } else { 1 }, "{data:?}");
        }
    }

    #[test]
    fn repeated_forms_are_shown_once() {
        let mut cell = Cell::default();
        let form = || OutputEvent::Display { mime: "text/plain".into(), data: b"1".to_vec() };
        assert_eq!(cell.take(form()).len(), 1);
        assert_eq!(cell.take(form()).len(), 1, "the code shows it twice");
        cell.reconnected();
        assert_eq!(cell.take(form()).len(), 0);
    }

    #[test]
    fn only_tracebacks_are_held_back() {
        let mut cell = Cell::default();
        assert_eq!(streams(&cell.take(OutputEvent::Stderr(b"10%\r".to_vec()))), "10%\r");
        let traceback = "warning\nTraceback (most recent call last):\n  File \"x\"\n";
        assert_eq!(streams(&cell.take(OutputEvent::Stderr(traceback.into()))), "warning\n");
        assert!(cell.take(OutputEvent::Stderr(b"ValueError: 1\n".to_vec())).is_empty());
        assert!(streams(&cell.take(OutputEvent::Stdout(b"on".to_vec()))).ends_with("ValueError: 1\non"));
    }
}
