//! The folder of templates: a name for a finished one, and what is found at a daemon's start.
//!
//! ```text
//!  .new-…  being filled ─ exchange, or rename ─▶ KEY  a template ─▶ .new-…  the one before, removed
//!  .old-KEY  the one before, where the file system exchanges nothing: it is put back if no other one has its name
//! ```
//!
//! A template's name is always there, with the old one or the new one. Entries that are no templates of this version
//! are reported and left alone.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::description::{Unusable, kind_of};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::sys::fs;

/// Folders that are being filled.
pub(super) const UNFINISHED: &str = ".new-";
/// A template while another one takes its name.
const REPLACED: &str = ".old-";

/// Gives a finished template its name. One that has it already is removed then; its open files last. Blocks.
///
/// # Errors
/// Those of the file system: what had the name still has it.
pub(super) fn publish(from: &Path, to: &Path) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| Error::unavailable(format!("publish a template: {error}"));
    if to.symlink_metadata().is_err() {
        let renamed = fs::rename_durable(from, to, "machine.template.publish");
        return renamed.map_err(|error| failed(&format_args!("{error}: {}", error.source)));
    }
    let left = match fs::exchange_durable(from, to, "machine.template.exchange") {
        Ok(()) => from.to_owned(),
        Err(error) if exchanges_nothing(&error.source) => replace(from, to).map_err(|error| failed(&error))?,
        Err(error) => return Err(failed(&format_args!("{error}: {}", error.source))),
    };
    if let Err(error) = remove(&left) {
        tracing::warn!(%error, "a replaced template is left for the next start");
    }
    Ok(())
}

fn exchanges_nothing(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP | libc::EXDEV))
}

/// As an exchange, in two steps; [`sweep`] ends what was interrupted between them. Returns where the old one is.
fn replace(from: &Path, to: &Path) -> std::io::Result<PathBuf> {
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let aside = to.with_file_name(format!("{REPLACED}{name}"));
    remove(&aside)?;
    std::fs::rename(to, &aside)?;
    if let Err(error) = std::fs::rename(from, to) {
        std::fs::rename(&aside, to)?;
        return Err(error);
    }
    let folder = to.parent().unwrap_or(Path::new("/"));
    fs::sync_dir(folder).map_err(|error| error.source)?;
    Ok(aside)
}

/// Removes an entry, if it is there.
fn remove(path: &Path) -> std::io::Result<()> {
    let removed = match path.symlink_metadata() {
        Ok(found) if found.is_dir() => fs::remove_tree(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let all = std::fs::read_dir(folder).into_iter().flatten().flatten();
    all.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
}

/// Removes what a former daemon did not finish. Returns the entries that are no templates of this version, with the
/// reason: they are left alone. Blocks for the time of a few small files.
pub(super) fn sweep(folder: &Path) -> Vec<String> {
    let mut skipped = Vec::new();
    for (name, path) in entries(folder) {
        let done = match name.strip_prefix(REPLACED) {
            _ if name.starts_with(UNFINISHED) => remove(&path),
            Some(key) if folder.join(key).symlink_metadata().is_ok() => remove(&path),
            Some(key) => std::fs::rename(&path, folder.join(key)),
            None => {
                skipped.extend(kind_of(&path).err().map(|why: Unusable| format!("{name}: {why}")));
                Ok(())
            }
        };
        if let Err(error) = done {
            skipped.push(format!("{name}: {error}"));
        }
    }
    skipped.sort();
    skipped
}

/// Words for a report on skipped entries; `None` if there are none.
pub(super) fn report(folder: &Path, skipped: &[String]) -> Option<String> {
    let shown = skipped.iter().take(limits::VM_TEMPLATE_REPORT);
    let shown: Vec<String> = shown.map(|one| one.chars().take(200).collect()).collect();
    let more = match skipped.len() - shown.len() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let list = shown.join("; ");
    (!skipped.is_empty()).then(|| format!("left alone in {}: {list}{more}", folder.display()))
}

/// The templates of an image. Entries that are no templates of this version are not among them.
pub(super) fn of_image(folder: &Path, image: &str) -> Vec<(String, PathBuf)> {
    entries(folder).filter(|(_, path)| kind_of(path).is_ok_and(|kind| kind.image == image)).collect()
}

/// Removes the oldest templates beyond the limit, but none with such a name. Blocks.
pub(super) fn prune(folder: &Path, kept: &[String]) {
    let others = entries(folder).filter(|(name, path)| !kept.contains(name) && kind_of(path).is_ok());
    let mut found: Vec<(SystemTime, PathBuf)> = others
        .map(|(_, path)| {
            let at = path.metadata().and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            (at, path)
        })
        .collect();
    found.sort();
    let surplus = (found.len() + kept.len()).saturating_sub(limits::VM_TEMPLATES);
    for (_, folder) in found.into_iter().take(surplus) {
        tracing::info!(folder = %folder.display(), "an old template of virtual machines is removed");
        if let Err(error) = fs::remove_tree(&folder) {
            tracing::warn!(folder = %folder.display(), %error, "an old template is not removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::template::tests::{kind, template};
    use super::super::template::{Kind, Template};
    use super::*;
    use crate::sys::fault::tests::with_fault;

    /// A template, and a later one of the same kind that is not published.
    fn two(folder: &Path, kind: &Kind) -> (PathBuf, PathBuf) {
        let later = folder.join(".new-2");
        std::fs::rename(template(folder, kind), &later).expect("renamed");
        (template(folder, kind), later)
    }

    fn id(place: &Path, kind: &Kind) -> String {
        Template::open(place, kind).expect("it is whole").expect("it is there").id().to_owned()
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = entries(folder).map(|(name, _)| name).collect();
        names.sort();
        names
    }

    #[test]
    fn publication_never_leaves_none() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        let (place, later) = two(folder.path(), &kind);
        let (old, new) = (id(&place, &kind), id(&later, &kind));
        assert_ne!(old, new);
        let opened = Template::open(&place, &kind).expect("it is whole").expect("it is there");
        for point in ["machine.template.exchange.rename", "machine.template.exchange.sync_dir"] {
            let failed = with_fault(&format!("{point}=eio"), || publish(&later, &place));
            assert!(failed.is_err(), "{point}");
            assert!(place.join("template.json").exists() && later.join("template.json").exists(), "{point}");
        }
        // The second failure was behind the exchange.
        assert_eq!((id(&place, &kind), id(&later, &kind)), (new.clone(), old.clone()));
        publish(&later, &place).expect("published");
        assert_eq!((id(&place, &kind), names(folder.path()).len()), (old.clone(), 1));
        // Users of the one before go on.
        assert_eq!(opened.id(), old);
        assert!(opened.memory().and_then(|memory| memory.metadata()).is_ok_and(|found| found.len() == 1 << 20));
    }

    #[test]
    fn interrupted_replacement_is_ended() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        let (place, later) = two(folder.path(), &kind);
        let (old, new) = (id(&place, &kind), id(&later, &kind));
        let aside = folder.path().join(format!("{REPLACED}{}", kind.key().expect("a key")));
        std::fs::rename(&place, &aside).expect("renamed");
        assert!(sweep(folder.path()).is_empty());
        assert_eq!((id(&place, &kind), names(folder.path()).len()), (old, 1), "the old one is back");
        // The new one is complete only under its name.
        let (place, later) = two(folder.path(), &kind);
        let kept = id(&later, &kind);
        assert_ne!(kept, new);
        assert_eq!(replace(&later, &place).expect("replaced"), aside);
        assert_eq!(id(&place, &kind), kept);
        assert!(aside.exists() && sweep(folder.path()).is_empty());
        assert_eq!((id(&place, &kind), names(folder.path()).len()), (kept, 1));
    }

    #[test]
    fn foreign_folders_stay() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        let at = |name: &str| folder.path().join(name);
        for name in ["mine", ".new-9", "notes"] {
            std::fs::create_dir(at(name)).expect("a folder");
            std::fs::write(at(name).join("file"), b"text").expect("written");
        }
        std::fs::write(at("plain"), b"text").expect("written");
        // As old as nothing else, so the first to be removed.
        let old = std::fs::File::open(at("mine")).expect("opened");
        old.set_modified(SystemTime::UNIX_EPOCH).expect("its time is set");
        let kinds: Vec<Kind> = (1_u64..)
            .map(|mib| Kind { disk_bytes: mib << 20, ..kind.clone() })
            .take(limits::VM_TEMPLATES + 2)
            .collect();
        let places: Vec<PathBuf> = kinds.iter().map(|kind| template(folder.path(), kind)).collect();
        std::fs::write(places[0].join("state"), b"")
            .or_else(|_| std::fs::remove_file(places[0].join("state")))
            .expect("damaged");
        for (age, place) in places.iter().rev().enumerate() {
            let time = SystemTime::now() - std::time::Duration::from_secs(age as u64);
            std::fs::File::open(place).and_then(|dir| dir.set_modified(time)).expect("its time is set");
        }
        let skipped = sweep(folder.path());
        let found: Vec<&str> = skipped.iter().filter_map(|one| one.split(':').next()).collect();
        let damaged = kinds[0].key().expect("a key");
        let mut expected = [&*damaged, "mine", "notes", "plain"];
        expected.sort_unstable();
        assert_eq!(found, expected, "{skipped:?}");
        let words = report(folder.path(), &skipped).expect("there are some");
        assert!(words.contains("mine: template.json") && words.contains("plain: it is no folder"), "{words}");
        assert_eq!(report(folder.path(), &[]), None);
        assert!(report(folder.path(), &vec!["x: y".into(); 20]).is_some_and(|words| words.ends_with("and 12 more")));
        // The oldest one is in use.
        let kept = [1, limits::VM_TEMPLATES + 1].map(|at| kinds[at].key().expect("a key"));
        prune(folder.path(), &kept);
        assert!(
            !at(".new-9").exists() && at("mine/file").exists() && at("notes/file").exists() && at("plain").exists()
        );
        let left: Vec<bool> = places.iter().map(|place| place.exists()).collect();
        // The damaged one is left alone, and one template was too many.
        assert_eq!(left.iter().filter(|left| **left).count(), limits::VM_TEMPLATES + 1, "{left:?}");
        assert!(left[0] && left[1] && !left[2], "{left:?}");
        assert_eq!(of_image(folder.path(), "abc").len(), limits::VM_TEMPLATES);
    }
}
