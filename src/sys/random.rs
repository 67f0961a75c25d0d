//! Randomness from the kernel.

/// Random bytes.
///
/// # Panics
/// If the kernel has no randomness, without which nothing here is safe.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("every supported kernel has getrandom");
    bytes
}
