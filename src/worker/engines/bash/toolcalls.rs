//! Calls of MCP tools by code: functions with the tools' names send requests here, one at a time.

use std::collections::VecDeque;

use serde_json::Value as Json;

use super::execute::tell;
use super::link::{Link, Stop};
use super::shell::Shell;
use crate::core::limits;
use crate::core::value::Value;
use crate::link::frames::{DynamicTool, Event};

/// The tool calls of one execution.
#[derive(Default)]
pub struct Calls {
    asked: Vec<u8>,
    waiting: VecDeque<u64>,
    answers: Vec<u8>,
    last: u64,
}

impl Calls {
    /// Whether there was a call.
    pub fn any(&self) -> bool {
        self.last > 0 || !self.asked.is_empty()
    }

    /// Whether an answer waits to be written.
    pub fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Reads a function's request and forwards it.
    ///
    /// # Errors
    /// If init is gone.
    pub fn read(&mut self, shell: &Shell, tools: &[DynamicTool], exec: u64, link: &mut Link) -> Result<(), Stop> {
        shell.take_calls(&mut self.asked)?;
        if self.asked.len() > limits::VALUE_BYTES * 2 {
            self.asked.clear();
            self.fail("the arguments are too large");
            self.write(shell);
            return Ok(());
        }
        while let Some((name, words)) = self.next_asked() {
            let Some(tool) = tools.iter().find(|tool| tool.name == name) else {
                self.fail("there is no such tool now");
                continue;
            };
            let event = match arguments(&tool.schema, &words) {
                Ok(args) => {
                    self.last += 1;
                    Event::ToolCall { call: self.last, exec, name, args: args.to_json() }
                }
                Err(message) => {
                    self.fail(&message);
                    continue;
                }
            };
            self.waiting.push_back(self.last);
            if let Err(stop) = tell(link, &event) {
                if stop != Stop::Protocol {
                    return Err(stop);
                }
                // Larger than a frame.
                self.waiting.pop_back();
                self.fail("the arguments are too large");
            }
        }
        self.write(shell);
        Ok(())
    }

    fn next_asked(&mut self) -> Option<(String, Vec<Vec<u8>>)> {
        let mut parts = self.asked.split_inclusive(|b| *b == 0).take_while(|part| part.ends_with(&[0]));
        let mut taken = 0;
        let mut next = || {
            let part = parts.next()?;
            taken += part.len();
            Some(part[..part.len() - 1].to_vec())
        };
        let name = String::from_utf8_lossy(&next()?).into_owned();
        // An invalid number belongs to no call and is skipped.
        let count = String::from_utf8_lossy(&next()?).parse::<usize>().unwrap_or(0);
        let mut words = Vec::new();
        for _ in 0..count {
            words.push(next()?);
        }
        self.asked.drain(..taken);
        Some((name, words))
    }

    /// Takes init's answer; an answer to an unknown call is dropped.
    pub fn answer(&mut self, call: u64, ok: bool, value: &Json, text: &str, message: &str) {
        if self.waiting.front() != Some(&call) {
            return;
        }
        self.waiting.pop_front();
        match (ok, Value::from_json(value)) {
            (true, Ok(value)) => self.say('+', &shown(&value, text)),
            (true, Err(error)) => self.fail(&format!("the result is malformed: {error}")),
            (false, _) => self.fail(message),
        }
    }

    fn fail(&mut self, message: &str) {
        self.say('-', message);
    }

    fn say(&mut self, how: char, text: &str) {
        self.answers.push(how as u8);
        // bash's texts contain no zero byte.
        self.answers.extend(text.bytes().filter(|b| *b != 0));
        self.answers.push(0);
    }

    /// Writes as much as there is room for.
    pub fn write(&mut self, shell: &Shell) {
        while !self.answers.is_empty() {
            match shell.answer(&self.answers) {
                0 => return,
                count => drop(self.answers.drain(..count)),
            }
        }
    }
}

/// A tool's answer as text: its own, or its value.
pub fn shown(value: &Value, text: &str) -> String {
    let mut text = match (text.is_empty(), value) {
        (false, _) => text.to_owned(),
        (true, Value::Null) => String::new(),
        (true, Value::String(text)) => text.clone(),
        (true, other) => other.to_plain_json().to_string(),
    };
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// Converts words to a tool's arguments: one JSON object, or `name=value` words typed by the tool's
/// schema.
fn arguments(schema: &Json, words: &[Vec<u8>]) -> Result<Value, String> {
    let texts: Vec<&str> = words
        .iter()
        .map(|word| std::str::from_utf8(word))
        .collect::<Result<_, _>>()
        .map_err(|_| "an argument is not UTF-8")?;
    if let [only] = texts[..]
        && only.trim_start().starts_with('{')
    {
        return match Value::from_plain_text(only) {
            Ok(value @ Value::Object(_)) => Ok(value),
            Ok(_) => Err("the argument is no JSON object".into()),
            Err(error) => Err(format!("the argument is no JSON object: {error}")),
        };
    }
    let mut fields = Vec::new();
    for text in texts {
        let (name, value) = text.split_once('=').ok_or("arguments are one JSON object, or name=value for each")?;
        let kind = schema["properties"][name]["type"].as_str().unwrap_or("string");
        let value = match kind {
            "string" => Value::String(value.to_owned()),
            _ => Value::from_plain_text(value).unwrap_or_else(|_| Value::String(value.to_owned())),
        };
        fields.push((name.to_owned(), value));
    }
    Ok(Value::Object(fields))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tool_arguments_are_parsed() {
        let schema = json!({ "properties": { "n": { "type": "integer" }, "on": { "type": "boolean" }, "s": { "type": "string" } } });
        let read = |words: &[&str]| {
            arguments(&schema, &words.iter().map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>())
                .map(|value| value.to_plain_json())
        };
        assert_eq!(
            read(&["n=4", "on=true", "s=5", "other=a=b"]),
            Ok(json!({ "n": 4, "on": true, "s": "5", "other": "a=b" }))
        );
        assert_eq!(read(&[r#" {"deep": [1]}"#]), Ok(json!({ "deep": [1] })));
        assert_eq!(read(&[]), Ok(json!({})));
        assert!(read(&["word"]).is_err());
        assert!(read(&["{broken"]).is_err());
    }
}
