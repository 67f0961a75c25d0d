//! The order of operations on groups: one after the other where they concern the same, beside each other otherwise.
//!
//! An operation waits for every earlier one that concerns the same, whether that runs or waits itself. So none is
//! overtaken, and no two wait for each other.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tokio::sync::Notify;

use crate::core::freeze::concern::Concern;

/// The operations that run or wait.
#[derive(Debug, Default)]
pub(crate) struct OperationQueue {
    queue: RefCell<BTreeMap<u64, Vec<Concern>>>,
    changed: Notify,
}

/// A place in the queue; dropping it lets later operations go on.
#[derive(Debug)]
pub(crate) struct Turn {
    all: Rc<OperationQueue>,
    at: u64,
}

impl OperationQueue {
    /// Waits until no earlier operation concerns the same. May be abandoned.
    pub async fn take(self: &Rc<OperationQueue>, concerns: Vec<Concern>) -> Turn {
        let turn = {
            let mut queue = self.queue.borrow_mut();
            // Above all that are there.
            let at = queue.last_key_value().map_or(0, |(last, _)| last + 1);
            queue.insert(at, concerns);
            Turn { all: Rc::clone(self), at }
        };
        loop {
            // Before the look: a change between the two is not missed.
            let changed = self.changed.notified();
            if turn.has_come() {
                return turn;
            }
            changed.await;
        }
    }
}

impl Turn {
    fn has_come(&self) -> bool {
        let queue = self.all.queue.borrow();
        let own = queue.get(&self.at).map(Vec::as_slice).unwrap_or_default();
        queue
            .range(..self.at)
            .all(|(_, earlier)| earlier.iter().all(|concern| own.iter().all(|other| !concern.conflicts(other))))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.all.queue.borrow_mut().remove(&self.at);
        self.all.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn paths(paths: &[&str]) -> Vec<Concern> {
        paths.iter().map(|path| Concern::Path(path.into())).collect()
    }

    #[test]
    fn unrelated_operations_overlap() {
        let turns = Rc::new(OperationQueue::default());
        let first = turns.take(paths(&["/a", "/b"])).now_or_never().expect("nothing is before it");
        let other = turns.take(paths(&["/c"])).now_or_never().expect("it concerns something else");
        let mut same = Box::pin(turns.take(paths(&["/b/inner", "/c"])));
        assert!(same.as_mut().now_or_never().is_none());
        drop(first);
        assert!(same.as_mut().now_or_never().is_none(), "another one is before it");
        drop(other);
        drop(same.now_or_never().expect("it is first"));
        assert!(turns.queue.borrow().is_empty());
    }

    #[test]
    fn nothing_is_overtaken() {
        let turns = Rc::new(OperationQueue::default());
        let first = turns.take(paths(&["/a"])).now_or_never().expect("nothing is before it");
        let mut waiting = Box::pin(turns.take(paths(&["/a", "/b"])));
        assert!(waiting.as_mut().now_or_never().is_none());
        let mut later = Box::pin(turns.take(paths(&["/b"])));
        assert!(later.as_mut().now_or_never().is_none(), "the one before it waits for /b");
        // A wait that was abandoned delays no later operation.
        drop(waiting);
        assert!(later.now_or_never().is_some());
        drop(first);
    }
}
