//! Properties of the calling process, its descriptors, its environment and its memory.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::checked;

fn set(option: libc::c_int, value: u64) -> io::Result<()> {
    // SAFETY: the options below take integers only.
    checked(i64::from(unsafe { libc::prctl(option, value, 0, 0, 0) })).map(drop)
}

/// The release of the running kernel; empty: not known.
pub fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// Whether the process may be traced and its `/proc` files read by its own user.
///
/// # Errors
/// The kernel's errors.
pub fn set_dumpable(dumpable: bool) -> io::Result<()> {
    set(libc::PR_SET_DUMPABLE, u64::from(dumpable))
}

/// Permanently prevents `execve` from raising privileges.
///
/// # Errors
/// The kernel's errors.
pub fn set_no_new_privileges() -> io::Result<()> {
    set(libc::PR_SET_NO_NEW_PRIVS, 1)
}

/// Sets the signal that the process receives when its parent's thread ends; `None`: none.
///
/// # Errors
/// The kernel's errors.
pub fn set_parent_death_signal(signal: Option<nix::sys::signal::Signal>) -> io::Result<()> {
    set(libc::PR_SET_PDEATHSIG, signal.map_or(0, |signal| signal as u64))
}

/// Makes the child of `command` die by `SIGKILL` when the thread that starts it ends.
pub fn end_with_parent(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt as _;
    let parent = std::process::id();
    let prepare = move || {
        set_parent_death_signal(Some(nix::sys::signal::Signal::SIGKILL))?;
        // The parent may have ended before the call.
        if std::os::unix::process::parent_id() == parent { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    };
    // SAFETY: between fork and exec this calls only prctl and getppid, and allocates nothing: an
    // error made of a kind alone is not boxed.
    unsafe { command.pre_exec(prepare) };
}

/// Bounds resources of the child of `command`, where those of this process are not smaller already.
pub fn bound(command: &mut std::process::Command, limits: &[(nix::sys::resource::Resource, u64)]) {
    use std::os::unix::process::CommandExt as _;
    let limits = limits.to_vec();
    let prepare = move || {
        for (resource, most) in &limits {
            let most = nix::sys::resource::getrlimit(*resource)?.1.min(*most);
            nix::sys::resource::setrlimit(*resource, most, most)?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec only system calls that any thread may make, and no allocation.
    unsafe { command.pre_exec(prepare) };
}

/// Makes the child of `command` create files and directories that no other user can read.
pub fn make_private_files(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt as _;
    let prepare = || {
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
        Ok(())
    };
    // SAFETY: between fork and exec only one system call that cannot fail, and no allocation.
    unsafe { command.pre_exec(prepare) };
}

/// Makes the orphans of its descendants children of this process.
///
/// # Errors
/// The kernel's errors.
pub fn adopt_orphans() -> io::Result<()> {
    set(libc::PR_SET_CHILD_SUBREAPER, 1)
}

/// Sets the name that `ps` shows; cut at 15 bytes.
pub fn set_name(name: &str) {
    let mut buffer = [0u8; 16];
    let length = name.len().min(15);
    buffer[..length].copy_from_slice(&name.as_bytes()[..length]);
    // SAFETY: the kernel reads at most 16 bytes from the live buffer, which ends in a zero.
    unsafe { libc::prctl(libc::PR_SET_NAME, buffer.as_ptr(), 0, 0, 0) };
}

/// Closes every descriptor except those listed.
///
/// The caller must forget every `OwnedFd` to a closed descriptor. So only a process that has just
/// started or is about to exec or to call an engine may do this.
///
/// # Errors
/// The kernel's errors.
pub fn close_all_except(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    keep.sort_unstable();
    keep.dedup();
    let mut first = 0u32;
    for fd in keep.iter().copied().chain([u32::MAX]) {
        if first < fd {
            let last = if fd == u32::MAX { fd } else { fd - 1 };
            // SAFETY: this call takes integers only; the caller gave up the closed descriptors.
            checked(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) })?;
        }
        first = fd.saturating_add(1);
    }
    Ok(())
}

/// Moves each descriptor to its number, inheritable, replacing what is open there. The order does
/// not matter.
///
/// # Errors
/// The kernel's errors.
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
        // SAFETY: dup2 takes integers only; the descriptor at `number` belongs to the process that
        // the caller gives up.
        checked(i64::from(unsafe { libc::dup2(fd.as_raw_fd(), number) }))?;
    }
    Ok(())
}

/// Takes ownership of a descriptor by number.
///
/// # Errors
/// `EBADF` if it is not open.
pub fn adopt(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: this command takes integers only.
    checked(i64::from(unsafe { libc::fcntl(number, libc::F_GETFD) }))?;
    // SAFETY: the descriptor is open, and the caller asserts ownership.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Replaces the whole environment. Only for a newly forked process: it has one thread.
pub fn replace_environment(variables: &[(String, String)]) {
    let old: Vec<_> = std::env::vars_os().map(|(name, _)| name).collect();
    for name in old {
        // SAFETY: a forked child has one thread, so no other reads the environment.
        unsafe { std::env::remove_var(name) };
    }
    for (name, value) in variables {
        // SAFETY: as above.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Unmaps every shared writable file mapping and returns their number. A forked child must not
/// share memory, such as a database's index, with its parent.
///
/// # Errors
/// The kernel's errors.
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
            // SAFETY: the child holds no reference into its parent's shared mappings and never uses
            // them.
            checked(i64::from(unsafe { libc::munmap(low as *mut libc::c_void, high - low) }))?;
            count += 1;
        }
    }
    Ok(count)
}

/// Ends the process at once, without
/// running anything at exit.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: ends the process; no code runs afterwards.
    unsafe { libc::_exit(status) }
}

/// Enlarges a pipe, best effort: pipe memory per user is limited. Returns the size in force.
pub fn enlarge_pipe(pipe: &OwnedFd, bytes: usize) -> usize {
    // SAFETY: these commands take integers only.
    unsafe {
        libc::fcntl(pipe.as_raw_fd(), libc::F_SETPIPE_SZ, bytes as libc::c_int);
        usize::try_from(libc::fcntl(pipe.as_raw_fd(), libc::F_GETPIPE_SZ)).unwrap_or(0)
    }
}

/// Resets every signal to its default action and unblocks all. Handlers of the parent must not run
/// here.
///
/// # Errors
/// The kernel's errors.
pub fn reset_signals() -> io::Result<()> {
    use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
    for each in Signal::iterator().filter(|each| !matches!(each, Signal::SIGKILL | Signal::SIGSTOP)) {
        // SAFETY: the default action installs no handler of ours.
        unsafe { signal(each, SigHandler::SigDfl) }?;
    }
    SigSet::empty().thread_set_mask()?;
    Ok(())
}

/// Whether ended children are reaped automatically, so that their exit status is lost.
///
/// # Errors
/// The kernel's errors.
pub fn forget_children(forget: bool) -> io::Result<()> {
    use nix::sys::signal::{SigHandler, Signal, signal};
    let how = if forget { SigHandler::SigIgn } else { SigHandler::SigDfl };
    // SAFETY: neither action installs a handler of ours.
    unsafe { signal(Signal::SIGCHLD, how) }?;
    Ok(())
}

/// The parent of a process; `None` if the process does not exist.
pub fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain any character.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Makes a write beyond the file size limit fail with `EFBIG` instead of ending the process.
/// Children inherit this.
///
/// # Errors
/// The kernel's errors.
pub fn let_large_writes_fail() -> io::Result<()> {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: ignoring a signal installs no handler of ours.
    unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) }?;
    Ok(())
}

/// Starts the program with no blocked signals and with default actions for a terminal's signals.
/// Both are inherited otherwise, and a shell cannot trap a signal that it inherited as ignored.
/// began without.
pub fn unblocked(command: &mut std::process::Command) -> &mut std::process::Command {
    use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
    use std::os::unix::process::CommandExt as _;
    let prepare = || {
        for each in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT] {
            // SAFETY: the default action installs no handler of ours.
            unsafe { signal(each, SigHandler::SigDfl) }?;
        }
        Ok(SigSet::empty().thread_set_mask()?)
    };
    // SAFETY: between fork and exec only system calls that any thread may make.
    unsafe { command.pre_exec(prepare) }
}

/// Whether a signal or a tracer has stopped the process.
pub fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['T', 't']))
}

/// Whether this process inherited that signal as ignored and has not changed it.
pub fn ignores(signal: nix::sys::signal::Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.unwrap_or(0) >> (signal as i32 - 1) & 1 == 1
}

/// Whether a process exists and works in this directory.
pub fn works_in(pid: u32, directory: &std::path::Path) -> bool {
    std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|place| place == directory)
}

/// Inode number of the first process namespace (include/linux/proc_ns.h): all processes are visible in it.
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Whether a visible process works in this directory; `None`: one of the directory's user cannot be examined.
pub fn any_works_in(directory: &std::path::Path) -> Option<bool> {
    match find_in(directory)? {
        (Some(_), _) => Some(true),
        (None, sees_each) => sees_each.then_some(false),
    }
}

/// A visible process that works in this directory.
pub fn which_works_in(directory: &std::path::Path) -> Option<u32> {
    find_in(directory)?.0
}

/// A visible process in a directory; and if none was found, whether each of the directory's user could be examined.
fn find_in(directory: &std::path::Path) -> Option<(Option<u32>, bool)> {
    use std::os::unix::fs::MetadataExt as _;
    let wanted = std::fs::metadata(directory).ok()?;
    let mut sees_each = true;
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        match std::fs::metadata(entry.path().join("cwd")) {
            Ok(place) if (place.dev(), place.ino()) == (wanted.dev(), wanted.ino()) => return Some((Some(id), true)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                sees_each &= entry.metadata().is_ok_and(|meta| meta.uid() != wanted.uid());
            }
            Ok(_) | Err(_) => {}
        }
    }
    Some((None, sees_each))
}

/// Whether the processes of all namespaces are visible.
pub fn sees_all() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata("/proc/self/ns/pid").is_ok_and(|meta| meta.ino() == FIRST_NAMESPACE)
}

/// A process's start time, clock ticks since boot (field 22 of `/proc/PID/stat`). With the process
/// id it identifies a process forever.
///
/// # Errors
/// `NotFound` or `ESRCH` if the process does not exist or is hidden, those of the read.
pub fn start_ticks(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name, which may contain any character; the last ')' ends
    // it.
    let ticks = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse().ok());
    ticks.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The first number that [`give_descriptors`] never places a descriptor at.
const LIFTED: libc::c_int = 256;

/// A copy of a descriptor that [`give_descriptors`] does not replace, for steps in the child after it.
///
/// # Errors
/// The kernel's errors.
pub fn lift(fd: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: this command takes integers only; the kernel has just made the new descriptor, and nothing else owns it.
    unsafe {
        let high = checked(i64::from(libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LIFTED)))?;
        Ok(OwnedFd::from_raw_fd(high as RawFd))
    }
}

/// Gives the child of `command` these descriptors, each at its number, and no others beside the
/// first three.
pub fn give_descriptors(command: &mut std::process::Command, fds: Vec<(OwnedFd, RawFd)>) {
    use std::os::unix::process::CommandExt as _;
    let mut lifted: Vec<RawFd> = vec![-1; fds.len()];
    let prepare = move || {
        // The program gets none of this process's other descriptors. Best effort: kernels before
        // 5.11 lack the call.
        // SAFETY: this call takes integers only and closes nothing before the exec.
        unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        // A number may be another descriptor's source: all are lifted before any is placed.
        for (place, (fd, _)) in lifted.iter_mut().zip(&fds) {
            // SAFETY: this command takes integers only; the new descriptor belongs to the new
            // process.
            let high = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LIFTED) };
            *place = high;
            if high < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        for (high, (_, number)) in lifted.iter().zip(&fds) {
            // SAFETY: dup2 takes integers only; the descriptor at that number is not used in the
            // new process.
            if unsafe { libc::dup2(*high, *number) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec this makes two kinds of system call that any thread may make,
    // and allocates nothing.
    unsafe { command.pre_exec(prepare) };
}

/// Number of unread bytes in a pipe; works for either end.
///
/// # Errors
/// The kernel's errors.
pub fn unread(pipe: std::os::fd::BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one integer into a live one.
    checked(i64::from(unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut bytes) }))?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_found_by_directory() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_ne!(any_works_in(dir.path()), Some(true));
        let mut started = std::process::Command::new("sleep");
        let mut started = started.arg("60").current_dir(dir.path()).spawn().expect("started");
        assert_eq!(any_works_in(dir.path()), Some(true));
        assert_eq!(which_works_in(dir.path()), Some(started.id()));
        let _ = started.kill();
        let _ = started.wait();
    }
}
