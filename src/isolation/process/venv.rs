//! Virtual environments of the host, as a kernel sees them.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::name::KernelName;
use crate::sandbox::{Unfound, find_program};

/// Largest `pyvenv.cfg`, bytes.
const SETTINGS_BYTES: u64 = 64 << 10;

/// The interpreter of a virtual environment.
pub(super) fn interpreter(venv: &Path) -> PathBuf {
    venv.join("bin/python")
}

/// Checks that a kernel that sees these host folders can run the environment's Python.
///
/// # Errors
/// `notFound` without such a folder; `invalidArgument` for another folder; `unsupported` for one whose Python is missing,
/// hidden, too old or of another version.
pub(super) fn check(venv: &Path, seen: &[PathBuf]) -> Result<()> {
    let shown = venv.display();
    let anew = format!("make it anew, which deletes all content of the folder: python3 -m venv --clear {shown}");
    let unsupported = |why: String| Error::unsupported(format!("virtual environment {shown}: {why}")).reason("venv");
    if !venv.is_dir() {
        return Err(Error::not_found(format!("there is no virtual environment {shown} on this host"))
            .reason("venv")
            .hint(format!("make one: python3 -m venv {shown}")));
    }
    let Some(settings) = read_settings(&venv.join("pyvenv.cfg")) else {
        return Err(Error::invalid(format!("{shown} is no virtual environment: it has no pyvenv.cfg"))
            .reason("venv")
            .hint(format!(
                "name the folder that `python3 -m venv` or `uv venv` made, or make one: python3 -m venv {shown}"
            )));
    };
    let python = interpreter(venv);
    match find_program(&python, seen) {
        Ok(_) => {}
        Err(Unfound::Absent) => {
            let target =
                std::fs::read_link(&python).map_or(String::new(), |to| format!(", a link to {}", to.display()));
            return Err(unsupported(format!("there is no interpreter bin/python{target}")).hint(anew));
        }
        Err(Unfound::Hidden) => {
            let real = python.canonicalize().unwrap_or(python);
            let whole = real.parent().and_then(Path::parent).unwrap_or(Path::new("/")).display();
            return Err(unsupported(format!("a kernel cannot see its interpreter {}", real.display()))
                .hint(format!("allow that Python, too: --allow-path {whole}:ro")));
        }
    }
    let Some(version) = version(&settings) else { return Ok(()) };
    if let Some(why) = EngineName::Python.too_old(&version) {
        return Err(unsupported(why).hint(anew));
    }
    // The base interpreter's name has its version, if a link to it was exchanged by an upgrade of the host.
    let real = python.canonicalize().unwrap_or_default();
    let name = real.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("python"));
    // Without suffixes of builds, as in python3.13t and python3.11-dbg.
    let digits = |part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>();
    let minor = |text: &str| text.split('.').take(2).map(digits).collect::<Vec<_>>();
    match name.filter(|name| name.contains('.')) {
        Some(now) if minor(now) != minor(&version) => {
            Err(unsupported(format!("it is of Python {version}, and its interpreter is now Python {now}")).hint(anew))
        }
        Some(_) | None => Ok(()),
    }
}

/// Explains why a worker did not start if it names the environment's interpreter.
pub(super) fn explained(venv: &Path, kernel: &KernelName, error: Error) -> Error {
    match error.message.contains(&*interpreter(venv).to_string_lossy()) {
        true => Error { message: format!("virtual environment {}: {}", venv.display(), error.message), ..error }
            .hint(format!("put it back, or use the host's Python: ryokan update {kernel} --venv none")),
        false => error,
    }
}

fn read_settings(path: &Path) -> Option<String> {
    let mut text = String::new();
    // Code of a kernel may have replaced the file: opening a pipe, or reading some files of /proc, would block the daemon.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).ok();
    let file = file.filter(|file| file.metadata().is_ok_and(|meta| meta.is_file()))?;
    file.take(SETTINGS_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The version of Python that an environment was made for: `venv` and `uv` name the key differently.
fn version(settings: &str) -> Option<String> {
    settings.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        let value = value.trim();
        let is_version = value.starts_with(|first: char| first.is_ascii_digit()) && value.len() < 40;
        (["version", "version_info"].contains(&key.trim()) && is_version).then(|| value.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;
    use crate::core::error::ErrorCode;

    fn made(settings: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let venv = folder.path().join("venv");
        fs::create_dir_all(venv.join("bin")).expect("made");
        fs::write(venv.join("pyvenv.cfg"), settings).expect("written");
        (folder, venv)
    }

    fn checked(venv: &Path) -> std::result::Result<(), (ErrorCode, String)> {
        check(venv, &[venv.to_owned()]).map_err(|error| (error.code, format!("{} {}", error.message, error.hint)))
    }

    #[test]
    fn pipe_blocks_nothing() {
        let (_folder, venv) = made("");
        let settings = venv.join("pyvenv.cfg");
        fs::remove_file(&settings).expect("removed");
        nix::unistd::mkfifo(&settings, nix::sys::stat::Mode::S_IRWXU).expect("made");
        assert!(checked(&venv).is_err_and(|(code, _)| code == ErrorCode::InvalidArgument));
    }

    #[test]
    fn wrong_venv_is_explained() {
        let (folder, venv) = made("home = /usr/bin\nversion = 3.11.2\n");
        let python = venv.join("bin/python");
        let refused = |venv: &Path, code, what: &str| {
            let (found, text) = checked(venv).expect_err("refused");
            assert!(found == code && text.contains(what) && text.contains("python3 -m venv"), "{found:?} {text}");
        };
        refused(&folder.path().join("none"), ErrorCode::NotFound, "no virtual environment");
        refused(&venv.join("bin"), ErrorCode::InvalidArgument, "no pyvenv.cfg");
        refused(&venv, ErrorCode::Unsupported, "no interpreter");
        symlink("/opt/homebrew/bin/python3.11", &python).expect("linked");
        refused(&venv, ErrorCode::Unsupported, "a link to /opt/homebrew");
        fs::remove_file(&python).expect("removed");
        symlink("/usr/bin/env", &python).expect("linked");
        assert_eq!(checked(&venv), Ok(()));
        fs::write(venv.join("pyvenv.cfg"), "version_info = 3.7.1\n").expect("written");
        refused(&venv, ErrorCode::Unsupported, "3.7");
    }

    #[test]
    fn other_interpreter_is_explained() {
        let (folder, venv) = made("version = 3.11.2\n");
        let base = folder.path().join("base/bin/python3.12");
        fs::create_dir_all(base.parent().expect("a folder")).expect("made");
        fs::write(&base, "").expect("written");
        fs::set_permissions(&base, fs::Permissions::from_mode(0o755)).expect("set");
        symlink(&base, venv.join("bin/python")).expect("linked");
        let (code, text) = checked(&venv).expect_err("hidden");
        let whole = folder.path().join("base");
        assert_eq!(code, ErrorCode::Unsupported);
        assert!(
            text.contains("cannot see") && text.contains(&format!("--allow-path {}:ro", whole.display())),
            "{text}"
        );
        let both = check(&venv, &[venv.clone(), whole]).expect_err("of another version");
        assert!(both.message.contains("of Python 3.11.2") && both.message.contains("now Python 3.12"), "{both}");
    }
}
