//! Watches of a machine's files, and of the mirror while there is no machine. A watch ends with a start or an end of the
//! machine: what happens next happens elsewhere.
//!
//! The guest keeps the events of its watches and the daemon asks for them. They are data of an untrusted system: names
//! below the watched directory, a bounded number at a time.

use std::pin::pin;
use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;
use tokio::time::sleep;

use super::changes::{check_level, moved, of_guest, suspended};
use super::client::{Client, unexpected};
use super::files::Place;
use super::handle::blocking;
use super::machine::{Machine, Phase};
use crate::core::error::{Error, Result};
use crate::core::files::{FileEvent, FileEventKind, FilePath};
use crate::core::limits;
use crate::isolation::FileWatch;
use crate::link::machine::{LOST_WATCH, Reply, Request, WATCH_LEVEL, WatchRequest, events_from_bytes};

/// What a guest has of a watch.
#[derive(Debug, PartialEq, Eq)]
enum Taken {
    Events {
        events: Vec<FileEvent>,
        more: bool,
    },
    /// The machine is stopped, or about to be: nothing happens.
    Nothing,
    Ended,
}

impl Machine {
    /// Begins the watch with this number.
    ///
    /// # Errors
    /// A [`FileError`](crate::core::files::FileError), `refused` (`watch_size`), `busy` (`watches`, `suspended`, `moved`),
    /// `unsupported` for a guest of an earlier build; `deadline` and `unavailable` for one that does not answer.
    fn begin_watch(&self, watch: u64, path: FilePath, recursive: bool) -> Result<()> {
        let mut client = self.client_within(Some(limits::VM_CALL));
        match self.phase() {
            Phase::Open => {}
            Phase::Stopping | Phase::Parked => return Err(suspended()),
            Phase::Over => return Err(moved()),
        }
        let known = check_level(&mut client, WATCH_LEVEL, "cannot be watched");
        while let Some(abandoned) = self.watches.next_abandoned() {
            if known.is_ok() {
                ask(&mut client, WatchRequest::End { watch: abandoned })?;
            }
            // Dropped before it began.
            if abandoned == watch {
                return Err(moved());
            }
        }
        known?;
        let shown = path.shown();
        match ask(&mut client, WatchRequest::Begin { watch, path, recursive })? {
            (Reply::Done, _) => Ok(()),
            (Reply::Failed(error), _) => Err(refused(&error, &shown)),
            _ => Err(unexpected()),
        }
    }

    /// The events since the last call.
    ///
    /// # Errors
    /// `deadline` and `unavailable` for a guest that does not answer as agreed.
    fn take_events(&self, watch: u64) -> Result<Taken> {
        let mut client = self.client_within(Some(limits::VM_CALL));
        match self.phase() {
            Phase::Open => {}
            Phase::Stopping | Phase::Parked => return Ok(Taken::Nothing),
            Phase::Over => return Ok(Taken::Ended),
        }
        match ask(&mut client, WatchRequest::Take { watch })? {
            (Reply::Events { more }, bytes) => match events_from_bytes(&bytes) {
                Some(events) => Ok(Taken::Events { events, more }),
                None => Err(unexpected()),
            },
            (Reply::Failed(error), _) if error.reason == LOST_WATCH => Ok(Taken::Ended),
            (Reply::Failed(error), _) => Err(of_guest(&error, &["the watch"])),
            _ => Err(unexpected()),
        }
    }
}

fn ask(client: &mut Client, request: WatchRequest) -> Result<(Reply, Vec<u8>)> {
    client.ask(&Request::Watch(request), &[], limits::VM_CALL)
}

/// The error for a guest's refusal to watch; its words are not trusted.
fn refused(error: &Error, shown: &str) -> Error {
    match error.reason.as_str() {
        "watch_size" => Error::refused(format!("{shown} has too many directories or files to watch"))
            .reason("watch_size")
            .hint("watch a directory with fewer of them, or without those below it"),
        "watches" => Error::busy("the virtual machine grants no more watches")
            .reason("watches")
            .hint("end one of the watches, or try again"),
        _ => of_guest(error, &[shown]),
    }
}

fn ended() -> Vec<FileEvent> {
    vec![FileEvent { kind: FileEventKind::Ended, path: Vec::new() }]
}

/// A watch in a guest.
pub(super) struct GuestWatch {
    place: Place,
    machine: Arc<Machine>,
    number: u64,
    has_more: bool,
    has_ended: bool,
}

impl GuestWatch {
    /// Begins a watch in this machine.
    ///
    /// # Errors
    /// As [`Machine::begin_watch`].
    pub(super) async fn begin(
        place: Place,
        machine: Arc<Machine>,
        access: OwnedMutexGuard<()>,
        path: FilePath,
        recursive: bool,
    ) -> Result<GuestWatch> {
        let number = machine.watches.begin();
        // Dropped from here on, the guest ends it.
        let watch = GuestWatch { place, machine, number, has_more: false, has_ended: false };
        let asked = Arc::clone(&watch.machine);
        blocking(move || {
            let _access = access;
            asked.begin_watch(number, path, recursive)
        })
        .await?;
        Ok(watch)
    }

    fn is_current(&self) -> bool {
        self.place.machine().is_some_and(|machine| Arc::ptr_eq(&machine, &self.machine))
    }
}

#[async_trait::async_trait(?Send)]
impl FileWatch for GuestWatch {
    async fn next(&mut self) -> Result<Vec<FileEvent>> {
        while !self.has_ended {
            if !self.has_more {
                sleep(limits::GUEST_WATCH_PAUSE).await;
            }
            let taken = match self.is_current() {
                true => {
                    let access = Arc::clone(&self.machine.access_lock).lock_owned().await;
                    let (machine, number) = (Arc::clone(&self.machine), self.number);
                    blocking(move || {
                        let _access = access;
                        machine.take_events(number)
                    })
                    .await?
                }
                false => Taken::Ended,
            };
            match taken {
                Taken::Events { events, more } => {
                    // A guest that has more and sends nothing is not asked at once.
                    self.has_more = more && !events.is_empty();
                    self.has_ended = events.iter().any(|event| event.kind == FileEventKind::Ended);
                    if !events.is_empty() {
                        return Ok(events);
                    }
                }
                Taken::Nothing => self.has_more = false,
                Taken::Ended => {
                    self.has_ended = true;
                    return Ok(ended());
                }
            }
        }
        Ok(Vec::new())
    }
}

impl Drop for GuestWatch {
    fn drop(&mut self) {
        self.machine.watches.abandon(self.number);
    }
}

/// A watch of the mirror, while there is no machine.
pub(super) struct MirrorWatch {
    place: Place,
    watch: Box<dyn FileWatch>,
    has_ended: bool,
}

impl MirrorWatch {
    pub(super) fn new(place: Place, watch: Box<dyn FileWatch>) -> MirrorWatch {
        MirrorWatch { place, watch, has_ended: false }
    }
}

#[async_trait::async_trait(?Send)]
impl FileWatch for MirrorWatch {
    async fn next(&mut self) -> Result<Vec<FileEvent>> {
        if self.has_ended {
            return Ok(Vec::new());
        }
        // It is not asked again after an end: a dropped call of it loses events.
        let mut next = pin!(self.watch.next());
        while self.place.machine().is_none() {
            tokio::select! {
                biased;
                events = &mut next => return events,
                () = sleep(limits::GUEST_WATCH_PAUSE) => {}
            }
        }
        self.has_ended = true;
        Ok(ended())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::io;

    use super::super::changes::tests::guest_with;
    use super::super::machine::tests::machine;
    use super::*;
    use crate::core::error::ErrorCode;
    use crate::link::machine::{FILES_LEVEL, LEVEL, events_to_bytes};

    fn path() -> FilePath {
        FilePath::parse(b"d").expect("a path")
    }

    #[test]
    fn hostile_guest_reports_nothing_outside() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let machine = machine(folder.path());
        let event = FileEvent { kind: FileEventKind::Created, path: b"f".to_vec() };
        let good = events_to_bytes(&mut VecDeque::from([event.clone()]));
        let failed = |code, reason: &str| (Reply::Failed(Error::new(code, "\u{1b}lies").reason(reason)), Vec::new());
        let answers = vec![
            failed(ErrorCode::Lost, "watch_size"),
            failed(ErrorCode::Internal, "not_found"),
            failed(ErrorCode::Departed, "else"),
            (Reply::Done, Vec::new()),
            (Reply::Events { more: true }, good),
            (Reply::Events { more: false }, [&[0][..], &[4, 0], b"../x"].concat()),
            (Reply::Events { more: false }, vec![0; 100_000]),
            (Reply::Gone, Vec::new()),
            failed(ErrorCode::NotFound, LOST_WATCH),
        ];
        let guest = guest_with(folder.path(), LEVEL, answers)?;
        let begin = || machine.begin_watch(7, path(), true);
        let refusal = || begin().expect_err("refused");
        let first = refusal();
        assert_eq!((first.code, first.reason.as_str()), (ErrorCode::Refused, "watch_size"));
        let second = refusal();
        assert!(second.reason == "not_found" && second.message.starts_with("/workspace/d"), "{second:?}");
        let third = refusal();
        assert!(third.code == ErrorCode::Internal && !third.message.contains('\u{1b}'), "{third:?}");
        begin().expect("begun");
        assert_eq!(machine.take_events(7).expect("taken"), Taken::Events { events: vec![event], more: true });
        for _ in 0..3 {
            assert_eq!(machine.take_events(7).err().map(|error| error.code), Some(ErrorCode::Unavailable));
        }
        assert_eq!(machine.take_events(7).expect("taken"), Taken::Ended);
        machine.client().end();
        guest.join().expect("it ends").map(drop)
    }

    #[test]
    fn abandoned_watch_is_ended_first() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let machine = machine(folder.path());
        let done = || (Reply::Done, Vec::new());
        let guest = guest_with(folder.path(), LEVEL, vec![done(), done()])?;
        machine.watches.abandon(3);
        machine.begin_watch(4, path(), false).expect("begun");
        machine.client().end();
        let requests = guest.join().expect("it ends")?;
        let [_, Request::Watch(end), Request::Watch(begin)] = &requests[..] else { panic!("{requests:?}") };
        assert!(matches!(end, WatchRequest::End { watch: 3 }), "{end:?}");
        assert!(matches!(begin, WatchRequest::Begin { watch: 4, recursive: false, .. }), "{begin:?}");
        Ok(())
    }

    #[test]
    fn watch_dropped_early_never_begins() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let machine = machine(folder.path());
        let guest = guest_with(folder.path(), LEVEL, vec![(Reply::Done, Vec::new())])?;
        machine.watches.abandon(4);
        let refused = machine.begin_watch(4, path(), false).expect_err("it was dropped");
        assert_eq!(refused.reason, "moved");
        machine.client().end();
        let requests = guest.join().expect("it ends")?;
        let [_, Request::Watch(end)] = &requests[..] else { panic!("{requests:?}") };
        assert!(matches!(end, WatchRequest::End { watch: 4 }), "{end:?}");
        Ok(())
    }

    #[tokio::test(flavor = "current_thread")]
    async fn empty_answers_wait_for_the_pause() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let machine = machine(folder.path());
        let mut answers: Vec<_> = (0..3).map(|_| (Reply::Events { more: true }, Vec::new())).collect();
        answers.push((Reply::Failed(Error::new(ErrorCode::NotFound, "over").reason(LOST_WATCH)), Vec::new()));
        let guest = guest_with(folder.path(), LEVEL, answers)?;
        let place = Place::of_machine(&machine);
        let mut watch =
            GuestWatch { place, machine: Arc::clone(&machine), number: 7, has_more: false, has_ended: false };
        let began = std::time::Instant::now();
        assert_eq!(watch.next().await.expect("an end"), ended());
        // A slow host takes longer; a busy loop would take less.
        assert!(began.elapsed() >= limits::GUEST_WATCH_PAUSE * 4);
        machine.client().end();
        guest.join().expect("it ends").map(drop)
    }

    #[test]
    fn machine_without_watches_is_unsupported() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let machine = machine(folder.path());
        let guest = guest_with(folder.path(), FILES_LEVEL, Vec::new())?;
        let refused = machine.begin_watch(1, path(), false).expect_err("its guest does not know it");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Unsupported, "image_version"));
        machine.client().end();
        guest.join().expect("it ends")?;
        machine.set_phase(Phase::Stopping);
        assert_eq!(machine.take_events(1).expect("no request"), Taken::Nothing);
        for (phase, reason) in [(Phase::Parked, "suspended"), (Phase::Over, "moved")] {
            machine.set_phase(phase);
            assert_eq!(machine.begin_watch(2, path(), false).err().map(|error| error.reason), Some(reason.into()));
        }
        assert_eq!(machine.take_events(1).expect("no request"), Taken::Ended);
        Ok(())
    }
}
