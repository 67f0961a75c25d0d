//! Creating processes: `fork`, a clone whose child belongs to our own parent, and a process that
//! only holds a namespace open.
//!
//! Joining and leaving namespaces is safe in `nix` (`sched::unshare`, `sched::setns`).

use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sched::{CloneFlags, clone};
use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, pipe2};

use super::checked;

/// The side of a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forked {
    /// The caller, with the child's id in its own namespace.
    Parent(Pid),
    /// The new process.
    Child,
}

/// `fork`. In a process with other threads the child must not rely on anything that they may have
/// locked. The C library's allocator stays consistent in the child.
///
/// # Errors
/// The kernel's errors.
pub fn fork() -> io::Result<Forked> {
    // SAFETY: the C library keeps its own locks (the allocator's among them) consistent across
    // fork. Our children use nothing else that another thread may hold: they set up the sandbox,
    // report over a socket, and exec or call.
    match unsafe { nix::unistd::fork() }? {
        nix::unistd::ForkResult::Parent { child } => Ok(Forked::Parent(child)),
        nix::unistd::ForkResult::Child => Ok(Forked::Child),
    }
}

/// As `fork`, but the child's parent is our parent. Only for a process with one thread.
///
/// # Errors
/// `EBUSY` with more than one thread; what the kernel refuses.
pub fn fork_sibling() -> io::Result<Forked> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    if !status.lines().any(|line| line.strip_prefix("Threads:").is_some_and(|n| n.trim() == "1")) {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    // The C library caches a thread's id at an address that the kernel knows. The child's copy must
    // hold the child's id.
    let mut tid_address: usize = 0;
    // SAFETY: the kernel writes one pointer to the live variable; the call fails where the kernel
    // was built without it.
    let known = unsafe { libc::prctl(libc::PR_GET_TID_ADDRESS, &raw mut tid_address, 0, 0, 0) } == 0;
    let mut flags = libc::CLONE_PARENT as libc::c_ulong | libc::SIGCHLD as libc::c_ulong;
    if known && tid_address != 0 {
        flags |= libc::CLONE_CHILD_SETTID as libc::c_ulong | libc::CLONE_CHILD_CLEARTID as libc::c_ulong;
    } else {
        tid_address = 0;
    }
    // SAFETY: without CLONE_VM and with a null stack this is fork: the child has its own copy of
    // everything. There is one thread, so no lock is held. The address, if any, is the C library's
    // own for the same purpose. The argument orders of x86_64 and aarch64 differ in the last two.
    let pid = unsafe {
        #[cfg(target_arch = "x86_64")]
        let returned = libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, tid_address, 0usize);
        #[cfg(not(target_arch = "x86_64"))]
        let returned = libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, 0usize, tid_address);
        checked(returned)?
    };
    Ok(if pid == 0 { Forked::Child } else { Forked::Parent(Pid::from_raw(pid as i32)) })
}

/// Calls `look` with a process in a new user namespace without maps. The process does nothing and
/// is gone afterwards. It shares this process's memory, so creating it costs a large process no
/// more than a small one.
///
/// # Errors
/// Where user namespaces are refused; the errors of `look`.
pub fn in_new_user_namespace<T>(look: impl FnOnce(Pid) -> io::Result<T>) -> io::Result<T> {
    const STACK_BYTES: usize = 64 << 10;
    let (until, end) = pipe2(OFlag::O_CLOEXEC)?;
    let (waits_for, not_its) = (until.as_raw_fd(), end.as_raw_fd());
    let mut stack = vec![0; STACK_BYTES];
    let idle = Box::new(move || {
        let mut byte = 0_u8;
        // SAFETY: the descriptors are this process's own copies, and one byte of its own stack is
        // written. Neither call fails, so neither touches memory shared with the other process: no
        // signal arrives and the descriptors are open.
        unsafe {
            libc::close(not_its);
            libc::read(waits_for, (&raw mut byte).cast(), 1);
        }
        0
    });
    let mut before = SigSet::empty();
    // The other process inherits blocked signals: no handler of this process runs there.
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut before))?;
    // SAFETY: the process runs on its own stack, which outlives it (it is awaited below), calls
    // nothing that allocates or locks, and ends.
    let made =
        unsafe { clone(idle, &mut stack, CloneFlags::CLONE_VM | CloneFlags::CLONE_NEWUSER, Some(libc::SIGCHLD)) };
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?;
    let process = made?;
    let looked = look(process);
    drop(end);
    while let Err(error) = waitpid(process, None) {
        if error != Errno::EINTR {
            return Err(error.into());
        }
    }
    looked
}
