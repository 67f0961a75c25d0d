//! Unnamed files: what bash reads and writes by descriptor, in memory.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;

use nix::fcntl::OFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Where one can be where memory files are closed, because nothing would count them.
const FOLDERS: [&str; 3] = ["/tmp", "/dev/shm", "."];

/// An unnamed file with this in it, to be read from its beginning by whoever opens it again.
///
/// # Errors
/// If there is room for none.
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

    /// As bash does it: opened again by its number.
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
