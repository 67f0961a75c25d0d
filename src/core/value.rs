//! Values exchanged between engines, daemon and clients, and their lossless JSON encoding.
//!
//! Plain JSON cannot distinguish an integer from a float, has no NaN and no bytes, and rounds big
//! integers. Ambiguous scalars are therefore tagged (`docs/engine-contract.md` has the table).
//! Decoding is strict: an unknown tag, a number outside its range or a nesting deeper than
//! [`limits::VALUE_DEPTH`] is an error.

use std::ops::Range;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value as Json, json};

use super::ids::Digest;
use super::limits;

/// A value of any engine.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Absence: Python's `None`, kaish's null.
    Null,
    /// A boolean.
    Bool(bool),
    /// An integer that fits 64 bits.
    Int(i64),
    /// A double, NaN and the infinities included.
    Float(f64),
    /// Text.
    String(String),
    /// A sequence.
    Array(Vec<Value>),
    /// Named values in the engine's order.
    Object(Vec<(String, Value)>),
    /// A stored blob.
    Blob(BlobRef),
    /// Raw bytes.
    Bytes(Vec<u8>),
    /// An integer beyond 64 bits, in decimal digits with an optional minus sign.
    BigInt(String),
    /// A live object that has no value form.
    Opaque {
        /// The object's type, as the engine names it.
        type_name: String,
        /// A short rendering for people.
        repr: String,
    },
}

impl Value {
    /// Returns the approximate encoded size in bytes, at most `most`.
    pub fn bytes_up_to(&self, most: usize) -> usize {
        let (mut bytes, mut rest) = (0, vec![self]);
        while let Some(value) = rest.pop() {
            bytes += 8;
            match value {
                Value::Null | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {}
                Value::String(text) | Value::BigInt(text) => bytes += text.len(),
                Value::Bytes(data) => bytes += data.len() * 2,
                Value::Blob(blob) => bytes += 64 + blob.id.len() + blob.content_type.len(),
                Value::Opaque { type_name, repr } => bytes += type_name.len() + repr.len(),
                Value::Array(items) => rest.extend(items.iter().take(most)),
                Value::Object(fields) => {
                    bytes += fields.iter().take(most).map(|(name, _)| name.len()).sum::<usize>();
                    rest.extend(fields.iter().take(most).map(|(_, value)| value));
                }
            }
            if bytes > most {
                break;
            }
        }
        bytes
    }
}

/// A reference to a stored blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobRef {
    /// The owner's name for the blob; may be empty.
    pub id: String,
    /// Length in bytes.
    pub size: u64,
    /// Media type; may be empty.
    pub content_type: String,
    /// BLAKE3 hash of the content.
    pub hash: Digest,
}

/// Why a JSON text is not a value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeValueError {
    /// Nesting exceeds [`limits::VALUE_DEPTH`].
    #[error("value nested deeper than {} levels", limits::VALUE_DEPTH)]
    TooDeep,
    /// A bare number; integers and floats must be tagged.
    #[error("bare number; integers and floats are tagged")]
    BareNumber,
    /// An object with an unknown tag.
    #[error("unknown value tag {0:?}")]
    UnknownTag(String),
    /// A tag with malformed content.
    #[error("malformed content of value tag {0:?}")]
    Malformed(&'static str),
}

impl Value {
    /// Encodes the value as tagged JSON.
    pub fn to_json(&self) -> Json {
        match self {
            Value::Null => Json::Null,
            Value::Bool(b) => json!(b),
            Value::Int(i) => json!({ "i": i.to_string() }),
            Value::Float(f) => json!({ "f": float_text(*f) }),
            Value::String(s) => json!(s),
            Value::Array(items) => Json::Array(items.iter().map(Value::to_json).collect()),
            Value::Object(fields) => {
                let pairs = fields.iter().map(|(k, v)| json!([k, v.to_json()])).collect();
                json!({ "o": Json::Array(pairs) })
            }
            Value::Blob(blob) => json!({ "b": {
                "id": blob.id,
                "size": blob.size.to_string(),
                "contentType": blob.content_type,
                "hash": blob.hash.to_string(),
            }}),
            Value::Bytes(bytes) => json!({ "x": BASE64.encode(bytes) }),
            Value::BigInt(digits) => json!({ "I": digits }),
            Value::Opaque { type_name, repr } => json!({ "O": { "type": type_name, "repr": repr } }),
        }
    }

    /// Decodes tagged JSON.
    ///
    /// # Errors
    /// See [`DecodeValueError`].
    pub fn from_json(json: &Json) -> Result<Value, DecodeValueError> {
        decode(json, limits::VALUE_DEPTH)
    }

    /// Returns a plain JSON rendering for people and for `--json`.
    ///
    /// Floats without a JSON form become strings, bytes an object `{"base64": …}`, opaque objects
    /// `{"type", "repr"}`. The rendering cannot be decoded.
    pub fn to_plain_json(&self) -> Json {
        match self {
            Value::Null => Json::Null,
            Value::Bool(b) => json!(b),
            Value::Int(i) => json!(i),
            Value::Float(f) if f.is_finite() => json!(f),
            Value::Float(f) => json!(float_text(*f)),
            Value::String(s) | Value::BigInt(s) => json!(s),
            Value::Array(items) => Json::Array(items.iter().map(Value::to_plain_json).collect()),
            Value::Object(fields) => {
                let map = fields.iter().map(|(k, v)| (k.clone(), v.to_plain_json()));
                Json::Object(map.collect())
            }
            Value::Blob(blob) => json!({ "blob": blob.hash.to_string(), "size": blob.size }),
            Value::Bytes(bytes) => json!({ "base64": BASE64.encode(bytes) }),
            Value::Opaque { type_name, repr } => json!({ "type": type_name, "repr": repr }),
        }
    }

    /// Parses plain JSON text like [`Value::from_plain_json`], with whole numbers of any length
    /// exact.
    ///
    /// # Errors
    /// The syntax error and its position.
    pub fn from_plain_text(text: &str) -> Result<Value, serde_json::Error> {
        let json: Json = serde_json::from_str(text)?;
        let big = big_integers(text);
        if big.is_empty() {
            return Ok(Value::from_plain_json(&json));
        }
        // The parser rounds these numbers to floats, so each becomes a string with a mark that
        // occurs nowhere else in the text.
        let printed = json.to_string();
        let mut mark = String::from("#");
        while printed.contains(&mark) {
            mark.push('#');
        }
        let (mut marked, mut done) = (String::with_capacity(text.len()), 0);
        for place in big {
            marked.push_str(&text[done..place.start]);
            marked.push_str(&format!("\"{mark}{}\"", &text[place.clone()]));
            done = place.end;
        }
        marked.push_str(&text[done..]);
        Ok(Value::from_plain_json(&serde_json::from_str(&marked)?).unmarked(&mark))
    }

    fn unmarked(self, mark: &str) -> Value {
        match self {
            Value::String(text) => match text.strip_prefix(mark) {
                Some(digits) => Value::BigInt(digits.to_owned()),
                None => Value::String(text),
            },
            Value::Array(items) => Value::Array(items.into_iter().map(|item| item.unmarked(mark)).collect()),
            Value::Object(fields) => {
                Value::Object(fields.into_iter().map(|(name, value)| (name, value.unmarked(mark))).collect())
            }
            other => other,
        }
    }

    /// Converts plain JSON, as a person types it: whole numbers become integers (big ones
    /// [`Value::BigInt`]), others floats.
    pub fn from_plain_json(json: &Json) -> Value {
        match json {
            Json::Null => Value::Null,
            Json::Bool(b) => Value::Bool(*b),
            Json::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
                (Some(i), _, _) => Value::Int(i),
                (None, Some(u), _) => Value::BigInt(u.to_string()),
                (None, None, f) => Value::Float(f.unwrap_or(f64::NAN)),
            },
            Json::String(s) => Value::String(s.clone()),
            Json::Array(items) => Value::Array(items.iter().map(Value::from_plain_json).collect()),
            Json::Object(map) => {
                Value::Object(map.iter().map(|(k, v)| (k.clone(), Value::from_plain_json(v))).collect())
            }
        }
    }
}

/// Returns the ranges of integers in a JSON text that exceed 64 bits.
fn big_integers(text: &str) -> Vec<Range<usize>> {
    let (mut found, mut at) = (Vec::new(), 0);
    let bytes = text.as_bytes();
    while at < bytes.len() {
        let length = match bytes[at] {
            b'"' => text_length(&bytes[at..]),
            b'-' | b'0'..=b'9' => {
                let number = bytes[at..].iter().take_while(|b| b.is_ascii_digit() || b"+-.eE".contains(b)).count();
                let token = &text[at..at + number];
                if !token.contains(['.', 'e', 'E']) && token.parse::<i64>().is_err() {
                    found.push(at..at + number);
                }
                number
            }
            _ => 1,
        };
        at += length;
    }
    found
}

/// Returns the length of the string literal that begins here, with both quotation marks.
fn text_length(bytes: &[u8]) -> usize {
    let mut escaped = false;
    let inside = bytes.iter().skip(1).take_while(|byte| {
        let ends = **byte == b'"' && !escaped;
        escaped = **byte == b'\\' && !escaped;
        !ends
    });
    inside.count() + 2
}

fn float_text(f: f64) -> String {
    if f.is_nan() {
        "NaN".into()
    } else if f.is_infinite() {
        if f > 0.0 { "inf".into() } else { "-inf".into() }
    } else {
        format!("{f:?}")
    }
}

fn decode(json: &Json, depth: usize) -> Result<Value, DecodeValueError> {
    let depth = depth.checked_sub(1).ok_or(DecodeValueError::TooDeep)?;
    match json {
        Json::Null => Ok(Value::Null),
        Json::Bool(b) => Ok(Value::Bool(*b)),
        Json::Number(_) => Err(DecodeValueError::BareNumber),
        Json::String(s) => Ok(Value::String(s.clone())),
        Json::Array(items) => items.iter().map(|item| decode(item, depth)).collect::<Result<_, _>>().map(Value::Array),
        Json::Object(map) => {
            let mut entries = map.iter();
            match (entries.next(), entries.next()) {
                (Some((tag, content)), None) => decode_tagged(tag, content, depth),
                _ => Err(DecodeValueError::UnknownTag(map.keys().take(4).cloned().collect::<Vec<_>>().join(","))),
            }
        }
    }
}

fn decode_tagged(tag: &str, content: &Json, depth: usize) -> Result<Value, DecodeValueError> {
    let text = |what| content.as_str().ok_or(DecodeValueError::Malformed(what));
    match tag {
        "i" => {
            let digits = text("i")?;
            digits.parse().map(Value::Int).map_err(|_| DecodeValueError::Malformed("i"))
        }
        "f" => {
            let digits = text("f")?;
            digits.parse().map(Value::Float).map_err(|_| DecodeValueError::Malformed("f"))
        }
        "x" => {
            let encoded = text("x")?;
            BASE64.decode(encoded).map(Value::Bytes).map_err(|_| DecodeValueError::Malformed("x"))
        }
        "I" => {
            let digits = text("I")?;
            let unsigned = digits.strip_prefix('-').unwrap_or(digits);
            if unsigned.is_empty() || !unsigned.bytes().all(|b| b.is_ascii_digit()) {
                return Err(DecodeValueError::Malformed("I"));
            }
            Ok(Value::BigInt(digits.to_owned()))
        }
        "o" => content
            .as_array()
            .ok_or(DecodeValueError::Malformed("o"))?
            .iter()
            .map(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([Json::String(key), value]) => Ok((key.clone(), decode(value, depth)?)),
                _ => Err(DecodeValueError::Malformed("o")),
            })
            .collect::<Result<_, _>>()
            .map(Value::Object),
        "b" => decode_blob(content).ok_or(DecodeValueError::Malformed("b")).map(Value::Blob),
        "O" => {
            let field = |name| content.get(name).and_then(Json::as_str).map(str::to_owned);
            match (field("type"), field("repr")) {
                (Some(type_name), Some(repr)) => Ok(Value::Opaque { type_name, repr }),
                _ => Err(DecodeValueError::Malformed("O")),
            }
        }
        other => Err(DecodeValueError::UnknownTag(other.chars().take(40).collect())),
    }
}

fn decode_blob(content: &Json) -> Option<BlobRef> {
    let field = |name| content.get(name).and_then(Json::as_str);
    Some(BlobRef {
        id: field("id")?.to_owned(),
        size: field("size")?.parse().ok()?,
        content_type: field("contentType")?.to_owned(),
        hash: field("hash")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            any::<f64>().prop_map(Value::Float),
            Just(Value::Float(f64::NAN)),
            Just(Value::Float(-0.0)),
            ".*".prop_map(Value::String),
            prop::collection::vec(any::<u8>(), 0..64).prop_map(Value::Bytes),
            "-?[1-9][0-9]{19,60}".prop_map(Value::BigInt),
            (".{0,20}", ".{0,20}").prop_map(|(type_name, repr)| Value::Opaque { type_name, repr }),
            (".{0,8}", any::<u64>(), any::<[u8; 32]>()).prop_map(|(id, size, hash)| {
                Value::Blob(BlobRef { id, size, content_type: "text/plain".into(), hash: Digest::from_bytes(hash) })
            }),
        ];
        leaf.prop_recursive(5, 64, 8, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Value::Array),
                prop::collection::vec((".{0,8}", inner), 0..8).prop_map(Value::Object),
            ]
        })
    }

    /// Equality that distinguishes -0.0 from 0.0 and treats NaN as equal to itself.
    fn same(a: &Value, b: &Value) -> bool {
        match (a, b) {
            (Value::Float(x), Value::Float(y)) => x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan()),
            (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
            (Value::Object(x), Value::Object(y)) => {
                x.len() == y.len() && x.iter().zip(y).all(|(x, y)| x.0 == y.0 && same(&x.1, &y.1))
            }
            _ => a == b,
        }
    }

    proptest! {
        #[test]
        fn value_json_round_trips(value in any_value()) {
            let text = value.to_json().to_string();
            let json = serde_json::from_str(&text).map_err(|e| TestCaseError::fail(e.to_string()))?;
            let back = Value::from_json(&json).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert!(same(&value, &back), "{value:?} came back as {back:?}");
        }
    }

    #[test]
    fn invalid_value_json_is_refused() {
        for text in [
            "1",
            "1.5",
            "{}",
            r#"{"i":1}"#,
            r#"{"i":"1.0"}"#,
            r#"{"i":"99999999999999999999"}"#,
            r#"{"f":"one"}"#,
            r#"{"x":"?"}"#,
            r#"{"I":"12a"}"#,
            r#"{"I":"-"}"#,
            r#"{"o":[["k"]]}"#,
            r#"{"o":[[1,null]]}"#,
            r#"{"b":{}}"#,
            r#"{"O":{"type":"t"}}"#,
            r#"{"q":"?"}"#,
            r#"{"i":"1","f":"1"}"#,
            r#"[{"o":[["k",2]]}]"#,
        ] {
            let json: Json = serde_json::from_str(text).expect("the table holds valid JSON");
            assert!(Value::from_json(&json).is_err(), "{text}");
        }
    }

    #[test]
    fn value_depth_is_bounded() {
        let nested = |n: usize| (0..n).fold(Json::Null, |inner, _| json!([inner]));
        assert!(Value::from_json(&nested(limits::VALUE_DEPTH - 1)).is_ok());
        assert_eq!(Value::from_json(&nested(limits::VALUE_DEPTH)), Err(DecodeValueError::TooDeep));
    }

    #[test]
    fn big_integers_parse_exactly() {
        let big = |digits: &str| Value::BigInt(digits.into());
        for (text, value) in [
            ("9007199254740993", Value::Int(9_007_199_254_740_993)),
            ("-9223372036854775808", Value::Int(i64::MIN)),
            ("9223372036854775808", big("9223372036854775808")),
            ("-9223372036854775809", big("-9223372036854775809")),
            (" 123456789012345678901234567890\n", big("123456789012345678901234567890")),
            ("1e30", Value::Float(1e30)),
            ("123456789012345678901234567890.5", Value::Float(1.2345678901234568e29)),
            (r#""99999999999999999999""#, Value::String("99999999999999999999".into())),
            (
                r##"["#\"1", {"a\\": 18446744073709551616, "#": "\u0023#"}, -7]"##,
                Value::Array(vec![
                    Value::String("#\"1".into()),
                    Value::Object(vec![
                        ("a\\".into(), big("18446744073709551616")),
                        ("#".into(), Value::String("##".into())),
                    ]),
                    Value::Int(-7),
                ]),
            ),
        ] {
            assert_eq!(Value::from_plain_text(text).map_err(|e| e.to_string()), Ok(value), "{text}");
        }
        for text in ["", "99999999999999999999x", "[99999999999999999999", "-", "099999999999999999999"] {
            assert!(Value::from_plain_text(text).is_err(), "{text}");
        }
    }

    #[test]
    fn plain_json_decodes_to_values() {
        let typed: Json = serde_json::from_str(r#"{"a":[1,2.5,18446744073709551615,null,true,"s"]}"#).expect("valid");
        let value = Value::from_plain_json(&typed);
        assert_eq!(
            value,
            Value::Object(vec![(
                "a".into(),
                Value::Array(vec![
                    Value::Int(1),
                    Value::Float(2.5),
                    Value::BigInt("18446744073709551615".into()),
                    Value::Null,
                    Value::Bool(true),
                    Value::String("s".into()),
                ])
            )])
        );
    }
}
