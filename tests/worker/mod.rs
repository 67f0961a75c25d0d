//! The worker: init between daemon and engine.

mod exec_channel;
mod executions;
mod fake;
mod hostile;
mod listener;
mod reattach;
mod sandboxed;
mod state;

use ryokan::core::exec::ExecRequest;
use ryokan::core::ids::ExecId;
use ryokan::link::host::WorkerExec;

fn code(exec: u64, code: &str) -> WorkerExec {
    WorkerExec { exec: ExecId(exec), request: ExecRequest::code(code), output_kept: 1 << 20 }
}
