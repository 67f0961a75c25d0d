//! Processes by descriptor.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::checked;

/// A descriptor of a process; readable once it has ended.
///
/// # Errors
/// `ESRCH` if there is no such process.
pub fn open(pid: Pid) -> io::Result<OwnedFd> {
    // SAFETY: this call takes integers only.
    let fd = checked(unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Sends a signal to exactly this process, never to a successor with the same id.
///
/// # Errors
/// `ESRCH` if it has ended.
pub fn signal(process: BorrowedFd<'_>, signal: Signal) -> io::Result<()> {
    let info = std::ptr::null::<u8>();
    // SAFETY: a null information block is the one of `kill`; nothing is read or written.
    checked(unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal as i32, info, 0) })
        .map(drop)
}
