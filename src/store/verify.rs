//! Verifies all content and reports the damage. Memory is bounded by one pack's table, one entry, and the damage found.

use std::collections::HashSet;

use super::format::{Kind, PACK_HEADER, Slot};
use super::state::Want;
use super::{Result, Store, StoreError};
use crate::core::ids::Digest;

/// Result of [`Store::verify`].
#[derive(Debug, Default)]
pub struct Verified {
    /// Intact objects.
    pub good: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Damaged or unreadable objects, each once, and other damage.
    pub damaged: Vec<StoreError>,
}

/// Progress of a pass through the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Packs done.
    pub packs: usize,
    /// Packs in all.
    pub of_packs: usize,
    /// Bytes read.
    pub bytes: u64,
}

impl Store {
    /// Reads every object and reports the damaged ones. Calls `progress` after each pack.
    ///
    /// # Errors
    /// A pack or directory that cannot be read at all.
    pub fn verify(&self, mut progress: impl FnMut(Progress)) -> Result<Verified> {
        let mut verified = Verified::default();
        // The newest first: of several copies, readers use that one.
        let packs: Vec<u32> = self.state().packs.keys().rev().copied().collect();
        let mut at = Progress { of_packs: packs.len(), ..Progress::default() };
        let mut lost = HashSet::new();
        for number in &packs {
            at.bytes += self.verify_pack(*number, &mut verified, &mut lost)?;
            at.packs += 1;
            progress(at);
        }
        // Now all intact chunks are known, wherever they are.
        for number in packs {
            self.verify_lists(number, &lost, &mut verified)?;
        }
        Ok(verified)
    }

    /// The objects that contain, or are, one of these chunks.
    ///
    /// # Errors
    /// A pack or directory that cannot be read at all.
    pub fn affected(&self, chunks: &HashSet<Digest>) -> Result<Vec<Digest>> {
        let packs: Vec<u32> = self.state().packs.keys().copied().collect();
        let mut affected = Vec::new();
        for number in packs {
            for slot in self.canonical(number)?.into_iter().filter(|slot| slot.kind.is_object()) {
                let contains = match slot.kind {
                    Kind::Whole | Kind::Part => chunks.contains(&slot.digest),
                    Kind::List => match self.chunks(slot.digest) {
                        Ok(list) => list.chunks.iter().any(|(chunk, _)| chunks.contains(chunk)),
                        // Unreadable, whatever it contains.
                        Err(StoreError::Damaged { .. }) => chunks.contains(&slot.digest),
                        Err(StoreError::NotFound(_)) => false,
                        Err(error) => return Err(error),
                    },
                };
                if contains {
                    affected.push(slot.digest);
                }
            }
        }
        Ok(affected)
    }

    /// Verifies every valid entry of a pack. Adds chunks without an intact copy to `lost`. Returns the bytes read.
    fn verify_pack(&self, number: u32, verified: &mut Verified, lost: &mut HashSet<Digest>) -> Result<u64> {
        let pack = match self.pack(number) {
            Ok(pack) => pack,
            Err(_) if !self.state().packs.contains_key(&number) => return Ok(0),
            Err(error) => return Err(error),
        };
        if !pack.is_headed() {
            verified.damaged.push(StoreError::Pack { path: pack.path().to_owned() });
        }
        let entries = match self.entries(number) {
            Ok(entries) => entries,
            // Collected just now.
            Err(_) if !self.state().packs.contains_key(&number) => return Ok(0),
            Err(error) => return Err(error),
        };
        let mut read = PACK_HEADER as u64;
        for slot in entries {
            read += u64::from(slot.stored);
            let counts = {
                let mut state = self.state();
                state.damaged.remove(&slot.place());
                let want = if slot.kind.is_data() { Want::Data } else { Want::Object };
                if state.counts(&slot) && !state.find(slot.digest, want)?.contains(&slot) {
                    // The index lost it.
                    state.unindexed.insert(slot);
                }
                state.counts(&slot) && state.is_durable(&slot)
            };
            if !counts {
                continue;
            }
            match if slot.kind.is_data() { pack.read(&slot).map(drop) } else { pack.read_list(&slot).map(drop) } {
                Ok(()) => {}
                Err(error) => self.note_damage(&slot, error, verified, lost)?,
            }
            if slot.kind == Kind::Whole && self.is_first(&slot, Want::Object)? && !lost.contains(&slot.digest) {
                verified.good += 1;
                verified.bytes += slot.size;
            }
        }
        Ok(read)
    }

    fn note_damage(
        &self,
        slot: &Slot,
        error: StoreError,
        verified: &mut Verified,
        lost: &mut HashSet<Digest>,
    ) -> Result<()> {
        let want = if slot.kind.is_data() { Want::Data } else { Want::Object };
        self.state().damaged.insert(slot.place());
        // Another copy may be intact.
        let others = self.slots(slot.digest, want)?;
        let is_good = |other: &Slot| other != slot && self.pack(other.pack).is_ok_and(|pack| pack.read(other).is_ok());
        if others.iter().any(is_good) {
            return Ok(());
        }
        let is_new = lost.insert(slot.digest);
        if is_new && slot.kind.is_object() {
            verified.damaged.push(error);
        }
        Ok(())
    }

    fn is_first(&self, slot: &Slot, want: Want) -> Result<bool> {
        Ok(self.slots(slot.digest, want)?.first() == Some(slot))
    }

    /// Counts list objects, and reports those with a lost chunk.
    fn verify_lists(&self, number: u32, lost: &HashSet<Digest>, verified: &mut Verified) -> Result<()> {
        for slot in self.canonical(number)?.into_iter().filter(|slot| slot.kind == Kind::List) {
            let list = match self.chunks(slot.digest) {
                Ok(list) => list,
                // It was reported when its entry was read, or was removed.
                Err(StoreError::Damaged { .. } | StoreError::NotFound(_)) => continue,
                Err(error) => return Err(error),
            };
            let mut harm = None;
            for (chunk, _) in &list.chunks {
                let slots = self.slots(*chunk, Want::Data)?;
                harm = match slots.first() {
                    None => Some(StoreError::Incomplete { digest: slot.digest, part: *chunk }),
                    Some(place) if lost.contains(chunk) => Some(StoreError::Damaged {
                        digest: slot.digest,
                        path: super::pack::path(&self.shared.layout.packs, place.pack),
                        offset: u64::from(place.offset),
                    }),
                    Some(_) => continue,
                };
                break;
            }
            match harm {
                Some(error) => verified.damaged.push(error),
                None => {
                    verified.good += 1;
                    verified.bytes += slot.size;
                }
            }
        }
        Ok(())
    }
}
