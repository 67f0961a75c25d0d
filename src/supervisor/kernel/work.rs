//! Records of the work in a kernel, as events show them.

use crate::core::workflow::Outcome;

/// What events tell of a change.
pub(crate) fn work_detail(outcome: &Outcome) -> serde_json::Value {
    match outcome {
        Outcome::Step(step) => serde_json::json!({ "step": step.index, "name": step.name }),
        Outcome::Agent(agent) => serde_json::json!({ "agent": agent }),
        Outcome::Decision(decision) => {
            serde_json::json!({ "decision": decision.id, "title": decision.title, "state": decision.state })
        }
        Outcome::Artifact(artifact) => {
            serde_json::json!({ "artifact": artifact.name, "version": artifact.version, "hash": artifact.hash })
        }
    }
}
