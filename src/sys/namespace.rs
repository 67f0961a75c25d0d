//! Creating processes: `fork`, a clone whose child belongs to our own parent, and a process that
//! only holds a namespace open.
//!
//! Joining and leaving namespaces is safe in `nix` (`sched::unshare`, `sched::setns`).

use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::fcntl::OFlag;
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

/// Waits until the second of two descriptors is closed in the process that started this one.
extern "C" fn idle(descriptors: *mut libc::c_void) -> libc::c_int {
    let mut byte = 0_u8;
    // SAFETY: the starting process keeps the two numbers until this one has ended. The descriptors are this process's own
    // copies, and one byte of its own stack is written. Neither call fails, so neither touches memory shared with the other
    // process: no signal arrives and the descriptors are open.
    unsafe {
        let [waits_for, not_its] = *descriptors.cast::<[libc::c_int; 2]>();
        libc::close(not_its);
        libc::read(waits_for, (&raw mut byte).cast(), 1);
    }
    0
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
    // The other process may begin after this one has gone on: what it reads lives until it has ended.
    let (mut stack, mut descriptors) = (vec![0_u8; STACK_BYTES], [until.as_raw_fd(), end.as_raw_fd()]);
    let mut before = SigSet::empty();
    // The other process inherits blocked signals: no handler of this process runs there.
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut before))?;
    let flags = libc::CLONE_VM | libc::CLONE_NEWUSER | libc::SIGCHLD;
    let end_of_stack = stack.as_mut_ptr_range().end;
    // SAFETY: the process runs on its own stack, whose end is aligned here, calls nothing that allocates or locks, and ends.
    // Stack and descriptors outlive it: it is awaited below.
    let made = unsafe {
        let top = end_of_stack.sub(end_of_stack as usize % 16);
        libc::clone(idle, top.cast(), flags, (&raw mut descriptors).cast())
    };
    let made = checked(made.into());
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?;
    let process = Pid::from_raw(made? as i32);
    let looked = look(process);
    drop(end);
    loop {
        match waitpid(process, None) {
            // The first process of a virtual machine reaps every child on another thread: this one has ended, too.
            Ok(_) | Err(Errno::ECHILD) => return looked,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
