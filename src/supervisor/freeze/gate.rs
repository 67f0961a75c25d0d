//! The rehydration gate on this host: git answers what follows what, and a configured program may rebuild code.

use std::collections::HashSet;

use super::access;
use super::members::Live;
use super::pairings::{omitted, pairings};
use super::run_freeze::in_time;
use super::run_restore::Run;
use crate::config::Rebuild;
use crate::core::audit::NewAudit;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::gate::{self, Order, Pairing};
use crate::core::freeze::lock::Lock;
use crate::core::freeze::refs::CommitId;
use crate::core::freeze::{Captured, Part};
use crate::programs::{Output, Program};
use crate::supervisor::checkpoint::environment_now;
use crate::supervisor::host::Host;
use crate::supervisor::host::audit::bounded;

pub(super) use crate::core::freeze::gate::Refusal;

/// Why code and data may not live together.
#[derive(Debug)]
pub(super) enum Judged {
    /// The data is newer than the code.
    Newer(Box<Refusal>),
    /// It could not be judged.
    Failed(Error),
}

impl From<Error> for Judged {
    fn from(error: Error) -> Judged {
        Judged::Failed(error)
    }
}

impl From<Judged> for Error {
    fn from(judged: Judged) -> Error {
        let refusal = match judged {
            Judged::Newer(refusal) => refusal,
            Judged::Failed(error) => return error,
        };
        let Refusal { database, revision, repository, commit, needs, order } = *refusal;
        let (needs, commit) = (needs.short(), commit.short());
        let how = match order {
            Order::Older => "which is older".to_owned(),
            Order::Apart => "which does not follow from it".to_owned(),
            Order::Gone => format!("and {repository} no longer has {needs}"),
        };
        let hint = match order {
            Order::Older => format!("check out {needs} or later in {repository}, or restore the whole group"),
            Order::Apart | Order::Gone => format!(
                "check out {needs} or later in {repository}; if its history was rewritten and code and data fit, freeze the \
                 group: that records both"
            ),
        };
        Error::refused(format!(
            "schema {revision} of {database} was recorded with commit {needs} of {repository}; its code would be at {commit}, {how}",
        ))
        .reason("data_newer")
        .hint(hint)
    }
}

/// Applies the gate; git answers which commits are ancestors.
pub(super) async fn judge(
    would_be: &[Pairing],
    recorded: &[Pairing],
    live: impl Iterator<Item = &Live> + Clone,
) -> std::result::Result<(), Judged> {
    let mut ancestors: HashSet<(String, CommitId, CommitId)> = HashSet::new();
    for pair in would_be {
        let repository = live.clone().filter(|live| live.name == pair.repository).find_map(Live::repository);
        let Some(repository) = repository else { continue };
        let mut asked = HashSet::new();
        if recorded.contains(pair) {
            ancestors.insert((pair.repository.clone(), pair.commit.clone(), pair.commit.clone()));
            continue;
        }
        // The newest first: most often it is an ancestor.
        for seen in gate::judged_by(pair, recorded).into_iter().rev() {
            if asked.insert(&seen.commit) && repository.is_ancestor(&seen.commit, &pair.commit).await? {
                ancestors.insert((pair.repository.clone(), seen.commit.clone(), pair.commit.clone()));
                break;
            }
        }
    }
    let is_ancestor = |repository: &str, a: &CommitId, b: &CommitId| {
        ancestors.contains(&(repository.to_owned(), a.clone(), b.clone()))
    };
    let Err(mut refusal) = gate::check(would_be, recorded, is_ancestor) else { return Ok(()) };
    let repository = live.clone().filter(|live| live.name == refusal.repository).find_map(Live::repository);
    if let Some(repository) = repository {
        let is_there = repository.has_commit(&refusal.needs).await?;
        if is_there {
            repository.check_followed(&refusal.needs, &refusal.commit).await?;
        }
        refusal.order = match is_there {
            false => Order::Gone,
            true if repository.is_ancestor(&refusal.commit, &refusal.needs).await? => Order::Older,
            true => Order::Apart,
        };
    }
    Err(Judged::Newer(refusal))
}

/// The pairs of the present that may be recorded without a client who says so: those that the gate admits.
///
/// # Errors
/// Errors of git.
pub(super) async fn admitted(
    pairs: Vec<Pairing>,
    recorded: &[Pairing],
    live: impl Iterator<Item = &Live> + Clone,
) -> Result<Vec<Pairing>> {
    let mut found = Vec::new();
    for pair in pairs {
        match judge(std::slice::from_ref(&pair), recorded, live.clone()).await {
            Ok(()) => found.push(pair),
            Err(Judged::Newer(_)) => {}
            Err(Judged::Failed(error)) => return Err(error),
        }
    }
    Ok(found)
}

/// Runs the program of the configuration that brings a repository to a commit, or to one that follows it.
///
/// # Errors
/// Errors of the program.
pub(super) async fn rebuild(host: &Host, rebuild: &Rebuild, (path, commit): (&str, &str)) -> Result<()> {
    let program = Program {
        argv: &rebuild.run,
        kept: &[],
        env: &[("RYOKAN_REPOSITORY", path), ("RYOKAN_COMMIT", commit)],
        input: None,
        output: Output::Ignored,
        timeout: rebuild.timeout,
        user: None,
    };
    let done = access::programs(host).await?.run(&program).await.map(drop);
    done.map_err(|error| Error { message: format!("{path} was not rebuilt: {}", error.message), ..error })
}

/// Why a repository that is there cannot be read: a merge under way, or rules of this host.
const CODE_IS_THERE: [&str; 4] = ["git_index", "repository_settings", "shared_with_kernel", "sparse_checkout"];

/// Leaves a broken member, which is not restored, out of the safety freeze and of the comparison of code and data; says
/// so.
///
/// # Errors
/// The member's error, if the member is only unavailable now, or if it is a repository that is there: its code would be
/// judged by nothing.
pub(super) fn left_out(name: &str, error: Error) -> Result<String> {
    match error.code {
        _ if CODE_IS_THERE.contains(&error.reason.as_str()) => {
            Err(Error { message: format!("member {name}: {}", error.message), ..error })
        }
        ErrorCode::NotFound | ErrorCode::Refused | ErrorCode::Unsupported | ErrorCode::Corrupt => {
            Ok(format!("member {name} is left out of the check and the safety freeze: {}", error.message))
        }
        _ => Err(error),
    }
}

/// Names lock files of package managers that differ from a freeze, of repositories which are not among the restored
/// parts: what they depend on may not fit what is restored.
fn other_dependencies(would_be: &[Part], (frozen, restored): (&[Part], &[Part])) -> Vec<String> {
    let of = |parts: &[Part], others: &[Part]| {
        let stays = |part: &&Part| {
            matches!(part.captured, Captured::Repository { .. })
                && restored.iter().all(|one| one.name != part.name)
                && others.iter().any(|one| one.name == part.name)
        };
        Lock::of_group("", &parts.iter().filter(stays).cloned().collect::<Vec<_>>()).dependencies()
    };
    let (now, then) = (of(would_be, frozen), of(frozen, would_be));
    let found = now.differences(&then).into_iter();
    found.map(|what| format!("{what} since that freeze, and stays so")).collect()
}

impl Run<'_> {
    /// Checks that code and data would fit after the restore, or after the rebuild of a repository.
    pub async fn gate(&mut self) -> Result<()> {
        self.compared.clone()?;
        for part in &self.replaced {
            if let Some(live) = self.live.iter().find(|live| live.name == part.name) {
                live.check_losses(Some(&part.captured)).await?;
            }
        }
        self.note_environment().await?;
        match (self.judge().await, &self.rebuilding) {
            (Err(Judged::Newer(refusal)), Some(planned)) if refusal.repository == planned.repository => Ok(()),
            (judged, _) => Ok(judged?),
        }
    }

    /// Reads what would live together after the restore, and what was recorded to do so.
    pub async fn compare(&mut self) -> Result<()> {
        let mut would_be = self.parts.clone();
        let (mut present, mut left) = (Vec::new(), Vec::new());
        let restored = |name: &str| self.parts.iter().any(|one| one.name == name);
        for live in &mut self.live {
            let is_restored = restored(&live.name);
            match live.present_part().await {
                Ok(part) => present.extend(part),
                Err(error) if is_restored => return Err(error),
                Err(error) => {
                    self.notes.push(left_out(&live.name, error)?);
                    left.push(live.name.clone());
                }
            }
        }
        self.live.retain(|live| !left.contains(&live.name));
        self.recorded = self.host.catalog.pairings(self.group.id).await?;
        let admitted = admitted(pairings(&present), &self.recorded, self.live.iter()).await?;
        self.recorded.extend(admitted);
        let (replaced, kept): (Vec<Part>, Vec<Part>) = present.into_iter().partition(|part| restored(&part.name));
        would_be.extend(kept);
        (self.would_be, self.replaced) = (would_be, replaced);
        Ok(())
    }

    /// Names what the freeze was made with, is another now, and is not restored.
    async fn note_environment(&mut self) -> Result<()> {
        let (configuration, sections) = self.configuration.clone();
        let before = Lock { configuration, sections, ..Lock::of_group("", &self.parts) };
        let (configuration, sections) = (self.host.config.digest(), Some(self.host.config.sections()));
        let mut now = Lock { configuration, sections, ..Lock::new("", "group") };
        for live in &self.live[..self.restored] {
            if let Some(kernel) = live.kernel() {
                let revision = environment_now(self.host, kernel).await?;
                now.add_kernel(&live.name, String::new(), &[], &revision);
            }
        }
        self.notes.extend(now.environment().differences(&before.environment()));
        self.notes.extend(other_dependencies(&self.would_be, (&self.frozen, &self.parts)));
        for live in &mut self.live[..self.restored] {
            let lost = live.lost_by_restore().await?;
            self.notes.extend(lost.map(|what| format!("member {}: {what}", live.name)));
        }
        Ok(())
    }

    /// Judges again what would live together: with every member that is not restored as the safety freeze has it, which was
    /// read while all are held. Another program may have changed them since [`Run::compare`].
    ///
    /// # Errors
    /// `refused` (`data_newer`).
    pub async fn judge_kept(&mut self) -> Result<()> {
        self.would_be = self.parts.clone();
        for live in &self.live {
            if !self.parts.iter().any(|part| part.name == live.name) {
                self.would_be.push(live.captured_part()?);
            }
        }
        self.notes.extend(omitted(&self.would_be));
        // With those that the safety freeze may record.
        self.recorded = self.host.catalog.pairings(self.group.id).await?;
        match (self.judge().await, &self.rebuilding) {
            (Err(Judged::Newer(refusal)), Some(planned)) if refusal.repository == planned.repository => Ok(()),
            (judged, _) => Ok(judged?),
        }
    }

    /// Judges before the commit what is not restored as it is then: nothing stops the programs that write it, and a restore
    /// may take minutes.
    ///
    /// # Errors
    /// `refused` (`data_newer`), and those of reading: the restore is reverted.
    pub async fn judge_late(&mut self) -> Result<()> {
        if self.restored == self.live.len() {
            return Ok(());
        }
        let most = self.host.config.limits.freeze_step;
        let mut present = Vec::new();
        for (n, live) in self.live.iter_mut().enumerate() {
            if n < self.restored || !live.has_pairings() {
                present.push(live.captured_part()?);
                continue;
            }
            let own = live.has_deadlines();
            let part = in_time(own, most, live.present_part()).await.map_err(|error| {
                let message = format!("member {}: {}", live.name, error.message);
                Error { message, ..error }
            })?;
            self.would_be.retain(|known| known.name != live.name);
            self.would_be.extend(part.clone());
            present.extend(part);
        }
        // As in [`Run::compare`]: what was made of the data meanwhile belongs to the code before the restore.
        let admitted = admitted(pairings(&present), &self.recorded, self.live.iter()).await?;
        self.recorded.extend(admitted);
        Ok(self.judge().await?)
    }

    async fn judge(&self) -> std::result::Result<(), Judged> {
        let mut would_be = pairings(&self.would_be);
        would_be.retain(|pair| !self.together.contains(pair));
        judge(&would_be, &self.recorded, self.live.iter()).await
    }

    /// Makes a repository that a configured program can bring to what data needs a member that changes: the first one.
    /// Only code that is not restored itself can be rebuilt.
    pub async fn plan_rebuild(&mut self) {
        if self.host.config.rebuild.is_empty() || self.compared.is_err() {
            return;
        }
        // Other failures are reported by the gate.
        let Err(Judged::Newer(refusal)) = self.judge().await else { return };
        let others = self.live[self.restored..].iter();
        let Some(at) = others.map(|live| &live.name).position(|name| *name == refusal.repository) else { return };
        let at = self.restored + at;
        if self.program(at).is_some() {
            let repository = self.live.remove(at);
            self.live.insert(0, repository);
            self.restored += 1;
            self.rebuilding = Some(refusal);
        }
    }

    /// The program that rebuilds a member, and its name in the configuration.
    fn program(&self, n: usize) -> Option<(&String, &Rebuild)> {
        let path = self.live[n].repository()?.path();
        self.host.config.rebuild.iter().find(|(_, one)| one.repository == path)
    }

    /// Runs the program that brings a repository to what data needs, and reads the repository again.
    pub async fn rebuild(&mut self, n: usize) -> Result<()> {
        self.reach(n).await?;
        let gone = || Error::internal("there is nothing to rebuild");
        let refusal = self.rebuilding.clone().ok_or_else(gone)?;
        let (name, program) = self.program(n).ok_or_else(gone)?;
        let (shown, commit) = (program.repository.display().to_string(), refusal.needs.to_string());
        let line = self.host.line(self.actor, "group.rebuild", None);
        let detail = bounded(format!("{}: {name} for {commit} in {shown}", self.group.name));
        self.host.write_audit(NewAudit { owner: Some(self.group.uid), detail, ..line }).await;
        rebuild(self.host, program, (&shown, &commit)).await?;
        let note = format!("{name} rebuilt {shown} for commit {}", refusal.needs.short());
        let part = self.live[n].present_part().await?;
        if let (Some(part), Some(place)) = (part, self.would_be.iter_mut().find(|part| part.name == refusal.repository))
        {
            *place = part;
        }
        self.judge().await?;
        self.notes.push(note);
        Ok(())
    }
}
