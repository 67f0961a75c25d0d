//! Leases: during a lease, only its holder changes a kernel.
//!
//! Pure bookkeeping over a catalog row; the caller passes the time. A token is 32 random bytes. Only its BLAKE3 hash is
//! stored: read access to the database does not grant the lease.

use crate::core::error::{Error, Result};

/// A lease as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Display name, chosen by the holder.
    pub holder: String,
    /// BLAKE3 hash of the token.
    pub token_hash: [u8; 32],
    /// Milliseconds since 1970.
    pub expires_at_ms: i64,
}

impl Lease {
    /// The hash of a token.
    pub fn hash(token: &[u8]) -> [u8; 32] {
        *blake3::hash(token).as_bytes()
    }

    /// Whether the lease has expired.
    pub const fn is_over(&self, now_ms: i64) -> bool {
        now_ms >= self.expires_at_ms
    }

    /// Whether this token is the lease's. Compares hashes, so timing reveals nothing about the token.
    pub fn is_held_by(&self, token: &[u8]) -> bool {
        blake3::Hash::from_bytes(self.token_hash) == blake3::hash(token)
    }
}

/// Whether a caller with this `token` (empty: none) may change the kernel.
///
/// # Errors
/// `busy` with reason `lease` while another client holds it.
pub fn admit(lease: Option<&Lease>, token: &[u8], now_ms: i64) -> Result<()> {
    match lease {
        Some(lease) if !lease.is_over(now_ms) && !lease.is_held_by(token) => {
            let seconds = (lease.expires_at_ms - now_ms).div_euclid(1000) + 1;
            Err(Error::busy(format!("the kernel is leased to {:?} for another {seconds} s", lease.holder))
                .reason("lease")
                .hint("wait for the lease to end, or ask its holder to release it"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorCode;

    #[test]
    fn lease_admits_only_holder() {
        let lease = Lease { holder: "a".into(), token_hash: Lease::hash(b"secret"), expires_at_ms: 100 };
        assert!(admit(None, b"", 0).is_ok());
        assert!(admit(Some(&lease), b"secret", 99).is_ok());
        assert!(admit(Some(&lease), b"", 100).is_ok(), "it is over");
        for token in [&b""[..], b"Secret", b"secret2"] {
            let refused = admit(Some(&lease), token, 99).expect_err("not the holder");
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Busy, "lease"));
        }
    }
}
