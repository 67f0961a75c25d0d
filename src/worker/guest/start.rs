//! Starts the worker, once: it gets its document and secret, and reports as to a daemon of this system.
//!
//! A template's worker is prepared: its engine has started, and it waits for the folder and the identity of a kernel. It
//! counts as the machine's worker from then on.

use std::io::{self, BufRead as _, BufReader, Read as _, Take, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering;

use super::{KERNEL, Machine, WORKER_COMMAND};
use crate::core::error::{Error, Result};
use crate::link::bootstrap::ReportLine;
use crate::link::machine::PREPARED;
use crate::sandbox::{Owners, RunAs};
use crate::sys::socket::send_with_fds;

/// Longest report, bytes.
const REPORT_BYTES: u64 = 4 << 20;

/// A worker process that has not reported yet, or waits for its kernel.
pub(super) struct Starting {
    /// Its standard input.
    input: UnixStream,
    reports: BufReader<Take<ChildStdout>>,
    /// Init's process id; 0: not reported yet.
    init: i32,
}

/// Starts the worker with `document` and waits until it serves or has failed.
///
/// # Errors
/// If it cannot be started, or ends without a report.
pub(super) fn start(machine: &Machine, document: &[u8]) -> Result<ReportLine> {
    let mut starting = Starting::spawn()?;
    starting.send_last(document);
    starting.report(Some(machine))
}

/// Starts the worker with a `document` that makes it wait; returns when its engine is idle.
///
/// # Errors
/// As [`start`], and the worker's.
pub(super) fn prepare(document: &[u8]) -> Result<Starting> {
    make_prepared_folder().map_err(failed)?;
    let mut starting = Starting::spawn()?;
    // A worker that cannot read reports the reason.
    let _ = starting.input.write_all(document);
    match starting.report(None)? {
        ReportLine::Failed(error) => Err(error),
        ReportLine::Ready {} | ReportLine::Pid(_) => Ok(starting),
    }
}

/// Makes the folder that a prepared worker has until it gets its kernel's. It belongs to the engine's user, so that its
/// file system need not map owners; its workspace is closed, as that of a warm worker.
fn make_prepared_folder() -> io::Result<()> {
    let RunAs { uid, gid, .. } = RunAs::GUEST;
    for (folder, mode) in [(PREPARED.to_owned(), 0o700), (format!("{PREPARED}/workspace"), 0o500)] {
        std::fs::DirBuilder::new().mode(mode).create(&folder)?;
        chown(&folder, Some(uid), Some(gid))?;
    }
    Ok(())
}

impl Starting {
    fn spawn() -> Result<Starting> {
        // A socket, because a descriptor follows the document of a prepared worker.
        let (input, theirs) = UnixStream::pair().map_err(failed)?;
        let mut child = Command::new("/proc/self/exe")
            .arg0("ryokan-worker")
            .arg(WORKER_COMMAND)
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let stdout = child.stdout.take().ok_or_else(|| Error::internal("the worker has no pipes"))?;
        Ok(Starting { input, reports: BufReader::new(stdout.take(REPORT_BYTES)), init: 0 })
    }

    /// Gives the prepared worker the kernel's folder and the `assignment` with the secret; then as [`start`].
    ///
    /// # Errors
    /// As there, and if the folder cannot be mounted. The worker ends then.
    pub(super) fn assign(mut self, machine: &Machine, assignment: &[u8]) -> Result<ReportLine> {
        let folder = Owners::default().mapped(Path::new(KERNEL), RunAs::GUEST)?;
        machine.init.store(self.init, Ordering::Release);
        // A worker that cannot read reports the reason.
        let _ = send_with_fds(&self.input, &[0], &[folder.as_raw_fd()]);
        self.send_last(assignment);
        self.report(Some(machine))
    }

    /// Sends all that is left to send: a worker that expects more ends.
    fn send_last(&mut self, bytes: &[u8]) {
        // A worker that cannot read reports the reason.
        let _ = self.input.write_all(bytes).and_then(|()| self.input.shutdown(Shutdown::Write));
    }

    /// Waits for the report. `machine`: whose worker it is.
    fn report(&mut self, machine: Option<&Machine>) -> Result<ReportLine> {
        loop {
            let mut line = String::new();
            if self.reports.read_line(&mut line).map_err(failed)? == 0 {
                return Err(Error::internal("the worker ended in the guest before it was ready"));
            }
            match serde_json::from_str(&line) {
                Ok(ReportLine::Pid(pid)) => {
                    self.init = pid;
                    if let Some(machine) = machine {
                        machine.init.store(pid, Ordering::Release);
                    }
                }
                Ok(report) => return Ok(report),
                Err(error) => return Err(Error::internal(format!("the worker's report: {error}"))),
            }
        }
    }
}

fn failed(error: io::Error) -> Error {
    Error::internal(format!("the worker cannot be started in the guest: {error}"))
}
