//! What a slot does before anybody comes, so that it is quick when somebody does: once for nothing all that a kernel's coming takes, so
//! that code, memory and caches are there.
//!
//! The database of the rehearsal is in a file system of its own that no path leads to, and goes with it.

use std::os::fd::AsRawFd;
use std::path::Path;

use super::Worker;
use crate::catalog::{CatalogError, Changes, EngineDb, EngineInfo, Entry};
use crate::sys::mount::new_file_system;

/// Its largest size.
const SIZE: &str = "1m";

impl Worker {
    /// Changes nothing. What cannot be rehearsed is only slower later.
    pub(super) fn rehearse(&mut self) {
        self.enclosure.rehearse();
        let stage = new_file_system("tmpfs", &[("size", SIZE), ("mode", "700")], 0).map_err(|error| error.to_string());
        let rehearsed = stage.and_then(|stage| {
            let path = format!("/proc/self/fd/{}/engine.db", stage.as_raw_fd());
            self.rehearse_state(Path::new(&path)).map_err(|error| error.to_string())
        });
        if let Err(error) = rehearsed {
            tracing::debug!(%error, "what a kernel's state takes was not rehearsed");
        }
    }

    fn rehearse_state(&self, path: &Path) -> Result<(), CatalogError> {
        let db = EngineDb::open(path, self.settings.durability)?;
        let name = self.settings.engine.name().to_owned();
        db.set_info(&EngineInfo { name, version: String::new(), format: 0 })?;
        db.heads()?;
        let entry = Entry { key: "var/rehearsed".into(), meta_json: "{}".into(), body: vec![0] };
        db.apply(&Changes {
            puts: vec![entry],
            missed: Some(Vec::new()),
            jobs: Some(Vec::new()),
            ..Changes::default()
        })?;
        db.entry("var/rehearsed")?;
        db.jobs()?;
        db.close()
    }
}
