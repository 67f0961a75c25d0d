//! A client of QEMU's machine protocol (QMP): one command at a time, each with a deadline.
//!
//! The monitor is untrusted like its guest: a line has a limited length, and every event, known or not, is passed over.

use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};

use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::connector::unix::connect;
use crate::sys::socket::send_with_fds;

/// Time for one command.
const COMMAND: Duration = Duration::from_secs(10);
/// Bytes that are saved in a second at most.
const MOST_BANDWIDTH: u64 = 1 << 40;
/// Pause between two looks at a state.
const PAUSE: Duration = Duration::from_millis(3);

/// A connection to a monitor.
#[derive(Debug)]
pub(super) struct Qmp {
    stream: UnixStream,
    received: Vec<u8>,
    last_id: u64,
    /// Time for one command.
    within: Duration,
}

impl Qmp {
    /// Connects to a monitor that listens already.
    ///
    /// # Errors
    /// `unavailable` if it has ended or speaks another protocol, `deadline`.
    pub(super) async fn connect(socket: &Path) -> Result<Qmp> {
        let until = Instant::now() + COMMAND;
        let stream = timeout_at(until, connect(socket)).await.map_err(|_| late("the connection"))?;
        let stream = stream.map_err(|error| Error::unavailable(format!("connect to a monitor: {error}")))?;
        let mut qmp = Qmp { stream, received: Vec::new(), last_id: 0, within: COMMAND };
        let greeting = timeout_at(until, qmp.line()).await.map_err(|_| late("its greeting"))??;
        if greeting.get("QMP").is_none() {
            return Err(Error::unavailable("a monitor does not speak QMP"));
        }
        qmp.run("qmp_capabilities", Value::Null).await?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    ///
    /// # Errors
    /// `unavailable` with the monitor's reason, `deadline`. The connection stays usable.
    pub(super) async fn run(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let until = Instant::now() + self.within;
        self.last_id += 1;
        let id = self.last_id;
        let mut sent = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            sent["arguments"] = arguments;
        }
        let answered = timeout_at(until, async {
            let sent = self.stream.write_all(format!("{sent}\n").as_bytes()).await;
            sent.map_err(|error| Error::unavailable(format!("a monitor cannot be reached: {error}")))?;
            loop {
                let mut answer = self.line().await?;
                // An event, or the answer to a command whose time had passed.
                if answer.get("id").and_then(Value::as_u64) == Some(id) {
                    return match answer.get("error") {
                        None => Ok(answer["return"].take()),
                        Some(error) => Err(Error::unavailable(format!("a monitor refuses {command}: {}", why(error)))),
                    };
                }
            }
        });
        answered.await.map_err(|_| late(command))?
    }

    /// Stops the machine's processors.
    ///
    /// # Errors
    /// As [`Self::run`]; `unavailable` if they run on.
    pub(super) async fn stop(&mut self) -> Result<()> {
        self.run("stop", Value::Null).await?;
        match self.status().await?.as_str() {
            "paused" => Ok(()),
            other => Err(Error::unavailable(format!("a machine that was stopped is {other}"))),
        }
    }

    /// Starts the machine's processors.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(super) async fn resume(&mut self) -> Result<()> {
        self.run("cont", Value::Null).await.map(drop)
    }

    /// As [`Self::resume`], after the end of a save that is under way: its end would stop the machine again.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(super) async fn go_on(&mut self) -> Result<()> {
        let until = Instant::now() + self.within;
        loop {
            let state = self.run("query-migrate", Value::Null).await?;
            match state["status"].as_str() {
                None | Some("none" | "completed" | "failed" | "cancelled") => return self.resume().await,
                Some("cancelling") => {}
                Some(_) => drop(self.run("migrate_cancel", Value::Null).await?),
            }
            pause(until, "the end of saving").await?;
        }
    }

    /// Loads a template's state into a machine that waits for it, and leaves it stopped.
    ///
    /// # Errors
    /// As [`Self::run`]; `unavailable` if the state does not fit.
    pub(super) async fn load(&mut self, uri: &str, within: Duration) -> Result<()> {
        self.keep_memory().await?;
        self.run("migrate-incoming", json!({ "uri": uri })).await?;
        let until = Instant::now() + within;
        loop {
            match self.status().await?.as_str() {
                "inmigrate" => {}
                "paused" | "prelaunch" => return Ok(()),
                other => return Err(Error::unavailable(format!("a restored machine is {other}"))),
            }
            pause(until, "the restore").await?;
        }
    }

    /// Stops the machine and saves its state, without memory.
    ///
    /// # Errors
    /// As [`Self::run`]; `unavailable` with the reason if it cannot be saved.
    pub(super) async fn save(&mut self, uri: &str) -> Result<()> {
        self.keep_memory().await?;
        self.stop().await?;
        self.migrate(uri, limits::VM_CALL).await
    }

    /// Saves a stopped machine, with the memory that is no shared file, into a file that the monitor cannot open.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub(super) async fn save_into(&mut self, file: &std::fs::File, within: Duration) -> Result<()> {
        self.keep_memory().await?;
        self.send_descriptor(file).await?;
        self.run("getfd", json!({ "fdname": "state" })).await?;
        // A stopped machine has no use for the bandwidth that is kept free by default.
        self.run("migrate-set-parameters", json!({ "max-bandwidth": MOST_BANDWIDTH })).await?;
        self.migrate("fd:state", within).await
    }

    /// Saves the devices of a stopped machine, without any memory, into a file that was opened for writing only.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub(super) async fn save_devices(&mut self, file: &std::fs::File) -> Result<()> {
        self.send_descriptor(file).await?;
        let added = self.run("add-fd", Value::Null).await?;
        let set = added["fdset-id"].as_u64().ok_or_else(|| Error::unavailable("a monitor numbers no descriptor"))?;
        // `live` would give the disk away, and a stopped machine may be saved again.
        let arguments = json!({ "filename": format!("/dev/fdset/{set}"), "live": false });
        let saved = self.run("xen-save-devices-state", arguments).await;
        self.run("remove-fd", json!({ "fdset-id": set })).await?;
        saved.map(drop)
    }

    /// Sends a descriptor, which belongs to the next command.
    async fn send_descriptor(&mut self, file: &std::fs::File) -> Result<()> {
        let until = Instant::now() + self.within;
        // It comes with the first byte.
        let sent = async {
            self.stream.writable().await?;
            let fds = [file.as_raw_fd()];
            self.stream.try_io(tokio::io::Interest::WRITABLE, || send_with_fds(&self.stream, b" ", &fds))
        };
        let sent = timeout_at(until, sent).await.map_err(|_| late("a descriptor"))?;
        sent.map(drop).map_err(|error| Error::unavailable(format!("a monitor cannot be reached: {error}")))
    }

    async fn migrate(&mut self, uri: &str, within: Duration) -> Result<()> {
        self.run("migrate", json!({ "uri": uri })).await?;
        let until = Instant::now() + within;
        loop {
            let state = self.run("query-migrate", Value::Null).await?;
            match state["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => {
                    let reason = state["error-desc"].as_str().unwrap_or("no reason given");
                    return Err(Error::unavailable(format!("a machine's state cannot be saved: {}", bounded(reason))));
                }
                _ => pause(until, "saving").await?,
            }
        }
    }

    /// Excludes memory that is a file from what is saved and loaded.
    async fn keep_memory(&mut self) -> Result<()> {
        let ability = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }] });
        self.run("migrate-set-capabilities", ability).await.map(drop)
    }

    /// Whether the machine's processors are stopped.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(super) async fn is_stopped(&mut self) -> Result<bool> {
        // After a save it has another name.
        Ok(matches!(self.status().await?.as_str(), "paused" | "postmigrate" | "finish-migrate"))
    }

    /// Whether the machine was stopped at a write for which the host's disk has no room.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(super) async fn is_halted(&mut self) -> Result<bool> {
        Ok(self.status().await? == "io-error")
    }

    async fn status(&mut self) -> Result<String> {
        let status = self.run("query-status", Value::Null).await?;
        Ok(bounded(status["status"].as_str().unwrap_or("of no state")))
    }

    /// The next line. Loses nothing if it is dropped.
    async fn line(&mut self) -> Result<Value> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.received[searched..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=searched + at).collect();
                return serde_json::from_slice(&line)
                    .map_err(|error| Error::unavailable(format!("a monitor's answer is invalid: {error}")));
            }
            searched = self.received.len();
            if searched > limits::VM_MONITOR_LINE_BYTES {
                return Err(Error::unavailable("a monitor's answer is too long"));
            }
            match self.stream.read_buf(&mut self.received).await {
                Ok(0) => return Err(Error::unavailable("a monitor has closed the connection")),
                Ok(_) => {}
                Err(error) => return Err(Error::unavailable(format!("a monitor cannot be read: {error}"))),
            }
        }
    }
}

async fn pause(until: Instant, what: &str) -> Result<()> {
    if Instant::now() > until {
        return Err(late(what));
    }
    tokio::time::sleep(PAUSE).await;
    Ok(())
}

fn late(what: &str) -> Error {
    Error::deadline(format!("a monitor does not answer in time: {what}"))
}

fn why(error: &Value) -> String {
    bounded(error["desc"].as_str().unwrap_or("no reason given"))
}

fn bounded(text: &str) -> String {
    text.chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorCode;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;

    /// A monitor that greets, and answers each line with what `answers` makes of it.
    fn monitor(answers: impl Fn(usize, Value) -> String + Send + 'static) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("q");
        let listener = UnixListener::bind(&path).expect("bound");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("connected");
            stream.write_all(b"{\"QMP\": {}}\n").expect("greeted");
            for (number, line) in BufReader::new(stream.try_clone().expect("a copy")).lines().enumerate() {
                let Ok(line) = line else { return };
                let asked = serde_json::from_str(&line).expect("a command");
                if stream.write_all(answers(number, asked).as_bytes()).is_err() {
                    return;
                }
            }
        });
        (folder, path)
    }

    #[tokio::test]
    async fn events_are_passed_over() -> Result<()> {
        let (_folder, path) = monitor(|_, asked| {
            let id = &asked["id"];
            match asked["execute"].as_str() {
                Some("bad") => format!("{{\"error\": {{\"desc\": \"no such thing\"}}, \"id\": {id}}}\n"),
                _ => format!(
                    "{{\"event\": \"OF_TOMORROW\", \"data\": 1}}\n{{\"return\": 0, \"id\": 0}}\n{{\"return\": 7, \"id\": {id}}}\n"
                ),
            }
        });
        let mut qmp = Qmp::connect(&path).await?;
        assert_eq!(qmp.run("good", json!({ "a": 1 })).await?, json!(7));
        let refused = qmp.run("bad", Value::Null).await.expect_err("refused");
        assert!(refused.message.contains("no such thing"), "{refused}");
        assert_eq!(qmp.run("good", Value::Null).await?, json!(7));
        Ok(())
    }

    #[tokio::test]
    async fn endless_line_is_refused() {
        let (_folder, path) = monitor(|number, asked| match number {
            0 => format!("{{\"return\": {{}}, \"id\": {}}}\n", asked["id"]),
            _ => "x".repeat(limits::VM_MONITOR_LINE_BYTES * 2),
        });
        let mut qmp = Qmp::connect(&path).await.expect("it greets");
        let failed = qmp.run("query-status", Value::Null).await.expect_err("it never ends");
        assert_eq!((failed.code, failed.message.contains("too long")), (ErrorCode::Unavailable, true), "{failed}");
    }

    #[tokio::test]
    async fn silent_monitor_is_late() {
        let (_folder, path) = monitor(|number, asked| match number {
            0 => format!("{{\"return\": {{}}, \"id\": {}}}\n", asked["id"]),
            _ => String::new(),
        });
        let mut qmp = Qmp::connect(&path).await.expect("it greets");
        qmp.within = Duration::from_millis(50);
        let failed = qmp.run("query-status", Value::Null).await.expect_err("it never answers");
        assert_eq!(failed.code, ErrorCode::Deadline);
    }
}
