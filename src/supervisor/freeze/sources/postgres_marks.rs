//! Marks in and beside the data directory of a PostgreSQL server: what a restore that has not ended left where. Blocks.
//!
//! ```text
//! DIR/NAME/ryokan.restored     a restore put this data directory there: whether a server starts in it, and a digest of
//!                              its control file, which every start of a server changes
//! DIR/NAME/ryokan.used         another program started a server in it
//! DIR/.NAME.ryokan/stopped     the server must be started again
//! ```

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::postgres_files::{NEW, Places, exists, io, new_file, open_itself, sync};
use crate::core::error::{Error, Result};
use crate::sys::fault;
use crate::sys::fs::path_of;

const RESTORED: &str = "ryokan.restored";
const USED: &str = "ryokan.used";
/// A new text of [`RESTORED`], before it is there.
const NEXT: &str = "ryokan.restored.next";
const STOPPED: &str = "stopped";
/// First lines of [`RESTORED`]. A mark without one is of a data directory in which a server starts.
const STARTS: &str = "starts";
const DOES_NOT_START: &str = "damaged";
/// More than the size of a mark, and of a control file.
const MOST: u64 = 64 << 10;

/// Reads a file of a data directory: never through a link, whatever the server's user puts there.
fn read(dir: &Path, names: &[&str]) -> io::Result<Vec<u8>> {
    let mut opened = open_itself(dir)?;
    for name in names {
        opened = open_itself(&path_of(&opened).join(name))?;
    }
    if !opened.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    opened.take(MOST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A digest of the control file; without one, of nothing.
fn control_digest(dir: &Path) -> String {
    blake3::hash(&read(dir, &["global", "pg_control"]).unwrap_or_default()).to_hex().to_string()
}

fn remove_file(path: &Path) -> Result<bool> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true).map_err(io("remove", path)),
    }
}

impl Places {
    /// Marks a checkout as restored, before anything else can find it. `starts`: a server starts in it.
    pub fn mark_restored(&self, dir: &Path, starts: bool) -> Result<()> {
        self.write_mark(dir, if starts { STARTS } else { DOES_NOT_START })
    }

    /// Adds to the mark of `new` how no server has used it.
    pub fn seal_restored(&self) -> Result<()> {
        let new = self.at(NEW);
        let text = format!("{}\n{}\n", self.mark(&new).lines().next().unwrap_or(STARTS), control_digest(&new));
        self.write_mark(&new, &text)
    }

    fn write_mark(&self, dir: &Path, text: &str) -> Result<()> {
        let (next, mark) = (dir.join(NEXT), dir.join(RESTORED));
        remove_file(&next)?;
        let write = |mut file: File| file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        new_file(&next, self.owner(dir)?).and_then(write).map_err(io("write", &next))?;
        std::fs::rename(&next, &mark).map_err(io("write", &mark))?;
        sync(dir)
    }

    fn mark(&self, dir: &Path) -> String {
        read(dir, &[RESTORED]).map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
    }

    /// Whether a server can be expected to start in the data directory: not in a damaged one that was restored as it was.
    pub fn may_start(&self) -> bool {
        self.is_there() && !self.mark(&self.data).starts_with(DOES_NOT_START)
    }

    /// Whether a data directory was put there by a restore that has not ended.
    pub fn is_restored(&self, dir: &Path) -> bool {
        exists(&dir.join(RESTORED))
    }

    /// Notes that another program started a server in the data directory. Durable.
    pub fn mark_used(&self) -> Result<()> {
        let mark = self.data.join(USED);
        match new_file(&mark, self.owner(&self.data)?).and_then(|file| file.sync_all()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.map_err(io("write", &mark))?,
        }
        sync(&self.data)
    }

    /// Whether a server was started in a restored data directory, by what is durable in it.
    fn is_used(&self, dir: &Path) -> bool {
        let text = self.mark(dir);
        exists(&dir.join(USED)) || text.lines().nth(1).is_some_and(|sealed| sealed != control_digest(dir))
    }

    /// Removes the marks of a data directory. Durable.
    pub fn unmark(&self, dir: &Path) -> Result<()> {
        let mut is_changed = false;
        for name in [RESTORED, USED, NEXT] {
            is_changed |= remove_file(&dir.join(name))?;
        }
        if is_changed { sync(dir) } else { Ok(()) }
    }

    /// Moves `new` beside the data directory, for good, if it was restored and then used; returns its place.
    pub fn keep_used(&self, at_ms: i64) -> Result<Option<PathBuf>> {
        let new = self.at(NEW);
        if !self.is_restored(&new) || !self.is_used(&new) {
            return Ok(None);
        }
        let name = self.data.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let named = |at_ms: i64| self.data.with_file_name(format!("{name}.kept-{at_ms}"));
        let kept = (at_ms..).map(named).find(|kept| !exists(kept)).unwrap_or_else(|| named(at_ms));
        let rename = || fault::point("source.server.keep").and_then(|()| std::fs::rename(&new, &kept));
        rename().map_err(io("keep", &kept))?;
        self.sync_both()?;
        // It ends as a data directory like any other. The marks were what kept it.
        if let Err(error) = self.unmark(&kept) {
            tracing::warn!(%error, "the marks of a data directory that is kept could not be removed");
        }
        Ok(Some(kept))
    }

    /// Records that the server must be started again. Durable.
    pub fn record_stopped(&self) -> Result<()> {
        self.make()?;
        let path = self.at(STOPPED);
        File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .and_then(|file| file.sync_all())
            .map_err(io("write", &path))?;
        self.sync_both()
    }

    pub fn is_stopped(&self) -> bool {
        exists(&self.at(STOPPED))
    }

    /// The server runs again.
    pub fn clear_stopped(&self) -> Result<()> {
        remove_file(&self.at(STOPPED)).map(drop)
    }

    /// Refuses to work where a restore that has not ended needs what is there.
    pub fn check_unused(&self) -> Result<()> {
        match self.is_stopped() || exists(&self.at(NEW)) {
            true => Err(Error::conflict(format!("{} is in a restore that has not ended", self.data.display()))
                .reason("restore_unfinished")
                .hint(format!("freeze its group; if there is none any more, move {} away", self.at(".").display()))),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(dir: &Path) -> Places {
        for folder in ["data/global", ".data.ryokan/new/global"] {
            std::fs::create_dir_all(dir.join(folder)).expect("made");
        }
        std::fs::write(dir.join(".data.ryokan/new/global/pg_control"), "one").expect("written");
        Places::of(dir.join("data"), dir.join("index"))
    }

    #[test]
    fn use_changes_control_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let (places, new) = (places(dir.path()), dir.path().join(".data.ryokan/new"));
        places.mark_restored(&new, true).expect("marked");
        std::fs::write(new.join("global/pg_control"), "two").expect("written");
        assert_eq!(places.keep_used(7).expect("looked"), None, "our own trial");
        places.seal_restored().expect("sealed");
        assert_eq!(places.keep_used(7).expect("looked"), None);
        std::fs::write(new.join("global/pg_control"), "three").expect("written");
        std::fs::create_dir(dir.path().join("data.kept-7")).expect("made");
        let kept = places.keep_used(7).expect("kept").expect("it was used");
        assert_eq!(kept, dir.path().join("data.kept-8"));
        assert!(!places.is_restored(&kept) && !exists(&new));
    }

    #[test]
    fn marks_follow_no_links() {
        let dir = tempfile::tempdir().expect("a directory");
        let (places, data) = (places(dir.path()), dir.path().join("data"));
        let secret = dir.path().join("secret");
        std::fs::write(&secret, "damaged").expect("written");
        for name in [RESTORED, USED, NEXT] {
            std::os::unix::fs::symlink(&secret, data.join(name)).expect("made");
        }
        assert!(places.may_start(), "a link is no mark");
        places.mark_restored(&data, false).expect("marked");
        places.mark_used().expect("marked");
        assert!(!places.may_start());
        places.unmark(&data).expect("unmarked");
        assert_eq!(std::fs::read_to_string(&secret).expect("it is there"), "damaged");
        assert!(places.may_start() && !places.is_restored(&data));
    }
}
