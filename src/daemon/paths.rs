//! The paths of one daemon: sockets, configuration, data.
//!
//! [`Paths::resolve`] is pure: environment and file system are passed in as functions, so the same
//! rules serve the daemon, the command line and the tests. It creates nothing; [`Paths::prepare`]
//! does, once, at the daemon's start.
//!
//! | | per user | system-wide |
//! |---|---|---|
//! | runtime | `$XDG_RUNTIME_DIR/ryokan`, else `/run/user/<uid>/ryokan` | `/run/ryokan` |
//! | configuration | `$XDG_CONFIG_HOME/ryokan`, else `~/.config/ryokan` | `/etc/ryokan` |
//! | data | `$XDG_DATA_HOME/ryokan`, else `~/.local/share/ryokan` | `/var/lib/ryokan` |

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::core::ids::{KernelId, WorkerId};
use crate::core::limits;
use crate::core::name::KernelName;

/// The scope of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One user's daemon.
    User,
    /// The host's daemon (`--system`): every user may connect; the peer's uid decides what is
    /// visible.
    System,
}

/// The properties of a directory that [`Paths::resolve`] needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirStat {
    /// The owner.
    pub uid: u32,
    /// The permission bits (`st_mode & 0o7777`).
    pub mode: u32,
    /// Whether the path is a directory, not a link to one.
    pub is_dir: bool,
}

impl DirStat {
    /// Reads the properties without following a final link; `None` if the path does not exist.
    pub fn of(path: &Path) -> Option<DirStat> {
        let meta = std::fs::symlink_metadata(path).ok()?;
        Some(DirStat { uid: meta.uid(), mode: meta.mode() & 0o7777, is_dir: meta.is_dir() })
    }
}

/// Why there are no usable paths.
#[derive(Debug, thiserror::Error)]
pub enum PathsError {
    /// No runtime directory could be found.
    #[error(
        "XDG_RUNTIME_DIR is not set and {fallback:?} {why}: set XDG_RUNTIME_DIR to a directory of mode 0700 of your own, for example with `export XDG_RUNTIME_DIR=/run/user/{uid}` after `loginctl enable-linger`"
    )]
    NoRuntimeDir {
        /// The path tried instead.
        fallback: PathBuf,
        /// The path's defect.
        why: &'static str,
        /// The user.
        uid: u32,
    },
    /// The given runtime directory cannot be trusted.
    #[error("{source_of} {path:?} {why}: {hint}")]
    UnsafeDir {
        /// The origin of the path, for example `XDG_RUNTIME_DIR`.
        source_of: &'static str,
        /// The directory.
        path: PathBuf,
        /// The directory's defect.
        why: String,
        /// The remedy.
        hint: String,
    },
    /// No home directory to derive defaults from.
    #[error("HOME is not set to an absolute path: set HOME, or both XDG_CONFIG_HOME and XDG_DATA_HOME")]
    NoHome,
    /// Sockets under this directory could not be addressed.
    #[error("runtime directory {path:?} is too long: a kernel's socket under it would need {need} bytes, {max} are possible; set XDG_RUNTIME_DIR to a shorter path", max = limits::SOCKET_PATH_BYTES)]
    TooLong {
        /// The directory.
        path: PathBuf,
        /// Bytes of the longest socket path.
        need: usize,
    },
    /// A directory could not be created.
    #[error("could not create directory {path:?}")]
    Create {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The paths of one daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    mode: Mode,
    runtime: PathBuf,
    config: PathBuf,
    data: PathBuf,
}

impl Paths {
    /// Resolves the paths for `uid`. `env` reads an environment variable, `stat` describes a
    /// directory.
    ///
    /// Relative and empty XDG variables count as unset, as the XDG base directory specification says.
    ///
    /// # Errors
    /// If there is no runtime directory that only `uid` can write to, or no home directory to derive the others from.
    pub fn resolve(
        env: impl Fn(&str) -> Option<OsString>,
        uid: u32,
        mode: Mode,
        stat: impl Fn(&Path) -> Option<DirStat>,
    ) -> Result<Paths, PathsError> {
        let paths = match mode {
            Mode::System => Paths {
                mode,
                runtime: PathBuf::from("/run/ryokan"),
                config: PathBuf::from("/etc/ryokan"),
                data: PathBuf::from("/var/lib/ryokan"),
            },
            Mode::User => {
                let absolute = |name: &str| env(name).map(PathBuf::from).filter(|path| path.is_absolute());
                let under_home = |part: &str| absolute("HOME").map(|home| home.join(part)).ok_or(PathsError::NoHome);
                let base = |name: &str, part: &str| absolute(name).map_or_else(|| under_home(part), Ok);
                Paths {
                    mode,
                    runtime: runtime_of(absolute("XDG_RUNTIME_DIR"), uid, &stat)?,
                    config: base("XDG_CONFIG_HOME", ".config")?.join("ryokan"),
                    data: base("XDG_DATA_HOME", ".local/share")?.join("ryokan"),
                }
            }
        };
        paths.check_socket_length()?;
        if let Some(found) = stat(&paths.runtime) {
            // In system mode a client is not the owner; /run belongs to root, so only root could
            // have created the directory.
            let owner = if mode == Mode::User { Some(uid) } else { None };
            trusted(found, owner).map_err(|why| PathsError::UnsafeDir {
                source_of: "runtime directory",
                path: paths.runtime.clone(),
                why,
                hint: "remove it, or give it to the daemon's user with mode 0700 (0755 system-wide)".into(),
            })?;
        }
        Ok(paths)
    }

    /// [`Paths::resolve`] with this process's environment and file system.
    ///
    /// # Errors
    /// As [`Paths::resolve`].
    pub fn of_process(mode: Mode) -> Result<Paths, PathsError> {
        Self::resolve(|name| std::env::var_os(name), nix::unistd::geteuid().as_raw(), mode, DirStat::of)
    }

    fn check_socket_length(&self) -> Result<(), PathsError> {
        let longest = limits::NAME_BYTES + ".sock".len();
        let need = self.kernels_runtime().as_os_str().len() + 1 + longest;
        if need > limits::SOCKET_PATH_BYTES {
            return Err(PathsError::TooLong { path: self.runtime.clone(), need });
        }
        Ok(())
    }

    /// Creates missing directories with the right mode, and checks again that the runtime
    /// directories belong to `uid`.
    ///
    /// # Errors
    /// The first directory that cannot be created or is writable by other users.
    pub fn prepare(&self, uid: u32) -> Result<(), PathsError> {
        let open = self.runtime_dir_mode();
        let runtime = [(self.runtime.clone(), open), (self.kernels_runtime(), open), (self.workers_runtime(), 0o700)];
        for (path, mode) in &runtime {
            create(path, *mode)?;
            let untrusted = |why| PathsError::UnsafeDir {
                source_of: "runtime directory",
                path: path.clone(),
                why,
                hint: "remove it and start the daemon again".into(),
            };
            let found = DirStat::of(path).ok_or_else(|| untrusted("vanished".into()))?;
            trusted(found, Some(uid)).map_err(untrusted)?;
        }
        for path in [self.data.clone(), self.data.join("kernels"), self.store(), self.images(), self.templates()] {
            create(&path, 0o700)?;
        }
        Ok(())
    }

    /// The daemon's scope.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The directory of everything that ends with the host's uptime.
    pub fn runtime_dir(&self) -> &Path {
        &self.runtime
    }

    /// Mode of the parent directories of client sockets.
    pub fn runtime_dir_mode(&self) -> u32 {
        match self.mode {
            Mode::User => 0o700,
            Mode::System => 0o755,
        }
    }

    /// Mode of client sockets. Workers' sockets are always 0600.
    pub fn socket_mode(&self) -> u32 {
        match self.mode {
            Mode::User => 0o600,
            Mode::System => 0o666,
        }
    }

    /// The socket that serves metrics to the daemon's user.
    pub fn metrics_socket(&self) -> PathBuf {
        self.runtime.join("metrics.sock")
    }

    /// The daemon's own socket.
    pub fn control_socket(&self) -> PathBuf {
        self.runtime.join("ryokand.sock")
    }

    /// The directory of the kernels' sockets.
    pub fn kernels_runtime(&self) -> PathBuf {
        self.runtime.join("kernels")
    }

    /// The socket whose bootstrap is that kernel.
    pub fn kernel_socket(&self, name: &KernelName) -> PathBuf {
        self.kernels_runtime().join(format!("{name}.sock"))
    }

    /// The directory of the command line's sockets that lead to ports of kernels.
    pub fn ports_runtime(&self) -> PathBuf {
        self.runtime.join("ports")
    }

    /// The directory of the workers' private sockets.
    pub fn workers_runtime(&self) -> PathBuf {
        self.runtime.join("workers")
    }

    /// The private socket of one worker's init.
    pub fn worker_socket(&self, worker: WorkerId) -> PathBuf {
        self.workers_runtime().join(format!("{worker}.sock"))
    }

    /// The configuration file, which need not exist.
    pub fn config_file(&self) -> PathBuf {
        self.config.join("config.toml")
    }

    /// The directory of all persistent data.
    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    /// The host's catalog.
    pub fn catalog(&self) -> PathBuf {
        self.data.join("catalog.db")
    }

    /// The directory of one kernel's files.
    pub fn kernel_dir(&self, kernel: KernelId) -> PathBuf {
        self.data.join("kernels").join(kernel.to_string())
    }

    /// One kernel's journal and lease.
    pub fn state_db(&self, kernel: KernelId) -> PathBuf {
        self.kernel_dir(kernel).join("state.db")
    }

    /// One kernel's engine state.
    pub fn engine_db(&self, kernel: KernelId) -> PathBuf {
        self.kernel_dir(kernel).join("engine.db")
    }

    /// The content-addressed store.
    pub fn store(&self) -> PathBuf {
        self.data.join("store")
    }

    /// Images.
    pub fn images(&self) -> PathBuf {
        self.data.join("images")
    }

    /// Templates.
    pub fn templates(&self) -> PathBuf {
        self.data.join("templates")
    }

    /// ryokan's own directories, which are never available to kernels.
    pub fn own_dirs(&self) -> [&Path; 3] {
        [&self.runtime, &self.config, &self.data]
    }
}

/// The daemon's directory in the user's runtime directory. Without one, as in containers, a private
/// directory in `/tmp`, where other users can take its name but not replace it.
fn runtime_of(
    named: Option<PathBuf>,
    uid: u32,
    stat: &impl Fn(&Path) -> Option<DirStat>,
) -> Result<PathBuf, PathsError> {
    let Some(path) = named else {
        let fallback = PathBuf::from(format!("/run/user/{uid}"));
        return match stat(&fallback).map(|found| trusted(found, Some(uid))) {
            Some(Ok(())) => Ok(fallback.join("ryokan")),
            Some(Err(_)) => Err(PathsError::NoRuntimeDir { fallback, why: "cannot be trusted", uid }),
            None => private_in_tmp(uid, stat),
        };
    };
    let refused = |why: String| PathsError::UnsafeDir {
        source_of: "XDG_RUNTIME_DIR",
        path: path.clone(),
        why,
        hint: "set XDG_RUNTIME_DIR to a directory of your own with mode 0700, or use --system".into(),
    };
    match stat(&path) {
        None => Err(refused("does not exist".into())),
        Some(found) => match trusted(found, Some(uid)) {
            Ok(()) => Ok(path.join("ryokan")),
            Err(why) => Err(refused(why)),
        },
    }
}

fn private_in_tmp(uid: u32, stat: &impl Fn(&Path) -> Option<DirStat>) -> Result<PathBuf, PathsError> {
    let path = PathBuf::from(format!("/tmp/ryokan-{uid}"));
    let refused = |path: &Path, why: String| PathsError::UnsafeDir {
        source_of: "XDG_RUNTIME_DIR is not set, and the directory in its place",
        path: path.to_owned(),
        why,
        hint: "set XDG_RUNTIME_DIR to a directory of your own with mode 0700".into(),
    };
    let parent = Path::new("/tmp");
    let is_sticky = |found: DirStat| found.is_dir && found.uid == 0 && found.mode & 0o1000 != 0;
    if !stat(parent).is_some_and(is_sticky) {
        return Err(refused(parent, "is no directory of root with the sticky bit".into()));
    }
    match stat(&path) {
        None => Ok(path),
        Some(found) => match trusted(found, Some(uid)) {
            Ok(()) if found.mode & 0o077 == 0 => Ok(path),
            Ok(()) => Err(refused(&path, format!("is open to others (mode {:04o})", found.mode))),
            Err(why) => Err(refused(&path, why)),
        },
    }
}

fn trusted(found: DirStat, owner: Option<u32>) -> Result<(), String> {
    if !found.is_dir {
        return Err("is not a directory".into());
    }
    if let Some(uid) = owner.filter(|uid| *uid != found.uid) {
        return Err(format!("belongs to uid {}, not to uid {uid}", found.uid));
    }
    if found.mode & 0o022 != 0 {
        return Err(format!("can be written to by others (mode {:04o})", found.mode));
    }
    Ok(())
}

/// Creates `path` with exactly `mode`, regardless of the umask, and its parents as usual.
///
/// Leaves an existing directory unchanged.
fn create(path: &Path, mode: u32) -> Result<(), PathsError> {
    let failed = |source| PathsError::Create { path: path.to_owned(), source };
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    match std::fs::DirBuilder::new().mode(mode).create(path) {
        Ok(()) => {
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(path, permissions).map_err(failed)
        }
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(failed(e)),
    }
}

#[cfg(test)]
mod tests;
