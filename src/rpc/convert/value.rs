//! Values of every type, with bounded nesting.

use super::text::{count, malformed, read_text, unknown};
use crate::core::error::{Error, Result};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::core::value::{BlobRef, Value};
use crate::rpc::schema::ryokan_capnp as wire;

fn too_deep() -> Error {
    Error::invalid(format!("value nested deeper than {} levels", limits::VALUE_DEPTH))
        .hint("store it as a blob and pass its hash")
}

fn too_many() -> Error {
    Error::invalid(format!("value of more than {} parts", limits::VALUE_PARTS))
        .reason("value_parts")
        .hint("store it as a file in the workspace or as a blob")
}

/// Counts one part of a value.
fn part(left: &mut usize) -> Result<()> {
    *left = left.checked_sub(1).ok_or_else(too_many)?;
    Ok(())
}

/// Reads a value.
///
/// # Errors
/// `invalidArgument` for malformed data, more than [`limits::VALUE_PARTS`], nesting beyond [`limits::VALUE_DEPTH`] or a type unknown
/// to this build.
pub fn read_value(reader: wire::value::Reader<'_>) -> Result<Value> {
    read(reader, limits::VALUE_DEPTH, &mut { limits::VALUE_PARTS })
}

/// Writes a value.
///
/// # Errors
/// `invalidArgument` for nesting beyond [`limits::VALUE_DEPTH`] and for more than [`limits::VALUE_PARTS`].
pub fn write_value(builder: wire::value::Builder<'_>, value: &Value) -> Result<()> {
    write(builder, value, limits::VALUE_DEPTH, &mut { limits::VALUE_PARTS })
}

fn read(reader: wire::value::Reader<'_>, depth: usize, left: &mut usize) -> Result<Value> {
    use wire::value::Which;
    let depth = depth.checked_sub(1).ok_or_else(too_deep)?;
    part(left)?;
    let wrong = |e: capnp::Error| malformed("value", e);
    Ok(match reader.which().map_err(|n| unknown("value type", n))? {
        Which::Null(()) => Value::Null,
        Which::Bool(b) => Value::Bool(b),
        Which::Int(i) => Value::Int(i),
        Which::Float(f) => Value::Float(f),
        Which::String(text) => Value::String(read_text(text, "string value")?),
        Which::Array(items) => {
            let items = items.map_err(wrong)?;
            if items.len() as usize > *left {
                return Err(too_many());
            }
            Value::Array(items.iter().map(|item| read(item, depth, left)).collect::<Result<_>>()?)
        }
        Which::Object(fields) => {
            let fields = fields.map_err(wrong)?;
            if fields.len() as usize > *left {
                return Err(too_many());
            }
            let field = |f: wire::key_value::Reader<'_>| {
                part(left)?;
                let key = read_text(f.get_key(), "key of an object value")?;
                Ok((key, read(f.get_value().map_err(wrong)?, depth, left)?))
            };
            Value::Object(fields.iter().map(field).collect::<Result<_>>()?)
        }
        Which::Blob(blob) => Value::Blob(read_blob_ref(blob.map_err(wrong)?)?),
        Which::Bytes(bytes) => Value::Bytes(bytes.map_err(wrong)?.to_vec()),
        Which::BigInt(digits) => Value::BigInt(big_int(read_text(digits, "big integer")?)?),
        Which::Opaque(opaque) => {
            let opaque = opaque.map_err(wrong)?;
            Value::Opaque {
                type_name: read_text(opaque.get_type(), "type of an opaque value")?,
                repr: read_text(opaque.get_repr(), "repr of an opaque value")?,
            }
        }
    })
}

fn big_int(digits: String) -> Result<String> {
    let unsigned = digits.strip_prefix('-').unwrap_or(&digits);
    match !unsigned.is_empty() && unsigned.bytes().all(|b| b.is_ascii_digit()) {
        true => Ok(digits),
        false => Err(Error::invalid("big integer value is not decimal digits with an optional minus sign")),
    }
}

fn read_blob_ref(reader: wire::blob_ref::Reader<'_>) -> Result<BlobRef> {
    let hash = reader.get_hash().map_err(|e| malformed("blob hash", e))?;
    let hash = hash.try_into().map_err(|_| Error::invalid(format!("blob hash has {} bytes, not 32", hash.len())))?;
    Ok(BlobRef {
        id: read_text(reader.get_id(), "blob id")?,
        size: reader.get_size(),
        content_type: read_text(reader.get_content_type(), "content type of a blob")?,
        hash: Digest::from_bytes(hash),
    })
}

fn write(mut builder: wire::value::Builder<'_>, value: &Value, depth: usize, left: &mut usize) -> Result<()> {
    let depth = depth.checked_sub(1).ok_or_else(too_deep)?;
    part(left)?;
    match value {
        Value::Null => builder.set_null(()),
        Value::Bool(b) => builder.set_bool(*b),
        Value::Int(i) => builder.set_int(*i),
        Value::Float(f) => builder.set_float(*f),
        Value::String(text) => builder.set_string(text.as_str()),
        Value::Array(items) if items.len() > *left => return Err(too_many()),
        Value::Object(fields) if fields.len() > *left => return Err(too_many()),
        Value::Array(items) => {
            let mut list = builder.init_array(count(items.len()));
            for (i, item) in items.iter().enumerate() {
                write(list.reborrow().get(count(i)), item, depth, left)?;
            }
        }
        Value::Object(fields) => {
            let mut list = builder.init_object(count(fields.len()));
            for (i, (key, item)) in fields.iter().enumerate() {
                let mut field = list.reborrow().get(count(i));
                field.set_key(key.as_str());
                part(left)?;
                write(field.init_value(), item, depth, left)?;
            }
        }
        Value::Blob(blob) => {
            let mut out = builder.init_blob();
            out.set_id(blob.id.as_str());
            out.set_size(blob.size);
            out.set_content_type(blob.content_type.as_str());
            out.set_hash(blob.hash.as_bytes());
        }
        Value::Bytes(bytes) => builder.set_bytes(bytes),
        Value::BigInt(digits) => builder.set_big_int(digits.as_str()),
        Value::Opaque { type_name, repr } => {
            let mut out = builder.init_opaque();
            out.set_type(type_name.as_str());
            out.set_repr(repr.as_str());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::convert::reader_options;
    use crate::rpc::convert::testing::{any_value, round_trip, same};
    use proptest::prelude::*;

    fn there_and_back(value: &Value) -> Result<Value> {
        let bytes = round_trip::<wire::value::Owned>(|b| write_value(b, value))?;
        let message = capnp::serialize::read_message(&mut bytes.as_slice(), reader_options()).expect("a message");
        read_value(message.get_root().expect("a value"))
    }

    proptest! {
        #[test]
        fn capnp_value_round_trips(value in any_value()) {
            let back = there_and_back(&value).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert!(same(&value, &back), "{value:?} came back as {back:?}");
        }

        #[test]
        fn value_reader_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(message) = capnp::serialize::read_message(&mut bytes.as_slice(), reader_options())
                && let Ok(value) = message.get_root::<wire::value::Reader<'_>>() {
                let _ = read_value(value);
            }
        }
    }

    #[test]
    fn capnp_value_depth_is_bounded() {
        for wrap in [|v| Value::Array(vec![v]), |v| Value::Object(vec![("k".into(), v)])] {
            let nested = |n: usize| (0..n).fold(Value::Null, |inner, _| wrap(inner));
            let deepest = nested(limits::VALUE_DEPTH - 1);
            assert_eq!(there_and_back(&deepest), Ok(deepest));
            assert!(there_and_back(&nested(limits::VALUE_DEPTH)).is_err());
        }
    }

    #[test]
    fn capnp_value_parts_are_bounded() {
        let ints = |n: usize| Value::Array(vec![Value::Int(1); n]);
        let most = limits::VALUE_PARTS;
        assert_eq!(there_and_back(&ints(most - 1)), Ok(ints(most - 1)));
        let field = |i: usize| (i.to_string(), Value::Null);
        for large in [
            ints(most),
            Value::Object((0..most / 2).map(field).collect()),
            Value::Array(vec![Value::Array(vec![Value::Null]); most / 2]),
        ] {
            let error = there_and_back(&large).expect_err("too many");
            assert_eq!(error.reason, "value_parts", "{error:?}");
        }
        let mut message = capnp::message::Builder::new_default();
        message.init_root::<wire::value::Builder<'_>>().init_array(count(most));
        let received = message.get_root_as_reader::<wire::value::Reader<'_>>().expect("a value");
        assert_eq!(read_value(received).expect_err("too many").reason, "value_parts");
    }

    #[test]
    fn invalid_capnp_value_is_refused() {
        for digits in ["", "-", "1a", "+1", "１"] {
            assert!(there_and_back(&Value::BigInt(digits.into())).is_err(), "{digits:?}");
        }
        let mut message = capnp::message::Builder::new_default();
        let mut value = message.init_root::<wire::value::Builder<'_>>();
        value.reborrow().init_blob().set_hash(&[1, 2, 3]);
        assert!(read_value(value.reborrow().into_reader()).is_err());
        value.set_string(capnp::text::Reader(b"\xff\xfe"));
        assert!(read_value(value.into_reader()).is_err());
    }
}
