//! The fake's executions.
//!
//! | code | output, end |
//! |---|---|
//! | `say X` | X and a line end; done |
//! | `both` | `out`, `err`, `out` in turn; done |
//! | `value` | nothing; value 42 and its repr |
//! | `fail N` | `failed` on stderr; failed with N |
//! | `unsaved` | nothing; done, with an error text |
//! | `broken` | nothing; failed with 1 and an error text |
//! | `late` | nothing; timeout |
//! | `lost` | `before`; the worker is lost |
//! | `wait` | `waiting`, until interrupted |
//! | `stubborn` | `waiting`, for ever |
//! | `flood` | 64 KiB chunks until interrupted; counts them in the log |
//! | `cat` | its input |
//! | `hang up` | the fake closes every connection |
//! | `hang up later` | `waiting`; a little later the fake closes every connection |

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ryokan::core::exec::{ExecEnd, ExecRequest, ExecResult, ExecStatus, OutputData, OutputEvent, OutputNode, Work};
use ryokan::core::ids::ExecId;
use ryokan::core::value::Value;
use ryokan::rpc::convert::{exec, output, to_capnp};
use ryokan::rpc::schema::ryokan_capnp as wire;
use tokio::sync::Notify;

use super::{Connections, Log};

pub struct FakeExecution {
    number: u64,
    request: ExecRequest,
    log: Log,
    connections: Connections,
    input: RefCell<Vec<u8>>,
    input_closed: Cell<bool>,
    interrupted: Cell<bool>,
    end: RefCell<Option<ExecEnd>>,
    changed: Notify,
}

impl FakeExecution {
    pub fn new(number: u64, request: ExecRequest, log: Log, connections: Connections) -> Self {
        let input_closed = Cell::new(!request.stdin_open);
        FakeExecution {
            number,
            input: RefCell::new(request.stdin.clone()),
            request,
            log,
            connections,
            input_closed,
            interrupted: Cell::new(false),
            end: RefCell::default(),
            changed: Notify::new(),
        }
    }

    pub fn code(&self) -> String {
        match &self.request.what {
            Work::Code(code) => code.trim_end().to_owned(),
            Work::Call { name, args } => format!("say {name} {}", args.to_plain_json()),
            Work::Process(program) => program.command_line(),
        }
    }

    pub fn status_name(&self) -> &'static str {
        self.end.borrow().as_ref().map_or("running", |end| end.status.name())
    }

    pub fn interrupt(&self) {
        self.interrupted.set(true);
        self.changed.notify_waiters();
    }

    /// Starts code that needs no reader at once.
    pub fn start(self: &Rc<Self>) {
        let code = self.code();
        self.log.add(format!("exec {code}"));
        match code.split_once(' ').map_or(code.as_str(), |(first, _)| first) {
            "wait" | "stubborn" | "flood" | "cat" => {
                let this = self.clone();
                tokio::task::spawn_local(async move {
                    let status = this.finish_waiting().await;
                    this.finish(status);
                });
            }
            "fail" => {
                let number = code.split(' ').nth(1).unwrap().parse().unwrap();
                self.finish(ExecEnd { code: number, ..end(ExecStatus::Failed) });
            }
            "broken" => self.finish(ExecEnd { code: 1, err: "it broke".into(), ..end(ExecStatus::Failed) }),
            "unsaved" => self.finish(ExecEnd { err: "it is not stored".into(), ..end(ExecStatus::Done) }),
            "late" => self.finish(ExecEnd { code: 124, ..end(ExecStatus::Timeout) }),
            "lost" => self.finish(ExecEnd::lost("killed by signal 9")),
            "value" => {
                let node = OutputNode { text: "42".into(), ..OutputNode::default() };
                self.finish(ExecEnd {
                    value: Some(Value::Int(42)),
                    output: Some(OutputData { headers: vec![], root: vec![node] }),
                    ..end(ExecStatus::Done)
                });
            }
            "hang" if code == "hang up later" => {
                let this = self.clone();
                tokio::task::spawn_local(async move {
                    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
                    this.connections.borrow_mut().abort_all();
                });
            }
            "hang" => self.connections.borrow_mut().abort_all(),
            _ => self.finish(end(ExecStatus::Done)),
        }
    }

    async fn finish_waiting(&self) -> ExecEnd {
        let stubborn = self.code() == "stubborn";
        loop {
            let changed = self.changed.notified();
            if self.interrupted.get() && !stubborn {
                return ExecEnd { code: 130, ..end(ExecStatus::Interrupted) };
            }
            if self.code() == "cat" && self.input_closed.get() {
                return end(ExecStatus::Done);
            }
            changed.await;
        }
    }

    fn finish(&self, end: ExecEnd) {
        *self.end.borrow_mut() = Some(end);
        self.changed.notify_waiters();
    }

    async fn ended(&self) -> ExecEnd {
        loop {
            let changed = self.changed.notified();
            if let Some(end) = self.end.borrow().clone() {
                return end;
            }
            changed.await;
        }
    }

    fn events(&self) -> Vec<OutputEvent> {
        let out = |text: &str| OutputEvent::Stdout(text.as_bytes().to_vec());
        let err = |text: &str| OutputEvent::Stderr(text.as_bytes().to_vec());
        let code = self.code();
        match code.split_once(' ').unwrap_or((&code, "")) {
            ("say", text) => vec![out(&format!("{text}\n"))],
            ("both", _) => vec![out("out\n"), err("err\n"), out("out\n")],
            ("fail", _) => vec![err("failed\n")],
            ("lost", _) => vec![out("before\n")],
            ("wait" | "stubborn", _) => vec![out("waiting\n")],
            _ => vec![],
        }
    }
}

fn end(status: ExecStatus) -> ExecEnd {
    ExecEnd { status, code: 0, err: String::new(), value: None, output: None, duration_us: 1500 }
}

async fn send(to: &wire::output_callback::Client, number: u64, event: &OutputEvent) -> capnp::Result<()> {
    let mut call = to.on_output_request();
    call.get().set_exec_id(number);
    output::write_output_event(call.get().init_event(), event).map_err(to_capnp)?;
    call.send().await
}

impl wire::execution::Server for FakeExecution {
    async fn result(
        self: Rc<Self>,
        _: wire::execution::ResultParams,
        mut r: wire::execution::ResultResults,
    ) -> capnp::Result<()> {
        let end = self.ended().await;
        let collect = |wanted: fn(OutputEvent) -> Option<Vec<u8>>| {
            self.events().into_iter().filter_map(wanted).collect::<Vec<_>>().concat()
        };
        let result = ExecResult {
            exec: ExecId(self.number),
            end,
            stdout: collect(|e| if let OutputEvent::Stdout(b) = e { Some(b) } else { None }),
            stderr: collect(|e| if let OutputEvent::Stderr(b) = e { Some(b) } else { None }),
            truncated_bytes: 0,
            stdout_tail: Vec::new(),
            stderr_tail: Vec::new(),
            displays: Vec::new(),
        };
        exec::write_exec_result(r.get().init_result(), &result).map_err(to_capnp)
    }

    async fn output(
        self: Rc<Self>,
        p: wire::execution::OutputParams,
        _: wire::execution::OutputResults,
    ) -> capnp::Result<()> {
        let to = p.get()?.get_callback()?;
        for event in self.events() {
            send(&to, self.number, &event).await?;
        }
        if self.code() == "flood" {
            let chunk = OutputEvent::Stdout(vec![b'x'; 64 << 10]);
            while !self.interrupted.get() {
                send(&to, self.number, &chunk).await?;
                self.log.add("chunk");
            }
        }
        let end = self.ended().await;
        if self.code() == "cat" {
            let input = self.input.borrow().clone();
            for chunk in input.chunks(64 << 10) {
                send(&to, self.number, &OutputEvent::Stdout(chunk.to_vec())).await?;
            }
        }
        send(&to, self.number, &OutputEvent::ExitCode(end.code)).await
    }

    async fn stdin(self: Rc<Self>, p: wire::execution::StdinParams) -> capnp::Result<()> {
        self.input.borrow_mut().extend_from_slice(p.get()?.get_data()?);
        Ok(())
    }

    async fn close_stdin(
        self: Rc<Self>,
        _: wire::execution::CloseStdinParams,
        _: wire::execution::CloseStdinResults,
    ) -> capnp::Result<()> {
        self.input_closed.set(true);
        self.changed.notify_waiters();
        Ok(())
    }
}
