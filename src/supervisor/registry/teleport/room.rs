//! Room on the disk for arriving kernels: one budget of all sessions.
//!
//! An object takes its room twice, because a file is made of it. What has arrived has already reduced the free bytes.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::core::error::{Error, Result};
use crate::core::ids::HandoverId;
use crate::core::limits;
use crate::core::quantity::format_size;

/// The part of one session.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    /// Bytes of files that the source announced.
    offered: u64,
    /// Bytes of objects that may arrive.
    planned: u64,
    /// Those that have arrived.
    arrived: u64,
    /// Bytes of files that are written already.
    written: u64,
}

impl Part {
    /// Bytes that the session still takes.
    fn left(&self) -> u64 {
        let files = self.offered.max(self.planned).saturating_sub(self.written);
        files.saturating_add(self.planned.saturating_sub(self.arrived))
    }
}

/// The budget.
#[derive(Debug, Default)]
pub(super) struct Room(RefCell<HashMap<HandoverId, Part>>);

fn none(wanted: u64, free: u64) -> Error {
    let (wanted, free) = (format_size(wanted), format_size(free));
    Error::refused(format!("the kernel needs {wanted}, and {free} are free here beside other kernels that arrive"))
        .reason("handover_size")
        .hint("free space on this host, move a smaller kernel, or try again when the others have arrived")
}

impl Room {
    /// Bytes that all sessions still take.
    fn taken(&self) -> u64 {
        self.0.borrow().values().map(Part::left).fold(0, u64::saturating_add)
    }

    /// Begins a session whose files have about `offered` bytes; returns the bytes of objects that may arrive at most.
    ///
    /// # Errors
    /// `refused` if there is no room for the files.
    pub(super) fn begin(&self, id: HandoverId, offered: u64, free: u64) -> Result<u64> {
        let free = free.saturating_sub(self.taken());
        if offered > free {
            return Err(none(offered, free));
        }
        self.0.borrow_mut().insert(id, Part { offered, ..Part::default() });
        // The objects, and the files that are made of them.
        Ok(free / 2)
    }

    /// Takes room for an object. `free` is asked only if the session needs more than it has.
    ///
    /// # Errors
    /// `refused` if there is none.
    pub(super) fn take(&self, id: HandoverId, bytes: u64, free: impl FnOnce() -> u64) -> Result<()> {
        let part = self.0.borrow().get(&id).copied().unwrap_or_default();
        let lacks = part.arrived.saturating_add(bytes).saturating_sub(part.planned);
        let more = if lacks == 0 {
            0
        } else {
            let free = free();
            let fits = |more: u64| {
                let grown = Part { planned: part.planned.saturating_add(more), ..part };
                self.taken().saturating_sub(part.left()).saturating_add(grown.left()) <= free
            };
            let step = lacks.max(limits::HANDOVER_ROOM_STEP);
            match (fits(step), fits(lacks)) {
                (true, _) => step,
                (false, true) => lacks,
                (false, false) => return Err(none(bytes, free.saturating_sub(self.taken()))),
            }
        };
        if let Some(part) = self.0.borrow_mut().get_mut(&id) {
            part.planned = part.planned.saturating_add(more);
            part.arrived = part.arrived.saturating_add(bytes);
        }
        Ok(())
    }

    /// Files of a session were written ahead.
    pub(super) fn wrote(&self, id: HandoverId, bytes: u64) {
        if let Some(part) = self.0.borrow_mut().get_mut(&id) {
            part.written = bytes;
        }
    }

    /// The session has ended, or all of it is on the disk.
    pub(super) fn end(&self, id: HandoverId) {
        self.0.borrow_mut().remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn id(number: u8) -> HandoverId {
        HandoverId::from_bytes([number; 16])
    }

    #[test]
    fn sessions_share_one_budget() {
        let room = Room::default();
        assert_eq!(room.begin(id(1), 0, 10 * GIB).expect("room"), 5 * GIB);
        assert_eq!(room.begin(id(2), 6 * GIB, 10 * GIB).expect("room"), 5 * GIB);
        assert!(room.begin(id(3), 5 * GIB, 10 * GIB).is_err(), "the second one's files take it");
        // Four free ones are left: two of objects, and the files of them.
        room.take(id(1), GIB, || 10 * GIB).expect("room");
        room.take(id(1), GIB, || 9 * GIB).expect("room");
        assert!(room.take(id(1), 1, || 8 * GIB).is_err());
        room.end(id(2));
        room.take(id(1), GIB, || 8 * GIB).expect("room");
    }

    #[test]
    fn offers_beyond_free_room_are_refused() {
        let room = Room::default();
        assert_eq!(room.begin(id(1), GIB + 1, GIB).map_err(|error| error.reason), Err("handover_size".into()));
        room.begin(id(1), GIB, GIB).expect("as much as is free");
        // Its objects were here before: nothing arrives.
        assert!(room.take(id(1), 1, || GIB).is_err());
    }

    #[test]
    fn written_files_count_once() {
        let room = Room::default();
        room.begin(id(1), GIB, 3 * GIB).expect("room");
        room.take(id(1), GIB, || 3 * GIB).expect("room");
        // Objects and files are on the disk.
        room.wrote(id(1), GIB);
        room.take(id(1), GIB / 4, || GIB).expect("room");
        assert!(room.take(id(1), GIB, || GIB / 2).is_err());
    }

    #[test]
    fn free_bytes_are_asked_rarely() {
        let (room, asked) = (Room::default(), std::cell::Cell::new(0));
        room.begin(id(1), 0, GIB).expect("room");
        for _ in 0..64 {
            let free = || {
                asked.set(asked.get() + 1);
                GIB
            };
            room.take(id(1), limits::HANDOVER_ROOM_STEP / 64, free).expect("room");
        }
        assert_eq!(asked.get(), 1);
    }
}
