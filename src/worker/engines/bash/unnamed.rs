//! Unnamed files in memory for bash to read and write by descriptor.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;

use nix::fcntl::OFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Folder to use where memory files are forbidden, because no limit counts them.
const FOLDERS: [&str; 3] = ["/tmp", "/dev/shm", "."];

/// An unnamed file with this content, readable from its start by reopening it.
///
/// # Errors
/// If there is no room.
pub fn unnamed(text: &[u8]) -> io::Result<File> {
    let mut file = match memfd_create(c"ryokan-bash", MFdFlags::MFD_CLOEXEC) {
        Ok(memory) => File::from(memory),
        Err(error) => FOLDERS.iter().find_map(|folder| in_folder(folder).ok()).ok_or(io::Error::from(error))?,
    };
    file.write_all(text)?;
    Ok(file)
}

fn in_folder(folder: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(OFlag::O_TMPFILE.bits()).open(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::fd::AsRawFd as _;

    /// Reopened by number, as bash does.
    #[test]
    fn unnamed_file_fallback() {
        for made in [unnamed(b"text"), in_folder("/tmp").and_then(|mut file| file.write_all(b"text").map(|()| file))] {
            let file = made.expect("made");
            let mut again = String::new();
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            File::open(&path).expect("opens").read_to_string(&mut again).expect("reads");
            assert_eq!(again, "text");
            OpenOptions::new().append(true).open(&path).expect("opens").write_all(b"more").expect("writes");
            assert_eq!(file.metadata().expect("there").len(), 8);
        }
    }
}
