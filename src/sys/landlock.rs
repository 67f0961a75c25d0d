//! The kernel's Landlock version. The `landlock` crate builds the rule sets.

use std::io;

use super::checked;

/// The kernel's Landlock ABI.
///
/// # Errors
/// `ENOSYS` where Landlock is not built in, `EOPNOTSUPP` where it is switched off.
pub fn abi() -> io::Result<u32> {
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: with this flag the kernel takes a null pointer and size 0, and only returns a number.
    let returned = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0usize,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    };
    checked(returned).map(|abi| abi as u32)
}
