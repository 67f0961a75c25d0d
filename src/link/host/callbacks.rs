//! The daemon's end of a worker's reports: decodes them and calls the kernel's [`WorkerListener`].
//!
//! Cap'n Proto keeps the order: a streaming call (`output`, `event`) delays later calls on the same
//! capability until it returns. Engine data is untrusted: undecodable data becomes an absent value
//! and a line in `err`, never a failed call, which would break the link.

use std::rc::Rc;

use serde::Deserialize;
use serde_json::Value as Json;

use crate::core::error::Error;
use crate::core::exec::{ExecEnd, ExecStatus, OutputData, OutputEvent, Stream};
use crate::core::ids::ExecId;
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::value::Value;
use crate::link::frames::Missed;
use crate::link::schema::worker_capnp::{OutputStream, chunk, end, supervisor};
use crate::link::types::{Job, WorkerListener};

type Done = Result<(), capnp::Error>;

pub(crate) struct SupervisorServer {
    pub(crate) listener: Rc<dyn WorkerListener>,
}

impl supervisor::Server for SupervisorServer {
    async fn output(self: Rc<Self>, params: supervisor::OutputParams) -> Done {
        let params = params.get()?;
        let (exec, offset) = (ExecId(params.get_exec_id()), params.get_offset());
        let stream = from_wire_stream(params.get_stream()?);
        self.listener.output(exec, offset, stream, params.get_data()?.to_vec()).await;
        Ok(())
    }

    async fn event(self: Rc<Self>, params: supervisor::EventParams) -> Done {
        let params = params.get()?;
        let exec = ExecId(params.get_exec_id());
        match decode_event(params.get_json()?, params.get_tail()?) {
            Ok(event) => self.listener.event(exec, event).await,
            Err(error) => tracing::debug!(%exec, %error, "an engine's event does not decode"),
        }
        Ok(())
    }

    async fn ended(self: Rc<Self>, params: supervisor::EndedParams, _: supervisor::EndedResults) -> Done {
        let params = params.get()?;
        take_end(&*self.listener, ExecId(params.get_exec_id()), params.get_end()?)
    }

    async fn tool_call(
        self: Rc<Self>,
        params: supervisor::ToolCallParams,
        mut results: supervisor::ToolCallResults,
    ) -> Done {
        let params = params.get()?;
        let exec = ExecId(params.get_exec_id());
        let answer = match decode_tool_call(params.get_json()?) {
            Ok((name, args)) => self.listener.tool_call(exec, name, args).await,
            Err(error) => Err(error),
        };
        let mut results = results.get();
        match answer.and_then(|(value, text)| Ok((encode_value(&value)?, text))) {
            Ok((json, text)) => {
                results.set_ok(true);
                results.set_value_json(json.as_bytes());
                results.set_text(&text);
            }
            Err(error) => {
                results.set_ok(false);
                results.set_text(&error.message);
            }
        }
        Ok(())
    }

    async fn jobs(self: Rc<Self>, params: supervisor::JobsParams, _: supervisor::JobsResults) -> Done {
        self.listener.jobs(decode_jobs(params.get()?.get_json()?));
        Ok(())
    }

    async fn missed(self: Rc<Self>, params: supervisor::MissedParams, _: supervisor::MissedResults) -> Done {
        self.listener.missed(decode_missed(params.get()?.get_json()?));
        Ok(())
    }

    async fn background(
        self: Rc<Self>,
        params: supervisor::BackgroundParams,
        _: supervisor::BackgroundResults,
    ) -> Done {
        let params = params.get()?;
        self.listener.background(from_wire_stream(params.get_stream()?), params.get_data()?.to_vec());
        Ok(())
    }

    async fn dying(self: Rc<Self>, params: supervisor::DyingParams, _: supervisor::DyingResults) -> Done {
        let cause = serde_json::from_slice(params.get()?.get_cause_json()?)
            .unwrap_or_else(|error| CrashCause::Protocol(format!("unreadable cause: {error}")));
        self.listener.dying(cause);
        Ok(())
    }
}

/// A finished execution with its whole output.
pub(crate) struct Over {
    output: Vec<(Stream, Vec<u8>)>,
    end: ExecEnd,
    output_bytes: u64,
    last: bool,
}

impl Over {
    pub(crate) fn read(
        end: end::Reader<'_>,
        output: capnp::struct_list::Reader<'_, chunk::Owned>,
    ) -> capnp::Result<Over> {
        let chunk = |chunk: chunk::Reader<'_>| Ok((from_wire_stream(chunk.get_stream()?), chunk.get_data()?.to_vec()));
        Ok(Over {
            output: output.iter().map(chunk).collect::<capnp::Result<_>>()?,
            end: decode_end(end)?,
            output_bytes: end.get_output_bytes(),
            last: end.get_last(),
        })
    }
}

/// Reports the end found in the answer to a start as if it had arrived by `output` and `ended`.
pub(crate) async fn tell_over(listener: &dyn WorkerListener, exec: ExecId, over: Over) {
    let mut offset = 0;
    for (stream, data) in over.output {
        let bytes = data.len() as u64;
        listener.output(exec, offset, stream, data).await;
        offset += bytes;
    }
    if over.last {
        listener.last();
    }
    listener.ended(exec, over.end, over.output_bytes);
}

fn take_end(listener: &dyn WorkerListener, exec: ExecId, end: end::Reader<'_>) -> Done {
    if end.get_last() {
        listener.last();
    }
    listener.ended(exec, decode_end(end)?, end.get_output_bytes());
    Ok(())
}

fn from_wire_stream(stream: OutputStream) -> Stream {
    match stream {
        OutputStream::Stdout => Stream::Stdout,
        OutputStream::Stderr => Stream::Stderr,
    }
}

fn decode_event(json: &[u8], tail: &[u8]) -> Result<OutputEvent, serde_json::Error> {
    #[derive(Deserialize)]
    #[serde(tag = "ev", rename_all = "snake_case")]
    enum Frame {
        Display { mime: String },
        Structured { output: OutputData },
    }
    check_parts(json)?;
    Ok(match serde_json::from_slice(json)? {
        Frame::Display { mime } if mime.len() > limits::MEDIA_TYPE_BYTES => {
            return Err(serde::de::Error::custom("the media type is too long"));
        }
        Frame::Display { mime } => OutputEvent::Display { mime, data: tail.to_vec() },
        Frame::Structured { output } => OutputEvent::Structured(output),
    })
}

/// Refuses a JSON text with more than [`limits::FRAME_PARTS`] parts before allocating memory for
/// them.
pub(super) fn check_parts(json: &[u8]) -> Result<(), serde_json::Error> {
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
    if parts <= limits::FRAME_PARTS {
        return Ok(());
    }
    Err(serde::de::Error::custom(format_args!("{parts} parts exceed the limit of {}", limits::FRAME_PARTS)))
}

fn decode_end(end: end::Reader<'_>) -> Result<ExecEnd, capnp::Error> {
    let status = end.get_status()?.to_string()?;
    let mut decoded = ExecEnd {
        status: ExecStatus::from_name(&status)
            .ok_or_else(|| capnp::Error::failed(format!("unknown status {status:?}")))?,
        code: end.get_code(),
        err: end.get_err()?.to_string()?,
        value: None,
        output: None,
        duration_us: end.get_duration_us(),
    };
    let frame = end.get_frame_json()?;
    if let Err(error) = decode_end_frame(frame, &mut decoded)
        && decoded.err.is_empty()
    {
        decoded.err = error.message;
    }
    Ok(decoded)
}

fn decode_end_frame(json: &[u8], end: &mut ExecEnd) -> Result<(), Error> {
    #[derive(Deserialize)]
    struct Frame {
        #[serde(default, deserialize_with = "present")]
        value: Option<Json>,
        #[serde(default)]
        output: Option<OutputData>,
    }
    if json.is_empty() {
        return Ok(());
    }
    let unreadable =
        |why: &dyn std::fmt::Display| Error::corrupt(format!("the result's value cannot be decoded: {why}"));
    check_parts(json).map_err(|e| unreadable(&e))?;
    let frame: Frame = serde_json::from_slice(json).map_err(|e| unreadable(&e))?;
    end.output = frame.output;
    end.value = frame.value.as_ref().map(Value::from_json).transpose().map_err(|e| unreadable(&e))?;
    Ok(())
}

/// Keeps `"value": null` (the null value) apart from an absent field.
fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Json>, D::Error> {
    Json::deserialize(d).map(Some)
}

fn decode_tool_call(json: &[u8]) -> Result<(String, Value), Error> {
    #[derive(Deserialize)]
    struct Frame {
        name: String,
        args: Json,
    }
    let frame: Frame = serde_json::from_slice(json).map_err(|e| Error::invalid(format!("tool call: {e}")))?;
    let args = Value::from_json(&frame.args).map_err(|e| Error::invalid(format!("arguments of the tool: {e}")))?;
    Ok((frame.name, args))
}

/// The jobs of a `jobs` frame; none if there was no frame.
pub(crate) fn decode_jobs(json: &[u8]) -> Vec<Job> {
    #[derive(Deserialize, Default)]
    struct Frame {
        jobs: Vec<Job>,
    }
    serde_json::from_slice::<Frame>(json).unwrap_or_default().jobs
}

/// The entries of a `missed` frame; none if there was no frame.
pub(crate) fn decode_missed(json: &[u8]) -> Vec<MissedEntry> {
    #[derive(Deserialize, Default)]
    struct Frame {
        entries: Vec<Missed>,
    }
    missed_entries(serde_json::from_slice::<Frame>(json).unwrap_or_default().entries)
}

/// Converts the contract's form to `core`'s.
pub(crate) fn missed_entries(entries: Vec<Missed>) -> Vec<MissedEntry> {
    let entry = |m: Missed| MissedEntry { key: m.key, type_name: m.type_name, reason: m.reason };
    entries.into_iter().map(entry).collect()
}

/// JSON nesting that every engine's parser reads.
const JSON_DEPTH: usize = 120;

/// A value's JSON text, within the engines' limits.
///
/// # Errors
/// `InvalidArgument` for a value that is too large or nested too deep.
pub(crate) fn encode_value(value: &Value) -> Result<String, Error> {
    if json_depth(value) > JSON_DEPTH {
        return Err(Error::invalid("the value is nested too deep for an engine"));
    }
    let text = value.to_json().to_string();
    if text.len() > limits::VALUE_BYTES {
        let message = format!("a value of {} bytes is larger than {} bytes", text.len(), limits::VALUE_BYTES);
        return Err(Error::invalid(message).hint("store it as a blob and pass its reference"));
    }
    Ok(text)
}

fn json_depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(json_depth).max().unwrap_or(0),
        // The tag's object, the list of pairs, the pair.
        Value::Object(fields) => 3 + fields.iter().map(|(_, v)| json_depth(v)).max().unwrap_or(0),
        Value::Null
        | Value::Bool(_)
        | Value::Int(_)
        | Value::Float(_)
        | Value::String(_)
        | Value::Blob(_)
        | Value::Bytes(_)
        | Value::BigInt(_)
        | Value::Opaque { .. } => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_parts_skip_strings() {
        let rows = |n: usize| format!("{{\"output\":{{\"root\":[{}]}}}}", vec!["{}"; n].join(","));
        assert!(check_parts(rows(1000).as_bytes()).is_ok());
        assert!(check_parts(rows(limits::FRAME_PARTS).as_bytes()).is_err());
        let text = format!("{{\"value\":\"{}\\\"[[[,,,\"}}", "{,[".repeat(limits::FRAME_PARTS));
        assert!(check_parts(text.as_bytes()).is_ok(), "what stands in a text is no part");
    }

    #[test]
    fn hostile_value_is_dropped() {
        for (frame, value) in [
            (r#"{"ev":"end","value":null}"#.to_owned(), Some(Value::Null)),
            (r#"{"ev":"end"}"#.to_owned(), None),
            (r#"{"ev":"end","value":1}"#.to_owned(), None),
            (format!(r#"{{"ev":"end","value":{}1{}}}"#, "[".repeat(50_000), "]".repeat(50_000)), None),
        ] {
            let mut end = ExecEnd::lost("");
            let outcome = decode_end_frame(frame.as_bytes(), &mut end);
            assert_eq!(end.value, value);
            assert_eq!(outcome.is_err(), value.is_none() && frame.contains("value"));
        }
    }

    #[test]
    fn value_depth_includes_encoding() {
        let nest = |n: usize| (0..n).fold(Value::Null, |v, _| Value::Object(vec![("k".into(), v)]));
        assert!(encode_value(&nest(39)).is_ok());
        assert!(encode_value(&nest(40)).is_err());
        let text = encode_value(&nest(39)).unwrap_or_default();
        assert!(serde_json::from_str::<Json>(&text).is_ok());
    }

    #[test]
    fn invalid_lists_decode_to_empty() {
        assert_eq!(decode_jobs(b"").len(), 0);
        assert_eq!(decode_jobs(br#"{"ev":"jobs","jobs":[{"id":"1","command":"sleep"}]}"#).len(), 1);
        assert_eq!(decode_missed(br#"{"entries":[{"key":"var/x"}]}"#)[0].key, "var/x");
    }
}
