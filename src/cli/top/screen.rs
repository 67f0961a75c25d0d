//! The terminal: taken over, drawn on, and given back as it was, whatever ends us.
//!
//! | what ends us | who gives the terminal back |
//! |---|---|
//! | a key, a failure, SIGTERM, SIGHUP, SIGINT | [`Screen`] when it is dropped |
//! | a panic | the hook, before the message |
//! | Ctrl-Z, SIGTSTP | [`Screen::suspend`], until SIGCONT |
//! | SIGKILL | nobody can: `reset` |

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

/// Whether the terminal is ours now. One process has one.
static IS_OURS: AtomicBool = AtomicBool::new(false);

/// The terminal while it is ours.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<BufWriter<Stdout>>>,
    theme: Theme,
    drawn: Size,
}

impl Screen {
    /// Takes the terminal over.
    ///
    /// # Errors
    /// The operating system's.
    pub fn take(theme: Theme) -> io::Result<Screen> {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            before(panic);
        }));
        // The choice was made already, from the same variable and from the command line.
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

    /// Shows what is known.
    ///
    /// # Errors
    /// The terminal's.
    pub fn draw(&mut self, model: &Model) -> io::Result<()> {
        // A panic in a task ends that task only, but the terminal was given back for its message.
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

    /// Draws every cell the next time, whatever somebody else wrote there.
    ///
    /// # Errors
    /// The terminal's.
    pub fn forget(&mut self, size: Size) -> io::Result<()> {
        execute!(io::stdout(), terminal::Clear(terminal::ClearType::All))?;
        (self.terminal, self.drawn) = (empty(size)?, size);
        Ok(())
    }

    /// Gives the terminal back and stops this process until somebody continues it. Where nobody would, nothing happens.
    ///
    /// # Errors
    /// The terminal's.
    pub fn suspend(&mut self) -> io::Result<()> {
        if !has_shell() {
            return Ok(());
        }
        give_back();
        // SIGTSTP is caught; this one cannot be, and means the same to the shell.
        raise(Signal::SIGSTOP)?;
        take_over()?;
        self.forget(self.drawn)
    }
}

/// How large the terminal is now.
pub fn size() -> Size {
    let (columns, lines) = terminal::size().unwrap_or_default();
    Size { columns, lines }
}

/// A blank screen. Of a fixed size, for what a change of it means is said in [`Screen::forget`]; the library's own clearing asks the
/// terminal where the cursor is, and the keyboard's thread would get the answer.
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

/// Whether a shell would continue us: the leader of our process group has a parent in another group of the same session.
fn has_shell() -> bool {
    let group = getpgrp();
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{group}/stat")) else { return false };
    // After the program's name, which is in parentheses and may hold anything: the state, the parent.
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

/// Gives the terminal back, if it is ours. What fails here can be told to nobody.
fn give_back() {
    if IS_OURS.swap(false, Ordering::SeqCst) {
        let mut out = io::stdout();
        let _ = execute!(out, style::ResetColor, cursor::Show, DisableBracketedPaste, terminal::LeaveAlternateScreen);
        let _ = out.flush();
        let _ = terminal::disable_raw_mode();
    }
}
