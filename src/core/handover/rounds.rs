//! When copying while the kernel runs ends.

use std::time::Duration;

use crate::core::limits;
use crate::core::snapshot::PortableKind;

/// The rounds so far. Each one sends what was written during the one before it.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    /// Rounds that ended.
    pub count: u32,
    last_bytes: u64,
    most: u32,
}

impl Rounds {
    /// No round yet, of a move of that kind.
    pub fn begin(kind: PortableKind) -> Rounds {
        let most = match kind {
            PortableKind::Checkpoint => limits::HANDOVER_ROUNDS,
            PortableKind::Teleport => limits::HANDOVER_MACHINE_ROUNDS,
        };
        Rounds { count: 0, last_bytes: 0, most }
    }

    /// Takes the end of a round that sent `bytes`; returns whether another one follows.
    ///
    /// The last one is small or short, so that little can be left; or it sent more than half of the one before it, so that
    /// the kernel writes about as fast as the connection sends.
    #[must_use]
    pub fn ended(&mut self, bytes: u64, took: Duration) -> bool {
        let shrinks = self.count == 0 || bytes <= self.last_bytes / 2;
        self.count += 1;
        self.last_bytes = bytes;
        let is_small = bytes <= limits::HANDOVER_REST_BYTES || took < limits::HANDOVER_ROUND_SHORT;
        !is_small && shrinks && self.count < self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const MIB: u64 = 1 << 20;

    fn rounds(kind: PortableKind, sent: &[u64]) -> u32 {
        let mut rounds = Rounds::begin(kind);
        for bytes in sent {
            if !rounds.ended(bytes * MIB, LONG) {
                break;
            }
        }
        rounds.count
    }

    #[test]
    fn copying_ends_when_it_gains_nothing() {
        for (sent, count) in [
            (&[1, 9][..], 1),
            // The rest is small.
            (&[500, 50, 3, 9], 3),
            // It does not shrink.
            (&[500, 400, 9], 2),
            (&[500, 100, 51, 9], 3),
            (&[4096, 2048, 1024, 512, 256, 128], limits::HANDOVER_ROUNDS),
        ] {
            assert_eq!(rounds(PortableKind::Checkpoint, sent), count, "{sent:?}");
            assert_eq!(rounds(PortableKind::Teleport, sent), count.min(limits::HANDOVER_MACHINE_ROUNDS), "{sent:?}");
        }
        let mut rounds = Rounds::begin(PortableKind::Checkpoint);
        assert!(!rounds.ended(500 * MIB, limits::HANDOVER_ROUND_SHORT / 2), "little was written meanwhile");
    }
}
