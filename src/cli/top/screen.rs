//! The terminal: taken over, drawn on, and restored on every way out.
//!
//! | end or interruption | restored by |
//! |---|---|
//! | a key, a failure, SIGTERM, SIGHUP, SIGINT | the drop of [`Screen`] |
//! | a panic | the panic hook, before the message |
//! | Ctrl-Z, SIGTSTP | [`Screen::suspend`], until SIGCONT |
//! | SIGKILL | not restored; the user runs `reset` |

use std::io::{self, BufWriter, Stdout, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{Signal, raise};
use nix::unistd::{Pid, getpgid, getpgrp, getsid};
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{DisableBracketedPaste, EnableBracketedPaste};
use ratatui::crossterm::{cursor, execute, style, terminal};
use ratatui::layout::Rect;
use ratatui::{Terminal, TerminalOptions, Viewport};

use super::layout::Size;
use super::model::Model;
use super::view::{self, Theme};

/// Whether this process has taken the terminal over. A process has one terminal.
static IS_OURS: AtomicBool = AtomicBool::new(false);

/// The terminal while it is taken over.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<BufWriter<Stdout>>>,
    theme: Theme,
    drawn: Size,
}

impl Screen {
    /// Takes the terminal over.
    ///
    /// # Errors
    /// The operating system's errors.
    pub fn take(theme: Theme) -> io::Result<Screen> {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            before(panic);
        }));
        // The choice is already made, from the same variable and the command line.
        style::force_color_output(theme.colours);
        take_over()?;
        let drawn = size();
        match empty(drawn) {
            Ok(terminal) => Ok(Screen { terminal, theme, drawn }),
            Err(error) => {
                give_back();
                Err(error)
            }
        }
    }

    /// Draws the model.
    ///
    /// # Errors
    /// The terminal's errors.
    pub fn draw(&mut self, model: &Model) -> io::Result<()> {
        // A panic in a task ends only that task, but the hook has restored the terminal for its
        // message.
        if !IS_OURS.load(Ordering::SeqCst) {
            return Err(io::Error::other("a part of this program failed, see above"));
        }
        if model.size != self.drawn {
            self.forget(model.size)?;
        }
        let theme = self.theme;
        let drawn = self.terminal.draw(|frame| {
            view::draw(model, theme, frame.buffer_mut());
            if let Some(position) = view::cursor(model) {
                frame.set_cursor_position(position);
            }
        });
        drawn.map(drop)
    }

    /// Makes the next draw repaint every cell, over foreign output.
    ///
    /// # Errors
    /// The terminal's errors.
    pub fn forget(&mut self, size: Size) -> io::Result<()> {
        execute!(io::stdout(), terminal::Clear(terminal::ClearType::All))?;
        (self.terminal, self.drawn) = (empty(size)?, size);
        Ok(())
    }

    /// Restores the terminal and stops this process until SIGCONT.
    ///
    /// No effect without a shell that would continue the process.
    ///
    /// # Errors
    /// The terminal's errors.
    pub fn suspend(&mut self) -> io::Result<()> {
        if !has_shell() {
            return Ok(());
        }
        give_back();
        // SIGTSTP is caught; SIGSTOP cannot be, and means the same to the shell.
        raise(Signal::SIGSTOP)?;
        take_over()?;
        self.forget(self.drawn)
    }
}

/// The terminal's current size.
pub fn size() -> Size {
    let (columns, lines) = terminal::size().unwrap_or_default();
    Size { columns, lines }
}

/// A blank screen of fixed size.
///
/// [`Screen::forget`] handles size changes. The library's own clearing queries the terminal for the
/// cursor's position, and the keyboard thread would read the answer.
fn empty(size: Size) -> io::Result<Terminal<CrosstermBackend<BufWriter<Stdout>>>> {
    let viewport = Viewport::Fixed(Rect::new(0, 0, size.columns, size.lines));
    let backend = CrosstermBackend::new(BufWriter::new(io::stdout()));
    Terminal::with_options(backend, TerminalOptions { viewport })
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// Whether a shell would continue this process: the leader of its process group has a parent in
/// another group of the same session.
fn has_shell() -> bool {
    let group = getpgrp();
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{group}/stat")) else { return false };
    // The program's name, in parentheses, may contain anything; state and parent follow it.
    let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
    let Some(parent) = parent.map(Pid::from_raw).filter(|parent| parent.as_raw() > 0) else { return false };
    getsid(Some(parent)).ok() == getsid(None).ok() && getpgid(Some(parent)).is_ok_and(|other| other != group)
}

fn take_over() -> io::Result<()> {
    terminal::enable_raw_mode()?;
    IS_OURS.store(true, Ordering::SeqCst);
    let begun = execute!(io::stdout(), terminal::EnterAlternateScreen, EnableBracketedPaste, cursor::Hide);
    if begun.is_err() {
        give_back();
    }
    begun
}

/// Restores the terminal if it is taken over. Errors cannot be reported here.
fn give_back() {
    if IS_OURS.swap(false, Ordering::SeqCst) {
        let mut out = io::stdout();
        let _ = execute!(out, style::ResetColor, cursor::Show, DisableBracketedPaste, terminal::LeaveAlternateScreen);
        let _ = out.flush();
        let _ = terminal::disable_raw_mode();
    }
}
