//! The objects here that a source may refer to without sending them.

use std::cmp::Reverse;
use std::collections::HashSet;

use super::incoming::TargetSide;
use crate::bundle;
use crate::catalog::state::{Root, RootKind};
use crate::core::error::Result;
use crate::core::ids::{Digest, KernelId};
use crate::core::limits;
use crate::teleport::Reuse;
use crate::workspace::Seen;

impl TargetSide {
    /// The objects that the source may refer to: those of this user's kernels, of the moved kernel and of those used last
    /// first, and those that sessions of this user brought since the last garbage collection. Further ones are sent again.
    pub(super) async fn reuse(&self, kernel: KernelId) -> Result<Reuse> {
        if !self.host().environment.system_wide {
            return Ok(Reuse::All);
        }
        let mut kernels = self.supervisor.visible(self.actor.uid);
        kernels.sort_by_cached_key(|known| (known.id != kernel, Reverse(known.view().last_used_at_ms)));
        let mut roots = Vec::new();
        for known in kernels {
            roots.extend(self.host().catalog.state(known.id).roots().await?);
            if roots.len() >= limits::HANDOVER_REUSED {
                break;
            }
        }
        let earlier =
            self.supervisor.registry().handovers.sent.borrow().get(&self.actor.uid).cloned().unwrap_or_default();
        let found = self.host().store.run_beside(move |store| {
            let mut seen = Seen::default();
            Ok(named(roots, limits::HANDOVER_REUSED, |checkpoint, note| {
                // What cannot be read is sent again.
                let _ = bundle::reach(store, checkpoint, &mut seen, note);
            }))
        });
        let mut found = found.await?;
        found.extend(earlier);
        Ok(Reuse::Only(found))
    }

    /// Keeps what a session of this user brought, which the next try of a failed move need not send again.
    pub(super) fn may_be_sent_again(&self, whole: Vec<Digest>) {
        if !self.host().environment.system_wide || whole.is_empty() {
            return;
        }
        let mut sent = self.supervisor.registry().handovers.sent.borrow_mut();
        let of_user = sent.entry(self.actor.uid).or_default();
        let room = limits::HANDOVER_REUSED.saturating_sub(of_user.len());
        of_user.extend(whole.into_iter().take(room));
    }
}

/// The objects that these roots name, `most` of them; `reach` follows a checkpoint.
fn named(roots: Vec<Root>, most: usize, mut reach: impl FnMut(Digest, &mut dyn FnMut(Digest))) -> HashSet<Digest> {
    let mut found = HashSet::new();
    for root in roots {
        if found.len() >= most {
            break;
        }
        let mut note = |object| {
            if found.len() < most {
                found.insert(object);
            }
        };
        match root.kind {
            RootKind::Checkpoint { .. } => reach(root.digest, &mut note),
            RootKind::Blob | RootKind::Output { .. } => note(root.digest),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(number: u8) -> Digest {
        Digest::from_bytes([number; 32])
    }

    #[test]
    fn search_of_own_objects_is_bounded() {
        let checkpoint = |number| Root { kind: RootKind::Checkpoint { number: 1 }, digest: digest(number) };
        let roots =
            || vec![Root { kind: RootKind::Blob, digest: digest(1) }, checkpoint(10), checkpoint(20), checkpoint(30)];
        let followed = std::cell::RefCell::new(Vec::new());
        let reach = |root: Digest, note: &mut dyn FnMut(Digest)| {
            followed.borrow_mut().push(root);
            (1..=3).for_each(|more| note(digest(root.as_bytes()[0] + more)));
        };
        let found = named(roots(), 100, reach);
        assert_eq!((found.len(), followed.take().len()), (10, 3));
        assert!([1, 11, 13, 23, 33].iter().all(|number| found.contains(&digest(*number))), "{found:?}");
        let found = named(roots(), 5, reach);
        assert_eq!((found.len(), followed.take()), (5, vec![digest(10), digest(20)]), "the third one is not followed");
        assert!([1, 11, 12, 13].iter().all(|number| found.contains(&digest(*number))), "{found:?}");
    }
}
