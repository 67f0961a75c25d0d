//! Room on the disk for arriving kernels: one budget of all sessions.
//!
//! An object takes its room twice, because a file is made of it. What has arrived has already reduced the free bytes.
//! A source that is silent for long has no claim to more than that.
//!
//! Objects of moves that failed stay in the store, so that the next attempt does not send them again. They count until a
//! garbage collection had the chance to remove them: else moves that fail one after the other would fill the disk.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::core::error::{Error, Result};
use crate::core::ids::HandoverId;
use crate::core::limits;
use crate::core::quantity::format_size;
use crate::teleport::Silence;

/// The session that room is held for.
#[derive(Debug, Clone, Default)]
pub(super) struct Holder {
    pub(super) silence: Rc<Silence>,
    /// Silence after which nothing is held for what may still arrive.
    pub(super) most: Duration,
}

impl Holder {
    fn is_silent(&self) -> bool {
        let lasts = self.silence.lasts();
        !lasts.is_zero() && lasts >= self.most
    }
}

/// The part of one session.
#[derive(Debug, Clone, Default)]
struct Part {
    holder: Holder,
    /// Bytes of files that the source announced.
    offered: u64,
    /// Bytes of objects that may arrive.
    planned: u64,
    /// Those that have arrived.
    arrived: u64,
    /// Bytes of files and engine state that are written already.
    written: u64,
}

impl Part {
    /// Bytes that the session still takes.
    fn left(&self) -> u64 {
        if self.holder.is_silent() {
            return self.arrived.saturating_sub(self.written);
        }
        let files = self.offered.max(self.planned).saturating_sub(self.written);
        files.saturating_add(self.planned.saturating_sub(self.arrived))
    }

    /// Bytes that the session takes in the end, for the configured limit.
    fn whole(&self) -> u64 {
        self.left().saturating_add(self.arrived).saturating_add(self.written)
    }
}

/// The budget.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// Bytes that all kernels may take until they live here, if configured.
    most: Option<u64>,
    sessions: RefCell<HashMap<HandoverId, Part>>,
    /// Bytes of objects and files of kernels that are prepared.
    prepared: RefCell<HashMap<HandoverId, (u64, u64)>>,
    /// When sessions ended without a kernel, and the bytes of objects that they left.
    failed: RefCell<Vec<(Instant, u64)>>,
}

fn none(wanted: u64, free: u64) -> Error {
    let (wanted, free) = (format_size(wanted), format_size(free));
    Error::refused(format!("the kernel needs {wanted}, and {free} are free here beside other kernels that arrive"))
        .reason("handover_size")
        .hint("free space on this host, move a smaller kernel, or try again when the others have arrived")
}

fn beyond(wanted: u64, left: u64, most: u64) -> Error {
    let (wanted, left, most) = (format_size(wanted), format_size(left), format_size(most));
    Error::refused(format!("the kernel needs {wanted}, and {left} are left of the {most} for kernels that arrive here"))
        .reason("handover_size")
        .hint(
            "move it without older checkpoints (--since), or raise [teleport] arrivals on that host; moves that failed \
             count until `ryokan gc` has removed what they sent",
        )
}

impl Room {
    /// A budget with this limit.
    pub(super) fn new(most: Option<u64>) -> Room {
        Room { most, ..Room::default() }
    }

    /// Bytes that all sessions still take.
    fn taken(&self) -> u64 {
        self.sessions.borrow().values().map(Part::left).fold(0, u64::saturating_add)
    }

    /// Bytes that failed moves left in the store.
    fn left_over(&self) -> u64 {
        self.failed.borrow().iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
    }

    /// Bytes that are left of the configured limit.
    fn unused(&self) -> Option<u64> {
        let sessions = self.sessions.borrow().values().map(Part::whole).fold(0, u64::saturating_add);
        let prepared = self.prepared.borrow();
        let prepared = prepared.values().map(|(objects, files)| objects.saturating_add(*files));
        let taken = prepared.fold(sessions, u64::saturating_add).saturating_add(self.left_over());
        self.most.map(|most| most.saturating_sub(taken))
    }

    /// Begins a session whose files have about `offered` bytes; returns the bytes of objects that may arrive at most.
    ///
    /// # Errors
    /// `refused` if there is no room for the files.
    pub(super) fn begin(&self, id: HandoverId, offered: u64, free: u64, holder: Holder) -> Result<u64> {
        let free = free.saturating_sub(self.taken());
        if offered > free {
            return Err(none(offered, free));
        }
        let unused = self.unused();
        if let Some((left, most)) = unused.zip(self.most).filter(|(left, _)| offered > *left) {
            return Err(beyond(offered, left, most));
        }
        self.sessions.borrow_mut().insert(id, Part { holder, offered, ..Part::default() });
        // The objects, and the files that are made of them. What failed moves left was a part of it.
        let left_over = self.left_over();
        let half = (free.saturating_add(left_over) / 2).saturating_sub(left_over);
        Ok(half.min(unused.unwrap_or(u64::MAX)))
    }

    /// Takes room for an object. `free` is asked only if the session needs more than it has.
    ///
    /// # Errors
    /// `refused` if there is none.
    pub(super) fn take(&self, id: HandoverId, bytes: u64, free: impl FnOnce() -> u64) -> Result<()> {
        let part = self.sessions.borrow().get(&id).cloned().unwrap_or_default();
        let lacks = part.arrived.saturating_add(bytes).saturating_sub(part.planned);
        let more = if lacks == 0 {
            0
        } else {
            let (free, unused) = (free(), self.unused());
            let grown = |more: u64| Part { planned: part.planned.saturating_add(more), ..part.clone() };
            let is_within =
                |more: u64| unused.is_none_or(|left| grown(more).whole().saturating_sub(part.whole()) <= left);
            let fits = |more: u64| {
                let taken = self.taken().saturating_sub(part.left()).saturating_add(grown(more).left());
                taken <= free && is_within(more)
            };
            let step = lacks.max(limits::HANDOVER_ROOM_STEP);
            match (fits(step), fits(lacks)) {
                (true, _) => step,
                (false, true) => lacks,
                (false, false) => {
                    let limit = self.most.zip(unused).filter(|_| !is_within(lacks));
                    return Err(match limit {
                        Some((most, left)) => beyond(bytes, left, most),
                        None => none(bytes, free.saturating_sub(self.taken())),
                    });
                }
            }
        };
        if let Some(part) = self.sessions.borrow_mut().get_mut(&id) {
            part.planned = part.planned.saturating_add(more);
            part.arrived = part.arrived.saturating_add(bytes);
        }
        Ok(())
    }

    /// Takes room for the files of a session, of which the source has announced fewer bytes, or none.
    ///
    /// # Errors
    /// `refused` if there is none.
    pub(super) fn needs(&self, id: HandoverId, bytes: u64, free: u64) -> Result<()> {
        let part = self.sessions.borrow().get(&id).cloned().unwrap_or_default();
        let (rest, others) = (bytes.saturating_sub(part.written), self.taken().saturating_sub(part.left()));
        if rest > free.saturating_sub(others) {
            return Err(none(rest, free.saturating_sub(others)));
        }
        // Nothing more arrives.
        let grown = Part { offered: bytes, planned: part.arrived, ..part.clone() };
        let more = grown.whole().saturating_sub(part.whole());
        if let Some((unused, most)) = self.unused().zip(self.most).filter(|(unused, _)| more > *unused) {
            return Err(beyond(bytes, unused, most));
        }
        self.sessions.borrow_mut().insert(id, grown);
        Ok(())
    }

    /// A kernel that an earlier daemon has prepared.
    pub(super) fn was_prepared(&self, id: HandoverId, bytes: u64) {
        self.prepared.borrow_mut().insert(id, (0, bytes));
    }

    /// Bytes of files and engine state of a session that were written ahead.
    pub(super) fn wrote(&self, id: HandoverId, bytes: u64) {
        if let Some(part) = self.sessions.borrow_mut().get_mut(&id) {
            part.written = bytes;
        }
    }

    /// All of the kernel is on the disk, and waits for the source's decision.
    pub(super) fn is_prepared(&self, id: HandoverId) {
        if let Some(part) = self.sessions.borrow_mut().remove(&id) {
            self.prepared.borrow_mut().insert(id, (part.arrived, part.offered.max(part.arrived)));
        }
    }

    /// The kernel lives here: it counts as others.
    pub(super) fn is_live(&self, id: HandoverId) {
        self.prepared.borrow_mut().remove(&id);
    }

    /// The session has ended. It has stored so many bytes: those of a prepared kernel, or the rest of one that failed.
    pub(super) fn end(&self, id: HandoverId, stored: u64) {
        if self.sessions.borrow_mut().remove(&id).is_some() {
            self.left(stored);
        } else if let Some((objects, _)) = self.prepared.borrow_mut().get_mut(&id) {
            *objects = stored;
        }
    }

    /// The prepared kernel was deleted; its objects are left.
    pub(super) fn is_discarded(&self, id: HandoverId) {
        let prepared = self.prepared.borrow_mut().remove(&id).map(|(objects, _)| objects);
        self.left(prepared.unwrap_or_default());
    }

    fn left(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let mut failed = self.failed.borrow_mut();
        if failed.len() >= limits::HANDOVERS_FAILED {
            // The later time holds for both.
            let (_, oldest) = failed.remove(0);
            failed[0].1 = failed[0].1.saturating_add(oldest);
        }
        failed.push((Instant::now(), bytes));
    }

    /// A garbage collection has removed what was last used before this time.
    pub(super) fn collected(&self, before: Instant) {
        self.failed.borrow_mut().retain(|(ended, _)| *ended >= before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn id(number: u8) -> HandoverId {
        HandoverId::from_bytes([number; 16])
    }

    fn active() -> Holder {
        Holder { silence: Rc::default(), most: Duration::from_secs(60) }
    }

    #[test]
    fn sessions_share_one_budget() {
        let room = Room::default();
        assert_eq!(room.begin(id(1), 0, 10 * GIB, active()).expect("room"), 5 * GIB);
        assert_eq!(room.begin(id(2), 6 * GIB, 10 * GIB, active()).expect("room"), 5 * GIB);
        assert!(room.begin(id(3), 5 * GIB, 10 * GIB, active()).is_err(), "the second one's files take it");
        // Four free ones are left: two of objects, and the files of them.
        room.take(id(1), GIB, || 10 * GIB).expect("room");
        room.take(id(1), GIB, || 9 * GIB).expect("room");
        assert!(room.take(id(1), 1, || 8 * GIB).is_err());
        room.end(id(2), 0);
        room.take(id(1), GIB, || 8 * GIB).expect("room");
    }

    #[test]
    fn offers_beyond_free_room_are_refused() {
        let room = Room::default();
        assert_eq!(
            room.begin(id(1), GIB + 1, GIB, active()).map_err(|error| error.reason),
            Err("handover_size".into())
        );
        room.begin(id(1), GIB, GIB, active()).expect("as much as is free");
        // Its objects were here before: nothing arrives.
        assert!(room.take(id(1), 1, || GIB).is_err());
    }

    #[test]
    fn written_files_count_once() {
        let room = Room::default();
        room.begin(id(1), GIB, 3 * GIB, active()).expect("room");
        room.take(id(1), GIB, || 3 * GIB).expect("room");
        // Objects and files are on the disk.
        room.wrote(id(1), GIB);
        room.take(id(1), GIB / 4, || GIB).expect("room");
        assert!(room.take(id(1), GIB, || GIB / 2).is_err());
    }

    #[test]
    fn repeated_objects_count_as_files() {
        let room = Room::new(Some(6 * GIB));
        room.begin(id(1), 0, 8 * GIB, active()).expect("room");
        room.take(id(1), 1, || 8 * GIB).expect("room");
        assert!(room.needs(id(1), 9 * GIB, 8 * GIB).is_err(), "more than is free");
        let beyond = room.needs(id(1), 7 * GIB, 8 * GIB).map_err(|error| error.hint.contains("[teleport] arrivals"));
        assert_eq!(beyond, Err(true));
        room.needs(id(1), 5 * GIB, 8 * GIB).expect("room");
        room.is_prepared(id(1));
        assert!(room.begin(id(2), 2 * GIB, 8 * GIB, active()).is_err());
        // The next daemon knows it, too.
        let next = Room::new(Some(6 * GIB));
        next.was_prepared(id(1), 5 * GIB);
        assert!(next.begin(id(2), 2 * GIB, 8 * GIB, active()).is_err());
        next.is_live(id(1));
        next.begin(id(2), 2 * GIB, 8 * GIB, active()).expect("room");
    }

    #[test]
    fn free_bytes_are_asked_rarely() {
        let (room, asked) = (Room::default(), std::cell::Cell::new(0));
        room.begin(id(1), 0, GIB, active()).expect("room");
        for _ in 0..64 {
            let free = || {
                asked.set(asked.get() + 1);
                GIB
            };
            room.take(id(1), limits::HANDOVER_ROOM_STEP / 64, free).expect("room");
        }
        assert_eq!(asked.get(), 1);
    }

    #[test]
    fn failed_moves_count_until_collected() {
        let room = Room::default();
        let mut free = 16 * GIB;
        // Each of them sends what it may, and then fails.
        for (number, most) in [(1, 8), (2, 0), (3, 0)] {
            assert_eq!(room.begin(id(number), 0, free, active()).expect("room"), most * GIB, "move {number}");
            if most > 0 {
                room.take(id(number), most * GIB, || free).expect("room");
                free -= most * GIB;
            }
            room.end(id(number), most * GIB);
        }
        let begun = Instant::now();
        room.collected(begun - Duration::from_secs(1));
        assert_eq!(room.begin(id(4), 0, free, active()).expect("room"), 0, "it keeps what was used recently");
        room.end(id(4), 0);
        room.collected(begun + Duration::from_secs(1));
        assert_eq!(room.begin(id(5), 0, 16 * GIB, active()).expect("room"), 8 * GIB);
    }

    #[test]
    fn arrivals_keep_within_their_limit() {
        let room = Room::new(Some(6 * GIB));
        let free = || 100 * GIB;
        let reason = |refused: Result<u64>| refused.map_err(|error| error.hint.contains("[teleport] arrivals"));
        assert_eq!(reason(room.begin(id(1), 7 * GIB, free(), active())), Err(true));
        assert_eq!(room.begin(id(1), GIB, free(), active()).expect("room"), 6 * GIB);
        // Objects of older checkpoints and blobs count as those of the files.
        room.take(id(1), 2 * GIB, free).expect("room");
        assert!(room.take(id(1), 2 * GIB, free).is_err_and(|error| error.reason == "handover_size"));
        room.is_prepared(id(1));
        room.end(id(1), 2 * GIB);
        // A prepared kernel counts until it lives here, and what is left of it until it is collected.
        assert_eq!(reason(room.begin(id(2), 3 * GIB, free(), active())), Err(true));
        room.is_discarded(id(1));
        assert_eq!(room.begin(id(2), 3 * GIB, free(), active()).expect("room"), 4 * GIB);
        room.end(id(2), 0);
        room.collected(Instant::now() + Duration::from_secs(1));
        room.begin(id(3), 3 * GIB, free(), active()).expect("room");
        room.is_prepared(id(3));
        room.is_live(id(3));
        assert_eq!(room.begin(id(4), 6 * GIB, free(), active()).expect("room"), 6 * GIB);
    }

    #[test]
    fn list_of_failed_moves_is_bounded() {
        let room = Room::default();
        for _ in 0..limits::HANDOVERS_FAILED * 2 {
            room.left(1);
        }
        assert_eq!(room.left_over(), limits::HANDOVERS_FAILED as u64 * 2);
        assert_eq!(room.failed.borrow().len(), limits::HANDOVERS_FAILED);
    }

    #[tokio::test]
    async fn silent_sessions_hold_what_arrived() {
        let room = Room::default();
        let holder = Holder { silence: Rc::default(), most: Duration::ZERO };
        room.begin(id(1), 6 * GIB, 10 * GIB, holder.clone()).expect("room");
        room.take(id(1), GIB, || 10 * GIB).expect("room");
        assert!(room.begin(id(2), 5 * GIB, 9 * GIB, active()).is_err(), "the first one's files take it");
        let waits = holder.silence.during(std::future::pending::<Result<()>>());
        let others = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            // One of nine for the file of what has arrived.
            assert!(room.begin(id(2), 8 * GIB + 1, 9 * GIB, active()).is_err());
            room.begin(id(2), 8 * GIB, 9 * GIB, active()).expect("room");
            holder.silence.end();
        };
        let (ended, ()) = tokio::join!(waits, others);
        assert_eq!(ended.map_err(|error| error.reason), Err("silent".into()));
        holder.silence.broken();
        assert!(room.take(id(1), GIB, || 9 * GIB).is_err(), "another one has it");
    }
}
