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
