//! The description in a template's folder: what the template is, when and from what it was made, and its digests.
//!
//! It is written last: a folder without one holds no template.

use std::fs::OpenOptions;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::template::{Kind, MEMORY, Part, STATE};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::sys::{clock, fs, random};

/// The format of the description.
const FORMAT: u32 = 1;
pub(super) const DESCRIPTION: &str = "template.json";

/// What is on the disk beside memory and state.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Description {
    format: u32,
    pub kind: Kind,
    pub memory: Part,
    pub state: Part,
    /// The boot id of the test start: a machine that has the same one was not seeded.
    pub tested_boot_id: String,
    /// Whether a copy by changed pages was the same as one of the whole memory, and started.
    #[serde(default)]
    pub proves_pages: bool,
    /// What it is, which a former version did not say.
    #[serde(default, flatten, skip_serializing_if = "Option::is_none")]
    pub made: Option<Made>,
}

/// When and from what a template was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Made {
    /// It differs in each template.
    pub id: String,
    /// Milliseconds of the wall clock.
    pub created_at_ms: i64,
    pub made_from: MadeFrom,
    /// The template in whose place it was put.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<String>,
}

impl Made {
    /// A template that is made now.
    pub(super) fn now(made_from: MadeFrom, replaces: Option<String>) -> Made {
        let id = format!("{:016x}", u64::from_le_bytes(random::bytes()));
        Made { id, created_at_ms: clock::now_ms(), made_from, replaces }
    }
}

/// The machine that was saved. One that served a kernel is none of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum MadeFrom {
    /// It booted the image for the template.
    FreshBoot,
}

/// Why a folder holds no template that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It is not what was written.
    Damaged(String),
    /// It was written by another version of ryokan.
    OtherFormat(u32),
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unusable::Damaged(why) => f.write_str(why),
            Unusable::OtherFormat(format) => write!(f, "its format is {format}, and this is {FORMAT}"),
        }
    }
}

impl Description {
    /// The description of a template that is not tested yet.
    pub(super) fn new(kind: Kind, memory: Part, state: Part) -> Description {
        let (tested_boot_id, proves_pages) = (String::new(), false);
        Description { format: FORMAT, kind, memory, state, tested_boot_id, proves_pages, made: None }
    }
}

/// The kind of the template in a folder. The digests are not checked. Blocks.
///
/// # Errors
/// Why it is none.
pub(super) fn kind_of(folder: &Path) -> std::result::Result<Kind, Unusable> {
    let damaged = Unusable::Damaged;
    match folder.symlink_metadata() {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(damaged(String::from("it is no folder"))),
        Err(error) => return Err(damaged(error.to_string())),
    }
    let about = describe(folder)?;
    let key = about.kind.key().map_err(|error| damaged(error.message))?;
    if folder.file_name().is_none_or(|name| *name != *key) {
        return Err(damaged(String::from("it is of another machine than its name says")));
    }
    for (name, wanted) in [(MEMORY, &about.memory), (STATE, &about.state)] {
        match folder.join(name).symlink_metadata() {
            Ok(found) if found.is_file() && found.len() == wanted.bytes => {}
            Ok(_) => return Err(damaged(format!("{name} has another size than was written"))),
            Err(error) => return Err(damaged(format!("{name}: {error}"))),
        }
    }
    Ok(about.kind)
}

/// Reads the description in a folder. Blocks.
///
/// # Errors
/// Why there is none of this version.
pub(super) fn describe(folder: &Path) -> std::result::Result<Description, Unusable> {
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }
    let damaged = |error: &dyn std::fmt::Display| Unusable::Damaged(format!("{DESCRIPTION}: {error}"));
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(folder.join(DESCRIPTION));
    let mut text = String::new();
    let read = file.and_then(|file| file.take(limits::VM_TEMPLATE_JSON_BYTES).read_to_string(&mut text));
    read.map_err(|error| damaged(&error))?;
    let Head { format } = serde_json::from_str(&text).map_err(|error| damaged(&error))?;
    match format {
        FORMAT => serde_json::from_str(&text).map_err(|error| damaged(&error)),
        other => Err(Unusable::OtherFormat(other)),
    }
}

/// Completes the folder of a template with its description. Blocks.
///
/// # Errors
/// Those of the file system.
pub(super) fn write_description(folder: &Path, description: &Description) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| Error::unavailable(format!("write a template: {error}"));
    let text = serde_json::to_vec_pretty(description).map_err(|error| failed(&error))?;
    fs::replace(&folder.join(DESCRIPTION), &text, 0o400, "microvm.template.describe").map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use super::super::template::Template;
    use super::super::template::tests::{kind, template};
    use super::*;

    fn rewrite(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) {
        let file = folder.join(DESCRIPTION);
        let mut about = serde_json::from_slice(&std::fs::read(&file).expect("it is there")).expect("JSON");
        change(&mut about);
        std::fs::remove_file(&file).expect("removed");
        std::fs::write(file, about.to_string()).expect("written");
    }

    #[test]
    fn description_says_what_it_is() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        let place = template(folder.path(), &kind);
        let made = describe(&place).expect("a description").made.expect("it says what it is");
        assert_eq!((made.id.len(), made.made_from, made.replaces), (16, MadeFrom::FreshBoot, None));
        assert!(made.created_at_ms > 1_700_000_000_000, "{}", made.created_at_ms);
        // One of a former version is usable, and its age is unknown.
        rewrite(&place, |about| {
            let about = about.as_object_mut().expect("an object");
            ["id", "created_at_ms", "made_from"]
                .iter()
                .for_each(|name| assert!(about.remove(*name).is_some(), "{name}"));
        });
        let found = Template::open(&place, &kind).expect("it is whole").expect("it is there");
        assert_eq!((found.created_at_ms(), found.id()), (None, ""));
    }

    #[test]
    fn other_formats_are_no_damage() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        let place = template(folder.path(), &kind);
        rewrite(&place, |about| *about = serde_json::json!({ "format": 7, "machine": "of another time" }));
        assert_eq!(Template::open(&place, &kind).map(|_| ()), Err(Unusable::OtherFormat(7)));
        assert_eq!(kind_of(&place), Err(Unusable::OtherFormat(7)));
    }

    #[test]
    fn only_own_folders_are_templates() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        let place = template(folder.path(), &kind);
        assert_eq!(kind_of(&place).as_ref(), Ok(&kind));
        let renamed = folder.path().join("mine");
        std::fs::rename(&place, &renamed).expect("renamed");
        std::os::unix::fs::symlink(&renamed, &place).expect("a link");
        std::fs::create_dir(folder.path().join("empty")).expect("a folder");
        for (name, why) in [("mine", "another machine"), ("empty", "template.json"), ("none", "No such file")] {
            let found = kind_of(&folder.path().join(name)).expect_err("it is none").to_string();
            assert!(found.contains(why), "{name}: {found}");
        }
        assert_eq!(kind_of(&place), Err(Unusable::Damaged("it is no folder".into())));
    }
}
