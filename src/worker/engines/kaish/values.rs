//! kaish values, the project's values, and the encoding of values in state entries.
//!
//! Three forms: kaish's [`Kv`], the contract's [`Value`], and the state encoding. The latter is
//! binary, because JSON text would lose a float's bits and could not distinguish kaish's
//! `Json("s")` from `String("s")`.

use kaish_kernel::ast::Value as Kv;
use serde_json::{Map, Number, Value as Json};

use crate::core::limits;
use crate::core::value::Value;

/// A value that kaish cannot represent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// kaish has no integers beyond 64 bits.
    #[error("kaish has no integers beyond 64 bits: {0}")]
    BigInt(String),
    /// kaish's lists and records contain JSON values only.
    #[error("a kaish list or record cannot hold {0}")]
    Nested(&'static str),
    /// kaish has no blob references.
    #[error("kaish has no blob values; read the blob's bytes into the variable")]
    Blob,
    /// A live object of another engine.
    #[error("an opaque {0} cannot become a kaish value")]
    Opaque(String),
    /// A record with the same key twice.
    #[error("the key {0:?} is there twice; a kaish record holds each key once")]
    DuplicateKey(String),
}

/// Converts kaish's value to the contract's.
pub fn from_kaish(value: &Kv) -> Value {
    match value {
        Kv::Null => Value::Null,
        Kv::Bool(b) => Value::Bool(*b),
        Kv::Int(i) => Value::Int(*i),
        Kv::Float(f) => Value::Float(*f),
        Kv::String(s) => Value::String(s.clone()),
        Kv::Json(json) => Value::from_plain_json(json),
        Kv::Bytes(bytes) => Value::Bytes(bytes.clone()),
    }
}

/// Converts the contract's value to kaish's.
///
/// # Errors
/// See [`ValueError`]: refused, never rounded.
pub fn to_kaish(value: &Value) -> Result<Kv, ValueError> {
    Ok(match value {
        Value::Null => Kv::Null,
        Value::Bool(b) => Kv::Bool(*b),
        Value::Int(i) => Kv::Int(*i),
        Value::Float(f) => Kv::Float(*f),
        Value::String(s) => Kv::String(s.clone()),
        Value::Bytes(bytes) => Kv::Bytes(bytes.clone()),
        Value::Array(_) | Value::Object(_) => Kv::Json(to_json(value)?),
        Value::BigInt(digits) => return Err(ValueError::BigInt(digits.chars().take(80).collect())),
        Value::Blob(_) => return Err(ValueError::Blob),
        Value::Opaque { type_name, .. } => return Err(ValueError::Opaque(type_name.clone())),
    })
}

fn to_json(value: &Value) -> Result<Json, ValueError> {
    Ok(match value {
        Value::Null => Json::Null,
        Value::Bool(b) => Json::Bool(*b),
        Value::Int(i) => Json::from(*i),
        Value::Float(f) => Json::Number(Number::from_f64(*f).ok_or(ValueError::Nested("NaN or an infinity"))?),
        Value::String(s) => Json::String(s.clone()),
        Value::Array(items) => Json::Array(items.iter().map(to_json).collect::<Result<_, _>>()?),
        Value::Object(fields) => {
            let mut map = Map::new();
            for (key, value) in fields {
                if map.insert(key.clone(), to_json(value)?).is_some() {
                    return Err(ValueError::DuplicateKey(key.chars().take(80).collect()));
                }
            }
            Json::Object(map)
        }
        // The result of `from_plain_json` for an unsigned 64-bit number must convert back.
        Value::BigInt(digits) => match digits.parse::<u64>() {
            Ok(unsigned) => Json::from(unsigned),
            Err(_) => return Err(ValueError::BigInt(digits.chars().take(80).collect())),
        },
        Value::Bytes(_) => return Err(ValueError::Nested("bytes")),
        Value::Blob(_) => return Err(ValueError::Nested("a blob")),
        Value::Opaque { type_name, .. } => return Err(ValueError::Opaque(type_name.clone())),
    })
}

/// The type, in kaish's terms.
pub fn type_name(value: &Kv) -> &'static str {
    match value {
        Kv::Null => "null",
        Kv::Bool(_) => "bool",
        Kv::Int(_) => "int",
        Kv::Float(_) => "float",
        Kv::String(_) => "string",
        Kv::Json(Json::Array(_)) => "list",
        Kv::Json(Json::Object(_)) => "record",
        Kv::Json(_) => "json",
        Kv::Bytes(_) => "bytes",
    }
}

/// A one-line summary of at most 200 characters. The work is bounded, however large the value.
pub fn summary(value: &Kv) -> String {
    match value {
        Kv::Null => "null".into(),
        Kv::Bool(b) => b.to_string(),
        Kv::Int(i) => i.to_string(),
        Kv::Float(f) => format!("{f:?}"),
        Kv::String(s) => one_line(s),
        Kv::Bytes(bytes) => format!("{} bytes", bytes.len()),
        Kv::Json(json) => {
            let mut text = String::new();
            json_summary(json, &mut text);
            match json {
                Json::Array(items) if text.len() > SUMMARY_CHARS => one_line(&format!("{} items: {text}", items.len())),
                Json::Object(map) if text.len() > SUMMARY_CHARS => one_line(&format!("{} keys: {text}", map.len())),
                _ => one_line(&text),
            }
        }
    }
}

const SUMMARY_CHARS: usize = 200;

fn json_summary(json: &Json, out: &mut String) {
    if out.len() > SUMMARY_CHARS {
        return;
    }
    match json {
        Json::String(s) => {
            let head: String = s.chars().take(SUMMARY_CHARS).collect();
            out.push_str(&Json::String(head).to_string());
        }
        Json::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if out.len() > SUMMARY_CHARS {
                    return;
                }
                if i > 0 {
                    out.push_str(", ");
                }
                json_summary(item, out);
            }
            out.push(']');
        }
        Json::Object(map) => {
            out.push('{');
            for (i, (key, value)) in map.iter().enumerate() {
                if out.len() > SUMMARY_CHARS {
                    return;
                }
                if i > 0 {
                    out.push_str(", ");
                }
                out.extend(key.chars().take(SUMMARY_CHARS));
                out.push_str(": ");
                json_summary(value, out);
            }
            out.push('}');
        }
        other => out.push_str(&other.to_string()),
    }
}

/// The text on one line, control characters escaped, at most 200 characters.
pub fn one_line(text: &str) -> String {
    let mut out = String::new();
    for (taken, c) in text.chars().enumerate() {
        if taken == SUMMARY_CHARS - 1 {
            out.push('…');
            break;
        }
        match c {
            '\n' => out.push('⏎'),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Why bytes are not an encoded value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Too short.
    #[error("ends in the middle of a value")]
    Short,
    /// Trailing bytes.
    #[error("has bytes after the value")]
    Trailing,
    /// Written by another version.
    #[error("format version {0} is unknown")]
    Version(u8),
    /// Unknown kind of value.
    #[error("kind {0} is unknown")]
    Kind(u8),
    /// Text that is not UTF-8.
    #[error("text is not UTF-8")]
    Utf8,
    /// A number that JSON cannot represent.
    #[error("number has no JSON form")]
    Number,
    /// Nested deeper than the limit.
    #[error("nested deeper than {} levels", limits::VALUE_DEPTH)]
    Depth,
}

/// First byte of every state entry of this engine.
pub const FORMAT: u8 = 1;

/// Appends the state encoding, format byte included: a kind byte, then its content; lengths are `u32` little-endian.
pub fn encode(value: &Kv) -> Vec<u8> {
    let mut out = vec![FORMAT];
    match value {
        Kv::Null => out.push(b'n'),
        Kv::Bool(b) => out.extend([b'b', u8::from(*b)]),
        Kv::Int(i) => {
            out.push(b'i');
            out.extend(i.to_le_bytes());
        }
        Kv::Float(f) => {
            out.push(b'f');
            out.extend(f.to_bits().to_le_bytes());
        }
        Kv::String(s) => {
            out.push(b's');
            out.extend(s.as_bytes());
        }
        Kv::Bytes(bytes) => {
            out.push(b'x');
            out.extend(bytes);
        }
        Kv::Json(json) => {
            out.push(b'j');
            encode_json(json, &mut out);
        }
    }
    out
}

fn put_text(text: &str, out: &mut Vec<u8>) {
    out.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_length(n: usize, out: &mut Vec<u8>) {
    out.extend(u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes());
}

fn encode_json(json: &Json, out: &mut Vec<u8>) {
    match json {
        Json::Null => out.push(b'n'),
        Json::Bool(b) => out.extend([b'b', u8::from(*b)]),
        Json::Number(n) => {
            if let Some(i) = n.as_i64() {
                out.push(b'i');
                out.extend(i.to_le_bytes());
            } else if let Some(u) = n.as_u64() {
                out.push(b'u');
                out.extend(u.to_le_bytes());
            } else {
                out.push(b'f');
                out.extend(n.as_f64().unwrap_or(f64::NAN).to_bits().to_le_bytes());
            }
        }
        Json::String(s) => {
            out.push(b's');
            put_text(s, out);
        }
        Json::Array(items) => {
            out.push(b'a');
            put_length(items.len(), out);
            items.iter().for_each(|item| encode_json(item, out));
        }
        Json::Object(map) => {
            out.push(b'o');
            put_length(map.len(), out);
            for (key, value) in map {
                put_text(key, out);
                encode_json(value, out);
            }
        }
    }
}

/// Decodes the state encoding.
///
/// # Errors
/// See [`DecodeError`].
pub fn decode(bytes: &[u8]) -> Result<Kv, DecodeError> {
    let (&version, rest) = bytes.split_first().ok_or(DecodeError::Short)?;
    if version != FORMAT {
        return Err(DecodeError::Version(version));
    }
    let (&kind, body) = rest.split_first().ok_or(DecodeError::Short)?;
    let mut reader = Reader { rest: body };
    let value = match kind {
        b'n' => Kv::Null,
        b'b' => Kv::Bool(reader.bool()?),
        b'i' => Kv::Int(i64::from_le_bytes(reader.array()?)),
        b'f' => Kv::Float(f64::from_bits(u64::from_le_bytes(reader.array()?))),
        b's' => Kv::String(reader.rest_text()?),
        b'x' => Kv::Bytes(std::mem::take(&mut reader.rest).to_vec()),
        b'j' => Kv::Json(reader.json(JSON_DEPTH)?),
        other => return Err(DecodeError::Kind(other)),
    };
    if reader.rest.is_empty() { Ok(value) } else { Err(DecodeError::Trailing) }
}

/// Deeper than the limit for values from outside: code can nest further than clients can.
const JSON_DEPTH: usize = 512;

/// Splits encoded bytes.
pub struct Reader<'a> {
    /// The remaining bytes.
    pub rest: &'a [u8],
}

impl Reader<'_> {
    fn take(&mut self, n: usize) -> Result<&[u8], DecodeError> {
        let (head, tail) = self.rest.split_at_checked(n).ok_or(DecodeError::Short)?;
        self.rest = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn bool(&mut self) -> Result<bool, DecodeError> {
        match self.array::<1>()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(DecodeError::Kind(other)),
        }
    }

    /// Reads a length.
    ///
    /// # Errors
    /// If too few bytes are left.
    pub fn length(&mut self) -> Result<usize, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    /// Reads a length-prefixed text.
    ///
    /// # Errors
    /// If too few bytes are left or they are not UTF-8.
    pub fn text(&mut self) -> Result<String, DecodeError> {
        let n = self.length()?;
        String::from_utf8(self.take(n)?.to_vec()).map_err(|_| DecodeError::Utf8)
    }

    fn rest_text(&mut self) -> Result<String, DecodeError> {
        String::from_utf8(std::mem::take(&mut self.rest).to_vec()).map_err(|_| DecodeError::Utf8)
    }

    fn json(&mut self, depth: usize) -> Result<Json, DecodeError> {
        let depth = depth.checked_sub(1).ok_or(DecodeError::Depth)?;
        let [kind] = self.array()?;
        Ok(match kind {
            b'n' => Json::Null,
            b'b' => Json::Bool(self.bool()?),
            b'i' => Json::from(i64::from_le_bytes(self.array()?)),
            b'u' => Json::from(u64::from_le_bytes(self.array()?)),
            b'f' => {
                let float = f64::from_bits(u64::from_le_bytes(self.array()?));
                Json::Number(Number::from_f64(float).ok_or(DecodeError::Number)?)
            }
            b's' => Json::String(self.text()?),
            b'a' => {
                let n = self.length()?;
                let mut items = Vec::with_capacity(n.min(self.rest.len()));
                for _ in 0..n {
                    items.push(self.json(depth)?);
                }
                Json::Array(items)
            }
            b'o' => {
                let n = self.length()?;
                let mut map = Map::new();
                for _ in 0..n {
                    let key = self.text()?;
                    map.insert(key, self.json(depth)?);
                }
                Json::Object(map)
            }
            other => return Err(DecodeError::Kind(other)),
        })
    }
}

/// Encodes a list of texts after the format byte.
pub fn encode_texts(texts: &[&str]) -> Vec<u8> {
    let mut out = vec![FORMAT];
    texts.iter().for_each(|text| put_text(text, &mut out));
    out
}

/// Decodes the result of [`encode_texts`].
///
/// # Errors
/// See [`DecodeError`].
pub fn decode_texts(bytes: &[u8]) -> Result<Vec<String>, DecodeError> {
    let (&version, rest) = bytes.split_first().ok_or(DecodeError::Short)?;
    if version != FORMAT {
        return Err(DecodeError::Version(version));
    }
    let mut reader = Reader { rest };
    let mut texts = Vec::new();
    while !reader.rest.is_empty() {
        texts.push(reader.text()?);
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_json() -> impl Strategy<Value = Json> {
        let leaf = prop_oneof![
            Just(Json::Null),
            any::<bool>().prop_map(Json::from),
            any::<i64>().prop_map(Json::from),
            any::<u64>().prop_map(Json::from),
            prop::num::f64::NORMAL.prop_map(Json::from),
            ".{0,12}".prop_map(Json::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Json::Array),
                prop::collection::vec((".{0,6}", inner), 0..6).prop_map(|f| Json::Object(f.into_iter().collect())),
            ]
        })
    }

    fn any_kaish() -> impl Strategy<Value = Kv> {
        prop_oneof![
            Just(Kv::Null),
            any::<bool>().prop_map(Kv::Bool),
            any::<i64>().prop_map(Kv::Int),
            any::<u64>().prop_map(|bits| Kv::Float(f64::from_bits(bits))),
            ".{0,40}".prop_map(Kv::String),
            prop::collection::vec(any::<u8>(), 0..40).prop_map(Kv::Bytes),
            any_json().prop_map(Kv::Json),
        ]
    }

    proptest! {
        #[test]
        fn kaish_state_round_trips(value in any_kaish()) {
            let bytes = encode(&value);
            let back = decode(&bytes).map_err(|e| TestCaseError::fail(e.to_string()))?;
            // Bitwise, because NaN is never equal.
            prop_assert_eq!(encode(&back), bytes);
            prop_assert_eq!(std::mem::discriminant(&back), std::mem::discriminant(&value));
        }

        #[test]
        fn kaish_collections_round_trip(json in any_json()) {
            let value = Kv::Json(json);
            prop_assume!(matches!(value, Kv::Json(Json::Array(_) | Json::Object(_))));
            let back = to_kaish(&from_kaish(&value)).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(back, value);
        }

        #[test]
        fn kaish_decoder_never_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Some(first) = bytes.first_mut() {
                *first = FORMAT;
            }
            if let Ok(value) = decode(&bytes) {
                let again = encode(&value);
                prop_assert!(again.len() <= bytes.len());
            }
        }

        #[test]
        fn truncated_value_is_refused(json in any_json(), cut in 1usize..20) {
            let bytes = encode(&Kv::Json(json));
            prop_assume!(cut < bytes.len());
            prop_assert!(decode(&bytes[..bytes.len() - cut]).is_err());
        }
    }

    #[test]
    fn unsupported_kaish_values_fail() {
        for value in [
            Value::BigInt("18446744073709551616".into()),
            Value::Opaque { type_name: "socket".into(), repr: "<socket>".into() },
            Value::Array(vec![Value::Bytes(vec![1])]),
            Value::Array(vec![Value::Float(f64::NAN)]),
            Value::Object(vec![("k".into(), Value::Null), ("k".into(), Value::Null)]),
        ] {
            assert!(to_kaish(&value).is_err(), "{value:?}");
        }
    }

    #[test]
    fn summaries_are_bounded() {
        let long = Kv::Json(Json::Array((0..100_000).map(Json::from).collect()));
        let text = summary(&long);
        assert!(text.starts_with("100000 items: [0, 1"), "{text}");
        assert!(text.chars().count() <= 200);
        assert_eq!(summary(&Kv::String("a\nb".into())), "a⏎b");
        assert!(summary(&Kv::String("é".repeat(500))).chars().count() <= 200);
    }
}
