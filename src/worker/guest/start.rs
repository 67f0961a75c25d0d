//! Starts the worker, once: it gets its document and secret, and reports as to a daemon of this system.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;

use super::{Machine, WORKER_COMMAND};
use crate::core::error::{Error, Result};
use crate::link::bootstrap::ReportLine;

/// Longest line of a report, bytes.
const LINE_BYTES: u64 = 4 << 20;

/// Starts the worker with `document` and waits until it serves or has failed.
///
/// # Errors
/// If it cannot be started, or ends without a report.
pub(super) fn start(machine: &Machine, document: &[u8]) -> Result<ReportLine> {
    let failed = |error: io::Error| Error::internal(format!("the worker cannot be started in the guest: {error}"));
    let mut child = Command::new("/proc/self/exe")
        .arg0("ryokan-worker")
        .arg(WORKER_COMMAND)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let (Some(mut stdin), Some(stdout)) = (stdin, stdout) else {
        return Err(Error::internal("the worker has no pipes"));
    };
    // A worker that cannot read reports the reason.
    let _ = stdin.write_all(document);
    drop(stdin);
    let mut lines = BufReader::new(stdout.take(LINE_BYTES));
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line).map_err(failed)? == 0 {
            return Err(Error::internal("the worker ended in the guest before it was ready"));
        }
        match serde_json::from_str(&line) {
            Ok(ReportLine::Pid(pid)) => machine.init.store(pid, Ordering::Release),
            Ok(report) => return Ok(report),
            Err(error) => return Err(Error::internal(format!("the worker's report: {error}"))),
        }
    }
}
