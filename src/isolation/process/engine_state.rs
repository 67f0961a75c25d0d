//! A kernel's engine state in a database of this host.

use std::path::{Path, PathBuf};

use crate::catalog::{Applied, CatalogError, EngineDb, EngineInfo, Entry, EntryHead, Inspected};
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::isolation::EngineState;

/// `engine.db` of a kernel.
pub(super) struct EngineDatabase {
    pub path: PathBuf,
    pub durability: Durability,
}

impl EngineState for EngineDatabase {
    fn replace(&self, info: &EngineInfo, entries: &mut dyn Iterator<Item = Result<Entry>>) -> Result<()> {
        let db = EngineDb::open(&self.path, self.durability)?;
        // An error here ends the transaction without a commit.
        db.replace_all(info, entries.map(|entry| entry.map_err(refused)), &[])?;
        Ok(db.close()?)
    }

    fn revise(
        &self,
        info: &EngineInfo,
        wanted: &[EntryHead],
        body: &mut dyn FnMut(&EntryHead) -> Result<Vec<u8>>,
    ) -> Result<Applied> {
        let db = EngineDb::open(&self.path, self.durability)?;
        let applied = db.revise(info, wanted, |head| body(head).map_err(refused))?;
        db.close()?;
        Ok(applied)
    }

    fn read(&self, each: &mut dyn FnMut(Entry) -> Result<()>) -> Result<()> {
        let db = EngineDb::open(&self.path, self.durability)?;
        for head in db.heads()? {
            if let Some(entry) = db.entry(&head.key)? {
                each(entry)?;
            }
        }
        Ok(db.close()?)
    }

    fn inspect(&self) -> Result<Inspected> {
        let scratch = scratch_beside(&self.path)?;
        let inspected = EngineDb::inspect(&self.path, &scratch);
        let _ = std::fs::remove_dir_all(&scratch);
        Ok(inspected?)
    }
}

fn refused(error: Error) -> CatalogError {
    CatalogError::Refused(Box::new(error))
}

/// A folder for copies beside a kernel's databases; a leftover is removed with the kernel.
fn scratch_beside(path: &Path) -> Result<PathBuf> {
    let scratch = path.with_file_name("verify");
    let _ = std::fs::remove_dir_all(&scratch);
    std::fs::create_dir(&scratch).map_err(|error| Error::internal(format!("{}: {error}", scratch.display())))?;
    Ok(scratch)
}
