//! Identifiers: one newtype each, so that different kinds of id cannot be confused.
//!
//! Random ids are 128 bits, written as 32 lowercase hexadecimal digits. The caller supplies the
//! randomness (`sys::random`), because `core` does no I/O.

use std::fmt;
use std::str::FromStr;

/// Text that is not a valid id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {what}: expected {digits} hexadecimal digits")]
pub struct ParseIdError {
    what: &'static str,
    digits: usize,
    text: String,
}

fn parse_hex<const N: usize>(what: &'static str, text: &str) -> Result<[u8; N], ParseIdError> {
    let wrong = || ParseIdError { what, digits: N * 2, text: text.chars().take(80).collect() };
    let bytes = text.as_bytes();
    if bytes.len() != N * 2 {
        return Err(wrong());
    }
    let mut out = [0u8; N];
    for (slot, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        let digit = |b: u8| match b {
            b'0'..=b'9' => Some(b - b'0'),
            b'a'..=b'f' => Some(b - b'a' + 10),
            _ => None,
        };
        match (digit(pair[0]), digit(pair[1])) {
            (Some(high), Some(low)) => *slot = high << 4 | low,
            _ => return Err(wrong()),
        }
    }
    Ok(out)
}

fn write_hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
}

macro_rules! hex_id {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name([u8; $bytes]);

        impl $name {
            /// Creates the id from its raw bytes.
            pub const fn from_bytes(bytes: [u8; $bytes]) -> Self {
                Self(bytes)
            }
            /// The raw bytes.
            pub const fn as_bytes(&self) -> &[u8; $bytes] {
                &self.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(f, &self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }
        impl FromStr for $name {
            type Err = ParseIdError;
            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                parse_hex($what, text).map(Self)
            }
        }
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let text = String::deserialize(d)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

hex_id!(
    /// A machine running `ryokand`; made once, kept in the catalog.
    HostId, 16, "host id"
);
hex_id!(
    /// A kernel: survives its worker, the daemon, reboots and renames.
    KernelId, 16, "kernel id"
);
hex_id!(
    /// One live worker. A restarted kernel has a new one.
    WorkerId, 16, "worker id"
);
hex_id!(
    /// One checkpoint, on any host.
    CheckpointId, 16, "checkpoint id"
);
hex_id!(
    /// One attempt to move a kernel to another host.
    HandoverId, 16, "handover id"
);
hex_id!(
    /// A group of kernels, repositories and databases.
    GroupId, 16, "group id"
);
hex_id!(
    /// One freeze of a group.
    FreezeId, 16, "freeze id"
);
hex_id!(
    /// A content address: the BLAKE3 hash of the bytes.
    Digest, 32, "digest"
);
hex_id!(
    /// A host's public key: ed25519.
    PublicKey, 32, "public key"
);
hex_id!(
    /// A signature: ed25519.
    Signature, 64, "signature"
);

/// Characters of a displayed id.
const SHORT_ID: usize = 10;

impl KernelId {
    /// Whether `text` is the beginning of an id, long enough to identify one kernel.
    pub fn is_beginning(text: &str) -> bool {
        let digits = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        digits && (SHORT_ID..=32).contains(&text.len())
    }
}

impl CheckpointId {
    /// Returns the displayed form of the id.
    pub fn short(&self) -> String {
        self.to_string().chars().take(SHORT_ID).collect()
    }
}

impl FreezeId {
    /// Returns the displayed form of the id.
    pub fn short(&self) -> String {
        self.to_string().chars().take(SHORT_ID).collect()
    }
}

/// Number of an execution within its kernel, from 1; never reused, even after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct ExecId(pub u64);

impl fmt::Display for ExecId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Ownership epoch of a kernel.
///
/// Grows with each change of ownership; an operation with an older epoch is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_text_round_trips() {
        for (text, is_one) in [
            ("0123456789", true),
            ("0123456789abcdef0123456789abcdef", true),
            ("012345678", false),
            ("0123456789abcdef0123456789abcdef0", false),
            ("0123456789A", false),
            ("my-kernel-1", false),
        ] {
            assert_eq!(KernelId::is_beginning(text), is_one, "{text}");
        }
        let id = KernelId::from_bytes(std::array::from_fn(|i| i as u8 * 17));
        assert_eq!(id.to_string().parse::<KernelId>(), Ok(id));
        let digest = Digest::from_bytes([0xab; 32]);
        assert_eq!(digest.to_string().parse::<Digest>(), Ok(digest));
    }

    #[test]
    fn malformed_id_is_refused() {
        for text in ["", "00", "zz", &"0".repeat(31), &"0".repeat(33), &"A".repeat(32), &"é".repeat(16)] {
            assert!(text.parse::<WorkerId>().is_err(), "{text:?}");
        }
    }
}
