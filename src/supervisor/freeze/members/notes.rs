//! What a client must know of a member besides its content.

use super::{Live, LiveKind};
use crate::core::checkpoint::Restoration;
use crate::core::error::{Error, Result};
use crate::core::freeze::cost::Storage;
use crate::core::freeze::{Captured, Target};
use crate::supervisor::freeze::storage::{kernel_version, storage_at};
use crate::supervisor::freeze::submodules;

/// Ended programs, and unrestored parts, that a note names of one member.
const NOTED: usize = 8;
/// Characters of each, at most.
const NOTED_CHARS: usize = 100;

impl Live {
    /// What the restore of a member kernel has ended, and what it could not bring back. `under_way`: the execution beside
    /// which it was captured; 0: none.
    pub(super) fn notes_of_restore(&self, restored: &Restoration, under_way: u64) -> Vec<String> {
        let excerpt =
            |text: &str| text.lines().next().unwrap_or_default().chars().take(NOTED_CHARS).collect::<String>();
        let listed = |what: &str, entries: Vec<String>| {
            let (all, named) = (entries.len(), entries.iter().take(NOTED).cloned().collect::<Vec<_>>().join("; "));
            let more = if all > NOTED { format!("; and {} more", all - NOTED) } else { String::new() };
            (all > 0).then(|| format!("member {}: {what}: {named}{more}", self.name))
        };
        let ended = restored.ended.iter().map(|job| format!("{} ({})", job.id, excerpt(&job.command)));
        let missed = restored.missed.iter().map(|missed| format!("{} ({})", missed.key, excerpt(&missed.reason)));
        let name = &self.name;
        let begun = format!(
            "member {name}: execution {under_way} was under way: variables are those before it, files those of that moment"
        );
        let begun = (under_way != 0).then_some(begun);
        let lists = [listed("ended", ended.collect()), listed("not restored", missed.collect())];
        lists.into_iter().chain([begun]).flatten().collect()
    }

    /// What a client must know of what was captured.
    pub fn notes_of_capture(&self) -> Result<Vec<String>> {
        match &self.kind {
            LiveKind::Repository { repository, state: Some(state), .. } => submodules::not_captured(repository, state),
            LiveKind::Data(source) => Ok(source.credentials_held().map(str::to_owned).into_iter().collect()),
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } => Ok(Vec::new()),
        }
    }

    /// What a client must know of a member that does not go on, and what happens next.
    pub fn not_resumed(&self, error: &Error) -> String {
        format!(
            "member {} still does not work: {}; the daemon tries again each minute, and so does the next operation of group {}",
            self.name,
            error.recorded(),
            self.group.2
        )
    }

    /// What became of the executions of a kernel.
    pub fn executions(&self) -> impl Iterator<Item = String> {
        let name = self.name.clone();
        self.executions.named().into_iter().map(move |what| format!("member {name}: {what}"))
    }

    /// What held its content.
    pub async fn storage(&self) -> Result<Storage> {
        let (version, place) = match &self.kind {
            LiveKind::Kernel { .. } => (kernel_version(), Some(self.host.environment.data.clone())),
            LiveKind::Repository { path, repository, .. } => (repository.git().version().await?, Some(path.clone())),
            LiveKind::Data(source) => source.held_by(),
        };
        let parameters = match &self.kind {
            LiveKind::Data(source) => source.parameters(),
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } => String::new(),
        };
        storage_at(version, place, parameters).await
    }

    /// What a restore neither brings back nor keeps.
    pub async fn lost_by_restore(&mut self) -> Result<Option<String>> {
        match &mut self.kind {
            LiveKind::Data(source) => source.lost_by_restore().await,
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } => Ok(None),
        }
    }

    /// Says that the member was at another place when its target was captured.
    pub fn other_place(&self) -> Option<String> {
        let (then, now) = match (self.target.as_ref()?, &self.member.target) {
            (Captured::Repository { path: then, .. }, Target::Repository { path: now })
            | (Captured::Database { path: then, .. }, Target::Database { path: now })
            | (Captured::Directory { path: then, .. }, Target::Directory { path: now }) => (then, now),
            (Captured::Command { source: then, .. }, Target::Command { source: now }) => (then, now),
            _ => return None,
        };
        let name = &self.name;
        (then != now).then(|| format!("member {name} was {then} at that freeze: its content comes to {now}"))
    }

    /// Why a resumed data source does not serve.
    pub fn at_rest(&self) -> Option<String> {
        match &self.kind {
            LiveKind::Data(source) => source.at_rest(),
            LiveKind::Kernel { .. } | LiveKind::Repository { .. } => None,
        }
    }

    /// Says where the content that another program wrote during the restore was kept.
    pub fn kept(&self) -> Vec<String> {
        match &self.kind {
            LiveKind::Data(source) => {
                let kept = source.kept().map(|path| path.display().to_string());
                kept.map(|place| format!("another program wrote meanwhile: {place} holds that")).into_iter().collect()
            }
            LiveKind::Repository { kept, .. } => kept.clone(),
            LiveKind::Kernel { .. } => Vec::new(),
        }
    }
}
