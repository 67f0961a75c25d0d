//! File systems in images, for tests of their differences.
//!
//! Needs root. Unmounted by the drop, also after a panic.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A mounted image.
pub struct Mounted(tempfile::TempDir);

impl Mounted {
    /// Makes and mounts an image, or returns the reason why this host cannot.
    pub fn new(kind: &str) -> Result<Mounted, String> {
        if !nix::unistd::Uid::effective().is_root() {
            return Err("only root may mount".into());
        }
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let (image, at) = (dir.path().join("image"), dir.path().join("mounted"));
        std::fs::File::create(&image).and_then(|file| file.set_len(1 << 30)).map_err(|error| error.to_string())?;
        std::fs::create_dir(&at).map_err(|error| error.to_string())?;
        let run = |program: &str, arguments: &[&str], paths: &[&Path]| {
            let output = Command::new(program).args(arguments).args(paths).stdin(Stdio::null()).output();
            match output {
                Ok(output) if output.status.success() => Ok(()),
                Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
                Err(error) => Err(format!("{program}: {error}")),
            }
        };
        run(&format!("mkfs.{kind}"), &["-q"], &[&image])?;
        run("mount", &["-o", "loop", "-t", kind], &[&image, &at])?;
        // Other users may pass through.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(dir.path(), open).map_err(|error| error.to_string())?;
        Ok(Mounted(dir))
    }

    /// The mount point.
    pub fn path(&self) -> PathBuf {
        self.0.path().join("mounted")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        for _ in 0..50 {
            let unmount = Command::new("umount").arg(self.path()).stderr(Stdio::null()).status();
            if unmount.is_ok_and(|status| status.success()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}
