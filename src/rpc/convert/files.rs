//! Files: paths, attributes.

use super::text::{read_data, unknown};
use crate::core::error::{Error, Result};
use crate::core::files::{FileAttributes, FileEvent, FileEventKind, FileInfo, FileKind, FilePath};
use crate::core::limits;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads a path.
///
/// # Errors
/// As [`FilePath::parse`].
pub fn read_path(reader: capnp::Result<capnp::data::Reader<'_>>) -> Result<FilePath> {
    FilePath::parse(&read_data(reader, "path", limits::FILE_PATH_BYTES)?)
}

/// Reads attributes to set.
///
/// # Errors
/// `invalidArgument` for a mode that no file has.
pub fn read_attributes(reader: wire::file_attributes::Reader<'_>) -> Result<FileAttributes> {
    let mode = match reader.get_mode() {
        -1 => None,
        mode => match u32::try_from(mode) {
            Ok(mode) if mode <= 0o7777 => Some(mode),
            Ok(_) | Err(_) => return Err(Error::invalid(format!("{mode} is no mode of a file"))),
        },
    };
    Ok(FileAttributes { mode, modified_ns: reader.get_set_modified().then(|| reader.get_modified_ns()) })
}

/// Writes attributes to set.
pub fn write_attributes(mut builder: wire::file_attributes::Builder<'_>, attributes: FileAttributes) {
    builder.set_mode(attributes.mode.and_then(|mode| i32::try_from(mode).ok()).unwrap_or(-1));
    builder.set_set_modified(attributes.modified_ns.is_some());
    builder.set_modified_ns(attributes.modified_ns.unwrap_or_default());
}

/// Reads the attributes of a file.
///
/// # Errors
/// `invalidArgument`.
pub fn read_file_info(reader: wire::file_info::Reader<'_>) -> Result<FileInfo> {
    let kind = match reader.get_kind().map_err(|number| unknown("kind of a file", number))? {
        wire::FileKind::File => FileKind::File,
        wire::FileKind::Directory => FileKind::Directory,
        wire::FileKind::Symlink => FileKind::Symlink,
        wire::FileKind::Other => FileKind::Other,
    };
    let name = read_data(reader.get_name(), "name of a file", limits::FILE_NAME_BYTES)?;
    // The names of a listing become names on the client's disk.
    if name.contains(&b'/') || name.contains(&0) || name == b"." || name == b".." {
        return Err(Error::invalid("the name of a file is not one name"));
    }
    Ok(FileInfo {
        name,
        kind,
        bytes: reader.get_bytes(),
        mode: reader.get_mode(),
        modified_ns: reader.get_modified_ns(),
        target: read_data(reader.get_target(), "target of a link", limits::LINK_TARGET_BYTES)?,
    })
}

/// Writes the attributes of a file.
pub fn write_file_info(mut builder: wire::file_info::Builder<'_>, info: &FileInfo) {
    builder.set_name(&info.name);
    builder.set_kind(match info.kind {
        FileKind::File => wire::FileKind::File,
        FileKind::Directory => wire::FileKind::Directory,
        FileKind::Symlink => wire::FileKind::Symlink,
        FileKind::Other => wire::FileKind::Other,
    });
    builder.set_bytes(info.bytes);
    builder.set_mode(info.mode);
    builder.set_modified_ns(info.modified_ns);
    builder.set_target(&info.target);
}

/// Reads an event of a watched directory.
///
/// # Errors
/// `invalidArgument`.
pub fn read_file_event(reader: wire::file_event::Reader<'_>) -> Result<FileEvent> {
    let kind = match reader.get_kind().map_err(|number| unknown("kind of an event", number))? {
        wire::FileEventKind::Ready => FileEventKind::Ready,
        wire::FileEventKind::Created => FileEventKind::Created,
        wire::FileEventKind::Written => FileEventKind::Written,
        wire::FileEventKind::Closed => FileEventKind::Closed,
        wire::FileEventKind::Changed => FileEventKind::Changed,
        wire::FileEventKind::Removed => FileEventKind::Removed,
        wire::FileEventKind::Overflow => FileEventKind::Overflow,
        wire::FileEventKind::Ended => FileEventKind::Ended,
    };
    Ok(FileEvent { kind, path: read_data(reader.get_path(), "path", limits::FILE_PATH_BYTES)? })
}

/// Writes an event of a watched directory.
pub fn write_file_event(mut builder: wire::file_event::Builder<'_>, event: &FileEvent) {
    builder.set_kind(match event.kind {
        FileEventKind::Ready => wire::FileEventKind::Ready,
        FileEventKind::Created => wire::FileEventKind::Created,
        FileEventKind::Written => wire::FileEventKind::Written,
        FileEventKind::Closed => wire::FileEventKind::Closed,
        FileEventKind::Changed => wire::FileEventKind::Changed,
        FileEventKind::Removed => wire::FileEventKind::Removed,
        FileEventKind::Overflow => wire::FileEventKind::Overflow,
        FileEventKind::Ended => wire::FileEventKind::Ended,
    });
    builder.set_path(&event.path);
}
