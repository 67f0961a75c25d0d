//! Values of a database as JSON, and lists that are read with a bound.

use std::fmt;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rusqlite::ToSql;
use rusqlite::types::{ToSqlOutput, Value};
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The largest key: enough numbers follow it.
const KEY_MAX: i64 = i64::MAX / 2;

/// A value. Bytes are an array of one text.
#[derive(Debug)]
pub(super) struct Cell(pub(super) Value);

impl Cell {
    /// About its size.
    pub(super) fn bytes(&self) -> usize {
        match &self.0 {
            Value::Null => 1,
            Value::Integer(_) | Value::Real(_) => 8,
            Value::Text(text) => text.len(),
            Value::Blob(blob) => blob.len(),
        }
    }

    /// Whether it can be a part of a primary key.
    pub(super) fn is_key(&self) -> bool {
        match &self.0 {
            Value::Integer(number) => (0..=KEY_MAX).contains(number),
            Value::Text(_) => true,
            Value::Null | Value::Real(_) | Value::Blob(_) => false,
        }
    }
}

impl ToSql for Cell {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        self.0.to_sql()
    }
}

impl Serialize for Cell {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Value::Null => to.serialize_unit(),
            Value::Integer(number) => to.serialize_i64(*number),
            // No moved table has such a column.
            Value::Real(_) => Err(S::Error::custom("a number that is no integer")),
            Value::Text(text) => to.serialize_str(text),
            Value::Blob(blob) => [BASE64_STANDARD.encode(blob)].serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Cell {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Cell, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Value;
            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("null, an integer, a text or bytes")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
                Ok(Value::Integer(number))
            }
            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Value, E> {
                i64::try_from(number).map(Value::Integer).map_err(E::custom)
            }
            fn visit_str<E>(self, text: &str) -> Result<Value, E> {
                Ok(Value::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Value, A::Error> {
                let texts = read_list::<1, String, A>(list)?;
                let [text] = texts.as_slice() else { return Err(A::Error::custom("bytes are one text")) };
                BASE64_STANDARD.decode(text).map(Value::Blob).map_err(A::Error::custom)
            }
        }
        from.deserialize_any(Reads).map(Cell)
    }
}

/// A list of at most `MOST` items: reading ends with the first item beyond that.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct AtMost<const MOST: usize, T>(pub(super) Vec<T>);

impl<'de, const MOST: usize, T: Deserialize<'de>> Deserialize<'de> for AtMost<MOST, T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reads<const MOST: usize, T>(std::marker::PhantomData<T>);
        impl<'de, const MOST: usize, T: Deserialize<'de>> Visitor<'de> for Reads<MOST, T> {
            type Value = Vec<T>;
            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(to, "at most {MOST} items")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Vec<T>, A::Error> {
                read_list::<MOST, T, A>(list)
            }
        }
        from.deserialize_seq(Reads::<MOST, T>(std::marker::PhantomData)).map(AtMost)
    }
}

fn read_list<'de, const MOST: usize, T: Deserialize<'de>, A: SeqAccess<'de>>(mut list: A) -> Result<Vec<T>, A::Error> {
    let mut items = Vec::new();
    while let Some(item) = list.next_element()? {
        items.push(item);
        if items.len() > MOST {
            return Err(A::Error::custom(format_args!("more than {MOST} items")));
        }
    }
    Ok(items)
}
