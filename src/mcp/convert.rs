//! Value conversion: a call's arguments become JSON, a tool's answer becomes a [`Value`] and text.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rmcp::model::{CallToolResult, ContentBlock, JsonObject, ResourceContents};
use serde_json::{Number, Value as Json, json};

use crate::core::limits;
use crate::core::value::Value;

/// A tool's answer.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolOutput {
    /// The structured answer if present; else the only text; else the list of all parts, where a
    /// text is a string and any other part an object with `type` and decoded bytes.
    pub value: Value,
    /// The whole answer for people: texts unchanged, other parts named in brackets.
    pub text: String,
}

/// The named arguments of a call. Bytes become base64, as in MCP.
///
/// # Errors
/// If a value cannot be sent or is too large.
pub(super) fn arguments(args: &Value) -> Result<JsonObject, String> {
    if weight(args) > limits::VALUE_BYTES {
        return Err(format!("arguments are larger than {} bytes", limits::VALUE_BYTES));
    }
    match args {
        Value::Null => Ok(JsonObject::new()),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| Ok((name.clone(), argument(value, limits::VALUE_DEPTH)?))).collect()
        }
        _ => Err("an MCP tool takes named arguments: give an object".into()),
    }
}

fn argument(value: &Value, depth: usize) -> Result<Json, String> {
    let depth = depth.checked_sub(1).ok_or("arguments are nested too deep")?;
    Ok(match value {
        Value::Array(items) => items.iter().map(|item| argument(item, depth)).collect::<Result<_, _>>()?,
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| Ok((name.clone(), argument(value, depth)?)));
            Json::Object(fields.collect::<Result<_, String>>()?)
        }
        Value::Bytes(bytes) => Json::String(BASE64.encode(bytes)),
        Value::BigInt(digits) => digits.parse::<u64>().map_or_else(|_| json!(digits), |number| json!(number)),
        Value::Float(float) if !float.is_finite() => return Err(format!("JSON has no {float}")),
        Value::Float(float) => Number::from_f64(*float).map_or(Json::Null, Json::Number),
        Value::Opaque { type_name, .. } => return Err(format!("a live object of type {type_name} cannot be sent")),
        Value::Null | Value::Bool(_) | Value::Int(_) | Value::String(_) | Value::Blob(_) => value.to_plain_json(),
    })
}

/// Converts a tool's answer.
///
/// # Errors
/// If the answer is too large or too deep for a value.
pub(super) fn output(result: CallToolResult) -> Result<ToolOutput, String> {
    let text = result.content.iter().map(text_of).collect::<Vec<_>>().join("\n");
    let value = match (result.structured_content, <[ContentBlock; 1]>::try_from(result.content)) {
        (Some(json), _) if depth_of(&json) > limits::VALUE_DEPTH => {
            return Err(format!("answered with a value nested deeper than {} levels", limits::VALUE_DEPTH));
        }
        (Some(json), _) => Value::from_plain_json(&json),
        (None, Ok([only])) => block(only),
        (None, Err(blocks)) if blocks.is_empty() => Value::Null,
        (None, Err(blocks)) => Value::Array(blocks.into_iter().map(block).collect()),
    };
    if weight(&value) > limits::VALUE_BYTES || text.len() > limits::VALUE_BYTES {
        return Err(format!("answered with more than {} bytes", limits::VALUE_BYTES));
    }
    Ok(ToolOutput { value, text })
}

fn block(block: ContentBlock) -> Value {
    match block {
        ContentBlock::Text(text) => Value::String(text.text),
        ContentBlock::Image(image) => media("image", image.mime_type, &image.data),
        ContentBlock::Audio(audio) => media("audio", audio.mime_type, &audio.data),
        ContentBlock::Resource(embedded) => match embedded.resource {
            ResourceContents::TextResourceContents { uri, mime_type, text, .. } => {
                resource(uri, mime_type, "text", Value::String(text))
            }
            ResourceContents::BlobResourceContents { uri, mime_type, blob, .. } => {
                resource(uri, mime_type, "data", decoded(&blob))
            }
            other => unknown(&other),
        },
        ContentBlock::ResourceLink(link) => resource(link.uri, link.mime_type, "name", Value::String(link.name)),
        other => unknown(&other),
    }
}

/// Content of an unknown kind, kept as plain JSON.
fn unknown(content: &impl serde::Serialize) -> Value {
    serde_json::to_value(content).map_or(Value::Null, |json| Value::from_plain_json(&json))
}

fn media(kind: &str, mime_type: String, data: &str) -> Value {
    Value::Object(vec![
        ("type".into(), Value::String(kind.into())),
        ("mimeType".into(), Value::String(mime_type)),
        ("data".into(), decoded(data)),
    ])
}

fn resource(uri: String, mime_type: Option<String>, key: &str, content: Value) -> Value {
    Value::Object(vec![
        ("type".into(), Value::String("resource".into())),
        ("uri".into(), Value::String(uri)),
        ("mimeType".into(), mime_type.map_or(Value::Null, Value::String)),
        (key.into(), content),
    ])
}

/// Decodes base64; invalid base64 stays text.
fn decoded(data: &str) -> Value {
    BASE64.decode(data).map_or_else(|_| Value::String(data.to_owned()), Value::Bytes)
}

fn text_of(block: &ContentBlock) -> String {
    match block {
        ContentBlock::Text(text) => text.text.clone(),
        ContentBlock::Image(image) => format!("[image {}]", printable(&image.mime_type, 80)),
        ContentBlock::Audio(audio) => format!("[audio {}]", printable(&audio.mime_type, 80)),
        ContentBlock::Resource(embedded) => match &embedded.resource {
            ResourceContents::TextResourceContents { text, .. } => text.clone(),
            ResourceContents::BlobResourceContents { uri, .. } => format!("[resource {}]", printable(uri, 200)),
            _ => "[resource]".into(),
        },
        ContentBlock::ResourceLink(link) => format!("[resource {}]", printable(&link.uri, 200)),
        _ => "[content of an unknown kind]".into(),
    }
}

/// Approximate size of the value's JSON, and at least 8 bytes per nested value, which bounds their
/// number too. The caller bounds the depth.
fn weight(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Int(_) | Value::Float(_) => 8,
        Value::String(text) | Value::BigInt(text) => text.len() + 8,
        Value::Bytes(bytes) => bytes.len().div_ceil(3) * 4 + 8,
        Value::Array(items) => items.iter().map(weight).fold(8, usize::saturating_add),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| name.len() + 4 + weight(value)).fold(8, usize::saturating_add)
        }
        Value::Blob(blob) => blob.id.len() + blob.content_type.len() + 100,
        Value::Opaque { type_name, repr } => type_name.len() + repr.len() + 24,
    }
}

fn depth_of(json: &Json) -> usize {
    // The recursion is bounded: serde_json reads at most 128 levels.
    1 + match json {
        Json::Array(items) => items.iter().map(depth_of).max().unwrap_or(0),
        Json::Object(map) => map.values().map(depth_of).max().unwrap_or(0),
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::String(_) => 0,
    }
}

/// Prepares a server's text for our messages: no control characters, at most `max_bytes`.
pub(super) fn printable(text: &str, max_bytes: usize) -> String {
    let mut out = String::new();
    for c in text.chars() {
        let c = if c.is_control() { ' ' } else { c };
        if out.len() + c.len_utf8() > max_bytes {
            out.push('…');
            break;
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(json: Json) -> Result<ToolOutput, String> {
        output(serde_json::from_value(json).map_err(|e| e.to_string())?)
    }

    fn field<'v>(value: &'v Value, name: &str) -> Option<&'v Value> {
        match value {
            Value::Object(fields) => fields.iter().find(|(key, _)| key == name).map(|(_, value)| value),
            _ => None,
        }
    }

    #[test]
    fn tool_answers_are_converted() {
        let text = |text: &str| json!({ "type": "text", "text": text });
        let image = json!({ "type": "image", "mimeType": "image/png", "data": "AAEC" });
        let one = answer(json!({ "content": [text("hi")] })).expect("valid");
        assert_eq!(one, ToolOutput { value: Value::String("hi".into()), text: "hi".into() });
        let none = answer(json!({ "content": [] })).expect("valid");
        assert_eq!(none, ToolOutput { value: Value::Null, text: String::new() });
        let structured = answer(json!({ "content": [text("{}")], "structuredContent": { "n": 3 } })).expect("valid");
        assert_eq!(structured.value, Value::Object(vec![("n".into(), Value::Int(3))]));
        let both = answer(json!({ "content": [text("a"), image] })).expect("valid");
        assert_eq!(both.text, "a\n[image image/png]");
        let Value::Array(parts) = both.value else { panic!("two parts are a list") };
        assert_eq!(field(&parts[1], "data"), Some(&Value::Bytes(vec![0, 1, 2])));
        for (resource, key, want) in [
            (json!({ "uri": "file:///x", "text": "t" }), "text", Value::String("t".into())),
            (json!({ "uri": "file:///x", "blob": "AA==" }), "data", Value::Bytes(vec![0])),
            (json!({ "uri": "file:///x", "blob": "?" }), "data", Value::String("?".into())),
        ] {
            let got = answer(json!({ "content": [{ "type": "resource", "resource": resource }] })).expect("valid");
            assert_eq!(field(&got.value, key), Some(&want));
        }
    }

    #[test]
    fn oversized_answer_is_error() {
        let deep = (0..limits::VALUE_DEPTH).fold(json!(1), |inner, _| json!([inner]));
        assert!(answer(json!({ "content": [], "structuredContent": deep })).is_err_and(|e| e.contains("deeper")));
        let large = "x".repeat(limits::VALUE_BYTES + 1);
        assert!(
            answer(json!({ "content": [{ "type": "text", "text": large }] })).is_err_and(|e| e.contains("more than"))
        );
    }

    #[test]
    fn tool_arguments_are_finite() {
        let object = |value| Value::Object(vec![("a".into(), value)]);
        for (value, want) in [
            (Value::Int(-1), json!(-1)),
            (Value::Float(0.5), json!(0.5)),
            (Value::BigInt("18446744073709551615".into()), json!(18446744073709551615u64)),
            (Value::BigInt("1".repeat(40)), json!("1".repeat(40))),
            (Value::Bytes(vec![0, 1, 2]), json!("AAEC")),
            (Value::Array(vec![Value::Null, object(Value::Bool(true))]), json!([null, { "a": true }])),
        ] {
            assert_eq!(arguments(&object(value)).map(Json::Object), Ok(json!({ "a": want })));
        }
        assert_eq!(arguments(&Value::Null), Ok(JsonObject::new()));
        let opaque = Value::Opaque { type_name: "socket".into(), repr: "<socket>".into() };
        for wrong in [
            Value::Array(Vec::new()),
            Value::Int(1),
            object(opaque),
            object(Value::Float(f64::NAN)),
            object(Value::String("x".repeat(limits::VALUE_BYTES))),
            object((0..limits::VALUE_DEPTH).fold(Value::Null, |inner, _| Value::Array(vec![inner]))),
        ] {
            assert!(arguments(&wrong).is_err());
        }
    }

    #[test]
    fn mcp_text_is_made_printable() {
        assert_eq!(printable("a\x1b[31m\nb", 100), "a [31m b");
        assert_eq!(printable(&"é".repeat(10), 5), "éé…");
    }
}
