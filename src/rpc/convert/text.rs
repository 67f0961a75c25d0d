//! Text, bytes and lists of them, with the checks that all other conversions use.

use capnp::{data, struct_list, text, text_list};

use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::rpc::schema::ryokan_capnp as wire;

/// The error of a field that is malformed in the message itself.
pub(super) fn malformed(what: &str, why: impl std::fmt::Display) -> Error {
    Error::invalid(format!("{what} is malformed: {why}"))
}

/// The error of a union's or enum's number unknown to this build.
pub(super) fn unknown(what: &str, number: capnp::NotInSchema) -> Error {
    Error::invalid(format!("{what} {} is not known to this version of ryokan", number.0))
        .hint("use a client and a daemon of the same wire version")
}

/// Any text, NUL included: output, messages, the strings of values.
///
/// # Errors
/// `invalidArgument` if it is not UTF-8.
pub fn read_text(reader: capnp::Result<text::Reader<'_>>, what: &str) -> Result<String> {
    let text = reader.map_err(|e| malformed(what, e))?;
    let text = text.to_str().map_err(|_| Error::invalid(format!("{what} is not UTF-8")))?;
    Ok(text.to_owned())
}

/// Text without NUL: names and paths.
///
/// # Errors
/// `invalidArgument` if it is not UTF-8, holds a NUL byte or is longer than a path may be.
pub fn read_name(reader: capnp::Result<text::Reader<'_>>, what: &str) -> Result<String> {
    let text = read_text(reader, what)?;
    if text.contains('\0') {
        return Err(Error::invalid(format!("{what} holds a NUL byte")));
    }
    if text.len() > limits::PATH_BYTES {
        let got = text.len();
        return Err(Error::invalid(format!("{what} of {got} bytes is longer than {} bytes", limits::PATH_BYTES)));
    }
    Ok(text)
}

/// Bytes, at most `most` of them.
///
/// # Errors
/// `invalidArgument` if there are more.
pub fn read_data(reader: capnp::Result<data::Reader<'_>>, what: &str, most: usize) -> Result<Vec<u8>> {
    let bytes = reader.map_err(|e| malformed(what, e))?;
    if bytes.len() > most {
        return Err(Error::invalid(format!("{what} of {} bytes is larger than {most} bytes", bytes.len())));
    }
    Ok(bytes.to_vec())
}

/// Refuses a list of more than `most` items before anything is allocated for it.
pub(super) fn bounded(length: u32, what: &str, most: usize) -> Result<usize> {
    let length = length as usize;
    if length > most {
        return Err(Error::invalid(format!("{what}: {length} items are more than {most}")));
    }
    Ok(length)
}

/// A list's length for its builder. Longer lists than the format allows cannot be in a readable
/// message.
pub(super) fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// A list of names, at most `most` of them.
///
/// # Errors
/// As [`read_name`], and `invalidArgument` if there are more.
pub fn read_text_list(reader: capnp::Result<text_list::Reader<'_>>, what: &str, most: usize) -> Result<Vec<String>> {
    let list = reader.map_err(|e| malformed(what, e))?;
    bounded(list.len(), what, most)?;
    list.iter().map(|item| read_text(item, what)).collect()
}

/// Writes a list of texts into a builder of the same length.
pub fn write_text_list<S: AsRef<str>>(mut builder: text_list::Builder<'_>, items: &[S]) {
    for (i, item) in items.iter().enumerate() {
        builder.set(count(i), item.as_ref());
    }
}

/// A list of pairs, at most `most` of them.
///
/// # Errors
/// `invalidArgument` for more, and for text that is not UTF-8 or holds a NUL byte.
pub fn read_pairs(
    reader: capnp::Result<struct_list::Reader<'_, wire::pair::Owned>>,
    what: &str,
    most: usize,
) -> Result<Vec<(String, String)>> {
    let list = reader.map_err(|e| malformed(what, e))?;
    bounded(list.len(), what, most)?;
    let no_nul = |text: String| match text.contains('\0') {
        true => Err(Error::invalid(format!("{what} holds a NUL byte"))),
        false => Ok(text),
    };
    list.iter()
        .map(|pair| Ok((no_nul(read_text(pair.get_key(), what)?)?, no_nul(read_text(pair.get_value(), what)?)?)))
        .collect()
}

/// Writes pairs into a builder of the same length.
pub fn write_pairs(mut builder: struct_list::Builder<'_, wire::pair::Owned>, pairs: &[(String, String)]) {
    for (i, (key, value)) in pairs.iter().enumerate() {
        let mut pair = builder.reborrow().get(count(i));
        pair.set_key(key.as_str());
        pair.set_value(value.as_str());
    }
}
