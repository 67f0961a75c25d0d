//! The value of an execution's last expression, as the engine's own prompt would show it.

use super::plain;
use crate::core::engine::EngineName;
use crate::core::exec::{ExecResult, OutputNode};
use crate::core::value::Value;

/// The text to print after an execution's output; `None` for engines that print their results
/// themselves.
pub fn value_of(result: &ExecResult, engine: EngineName) -> Option<String> {
    match engine {
        EngineName::Kaish | EngineName::Bash => None,
        EngineName::Python => repr_or(result, repr),
        EngineName::Node => repr_or(result, |value| value.to_json().to_string()),
    }
}

/// The engine's own text of the value, or one derived from it.
fn repr_or(result: &ExecResult, repr: impl Fn(&Value) -> String) -> Option<String> {
    let repr = match (&result.end.output, &result.end.value) {
        (Some(output), _) if !output.root.is_empty() => lines(&output.root),
        (_, None | Some(Value::Null)) => return None,
        (_, Some(value)) => repr(value),
    };
    (!repr.is_empty()).then(|| format!("{}\n", plain(repr.trim_end_matches('\n'))))
}

fn lines(nodes: &[OutputNode]) -> String {
    let line = |node: &OutputNode| if node.text.is_empty() { node.name.clone() } else { node.text.clone() };
    nodes.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A value in Python's notation, for results without the engine's own text.
fn repr(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Int(i) => i.to_string(),
        Value::Float(f) if f.is_nan() => "nan".into(),
        Value::Float(f) => format!("{f:?}"),
        Value::String(text) => quoted(text),
        Value::BigInt(digits) => digits.clone(),
        Value::Array(items) => format!("[{}]", items.iter().map(repr).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => {
            let fields: Vec<String> = fields.iter().map(|(key, v)| format!("{}: {}", quoted(key), repr(v))).collect();
            format!("{{{}}}", fields.join(", "))
        }
        Value::Bytes(bytes) => format!("b'{}'", bytes.escape_ascii()),
        Value::Blob(blob) => format!("<blob {} of {} bytes>", blob.hash, blob.size),
        Value::Opaque { repr, .. } => repr.clone(),
    }
}

fn quoted(text: &str) -> String {
    let inner: String = text
        .chars()
        .map(|c| match c {
            '\'' => "\\'".into(),
            '\\' => "\\\\".into(),
            '\n' => "\\n".into(),
            c => c.to_string(),
        })
        .collect();
    format!("'{inner}'")
}
