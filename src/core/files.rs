//! Files of a workspace as clients name and see them: paths, kinds, attributes, and the errors of access.

use serde::{Deserialize, Serialize};

use super::error::{DISK_FULL, Error, ErrorCode};
use super::limits;

/// The workspace as code inside sees it.
pub const WORKSPACE: &str = "/workspace";

/// What a file operation does while a transition or a checkpoint holds the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WhileHeld {
    /// It waits for the end.
    #[default]
    Wait,
    /// It fails with `busy`.
    Refuse,
}

/// A checked path in a workspace: names below its root. Empty: the workspace itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct FilePath(Vec<Vec<u8>>);

impl TryFrom<Vec<u8>> for FilePath {
    type Error = Error;

    fn try_from(path: Vec<u8>) -> Result<FilePath, Error> {
        FilePath::parse(&path)
    }
}

impl From<FilePath> for Vec<u8> {
    /// The path relative to the workspace.
    fn from(path: FilePath) -> Vec<u8> {
        if path.0.is_empty() { b".".to_vec() } else { path.0.join(&b'/') }
    }
}

impl FilePath {
    /// Parses `/workspace`, a path below it, or a path relative to it.
    ///
    /// # Errors
    /// `refused` with reason `outside` for any other path; `invalidArgument` for one that no file can have.
    pub fn parse(path: &[u8]) -> Result<FilePath, Error> {
        let shown = || String::from_utf8_lossy(path).into_owned();
        if path.is_empty() || path.contains(&0) || path.len() > limits::FILE_PATH_BYTES {
            return Err(Error::invalid(format!("{:?} cannot be a path", shown().chars().take(80).collect::<String>()))
                .hint("a path has 1 to 4095 bytes, and none of them is zero"));
        }
        let inside = match path.strip_prefix(WORKSPACE.as_bytes()) {
            Some(rest) if rest.is_empty() || rest.starts_with(b"/") => rest,
            _ if path.starts_with(b"/") => return Err(FileError::Outside.on(&shown())),
            _ => path,
        };
        let mut names = Vec::new();
        for name in inside.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".") {
            if name == b".." {
                return Err(FileError::Outside.on(&shown()));
            }
            if name.len() > limits::FILE_NAME_BYTES {
                return Err(Error::invalid(format!(
                    "a name of {} bytes is longer than {} bytes",
                    name.len(),
                    limits::FILE_NAME_BYTES
                )));
            }
            names.push(name.to_vec());
        }
        Ok(FilePath(names))
    }

    /// Its names, the outermost first.
    pub fn names(&self) -> &[Vec<u8>] {
        &self.0
    }

    /// The path without its last name, and that name; `None` for the workspace itself.
    pub fn split(&self) -> Option<(&[Vec<u8>], &[u8])> {
        self.0.split_last().map(|(last, folders)| (folders, last.as_slice()))
    }

    /// The path as code inside writes it, for messages.
    pub fn shown(&self) -> String {
        let mut text = String::from(WORKSPACE);
        for name in &self.0 {
            text.push('/');
            text.push_str(&String::from_utf8_lossy(name));
        }
        text
    }

    /// Whether it is `other` or below it.
    pub fn is_in(&self, other: &FilePath) -> bool {
        self.0.starts_with(&other.0)
    }
}

/// Kind of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A pipe, a socket or a device.
    Other,
}

impl FileKind {
    /// The kind in one word.
    pub const fn name(self) -> &'static str {
        match self {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symlink",
            FileKind::Other => "other",
        }
    }
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileInfo {
    /// The last name of its path; empty for the workspace itself.
    pub name: Vec<u8>,
    /// Its kind.
    pub kind: FileKind,
    /// Its size, bytes.
    pub bytes: u64,
    /// Its permission bits.
    pub mode: u32,
    /// Its modification time, nanoseconds since 1970.
    pub modified_ns: i64,
    /// The target of a symbolic link.
    pub target: Vec<u8>,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileEventKind {
    /// From here on everything is reported.
    Ready,
    /// It was created, or moved here.
    Created,
    /// Its content changed.
    Written,
    /// It was closed after it was open for writing.
    Closed,
    /// Its mode, owner or times changed.
    Changed,
    /// It was removed, or moved away.
    Removed,
    /// Events are missing.
    Overflow,
    /// The watched directory was removed or replaced, or has too much in it. Nothing follows.
    Ended,
}

impl FileEventKind {
    /// The kind in one word.
    pub const fn name(self) -> &'static str {
        match self {
            FileEventKind::Ready => "ready",
            FileEventKind::Created => "created",
            FileEventKind::Written => "written",
            FileEventKind::Closed => "closed",
            FileEventKind::Changed => "changed",
            FileEventKind::Removed => "removed",
            FileEventKind::Overflow => "overflow",
            FileEventKind::Ended => "ended",
        }
    }
}

/// An event of a watched directory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileEvent {
    /// What happened.
    pub kind: FileEventKind,
    /// The file, relative to the directory; empty: the directory itself.
    pub path: Vec<u8>,
}

/// Attributes to set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileAttributes {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Modification time, nanoseconds since 1970.
    pub modified_ns: Option<i64>,
}

/// Where and how a written file appears.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Its path.
    pub path: FilePath,
    /// Its attributes. Without a mode, that of the replaced file.
    pub attributes: FileAttributes,
    /// Whether missing directories on the way are made.
    pub parents: bool,
}

/// A change of files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileChange {
    /// Make a directory, unless it exists.
    MakeDir {
        /// Its path.
        path: FilePath,
        /// Its permission bits.
        mode: u32,
        /// Whether missing directories on the way are made.
        parents: bool,
    },
    /// Make a symbolic link, or replace a file or link by it.
    MakeLink {
        /// Where and how it appears.
        at: Placement,
        /// Its target, unchecked.
        target: Vec<u8>,
    },
    /// Rename a file or directory.
    Rename {
        /// From this path.
        from: FilePath,
        /// To this one.
        to: FilePath,
        /// Whether it may replace another file.
        replace: bool,
    },
    /// Remove a file or directory.
    Remove {
        /// Its path.
        path: FilePath,
        /// Whether the content of a directory is removed, too.
        recursive: bool,
    },
    /// Set attributes of a file or directory.
    SetAttributes {
        /// Its path.
        path: FilePath,
        /// The attributes.
        attributes: FileAttributes,
    },
}

impl FileChange {
    /// The change as text, for the journal.
    pub fn describe(&self) -> String {
        match self {
            FileChange::MakeDir { path, .. } => format!("made directory {}", path.shown()),
            FileChange::MakeLink { at, .. } => format!("made link {}", at.path.shown()),
            FileChange::Rename { from, to, .. } => format!("renamed {} to {}", from.shown(), to.shown()),
            FileChange::Remove { path, .. } => format!("removed {}", path.shown()),
            FileChange::SetAttributes { path, .. } => format!("changed attributes of {}", path.shown()),
        }
    }

    /// The paths that it concerns, and whether it moves or removes what is below them.
    pub fn paths(&self) -> Vec<(&FilePath, bool)> {
        match self {
            FileChange::MakeDir { path, .. } | FileChange::SetAttributes { path, .. } => vec![(path, false)],
            FileChange::MakeLink { at, .. } => vec![(&at.path, false)],
            FileChange::Rename { from, to, .. } => vec![(from, true), (to, true)],
            FileChange::Remove { path, .. } => vec![(path, true)],
        }
    }
}

/// The permission bits that a client may set: never set-user-id and set-group-id.
pub const FILE_MODE_BITS: u32 = 0o1777;

/// A reason why a file cannot be accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileError {
    /// There is none of that name.
    NotFound,
    /// It is a directory where a file is needed.
    IsDirectory,
    /// It, or a name on the way to it, is no directory.
    NotDirectory,
    /// It is a pipe, a socket or a device.
    NotRegular,
    /// Its permission bits refuse the kernel's user.
    Permission,
    /// It exceeds what the workspace may hold.
    TooLarge,
    /// The path leads out of the workspace.
    Outside,
    /// There is one of that name.
    Exists,
    /// The directory is not empty.
    NotEmpty,
    /// It is in a mount of a host path.
    Mount,
}

impl FileError {
    /// Every reason.
    pub const ALL: [FileError; 10] = [
        FileError::NotFound,
        FileError::IsDirectory,
        FileError::NotDirectory,
        FileError::NotRegular,
        FileError::Permission,
        FileError::TooLarge,
        FileError::Outside,
        FileError::Exists,
        FileError::NotEmpty,
        FileError::Mount,
    ];

    /// The reason's name, for programs.
    pub const fn reason(self) -> &'static str {
        match self {
            FileError::NotFound => "not_found",
            FileError::IsDirectory => "is_directory",
            FileError::NotDirectory => "not_directory",
            FileError::NotRegular => "not_regular",
            FileError::Permission => "permission",
            FileError::TooLarge => "too_large",
            FileError::Outside => "outside",
            FileError::Exists => "exists",
            FileError::NotEmpty => "not_empty",
            FileError::Mount => "mount",
        }
    }

    /// The reason with this name.
    pub fn from_reason(reason: &str) -> Option<FileError> {
        FileError::ALL.into_iter().find(|error| error.reason() == reason)
    }

    /// The error for a path.
    pub fn on(self, path: &str) -> Error {
        let (code, what, hint) = match self {
            FileError::NotFound => (ErrorCode::NotFound, "does not exist", ""),
            FileError::IsDirectory => (ErrorCode::Conflict, "is a directory", ""),
            FileError::NotDirectory => (ErrorCode::Conflict, "is not a directory, or leads through something else", ""),
            FileError::NotRegular => (ErrorCode::Conflict, "is a pipe, a socket or a device", ""),
            FileError::Permission => {
                (ErrorCode::Refused, "is closed to the kernel's user", "change its mode inside the kernel: chmod")
            }
            FileError::TooLarge => (
                ErrorCode::Refused,
                "is larger than the workspace may be",
                "give it a larger workspace: ryokan update NAME --workspace SIZE",
            ),
            FileError::Outside => (
                ErrorCode::Refused,
                "is outside of /workspace",
                "name a path in /workspace without `..`; links that are absolute or lead out are not followed",
            ),
            FileError::Exists => (ErrorCode::AlreadyExists, "exists already", ""),
            FileError::NotEmpty => (ErrorCode::Conflict, "is a directory with content", "remove it recursively"),
            FileError::Mount => (ErrorCode::Refused, "is in a mount of the host", "use the path of the host"),
        };
        Error::new(code, format!("{path} {what}")).reason(self.reason()).hint(hint)
    }
}

/// The error of a path for which a disk or a quota has no room.
pub fn no_room(path: &str) -> Error {
    Error::busy(format!("no room to write {path}"))
        .reason(DISK_FULL)
        .hint("free space on the device or raise the quota, then try again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_in_workspace() {
        let names = |path: &str| FilePath::parse(path.as_bytes()).map(|path| path.shown());
        for (path, shown) in [
            ("/workspace", "/workspace"),
            ("/workspace/", "/workspace"),
            (".", "/workspace"),
            ("a/./b//c/", "/workspace/a/b/c"),
            ("/workspace/a", "/workspace/a"),
            ("workspace/a", "/workspace/workspace/a"),
        ] {
            assert_eq!(names(path).as_deref(), Ok(shown), "{path}");
        }
        for path in ["/", "/etc/passwd", "/workspaces/a", "..", "a/../b", "/workspace/../etc"] {
            assert_eq!(names(path).expect_err(path).reason, "outside", "{path}");
        }
        for path in ["", "a\0b", &"a".repeat(256), &"a/".repeat(2100)] {
            assert_eq!(names(path).expect_err("no path").code, ErrorCode::InvalidArgument);
        }
    }

    #[test]
    fn file_reasons_are_distinct() {
        let reasons: std::collections::BTreeSet<_> = FileError::ALL.iter().map(|error| error.on("x").reason).collect();
        assert_eq!(reasons.len(), FileError::ALL.len());
        assert!(FileError::ALL.iter().all(|error| FileError::from_reason(error.reason()) == Some(*error)));
    }

    #[test]
    fn received_paths_are_checked() {
        for path in ["/workspace", "a/b c", "workspace/a", "\u{fc}"] {
            let path = FilePath::parse(path.as_bytes()).expect("a path");
            let text = serde_json::to_string(&path).expect("JSON");
            assert_eq!(serde_json::from_str::<FilePath>(&text).expect("the same"), path);
        }
        for path in ["../x", "/etc/x", "", "a\0"] {
            let text = serde_json::to_string(path.as_bytes()).expect("JSON");
            assert!(serde_json::from_str::<FilePath>(&text).is_err(), "{path:?}");
        }
    }
}
