//! Room on the disk for arriving kernels: one budget of all sessions.
//!
//! An object takes its room twice, because a file is made of it. What has arrived has already reduced the free bytes.
//! A source that is silent for long has no claim to more than that.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

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
    /// Bytes of files that are written already.
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
    pub(super) fn begin(&self, id: HandoverId, offered: u64, free: u64, holder: Holder) -> Result<u64> {
        let free = free.saturating_sub(self.taken());
        if offered > free {
            return Err(none(offered, free));
        }
        self.0.borrow_mut().insert(id, Part { holder, offered, ..Part::default() });
        // The objects, and the files that are made of them.
        Ok(free / 2)
    }

    /// Takes room for an object. `free` is asked only if the session needs more than it has.
    ///
    /// # Errors
    /// `refused` if there is none.
    pub(super) fn take(&self, id: HandoverId, bytes: u64, free: impl FnOnce() -> u64) -> Result<()> {
        let part = self.0.borrow().get(&id).cloned().unwrap_or_default();
        let lacks = part.arrived.saturating_add(bytes).saturating_sub(part.planned);
        let more = if lacks == 0 {
            0
        } else {
            let free = free();
            let fits = |more: u64| {
                let grown = Part { planned: part.planned.saturating_add(more), ..part.clone() };
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
        room.end(id(2));
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
        assert!(room.take(id(1), GIB, || 9 * GIB).is_err(), "another one has it");
    }
}
