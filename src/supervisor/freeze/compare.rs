//! Differences between two freezes of a group, or between a freeze and the present.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::members::{self, Live};
use super::objects::{self, blocking};
use super::run_freeze::in_time;
use super::{find_freeze, manifest, sources, turn};
use crate::catalog::host_database;
use crate::core::diff::{Area, Deed};
use crate::core::error::{Error, Result};
use crate::core::freeze::capture::Reply;
use crate::core::freeze::difference::{GroupDiff, Subject};
use crate::core::freeze::locked_submodules::{self, LockedSubmodule};
use crate::core::freeze::postgres::Rows;
use crate::core::freeze::refs::{DependencyLock, RepositoryLock};
use crate::core::freeze::server::ServerPart;
use crate::core::freeze::{
    Captured, DatabasePart, DirectoryPart, Group, KernelRevision, Member, Part, PostgresFacts, PostgresPart,
    RepositoryPart, Target,
};
use crate::core::ids::{CheckpointId, KernelId};
use crate::core::limits;
use crate::core::quantity::format_size;
use crate::supervisor::checkpoint::{self, revisions_now};
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::registry::Supervisor;

/// How freeze `to` of a group, or with an empty `to` the present, differs from freeze `from`, or from the newest.
///
/// # Errors
/// `notFound`, `corrupt`, and errors of members that differ.
pub async fn diff(supervisor: &Supervisor, group: &str, (from, to): (&str, &str), actor: &Actor) -> Result<GroupDiff> {
    let host = supervisor.host();
    let (group, _turn) = turn(supervisor, actor.uid, group).await?;
    let from = find_freeze(host, &group, if from.is_empty() { "latest" } else { from }).await?;
    let before = manifest(host, &from).await?.parts;
    let after = match to {
        "" => None,
        to => Some(manifest(host, &find_freeze(host, &group, to).await?).await?.parts),
    };
    // Only this guard protects trees of the present state from garbage collection.
    let _held = host.store.run(|store| Ok(store.guard())).await?;
    let scratch = Scratch::new(super::scratch(host, group.id).join(".diff"))?;
    let mut names: BTreeSet<&str> = before.iter().map(|part| part.name.as_str()).collect();
    match &after {
        Some(parts) => names.extend(parts.iter().map(|part| part.name.as_str())),
        None => names.extend(group.members.iter().map(|member| member.name.as_str())),
    }
    let mut diff = GroupDiff::default();
    for name in names {
        let of = |parts: &[Part]| parts.iter().find(|part| part.name == name).map(|part| part.captured.clone());
        let then = of(&before);
        let now = match &after {
            Some(parts) => parts.iter().find(|part| part.name == name).map(|part| Now::Frozen(&part.captured)),
            None => group.members.iter().find(|member| member.name == name).map(|member| Now::Present(&member.target)),
        };
        let pair = Pair { supervisor, group: &group, name, scratch: scratch.0.join(name) };
        let compared = pair.compare(then, now, &mut diff).await;
        compared.map_err(|error| Error { message: format!("member {name}: {}", error.message), ..error })?;
    }
    Ok(diff)
}

/// A directory that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(path: PathBuf) -> Result<Scratch> {
        // Of a comparison that a former daemon did not end.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).map_err(|error| Error::unavailable(format!("{}: {error}", path.display())))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays is removed by the next operation of the group.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The second state of a member.
enum Now<'a> {
    Frozen(&'a Captured),
    Present(&'a Target),
}

/// A member of both states.
struct Pair<'a> {
    supervisor: &'a Supervisor,
    group: &'a Group,
    name: &'a str,
    scratch: PathBuf,
}

impl Pair<'_> {
    fn host(&self) -> &Rc<Host> {
        self.supervisor.host()
    }

    async fn compare(&self, then: Option<Captured>, now: Option<Now<'_>>, diff: &mut GroupDiff) -> Result<()> {
        let kind = match (&then, &now) {
            (Some(then), _) => then.kind(),
            (None, Some(Now::Frozen(now))) => now.kind(),
            (None, Some(Now::Present(target))) => target.kind(),
            (None, None) => return Ok(()),
        };
        let mut of = Subject::new(diff, self.name, kind);
        let (then, now) = match (then, now) {
            (Some(then), Some(now)) => (then, now),
            (then, _) => {
                let deed = if then.is_some() { Deed::Removed } else { Deed::Added };
                of.add("member", deed, self.name, "", "");
                return Ok(());
            }
        };
        match (then, now) {
            (Captured::Kernel { kernel, checkpoint, repositories, revision, .. }, now) => {
                let before = (checkpoint, repositories, revision);
                match now {
                    Now::Frozen(Captured::Kernel { kernel: id, checkpoint, repositories, revision, .. })
                        if *id == kernel =>
                    {
                        let after = (*checkpoint, repositories.clone(), revision.clone());
                        self.kernel(kernel, before, Some(after), &mut of).await
                    }
                    Now::Present(Target::Kernel { id }) if *id == kernel => {
                        self.kernel(kernel, before, None, &mut of).await
                    }
                    now => replaced(&mut of, self.name, &now),
                }
            }
            (Captured::Repository { path, part }, Now::Frozen(Captured::Repository { part: now, .. })) => {
                self.in_time(self.repository(path, &part, Some(now.clone()), &mut of)).await
            }
            (Captured::Repository { part, .. }, Now::Present(Target::Repository { path })) => {
                self.in_time(self.repository(path.clone(), &part, None, &mut of)).await
            }
            (Captured::Database { part, .. }, Now::Frozen(Captured::Database { part: now, .. })) => {
                self.in_time(self.database(&part, Ok(now), &mut of)).await
            }
            (Captured::Database { part, .. }, Now::Present(Target::Database { path })) => {
                self.in_time(self.database(&part, Err(Path::new(path)), &mut of)).await
            }
            (Captured::Directory { part, .. }, now) => {
                let now = match now {
                    Now::Frozen(Captured::Directory { part, .. }) => *part,
                    Now::Present(target @ Target::Directory { .. }) => match self.present(target).await? {
                        Captured::Directory { part, .. } => part,
                        _ => return Err(Error::internal("a directory has another kind of content")),
                    },
                    now => return replaced(&mut of, self.name, &now),
                };
                self.directory(part, now, &mut of).await
            }
            (Captured::Command { data, bytes, .. }, Now::Frozen(Captured::Command { data: now, bytes: size, .. })) => {
                if data != *now {
                    of.add("data", Deed::Changed, "data", &format_size(bytes), &format_size(*size));
                }
                Ok(())
            }
            (Captured::Postgres { part, .. }, now) => {
                let (now, connection) = match now {
                    Now::Frozen(Captured::Postgres { part, .. }) => (part.clone(), None),
                    Now::Present(target @ Target::Postgres { connection }) => match self.present(target).await? {
                        Captured::Postgres { part, .. } => (part, Some(connection.as_str())),
                        _ => return Err(Error::internal("a database has another kind of content")),
                    },
                    now => return replaced(&mut of, self.name, &now),
                };
                self.postgres(&part, &now, connection, &mut of).await
            }
            (Captured::Server { part, .. }, now) => {
                let (now, is_frozen) = match now {
                    Now::Frozen(Captured::Server { part, .. }) => (part.clone(), true),
                    Now::Present(target @ Target::Server { .. }) => match self.present(target).await? {
                        Captured::Server { part, .. } => (part, false),
                        _ => return Err(Error::internal("a server has another kind of content")),
                    },
                    now => return replaced(&mut of, self.name, &now),
                };
                let schema = |part: &ServerPart| part.revision.as_ref().map(ToString::to_string).unwrap_or_default();
                of.change("schema", "schema", &schema(&part), &schema(&now));
                if !is_frozen {
                    of.unknown("content", "rows", "a freeze holds the files of a server, which only a server reads");
                } else if part.tree != now.tree {
                    of.add("content", Deed::Changed, "data directory", "", "");
                    of.unknown("content", "rows", "they are in files that only a server reads");
                }
                Ok(())
            }
            (Captured::Command { revision, .. }, Now::Present(target @ Target::Command { .. })) => {
                match self.open(target).await?.present().await? {
                    Some(Captured::Command { revision: now, .. }) if !revision.is_empty() => {
                        of.change("data", "data", &revision, &now);
                    }
                    _ => of.unknown("data", "data", "no program of it says what identifies its data"),
                }
                Ok(())
            }
            (_, now) => replaced(&mut of, self.name, &now),
        }
    }

    async fn present(&self, target: &Target) -> Result<Captured> {
        let present = self.open(target).await?.present().await?;
        present.ok_or_else(|| Error::internal("the member has no present state"))
    }

    async fn open(&self, target: &Target) -> Result<Live> {
        let member = Member { name: self.name.to_owned(), target: target.clone() };
        members::open_in(self.supervisor, self.group, &member, self.scratch.clone()).await
    }

    /// `connection`: of the present database, if `after` is that.
    async fn postgres(
        &self,
        before: &PostgresPart,
        after: &PostgresPart,
        connection: Option<&str>,
        of: &mut Subject<'_>,
    ) -> Result<()> {
        let schema = |part: &PostgresPart| part.revision.as_ref().map(ToString::to_string).unwrap_or_default();
        of.change("schema", "schema", &schema(before), &schema(after));
        // Those of the present are not read.
        if before.facts.is_some() && after.facts.is_some() {
            of.change_each("setting", &settings(before), &settings(after));
        }
        if connection.is_none() && before.image == after.image {
            return Ok(());
        }
        let count = of.count();
        std::fs::create_dir_all(&self.scratch)
            .map_err(|error| Error::unavailable(format!("{}: {error}", self.scratch.display())))?;
        let host = self.host();
        let then = sources::postgres_rows_of(host, before.image, &self.scratch).await?;
        let now = match connection {
            Some(connection) => sources::postgres_rows_now(host, connection, &self.scratch).await?,
            None => sources::postgres_rows_of(host, after.image, &self.scratch).await?,
        };
        let counts = |rows: &Rows| -> BTreeMap<String, String> {
            rows.rows.iter().map(|(table, count)| (table.clone(), count.to_string())).collect()
        };
        of.change_each("rows", &counts(&then), &counts(&now));
        of.omit(now.omitted);
        if of.count() == count && (before.image, after.image) != (None, None) {
            of.unknown("content", "rows", "only their numbers are");
        }
        Ok(())
    }

    async fn directory(&self, before: DirectoryPart, after: DirectoryPart, of: &mut Subject<'_>) -> Result<()> {
        let state = |part: &DirectoryPart| if part.tree.is_some() { "present" } else { "absent" };
        of.change("state", "directory", state(&before), state(&after));
        let owner = |part: &DirectoryPart| part.tree.map(|_| format!("{}:{}", part.uid, part.gid)).unwrap_or_default();
        of.change("owner", "directory", &owner(&before), &owner(&after));
        let (Some(before), Some(after)) = (before.tree, after.tree) else { return Ok(()) };
        let take = async |found: crate::core::diff::Difference| {
            let crate::core::diff::Difference { area, deed, name, before, after, what } = found;
            of.push(area.name(), deed, &name, (&before, &after), what);
            Ok(())
        };
        checkpoint::diff_trees(self.host(), before, after, take).await
    }

    async fn in_time(&self, compared: impl Future<Output = Result<()>>) -> Result<()> {
        let step = async { compared.await.map(|()| Reply::Done) };
        in_time(false, self.host().config.limits.freeze_store, step).await.map(drop)
    }

    /// `after`: as `before`; `None`: the present.
    async fn kernel(
        &self,
        id: KernelId,
        before: (CheckpointId, Vec<RepositoryLock>, KernelRevision),
        after: Option<(CheckpointId, Vec<RepositoryLock>, KernelRevision)>,
        of: &mut Subject<'_>,
    ) -> Result<()> {
        let host = self.host();
        let kernel = self.supervisor.get(id).ok_or_else(|| Error::not_found(format!("kernel {id} is gone")))?;
        let (from, to) = (before.0.to_string(), after.as_ref().map(|after| after.0.to_string()).unwrap_or_default());
        let (repositories, revision) = match after {
            Some((_, repositories, revision)) => (repositories, revision),
            None => {
                let (found, revision) = revisions_now(host, &kernel).await?;
                (found.repositories, revision)
            }
        };
        for (what, then, now) in [
            ("engine", &before.2.engine, &revision.engine),
            ("interpreter", &before.2.version, &revision.version),
            ("ryokan", &before.2.ryokan, &revision.ryokan),
            ("image", &before.2.image, &revision.image),
        ] {
            of.change(what, what, then, now);
        }
        let commits = |all: &[RepositoryLock]| -> BTreeMap<String, String> {
            let commit = |one: &RepositoryLock| one.head.as_ref().map(|head| head.commit.to_string());
            all.iter().map(|one| (one.path.clone(), commit(one).unwrap_or_else(|| "no commit".into()))).collect()
        };
        of.change_each("commit", &commits(&before.1), &commits(&repositories));
        of.change_each("dependencies", &locked(&before.2.dependencies), &locked(&revision.dependencies));
        let take = async |found: crate::core::diff::Difference| {
            let crate::core::diff::Difference { area, deed, name, before, after, what } = found;
            of.push(area.name(), deed, &name, (&before, &after), what);
            Ok(())
        };
        checkpoint::diff(host, (&kernel, &from), (&kernel, &to), take).await
    }

    async fn repository(
        &self,
        path: String,
        before: &RepositoryPart,
        after: Option<RepositoryPart>,
        of: &mut Subject<'_>,
    ) -> Result<()> {
        let member = Member { name: self.name.to_owned(), target: Target::Repository { path } };
        let mut live = members::open_in(self.supervisor, self.group, &member, self.scratch.clone()).await?;
        let after = match after {
            Some(after) => after,
            None => match live.present().await? {
                Some(Captured::Repository { part, .. }) => part,
                _ => return Err(Error::internal("a repository has another kind of content")),
            },
        };
        let repository = live.repository().ok_or_else(|| Error::internal("a repository is none"))?;
        let (from, to) = (&before.head.commit, &after.head.commit);
        for commit in [from, to] {
            repository.check_commit(commit).await?;
        }
        of.change("head", "HEAD", from.as_str(), to.as_str());
        let branch = |part: &RepositoryPart| part.head.branch.clone().unwrap_or_else(|| "detached".into());
        of.change("branch", "HEAD", &branch(before), &branch(&after));
        for (deed, from, to) in [(Deed::Added, from, to), (Deed::Removed, to, from)] {
            let (commits, count) = repository.commits_between(from, to, limits::COMMITS_COMPARED).await?;
            of.omit(count.saturating_sub(commits.len() as u64));
            for commit in commits {
                let subject = commit.subject.as_str();
                let (before, after) = if deed == Deed::Added { ("", subject) } else { (subject, "") };
                of.add("commit", deed, commit.id.as_str(), before, after);
            }
        }
        of.change_each("dependencies", &locked(&before.dependencies), &locked(&after.dependencies));
        of.change_each("submodule", &submodules(before), &submodules(&after));
        self.files(&live, before, &after, of).await
    }

    /// Files that are not ignored, committed or not.
    async fn files(
        &self,
        live: &Live,
        before: &RepositoryPart,
        after: &RepositoryPart,
        of: &mut Subject<'_>,
    ) -> Result<()> {
        let repository = live.repository().ok_or_else(|| Error::internal("a repository is none"))?;
        for digest in [before.pack, after.pack].into_iter().flatten() {
            let pack = self.scratch.join("pack");
            objects::get(self.host(), digest, &pack).await?;
            repository.unpack_apart(&self.scratch, &pack).await?;
        }
        let dirty = repository.changed_files(&self.scratch, &after.head.commit, &after.work_tree).await?;
        let dirty: BTreeSet<String> = dirty.into_iter().map(|(_, path)| path).collect();
        let links: BTreeSet<&String> = before.submodules.iter().chain(&after.submodules).map(|one| &one.path).collect();
        for (letter, path) in repository.changed_files(&self.scratch, &before.work_tree, &after.work_tree).await? {
            // Compared as submodules.
            if links.contains(&path) {
                continue;
            }
            let deed = match letter {
                'A' => Deed::Added,
                'D' => Deed::Removed,
                _ => Deed::Changed,
            };
            let details = if dirty.contains(&path) { vec!["uncommitted".to_owned()] } else { Vec::new() };
            of.push(Area::File.name(), deed, &path, ("", ""), details);
        }
        if before.index_tree != after.index_tree {
            of.add("index", Deed::Changed, "staged files", "", "");
        }
        Ok(())
    }

    /// `after`: a captured database, or the file of the present one.
    async fn database(
        &self,
        before: &DatabasePart,
        after: std::result::Result<&DatabasePart, &Path>,
        of: &mut Subject<'_>,
    ) -> Result<()> {
        std::fs::create_dir_all(&self.scratch)
            .map_err(|error| Error::unavailable(format!("{}: {error}", self.scratch.display())))?;
        let (one, other) = (self.scratch.join("before"), self.scratch.join("after"));
        let (then, now) = match after {
            Ok(after) => (self.image(before, &one).await?, self.image(after, &other).await?),
            Err(path) => (self.image(before, &one).await?, sources::copy_now(path, &other).await?),
        };
        of.change("state", "database", then, now);
        if (then, now) != ("whole", "whole") {
            return Ok(());
        }
        let files = (one.clone(), other.clone());
        if blocking(move || host_database::is_same(&files.0, &files.1)).await? {
            return Ok(());
        }
        let count = of.count();
        let (then, now) =
            blocking(move || Ok((host_database::contents(&one)?, host_database::contents(&other)?))).await?;
        of.change("schema", "user_version", &then.user_version.to_string(), &now.user_version.to_string());
        let kinds: BTreeSet<&str> = then.definitions.keys().chain(now.definitions.keys()).map(String::as_str).collect();
        let none = BTreeMap::new();
        for kind in kinds {
            let of_kind = |contents: &host_database::Contents| contents.definitions.get(kind).cloned();
            let (then, now) = (of_kind(&then), of_kind(&now));
            of.change_each(kind, then.as_ref().unwrap_or(&none), now.as_ref().unwrap_or(&none));
        }
        for (table, rows) in &now.rows {
            let before = then.rows.get(table).copied().unwrap_or_default();
            of.change("rows", table, &before.to_string(), &rows.to_string());
        }
        of.omit(now.omitted);
        if of.count() == count {
            of.add("content", Deed::Changed, "rows", "", "");
        }
        Ok(())
    }

    async fn image(&self, part: &DatabasePart, file: &Path) -> Result<&'static str> {
        if let DatabasePart::Whole { image, .. } = part {
            objects::get(self.host(), *image, file).await?;
        }
        Ok(part.form())
    }
}

fn replaced(of: &mut Subject<'_>, name: &str, now: &Now<'_>) -> Result<()> {
    let kind = match now {
        Now::Frozen(captured) => captured.kind(),
        Now::Present(target) => target.kind(),
    };
    of.add("member", Deed::Changed, name, "", &format!("another {kind}"));
    Ok(())
}

/// What a PostgreSQL database is created with.
fn settings(part: &PostgresPart) -> BTreeMap<String, String> {
    let of = |facts: &PostgresFacts| {
        let PostgresFacts { encoding, collate, ctype, owner, version: _ } = facts;
        let all = [("encoding", encoding), ("collation", collate), ("character classes", ctype), ("owner", owner)];
        all.map(|(name, value)| (name.to_owned(), value.clone())).into()
    };
    part.facts.as_ref().map(of).unwrap_or_default()
}

/// Commit and content of each submodule, those inside of others too.
fn submodules(part: &RepositoryPart) -> BTreeMap<String, String> {
    let short = |id: &str| id.get(..10).unwrap_or(id).to_owned();
    let one = |one: LockedSubmodule| {
        let content = match one.state.as_str() {
            "changed" => format!(", index {}, files {}", short(&one.index), short(&one.files)),
            _ => String::new(),
        };
        (one.path, format!("{}, {}{content}", short(&one.commit), one.state))
    };
    locked_submodules::of(part).into_iter().map(one).collect()
}

fn locked(all: &[DependencyLock]) -> BTreeMap<String, String> {
    all.iter().map(|one| (one.path.clone(), one.digest.clone())).collect()
}
