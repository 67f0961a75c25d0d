//! The images of a host: which one is current, which ones are pinned, and how that changes.
//!
//! ```text
//!  build-image ─▶ images/VERSION/ ── rotate: its templates are built and test-started ─▶ current ─▶ new starts use it
//!                       └ remove: not current, not pinned ─▶ images/.removed-VERSION/ ─▶ gone
//! ```
//!
//! Before one is current, the newest serves, and the first that a machine started from becomes current. Nothing else
//! changes which one is: if the current one cannot be used, starts without an image of their own are refused.
//!
//! `images.json` is beside the folder of images, which daemons may share. Knows no kernels: the caller checks the use.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::disk::disk_bytes;
use super::image::{self, Found, Image};
use super::template::Kind;
use super::templates::Templates;
use super::verified::VerifiedImages;
use super::vmm::Vmms;
use crate::core::error::{Error, Result};
use crate::core::info::ImageInfo;
use crate::core::limits;
use crate::isolation::{Images, Shape};
use crate::sys::fs;

/// An image that is being removed.
const REMOVED: &str = ".removed-";

/// What is kept about images.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// The version that kernels without an image of their own run; empty before the first machine of any.
    current: String,
    pinned: BTreeSet<String>,
}

/// The images of a host.
pub(super) struct HostImages {
    folder: PathBuf,
    file: PathBuf,
    templates: Rc<Templates>,
    vmms: Rc<Vmms>,
    verified: VerifiedImages,
    kept: RefCell<Kept>,
    /// Why `images.json` cannot be read. It is not overwritten then.
    damage: Option<String>,
}

impl HostImages {
    pub(super) fn new(folder: PathBuf, file: PathBuf, templates: Rc<Templates>, vmms: Rc<Vmms>) -> Rc<HostImages> {
        let (kept, damage) = match read(&file) {
            Ok(kept) => (kept, None),
            Err(why) => {
                tracing::error!(file = %file.display(), why, "the list of images cannot be read: none is current");
                (Kept::default(), Some(why))
            }
        };
        let (verified, kept) = (VerifiedImages::default(), RefCell::new(kept));
        Rc::new(HostImages { folder, file, templates, vmms, verified, kept, damage })
    }

    /// The image of a kernel: the current one, or the one whose version begins with `wanted`. Changes nothing.
    ///
    /// # Errors
    /// `unsupported` with what is wrong with the images.
    pub(super) fn find(&self, wanted: &str) -> Result<Image> {
        match wanted.is_empty() {
            true => current(&self.folder, &self.file, &self.kept.borrow(), self.damage.as_deref()),
            false => image::find(&self.folder, wanted),
        }
    }

    /// The image of a machine that starts: its files are what was built.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub(super) async fn verified(&self, version: &str) -> Result<Image> {
        let image = image::find(&self.folder, version)?;
        self.verified.check(&image).await?;
        Ok(image)
    }

    /// Notes that a machine started from an image: the newest one becomes current if none was.
    pub(super) fn served(&self, version: &str) {
        let is_first = self.damage.is_none() && self.kept.borrow().current.is_empty();
        if !is_first || self.find("").is_ok_and(|newest| newest.version != version) {
            return;
        }
        let kept = Kept { current: version.to_owned(), ..self.kept.borrow().clone() };
        if let Err(error) = self.keep(kept) {
            tracing::warn!(%error, "the current image is not recorded");
        }
    }

    /// The version of the current image, usable or not; empty if there is none.
    fn current_version(&self) -> String {
        let recorded = self.kept.borrow().current.clone();
        match recorded.is_empty() {
            true => self.find("").map(|image| image.version).unwrap_or_default(),
            false => recorded,
        }
    }

    fn keep(&self, kept: Kept) -> Result<()> {
        if let Some(why) = &self.damage {
            return Err(Error::corrupt(format!("{}: {why}", self.file.display()))
                .hint("remove the file and restart the daemon; pins are lost then"));
        }
        let failed = |error: &dyn std::fmt::Display| Error::unavailable(format!("{}: {error}", self.file.display()));
        let text = serde_json::to_vec_pretty(&kept).map_err(|error| failed(&error))?;
        fs::replace(&self.file, &text, 0o600, "microvm.images").map_err(|error| failed(&error))?;
        *self.kept.borrow_mut() = kept;
        Ok(())
    }

    /// The one folder whose name begins with `wanted`, whether its image can be used or not.
    fn resolve(&self, wanted: &str) -> Result<Found> {
        let mut found: Vec<Found> =
            image::all(&self.folder).into_iter().filter(|found| found.name.starts_with(wanted)).collect();
        match (found.pop(), found.is_empty()) {
            (Some(one), true) if !wanted.is_empty() => Ok(one),
            (Some(_), _) => Err(image::several(wanted)),
            (None, _) => Err(Error::not_found(format!("there is no image {wanted} in {}", self.folder.display()))
                .hint("`ryokan images` lists them")),
        }
    }
}

/// The current image of that folder and list, for `doctor`. Blocks.
///
/// # Errors
/// `unsupported` with what is wrong with the images.
pub(super) fn current_of(folder: &Path, file: &Path) -> Result<Image> {
    match read(file) {
        Ok(kept) => current(folder, file, &kept, None),
        Err(why) => current(folder, file, &Kept::default(), Some(&why)),
    }
}

fn current(folder: &Path, file: &Path, kept: &Kept, damage: Option<&str>) -> Result<Image> {
    if let Some(why) = damage {
        return Err(Error::unsupported(format!("no image is current: {}: {why}", file.display()))
            .reason("image")
            .hint("remove the file and restart the daemon; pins are lost then"));
    }
    // Before the first one there is nothing to go by but the newest.
    image::find(folder, &kept.current).map_err(|error| match kept.current.as_str() {
        "" => error,
        _ => {
            let message = format!("the current image cannot be used: {}", error.message);
            Error { message, ..error }
                .hint("build one if `ryokan images` lists no usable one, then make it current: ryokan images rotate")
        }
    })
}

fn read(file: &Path) -> std::result::Result<Kept, String> {
    let mut text = String::new();
    match std::fs::File::open(file) {
        Ok(file) => {
            file.take(limits::VM_IMAGES_JSON_BYTES).read_to_string(&mut text).map_err(|error| error.to_string())?
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Kept::default()),
        Err(error) => return Err(error.to_string()),
    };
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

#[async_trait::async_trait(?Send)]
impl Images for HostImages {
    fn folder(&self) -> PathBuf {
        self.folder.clone()
    }

    async fn list(&self) -> Result<Vec<ImageInfo>> {
        let (folder, current, kept) = (self.folder.clone(), self.current_version(), self.kept.borrow().clone());
        let listing = tokio::task::spawn_blocking(move || {
            let info = |found: Found| {
                let (mut engines, mut engine_versions) = (Vec::new(), Vec::new());
                let (summary, trouble) = match found.image {
                    Ok(image) => {
                        for engine in image.engines.keys() {
                            engines.push(engine.name().to_owned());
                            engine_versions.push(image.engine_versions.get(engine).cloned().unwrap_or_default());
                        }
                        (image.summary, String::new())
                    }
                    Err(why) => (String::new(), why),
                };
                ImageInfo {
                    is_current: found.name == current,
                    is_pinned: kept.pinned.contains(&found.name),
                    version: found.name,
                    engines,
                    engine_versions,
                    summary,
                    bytes: found.bytes,
                    built_at_ms: found.built_at_ms,
                    trouble,
                    kernels: Vec::new(),
                }
            };
            image::all(&folder).into_iter().map(info).collect()
        });
        listing.await.map_err(|error| Error::internal(error.to_string()))
    }

    fn pin(&self, version: &str, is_pinned: bool) -> Result<String> {
        let name = self.resolve(version)?.name;
        let mut kept = self.kept.borrow().clone();
        let changed = if is_pinned { kept.pinned.insert(name.clone()) } else { kept.pinned.remove(&name) };
        if changed {
            self.keep(kept)?;
        }
        Ok(name)
    }

    fn usable(&self, version: &str) -> Result<String> {
        image::find(&self.folder, version).map(|image| image.version)
    }

    async fn rotate(&self, version: &str, shapes: &[Shape]) -> Result<String> {
        let image = self.verified(version).await?;
        shapes.iter().try_for_each(|shape| image.check_engine(shape.engine))?;
        let (version, choice) = (image.version.clone(), self.vmms.choose(&image).await?);
        let mut kinds = Vec::new();
        for shape in shapes {
            let kind = Kind::new(&image, shape, choice.clone(), disk_bytes(shape.limits.workspace_bytes));
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        for kind in kinds {
            self.templates.forget_failure(&kind);
            if let Err(why) = self.templates.find_or_build(&kind, &image).await {
                let message = format!("image {version} does not become current: {}: {why}", kind.engine);
                return Err(Error::unavailable(message).reason("template"));
            }
        }
        // It may have been removed meanwhile.
        image::find(&self.folder, &version)?;
        let kept = Kept { current: version.clone(), ..self.kept.borrow().clone() };
        self.keep(kept)?;
        Ok(version)
    }

    async fn remove(&self, version: &str) -> Result<()> {
        if self.current_version() == version {
            return Err(Error::conflict(format!("image {version} is the current one"))
                .reason("current")
                .hint("make another one current: ryokan images rotate"));
        }
        if self.kept.borrow().pinned.contains(version) {
            return Err(Error::conflict(format!("image {version} is pinned"))
                .reason("pinned")
                .hint(format!("ryokan images unpin {version}")));
        }
        // Renamed before the caller's check of its use can be outdated.
        let (from, to) = (self.folder.join(version), self.folder.join(format!("{REMOVED}{version}")));
        let failed = |error: &dyn std::fmt::Display| Error::unavailable(format!("remove image {version}: {error}"));
        std::fs::rename(&from, &to).map_err(|error| failed(&error))?;
        self.templates.forget_image(version);
        let folder = self.folder.clone();
        let removing = tokio::task::spawn_blocking(move || {
            // Those of interrupted removals, too.
            for entry in std::fs::read_dir(&folder)?.flatten() {
                if entry.file_name().to_string_lossy().starts_with(REMOVED) {
                    fs::remove_tree(&entry.path()).map_err(std::io::Error::other)?;
                }
            }
            Ok::<_, std::io::Error>(())
        });
        removing.await.map_err(|error| Error::internal(error.to_string()))?.map_err(|error| failed(&error))
    }

    fn resolve(&self, version: &str) -> Result<String> {
        HostImages::resolve(self, version).map(|found| found.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorCode;
    use crate::core::pool::RefreshRules;
    use crate::core::vmm::WantedVmm;
    use crate::isolation::microvm::image::tests::write_image;
    use crate::isolation::microvm::templates::TemplateSettings;
    use crate::isolation::microvm::vmm::tests::vmms;
    use crate::link::bootstrap::BUILD;

    fn images(folder: &Path) -> Rc<HostImages> {
        let refresh = RefreshRules { max_age_ms: None, interval_ms: 1_000 };
        let settings = TemplateSettings {
            folder: folder.join("t"),
            sockets: folder.to_owned(),
            account: None,
            cgroups: None,
            refresh,
        };
        let vmms = vmms(WantedVmm::Qemu, None);
        let templates = Templates::new(settings, Rc::clone(&vmms), Rc::default());
        HostImages::new(folder.join("images"), folder.join("images.json"), templates, vmms)
    }

    /// An image, newer than all before.
    fn image(folder: &Path, version: &str) {
        let dir = folder.join("images").join(version);
        write_image(&folder.join("images"), version, version, BUILD);
        let newer = std::time::SystemTime::now() + std::time::Duration::from_secs(u64::from(version.as_bytes()[0]));
        std::fs::File::open(dir).and_then(|dir| dir.set_modified(newer)).expect("its time is set");
    }

    fn list_of(folder: &Path) -> Option<String> {
        std::fs::read_to_string(folder.join("images.json")).ok()
    }

    #[tokio::test]
    async fn reads_change_no_image() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        image(folder, "aaa");
        let images = images(folder);
        assert_eq!(images.find("")?.version, "aaa");
        assert!(images.list().await?[0].is_current && list_of(folder).is_none(), "nothing is recorded by it");
        // The first that a machine started from is current.
        images.served("aaa");
        image(folder, "bbb");
        images.served("bbb");
        let again = self::images(folder);
        assert_eq!((again.find("")?.version.as_str(), again.find("b")?.version.as_str()), ("aaa", "bbb"));
        // An unusable one is no reason to run another one.
        let recorded = list_of(folder);
        write_image(&folder.join("images"), "aaa", "aaa", "other");
        let refused = again.find("").expect_err("refused");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Unsupported, "image"));
        assert!(refused.message.contains("the current image cannot be used: image aaa"), "{refused:?}");
        assert!(refused.hint.contains("ryokan images rotate"), "{refused:?}");
        let flags: Vec<_> =
            again.list().await?.into_iter().map(|one| (one.is_current, one.trouble.is_empty())).collect();
        assert_eq!(flags, [(true, false), (false, true)]);
        std::fs::remove_dir_all(folder.join("images/aaa")).expect("removed");
        assert!(again.find("").is_err_and(|error| error.message.contains("no image aaa")));
        assert_eq!(list_of(folder), recorded);
        Ok(())
    }

    #[tokio::test]
    async fn images_in_use_stay() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        ["aaa", "bbb", "bbc"].iter().for_each(|version| image(folder.path(), version));
        std::fs::remove_dir_all(folder.path().join("images/bbb")).expect("removed");
        image(folder.path(), "bbb");
        let images = images(folder.path());
        assert_eq!(images.find("")?.version, "bbb");
        assert_eq!(images.pin("aa", true)?, "aaa");
        let reason = |error: Option<Error>| error.map(|error| (error.code, error.reason));
        assert_eq!(reason(images.remove("aaa").await.err()), Some((ErrorCode::Conflict, "pinned".into())));
        assert_eq!(reason(images.remove("bbb").await.err()), Some((ErrorCode::Conflict, "current".into())));
        assert_eq!(images.pin("bb", true).err().map(|error| error.code), Some(ErrorCode::InvalidArgument));
        assert_eq!(images.pin("x", true).err().map(|error| error.code), Some(ErrorCode::NotFound));
        images.remove("bbc").await?;
        let listed = images.list().await?;
        let flags: Vec<_> = listed.iter().map(|one| (one.version.as_str(), one.is_current, one.is_pinned)).collect();
        assert_eq!(flags, [("aaa", false, true), ("bbb", true, false)]);
        images.pin("aaa", false)?;
        images.remove("aaa").await
    }

    #[tokio::test]
    async fn changed_files_are_found() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        image(folder.path(), "aaa");
        let (images, file) = (images(folder.path()), folder.path().join("images/aaa/rootfs.erofs"));
        let changed = || std::fs::metadata(&file).and_then(|found| found.modified()).expect("its time");
        let set = |bytes: &[u8], time: std::time::SystemTime| {
            std::fs::write(&file, bytes).expect("written");
            std::fs::File::options()
                .append(true)
                .open(&file)
                .and_then(|f| f.set_modified(time))
                .expect("its time is set");
        };
        let first = changed();
        images.verified("aaa").await?;
        // The same stamp is not read again.
        set(b"y", first);
        images.verified("aaa").await?;
        set(b"y", first + std::time::Duration::from_secs(1));
        let refused = images.verified("aaa").await.expect_err("refused");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Unsupported, "image"));
        assert!(refused.message.contains("rootfs.erofs is not what was built"), "{refused:?}");
        let rotated = images.rotate("aaa", &[]).await.expect_err("refused");
        assert!(rotated.message.contains("not what was built") && list_of(folder.path()).is_none(), "{rotated:?}");
        // Another daemon reads them before its first machine.
        set(b"y", first);
        assert!(self::images(folder.path()).verified("aaa").await.is_err());
        set(b"x", first + std::time::Duration::from_secs(2));
        images.verified("aaa").await.map(drop)
    }

    #[test]
    fn damaged_list_is_kept() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        image(folder.path(), "aaa");
        std::fs::write(folder.path().join("images.json"), b"{").expect("written");
        let images = images(folder.path());
        let refused = images.find("").expect_err("refused");
        assert!(refused.hint.contains("remove the file"), "{refused:?}");
        assert_eq!(images.pin("aaa", true).err().map(|error| error.code), Some(ErrorCode::Corrupt));
        assert_eq!(std::fs::read(folder.path().join("images.json")).expect("it is there"), b"{");
        Ok(())
    }
}
