//! Passes a driver's source text to its interpreter as an unnamed file.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::core::error::{Error, Result};

/// The file: length of the compiled driver (8 bytes, little-endian; 0: none), the compiled driver,
/// and the sources by name as one JSON object.
///
/// # Errors
/// `Internal` if memory is short.
pub(super) fn held(compiled: &[u8], sources: &str) -> Result<OwnedFd> {
    let write = || -> std::io::Result<OwnedFd> {
        let mut file = File::from(memfd_create(c"ryokan-driver", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(&(compiled.len() as u64).to_le_bytes())?;
        file.write_all(compiled)?;
        file.write_all(sources.as_bytes())?;
        file.rewind()?;
        Ok(file.into())
    };
    write().map_err(|error| Error::internal(format!("cannot hold an engine's driver in memory: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_file_reads_from_start() {
        let mut bytes = Vec::new();
        let mut file = File::from(held(b"code", "{}").expect("a file"));
        std::io::Read::read_to_end(&mut file, &mut bytes).expect("readable");
        assert_eq!(bytes, [&4u64.to_le_bytes()[..], b"code", b"{}"].concat());
    }
}
