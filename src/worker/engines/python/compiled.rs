//! Compiles the driver once per interpreter: compiling takes Python longer than the rest of a
//! start. Runs in the daemon.
//!
//! The interpreter compiles it outside of any sandbox, so no kernel may be able to change the
//! interpreter: the resolved file and every parent folder must belong to root and be writable by
//! root alone. For a virtual environment that is its base interpreter. With any other interpreter
//! the engine starts from the sources. The result is cached as `python-driver-<key>` in the
//! daemon's cache folder. The key covers the sources and the interpreter's file, so upgrading
//! either compiles again. Format: the interpreter's magic number, then a marshalled dictionary from
//! module name to marshalled code. The bootstrap compares the number and compiles the sources if it
//! differs.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::DRIVER;

/// Reads the sources from standard input; writes the result to standard output.
const COMPILE: &str = include_str!("driver/compile.py");
/// Prefix of the cached files' names.
const PREFIX: &str = "python-driver-";
/// Size limit of a compiled driver, bytes.
const MOST_BYTES: u64 = 8 << 20;
/// Limit of cached files; more are leftovers of earlier versions.
const KEPT: usize = 8;

/// Returns the compiled driver of an interpreter, compiling it if necessary. Blocks: up to some
/// hundred milliseconds the first time.
///
/// # Errors
/// Why there is none. The engine then starts from the sources.
pub fn compiled(cache: &Path, interpreter: &Path) -> std::io::Result<PathBuf> {
    let interpreter = std::fs::canonicalize(interpreter)?;
    let path = cache.join(format!("{PREFIX}{}", key(&interpreter)?));
    if path.is_file() {
        return Ok(path);
    }
    check_untouched(&interpreter)?;
    let code = compile(&interpreter)?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(cache)?;
    forget_former(cache);
    // Written atomically: other processes may read it at any moment.
    let temporary = cache.join(format!(".{PREFIX}{}-{:?}", std::process::id(), std::thread::current().id()));
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| file.write_all(&code).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&temporary, &path));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&temporary);
        return Err(error);
    }
    Ok(path)
}

/// Reads a compiled driver.
///
/// # Errors
/// The file's errors, and for a file above the size limit.
pub fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut code = Vec::new();
    std::fs::File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut code)?;
    if code.len() as u64 > MOST_BYTES {
        return Err(std::io::Error::other("it is too large"));
    }
    Ok(code)
}

/// Checks that only root can have changed the file.
fn check_untouched(file: &Path) -> std::io::Result<()> {
    for path in file.ancestors() {
        let meta = path.symlink_metadata()?;
        // In a sticky folder a user cannot replace files of others.
        let others_write = meta.mode() & 0o022 != 0 && !(meta.is_dir() && meta.mode() & 0o1000 != 0);
        if meta.uid() != 0 || others_write || meta.is_symlink() {
            let why = format!("{} may be changed by others than root", path.display());
            return Err(std::io::Error::other(why));
        }
    }
    Ok(())
}

fn key(interpreter: &Path) -> std::io::Result<String> {
    let meta = interpreter.metadata()?;
    let mut hash = blake3::Hasher::new();
    hash.update(DRIVER.as_bytes()).update(COMPILE.as_bytes());
    hash.update(interpreter.as_os_str().as_encoded_bytes());
    for number in [meta.ino() as i64, meta.size() as i64, meta.mtime(), meta.mtime_nsec()] {
        hash.update(&number.to_le_bytes());
    }
    Ok(hash.finalize().to_hex()[..32].to_owned())
}

fn compile(interpreter: &Path) -> std::io::Result<Vec<u8>> {
    let mut command = Command::new(interpreter);
    command.args(["-I", "-S", "-c", COMPILE]).env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    crate::sys::process::end_with_parent(&mut command);
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A process that does not read exits, and its status reports that.
        let _ = stdin.write_all(DRIVER.as_bytes());
    }
    let output = child.wait_with_output()?;
    if !output.status.success() || output.stdout.is_empty() || output.stdout.len() as u64 > MOST_BYTES {
        return Err(std::io::Error::other(format!("{} does not compile the driver", interpreter.display())));
    }
    Ok(output.stdout)
}

fn forget_former(cache: &Path) {
    let found: Vec<PathBuf> = std::fs::read_dir(cache)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().trim_start_matches('.').starts_with(PREFIX))
        .map(|entry| entry.path())
        .collect();
    if found.len() >= KEPT {
        // They are compiled again when needed.
        found.iter().for_each(|path| drop(std::fs::remove_file(path)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PYTHON: &str = "/usr/bin/python3";

    #[test]
    fn python_driver_compiles_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = folder.path().join("cache");
        let path = compiled(&cache, Path::new(PYTHON)).expect("compiled");
        let code = read(&path).expect("read");
        assert!(code.len() > 10_000);
        std::fs::write(&path, "kept as it is").expect("written");
        assert_eq!(compiled(&cache, Path::new(PYTHON)).expect("there"), path);
        assert_eq!(read(&path).expect("read"), b"kept as it is");
        std::fs::remove_file(&path).expect("removed");
        compiled(&cache, Path::new(PYTHON)).expect("compiled");
        assert_eq!(read(&path).expect("read"), code);
        assert_eq!(std::fs::read_dir(&cache).expect("a folder").count(), 1, "nothing else is left");
    }

    /// It would run outside of the sandbox, so a kernel must not be able to write it.
    #[test]
    fn writable_interpreter_is_never_run() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().expect("a folder");
        let (program, ran) = (folder.path().join("python3"), folder.path().join("ran"));
        std::fs::write(&program, format!("#!/bin/sh\ntouch {}\necho code\n", ran.display())).expect("written");
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).expect("changed");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("changed");
        let link = folder.path().join("linked");
        std::os::unix::fs::symlink(&program, &link).expect("linked");
        for interpreter in [&program, &link] {
            let refused = compiled(&folder.path().join("cache"), interpreter).expect_err("refused");
            assert!(refused.to_string().contains("others than root"), "{refused}");
        }
        assert!(!ran.exists());
    }

    #[test]
    fn non_python_program_is_error() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(compiled(folder.path(), Path::new("/bin/false")).is_err());
        assert!(compiled(folder.path(), Path::new("/nowhere/python3")).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }
}
