//! Capabilities, securebits and the session keyring of the calling thread.

use std::io;

use super::checked;

/// `_LINUX_CAPABILITY_VERSION_3`: two 32-bit words per set.
const VERSION: u32 = 0x2008_0522;
/// No kernel has more capabilities than two words hold.
const MOST: u32 = 63;

/// Every securebit that restricts power, with its lock: `NOROOT`, `NO_SETUID_FIXUP` and
/// `NO_CAP_AMBIENT_RAISE` set and locked, `KEEP_CAPS` clear and locked.
pub const SECUREBITS_LOCKED: u32 = 0b1110_1111;

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Drops every capability from the bounding set. Needs `CAP_SETPCAP`.
///
/// # Errors
/// The kernel's errors.
pub fn drop_bounding() -> io::Result<()> {
    for cap in 0..=MOST {
        // SAFETY: this prctl takes integers only.
        match checked(i64::from(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, u64::from(cap), 0, 0, 0) })) {
            Ok(_) => {}
            // Past the last capability of this kernel.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && cap > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Clears the ambient set.
///
/// # Errors
/// The kernel's errors.
pub fn clear_ambient() -> io::Result<()> {
    // SAFETY: this prctl takes integers only.
    let returned = unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as u64, 0, 0, 0) };
    checked(i64::from(returned)).map(drop)
}

/// Sets and locks the securebits. Needs `CAP_SETPCAP`.
///
/// # Errors
/// The kernel's errors.
pub fn lock_securebits() -> io::Result<()> {
    // SAFETY: this prctl takes integers only.
    checked(i64::from(unsafe { libc::prctl(libc::PR_SET_SECUREBITS, u64::from(SECUREBITS_LOCKED), 0, 0, 0) })).map(drop)
}

/// The securebits in force.
///
/// # Errors
/// The kernel's errors.
pub fn securebits() -> io::Result<u32> {
    // SAFETY: this prctl takes integers only.
    checked(i64::from(unsafe { libc::prctl(libc::PR_GET_SECUREBITS, 0, 0, 0, 0) })).map(|bits| bits as u32)
}

/// Empties the effective, permitted and inheritable sets.
///
/// # Errors
/// The kernel's errors.
pub fn drop_all() -> io::Result<()> {
    let mut header = Header { version: VERSION, pid: 0 };
    let data = [Data::default(); 2];
    // SAFETY: both pointers are to live values in the layout of version 3; the kernel only reads
    // them.
    checked(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) }).map(drop)
}

/// Gives the calling process a new anonymous session keyring.
///
/// # Errors
/// The kernel's errors; `ENOSYS` where keyrings are not built in.
pub fn new_session_keyring() -> io::Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: a null name asks for an anonymous keyring; nothing is read or written.
    checked(unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, std::ptr::null::<u8>()) }).map(drop)
}
