//! Randomness from the kernel.

/// Random bytes.
///
/// # Panics
/// If the kernel provides no randomness; nothing here would be safe.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("every supported kernel has getrandom");
    bytes
}

/// Adds random bytes to this system's random generator, and makes it use them at once. Needs root.
///
/// # Errors
/// The kernel's errors.
pub fn seed(entropy: &[u8; 32]) -> std::io::Result<()> {
    #[repr(C)]
    struct Pool {
        entropy_bits: libc::c_int,
        bytes: libc::c_int,
        data: [u8; 32],
    }
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    let device = std::fs::File::options().write(true).open("/dev/urandom")?;
    let pool = Pool { entropy_bits: 256, bytes: 32, data: *entropy };
    let fd = std::os::fd::AsRawFd::as_raw_fd(&device);
    // SAFETY: the kernel reads the header and as many bytes as it names, all within the live structure.
    super::checked(i64::from(unsafe { libc::ioctl(fd, RNDADDENTROPY as _, &raw const pool) }))?;
    // SAFETY: this request takes no argument.
    super::checked(i64::from(unsafe { libc::ioctl(fd, RNDRESEEDCRNG as _) }))?;
    Ok(())
}
