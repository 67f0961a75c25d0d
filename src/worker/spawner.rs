//! The spawner (`ryokan-worker serve`): a small process that forks workers.
//!
//! ```text
//!  daemon ── one message, three descriptors ──▶ spawner ── fork ──▶ a worker's outer process with them as 0, 1, 2
//!         ◀──────── its pid and a pidfd ────────┘
//! ```
//!
//! This avoids forking the daemon, which may be large and has threads. A fork of the spawner has
//! the program loaded, linked and its tables computed, in memory shared by all workers. The spawner
//! has one thread, reads no user data, and ends with the daemon.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::unistd::{Pid, setsid};

use super::engines::kaish;
use super::init;
use crate::catalog::EngineDb;
use crate::sandbox;
use crate::sys::heap;
use crate::sys::namespace::{Forked, fork};
use crate::sys::pidfd;
use crate::sys::process::{adopt, exit_now, forget_children, parent, place, set_name};
use crate::sys::socket::{receive_with_fds, send_with_fds};

/// The spawner's argument; its forks show it, too.
pub(crate) const COMMAND: &str = "serve";
/// The daemon's message for one worker.
pub(crate) const ONE: &[u8; 1] = b"1";
/// Why a worker was not started.
const STATUS_FAILED: i32 = 4;

/// The command's entry point: descriptor 0 is the daemon's socket.
pub fn main() -> ! {
    exit_now(match serve() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ryokan-worker: the spawner ends: {error}");
            STATUS_FAILED
        }
    })
}

/// The worker in a virtual machine: it is started alone, by the machine's first process.
pub fn main_in_guest() -> ! {
    heap::share();
    set_name("ryokan-worker");
    let prepared = prepare().map_err(|error| eprintln!("ryokan-worker: {error}"));
    if prepared.is_err() || forget_children(false).is_err() {
        exit_now(STATUS_FAILED);
    }
    init::entry::main()
}

/// Computes what every worker needs, in a thread that ends: its generators of random numbers end with it.
fn prepare() -> std::io::Result<()> {
    let prepared = std::thread::spawn(|| {
        sandbox::prepare();
        kaish::prepare();
        EngineDb::prepare()
    });
    prepared.join().map_err(|_| std::io::Error::other("a panic"))?.map_err(std::io::Error::other)
}

fn serve() -> std::io::Result<()> {
    let daemon = adopt(0)?;
    // Terminal input is for the daemon. Fails only for a process group leader.
    let _ = setsid();
    set_name("ryokan-spawner");
    // The spawner does not need the workers' exit status.
    forget_children(true)?;
    // Workers' threads share the heap that this process starts with, instead of one heap per
    // thread.
    heap::share();
    // No random numbers are drawn here: all forks would share them. The generators of a thread end
    // with it.
    prepare()?;
    loop {
        let mut asked = [0; ONE.len()];
        let (length, fds) = receive_with_fds(&daemon, &mut asked)?;
        if length == 0 {
            return Ok(());
        }
        let streams = <[OwnedFd; 3]>::try_from(fds);
        let streams = streams.map_err(|_| std::io::Error::other("a worker has three descriptors"))?;
        match fork() {
            Ok(Forked::Child) => become_worker(daemon, streams),
            Ok(Forked::Parent(pid)) => {
                drop(streams);
                // A child that has already ended sends nothing: the daemon sees its pipes close.
                let process = child(pid);
                let fds: Vec<i32> = process.iter().map(|fd| fd.as_fd().as_raw_fd()).collect();
                send_with_fds(&daemon, &pid.as_raw().to_le_bytes(), &fds)?;
            }
            // Only this request fails; the next may succeed.
            Err(error) => {
                let number = error.raw_os_error().unwrap_or(libc::EAGAIN);
                send_with_fds(&daemon, &(-number).to_le_bytes(), &[])?;
            }
        }
    }
}

/// Opens a child's pidfd. An ended child is reaped at once and its id may be reused by a process
/// with another parent.
fn child(pid: Pid) -> Option<OwnedFd> {
    let process = pidfd::open(pid).ok()?;
    (parent(u32::try_from(pid.as_raw()).ok()?) == Some(std::process::id())).then_some(process)
}

fn become_worker(daemon: OwnedFd, streams: [OwnedFd; 3]) -> ! {
    drop(daemon);
    set_name("ryokan-worker");
    let placed = place(streams.into_iter().zip(0..).collect());
    match placed.and_then(|()| forget_children(false)) {
        Ok(()) => init::entry::main(),
        Err(_) => exit_now(STATUS_FAILED),
    }
}
