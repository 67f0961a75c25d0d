//! `ryokan-worker serve`: the spawner, a small process of which workers are forks.
//!
//! ```text
//!  daemon ── one message, three descriptors ──▶ spawner ── fork ──▶ a worker's outer process: 0, 1 and 2 are those
//!         ◀──────── its number and a pidfd ────────┘
//! ```
//!
//! The daemon, which may be large and has threads, is never forked; and a fork of this one has the program loaded, linked and its tables
//! computed already, in memory that all workers share. It has one thread, reads nothing of anybody's, and ends with the daemon.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::unistd::{Pid, setsid};

use super::engines::kaish;
use super::init;
use crate::catalog::EngineDb;
use crate::sandbox;
use crate::sys::namespace::{Forked, fork};
use crate::sys::pidfd;
use crate::sys::process::{adopt, exit_now, forget_children, parent, place, set_name, share_heap};
use crate::sys::socket::{receive_with_fds, send_with_fds};

/// The argument with which it is started. What it forks shows it too.
pub(crate) const COMMAND: &str = "serve";
/// What the daemon sends for one worker.
pub(crate) const ONE: &[u8; 1] = b"1";
/// Why there is none.
const STATUS_FAILED: i32 = 4;

/// The command's entry: descriptor 0 is the daemon's socket.
pub fn main() -> ! {
    exit_now(match serve() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ryokan-worker: the spawner ends: {error}");
            STATUS_FAILED
        }
    })
}

fn serve() -> std::io::Result<()> {
    let daemon = adopt(0)?;
    // What is typed on a terminal is for the daemon. Fails only for one that leads a group already.
    let _ = setsid();
    set_name("ryokan-spawner");
    // Nobody here asks how a worker ended.
    forget_children(true)?;
    // What workers allocate, on whichever of their threads, goes on where this process ends: no heap of each thread's own.
    share_heap();
    // Nothing that draws random numbers for anybody: those would be the same in all of them. Those of a thread end with it.
    let prepared = std::thread::spawn(|| {
        sandbox::prepare();
        kaish::prepare();
        EngineDb::prepare()
    });
    prepared.join().map_err(|_| std::io::Error::other("a panic"))?.map_err(std::io::Error::other)?;
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
                // One that is gone already says nothing: the daemon sees its pipes end.
                let process = child(pid);
                let fds: Vec<i32> = process.iter().map(|fd| fd.as_fd().as_raw_fd()).collect();
                send_with_fds(&daemon, &pid.as_raw().to_le_bytes(), &fds)?;
            }
            // For this one; others may have better luck.
            Err(error) => {
                let number = error.raw_os_error().unwrap_or(libc::EAGAIN);
                send_with_fds(&daemon, &(-number).to_le_bytes(), &[])?;
            }
        }
    }
}

/// A descriptor of a child. One that has ended is reaped at once, and its number may be somebody else's: whose parent is another.
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
