//! Watches files of the workspace for clients, with the code that does it for a workspace on a host. The daemon asks for
//! the events.

use std::collections::{HashMap, VecDeque};

use crate::core::error::{Error, Result};
use crate::core::files::FileEvent;
use crate::core::limits;
use crate::link::machine::{self, LOST_WATCH, Reply, WatchRequest};
use crate::workspace::{LocalFiles, Watch};

/// The watches of clients.
pub(super) struct Watches {
    files: LocalFiles,
    open: HashMap<u64, Watched>,
}

struct Watched {
    watch: Watch,
    /// Events that the daemon has not taken.
    waiting: VecDeque<FileEvent>,
}

impl Watches {
    /// For the workspace of these files.
    pub(super) fn new(files: LocalFiles) -> Watches {
        Watches { files, open: HashMap::new() }
    }

    /// Ends all watches.
    pub(super) fn end_all(&mut self) {
        self.open.clear();
    }

    /// Answers a request.
    ///
    /// # Errors
    /// As [`Watch::open`] and [`Watch::take`]; [`LOST_WATCH`].
    pub(super) fn answer(&mut self, request: WatchRequest) -> Result<(Reply, Vec<u8>)> {
        match request {
            WatchRequest::Begin { .. } if self.open.len() >= limits::FILE_WATCHES => {
                Err(Error::busy("too many directories are watched").reason("watches"))
            }
            WatchRequest::Begin { watch, path, recursive } => {
                let begun = Watch::open(self.files.clone(), path, recursive)?;
                self.open.insert(watch, Watched { watch: begun, waiting: VecDeque::new() });
                Ok((Reply::Done, Vec::new()))
            }
            WatchRequest::Take { watch } => {
                let lost = || Error::not_found("this watch has ended").reason(LOST_WATCH);
                let Watched { watch, waiting } = self.open.get_mut(&watch).ok_or_else(lost)?;
                if waiting.is_empty() {
                    waiting.extend(watch.take()?);
                }
                let bytes = machine::events_to_bytes(waiting);
                Ok((Reply::Events { more: !waiting.is_empty() || watch.has_more() }, bytes))
            }
            WatchRequest::End { watch } => {
                self.open.remove(&watch);
                Ok((Reply::Done, Vec::new()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::files::Files;
    use super::*;
    use crate::core::files::{FileEventKind, FilePath};

    fn events(watches: &mut Watches, watch: u64) -> Result<(Vec<FileEvent>, bool)> {
        match watches.answer(WatchRequest::Take { watch })? {
            (Reply::Events { more }, bytes) => Ok((machine::events_from_bytes(&bytes).expect("events"), more)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn watched_events_arrive_in_pages() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let workspace = folder.path().join("workspace");
        std::fs::create_dir(&workspace).expect("made");
        let mut watches = Watches::new(Files::new(folder.path()).local());
        let path = |text: &str| FilePath::parse(text.as_bytes()).expect("a path");
        let begin = |watch, text| WatchRequest::Begin { watch, path: path(text), recursive: true };
        assert_eq!(watches.answer(begin(9, "none")).err().map(|error| error.reason), Some("not_found".into()));
        watches.answer(begin(1, "."))?;
        assert_eq!(events(&mut watches, 1)?, (Vec::new(), false));
        for n in 0..3000 {
            std::fs::create_dir(workspace.join(n.to_string())).expect("made");
        }
        let (mut seen, mut more) = (Vec::new(), true);
        while more {
            let (page, further) = events(&mut watches, 1)?;
            assert!(page.len() <= limits::FILE_EVENT_BATCH);
            seen.extend(page);
            more = further;
        }
        let created = |name: &str| FileEvent { kind: FileEventKind::Created, path: name.as_bytes().to_vec() };
        assert!(seen.contains(&created("0")) && seen.contains(&created("2999")), "{}", seen.len());
        for watch in 2..=limits::FILE_WATCHES as u64 {
            watches.answer(begin(watch, "."))?;
        }
        assert_eq!(watches.answer(begin(99, ".")).err().map(|error| error.reason), Some("watches".into()));
        watches.answer(WatchRequest::End { watch: 2 })?;
        watches.answer(begin(99, "."))?;
        watches.end_all();
        assert_eq!(events(&mut watches, 1).err().map(|error| error.reason), Some(LOST_WATCH.into()));
        Ok(())
    }
}
