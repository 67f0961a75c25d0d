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
use crate::link::frames::{FrameError, Missed, parse_bounded, parse_up_to, present};
use crate::link::schema::worker_capnp::{OutputStream, chunk, end, process_sink, supervisor};
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
        self.listener.dying(decode_cause(params.get()?.get_cause_json()?));
        Ok(())
    }
}

/// The daemon's end of one process.
pub(crate) struct ProcessSinkServer {
    pub(crate) exec: ExecId,
    pub(crate) listener: Rc<dyn WorkerListener>,
}

impl process_sink::Server for ProcessSinkServer {
    async fn output(self: Rc<Self>, params: process_sink::OutputParams) -> Done {
        let params = params.get()?;
        let (offset, stream) = (params.get_offset(), from_wire_stream(params.get_stream()?));
        self.listener.output(self.exec, offset, stream, params.get_data()?.to_vec()).await;
        Ok(())
    }

    async fn ended(self: Rc<Self>, params: process_sink::EndedParams, _: process_sink::EndedResults) -> Done {
        let end = params.get()?.get_end()?;
        self.listener.ended(self.exec, decode_end(end)?, end.get_output_bytes());
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

fn decode_event(json: &[u8], tail: &[u8]) -> Result<OutputEvent, FrameError> {
    #[derive(Deserialize)]
    #[serde(tag = "ev", rename_all = "snake_case")]
    enum Frame {
        Display { mime: String },
        Structured { output: OutputData },
    }
    Ok(match parse_bounded(json)? {
        Frame::Display { mime } if mime.len() > limits::MEDIA_TYPE_BYTES => {
            return Err(FrameError::Malformed(serde::de::Error::custom("the media type is too long")));
        }
        Frame::Display { mime } => OutputEvent::Display { mime, data: tail.to_vec() },
        Frame::Structured { output } => OutputEvent::Structured(output),
    })
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
    let frame: Frame = parse_bounded(json).map_err(|e| unreadable(&e))?;
    end.output = frame.output;
    end.value = frame.value.as_ref().map(Value::from_json).transpose().map_err(|e| unreadable(&e))?;
    Ok(())
}

fn decode_tool_call(json: &[u8]) -> Result<(String, Value), Error> {
    #[derive(Deserialize)]
    struct Frame {
        name: String,
        args: Json,
    }
    let frame: Frame = parse_bounded(json).map_err(|e| Error::invalid(format!("tool call: {e}")))?;
    let args = Value::from_json(&frame.args).map_err(|e| Error::invalid(format!("arguments of the tool: {e}")))?;
    Ok((frame.name, args))
}

/// The jobs of a `jobs` frame; none if there was no frame, or an invalid one.
pub(crate) fn decode_jobs(json: &[u8]) -> Vec<Job> {
    #[derive(Deserialize, Default)]
    struct Frame {
        jobs: Vec<Job>,
    }
    decode_list::<Frame>(json).jobs
}

/// The entries of a `missed` frame; none if there was no frame, or an invalid one.
pub(crate) fn decode_missed(json: &[u8]) -> Vec<MissedEntry> {
    #[derive(Deserialize, Default)]
    struct Frame {
        entries: Vec<Missed>,
    }
    decode_list::<Frame>(json).entries.into_iter().map(MissedEntry::from).collect()
}

/// The entries of a list in a report; none if there was no list, or an invalid one.
pub(crate) fn decode_not_restored(json: &[u8]) -> Vec<MissedEntry> {
    decode_list::<Vec<Missed>>(json).into_iter().map(MissedEntry::from).collect()
}

fn decode_list<'a, T: Deserialize<'a> + Default>(json: &'a [u8]) -> T {
    if json.is_empty() {
        return T::default();
    }
    parse_up_to(json, limits::LISTING_PARTS).unwrap_or_else(|error| {
        tracing::debug!(%error, "a worker's list does not decode");
        T::default()
    })
}

fn decode_cause(json: &[u8]) -> CrashCause {
    parse_bounded(json).unwrap_or_else(|error| CrashCause::Protocol(format!("unreadable cause: {error}")))
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

    /// A valid list of more elements than a frame may have parts.
    fn many(element: &str) -> String {
        format!("[{}]", vec![element; limits::FRAME_PARTS + 1].join(","))
    }

    #[test]
    fn hostile_value_is_dropped() {
        for (frame, value) in [
            (r#"{"ev":"end","value":null}"#.to_owned(), Some(Value::Null)),
            (r#"{"ev":"end"}"#.to_owned(), None),
            (r#"{"ev":"end","value":1}"#.to_owned(), None),
            (format!(r#"{{"ev":"end","value":{}1{}}}"#, "[".repeat(50_000), "]".repeat(50_000)), None),
            (format!(r#"{{"ev":"end","value":{}}}"#, many("null")), None),
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
    fn oversized_tool_call_is_refused() {
        let call = |args: &str| decode_tool_call(format!(r#"{{"name":"t","args":{args}}}"#).as_bytes());
        assert!(call("[null]").is_ok());
        assert!(call(&many("null")).is_err_and(|error| error.message.contains("parts")));
    }

    #[test]
    fn oversized_event_is_dropped() {
        let event = |rest: &str| decode_event(format!(r#"{{"ev":"display","mime":"a/b"{rest}}}"#).as_bytes(), b"");
        assert!(event("").is_ok());
        assert!(matches!(event(&format!(r#","x":{}"#, many("0"))), Err(FrameError::TooManyParts { .. })));
    }

    #[test]
    fn oversized_lists_decode_to_empty() {
        let many = |row: &str| format!("[{}]", vec![row; limits::LISTING_PARTS].join(","));
        assert_eq!(decode_jobs(format!(r#"{{"jobs":{}}}"#, many(r#"{"id":""}"#)).as_bytes()).len(), 0);
        assert_eq!(decode_missed(format!(r#"{{"entries":{}}}"#, many(r#"{"key":""}"#)).as_bytes()).len(), 0);
        assert_eq!(decode_not_restored(many(r#"{"key":""}"#).as_bytes()).len(), 0);
    }

    #[test]
    fn oversized_cause_is_replaced() {
        let cause = CrashCause::Protocol("a frame".into());
        let json = serde_json::to_string(&cause).expect("encodes");
        assert_eq!(decode_cause(json.as_bytes()), cause);
        let hostile = decode_cause(many("0").as_bytes());
        assert!(matches!(hostile, CrashCause::Protocol(why) if why.contains("parts")));
    }

    #[test]
    fn full_state_fits_the_limit() {
        let missed = r#"{"key":"var/x","type":"t","reason":"r"}"#;
        let list = format!(r#"{{"entries":[{}]}}"#, vec![missed; limits::STATE_ENTRIES].join(","));
        assert_eq!(decode_missed(list.as_bytes()).len(), limits::STATE_ENTRIES);
    }

    #[test]
    fn invalid_lists_decode_to_empty() {
        assert_eq!(decode_jobs(b"").len(), 0);
        assert_eq!(decode_jobs(br#"{"ev":"jobs","jobs":[{"id":"1","command":"sleep"}]}"#).len(), 1);
        assert_eq!(decode_missed(br#"{"entries":[{"key":"var/x"}]}"#)[0].key, "var/x");
    }
}
