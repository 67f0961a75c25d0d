//! Effects of a restore on decisions and artifacts, and their reversal by an undo.
//!
//! A restore marks each changed record with its safety checkpoint. A restore of that checkpoint is
//! an undo: every record with the mark returns to its state there. Records that a client changed
//! since are not affected.

use super::{Artifact, Decision, DecisionState, Options, WorkflowPart};
use crate::core::ids::CheckpointId;

/// Returns the decisions whose state changes when checkpoint `target`, which holds `part`, is
/// restored.
pub fn decisions(
    part: &WorkflowPart,
    now: &[Decision],
    target: CheckpointId,
    options: Options,
) -> Vec<(u64, DecisionState)> {
    let wanted = |decision: &Decision| {
        let then = part.decisions.iter().find(|then| then.id == decision.id);
        let kept = match then {
            Some(then) if decision.restored == Some(target) => then.state,
            Some(_) | None => decision.state,
        };
        if then.is_none() && options.supersede_decisions { DecisionState::Superseded } else { kept }
    };
    let changed = |decision: &Decision| {
        let wanted = wanted(decision);
        (wanted != decision.state).then_some((decision.id, wanted))
    };
    now.iter().filter_map(changed).collect()
}

/// Returns the artifacts that receive a new version, with the earlier version whose content it has;
/// `None` withdraws the artifact.
///
/// `now` holds the newest version of each artifact.
pub fn artifacts(
    part: &WorkflowPart,
    now: &[Artifact],
    target: CheckpointId,
    options: Options,
) -> Vec<(String, Option<u32>)> {
    let changed = |artifact: &Artifact| {
        if !options.with_artifacts && artifact.restored != Some(target) {
            return None;
        }
        let then = part.artifacts.iter().find(|then| then.name == artifact.name);
        let same = match then {
            Some(then) => artifact.hash == Some(then.hash) && artifact.content_type == then.content_type,
            None => artifact.hash.is_none(),
        };
        (!same).then(|| (artifact.name.clone(), then.map(|then| then.version)))
    };
    now.iter().filter_map(changed).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{DecisionEvent, Workflow};
    use super::*;
    use crate::core::ids::Digest;

    fn decision(id: u64, state: DecisionState) -> Decision {
        Decision {
            id,
            title: format!("d{id}"),
            text: String::new(),
            state,
            agent: String::new(),
            step: 0,
            opened_by: String::new(),
            opened_at_ms: 0,
            locked_by: String::new(),
            locked_at_ms: None,
            superseded_by: String::new(),
            superseded_at_ms: None,
            restored: None,
        }
    }

    fn artifact(name: u8, version: u32, content: Option<u8>) -> Artifact {
        Artifact {
            name: format!("a{name}"),
            version,
            hash: content.map(|content| Digest::from_bytes([content; 32])),
            bytes: 1,
            content_type: String::new(),
            put_by: String::new(),
            at_ms: 0,
            reverts_to: 0,
            restored: None,
        }
    }

    /// Model of a kernel: its records, and every version of every artifact.
    #[derive(Debug, Clone, Default)]
    struct Model {
        decisions: Vec<Decision>,
        artifacts: Vec<Artifact>,
        taken: Vec<WorkflowPart>,
    }

    #[derive(Debug, Clone)]
    enum Deed {
        Open,
        Lock(usize),
        Supersede(usize),
        Put(u8, u8),
        Checkpoint,
    }

    fn deeds() -> impl Strategy<Value = Vec<Deed>> {
        let one = prop_oneof![
            Just(Deed::Open),
            (0..6usize).prop_map(Deed::Lock),
            (0..6usize).prop_map(Deed::Supersede),
            (0..3u8, 0..4u8).prop_map(|(name, content)| Deed::Put(name, content)),
            Just(Deed::Checkpoint),
        ];
        proptest::collection::vec(one, 0..30)
    }

    type Decisions = Vec<(u64, DecisionState)>;
    type Artifacts = Vec<(String, Option<Digest>)>;

    impl Model {
        fn newest(&self) -> Vec<Artifact> {
            let newer = |one: &&Artifact| !self.artifacts.iter().any(|o| o.name == one.name && o.version > one.version);
            self.artifacts.iter().filter(newer).cloned().collect()
        }

        fn part(&self) -> WorkflowPart {
            WorkflowPart::of(Workflow::default(), &self.decisions, &self.newest())
        }

        fn seen(&self) -> (Decisions, Artifacts) {
            let shown: Vec<_> = self.newest().into_iter().map(|one| (one.name, one.hash)).collect();
            (self.decisions.iter().map(|one| (one.id, one.state)).collect(), shown)
        }

        fn put(&mut self, name: &str, hash: Option<Digest>, restored: Option<CheckpointId>) {
            let version = self.artifacts.iter().filter(|one| one.name == name).count() as u32 + 1;
            self.artifacts.push(Artifact { name: name.into(), version, hash, restored, ..artifact(0, 0, None) });
        }

        fn act(&mut self, deed: &Deed) {
            let mut step = |at: usize, event| {
                if let Some(one) = self.decisions.get_mut(at)
                    && let Ok(next) = one.state.step(one.id, event)
                {
                    (one.state, one.restored) = (next, None);
                }
            };
            match deed {
                Deed::Open => self.decisions.push(decision(self.decisions.len() as u64 + 1, DecisionState::Open)),
                Deed::Lock(at) => step(*at, DecisionEvent::Lock),
                Deed::Supersede(at) => step(*at, DecisionEvent::Supersede),
                Deed::Put(name, content) => {
                    self.put(&format!("a{name}"), Some(Digest::from_bytes([*content; 32])), None);
                }
                Deed::Checkpoint => self.taken.push(self.part()),
            }
        }

        /// Restores a checkpoint; returns the number of the safety checkpoint.
        fn restore(&mut self, target: usize, options: Options) -> usize {
            let safety = self.taken.len();
            self.taken.push(self.part());
            let id = |number: usize| CheckpointId::from_bytes([number as u8 + 1; 16]);
            let part = self.taken[target].clone();
            for (number, state) in decisions(&part, &self.decisions, id(target), options) {
                let one = &mut self.decisions[number as usize - 1];
                (one.state, one.restored) = (state, Some(id(safety)));
            }
            for (name, version) in artifacts(&part, &self.newest(), id(target), options) {
                let of = |version| self.artifacts.iter().find(|one| one.name == name && one.version == version);
                let hash = version.and_then(of).and_then(|one| one.hash);
                self.put(&name, hash, Some(id(safety)));
            }
            safety
        }
    }

    proptest! {
        /// A restore has only the requested effects, an undo reverts exactly these, a second undo
        /// repeats them, and no version is lost.
        #[test]
        fn undo_restores_records(
            before in deeds(), after in deeds(), supersede_decisions: bool, with_artifacts: bool,
        ) {
            let options = Options { supersede_decisions, with_artifacts, with_memory: false };
            let mut model = Model::default();
            before.iter().for_each(|deed| model.act(deed));
            let target = model.taken.len();
            let known = model.decisions.len();
            model.act(&Deed::Checkpoint);
            let (_, then) = model.seen();
            after.iter().for_each(|deed| model.act(deed));
            let was = model.clone();
            let safety = model.restore(target, options);
            let restored = model.seen();
            for (one, before) in model.decisions.iter().zip(&was.decisions) {
                let later = one.id as usize > known;
                let expected = if later && supersede_decisions { DecisionState::Superseded } else { before.state };
                prop_assert_eq!(one.state, expected);
            }
            if with_artifacts {
                for (name, hash) in &restored.1 {
                    let then = then.iter().find(|(there, _)| there == name).and_then(|(_, hash)| *hash);
                    prop_assert_eq!(*hash, then, "{} has its earlier content", name);
                }
            } else {
                prop_assert_eq!(&restored.1, &was.seen().1);
            }
            prop_assert!(model.artifacts.starts_with(&was.artifacts), "no version is lost");
            let again = model.restore(safety, Options::default());
            prop_assert_eq!(model.seen().0, was.seen().0);
            // An artifact that the restore created is withdrawn, not deleted.
            let there = |seen: Artifacts| {
                seen.into_iter().filter(|(_, hash)| hash.is_some()).collect::<std::collections::BTreeSet<_>>()
            };
            prop_assert_eq!(there(model.seen().1), there(was.seen().1));
            model.restore(again, Options::default());
            prop_assert_eq!(model.seen().0, restored.0);
            prop_assert_eq!(there(model.seen().1), there(restored.1));
        }
    }
}
