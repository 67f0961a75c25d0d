//! What an operation on groups concerns. Operations that concern the same run one after the other.

use std::path::PathBuf;

use crate::core::ids::{GroupId, KernelId};

/// One thing that an operation reads or changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Concern {
    /// A group's records.
    Group(GroupId),
    /// A kernel.
    Kernel(KernelId),
    /// A file or a directory with everything in it.
    Path(PathBuf),
    /// A data source of the configuration.
    Source(String),
    /// A PostgreSQL database, by its name alone: one server has many names.
    Postgres(String),
    /// A PostgreSQL server, with every database that it may have.
    Server(String),
}

impl Concern {
    /// Whether two operations must not overlap because of these.
    pub fn conflicts(&self, other: &Concern) -> bool {
        match (self, other) {
            (Concern::Path(one), Concern::Path(other)) => one.starts_with(other) || other.starts_with(one),
            (Concern::Server(_), Concern::Postgres(_)) | (Concern::Postgres(_), Concern::Server(_)) => true,
            (one, other) => one == other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_conflict() {
        let path = |path: &str| Concern::Path(path.into());
        let database = |name: &str| Concern::Postgres(name.into());
        let server = |name: &str| Concern::Server(name.into());
        let group = |id: u8| Concern::Group(GroupId::from_bytes([id; 16]));
        for (one, other, conflicts) in [
            (path("/a"), path("/a/b"), true),
            (path("/a"), path("/ab"), false),
            (database("shop"), server("main"), true),
            (database("shop"), database("other"), false),
            (server("main"), server("main"), true),
            (server("main"), server("other"), false),
            (group(1), group(1), true),
            (group(1), group(2), false),
            (group(1), path("/a"), false),
        ] {
            assert_eq!((one.conflicts(&other), other.conflicts(&one)), (conflicts, conflicts), "{one:?} {other:?}");
        }
    }
}
