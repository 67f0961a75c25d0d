//! Writes the supervisor's audit log: who changed which kernel, refusals included; keeps the log's head in a file.
//!
//! A line that cannot be written is reported in the daemon's own log, and the next line of the chain records the gap: the
//! operation is already done and is not undone.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::rc::Rc;

use crate::catalog::AuditFilter;
use crate::core::audit::{AuditHead, AuditLine, GAP, NewAudit};
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, KernelId};
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::sys::fs;

/// The file with the number of lost lines.
const LOST: &str = "audit.lost";
/// How long a refusal counts against its user, milliseconds.
const MINUTE_MS: i64 = 60_000;

/// State of the audit log between lines.
#[derive(Debug, Default)]
pub(crate) struct Auditing {
    /// Refusals per user in the current minute: its begin, the number written and the number suppressed.
    refusals: RefCell<HashMap<u32, (i64, u32, u64)>>,
    /// The head that the file holds.
    kept: Cell<Option<AuditHead>>,
    /// Whether the loss of the kept head was reported.
    is_missed: Cell<bool>,
    /// Lines that could not be written and that no line records yet; `None` before the file was read.
    lost: Cell<Option<u64>>,
}

/// Truncates text to the size of a line's detail.
pub(crate) fn bounded(text: impl Into<String>) -> String {
    let text = text.into();
    match text.len() <= limits::AUDIT_DETAIL_BYTES {
        true => text,
        false => format!("{}…", &text[..text.floor_char_boundary(limits::AUDIT_DETAIL_BYTES)]),
    }
}

/// A kernel as the audit log records it.
pub trait Audited {
    /// Its id.
    fn id(&self) -> KernelId;
    /// Its owner.
    fn uid(&self) -> u32;
    /// Its current version.
    fn version(&self) -> u64;
}

impl<T: Audited + ?Sized> Audited for Rc<T> {
    fn id(&self) -> KernelId {
        (**self).id()
    }

    fn uid(&self) -> u32 {
        (**self).uid()
    }

    fn version(&self) -> u64 {
        (**self).version()
    }
}

impl Host {
    /// A line with the current time, an actor, and the outcome "done".
    pub fn line(&self, actor: &Actor, action: &str, kernel: Option<&dyn Audited>) -> NewAudit {
        NewAudit {
            at_ms: self.now_ms(),
            uid: actor.uid,
            client: actor.client.clone(),
            action: action.to_owned(),
            kernel: kernel.map(|kernel| kernel.id().to_string()).unwrap_or_default(),
            owner: kernel.map(|kernel| kernel.uid()),
            outcome: "done".into(),
            ..NewAudit::default()
        }
    }

    /// Writes a line, after one that records the lines that could not be written before.
    pub async fn write_audit(&self, line: NewAudit) {
        let lost = self.lost_audit_lines();
        self.auditing.lost.set(Some(0));
        let gap = (lost > 0).then(|| gap(lost, line.at_ms));
        let action = line.action.clone();
        let lines: Vec<NewAudit> = gap.into_iter().chain([line]).collect();
        let write = async || Ok(self.catalog.append_audit(lines.clone()).await?);
        let written = self.making_room(write).await;
        if let Err(error) = &written {
            tracing::error!(%error, action, "the audit log could not be written");
            self.auditing.lost.set(Some(self.lost_audit_lines() + lost + 1));
        }
        if written.is_err() || lost > 0 {
            self.keep_lost_audit_lines();
        }
    }

    /// Records the lines that could not be written before, once there is room, without waiting for a further line.
    pub(crate) async fn record_audit_gap(&self) {
        let lost = self.lost_audit_lines();
        if lost == 0 {
            return;
        }
        self.auditing.lost.set(Some(0));
        match self.catalog.append_audit(vec![gap(lost, self.now_ms())]).await {
            Ok(()) => self.keep_lost_audit_lines(),
            // The file still has the number, and the next attempt follows.
            Err(error) => {
                tracing::debug!(%error, "the gap in the audit log could not be recorded yet");
                self.auditing.lost.set(Some(self.lost_audit_lines() + lost));
            }
        }
    }

    /// Lines of the log that could not be written and that no line records yet.
    pub(crate) fn lost_audit_lines(&self) -> u64 {
        let lost = self.auditing.lost.get().unwrap_or_else(|| {
            let path = self.environment.data.join(LOST);
            let kept = std::fs::read_to_string(&path).ok();
            if kept.is_none() {
                // Made while there is room: on most file systems its bytes are only overwritten later.
                self.keep_lost(0);
            }
            kept.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
        });
        self.auditing.lost.set(Some(lost));
        lost
    }

    /// Keeps the number of lost lines for the next daemon.
    fn keep_lost_audit_lines(&self) {
        self.keep_lost(self.auditing.lost.get().unwrap_or(0));
    }

    fn keep_lost(&self, lost: u64) {
        let path = self.environment.data.join(LOST);
        let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let kept = file.and_then(|file| {
            file.write_all_at(format!("{lost:020}\n").as_bytes(), 0)?;
            // Rare, and a loss of power must not hide lost lines.
            if lost > 0 { file.sync_data() } else { Ok(()) }
        });
        if let Err(error) = kept {
            tracing::warn!(%error, "the number of lost audit lines could not be kept");
        }
    }

    /// Writes a line about a change of a kernel, with its version before and after.
    pub async fn audit(
        &self,
        actor: &Actor,
        action: &str,
        kernel: &dyn Audited,
        (version_before, version_after): (Option<u64>, Option<u64>),
        detail: impl Into<String>,
    ) {
        let line = self.line(actor, action, Some(kernel));
        self.write_audit(NewAudit { version_before, version_after, detail: bounded(detail), ..line }).await;
    }

    /// Writes a line about a checkpoint.
    pub(crate) async fn audit_checkpoint(
        &self,
        actor: &Actor,
        action: &str,
        kernel: &dyn Audited,
        versions: (u64, u64),
        manifest: Digest,
        detail: String,
    ) {
        let line = self.line(actor, action, Some(kernel));
        let (version_before, version_after) = (Some(versions.0), Some(versions.1));
        let (manifest, detail) = (Some(manifest), bounded(detail));
        self.write_audit(NewAudit { version_before, version_after, manifest, detail, ..line }).await;
    }

    /// Records a refusal or failure. The number of lines per user and minute is bounded, so that a client cannot fill
    /// the log with refused requests; the next line carries the number of suppressed ones.
    pub async fn audit_refusal(&self, actor: &Actor, action: &str, kernel: Option<&dyn Audited>, error: &Error) {
        let line = self.line(actor, action, kernel);
        let Some(unwritten) = self.auditing.refused(actor.uid, line.at_ms) else { return };
        let mut detail = if error.reason.is_empty() { String::new() } else { format!("{}: ", error.reason) };
        detail.push_str(&error.recorded());
        if unwritten > 0 {
            detail = format!("{unwritten} refusals before this one were not written down; {detail}");
        }
        let version = kernel.map(|kernel| kernel.version());
        let (version_before, version_after) = (version, version);
        let (outcome, detail) = (error.code.name().to_owned(), bounded(detail));
        self.write_audit(NewAudit { version_before, version_after, outcome, detail, ..line }).await;
    }

    /// Returns the lines after a number that `uid` may see. A per-user daemon shows all; a system-wide one shows lines
    /// about the user's kernels and the user's actions on the host. `kernel` restricts the result to one kernel.
    ///
    /// # Errors
    /// The catalog's.
    pub async fn audit_lines(
        &self,
        uid: u32,
        kernel: Option<String>,
        after: u64,
        most: usize,
    ) -> Result<Vec<AuditLine>> {
        let filter = AuditFilter { kernel, seen_by: self.environment.system_wide.then_some(uid) };
        Ok(self.catalog.audit_after(after, filter, most).await?)
    }

    /// Stores the log's head in its file, if the log has grown.
    pub(crate) async fn keep_audit_head(&self) {
        let head = match self.catalog.audit_head().await {
            Ok(head) => head,
            Err(error) => return tracing::warn!(%error, "the end of the audit log could not be read"),
        };
        if self.auditing.kept.get() == Some(head) {
            return;
        }
        if !self.holds_kept_head().await {
            return;
        }
        let path = self.environment.data.join("audit.head");
        let kept = tokio::task::spawn_blocking(move || keep_head(&path, head)).await;
        match kept {
            Ok(Ok(())) => self.auditing.kept.set(Some(head)),
            Ok(Err(error)) => tracing::warn!(%error, "the end of the audit log could not be kept"),
            Err(error) => tracing::warn!(%error, "the end of the audit log could not be kept"),
        }
    }

    /// Whether the log still has the line that the file records. If not, the file stays unchanged, so that verification
    /// finds the loss. Checked until this daemon has written the file itself.
    async fn holds_kept_head(&self) -> bool {
        if self.auditing.kept.get().is_some() {
            return true;
        }
        let path = self.environment.data.join("audit.head");
        match tokio::task::spawn_blocking(move || read_head(&path)).await {
            Ok(Ok(Some(known))) if known.sequence > 0 => {
                let found = self.catalog.audit_after(known.sequence - 1, AuditFilter::default(), 1).await;
                let same = |line: &AuditLine| line.sequence == known.sequence && line.hash == known.hash;
                let is_there = found.is_ok_and(|lines| lines.first().is_some_and(same));
                if !is_there && !self.auditing.is_missed.replace(true) {
                    tracing::error!(known = %known, "the audit log lacks what its kept end knows: `ryokan audit --verify`");
                }
                is_there
            }
            // An absent or unreadable file is reported by verification, not here.
            _ => true,
        }
    }
}

/// The line that stands for lost ones.
fn gap(lost: u64, at_ms: i64) -> NewAudit {
    NewAudit {
        at_ms,
        uid: nix::unistd::geteuid().as_raw(),
        client: "ryokand".into(),
        action: GAP.into(),
        outcome: "lost".into(),
        detail: format!("{lost} lines could not be written"),
        ..NewAudit::default()
    }
}

impl Auditing {
    /// Counts a refusal; if it is to be written, returns the number of suppressed refusals before it.
    fn refused(&self, uid: u32, now_ms: i64) -> Option<u64> {
        let mut refusals = self.refusals.borrow_mut();
        // A user without refusals for a minute is remembered only while suppressed refusals are unreported.
        refusals.retain(|_, (began, _, unwritten)| *unwritten > 0 || (*began..*began + MINUTE_MS).contains(&now_ms));
        let (began, written, unwritten) = refusals.entry(uid).or_insert((now_ms, 0, 0));
        if !(*began..*began + MINUTE_MS).contains(&now_ms) {
            (*began, *written) = (now_ms, 0);
        }
        if *written >= limits::AUDIT_REFUSALS_PER_MINUTE {
            *unwritten += 1;
            return None;
        }
        *written += 1;
        Some(std::mem::take(unwritten))
    }
}

pub(crate) fn read_head(path: &Path) -> Result<Option<AuditHead>> {
    match std::fs::read_to_string(path) {
        Ok(text) => match text.parse() {
            Ok(head) => Ok(Some(head)),
            Err(error) => Err(Error::corrupt(format!("{}: {error}", path.display()))),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::internal(format!("{}: {error}", path.display()))),
    }
}

/// Writes the head, unless the file has a later one: then the log lost lines, and verification must find that.
fn keep_head(path: &Path, head: AuditHead) -> std::result::Result<(), fs::FsError> {
    if let Ok(Some(before)) = read_head(path)
        && before.sequence > head.sequence
    {
        return Ok(());
    }
    fs::replace(path, format!("{head}\n").as_bytes(), 0o600, "host.audit.head")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_audit_is_limited() {
        let auditing = Auditing::default();
        let asked = |now_ms| auditing.refused(7, now_ms);
        assert!((0..limits::AUDIT_REFUSALS_PER_MINUTE).all(|_| asked(5) == Some(0)));
        assert_eq!([asked(6), asked(7)], [None, None]);
        assert_eq!(auditing.refused(8, 7), Some(0), "another user's are counted apart");
        assert_eq!([asked(5 + MINUTE_MS), asked(6 + MINUTE_MS)], [Some(2), Some(0)]);
        // A clock that goes backwards begins another minute.
        assert_eq!(asked(1), Some(0));
        assert!(auditing.refusals.borrow().len() <= 2);
    }

    #[test]
    fn audit_head_never_regresses() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.head");
        let head = |sequence| AuditHead { sequence, hash: Digest::from_bytes([sequence as u8; 32]) };
        assert!(read_head(&path).expect("readable").is_none());
        keep_head(&path, head(5)).expect("kept");
        keep_head(&path, head(3)).expect("looked at");
        assert_eq!(read_head(&path).expect("readable"), Some(head(5)));
        std::fs::write(&path, "5:xyz").expect("written");
        assert!(read_head(&path).is_err());
    }
}
