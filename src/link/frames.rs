//! The frames between init and engine: `docs/engine-contract.md` as types.
//!
//! Owns encoding and decoding with their limits; does no I/O. A [`Decoder`] takes bytes and yields
//! frames.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::core::error::{Error, ErrorCode};
use crate::core::exec::OutputData;
use crate::core::limits;
use crate::core::missed::MissedEntry;

/// A frame from init to the engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
#[allow(missing_docs, reason = "docs/engine-contract.md documents every field of every frame")]
pub enum Request {
    Exec {
        id: u64,
        exec: u64,
        code: String,
        #[serde(default)]
        env: Vec<(String, String)>,
        #[serde(default)]
        stdin: bool,
    },
    Call {
        id: u64,
        exec: u64,
        name: String,
        args: Json,
        #[serde(default)]
        env: Vec<(String, String)>,
        #[serde(default)]
        stdin: bool,
    },
    Interrupt {
        exec: u64,
    },
    Get {
        id: u64,
        name: String,
    },
    Set {
        id: u64,
        name: String,
        value: Json,
    },
    Vars {
        id: u64,
    },
    Tools {
        id: u64,
    },
    Complete {
        id: u64,
        code: String,
        cursor: usize,
    },
    Check {
        id: u64,
        code: String,
    },
    DynamicTools {
        tools: Vec<DynamicTool>,
    },
    ToolResult {
        call: u64,
        ok: bool,
        #[serde(default)]
        value: Json,
        #[serde(default)]
        text: String,
        #[serde(default)]
        message: String,
    },
    Save {
        id: u64,
    },
    Load {
        id: u64,
    },
    Entry {
        key: String,
        #[serde(default)]
        meta: EntryMeta,
        #[serde(default)]
        more: bool,
    },
    Loaded {
        id: u64,
    },
    Preload {
        id: u64,
        #[serde(default)]
        modules: Vec<String>,
    },
    Bind {
        id: u64,
        env: Vec<(String, String)>,
    },
    Enter {
        id: u64,
        env: Vec<(String, String)>,
    },
    Reseed {
        id: u64,
        env: Vec<(String, String)>,
    },
    Shutdown,
}

/// A frame from the engine to init.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ev", rename_all = "snake_case")]
#[allow(missing_docs, reason = "docs/engine-contract.md documents every field of every frame")]
pub enum Event {
    Ready {
        engine: String,
        version: String,
        interrupt: InterruptWay,
    },
    Display {
        exec: u64,
        mime: String,
    },
    Structured {
        exec: u64,
        output: OutputData,
    },
    ToolCall {
        call: u64,
        #[serde(default)]
        exec: u64,
        name: String,
        args: Json,
    },
    Jobs {
        jobs: Vec<Job>,
    },
    Put {
        key: String,
        #[serde(default)]
        meta: EntryMeta,
        #[serde(default)]
        more: bool,
    },
    Del {
        key: String,
    },
    Missed {
        entries: Vec<Missed>,
    },
    End {
        id: u64,
        exec: u64,
        status: EndStatus,
        code: i32,
        #[serde(default)]
        err: String,
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
        value: Option<Json>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        output: Option<OutputData>,
    },
    Reply(Reply),
}

/// Keeps `"value": null` (the null value) apart from an absent field.
pub(crate) fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Json>, D::Error> {
    Json::deserialize(d).map(Some)
}

/// The engine's answer to a request other than `exec` and `call`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// The request's id.
    pub id: u64,
    /// Whether the request succeeded.
    pub ok: bool,
    /// On failure: the wire name of an error code.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub code: String,
    /// On failure: the message.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// On failure: a hint.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hint: String,
    /// On success: fields that depend on the request.
    #[serde(flatten)]
    pub fields: serde_json::Map<String, Json>,
}

/// The outcome in a [`Reply`], without the fields that depend on the request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct ReplyHead {
    /// Whether the request succeeded.
    pub ok: bool,
    /// On failure: the wire name of an error code.
    #[serde(default)]
    pub code: String,
    /// On failure: the message.
    #[serde(default)]
    pub message: String,
    /// On failure: a hint.
    #[serde(default)]
    pub hint: String,
}

impl ReplyHead {
    /// The error of a failed request; `Internal` if its code is unknown.
    pub fn into_error(self) -> Error {
        let code = ErrorCode::from_name(&self.code).unwrap_or(ErrorCode::Internal);
        Error::new(code, self.message).hint(self.hint)
    }
}

/// The interrupt method that an engine asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InterruptWay {
    /// `SIGINT` to the engine's process.
    Signal,
    /// An `interrupt` frame.
    Frame,
}

/// How an execution ended, as seen by the engine. Init adds timeouts and losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndStatus {
    /// The code succeeded.
    Done,
    /// The code failed.
    Failed,
    /// The code was interrupted.
    Interrupted,
    /// Nothing ran.
    Refused,
}

/// An MCP tool that the engine may offer to the code.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DynamicTool {
    /// `server__tool`.
    pub name: String,
    /// One line or more.
    #[serde(default)]
    pub description: String,
    /// JSON schema of the arguments, as text.
    #[serde(default)]
    pub schema: Json,
}

/// A running background job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The engine's own id of the job.
    pub id: String,
    /// The command, at most 200 characters.
    #[serde(default)]
    pub command: String,
}

/// Summary of a state entry for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryMeta {
    /// Type, in the engine's terms.
    #[serde(default, rename = "type")]
    pub type_name: String,
    /// Summary, at most 200 characters.
    #[serde(default)]
    pub summary: String,
    /// Further fields of the engine's own.
    #[serde(flatten)]
    pub more: serde_json::Map<String, Json>,
}

/// A value that the engine holds and cannot capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missed {
    /// `kind/name`.
    pub key: String,
    /// Type, in the engine's terms.
    #[serde(default, rename = "type")]
    pub type_name: String,
    /// The reason.
    #[serde(default)]
    pub reason: String,
}

impl From<Missed> for MissedEntry {
    fn from(missed: Missed) -> MissedEntry {
        MissedEntry { key: missed.key, type_name: missed.type_name, reason: missed.reason }
    }
}

/// Why bytes are not a frame. On a stream the connection then closes: the next frame's beginning is unknown.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// JSON part or tail beyond the limits.
    #[error("frame of {json} + {tail} bytes breaks the limits")]
    TooLarge {
        /// Claimed length of the JSON part.
        json: usize,
        /// Claimed length of the tail.
        tail: usize,
    },
    /// The JSON part has more parts than [`limits::FRAME_PARTS`], or [`limits::LISTING_PARTS`].
    #[error("{parts} parts exceed the limit of {most}")]
    TooManyParts {
        /// Their number.
        parts: usize,
        /// The limit.
        most: usize,
    },
    /// The JSON part does not match the contract.
    #[error("frame is not of the contract")]
    Malformed(#[from] serde_json::Error),
}

const HEADER: usize = 8;

/// Appends the encoded frame to `out`.
///
/// # Errors
/// [`FrameError::TooLarge`] if a part exceeds its limit; the peer would close the connection.
pub fn encode<T: Serialize>(frame: &T, tail: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER]);
    serde_json::to_writer(&mut *out, frame)?;
    let json = out.len() - start - HEADER;
    if json > limits::FRAME_JSON_BYTES || tail.len() > limits::FRAME_TAIL_BYTES {
        out.truncate(start);
        return Err(FrameError::TooLarge { json, tail: tail.len() });
    }
    out[start..start + 4].copy_from_slice(&(json as u32).to_le_bytes());
    out[start + 4..start + HEADER].copy_from_slice(&(tail.len() as u32).to_le_bytes());
    out.extend_from_slice(tail);
    Ok(())
}

/// Decodes JSON text from an engine or from init. The daemon decodes none in any other way: decoded
/// values take much more memory than their text.
///
/// # Errors
/// [`FrameError::TooManyParts`], [`FrameError::Malformed`].
pub fn parse_bounded<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, FrameError> {
    parse_up_to(json, limits::FRAME_PARTS)
}

/// Decodes as [`parse_bounded`], with a bound of its own.
pub(crate) fn parse_up_to<'a, T: Deserialize<'a>>(json: &'a [u8], most: usize) -> Result<T, FrameError> {
    match count_parts(json) {
        parts if parts > most => Err(FrameError::TooManyParts { parts, most }),
        _ => Ok(serde_json::from_slice(json)?),
    }
}

/// Counts the parts of a JSON text: lists, objects, and separators in them. Allocates nothing.
pub(crate) fn count_parts(json: &[u8]) -> usize {
    let (mut parts, mut inside, mut escaped) = (0, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if inside => escaped = true,
            b'"' => inside = !inside,
            b',' | b'[' | b'{' if !inside => parts += 1,
            _ => {}
        }
    }
    parts
}

/// The JSON part and the tail of a frame.
pub type RawFrame<'a> = (&'a [u8], &'a [u8]);

/// Splits a byte stream into frames.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    taken: usize,
}

impl Decoder {
    /// Takes bytes from the peer. Buffers at most one largest frame plus `fed`.
    pub fn feed(&mut self, fed: &[u8]) {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(fed);
    }

    /// The next whole frame and its tail; `None` until more bytes arrive.
    ///
    /// # Errors
    /// See [`FrameError`].
    pub fn frame<T: for<'de> Deserialize<'de>>(&mut self) -> Result<Option<(T, Vec<u8>)>, FrameError> {
        match self.raw_frame()? {
            Some((json, tail)) => Ok(Some((serde_json::from_slice(json)?, tail.to_vec()))),
            None => Ok(None),
        }
    }

    /// The next whole frame with its undecoded JSON part, and its tail. `None` until more bytes
    /// arrive.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`].
    pub fn raw_frame(&mut self) -> Result<Option<RawFrame<'_>>, FrameError> {
        let rest = &self.bytes[self.taken..];
        let Some((header, body)) = rest.split_at_checked(HEADER) else {
            return Ok(None);
        };
        let length = |at: usize| {
            let four = [header[at], header[at + 1], header[at + 2], header[at + 3]];
            u32::from_le_bytes(four) as usize
        };
        let (json, tail) = (length(0), length(4));
        if json > limits::FRAME_JSON_BYTES || tail > limits::FRAME_TAIL_BYTES {
            return Err(FrameError::TooLarge { json, tail });
        }
        if body.len() < json + tail {
            return Ok(None);
        }
        self.taken += HEADER + json + tail;
        let (json, rest) = body.split_at(json);
        Ok(Some((json, &rest[..tail])))
    }
}

/// Appends a frame whose JSON part is encoded already.
///
/// # Errors
/// [`FrameError::TooLarge`] if a part exceeds its limit.
pub fn encode_raw(json: &[u8], tail: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
    if json.len() > limits::FRAME_JSON_BYTES || tail.len() > limits::FRAME_TAIL_BYTES {
        return Err(FrameError::TooLarge { json: json.len(), tail: tail.len() });
    }
    out.reserve(HEADER + json.len() + tail.len());
    out.extend_from_slice(&(json.len() as u32).to_le_bytes());
    out.extend_from_slice(&(tail.len() as u32).to_le_bytes());
    out.extend_from_slice(json);
    out.extend_from_slice(tail);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn null_value_differs_from_none() {
        let with: Event = serde_json::from_str(r#"{"ev":"end","id":1,"exec":1,"status":"done","code":0,"value":null}"#)
            .expect("valid");
        let without: Event =
            serde_json::from_str(r#"{"ev":"end","id":1,"exec":1,"status":"done","code":0}"#).expect("valid");
        assert!(matches!(with, Event::End { value: Some(Json::Null), .. }));
        assert!(matches!(without, Event::End { value: None, .. }));
    }

    #[test]
    fn parts_skip_strings() {
        let rows = |n: usize| format!("{{\"rows\":[{}]}}", vec!["{}"; n].join(","));
        assert!(parse_bounded::<Json>(rows(1000).as_bytes()).is_ok());
        let refused = parse_bounded::<Json>(rows(limits::FRAME_PARTS).as_bytes());
        assert!(matches!(refused, Err(FrameError::TooManyParts { .. })));
        let text = format!("{{\"value\":\"{}\\\"[[[,,,\"}}", "{,[".repeat(limits::FRAME_PARTS));
        assert!(parse_bounded::<Json>(text.as_bytes()).is_ok(), "the contents of a text are no parts");
    }

    #[test]
    fn failed_reply_becomes_error() {
        let head = |json: &str| serde_json::from_str::<ReplyHead>(json).expect("valid").into_error();
        let error = head(r#"{"id":1,"ok":false,"code":"notFound","message":"none","hint":"vars lists them"}"#);
        assert_eq!(error, Error::not_found("none").hint("vars lists them"));
        assert_eq!(head(r#"{"ok":false,"code":"?"}"#).code, ErrorCode::Internal);
    }

    #[test]
    fn frame_limit_precedes_allocation() {
        let mut decoder = Decoder::default();
        decoder.feed(&u32::MAX.to_le_bytes());
        decoder.feed(&0u32.to_le_bytes());
        assert!(matches!(decoder.frame::<Event>(), Err(FrameError::TooLarge { .. })));
        let mut out = Vec::new();
        assert!(encode(&Request::Shutdown, &vec![0; limits::FRAME_TAIL_BYTES + 1], &mut out).is_err());
        assert!(out.is_empty());
    }

    proptest! {
        #[test]
        fn frames_decode_at_any_split(code in ".{0,200}", tail in prop::collection::vec(any::<u8>(), 0..200), cut in 1usize..50) {
            let frames = [
                Request::Exec { id: 1, exec: 2, code, env: vec![("A".into(), "b".into())], stdin: true },
                Request::Shutdown,
            ];
            let mut bytes = Vec::new();
            for frame in &frames {
                encode(frame, &tail, &mut bytes).map_err(|e| TestCaseError::fail(e.to_string()))?;
            }
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.feed(piece);
                while let Some((frame, got)) = decoder.frame::<Request>().map_err(|e| TestCaseError::fail(e.to_string()))? {
                    prop_assert_eq!(&got, &tail);
                    seen.push(frame);
                }
            }
            prop_assert_eq!(&seen[..], &frames[..]);
        }

        #[test]
        fn frame_reader_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = Decoder::default();
            decoder.feed(&bytes);
            while let Ok(Some(_)) = decoder.frame::<Event>() {}
        }
    }
}
