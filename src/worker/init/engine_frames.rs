//! The parts of an engine's frames that init acts on. Values, outputs and arguments stay text for
//! the daemon to decode, so their depth and size cost init nothing. Pure.

use serde::Deserialize;

use crate::core::limits;
use crate::link::frames::{EndStatus, EntryMeta, InterruptWay, Job, Missed};

/// Longest key of a state entry, bytes.
const KEY_BYTES: usize = 1024;
/// Longest forwarded `err`, bytes.
const ERR_BYTES: usize = 16 << 10;
/// Longest metadata of a state entry, bytes.
const META_BYTES: usize = 64 << 10;
/// Longest `put` or `del` frame, bytes: an escape takes up to three bytes for one of the text.
const ENTRY_FRAME_BYTES: usize = 4 * (META_BYTES + KEY_BYTES);

/// An engine's frame, as far as init decodes it.
#[derive(Debug, Clone, PartialEq)]
pub enum EngineEvent {
    /// The engine is ready.
    Ready(EngineReady),
    /// A `display` or `structured` frame of that execution.
    Shown {
        /// The execution.
        exec: u64,
    },
    /// A call of a dynamic tool.
    ToolCall {
        /// The engine's id of the call.
        call: u64,
        /// The execution; 0: none.
        exec: u64,
    },
    /// The list of running jobs.
    /// The jobs, and whether threads of the engine run that share its state.
    Jobs(Vec<Job>, bool),
    /// One chunk of a new or changed entry.
    Put {
        /// `kind/name`.
        key: String,
        /// One JSON object.
        meta_json: String,
        /// Whether the next chunk belongs to the same key.
        more: bool,
    },
    /// A deleted entry.
    Del {
        /// `kind/name`.
        key: String,
    },
    /// The list of entries that cannot be saved.
    Missed(Vec<Missed>),
    /// The end of an execution.
    End(EngineEnd),
    /// The reply to a request.
    Reply {
        /// The request's id.
        id: u64,
        /// Whether it succeeded.
        ok: bool,
    },
}

impl EngineEvent {
    /// Its name in the contract.
    pub fn name(&self) -> &'static str {
        match self {
            EngineEvent::Ready(_) => "ready",
            EngineEvent::Shown { .. } => "display",
            EngineEvent::ToolCall { .. } => "tool_call",
            EngineEvent::Jobs(..) => "jobs",
            EngineEvent::Put { .. } => "put",
            EngineEvent::Del { .. } => "del",
            EngineEvent::Missed(_) => "missed",
            EngineEvent::End(_) => "end",
            EngineEvent::Reply { .. } => "reply",
        }
    }
}

/// The engine's introduction.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct EngineReady {
    /// Its name.
    pub engine: String,
    /// Its own version.
    pub version: String,
    /// Its interrupt method.
    pub interrupt: InterruptWay,
}

/// The end of an execution.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct EngineEnd {
    /// The request's id.
    pub id: u64,
    /// The execution.
    pub exec: u64,
    /// The status.
    pub status: EndStatus,
    /// Exit code.
    pub code: i32,
    /// One-line error, cut at 16 KiB.
    #[serde(default)]
    pub err: String,
}

/// Reads the head of a frame.
///
/// # Errors
/// What is wrong with the frame, for the crash report.
pub fn read(json: &[u8]) -> Result<EngineEvent, String> {
    let kind: Kind = from(json)?;
    match kind.ev.as_str() {
        "ready" => Ok(EngineEvent::Ready(from(json)?)),
        "display" | "structured" => from(json).map(|Shown { exec }| EngineEvent::Shown { exec }),
        "tool_call" => from(json).map(|ToolCall { call, exec }| EngineEvent::ToolCall { call, exec }),
        "jobs" => {
            bounded(json)?;
            from(json).map(|Jobs { jobs, threads }| EngineEvent::Jobs(jobs, threads))
        }
        "put" => read_put(json),
        "del" => {
            let Del { key } = from(json)?;
            check_key(&key)?;
            Ok(EngineEvent::Del { key })
        }
        "missed" => {
            bounded(json)?;
            from(json).map(|MissedList { entries }| EngineEvent::Missed(entries))
        }
        "end" => {
            let mut end: EngineEnd = from(json)?;
            cut(&mut end.err, ERR_BYTES);
            Ok(EngineEvent::End(end))
        }
        "reply" => from(json).map(|Reply { id, ok }| EngineEvent::Reply { id, ok }),
        other => Err(format!("unknown event {:?}", other.chars().take(40).collect::<String>())),
    }
}

fn read_put(json: &[u8]) -> Result<EngineEvent, String> {
    if json.len() > ENTRY_FRAME_BYTES {
        return Err(format!("a state entry whose frame has {} bytes", json.len()));
    }
    let Put { key, meta, more } = from(json)?;
    check_key(&key)?;
    let meta_json = serde_json::to_string(&meta).map_err(|e| e.to_string())?;
    if meta_json.len() > META_BYTES {
        return Err(format!("meta data of {} bytes", meta_json.len()));
    }
    Ok(EngineEvent::Put { key, meta_json, more })
}

fn from<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(json).map_err(|error| {
        let mut text = format!("frame is not of the contract: {error}");
        cut(&mut text, 300);
        text
    })
}

fn bounded(json: &[u8]) -> Result<(), String> {
    match json.len() > limits::ENGINE_LIST_BYTES {
        true => Err(format!("a list of {} bytes", json.len())),
        false => Ok(()),
    }
}

fn check_key(key: &str) -> Result<(), String> {
    match key.is_empty() || key.len() > KEY_BYTES || key.contains('\0') {
        true => Err(format!("state entry with a key of {} bytes", key.len())),
        false => Ok(()),
    }
}

/// Cuts a text at a character boundary.
pub fn cut(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        text.truncate(text.floor_char_boundary(bytes));
    }
}

#[derive(Deserialize)]
struct Kind {
    ev: String,
}

#[derive(Deserialize)]
struct Shown {
    exec: u64,
}

#[derive(Deserialize)]
struct ToolCall {
    call: u64,
    #[serde(default)]
    exec: u64,
}

#[derive(Deserialize)]
struct Jobs {
    jobs: Vec<Job>,
    #[serde(default)]
    threads: bool,
}

#[derive(Deserialize)]
struct Put {
    key: String,
    #[serde(default)]
    meta: EntryMeta,
    #[serde(default)]
    more: bool,
}

#[derive(Deserialize)]
struct Del {
    key: String,
}

#[derive(Deserialize)]
struct MissedList {
    entries: Vec<Missed>,
}

#[derive(Deserialize)]
struct Reply {
    id: u64,
    ok: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn contract_frames_are_parsed() {
        let deep = format!(
            r#"{{"ev":"end","id":1,"exec":7,"status":"done","code":0,"value":{}{}}}"#,
            "[".repeat(100_000),
            "]".repeat(100_000)
        );
        for (json, expected) in [
            (
                r#"{"ev":"ready","engine":"python","version":"3","interrupt":"signal"}"#,
                EngineEvent::Ready(EngineReady {
                    engine: "python".into(),
                    version: "3".into(),
                    interrupt: InterruptWay::Signal,
                }),
            ),
            (r#"{"ev":"display","exec":7,"mime":"text/html"}"#, EngineEvent::Shown { exec: 7 }),
            (r#"{"ev":"tool_call","call":1,"name":"x","args":null}"#, EngineEvent::ToolCall { call: 1, exec: 0 }),
            (r#"{"ev":"jobs","jobs":[]}"#, EngineEvent::Jobs(vec![], false)),
            (r#"{"ev":"jobs","jobs":[],"threads":true}"#, EngineEvent::Jobs(vec![], true)),
            (r#"{"ev":"del","key":"var/x"}"#, EngineEvent::Del { key: "var/x".into() }),
            (r#"{"ev":"reply","id":3,"ok":false,"code":"notFound"}"#, EngineEvent::Reply { id: 3, ok: false }),
            (
                deep.as_str(),
                EngineEvent::End(EngineEnd { id: 1, exec: 7, status: EndStatus::Done, code: 0, err: String::new() }),
            ),
        ] {
            assert_eq!(read(json.as_bytes()), Ok(expected));
        }
        let put = read(br#"{"ev":"put","key":"var/x","meta":{"type":"int","summary":"42","z":[1]},"more":false}"#);
        assert!(matches!(put, Ok(EngineEvent::Put { meta_json, .. }) if meta_json.contains("\"z\":[1]")));
    }

    #[test]
    fn invalid_engine_frames_are_refused() {
        let long = format!(r#"{{"ev":"del","key":"{}"}}"#, "k".repeat(2000));
        for json in [
            "",
            "{}",
            "[]",
            r#"{"ev":"nope"}"#,
            r#"{"ev":"end","id":1}"#,
            r#"{"ev":"del","key":""}"#,
            r#"{"ev":"end","id":1,"exec":1,"status":"lost","code":0}"#,
            &long,
        ] {
            assert!(read(json.as_bytes()).is_err(), "{json}");
        }
    }

    #[test]
    fn long_errors_are_cut_between_characters() {
        let json =
            format!(r#"{{"ev":"end","id":1,"exec":1,"status":"failed","code":1,"err":"{}"}}"#, "é".repeat(20_000));
        let Ok(EngineEvent::End(end)) = read(json.as_bytes()) else { panic!("an end") };
        assert_eq!(end.err.len(), ERR_BYTES);
    }

    proptest! {
        #[test]
        fn wire_garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }
    }
}
