//! Steps, decisions and artifacts.

use super::text::{bounded, count, malformed, read_name, read_text, unknown};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::workflow::{Artifact, Decision, DecisionState, Source, Step, Workflow};
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads the steps and the current agent.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_workflow(reader: wire::workflow::Reader<'_>) -> Result<Workflow> {
    let steps = reader.get_steps().map_err(|e| malformed("steps", e))?;
    bounded(steps.len(), "steps", limits::STEPS as usize)?;
    let steps = steps.iter().map(read_step).collect::<Result<_>>()?;
    Ok(Workflow { steps, agent: read_text(reader.get_agent(), "agent")? })
}

/// Writes the steps and the current agent.
pub fn write_workflow(mut builder: wire::workflow::Builder<'_>, workflow: &Workflow) {
    let mut steps = builder.reborrow().init_steps(count(workflow.steps.len()));
    for (i, step) in workflow.steps.iter().enumerate() {
        write_step(steps.reborrow().get(count(i)), step);
    }
    builder.set_agent(workflow.agent.as_str());
}

/// Reads a step.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_step(reader: wire::step::Reader<'_>) -> Result<Step> {
    Ok(Step {
        index: reader.get_index(),
        name: read_text(reader.get_name(), "name of a step")?,
        agent: read_text(reader.get_agent(), "agent of a step")?,
        begun_at_ms: reader.get_begun_at_ms(),
        completed_at_ms: time(reader.get_completed_at_ms()),
    })
}

/// Writes a step.
pub fn write_step(mut builder: wire::step::Builder<'_>, step: &Step) {
    builder.set_index(step.index);
    builder.set_name(step.name.as_str());
    builder.set_agent(step.agent.as_str());
    builder.set_begun_at_ms(step.begun_at_ms);
    builder.set_completed_at_ms(step.completed_at_ms.unwrap_or(0));
}

/// Reads a decision.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_decision(reader: wire::decision::Reader<'_>) -> Result<Decision> {
    Ok(Decision {
        id: reader.get_id(),
        title: read_text(reader.get_title(), "title of a decision")?,
        text: read_text(reader.get_text(), "text of a decision")?,
        state: match reader.get_state().map_err(|n| unknown("state of a decision", n))? {
            wire::DecisionState::Open => DecisionState::Open,
            wire::DecisionState::Locked => DecisionState::Locked,
            wire::DecisionState::Superseded => DecisionState::Superseded,
        },
        agent: read_text(reader.get_agent(), "agent of a decision")?,
        step: reader.get_step(),
        opened_by: read_text(reader.get_opened_by(), "who opened a decision")?,
        opened_at_ms: reader.get_opened_at_ms(),
        locked_by: read_text(reader.get_locked_by(), "who locked a decision")?,
        locked_at_ms: time(reader.get_locked_at_ms()),
        superseded_by: read_text(reader.get_superseded_by(), "who superseded a decision")?,
        superseded_at_ms: time(reader.get_superseded_at_ms()),
        restored: None,
    })
}

/// Writes a decision.
pub fn write_decision(mut builder: wire::decision::Builder<'_>, decision: &Decision) {
    builder.set_id(decision.id);
    builder.set_title(decision.title.as_str());
    builder.set_text(decision.text.as_str());
    builder.set_state(match decision.state {
        DecisionState::Open => wire::DecisionState::Open,
        DecisionState::Locked => wire::DecisionState::Locked,
        DecisionState::Superseded => wire::DecisionState::Superseded,
    });
    builder.set_agent(decision.agent.as_str());
    builder.set_step(decision.step);
    builder.set_opened_by(decision.opened_by.as_str());
    builder.set_opened_at_ms(decision.opened_at_ms);
    builder.set_locked_by(decision.locked_by.as_str());
    builder.set_locked_at_ms(decision.locked_at_ms.unwrap_or(0));
    builder.set_superseded_by(decision.superseded_by.as_str());
    builder.set_superseded_at_ms(decision.superseded_at_ms.unwrap_or(0));
}

/// Reads a version of an artifact.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_artifact(reader: wire::artifact::Reader<'_>) -> Result<Artifact> {
    let hash = read_text(reader.get_hash(), "hash of an artifact")?;
    let hash = match hash.as_str() {
        "" => None,
        hash => Some(hash.parse().map_err(|error| Error::invalid(format!("{error}")))?),
    };
    Ok(Artifact {
        name: read_text(reader.get_name(), "name of an artifact")?,
        version: reader.get_version(),
        hash,
        bytes: reader.get_bytes(),
        content_type: read_text(reader.get_content_type(), "type of an artifact")?,
        put_by: read_text(reader.get_put_by(), "who put an artifact")?,
        at_ms: reader.get_at_ms(),
        reverts_to: reader.get_reverts_to(),
        restored: None,
    })
}

/// Writes a version of an artifact.
pub fn write_artifact(mut builder: wire::artifact::Builder<'_>, artifact: &Artifact) {
    builder.set_name(artifact.name.as_str());
    builder.set_version(artifact.version);
    builder.set_hash(artifact.hash.map(|hash| hash.to_string()).unwrap_or_default());
    builder.set_bytes(artifact.bytes);
    builder.set_content_type(artifact.content_type.as_str());
    builder.set_put_by(artifact.put_by.as_str());
    builder.set_at_ms(artifact.at_ms);
    builder.set_reverts_to(artifact.reverts_to);
}

/// Reads the source of an artifact.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_source(reader: wire::artifact_source::Reader<'_>) -> Result<Source> {
    use wire::artifact_source::Which;
    match reader.which().map_err(|n| unknown("source of an artifact", n))? {
        Which::Hash(hash) => {
            let hash = read_name(hash, "hash of an artifact")?;
            hash.parse().map(Source::Blob).map_err(|error| Error::invalid(format!("{error}")))
        }
        Which::Path(path) => {
            let path = super::read_data(path, "path of an artifact", limits::PATH_BYTES)?;
            Ok(Source::File(path))
        }
    }
}

/// Writes the source of an artifact.
pub fn write_source(mut builder: wire::artifact_source::Builder<'_>, source: &Source) {
    match source {
        Source::Blob(hash) => builder.set_hash(hash.to_string()),
        Source::File(path) => builder.set_path(path),
    }
}

/// A time on the wire, where 0 means that the event did not happen.
fn time(ms: i64) -> Option<i64> {
    (ms != 0).then_some(ms)
}

#[cfg(test)]
#[expect(clippy::unit_arg, reason = "`infallible` turns a writer that cannot fail into one that the checks take")]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::{check_round_trip, infallible};
    use super::*;
    use crate::core::ids::Digest;

    fn any_time() -> impl Strategy<Value = Option<i64>> {
        proptest::option::of(1..i64::MAX)
    }

    prop_compose! {
        fn any_step()(index: u32, name: String, agent: String, begun_at_ms: i64, completed_at_ms in any_time()) -> Step {
            Step { index, name, agent, begun_at_ms, completed_at_ms }
        }
    }

    prop_compose! {
        fn any_decision()(
            id: u64, words: [String; 3], state in 0..3usize, step: u32, by: [String; 3], opened_at_ms: i64,
            locked_at_ms in any_time(), superseded_at_ms in any_time(),
        ) -> Decision {
            let [title, text, agent] = words;
            let [opened_by, locked_by, superseded_by] = by;
            let state = DecisionState::ALL[state];
            Decision {
                id, title, text, state, agent, step, opened_by, opened_at_ms, locked_by, locked_at_ms, superseded_by,
                superseded_at_ms, restored: None,
            }
        }
    }

    prop_compose! {
        fn any_artifact()(
            name: String, version: u32, hash in proptest::option::of(any::<[u8; 32]>()), bytes: u64, content_type: String,
            put_by: String, at_ms: i64, reverts_to: u32,
        ) -> Artifact {
            let hash = hash.map(Digest::from_bytes);
            Artifact { name, version, hash, bytes, content_type, put_by, at_ms, reverts_to, restored: None }
        }
    }

    proptest! {
        #[test]
        fn workflow_records_round_trip(
            steps in proptest::collection::vec(any_step(), 0..4), agent: String, decision in any_decision(),
            artifact in any_artifact(),
        ) {
            let workflow = Workflow { steps, agent };
            check_round_trip::<wire::workflow::Owned, _>(
                &workflow, |b, w| infallible(write_workflow(b, w)), read_workflow)?;
            check_round_trip::<wire::decision::Owned, _>(
                &decision, |b, d| infallible(write_decision(b, d)), read_decision)?;
            check_round_trip::<wire::artifact::Owned, _>(
                &artifact, |b, a| infallible(write_artifact(b, a)), read_artifact)?;
        }
    }
}
