//! The audit log's lines and the chain that they form. The encoding is described in `docs/audit-log.md`.
//!
//! ```text
//! hash(n) = BLAKE3 in derive-key mode (context of the line's format, hash(n - 1) ‖ fields of line n)
//! field   = its length as 8 bytes little-endian ‖ its bytes
//! ```
//!
//! So a changed, missing, added or moved line breaks the chain at a place that can be named. Lines cut off at the end leave a chain
//! that is whole but shorter: an [`AuditHead`] kept elsewhere shows that.

use serde::{Deserialize, Serialize};

use super::ids::Digest;

/// Format of the lines that this release writes.
pub const FORMAT: u32 = 2;

/// What the hash of a line of each format begins with.
const CONTEXTS: [&str; FORMAT as usize] = ["ryokan 2026 audit log line", "ryokan 2026-11 audit log line, format 2"];

/// What somebody did, or tried.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewAudit {
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Who: the peer's uid.
    pub uid: u32,
    /// Who: the client's own name for itself, and after a `/` the label of the attenuated capability that was used.
    pub client: String,
    /// What: the operation.
    pub action: String,
    /// To which kernel (its id); empty for the host.
    pub kernel: String,
    /// The kernel's version before.
    pub version_before: Option<u64>,
    /// The kernel's version after.
    pub version_after: Option<u64>,
    /// `done`, or the code of the refusal or failure.
    pub outcome: String,
    /// Whose kernel it is; `None` for the host, and in lines of format 1.
    pub owner: Option<u32>,
    /// The manifest of the checkpoint that it concerns.
    pub manifest: Option<Digest>,
    /// More words: which checkpoint, how many, why not.
    pub detail: String,
}

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditLine {
    /// From 1, without holes.
    pub sequence: u64,
    /// How it is hashed: 1 to [`FORMAT`].
    pub format: u32,
    /// What happened.
    pub what: NewAudit,
    /// Of this line and all before it.
    pub hash: Digest,
}

/// The end of the log. Kept elsewhere, it proves later that nothing was cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditHead {
    /// Lines in the log.
    pub sequence: u64,
    /// Hash of the last one; zeros for an empty log.
    pub hash: Digest,
}

impl AuditHead {
    /// Of a log without lines.
    pub const EMPTY: AuditHead = AuditHead { sequence: 0, hash: Digest::from_bytes([0; 32]) };

    /// The end after one more line.
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

/// A text that is no end of a log.
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

/// Where the chain is broken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the audit log is broken at line {sequence}: {why}")]
pub struct AuditBreak {
    /// The first line that does not fit.
    pub sequence: u64,
    /// What is wrong with it.
    pub why: String,
}

/// What is known of the log's past from elsewhere, and how far the chain was followed.
#[derive(Debug, Clone)]
pub struct Walk {
    /// Up to here it is whole.
    pub head: AuditHead,
    /// Ends that it once had, with where they were kept; the first lines first.
    known: Vec<(AuditHead, String)>,
    /// How many of them were passed.
    passed: usize,
    /// Format of the line before.
    format: u32,
}

impl Walk {
    /// Begins before the first line. Each known end comes with the words for where it was kept.
    pub fn new(mut known: Vec<(AuditHead, String)>) -> Walk {
        known.sort_by_key(|(head, _)| head.sequence);
        let passed = known.iter().take_while(|(head, _)| head.sequence == 0).count();
        Walk { head: AuditHead::EMPTY, known, passed, format: 1 }
    }

    /// Takes the next line.
    ///
    /// # Errors
    /// It does not fit.
    pub fn take(&mut self, line: &AuditLine) -> Result<(), AuditBreak> {
        let due = self.head.sequence + 1;
        let broken = |why: String| Err(AuditBreak { sequence: due, why });
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
        (self.head, self.format) = (head, line.format);
        Ok(())
    }

    /// There are no more lines.
    ///
    /// # Errors
    /// An end that was kept elsewhere lies beyond.
    pub fn end(&self) -> Result<AuditHead, AuditBreak> {
        match self.known.get(self.passed) {
            None => Ok(self.head),
            Some((known, kept)) => Err(AuditBreak {
                sequence: self.head.sequence + 1,
                why: format!("it is missing: {kept} knows lines up to {}", known.sequence),
            }),
        }
    }
}

/// The hash of a line; `None` for a format that is not known.
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

    /// Lines of both formats, as a log has them that was begun by an earlier release.
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
            // What one field loses another gains.
            |w| (w.client, w.action) = ("tes".into(), format!("t{}", w.action)),
        ];
        for (n, change) in changes.iter().enumerate() {
            for at in 3..8 {
                let mut lines = whole.clone();
                change(&mut lines[at].what);
                assert_eq!(walk(&lines, &[]).map_err(|broken| broken.sequence), Err(at as u64 + 1), "change {n}");
            }
        }
        // What no hash covers may not be there at all.
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
        assert_eq!(broken(&|lines| lines[6].format = 1), Some(7), "hashed as before");
        assert_eq!(broken(&|lines| lines[7].format = FORMAT + 1), Some(8), "of a later release");
    }

    #[test]
    fn kept_head_reveals_truncation() {
        let whole = chain(8);
        let (seventh, last) = (head_of(&whole[6]), head_of(&whole[7]));
        assert_eq!(walk(&whole, &[last, seventh, seventh]), Ok(last));
        assert_eq!(walk(&whole[..6], &[]).map(|head| head.sequence), Ok(6), "a shorter chain is whole");
        assert_eq!(walk(&whole[..6], &[seventh]).map_err(|broken| broken.sequence), Err(7));
        // A log that was written anew is another one.
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

    /// Format 1 is what earlier releases wrote: it must never change.
    #[test]
    fn audit_formats_are_stable() {
        let line = what(1);
        let hashes = [1, 2].map(|format| AuditHead::EMPTY.after(format, &line).expect("known").hash.to_string());
        assert_eq!(hashes.map(|hash| hash[..16].to_owned()), ["58ba194567d58c2c", "22e82e4d7211f9df"]);
        assert!(AuditHead::EMPTY.after(0, &line).is_none() && AuditHead::EMPTY.after(3, &line).is_none());
    }
}
