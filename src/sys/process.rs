//! Properties of the calling process, its descriptors, its environment and its memory.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::checked;

fn set(option: libc::c_int, value: u64) -> io::Result<()> {
    // SAFETY: the options below take integers only.
    checked(i64::from(unsafe { libc::prctl(option, value, 0, 0, 0) })).map(drop)
}

/// Whether the process may be traced and its `/proc` files read by its own user.
///
/// # Errors
/// What the kernel refuses.
pub fn set_dumpable(dumpable: bool) -> io::Result<()> {
    set(libc::PR_SET_DUMPABLE, u64::from(dumpable))
}

/// Gives up for good that `execve` may raise privileges.
///
/// # Errors
/// What the kernel refuses.
pub fn set_no_new_privileges() -> io::Result<()> {
    set(libc::PR_SET_NO_NEW_PRIVS, 1)
}

/// The signal that the process gets when its parent's thread ends; `None`: none.
///
/// # Errors
/// What the kernel refuses.
pub fn set_parent_death_signal(signal: Option<nix::sys::signal::Signal>) -> io::Result<()> {
    set(libc::PR_SET_PDEATHSIG, signal.map_or(0, |signal| signal as u64))
}

/// Makes the process that `command` will start end by `SIGKILL` when the thread that starts it ends.
pub fn end_with_parent(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt as _;
    let parent = std::process::id();
    let prepare = move || {
        set_parent_death_signal(Some(nix::sys::signal::Signal::SIGKILL))?;
        // It may have ended before that.
        if std::os::unix::process::parent_id() == parent { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    };
    // SAFETY: between fork and exec it calls prctl and getppid only, and allocates nothing: an error of a kind alone has no box.
    unsafe { command.pre_exec(prepare) };
}

/// The name that `ps` shows; cut at 15 bytes.
pub fn set_name(name: &str) {
    let mut buffer = [0u8; 16];
    let length = name.len().min(15);
    buffer[..length].copy_from_slice(&name.as_bytes()[..length]);
    // SAFETY: the kernel reads at most 16 bytes from the live buffer, which ends in a zero.
    unsafe { libc::prctl(libc::PR_SET_NAME, buffer.as_ptr(), 0, 0, 0) };
}

/// Closes every descriptor except those listed.
///
/// Whoever still holds an `OwnedFd` to one of the others must forget it; that is why only a process that is about to exec,
/// to call an engine, or that has just started may do so.
///
/// # Errors
/// What the kernel refuses.
pub fn close_all_except(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    keep.sort_unstable();
    keep.dedup();
    let mut first = 0u32;
    for fd in keep.iter().copied().chain([u32::MAX]) {
        if first < fd {
            let last = if fd == u32::MAX { fd } else { fd - 1 };
            // SAFETY: this call takes integers only; the caller gave up what is being closed.
            checked(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) })?;
        }
        first = fd.saturating_add(1);
    }
    Ok(())
}

/// Puts each descriptor at its number, inheritable, whatever is there now; the order does not matter. The given
/// descriptors are closed.
///
/// # Errors
/// What the kernel refuses.
pub fn place(fds: Vec<(OwnedFd, RawFd)>) -> io::Result<()> {
    let highest = fds.iter().map(|(_, number)| *number).max().unwrap_or(0);
    let mut lifted = Vec::with_capacity(fds.len());
    for (fd, number) in fds {
        // SAFETY: this command takes integers only and makes a new descriptor, which we own.
        let high = checked(i64::from(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, highest + 1) }))?;
        // SAFETY: the kernel has just made this descriptor for us.
        lifted.push((unsafe { OwnedFd::from_raw_fd(high as i32) }, number));
        drop(fd);
    }
    for (fd, number) in lifted {
        // SAFETY: dup2 takes integers only; whatever was at `number` belongs to the process that the caller gives up.
        checked(i64::from(unsafe { libc::dup2(fd.as_raw_fd(), number) }))?;
    }
    Ok(())
}

/// Takes over a descriptor by number.
///
/// # Errors
/// `EBADF` if it is not open.
pub fn adopt(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: this command takes integers only.
    checked(i64::from(unsafe { libc::fcntl(number, libc::F_GETFD) }))?;
    // SAFETY: it is open, and the caller says that it is its own.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Replaces the whole environment. Only for a process that has just been forked: it has one thread.
pub fn replace_environment(variables: &[(String, String)]) {
    let old: Vec<_> = std::env::vars_os().map(|(name, _)| name).collect();
    for name in old {
        // SAFETY: a forked child has one thread, so nobody reads the environment meanwhile.
        unsafe { std::env::remove_var(name) };
    }
    for (name, value) in variables {
        // SAFETY: as above.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Unmaps every shared writable mapping of a file: a forked child must not share memory (such as a database's index)
/// with its parent. Gives how many there were.
///
/// # Errors
/// What the kernel refuses.
pub fn unmap_shared_files() -> io::Result<usize> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut count = 0;
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(range), Some(rights)) = (words.next(), words.next()) else { continue };
        let shared = rights.ends_with('s');
        let bounds = range.split_once('-').and_then(|(low, high)| {
            Some((usize::from_str_radix(low, 16).ok()?, usize::from_str_radix(high, 16).ok()?))
        });
        if let (true, Some((low, high))) = (shared, bounds) {
            // SAFETY: the child never uses what its parent mapped shared: it holds no reference into it.
            checked(i64::from(unsafe { libc::munmap(low as *mut libc::c_void, high - low) }))?;
            count += 1;
        }
    }
    Ok(count)
}

/// Ends the process at once, without
/// running anything at exit.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: ends the process; nothing of it runs afterwards.
    unsafe { libc::_exit(status) }
}

/// Enlarges a pipe; best effort, since the user's share of pipe memory is limited. Gives the size in force.
pub fn enlarge_pipe(pipe: &OwnedFd, bytes: usize) -> usize {
    // SAFETY: these commands take integers only.
    unsafe {
        libc::fcntl(pipe.as_raw_fd(), libc::F_SETPIPE_SZ, bytes as libc::c_int);
        usize::try_from(libc::fcntl(pipe.as_raw_fd(), libc::F_GETPIPE_SZ)).unwrap_or(0)
    }
}

/// Gives every signal its default effect and unblocks all: what a handler of the parent's would do here is unknown.
///
/// # Errors
/// What the kernel refuses.
pub fn reset_signals() -> io::Result<()> {
    use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
    for each in Signal::iterator().filter(|each| !matches!(each, Signal::SIGKILL | Signal::SIGSTOP)) {
        // SAFETY: the default effect is no handler of ours.
        unsafe { signal(each, SigHandler::SigDfl) }?;
    }
    SigSet::empty().thread_set_mask()?;
    Ok(())
}

/// Whether children that end leave nothing behind, and nobody can ask how they ended.
///
/// # Errors
/// What the kernel refuses.
pub fn forget_children(forget: bool) -> io::Result<()> {
    use nix::sys::signal::{SigHandler, Signal, signal};
    let how = if forget { SigHandler::SigIgn } else { SigHandler::SigDfl };
    // SAFETY: neither is a handler of ours.
    unsafe { signal(Signal::SIGCHLD, how) }?;
    Ok(())
}

/// The parent of a process; `None` for one that is not there.
pub fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may have anything in it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Has all threads of this process, and of what it forks, take memory from one heap: with one of its own, each asks the host kernel for every
/// page. For processes of which one thread at a time does something. Does nothing where the C library has no such setting.
pub fn share_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number of the allocator.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// A write beyond the largest file that is allowed fails with `EFBIG` from here on, and does not end the process; so it is for what it
/// starts.
///
/// # Errors
/// What the kernel refuses.
pub fn let_large_writes_fail() -> io::Result<()> {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: to ignore is no handler of ours.
    unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) }?;
    Ok(())
}

/// Has a program begin with no signal blocked and with none of a terminal's ignored, whatever is so here: both are inherited, and a shell never hears what it
/// began without.
pub fn unblocked(command: &mut std::process::Command) -> &mut std::process::Command {
    use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
    use std::os::unix::process::CommandExt as _;
    let prepare = || {
        for each in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT] {
            // SAFETY: the default effect is no handler of ours.
            unsafe { signal(each, SigHandler::SigDfl) }?;
        }
        Ok(SigSet::empty().thread_set_mask()?)
    };
    // SAFETY: between fork and exec system calls only that any thread may make.
    unsafe { command.pre_exec(prepare) }
}

/// Whether a process was stopped by a signal, or by whoever traces it.
pub fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['T', 't']))
}

/// Whether whoever started this process has it ignore that signal, and nobody has said otherwise since.
pub fn ignores(signal: nix::sys::signal::Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.unwrap_or(0) >> (signal as i32 - 1) & 1 == 1
}

/// When a process started, clock ticks since boot (field 22 of `/proc/PID/stat`): with its number it names one process for ever.
pub fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name, which may hold anything; the last ')' ends it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Gives the program that `command` will start these descriptors, each at its number, and no others beside the first three.
pub fn give_descriptors(command: &mut std::process::Command, fds: Vec<(OwnedFd, RawFd)>) {
    use std::os::unix::process::CommandExt as _;
    // Numbers that the placing does not use itself.
    const LIFTED: libc::c_int = 256;
    let mut lifted: Vec<RawFd> = vec![-1; fds.len()];
    let prepare = move || {
        // Whatever else this process has open is not for the program. Best effort: a kernel of before 5.11 does not have that.
        // SAFETY: this call takes integers only and closes nothing before the exec.
        unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        // A number may be another's source: all are lifted before any is placed.
        for (place, (fd, _)) in lifted.iter_mut().zip(&fds) {
            // SAFETY: this command takes integers only; the descriptor that it makes is the new process's own.
            let high = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LIFTED) };
            *place = high;
            if high < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        for (high, (_, number)) in lifted.iter().zip(&fds) {
            // SAFETY: dup2 takes integers only; what was at that number is not used in the new process.
            if unsafe { libc::dup2(*high, *number) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes two kinds of system call that any thread may make, and allocates nothing.
    unsafe { command.pre_exec(prepare) };
}

/// How many bytes wait in a pipe, whichever of its ends this is.
///
/// # Errors
/// What the kernel refuses.
pub fn unread(pipe: std::os::fd::BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one integer into a live one.
    checked(i64::from(unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut bytes) }))?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}
