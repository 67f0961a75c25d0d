//! The objects that a kernel's rows reference: garbage collection keeps them, verification checks them.

use super::StateHandle;
use crate::catalog::row::{bytes, unsigned};
use crate::catalog::sqlite::{Db, Result};
use crate::catalog::thread::Pending;
use crate::core::ids::Digest;

/// Kind of a reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RootKind {
    /// A blob that the kernel may read, including its artifacts' content.
    Blob,
    /// Output of an execution.
    Output {
        /// The execution's number.
        exec: u64,
    },
    /// A checkpoint: the object is its manifest.
    Checkpoint {
        /// The checkpoint's number.
        number: u64,
    },
}

/// A reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Root {
    /// Its kind.
    pub kind: RootKind,
    /// The object's address.
    pub digest: Digest,
}

/// Every column of `state.db` with an object's address, as `table.column`; a test compares it with the schema.
#[cfg(test)]
pub(super) const COLUMNS: &[&str] = &[
    "artifacts.object",
    "blob_grants.digest",
    "checkpoints.manifest",
    "results.stderr_object",
    "results.stdout_object",
];

const ROOTS: &str = "SELECT 0, 0, digest FROM blob_grants
    UNION ALL SELECT 1, exec, stdout_object FROM results WHERE stdout_object IS NOT NULL
    UNION ALL SELECT 1, exec, stderr_object FROM results WHERE stderr_object IS NOT NULL
    UNION ALL SELECT 2, number, manifest FROM checkpoints
    UNION ALL SELECT 0, 0, object FROM artifacts WHERE object IS NOT NULL";

impl StateHandle {
    /// Objects that this kernel's rows reference: granted blobs, kept output, manifests. Garbage collection keeps them
    /// and everything that the manifests reference.
    ///
    /// # Errors
    /// Database errors.
    pub fn roots(&self) -> Pending<Vec<Root>> {
        self.read(roots)
    }
}

fn roots(db: &Db) -> Result<Vec<Root>> {
    db.sql("list objects", |c| {
        c.prepare_cached(ROOTS)?
            .query_map([], |row| {
                let (kind, number) = (row.get::<_, i64>(0)?, unsigned(row, 1)?);
                let kind = match kind {
                    0 => RootKind::Blob,
                    1 => RootKind::Output { exec: number },
                    _ => RootKind::Checkpoint { number },
                };
                Ok(Root { kind, digest: Digest::from_bytes(bytes(row, 2)?) })
            })?
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::catalog::{Durability, Kind};

    /// An unlisted column would lose its objects.
    #[test]
    fn every_digest_column_is_root() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(Kind::State.file_name());
        let db = Db::open_or_create(Kind::State, &path, Durability::Process).expect("a database");
        let tables: Vec<(String, String)> = db
            .sql("read schema", |c| {
                c.prepare("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL")?
                    .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                    .collect()
            })
            .expect("a schema");
        let mut found = BTreeSet::new();
        for (table, sql) in &tables {
            for (at, _) in sql.match_indices(") = 32") {
                let column = sql[..at].rsplit("length(").next().expect("the name of a column");
                found.insert(format!("{table}.{column}"));
            }
        }
        // Checksums of rows name no object.
        found.retain(|name| !name.ends_with(".sum"));
        assert_eq!(found, COLUMNS.iter().map(|name| (*name).to_owned()).collect());
        assert!(COLUMNS.iter().all(|name| ROOTS.contains(name.rsplit('.').next().expect("a column"))));
        assert_eq!(roots(&db).expect("readable"), []);
    }
}
