//! A process beside the engine as the daemon sees it: what it sends to start one, and where the
//! output goes.

use std::rc::Rc;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;

use super::daemon::{Finish, to_wire_stream, write_end};
use crate::core::error::{Error, Result};
use crate::core::exec::{Stream, TerminalSize};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::link::schema::worker_capnp::{process, process_sink};

/// A process to start.
#[derive(Debug)]
pub struct ProcessStart {
    /// Its number.
    pub exec: ExecId,
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Its environment beside the variables of every engine.
    pub env: Vec<(String, String)>,
    /// Its working directory.
    pub cwd: String,
    /// Whether it has standard input.
    pub has_stdin: bool,
    /// Timeout, milliseconds; 0: none.
    pub timeout_ms: u64,
    /// Its terminal.
    pub terminal: Option<TerminalSize>,
}

impl ProcessStart {
    /// Reads a process within the limits.
    pub(super) fn read(process: process::Reader<'_>) -> capnp::Result<Result<ProcessStart>> {
        let (argv, env) = (process.get_argv()?, process.get_env()?);
        if argv.is_empty() || argv.len() as usize > limits::PROCESS_ARGUMENTS || env.len() as usize > limits::ENV_BYTES
        {
            return Ok(Err(Error::invalid("a process with too many or no arguments")));
        }
        let texts = |list: capnp::text_list::Reader<'_>| {
            list.iter().map(|text| Ok(text?.to_string()?)).collect::<capnp::Result<Vec<String>>>()
        };
        let pair = |text: String| text.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
        Ok(Ok(ProcessStart {
            exec: ExecId(process.get_exec_id()),
            argv: texts(argv)?,
            env: texts(env)?.into_iter().filter_map(pair).collect(),
            cwd: process.get_cwd()?.to_string()?,
            has_stdin: process.get_has_stdin(),
            timeout_ms: process.get_timeout_ms(),
            terminal: TerminalSize::from_wire(process.get_rows(), process.get_columns()),
        }))
    }
}

/// Where a process's output and end go.
#[derive(Clone)]
pub struct ProcessSink(Rc<process_sink::Client>);

impl std::fmt::Debug for ProcessSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProcessSink")
    }
}

impl ProcessSink {
    pub(super) fn new(client: process_sink::Client) -> Self {
        ProcessSink(Rc::new(client))
    }

    /// Sends output; resolves when there is room for more, with whether the link works.
    pub fn output(&self, offset: u64, stream: Stream, data: &[u8]) -> LocalBoxFuture<'static, bool> {
        let mut request = self.0.output_request();
        let mut call = request.get();
        call.set_offset(offset);
        call.set_stream(to_wire_stream(stream));
        call.set_data(data);
        request.send().map(|sent| sent.is_ok()).boxed_local()
    }

    /// Sends the end.
    pub fn ended(&self, finish: &Finish) -> LocalBoxFuture<'static, bool> {
        let mut request = self.0.ended_request();
        write_end(request.get().init_end(), finish);
        request.send().promise.map(|sent| sent.is_ok()).boxed_local()
    }
}
