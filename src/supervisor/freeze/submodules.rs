//! Steps of a repository member together with its submodules, outer repositories first.

use std::path::{Path, PathBuf};

use super::objects;
use crate::core::error::{Error, Result};
use crate::core::freeze::RepositoryPart;
use crate::core::freeze::submodule::SubmodulePart;
use crate::core::limits;
use crate::git::{Repository, State, Submodule, end_of, scratch_of};
use crate::supervisor::host::Host;

impl From<&RepositoryPart> for State {
    fn from(part: &RepositoryPart) -> State {
        let RepositoryPart { head, index_tree, work_tree, changed, untracked, submodules, marks, .. } = part.clone();
        let inner = |one: SubmodulePart| Submodule {
            path: one.path,
            commit: one.commit,
            state: one.part.as_ref().map(State::from),
        };
        let submodules = submodules.into_iter().map(inner).collect();
        State { head, index_tree, work_tree, changed, untracked, submodules, marks }
    }
}

impl From<&State> for RepositoryPart {
    fn from(state: &State) -> RepositoryPart {
        let State { head, index_tree, work_tree, changed, untracked, submodules, marks } = state.clone();
        let inner = |one: Submodule| SubmodulePart {
            path: one.path,
            commit: one.commit,
            part: one.state.as_ref().map(RepositoryPart::from),
        };
        let submodules = submodules.into_iter().map(inner).collect();
        let (pack, dependencies, worktrees, linked_to, left_out) = Default::default();
        RepositoryPart {
            head,
            index_tree,
            work_tree,
            changed,
            untracked,
            pack,
            dependencies,
            submodules,
            worktrees,
            linked_to,
            left_out,
            marks,
        }
    }
}

/// A repository or a submodule of it, the folder of its files, and what was captured of it.
pub(super) type Step<'a> = (Repository, PathBuf, &'a RepositoryPart);

/// The repository and its initialised submodules.
pub(super) fn steps<'a>(repository: &Repository, scratch: &Path, part: &'a RepositoryPart) -> Result<Vec<Step<'a>>> {
    let mut found = vec![(repository.clone(), scratch.to_owned(), part)];
    for one in &part.submodules {
        let Some(part) = &one.part else { continue };
        let inner = initialised(repository, one)?;
        found.extend(steps(&inner, &scratch_of(scratch, &one.path), part)?);
    }
    Ok(found)
}

/// A submodule that a freeze has.
///
/// # Errors
/// `refused` (`submodule_missing`) if it is not initialised now.
pub(super) fn initialised(repository: &Repository, one: &SubmodulePart) -> Result<Repository> {
    repository.submodule(&one.path)?.ok_or_else(|| missing(repository, one))
}

fn missing(repository: &Repository, one: &SubmodulePart) -> Error {
    let (outer, path, commit) = (repository.path().display(), &one.path, &one.commit);
    Error::refused(format!("submodule {path} of {outer} is not there, and its commit {commit} is to be restored"))
        .reason("submodule_missing")
        .hint(format!(
            "check out a commit that has it, initialise it (`git submodule update --init {path}`), then try again"
        ))
}

/// What a freeze names of a repository whose state was just read.
pub(super) async fn named(repository: &Repository, scratch: &Path, state: &State) -> Result<RepositoryPart> {
    let dependencies = repository.dependencies(scratch).await?;
    let linked_to = repository.shared_dir().map(|shared| shared.display().to_string());
    let (worktrees, left_out) = (repository.worktrees(), repository.left_out());
    Ok(RepositoryPart { dependencies, worktrees, linked_to, left_out, ..state.into() })
}

/// Stores the objects that commits do not have, and keeps the commits by `reference`: what git collects, no freeze has.
pub(super) async fn store(
    host: &Host,
    (repository, reference): (&Repository, &str),
    scratch: &Path,
    state: &State,
    part: &mut RepositoryPart,
) -> Result<()> {
    repository.keep(reference, &state.head.commit).await?;
    if let Some(file) = repository.pack(scratch, state).await? {
        part.pack = Some(objects::put(host, file).await?.0);
    }
    for (one, inner) in state.submodules.iter().zip(&mut part.submodules) {
        let (Some(state), Some(inner)) = (&one.state, &mut inner.part) else { continue };
        let found = repository.submodule(&one.path)?.ok_or_else(|| {
            Error::conflict(format!("{} was removed during the freeze", one.path)).reason("repository_changed")
        })?;
        Box::pin(store(host, (&found, reference), &scratch_of(scratch, &one.path), state, inner)).await?;
    }
    Ok(())
}

/// Reads everything that a restore needs.
///
/// # Errors
/// `refused` (`submodule_missing`), `notFound` without a commit, `corrupt`.
pub(super) async fn validate(
    host: &Host,
    repository: &Repository,
    scratch: &Path,
    part: &RepositoryPart,
) -> Result<()> {
    for (repository, scratch, part) in steps(repository, scratch, part)? {
        repository.check_settings().await?;
        let apart = scratch.join("verify");
        std::fs::create_dir_all(&apart).map_err(|error| Error::unavailable(format!("{}: {error}", apart.display())))?;
        let pack = scratch.join("restored-pack");
        if let Some(digest) = part.pack {
            objects::get(host, digest, &pack).await?;
        }
        repository.verify(&apart, &part.into(), part.pack.is_some().then_some(&*pack)).await?;
    }
    Ok(())
}

/// Names what no freeze holds of a repository and its submodules: the progress of an operation of git that is under way,
/// and rights of further private files.
pub(super) fn not_captured(repository: &Repository, state: &State) -> Result<Vec<String>> {
    let shown = repository.path().display();
    let progress = |what| format!("a {what} is under way in {shown}: its progress is not captured");
    let mut found: Vec<String> = repository.under_way().map(progress).into_iter().collect();
    if state.marks.private.len() >= limits::GIT_PRIVATE_FILES {
        let most = limits::GIT_PRIVATE_FILES;
        found.push(format!(
            "{shown} may have more than {most} private files: the rights of the others are not captured"
        ));
    }
    for one in &state.submodules {
        let (Some(state), Some(inner)) = (&one.state, repository.submodule(&one.path)?) else { continue };
        found.extend(not_captured(&inner, state)?);
    }
    Ok(found)
}

/// Refuses a restore that would destroy files which no freeze holds, leave a submodule outside of its repository, or put
/// other commits under an operation of git that is under way.
///
/// # Errors
/// `refused` (`ignored_files`, `submodule_added`, `git_operation`).
pub(super) async fn check_losses(
    repository: &Repository,
    scratch: &Path,
    present: &RepositoryPart,
    target: &RepositoryPart,
) -> Result<()> {
    if let Some(what) = repository.under_way() {
        return Err(Error::refused(format!("a {what} is under way in {}", repository.path().display()))
            .reason("git_operation")
            .hint(format!("end it first: {}", end_of(what))));
    }
    let states = (&State::from(present), &State::from(target));
    repository.check_ignored(scratch, &scratch.join("verify"), states).await?;
    for now in &present.submodules {
        let Some(inner) = &now.part else { continue };
        match target.submodules.iter().find(|then| then.path == now.path) {
            Some(SubmodulePart { part: Some(target), .. }) => {
                let found = repository.submodule(&now.path)?.ok_or_else(|| missing(repository, now))?;
                Box::pin(check_losses(&found, &scratch_of(scratch, &now.path), inner, target)).await?;
            }
            // Its work stays as it is.
            Some(SubmodulePart { part: None, .. }) => {}
            None => {
                let (outer, path) = (repository.path().display(), &now.path);
                return Err(Error::refused(format!("{outer} had no submodule {path} then"))
                    .reason("submodule_added")
                    .hint(format!("remove its files first, which git keeps: git submodule deinit {path}")));
            }
        }
    }
    Ok(())
}

/// Adds the objects of a validated target; nothing refers to them yet.
pub(super) async fn prepare(repository: &Repository, scratch: &Path, part: &RepositoryPart) -> Result<()> {
    for (repository, scratch, part) in steps(repository, scratch, part)? {
        if part.pack.is_some() {
            repository.prepare(&scratch.join("restored-pack")).await?;
        }
    }
    Ok(())
}

/// Changes the repository and its submodules, whose objects are present.
pub(super) async fn switch(repository: &Repository, scratch: &Path, part: &RepositoryPart, attach: bool) -> Result<()> {
    for (repository, scratch, part) in steps(repository, scratch, part)? {
        repository.switch(&scratch, &State::from(part), attach).await?;
    }
    Ok(())
}

/// Keeps what a repository and its submodules have now and neither the state before a restore nor its target has, before
/// the former is brought back; says where.
pub(super) async fn keep_work(
    host: &Host,
    repository: &Repository,
    scratch: &Path,
    (group, before, target): (&str, &RepositoryPart, Option<&RepositoryPart>),
) -> Result<Vec<String>> {
    let present = repository.state(scratch, true).await?;
    let known: Vec<State> = std::iter::once(before).chain(target).map(State::from).collect();
    if present == known[0] {
        return Ok(Vec::new());
    }
    // A name of a reference has no two dots.
    let reference = format!("refs/ryokan/kept/{}-{}", group.replace("..", "-"), host.now_ms());
    let known: Vec<&State> = known.iter().collect();
    let found = repository.keep_work(scratch, &reference, (&present, &known)).await?;
    let (path, tree) = (repository.path(), present.work_tree.as_str());
    let kept = if found.is_empty() { "" } else { reference.as_str() };
    let detail = serde_json::json!({ "path": path, "tree": tree, "submodules": present.inner_trees(""), "kept": kept });
    host.events.publish("", "repository_reverted", detail);
    let said = |path| format!("work that was in neither state is kept: git -C {path} stash apply {reference}");
    Ok(found.into_iter().map(said).collect())
}

/// Brings the objects of the state before a restore back, and removes locks of a killed daemon.
pub(super) async fn recover(host: &Host, repository: &Repository, scratch: &Path, part: &RepositoryPart) -> Result<()> {
    for (repository, scratch, part) in steps(repository, scratch, part)? {
        repository.check_settings().await?;
        repository.release_index(&scratch);
        if let Some(digest) = part.pack {
            let pack = scratch.join("safety-pack");
            std::fs::create_dir_all(&scratch).map_err(|error| Error::unavailable(error.to_string()))?;
            objects::get(host, digest, &pack).await?;
            repository.prepare(&pack).await?;
        }
    }
    Ok(())
}
