//! The identity of the machine: its boot id and its machine id, as code inside sees them.
//!
//! The guest's kernel never changes its boot id. So code inside sees a file in its place, which is rewritten when the
//! machine continues as a copy of another.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use crate::link::machine::{IDENTITY_FILES, IDENTITY_FOLDER};

/// Makes the files, or makes them anew; returns the boot id. The first boot id is the kernel's own, which it makes at the
/// first reading, from what was seeded.
pub(super) fn identify(renew: bool) -> io::Result<String> {
    let folder = Path::new(IDENTITY_FOLDER);
    // The engine's process, which is not root, mounts the files.
    match DirBuilder::new().mode(0o755).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let [boot_file, machine_file] = IDENTITY_FILES.map(|(name, _)| folder.join(name));
    if renew || !boot_file.exists() {
        let source = if renew { "uuid" } else { "boot_id" };
        let [boot_id, machine_id] = [source, "uuid"].map(random_id);
        write(&machine_file, &machine_id?.replace('-', ""))?;
        write(&boot_file, &boot_id?)?;
    }
    Ok(std::fs::read_to_string(boot_file)?.trim().to_owned())
}

fn random_id(name: &str) -> io::Result<String> {
    Ok(std::fs::read_to_string(Path::new("/proc/sys/kernel/random").join(name))?.trim().to_owned())
}

/// Writes a file in its place, where it is mounted: the length never changes.
fn write(path: &Path, id: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file: File = options.write(true).create(true).mode(0o444).truncate(false).open(path)?;
    file.write_all(format!("{id}\n").as_bytes())
}
