//! The only place with unsafe code: small safe wrappers over system calls, split by subject.
//!
//! Owns the calls that neither `std` nor `nix` offers safely. Never decides anything: no policy, no paths of ryokan's, no
//! retries. Every `unsafe` block says why it holds.
#![allow(unsafe_code, reason = "system calls have no safe form; this module is the one place for them")]

use std::io;

pub mod btrfs;
pub mod caps;
pub mod clock;
pub mod fault;
pub mod fs;
pub mod heap;
pub mod inode;
#[cfg(target_arch = "x86_64")]
pub mod kvm;
pub mod landlock;
pub mod loopback;
pub mod monitor;
pub mod mount;
pub mod namespace;
pub mod net;
pub mod notify;
pub mod pidfd;
pub mod pressure;
pub mod process;
pub mod random;
pub mod socket;
pub mod sqlite_vfs;
pub mod terminal;
pub mod watched;

/// Turns the C convention (negative, errno) into a result.
fn checked(returned: libc::c_long) -> io::Result<libc::c_long> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}
