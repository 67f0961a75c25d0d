//! A process on this command line's terminal: keys, output and size pass through.
//!
//! While it runs the terminal is raw: every key reaches the program, also Ctrl-C. Every end restores it: the program's,
//! a failure, a lost daemon, a signal. SIGKILL does not; the user runs `reset`.

use std::cell::{Cell, RefCell};
use std::io;

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::signal::unix::{SignalKind, signal};

use super::context::Context;
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

/// The size of a terminal that does not know its own, as on a serial line.
pub const USUAL_SIZE: TerminalSize = TerminalSize { rows: 24, columns: 80 };

/// The keys that leave a detached program: Ctrl-P, then Ctrl-Q.
const DETACH: [u8; 2] = [0x10, 0x11];

/// How a terminal is connected.
#[derive(Debug, Clone, Copy)]
pub struct From {
    /// The size that the program's terminal has; `None`: unknown.
    pub size: Option<TerminalSize>,
    /// The byte of the output at which showing begins.
    pub offset: u64,
    /// Whether keys leave the program, which continues.
    pub detaches: bool,
}

/// Whether this command line has a terminal for input and output.
pub fn is_usable(context: &Context) -> bool {
    context.terminal.stdout && size().is_ok()
}

/// The size of this command line's terminal.
///
/// # Errors
/// `Unsupported` if stdin is none.
pub fn size() -> Result<TerminalSize> {
    let found = terminal::size(io::stdin()).ok();
    let size = found.and_then(|(rows, columns)| TerminalSize::from_wire(rows, columns));
    match found {
        Some(_) => Ok(size.unwrap_or(USUAL_SIZE)),
        None => {
            Err(Error::unsupported("standard input is no terminal")
                .hint("run it on a terminal, or use spawn without -t"))
        }
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

/// Finds the keys that leave a program in what is typed.
#[derive(Debug, Default)]
struct DetachKeys {
    /// Whether the first of them was the last key; the program gets it with the next one.
    is_begun: bool,
}

impl DetachKeys {
    /// Returns what the program gets, and whether to leave it.
    fn take(&mut self, typed: &[u8]) -> (Vec<u8>, bool) {
        let mut passed = Vec::with_capacity(typed.len() + 1);
        for key in typed.iter().copied() {
            if std::mem::take(&mut self.is_begun) {
                if key == DETACH[1] {
                    return (passed, true);
                }
                passed.push(DETACH[0]);
            }
            if key == DETACH[0] {
                self.is_begun = true;
            } else {
                passed.push(key);
            }
        }
        (passed, false)
    }
}

/// Passes what is typed on; returns when the keys that leave the program were typed.
async fn feed_keys(execution: &ExecutionClient) {
    let (mut stdin, mut keys, mut chunk) = (tokio::io::stdin(), DetachKeys::default(), [0; 4096]);
    while let Ok(read @ 1..) = stdin.read(&mut chunk).await {
        let (passed, leaves) = keys.take(&chunk[..read]);
        let given = passed.is_empty() || execution.stdin(&passed).await.is_ok();
        if leaves {
            return;
        }
        if !given {
            break;
        }
    }
    std::future::pending().await
}

/// Connects the terminal to a process until its end.
pub async fn attach(
    kernel: &KernelClient,
    execution: &ExecutionClient,
    from: From,
    signals: &mut Signals,
) -> Result<Driven, Failure> {
    let mut resized = signal(SignalKind::window_change()).map_err(Failure::of_output)?;
    let raw = Raw::take().map_err(|error| Error::unsupported(format!("could not use the terminal: {error}")))?;
    let known = Cell::new(from.size);
    let closed = Cell::new(false);
    let fit = async || {
        let Ok(now) = size() else { return };
        // It may not have started yet; its first output repeats this.
        if known.get() != Some(now) && kernel.resize_terminal(execution.exec(), now).await.is_ok() {
            known.set(Some(now));
        }
    };
    let mut deliver = std::pin::pin!(async {
        let result = execution.result();
        let output = execution.output(from.offset, async |event| {
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
        if from.detaches {
            return feed_keys(execution).await;
        }
        feed_stdin(execution).await;
        std::future::pending().await
    });
    if from.size.is_none() {
        fit().await;
    }
    loop {
        tokio::select! {
            delivered = &mut deliver => {
                if closed.get() {
                    // A write can fail before SIGHUP arrives, and under `nohup` the signal never does.
                    return Ok(Driven::Terminated(exit::HUNG_UP));
                }
                return Ok(Driven::Ended { result: Box::new(delivered?), wrote_stderr: true });
            }
            () = &mut feed => return Ok(Driven::Left(exit::OK)),
            code = signals.any() => return Ok(Driven::Terminated(code)),
            _ = resized.recv() => fit().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detach_keys_are_found() {
        let (p, q) = (DETACH[0], DETACH[1]);
        let mut keys = DetachKeys::default();
        for (typed, passed, leaves) in [
            (&b"ls"[..], &b"ls"[..], false),
            (&[p], b"", false),
            (b"x", &[p, b'x'], false),
            (&[q, p, p], &[q, p], false),
            (b"y", &[p, b'y'], false),
            (&[b'z', p], b"z", false),
            (&[q, b'a'], b"", true),
        ] {
            assert_eq!(keys.take(typed), (passed.to_vec(), leaves), "{typed:?}");
        }
    }

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
