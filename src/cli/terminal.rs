//! A process on this command line's terminal: keys, output and size pass through.
//!
//! While it runs the terminal is raw: every key reaches the program, also Ctrl-C. Every end restores it: the program's,
//! a failure, a lost daemon, a signal. SIGKILL does not; the user runs `reset`.

use std::cell::{Cell, RefCell};
use std::io;

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use tokio::io::AsyncWriteExt as _;
use tokio::signal::unix::{SignalKind, signal};

use super::drive::{Driven, Signals, feed_stdin};
use super::exit;
use super::failure::Failure;
use crate::core::error::{Error, Result};
use crate::core::exec::{OutputEvent, TerminalSize};
use crate::rpc::client::{ExecutionClient, KernelClient};
use crate::sys::terminal;

/// Turns off what a program may have left on: colours, a hidden cursor, reports of the mouse and of pastes, the keypad.
const USUAL: &str = "\x1b[0m\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1l\x1b>";
/// Leaves the second screen that full-screen programs use.
const LEAVE_SCREEN: &str = "\x1b[?1049l";

/// The size of this command line's terminal.
///
/// # Errors
/// `Unsupported` if stdin is none.
pub fn size() -> Result<TerminalSize> {
    let found = terminal::size(io::stdin()).ok();
    let size = found.and_then(|(rows, columns)| TerminalSize::from_wire(rows, columns));
    // A terminal that does not know its size, as on a serial line.
    let default = TerminalSize { rows: 24, columns: 80 };
    match found {
        Some(_) => Ok(size.unwrap_or(default)),
        None => Err(Error::unsupported("standard input is no terminal").hint("leave out -t")),
    }
}

/// The raw terminal. Its drop restores it.
struct Raw {
    before: Termios,
    screens: RefCell<Screens>,
}

impl Raw {
    fn take() -> io::Result<Raw> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(io::stdin(), SetArg::TCSADRAIN, &raw)?;
        Ok(Raw { before, screens: RefCell::default() })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        use io::Write as _;
        let leave = if self.screens.borrow().is_second { LEAVE_SCREEN } else { "" };
        let mut out = io::stdout().lock();
        let _ =
            out.write_all(leave.as_bytes()).and_then(|()| out.write_all(USUAL.as_bytes())).and_then(|()| out.flush());
        // Not after the output's end: the terminal may be stopped.
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.before);
    }
}

/// Which of a terminal's two screens the output has chosen.
#[derive(Debug, Default)]
struct Screens {
    is_second: bool,
    /// The end of the last chunk, in which a choice may begin.
    tail: Vec<u8>,
}

impl Screens {
    fn see(&mut self, output: &[u8]) {
        const CHOICES: [&[u8]; 3] = [b"\x1b[?1049", b"\x1b[?1047", b"\x1b[?47"];
        let text = [&self.tail, output].concat();
        for at in (0..text.len()).filter(|at| text[*at] == b'\x1b') {
            for choice in CHOICES {
                match text[at..].strip_prefix(choice).and_then(<[u8]>::first) {
                    Some(b'h') => self.is_second = true,
                    Some(b'l') => self.is_second = false,
                    Some(_) | None => {}
                }
            }
        }
        // Shorter than a whole choice, so none counts twice in another order.
        self.tail = text[text.len().saturating_sub(CHOICES[0].len())..].to_vec();
    }
}

/// Connects the terminal to a process until its end.
pub async fn attach(
    kernel: &KernelClient,
    execution: &ExecutionClient,
    begun: TerminalSize,
    signals: &mut Signals,
) -> Result<Driven, Failure> {
    let mut resized = signal(SignalKind::window_change()).map_err(Failure::of_output)?;
    let raw = Raw::take().map_err(|error| Error::unsupported(format!("could not use the terminal: {error}")))?;
    let known = Cell::new(begun);
    let closed = Cell::new(false);
    let fit = async || {
        let now = size().unwrap_or(begun);
        // It may not have started yet; its first output repeats this.
        if now != known.get() && kernel.resize_terminal(execution.exec(), now).await.is_ok() {
            known.set(now);
        }
    };
    let mut deliver = std::pin::pin!(async {
        let result = execution.result();
        let output = execution.output(0, async |event| {
            if let OutputEvent::Stdout(bytes) = event {
                raw.screens.borrow_mut().see(&bytes);
                let mut out = tokio::io::stdout();
                let written = async {
                    out.write_all(&bytes).await?;
                    out.flush().await
                };
                written.await.map_err(|error| {
                    closed.set(error.raw_os_error() == Some(libc::EIO));
                    Error::internal(format!("could not write the output: {error}"))
                })?;
                fit().await;
            }
            Ok(())
        });
        futures::future::try_join(output, result).await.map(|((), result)| result)
    });
    let mut feed = std::pin::pin!(async {
        feed_stdin(execution).await;
        std::future::pending::<()>().await
    });
    loop {
        tokio::select! {
            delivered = &mut deliver => {
                if closed.get() {
                    // A write can fail before SIGHUP arrives, and under `nohup` the signal never does.
                    return Ok(Driven::Terminated(exit::HUNG_UP));
                }
                return Ok(Driven::Ended { result: Box::new(delivered?), wrote_stderr: true });
            }
            () = &mut feed => {}
            code = signals.any() => return Ok(Driven::Terminated(code)),
            _ = resized.recv() => fit().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_screen_is_tracked_across_chunks() {
        let mut screens = Screens::default();
        for (chunk, is_second) in
            [("a\x1b[?10", false), ("49hvim", true), ("\x1b[?1049l\x1b[?47h", true), ("\x1b", true), ("[?47l", false)]
        {
            screens.see(chunk.as_bytes());
            assert_eq!(screens.is_second, is_second, "{chunk:?}");
        }
    }
}
