//! Images: what a machine boots. `scripts/build-image` makes them; a folder's name is the digest of its content.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;

use super::saved::unless_short;
use super::stamp::Stamp;
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::bootstrap::BUILD;

/// How an image is made.
const HINT: &str = "build one of this version: ryokan images build";
/// The format that this build reads.
const FORMAT: u32 = 1;
/// The files of an image.
const FILES: [&str; 3] = ["vmlinux", "initrd.cpio", "rootfs.erofs"];

/// An image of this host.
#[derive(Debug, Clone)]
pub(super) struct Image {
    pub dir: PathBuf,
    /// The digest of its content: `base_image_version`.
    pub version: String,
    /// The path of each engine's interpreter; empty for one that is part of the worker.
    pub engines: BTreeMap<EngineName, String>,
    /// The interpreters' versions, as far as the description names them.
    pub engine_versions: BTreeMap<EngineName, String>,
    pub summary: String,
    /// Whether its kernel loads the drivers of vsock.
    pub has_vsock: bool,
    /// The digests of its files.
    digests: [String; FILES.len()],
}

#[derive(Deserialize)]
struct Description {
    format: u32,
    version: String,
    build: String,
    arch: String,
    debian: String,
    kernel: String,
    engines: BTreeMap<EngineName, String>,
    /// Absent in images of earlier builds, as is the next one.
    #[serde(default)]
    versions: BTreeMap<EngineName, String>,
    #[serde(default)]
    vsock: bool,
    files: BTreeMap<String, Part>,
}

/// A file of an image.
#[derive(Deserialize)]
struct Part {
    bytes: u64,
    sha256: String,
}

impl Image {
    fn read(dir: &Path) -> std::result::Result<Image, String> {
        let mut text = String::new();
        let file = std::fs::File::open(dir.join("image.json")).map_err(|error| error.to_string())?;
        file.take(limits::VM_IMAGE_JSON_BYTES).read_to_string(&mut text).map_err(|error| error.to_string())?;
        let about: Description = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        if about.format != FORMAT || about.arch != std::env::consts::ARCH {
            return Err(format!("it has format {} for {}", about.format, about.arch));
        }
        if about.build != BUILD {
            return Err(format!("it holds the worker of build {}, and this is {BUILD}", about.build));
        }
        if dir.file_name().is_none_or(|name| name != about.version.as_str()) {
            return Err(String::from("its folder has another name than its content"));
        }
        let mut digests = FILES.map(|_| String::new());
        for (name, digest) in FILES.into_iter().zip(&mut digests) {
            let found = std::fs::metadata(dir.join(name)).map_err(|error| format!("{name}: {error}"))?;
            match about.files.get(name) {
                Some(part) if part.bytes == found.len() => digest.clone_from(&part.sha256),
                Some(_) | None => return Err(format!("{name} has another size than was written")),
            }
        }
        let summary = format!("Debian {}, Linux {}", about.debian, about.kernel);
        Ok(Image {
            dir: dir.to_owned(),
            version: about.version,
            engines: about.engines,
            engine_versions: about.versions,
            summary,
            has_vsock: about.vsock,
            digests,
        })
    }

    /// The stamps of its files, of which a change is seen. Blocks.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn stamps(&self) -> Result<Vec<Stamp>> {
        FILES.iter().map(|name| Stamp::of(&self.dir.join(name)).map_err(|error| self.unread(name, &error))).collect()
    }

    /// Reads its files and checks that they are what was built. Blocks.
    ///
    /// # Errors
    /// `unsupported` if they are not; those of reading.
    pub(super) fn verify(&self) -> Result<()> {
        for (name, wanted) in FILES.into_iter().zip(&self.digests) {
            let file = self.open(name).map_err(|error| self.unread(name, &error))?;
            if sha256(file).map_err(|error| self.unread(name, &error))? != *wanted {
                return Err(Error::unsupported(format!("image {}: {name} is not what was built", self.version))
                    .reason("image")
                    .hint(format!("remove {}, then build the image again: ryokan images build", self.dir.display())));
            }
        }
        Ok(())
    }

    fn unread(&self, name: &str, error: &std::io::Error) -> Error {
        unless_short(error, Error::unavailable(format!("image {}: {name}: {error}", self.version)))
    }

    /// Checks that it has an engine.
    ///
    /// # Errors
    /// `unsupported` with the command that builds an image which has it.
    pub(super) fn check_engine(&self, engine: EngineName) -> Result<()> {
        if self.engines.contains_key(&engine) {
            return Ok(());
        }
        let chosen = self.engines.keys().copied().chain([engine]).filter(|engine| *engine != EngineName::Kaish);
        let chosen: Vec<&str> = chosen.map(EngineName::name).collect();
        let hint = format!(
            "build an image with {engine}: ryokan images build --engines {}; then make it current: ryokan images rotate",
            chosen.join(",")
        );
        Err(Error::unsupported(format!("image {} has no {engine}", self.version)).reason("engine").hint(hint))
    }

    /// Opens one of its files.
    ///
    /// # Errors
    /// Those of opening.
    pub(super) fn open(&self, name: &str) -> std::io::Result<std::fs::File> {
        std::fs::File::open(self.dir.join(name))
    }
}

/// The digest of a file, in hexadecimal digits.
fn sha256(mut file: std::fs::File) -> std::io::Result<String> {
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    let mut bytes = vec![0; 256 << 10];
    loop {
        match file.read(&mut bytes)? {
            0 => break,
            count => context.update(&bytes[..count]),
        }
    }
    Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A folder of images' entry.
pub(super) struct Found {
    /// The entry's name: the image's version, if it can be used.
    pub name: String,
    /// The image, or why it cannot be used.
    pub image: std::result::Result<Image, String>,
    pub bytes: u64,
    pub built_at_ms: i64,
    modified: SystemTime,
}

/// All images, by name; what is being built or removed is left out. Blocks.
pub(super) fn all(images: &Path) -> Vec<Found> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(images).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') || all.len() >= limits::VM_IMAGES {
            continue;
        }
        let image = Image::read(&entry.path());
        let modified = entry.metadata().and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let since_1970 = modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let sizes = FILES.iter().filter_map(|file| std::fs::metadata(entry.path().join(file)).ok());
        all.push(Found {
            name,
            image,
            bytes: sizes.map(|found| found.len()).sum(),
            built_at_ms: i64::try_from(since_1970.as_millis()).unwrap_or_default(),
            modified,
        });
    }
    all.sort_by(|one, other| one.name.cmp(&other.name));
    all
}

/// The refusal of digits that do not name one image.
pub(super) fn several(wanted: &str) -> Error {
    Error::invalid(format!("several images begin with {wanted:?}")).hint("give more digits")
}

/// Finds the newest usable image, or the one whose version begins with `wanted`.
///
/// # Errors
/// `unsupported` with what is wrong with the images; `invalidArgument` if several begin with `wanted`.
pub(super) fn find(images: &Path, wanted: &str) -> Result<Image> {
    let wanted = wanted.rsplit_once('@').map_or(wanted, |(_, version)| version);
    let (mut best, mut wrong): (Option<(SystemTime, Image)>, Option<String>) = (None, None);
    let found: Vec<Found> = all(images).into_iter().filter(|found| found.name.starts_with(wanted)).collect();
    if !wanted.is_empty() && found.len() > 1 {
        return Err(several(wanted));
    }
    for Found { name, image, modified, .. } in found {
        match image {
            Ok(image) => {
                if best.as_ref().is_none_or(|(newest, _)| modified > *newest) {
                    best = Some((modified, image));
                }
            }
            Err(why) => wrong = Some(format!("image {name} cannot be used: {why}")),
        }
    }
    best.map(|(_, image)| image).ok_or_else(|| {
        let message = match (wrong, wanted) {
            (Some(wrong), _) => wrong,
            (None, "") => format!("there is no image in {}", images.display()),
            (None, wanted) => format!("there is no image {wanted} in {}", images.display()),
        };
        Error::unsupported(message).reason("image").hint(HINT)
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The digest of the letter x.
    const X_SHA256: &str = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881";

    /// Writes an image's files.
    pub(in crate::isolation::microvm) fn write_image(folder: &Path, name: &str, version: &str, build: &str) {
        let dir = folder.join(name);
        std::fs::create_dir_all(&dir).expect("a folder");
        for file in FILES {
            std::fs::write(dir.join(file), b"x").expect("a file");
        }
        let part = serde_json::json!({ "bytes": 1, "sha256": X_SHA256 });
        let text = serde_json::json!({
            "format": 1, "version": version, "build": build, "arch": std::env::consts::ARCH, "debian": "d", "kernel": "k",
            "engines": { "bash": "/usr/bin/bash" },
            "files": { "vmlinux": part, "initrd.cpio": part, "rootfs.erofs": part },
        });
        std::fs::write(dir.join("image.json"), text.to_string()).expect("a description");
    }

    #[test]
    fn engines_of_image() {
        let folder = tempfile::tempdir().expect("a folder");
        write_image(folder.path(), "abc", "abc", BUILD);
        let image = find(folder.path(), "").expect("found");
        assert_eq!(image.check_engine(EngineName::Bash), Ok(()));
        assert!(image.engine_versions.is_empty(), "an older description names none");
        let refused = image.check_engine(EngineName::Node).expect_err("refused");
        assert_eq!((refused.code, refused.reason.as_str()), (crate::core::error::ErrorCode::Unsupported, "engine"));
        assert!(refused.message.contains("image abc has no node"), "{refused:?}");
        assert!(refused.hint.contains("ryokan images build --engines bash,node;"), "{refused:?}");
    }

    #[test]
    fn unusable_images_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let why = |folder: &Path| find(folder, "").expect_err("refused").message;
        assert!(why(folder.path()).contains("no image"));
        write_image(folder.path(), "abc", "abc", "other");
        assert!(why(folder.path()).contains("worker of build other"));
        write_image(folder.path(), "abc", "abc", BUILD);
        assert_eq!(find(folder.path(), "ab").expect("found").version, "abc");
        assert!(find(folder.path(), "x").is_err());
        write_image(folder.path(), "abd", "abd", BUILD);
        let several = find(folder.path(), "ab").expect_err("refused");
        assert_eq!(several.code, crate::core::error::ErrorCode::InvalidArgument, "{several}");
        assert_eq!(find(folder.path(), "abc").expect("found").version, "abc");
        std::fs::remove_dir_all(folder.path().join("abd")).expect("removed");
        std::fs::write(folder.path().join("abc/vmlinux"), b"cut short").expect("written");
        assert!(why(folder.path()).contains("another size"));
        write_image(folder.path(), "other", "abc", BUILD);
        std::fs::remove_dir_all(folder.path().join("abc")).expect("removed");
        assert!(why(folder.path()).contains("another name"));
    }
}
