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

use super::postgres_files::{COPY, NEW, Places, exists, io, new_file, open_itself, sync};
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

/// Reads a file of a data directory; nothing, if there is no file. Other errors do not say that.
fn read_if_any(dir: &Path, names: &[&str]) -> Result<Vec<u8>> {
    use std::io::ErrorKind::{InvalidData, NotFound};
    match read(dir, names) {
        Err(error) if matches!(error.kind(), NotFound | InvalidData) => Ok(Vec::new()),
        // A link, a socket.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) => Ok(Vec::new()),
        found => found.map_err(io("read a file in", dir)),
    }
}

/// A digest of the control file; without one, of nothing.
fn control_digest(dir: &Path) -> Result<String> {
    Ok(blake3::hash(&read_if_any(dir, &["global", "pg_control"])?).to_hex().to_string())
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
        let text = format!("{}\n{}\n", self.mark(&new)?.lines().next().unwrap_or(STARTS), control_digest(&new)?);
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

    fn mark(&self, dir: &Path) -> Result<String> {
        read_if_any(dir, &[RESTORED]).map(|text| String::from_utf8_lossy(&text).into_owned())
    }

    /// Whether a server can be expected to start in the data directory: not in a damaged one that was restored as it was.
    pub fn may_start(&self) -> Result<bool> {
        Ok(self.is_there()? && !self.mark(&self.data)?.starts_with(DOES_NOT_START))
    }

    /// Whether a data directory was put there by a restore that has not ended.
    pub fn is_restored(&self, dir: &Path) -> Result<bool> {
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
    fn is_used(&self, dir: &Path) -> Result<bool> {
        if exists(&dir.join(USED))? {
            return Ok(true);
        }
        match self.mark(dir)?.lines().nth(1) {
            Some(sealed) => Ok(sealed != control_digest(dir)?),
            None => Ok(false),
        }
    }

    /// How no server has used the copy since it was taken: the digest that [`Self::check_unchanged`] compares.
    pub fn pinned_digest(&self) -> Result<String> {
        control_digest(&self.at(COPY))
    }

    /// Checks that no server has used the data directory since the copy of it was taken.
    ///
    /// # Errors
    /// `conflict`.
    pub fn check_unchanged(&self, pinned: &str) -> Result<()> {
        if control_digest(&self.data)? == pinned {
            return Ok(());
        }
        let message = format!("a server was started in {} during the restore", self.data.display());
        Err(Error::conflict(message).reason("server_changed").hint("try again"))
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
    pub fn keep_used(&self, mut at_ms: i64) -> Result<Option<PathBuf>> {
        self.check_place()?;
        let new = self.at(NEW);
        if !self.is_restored(&new)? || !self.is_used(&new)? {
            return Ok(None);
        }
        let name = self.data.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let named = |at_ms: i64| self.data.with_file_name(format!("{name}.kept-{at_ms}"));
        while exists(&named(at_ms))? {
            at_ms += 1;
        }
        let kept = named(at_ms);
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

    pub fn is_stopped(&self) -> Result<bool> {
        exists(&self.at(STOPPED))
    }

    /// The server runs again. Durable.
    pub fn clear_stopped(&self) -> Result<()> {
        self.check_place()?;
        if remove_file(&self.at(STOPPED))? { self.sync_both() } else { Ok(()) }
    }

    /// Removes from an inactive copy, in which no server was started yet, the file that names a server's process: later
    /// it names our own, which may be stopped.
    pub fn forget_process(&self, dir: &Path) -> Result<()> {
        remove_file(&dir.join("postmaster.pid")).map(drop)
    }

    /// Refuses to work where a restore that has not ended needs what is there.
    pub fn check_unused(&self) -> Result<()> {
        match self.is_stopped()? || exists(&self.at(NEW))? {
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
        assert!(!places.is_restored(&kept).expect("looked") && !exists(&new).expect("looked"));
    }

    #[test]
    fn use_after_copy_is_noticed() {
        let dir = tempfile::tempdir().expect("a directory");
        let (places, control) = (places(dir.path()), "global/pg_control");
        let (data, copy) = (dir.path().join("data"), places.at(COPY));
        std::fs::create_dir_all(copy.join("global")).expect("made");
        for folder in [&data, &copy] {
            std::fs::write(folder.join(control), "shut down").expect("written");
        }
        let pinned = places.pinned_digest().expect("read");
        places.check_unchanged(&pinned).expect("unused");
        std::fs::write(data.join(control), "shut down later").expect("written");
        assert_eq!(places.check_unchanged(&pinned).expect_err("used").reason, "server_changed");
    }

    #[test]
    fn errors_are_not_absence() {
        let dir = tempfile::tempdir().expect("a directory");
        let (places, file) = (places(dir.path()), dir.path().join("data/file"));
        std::fs::write(&file, "").expect("written");
        // A name in a file.
        exists(&file.join("name")).expect_err("no answer");
        places.mark(&file).expect_err("no answer");
        places.is_used(&file).expect_err("no answer");
        assert_eq!(places.mark(&dir.path().join("none")).expect("absent"), "");
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
        assert!(places.may_start().expect("looked"), "a link is no mark");
        places.mark_restored(&data, false).expect("marked");
        places.mark_used().expect("marked");
        assert!(!places.may_start().expect("looked"));
        places.unmark(&data).expect("unmarked");
        assert_eq!(std::fs::read_to_string(&secret).expect("it is there"), "damaged");
        assert!(places.may_start().expect("looked") && !places.is_restored(&data).expect("looked"));
    }

    #[test]
    fn root_follows_no_foreign_paths() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let (outer, other) = (dir.path().join("outer"), dir.path().join("other"));
        let link = outer.join("inner/.data.ryokan");
        let places = Places::of(outer.join("inner/data"), dir.path().join("index"));
        std::fs::create_dir_all(&places.data).expect("made");
        std::fs::create_dir_all(other.join("run")).expect("made");
        for folder in [&outer, &outer.join("inner")] {
            std::fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("changed");
        }
        places.check_place().expect("everything is root's");
        // A link in the place of the folder beside the data directory.
        std::os::unix::fs::symlink(&other, &link).expect("made");
        assert_eq!(places.check_place().expect_err("a link").reason, "foreign_folder");
        places.discard();
        places.remove("run").expect_err("a link");
        assert!(other.join("run").exists());
        std::fs::remove_file(&link).expect("removed");
        // A folder further above.
        std::os::unix::fs::chown(&outer, Some(65534), None).expect("changed");
        let error = places.make().expect_err("its user could replace the inner folder");
        assert!(error.reason == "foreign_folder" && error.message.ends_with("outer"), "{error:?}");
        places.exchange().expect_err("as above");
    }
}
