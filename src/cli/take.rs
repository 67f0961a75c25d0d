//! `ryokan take`: the files that a fork has changed, copied into the kernel from which it was forked.
//!
//! A checkpoint before the first change makes the whole one step, which `restore` undoes. Files change through the
//! interface only: each appears complete.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use clap::Args;

use super::context::Context;
use super::copy::{Copied, WaitArgs, same_path};
use super::failure::Failure;
use super::names::KernelArg;
use super::render;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType};
use crate::core::diff::{Area, Deed, Difference};
use crate::core::error::{Error, ErrorCode};
use crate::core::files::{FILE_MODE_BITS, FileAttributes, FileKind, WORKSPACE};
use crate::core::info::KernelInfo;
use crate::rpc::client::{FilesClient, KernelClient};

/// Files that an error or a hint names.
const NAMED: usize = 5;

/// `ryokan take`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan take demo --from try-2
  ryokan take demo --from try-2 src report.txt

What the fork has changed, added or removed since it was forked from NAME happens to the files of NAME. A checkpoint is taken first, and named. Files that both changed since are refused without --force, also if only the mode changed in one of them; a change of owner or links alone is not taken. Variables stay as they are.")]
pub struct TakeArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// The fork
    #[arg(long, value_name = "FORK")]
    pub from: KernelArg,
    /// Only these files and directories
    #[arg(value_name = "PATH")]
    pub paths: Vec<OsString>,
    /// Also take files that NAME has changed, too, since the fork
    #[arg(long)]
    pub force: bool,
    /// Waiting for transitions.
    #[command(flatten)]
    pub wait: WaitArgs,
}

/// Takes over a fork's files.
pub async fn take(context: &Context, args: TakeArgs) -> Result<(), Failure> {
    let [(kernel, info), (fork, fork_info)] = context.two_kernels([&args.name, &args.from]).await?;
    let point = fork_point(&info, &fork_info)?;
    let (to, from) = (kernel.files_with(args.wait.held()).await?, fork.files_with(args.wait.held()).await?);
    // Without waiting, a held kernel is reported before anything is compared.
    to.stat(WORKSPACE.as_bytes(), false).await?;
    refuse_parents(&args.paths)?;
    let changes = files(&kernel, &point, Some(&fork)).await?;
    let is_unchanged = |path: &&OsString| !changes.iter().flat_map(paths_of).any(|name| is_beneath(name, path));
    refuse_unknown(&args.paths.iter().filter(is_unchanged).collect::<Vec<_>>(), [&to, &from]).await?;
    let mut changes: Vec<Difference> = changes.into_iter().filter_map(|change| selected(change, &args.paths)).collect();
    // What NAME has already, as after an earlier take, is neither taken nor a conflict.
    let apart = files(&kernel, "", Some(&fork)).await?;
    let apart: BTreeSet<&str> = apart.iter().filter(|change| is_taken(change)).flat_map(paths_of).collect();
    changes.retain(|change| paths_of(change).any(|name| apart.contains(name)));
    if let Some(odd) = changes.iter().find(|change| change.name.contains('\u{fffd}')) {
        return Err(Error::unsupported(format!("the name of {} is not UTF-8", odd.name))
            .hint("copy it with cp")
            .into());
    }
    let (name, fork_name) = (&info.spec.name, &fork_info.spec.name);
    if changes.is_empty() {
        return context.show(
            || json(None, &changes),
            || format!("{fork_name} changed no such files since its fork, or {name} has them\n"),
        );
    }
    if !args.force {
        refuse_changed_here(&kernel, &point, &changes, name.as_str()).await?;
    }
    let safety = CheckpointRequest::new(CheckpointType::Manual, &format!("before take from {fork_name}"));
    let safety = kernel.checkpoint(&safety).await?;
    let done = apply(context, &to, &from, &changes).await;
    let undo = format!("ryokan restore {name} {}", safety.short_id());
    if let Err(failure) = done {
        context.say(&format!("a part may have been taken; to go back: {undo}"));
        return Err(failure);
    }
    context.show(
        || json(Some(&safety), &changes),
        || {
            let lines: String =
                changes.iter().map(|change| render::difference(change, context.terminal.paint)).collect();
            format!("{lines}took {} of {fork_name}\nto undo: {undo}\n", render::counted(changes.len() as u64, "change"))
        },
    )
}

fn json(safety: Option<&Checkpoint>, changes: &[Difference]) -> serde_json::Value {
    serde_json::json!({ "safety": safety.map(|safety| safety.id.to_string()), "changes": changes })
}

/// The checkpoint of `info`'s kernel from which the other was forked.
fn fork_point(info: &KernelInfo, fork: &KernelInfo) -> Result<String, Failure> {
    match &fork.origin.from {
        Some(from) if from.kernel == info.id => Ok(from.checkpoint.to_string()),
        Some(_) | None => Err(Failure::usage(
            format!("{} is not a fork of {}", fork.spec.name, info.spec.name),
            format!("copy files with ryokan cp {}:PATH {}:", fork.spec.name, info.spec.name),
        )),
    }
}

/// What happened to files since a checkpoint of `kernel`, in it or in the other kernel. Without a checkpoint: how the
/// other kernel's files differ.
async fn files(kernel: &KernelClient, since: &str, of: Option<&KernelClient>) -> Result<Vec<Difference>, Failure> {
    let mut found = Vec::new();
    let collected = kernel.diff_with(since, of, "", async |difference| {
        // The workspace itself is nothing to copy.
        if difference.area == Area::File && difference.name != "." {
            found.push(difference);
        }
        Ok(())
    });
    match collected.await {
        Err(error) if error.code == ErrorCode::NotFound => {
            Err(error.hint("its fork point was removed: compare with ryokan diff --with, copy with ryokan cp").into())
        }
        collected => collected.map(|()| found).map_err(Failure::from),
    }
}

async fn refuse_changed_here(
    kernel: &KernelClient,
    point: &str,
    changes: &[Difference],
    name: &str,
) -> Result<(), Failure> {
    let here = files(kernel, point, None).await?;
    let here: BTreeSet<&str> = here.iter().filter(|change| is_taken(change)).flat_map(paths_of).collect();
    let both: BTreeSet<&str> = changes.iter().flat_map(|change| conflicts(change, &here)).collect();
    if both.is_empty() {
        return Ok(());
    }
    let named: Vec<&str> = both.iter().copied().take(NAMED).collect();
    let more = both.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Err(Error::conflict(format!("{name} changed {}{more}, too", named.join(", ")))
        .reason("changed_here")
        .hint("name other paths, or take the fork's with --force")
        .into())
}

/// Whether a change is one to take: not of owner, links or time alone.
fn is_taken(change: &Difference) -> bool {
    change.deed != Deed::Changed || change.what.iter().any(|what| matches!(what.as_str(), "content" | "kind" | "mode"))
}

/// The part of a change that is in the requested files and directories; all of it if none are named.
fn selected(change: Difference, paths: &[OsString]) -> Option<Difference> {
    let is_named = |name: &str| paths.is_empty() || paths.iter().any(|path| is_beneath(name, path));
    if change.deed != Deed::Renamed {
        return (is_named(&change.name) && is_taken(&change)).then_some(change);
    }
    match (is_named(&change.before), is_named(&change.name)) {
        (true, true) => Some(change),
        (true, false) => Some(Difference::removed(Area::File, &change.before, String::new())),
        (false, true) => Some(Difference::added(Area::File, &change.name, String::new())),
        (false, false) => None,
    }
}

/// The paths changed here that a change replaces or removes; with a directory everything in it.
fn conflicts<'a>(change: &'a Difference, here: &BTreeSet<&'a str>) -> Vec<&'a str> {
    let replaced = |path: &&&str| {
        paths_of(change).any(|of| path.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
    };
    match change.deed {
        Deed::Added | Deed::Changed if !change.what.iter().any(|what| what == "kind") => {
            here.get(change.name.as_str()).copied().into_iter().collect()
        }
        Deed::Added | Deed::Changed | Deed::Removed | Deed::Renamed | Deed::Unknown => {
            here.iter().filter(replaced).copied().collect()
        }
    }
}

fn paths_of(change: &Difference) -> impl Iterator<Item = &str> {
    let before = (change.deed == Deed::Renamed).then_some(change.before.as_str());
    [Some(change.name.as_str()), before].into_iter().flatten()
}

/// Whether a name is in a requested file or directory.
fn is_beneath(name: &str, requested: &OsString) -> bool {
    let path = Path::new(requested);
    let path = path.strip_prefix(WORKSPACE).unwrap_or(path);
    // The workspace itself has no components left.
    let path: PathBuf = path.components().filter(|part| *part != Component::CurDir).collect();
    Path::new(name).starts_with(path) && !requested.is_empty()
}

fn refuse_parents(paths: &[OsString]) -> Result<(), Failure> {
    match paths.iter().find(|path| Path::new(path).components().any(|part| part == Component::ParentDir)) {
        None => Ok(()),
        Some(path) => {
            let path = render::plain(&path.to_string_lossy());
            Err(Failure::usage(format!("{path} contains .."), "name files or directories of the workspace without it"))
        }
    }
}

/// Refuses a path that neither kernel has: a misspelt one.
async fn refuse_unknown(paths: &[&OsString], of: [&FilesClient; 2]) -> Result<(), Failure> {
    for path in paths {
        let mut is_known = false;
        for files in of {
            match files.stat(path.as_bytes(), false).await {
                Err(error) if error.code == ErrorCode::NotFound => {}
                looked => is_known = looked.map(|_| true)?,
            }
        }
        if !is_known {
            let error = Error::not_found(format!("neither kernel has {}", render::plain(&path.to_string_lossy())));
            return Err(error.hint("name files or directories of the workspace").into());
        }
    }
    Ok(())
}

/// Applies the changes: removals first, so that a file can take a directory's place.
async fn apply(context: &Context, to: &FilesClient, from: &FilesClient, changes: &[Difference]) -> Result<(), Failure> {
    for change in changes {
        let gone = match change.deed {
            Deed::Removed => &change.name,
            Deed::Renamed => &change.before,
            Deed::Changed if change.what.iter().any(|what| what == "kind") => &change.name,
            Deed::Added | Deed::Changed | Deed::Unknown => continue,
        };
        match to.remove(gone.as_bytes(), true).await {
            Err(error) if error.code != ErrorCode::NotFound => return Err(error.into()),
            Ok(()) | Err(_) => {}
        }
    }
    let mut directories = Vec::new();
    let mut copied = Copied::new(context, "taken");
    for change in changes.iter().filter(|change| change.deed != Deed::Removed) {
        let path = change.name.as_bytes();
        let info = from.stat(path, false).await?;
        match info.kind {
            FileKind::Directory => {
                to.make_dir(path, info.mode & FILE_MODE_BITS | 0o700).await?;
                directories.push((path, info));
            }
            FileKind::File | FileKind::Symlink | FileKind::Other => {
                same_path(context, (from, to), path, &info, &mut copied).await?;
            }
        }
    }
    copied.end();
    // Mode and time last, the inner directories first: each entry changes the time.
    for (path, info) in directories.into_iter().rev() {
        let (mode, modified_ns) = (Some(info.mode & FILE_MODE_BITS), Some(info.modified_ns));
        to.set_attributes(path, FileAttributes { mode, modified_ns }).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_select_changes() {
        for (path, wanted) in [
            ("src", true),
            ("./src/", true),
            ("/workspace/src/a.txt", true),
            ("sr", false),
            (".", true),
            ("./", true),
            ("/workspace", true),
            ("/workspace/", true),
            ("/workspaces", false),
            ("/", false),
            ("../src", false),
            ("", false),
        ] {
            assert_eq!(is_beneath("src/a.txt", &OsString::from(path)), wanted, "{path}");
        }
        assert!(refuse_parents(&["src/../lib".into()]).is_err());
        assert!(refuse_parents(&["src/..lib".into()]).is_ok());
    }

    #[test]
    fn attributes_alone_are_not_taken() {
        let changed = |what: &[&str]| Difference {
            what: what.iter().map(|what| (*what).to_owned()).collect(),
            ..Difference::changed(Area::File, "a", String::new(), String::new())
        };
        for (what, wanted) in
            [(&["owner"][..], false), (&["links", "time"], false), (&["mode"], true), (&["content", "time"], true)]
        {
            assert_eq!(selected(changed(what), &[]).is_some(), wanted, "{what:?}");
        }
    }

    #[test]
    fn rename_is_cut_at_paths() {
        let renamed = Difference {
            deed: Deed::Renamed,
            before: "old/a".into(),
            ..Difference::added(Area::File, "new/a", String::new())
        };
        let cut = |paths: &[&str]| {
            let paths: Vec<OsString> = paths.iter().map(OsString::from).collect();
            selected(renamed.clone(), &paths).map(|change| (change.deed, change.name))
        };
        assert_eq!(cut(&["old", "new"]), Some((Deed::Renamed, "new/a".into())));
        assert_eq!(cut(&["old/a"]), Some((Deed::Removed, "old/a".into())));
        assert_eq!(cut(&["new"]), Some((Deed::Added, "new/a".into())));
        assert_eq!(cut(&["other"]), None);
    }

    #[test]
    fn removal_conflicts_with_new_files() {
        let here = BTreeSet::from(["lib/mine.txt", "library", "a"]);
        let removed = Difference { deed: Deed::Removed, ..Difference::added(Area::File, "lib", String::new()) };
        assert_eq!(conflicts(&removed, &here), ["lib/mine.txt"]);
        let added = |name| Difference::added(Area::File, name, String::new());
        assert_eq!(conflicts(&added("a"), &here), ["a"]);
        assert!(conflicts(&added("b"), &here).is_empty());
    }
}
