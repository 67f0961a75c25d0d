//! Kernels that arrive: how many at once, and which of them gives its place to another.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Mutex;

use crate::core::error::{Error, Result};
use crate::core::ids::HandoverId;
use crate::teleport::Silence;

/// A kernel that arrives.
#[derive(Debug, Default)]
pub(super) struct Session {
    uid: u32,
    /// Held while the kernel is prepared; `true`: the handover was aborted.
    pub(super) is_aborted: Mutex<bool>,
    silence: Rc<Silence>,
}

/// The bounds of sessions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) of_host: usize,
    pub(super) of_user: usize,
    /// Silence after which a session gives its place to another.
    pub(super) silence: Duration,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Sessions(RefCell<HashMap<HandoverId, Rc<Session>>>);

impl Sessions {
    /// Begins a session of a user; ends the one that has been silent for longest, if its place is needed.
    ///
    /// # Errors
    /// `busy` if there are too many, `conflict` if the handover has one.
    pub(super) fn begin(&self, id: HandoverId, uid: u32, bounds: Bounds) -> Result<Rc<Silence>> {
        if self.0.borrow().contains_key(&id) {
            return Err(Error::conflict("this handover is offered twice").reason("protocol"));
        }
        self.make_place(bounds.of_user, bounds.silence, |session| session.uid == uid)?;
        self.make_place(bounds.of_host, bounds.silence, |_| true)?;
        let session = Session { uid, ..Session::default() };
        let silence = Rc::clone(&session.silence);
        self.0.borrow_mut().insert(id, Rc::new(session));
        Ok(silence)
    }

    fn make_place(&self, most: usize, silence: Duration, counts: impl Fn(&Session) -> bool) -> Result<()> {
        let sessions = self.0.borrow();
        let open = || sessions.values().filter(|session| counts(session) && !session.silence.is_ended());
        if open().count() < most {
            return Ok(());
        }
        match open().max_by_key(|session| session.silence.lasts()) {
            Some(session) if session.silence.lasts() >= silence => {
                session.silence.end();
                Ok(())
            }
            Some(_) | None => {
                Err(Error::busy("too many kernels arrive at once").hint("try again when one has arrived"))
            }
        }
    }

    /// The session of a handover.
    pub(super) fn get(&self, id: HandoverId) -> Option<Rc<Session>> {
        self.0.borrow().get(&id).cloned()
    }

    /// The session has ended.
    pub(super) fn end(&self, id: HandoverId) {
        self.0.borrow_mut().remove(&id);
    }
}
