//! The lines of the audit log and their hash chain; `docs/audit-log.md` describes the encoding.
//!
//! ```text
//! hash(n) = BLAKE3 in derive-key mode (context of the line's format, hash(n - 1) ‖ fields of line n)
//! field   = its length as 8 bytes little-endian ‖ its bytes
//! ```
//!
//! A changed, missing, added or moved line breaks the chain at an identifiable place. A truncated
//! log has a valid but shorter chain: only an [`AuditHead`] stored elsewhere reveals that.

use serde::{Deserialize, Serialize};

use super::ids::Digest;

/// Format of the lines that this release writes.
pub const FORMAT: u32 = 2;

/// The action of a line that stands for lines that could not be written.
pub const GAP: &str = "audit.gap";

/// BLAKE3 contexts, one for each format.
const CONTEXTS: [&str; FORMAT as usize] = ["ryokan 2026 audit log line", "ryokan 2026-11 audit log line, format 2"];

/// An attempted or completed operation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewAudit {
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The peer's uid.
    pub uid: u32,
    /// The client's own name, followed by `/` and the label of an attenuated capability.
    pub client: String,
    /// The operation.
    pub action: String,
    /// Id of the kernel; empty for the host.
    pub kernel: String,
    /// The kernel's version before the operation.
    pub version_before: Option<u64>,
    /// The kernel's version after the operation.
    pub version_after: Option<u64>,
    /// `done`, or the code of the error.
    pub outcome: String,
    /// Uid of the kernel's owner; `None` for the host, and in lines of format 1.
    pub owner: Option<u32>,
    /// The manifest of the affected checkpoint.
    pub manifest: Option<Digest>,
    /// Further details: the checkpoint, counts, the reason of a failure.
    pub detail: String,
}

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditLine {
    /// Sequence number from 1, without gaps.
    pub sequence: u64,
    /// Format of the hash: 1 to [`FORMAT`].
    pub format: u32,
    /// The operation.
    pub what: NewAudit,
    /// Hash of this line and all before it.
    pub hash: Digest,
}

/// The end of the log.
///
/// A head stored elsewhere proves later that no lines were cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditHead {
    /// Lines in the log.
    pub sequence: u64,
    /// Hash of the last line; zeros for an empty log.
    pub hash: Digest,
}

impl AuditHead {
    /// Head of an empty log.
    pub const EMPTY: AuditHead = AuditHead { sequence: 0, hash: Digest::from_bytes([0; 32]) };

    /// Returns the head after one more line; `None` for an unknown format.
    pub fn after(self, format: u32, line: &NewAudit) -> Option<AuditHead> {
        let sequence = self.sequence + 1;
        hash_line(self.hash, sequence, format, line).map(|hash| AuditHead { sequence, hash })
    }
}

impl std::fmt::Display for AuditHead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.sequence, self.hash)
    }
}

/// A text that is not an audit head.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no end of an audit log: expected LINE:HASH, as `ryokan audit --verify` prints it")]
pub struct ParseHeadError(String);

impl std::str::FromStr for AuditHead {
    type Err = ParseHeadError;
    fn from_str(text: &str) -> Result<Self, ParseHeadError> {
        let wrong = || ParseHeadError(text.chars().take(100).collect());
        let (sequence, hash) = text.trim().split_once(':').ok_or_else(wrong)?;
        let hash = hash.parse().map_err(|_| wrong())?;
        Ok(AuditHead { sequence: sequence.parse().map_err(|_| wrong())?, hash })
    }
}

/// A break of the hash chain, or lines that the log lacks although its chain fits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} {sequence}: {why}", if *is_gap { "the audit log is not damaged, but it has a gap before line" } else { "the audit log is broken at line" })]
pub struct AuditBreak {
    /// The first invalid line, or the one after the gap.
    pub sequence: u64,
    /// What is wrong with the line, or how many lines are missing.
    pub why: String,
    /// The lines before it could not be written, as on a full disk; nothing was changed.
    pub is_gap: bool,
}

/// Verifies a log line by line, against heads stored elsewhere.
#[derive(Debug, Clone)]
pub struct Walk {
    /// The chain is valid up to here.
    pub head: AuditHead,
    /// Heads stored elsewhere with their places, in the order of their lines.
    known: Vec<(AuditHead, String)>,
    /// Number of known heads already passed.
    passed: usize,
    /// Format of the previous line.
    format: u32,
    /// The first line that records lost lines.
    gap: Option<AuditBreak>,
}

impl Walk {
    /// Starts before the first line. Each known head has a description of its place.
    pub fn new(mut known: Vec<(AuditHead, String)>) -> Walk {
        known.sort_by_key(|(head, _)| head.sequence);
        let passed = known.iter().take_while(|(head, _)| head.sequence == 0).count();
        Walk { head: AuditHead::EMPTY, known, passed, format: 1, gap: None }
    }

    /// Verifies the next line.
    ///
    /// # Errors
    /// The line does not continue the chain.
    pub fn take(&mut self, line: &AuditLine) -> Result<(), AuditBreak> {
        let due = self.head.sequence + 1;
        let broken = |why: String| Err(AuditBreak { sequence: due, why, is_gap: false });
        if line.sequence != due {
            return broken(format!("it is missing; the next one is line {}", line.sequence));
        }
        if line.format < self.format {
            return broken(format!("it has format {}, older than that of the line before", line.format));
        }
        let NewAudit { owner, manifest, detail, .. } = &line.what;
        if line.format == 1 && (owner.is_some() || manifest.is_some() || !detail.is_empty()) {
            return broken("it says more than lines of format 1 did, and no hash covers that".into());
        }
        let Some(head) = self.head.after(line.format, &line.what) else {
            return broken(format!("it has format {}; this release knows formats up to {FORMAT}", line.format));
        };
        if head.hash != line.hash {
            return broken("its hash does not follow from its content and the line before".into());
        }
        while let Some((known, kept)) = self.known.get(self.passed).filter(|(known, _)| known.sequence == due) {
            if known.hash != head.hash {
                return broken(format!("it is another line than the one that {kept} knows"));
            }
            self.passed += 1;
        }
        if line.what.action == GAP && self.gap.is_none() {
            let why = format!("between lines {} and {due}, {}", self.head.sequence, line.what.detail);
            self.gap = Some(AuditBreak { sequence: due, why, is_gap: true });
        }
        (self.head, self.format) = (head, line.format);
        Ok(())
    }

    /// Ends the verification after the last line.
    ///
    /// # Errors
    /// A head stored elsewhere lies beyond the last line, or a line records lost lines.
    pub fn end(&self) -> Result<AuditHead, AuditBreak> {
        match self.known.get(self.passed) {
            None => self.gap.clone().map_or(Ok(self.head), Err),
            Some((known, kept)) => Err(AuditBreak {
                sequence: self.head.sequence + 1,
                why: format!("it is missing: {kept} knows lines up to {}", known.sequence),
                is_gap: false,
            }),
        }
    }
}

/// Returns the hash of a line; `None` for an unknown format.
fn hash_line(before: Digest, sequence: u64, format: u32, line: &NewAudit) -> Option<Digest> {
    let context = CONTEXTS.get((format as usize).checked_sub(1)?)?;
    let mut hasher = blake3::Hasher::new_derive_key(context);
    hasher.update(before.as_bytes());
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    field(&sequence.to_le_bytes());
    field(&line.at_ms.to_le_bytes());
    field(&u64::from(line.uid).to_le_bytes());
    field(line.client.as_bytes());
    field(line.action.as_bytes());
    field(line.kernel.as_bytes());
    for version in [line.version_before, line.version_after] {
        field(version.map(u64::to_le_bytes).as_ref().map_or(&[], |bytes| bytes));
    }
    field(line.outcome.as_bytes());
    if format > 1 {
        let owner = line.owner.map(|owner| u64::from(owner).to_le_bytes());
        field(owner.as_ref().map_or(&[], |bytes| bytes));
        field(line.manifest.as_ref().map_or(&[], |manifest| manifest.as_bytes()));
        field(line.detail.as_bytes());
    }
    Some(Digest::from_bytes(*hasher.finalize().as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn what(n: u64) -> NewAudit {
        NewAudit {
            at_ms: n as i64,
            uid: 1000,
            client: "test".into(),
            action: format!("a{n}"),
            kernel: "k".into(),
            version_after: Some(n),
            outcome: "done".into(),
            ..NewAudit::default()
        }
    }

    /// Returns lines of both formats, like a log begun by an earlier release.
    fn chain(lines: u64) -> Vec<AuditLine> {
        let mut head = AuditHead::EMPTY;
        let line = |n: u64| {
            let (what, format) = (what(n), if n <= 3 { 1 } else { FORMAT });
            head = head.after(format, &what).expect("a known format");
            AuditLine { sequence: n, format, what, hash: head.hash }
        };
        (1..=lines).map(line).collect()
    }

    fn walk(lines: &[AuditLine], known: &[AuditHead]) -> Result<AuditHead, AuditBreak> {
        let mut walk = Walk::new(known.iter().map(|head| (*head, "the test".to_owned())).collect());
        lines.iter().try_for_each(|line| walk.take(line))?;
        walk.end()
    }

    fn head_of(line: &AuditLine) -> AuditHead {
        AuditHead { sequence: line.sequence, hash: line.hash }
    }

    #[test]
    fn altered_field_breaks_chain() {
        let whole = chain(8);
        assert_eq!(walk(&whole, &[]).map(|head| head.sequence), Ok(8));
        assert_eq!(walk(&[], &[AuditHead::EMPTY]), Ok(AuditHead::EMPTY));
        let changes: &[fn(&mut NewAudit)] = &[
            |w| w.at_ms += 1,
            |w| w.uid += 1,
            |w| w.client.push('x'),
            |w| w.action.push('x'),
            |w| w.kernel.push('x'),
            |w| w.version_before = Some(0),
            |w| w.version_after = None,
            |w| w.outcome = "refused".into(),
            |w| w.owner = Some(0),
            |w| w.manifest = Some(Digest::from_bytes([0; 32])),
            |w| w.detail.push('x'),
            // Moves a byte from one field to the next.
            |w| (w.client, w.action) = ("tes".into(), format!("t{}", w.action)),
        ];
        for (n, change) in changes.iter().enumerate() {
            for at in 3..8 {
                let mut lines = whole.clone();
                change(&mut lines[at].what);
                assert_eq!(walk(&lines, &[]).map_err(|broken| broken.sequence), Err(at as u64 + 1), "change {n}");
            }
        }
        // Fields that format 1 does not hash must be absent from its lines.
        for change in &changes[8..11] {
            let mut lines = whole.clone();
            change(&mut lines[1].what);
            assert_eq!(walk(&lines, &[]).map_err(|broken| broken.sequence), Err(2));
        }
        let broken = |edit: &dyn Fn(&mut Vec<AuditLine>)| {
            let mut lines = whole.clone();
            edit(&mut lines);
            walk(&lines, &[]).err().map(|broken| broken.sequence)
        };
        assert_eq!(broken(&|lines| drop(lines.remove(4))), Some(5), "missing");
        assert_eq!(broken(&|lines| lines.swap(4, 5)), Some(5), "moved");
        assert_eq!(broken(&|lines| lines.insert(2, lines[2].clone())), Some(4), "twice");
        assert_eq!(broken(&|lines| lines[6].format = 1), Some(7), "format 1 line after format 2");
        assert_eq!(broken(&|lines| lines[7].format = FORMAT + 1), Some(8), "unknown format");
    }

    #[test]
    fn kept_head_reveals_truncation() {
        let whole = chain(8);
        let (seventh, last) = (head_of(&whole[6]), head_of(&whole[7]));
        assert_eq!(walk(&whole, &[last, seventh, seventh]), Ok(last));
        assert_eq!(walk(&whole[..6], &[]).map(|head| head.sequence), Ok(6), "truncated chain is valid");
        assert_eq!(walk(&whole[..6], &[seventh]).map_err(|broken| broken.sequence), Err(7));
        // A rewritten log has other hashes.
        let mut anew = Vec::new();
        let mut head = AuditHead::EMPTY;
        for n in 1..=9 {
            let what = NewAudit { client: "other".into(), ..what(n) };
            head = head.after(FORMAT, &what).expect("a known format");
            anew.push(AuditLine { sequence: n, format: FORMAT, what, hash: head.hash });
        }
        assert_eq!(walk(&anew, &[]).map(|head| head.sequence), Ok(9));
        assert_eq!(walk(&anew, &[seventh]).map_err(|broken| broken.sequence), Err(7));
        assert_eq!(last.to_string().parse(), Ok(last));
        assert!("7".parse::<AuditHead>().is_err() && "x:y".parse::<AuditHead>().is_err());
    }

    #[test]
    fn gap_is_no_damage() {
        let with_gap = |change: fn(&mut NewAudit)| {
            let mut head = AuditHead::EMPTY;
            let line = |n: u64| {
                let mut what = what(n);
                if n == 4 {
                    (what.action, what.detail) = (GAP.into(), "2 lines could not be written".into());
                }
                head = head.after(FORMAT, &what).expect("a known format");
                let mut line = AuditLine { sequence: n, format: FORMAT, what, hash: head.hash };
                if n == 6 {
                    change(&mut line.what);
                }
                line
            };
            let lines: Vec<AuditLine> = (1..=6).map(line).collect();
            walk(&lines, &[]).expect_err("lines are missing")
        };
        let gap = with_gap(|_| {});
        assert_eq!((gap.sequence, gap.is_gap), (4, true));
        assert!(gap.to_string().ends_with("line 4: between lines 3 and 4, 2 lines could not be written"), "{gap}");
        let broken = with_gap(|what| what.uid += 1);
        assert_eq!((broken.sequence, broken.is_gap), (6, false), "damage is reported first");
    }

    /// Format 1 is written by earlier releases and must never change.
    #[test]
    fn audit_formats_are_stable() {
        let line = what(1);
        let hashes = [1, 2].map(|format| AuditHead::EMPTY.after(format, &line).expect("known").hash.to_string());
        assert_eq!(hashes.map(|hash| hash[..16].to_owned()), ["58ba194567d58c2c", "22e82e4d7211f9df"]);
        assert!(AuditHead::EMPTY.after(0, &line).is_none() && AuditHead::EMPTY.after(3, &line).is_none());
    }
}
