//! The attached daemon as seen by init: calls out, their answers back as [`Delivered`].

use capnp::struct_list;
use futures::FutureExt;
use futures::future::LocalBoxFuture;

use tokio::sync::oneshot;

use crate::core::exec::{ExecStatus, Stream};
use crate::core::ids::ExecId;
use crate::core::kernel::CrashCause;
use crate::link::schema::worker_capnp::worker::start_results;
use crate::link::schema::worker_capnp::{OutputStream, chunk, end, supervisor};

/// A pending call to the daemon.
pub type Delivery = LocalBoxFuture<'static, Delivered>;

/// A completed call to the daemon.
#[derive(Debug)]
pub enum Delivered {
    /// There is room for more output. `false`: the link is broken.
    Output(bool),
    /// There is room for more output of jobs.
    Background,
    /// The list of jobs was received.
    Jobs,
    /// The list of unsaved entries was received.
    Missed,
    /// An end or the final notice was received.
    Notice,
    /// A dynamic tool answered.
    Tool {
        /// The engine's id of the call.
        call: u64,
        /// The answer.
        answer: ToolAnswer,
    },
}

/// The answer to a dynamic tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolAnswer {
    /// Its result.
    Done {
        /// The value as JSON.
        value_json: Vec<u8>,
        /// Text for people.
        text: String,
    },
    /// It failed.
    Failed(String),
}

/// The end of an execution, as sent to the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finish {
    /// How it ended.
    pub status: ExecStatus,
    /// Exit code.
    pub code: i32,
    /// One-line error.
    pub err: String,
    /// The engine's `end` frame; empty: none.
    pub frame_json: Vec<u8>,
    /// Wall time.
    pub duration_us: u64,
    /// Total output, bytes.
    pub output_bytes: u64,
    /// Whether the engine is gone, too.
    pub last: bool,
}

/// The connection to the attached daemon.
pub struct Daemon {
    client: supervisor::Client,
    /// Dropping it closes the connection.
    _close: Option<oneshot::Sender<()>>,
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Daemon")
    }
}

impl Daemon {
    pub(crate) fn new(client: supervisor::Client, close: Option<oneshot::Sender<()>>) -> Self {
        Daemon { client, _close: close }
    }

    /// Sends output. `None`: there is room for more already.
    pub fn output(&self, exec: ExecId, offset: u64, stream: Stream, data: &[u8]) -> Option<Delivery> {
        let mut request = self.client.output_request();
        let mut call = request.get();
        call.set_exec_id(exec.0);
        call.set_offset(offset);
        call.set_stream(to_wire_stream(stream));
        call.set_data(data);
        streaming(request.send())
    }

    /// Sends a `display` or `structured` frame of the engine. `None`: there is room for more
    /// already.
    pub fn event(&self, exec: ExecId, json: &[u8], tail: &[u8]) -> Option<Delivery> {
        let mut request = self.client.event_request();
        let mut call = request.get();
        call.set_exec_id(exec.0);
        call.set_json(json);
        call.set_tail(tail);
        streaming(request.send())
    }

    /// Sends an end.
    pub fn ended(&self, exec: ExecId, finish: &Finish) -> Delivery {
        let mut request = self.client.ended_request();
        request.get().set_exec_id(exec.0);
        write_end(request.get().init_end(), finish);
        request.send().promise.map(|_| Delivered::Notice).boxed_local()
    }

    /// Sends a `tool_call` frame. Dropping the delivery cancels the call.
    pub fn tool_call(&self, exec: ExecId, call: u64, json: &[u8]) -> Delivery {
        let mut request = self.client.tool_call_request();
        request.get().set_exec_id(exec.0);
        request.get().set_json(json);
        let promise = request.send().promise;
        let decoded = async move {
            let answer = promise.await?;
            let answer = answer.get()?;
            let text = answer.get_text()?.to_string()?;
            Ok::<_, capnp::Error>(match answer.get_ok() {
                true => ToolAnswer::Done { value_json: answer.get_value_json()?.to_vec(), text },
                false => ToolAnswer::Failed(text),
            })
        };
        decoded
            .map(move |answer| {
                let failed = |_| ToolAnswer::Failed("the daemon disconnected during the call".into());
                Delivered::Tool { call, answer: answer.unwrap_or_else(failed) }
            })
            .boxed_local()
    }

    /// Sends a `jobs` frame.
    pub fn jobs(&self, json: &[u8]) -> Delivery {
        let mut request = self.client.jobs_request();
        request.get().set_json(json);
        request.send().promise.map(|_| Delivered::Jobs).boxed_local()
    }

    /// Sends a `missed` frame.
    pub fn missed(&self, json: &[u8]) -> Delivery {
        let mut request = self.client.missed_request();
        request.get().set_json(json);
        request.send().promise.map(|_| Delivered::Missed).boxed_local()
    }

    /// Sends output of jobs.
    pub fn background(&self, stream: Stream, data: &[u8]) -> Delivery {
        let mut request = self.client.background_request();
        request.get().set_stream(to_wire_stream(stream));
        request.get().set_data(data);
        request.send().promise.map(|_| Delivered::Background).boxed_local()
    }

    /// Sends the final notice.
    pub fn dying(&self, cause: &CrashCause) -> Delivery {
        let mut request = self.client.dying_request();
        // Encoding this enum cannot fail; an empty text would be reported as an unreadable cause.
        request.get().set_cause_json(&serde_json::to_vec(cause).unwrap_or_default());
        request.send().promise.map(|_| Delivered::Notice).boxed_local()
    }
}

/// Writes the answer to a start whose execution has already ended.
pub(crate) fn write_ended(mut results: start_results::Builder<'_>, finish: &Finish, output: &[(Stream, Vec<u8>)]) {
    results.set_ended(true);
    write_end(results.reborrow().init_end(), finish);
    write_chunks(results.init_output(output.len() as u32), output);
}

pub(crate) fn write_chunks(mut chunks: struct_list::Builder<'_, chunk::Owned>, output: &[(Stream, Vec<u8>)]) {
    for (i, (stream, data)) in output.iter().enumerate() {
        let mut chunk = chunks.reborrow().get(i as u32);
        chunk.set_stream(to_wire_stream(*stream));
        chunk.set_data(data);
    }
}

pub(crate) fn write_end(mut end: end::Builder<'_>, finish: &Finish) {
    end.set_status(finish.status.name());
    end.set_code(finish.code);
    end.set_err(&finish.err);
    end.set_frame_json(&finish.frame_json);
    end.set_duration_us(finish.duration_us);
    end.set_output_bytes(finish.output_bytes);
    end.set_last(finish.last);
}

/// The promise of a streaming call resolves when the window has room; usually at once.
fn streaming(mut promise: capnp::capability::Promise<(), capnp::Error>) -> Option<Delivery> {
    match (&mut promise).now_or_never() {
        Some(Ok(())) => None,
        Some(Err(_)) => Some(async { Delivered::Output(false) }.boxed_local()),
        None => Some(promise.map(|sent| Delivered::Output(sent.is_ok())).boxed_local()),
    }
}

pub(super) fn to_wire_stream(stream: Stream) -> OutputStream {
    match stream {
        Stream::Stdout => OutputStream::Stdout,
        Stream::Stderr => OutputStream::Stderr,
    }
}
