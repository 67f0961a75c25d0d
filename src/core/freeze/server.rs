//! A PostgreSQL server that is captured as a whole: what was captured, and what its programs answer.

use serde::{Deserialize, Serialize};

use super::SchemaRevision;
use crate::core::ids::Digest;

/// Oldest version whose backups are supported: `pg_backup_start`.
pub const OLDEST: u32 = 15;

/// What was captured of a PostgreSQL server: its data directory, with the log that makes it one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerPart {
    /// The tree of the data directory; `None`: there was none. Only before a restore.
    pub tree: Option<Digest>,
    /// Number of entries.
    pub entries: u64,
    /// The server's user.
    pub uid: u32,
    /// The data directory's group.
    pub gid: u32,
    /// Whether new files in the data directory are overwritten in place: the attribute No_COW of Btrfs.
    pub no_cow: bool,
    /// The identifier that the cluster got when it was made.
    pub system: String,
    /// Definitions of all databases, read from a started copy; `None`: a copy could not be started. Only before a restore.
    pub revision: Option<SchemaRevision>,
}

/// What a server reports before a backup.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ServerFacts {
    /// `server_version_num`.
    pub version: u32,
    /// Its data directory.
    pub data: String,
    /// Whether it follows another server.
    pub recovery: bool,
    /// Number of tablespaces outside of the data directory.
    pub tablespaces: u64,
    /// [`ServerPart::system`].
    pub system: String,
}

/// What `pg_backup_stop` returns.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct BackupEnd {
    /// The content of `backup_label`.
    pub label: String,
    /// The last segment of the log that the backup needs.
    pub segment: String,
}

/// A segment of the log by its file's name: 24 hexadecimal digits.
pub fn is_segment(name: &str) -> bool {
    name.len() == 24 && name.bytes().all(|byte| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte))
}

impl BackupEnd {
    /// The first segment of the log that the backup needs.
    pub fn first_segment(&self) -> Option<&str> {
        let line = self.label.lines().find_map(|line| line.strip_prefix("START WAL LOCATION: "))?;
        let name = line.split_once("(file ")?.1.strip_suffix(')')?;
        is_segment(name).then_some(name)
    }

    /// Whether the backup needs a file of the log.
    pub fn needs(&self, name: &str) -> bool {
        // Names of one timeline sort like their positions.
        is_segment(name) && self.first_segment().is_some_and(|first| *first <= *name) && *name <= *self.segment
    }
}

/// A value of what `pg_controldata` prints.
pub fn control_value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backup_names_its_segments() {
        let label = "START WAL LOCATION: 0/2000028 (file 0000000100000000000000FE)\nCHECKPOINT LOCATION: 0/2000060\n";
        let end = BackupEnd { label: label.into(), segment: "000000010000000100000000".into() };
        assert_eq!(end.first_segment(), Some("0000000100000000000000FE"));
        for (name, needed) in [
            ("0000000100000000000000FD", false),
            ("0000000100000000000000FE", true),
            ("0000000100000000000000FF", true),
            ("000000010000000100000000", true),
            ("000000010000000100000001", false),
            ("000000020000000000000001", false),
            ("archive_status", false),
            ("00000002.history", false),
        ] {
            assert_eq!(end.needs(name), needed, "{name}");
        }
        let without = BackupEnd { label: "LABEL: x\n".into(), ..end };
        assert!(without.first_segment().is_none() && !without.needs("0000000100000000000000FF"));
    }

    #[test]
    fn control_data_is_read() {
        let text = "Database system identifier:           77\nmax_prepared_xacts setting:           5\n";
        assert_eq!(control_value(text, "max_prepared_xacts setting"), Some("5"));
        assert_eq!(control_value(text, "Database system identifier"), Some("77"));
        assert_eq!(control_value(text, "wal_level setting"), None);
    }
}
