//! Terminals: pairs, sizes, the controlling terminal of a session.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::pty::Winsize;

use super::checked;

/// Makes a terminal. Returns the end that controls it, and the end of its programs; both are
/// close-on-exec. `ptmx`: the multiplexer of the devpts in which it appears.
///
/// # Errors
/// If there is no such multiplexer, or no terminal is left.
pub fn make(ptmx: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let controller = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(ptmx)?;
    let locked: libc::c_int = 0;
    // SAFETY: the call reads one int that outlives it.
    checked(i64::from(unsafe { libc::ioctl(controller.as_raw_fd(), libc::TIOCSPTLCK, &raw const locked) }))?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the call takes an integer and returns a new descriptor.
    let end = checked(i64::from(unsafe { libc::ioctl(controller.as_raw_fd(), libc::TIOCGPTPEER, flags) }))?;
    // SAFETY: the descriptor is new, so this is its only owner; the number fits what returned it.
    let end = unsafe { OwnedFd::from_raw_fd(end as i32) };
    Ok((controller.into(), end))
}

/// Makes a terminal the controlling one of this process's session.
///
/// # Errors
/// If this process leads no session, or the terminal belongs to another one.
pub fn control(terminal: impl AsFd) -> io::Result<()> {
    // SAFETY: the call takes an integer.
    checked(i64::from(unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSCTTY, 0) })).map(drop)
}

/// Sets a terminal's size; its foreground processes get SIGWINCH if it is new.
///
/// # Errors
/// If that is no terminal.
pub fn resize(terminal: impl AsFd, rows: u16, columns: u16) -> io::Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call reads a `winsize` that outlives it.
    checked(i64::from(unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }))
        .map(drop)
}

/// A terminal's rows and columns.
///
/// # Errors
/// If that is no terminal.
pub fn size(terminal: impl AsFd) -> io::Result<(u16, u16)> {
    let mut size = Winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes a `winsize` that outlives it.
    checked(i64::from(unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) }))?;
    Ok((size.ws_row, size.ws_col))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    fn pair_is_one_terminal() {
        let (controller, end) = make(Path::new("/dev/ptmx")).expect("a terminal");
        resize(&controller, 7, 9).expect("sized");
        assert_eq!(size(&end).expect("a terminal"), (7, 9));
        let (mut controller, mut end) = (File::from(controller), File::from(end));
        controller.write_all(b"typed\n").expect("written");
        let mut read = [0; 6];
        end.read_exact(&mut read).expect("read");
        assert_eq!(&read, b"typed\n");
        let (pipe, _other) = std::io::pipe().expect("a pipe");
        assert!(size(&pipe).is_err() && control(&pipe).is_err());
    }
}
