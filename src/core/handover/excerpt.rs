//! The lines of a host's audit log about one kernel: they move with it, as evidence of another host.
//!
//! Each line has the hash of the line before it, so that its own hash can be computed again. Lines between two of the
//! excerpt are about other kernels and stay away; that nothing was left out shows only beside the log itself, whose head
//! the excerpt names.

use serde::{Deserialize, Serialize};

use crate::core::audit::{AuditHead, AuditLine, NewAudit};
use crate::core::ids::{Digest, HostId, KernelId};
use crate::core::limits;

/// Lines about a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Excerpt {
    /// The host whose log it is.
    pub host: HostId,
    /// The kernel.
    pub kernel: KernelId,
    /// The log's end when the lines were read.
    pub head: AuditHead,
    /// The newest lines, the oldest of them first.
    pub lines: Vec<Link>,
}

/// A line with what links it to the chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Hash of the line before it in the log.
    pub before: Digest,
    /// Its number in the log.
    pub sequence: u64,
    /// Format of its hash.
    pub format: u32,
    /// Its hash.
    pub hash: Digest,
    /// The operation.
    pub what: NewAudit,
}

impl Link {
    /// Links a line to the one before it.
    pub fn of(before: Digest, line: AuditLine) -> Link {
        let AuditLine { sequence, format, what, hash } = line;
        Link { before, sequence, format, hash, what }
    }
}

/// A rule that an excerpt breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExcerptError {
    /// There are too many lines.
    #[error("it has more than {} lines", limits::HANDOVER_AUDIT_LINES)]
    TooLong,
    /// It is about another kernel or of another host.
    #[error("it is of another host or kernel")]
    Foreign,
    /// A line is about another kernel.
    #[error("line {0} is about another kernel")]
    OtherKernel(u64),
    /// The hash of a line does not follow.
    #[error("the hash of line {0} does not follow from its content and the line before")]
    Hash(u64),
    /// Two lines, or the last line and the head, do not fit.
    #[error("line {0} does not fit the one before it or the log's end")]
    Order(u64),
}

impl Excerpt {
    /// Checks that each line has its hash, that they are in order, and that the named head can be the log's.
    ///
    /// # Errors
    /// The broken rule.
    pub fn check(&self, host: HostId, kernel: KernelId) -> Result<(), ExcerptError> {
        if self.lines.len() > limits::HANDOVER_AUDIT_LINES {
            return Err(ExcerptError::TooLong);
        }
        if self.host != host || self.kernel != kernel {
            return Err(ExcerptError::Foreign);
        }
        let name = kernel.to_string();
        let mut last = AuditHead::EMPTY;
        for Link { before, sequence, format, hash, what } in &self.lines {
            if what.kernel != name {
                return Err(ExcerptError::OtherKernel(*sequence));
            }
            let previous = sequence.checked_sub(1).ok_or(ExcerptError::Order(*sequence))?;
            let follows = previous > last.sequence || (previous == last.sequence && *before == last.hash);
            if !follows {
                return Err(ExcerptError::Order(*sequence));
            }
            let here = AuditHead { sequence: *sequence, hash: *hash };
            if (AuditHead { sequence: previous, hash: *before }).after(*format, what) != Some(here) {
                return Err(ExcerptError::Hash(*sequence));
            }
            last = here;
        }
        match self.head.sequence > last.sequence || self.head == last {
            true => Ok(()),
            false => Err(ExcerptError::Order(last.sequence)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::audit::FORMAT;

    const HOST: HostId = HostId::from_bytes([1; 16]);
    const KERNEL: KernelId = KernelId::from_bytes([2; 16]);

    /// Lines 2, 3 and 5 of a log of six.
    fn excerpt() -> Excerpt {
        let (mut head, mut lines) = (AuditHead::EMPTY, Vec::new());
        for number in 1..=6 {
            let is_own = [2, 3, 5].contains(&number);
            let kernel = if is_own { KERNEL } else { KernelId::from_bytes([3; 16]) }.to_string();
            let what = NewAudit { kernel, action: format!("a{number}"), ..NewAudit::default() };
            let next = head.after(FORMAT, &what).expect("a known format");
            if is_own {
                let line = AuditLine { sequence: number, format: FORMAT, what, hash: next.hash };
                lines.push(Link::of(head.hash, line));
            }
            head = next;
        }
        Excerpt { host: HOST, kernel: KERNEL, head, lines }
    }

    #[test]
    fn excerpts_are_linked_to_chain() {
        let whole = excerpt();
        assert_eq!(whole.check(HOST, KERNEL), Ok(()));
        let json = serde_json::to_string(&whole).expect("JSON");
        assert_eq!(serde_json::from_str::<Excerpt>(&json).expect("an excerpt"), whole);
        let broken = |change: &dyn Fn(&mut Excerpt)| {
            let mut changed = whole.clone();
            change(&mut changed);
            changed.check(HOST, KERNEL).expect_err("it is broken")
        };
        assert_eq!(broken(&|one| one.host = HostId::from_bytes([9; 16])), ExcerptError::Foreign);
        assert_eq!(broken(&|one| one.lines[0].what.action.push('x')), ExcerptError::Hash(2));
        assert_eq!(broken(&|one| one.lines[2].before = Digest::from_bytes([9; 32])), ExcerptError::Hash(5));
        assert_eq!(broken(&|one| one.lines[1].before = Digest::from_bytes([9; 32])), ExcerptError::Order(3));
        assert_eq!(broken(&|one| one.lines[1].what.kernel.clear()), ExcerptError::OtherKernel(3));
        assert_eq!(broken(&|one| one.lines.swap(0, 2)), ExcerptError::Order(3));
        assert_eq!(broken(&|one| one.lines.push(one.lines[2].clone())), ExcerptError::Order(5));
        assert_eq!(broken(&|one| one.head.sequence = 4), ExcerptError::Order(5));
        assert_eq!(broken(&|one| one.head.sequence = 5), ExcerptError::Order(5));
        assert_eq!(broken(&|one| one.lines[0].sequence = 0), ExcerptError::Order(0));
        // The chain goes on after the last line about the kernel.
        let mut shorter = whole.clone();
        shorter.lines.remove(1);
        assert_eq!(shorter.check(HOST, KERNEL), Ok(()));
    }
}
