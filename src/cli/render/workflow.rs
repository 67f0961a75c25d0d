//! Steps, decisions, artifacts.

use super::time::{ago, now_ms};
use super::{Table, first_line, plain, stamp};
use crate::cli::paint::Paint;
use crate::core::quantity::format_size;
use crate::core::workflow::{Artifact, Decision, DecisionState, Step, Workflow};

/// Maximum characters of a name in a line.
const NAME: usize = 60;

/// One step.
pub fn step(step: &Step, paint: Paint) -> String {
    let state = match step.completed_at_ms {
        Some(_) => paint.good("completed"),
        None => paint.note("current"),
    };
    format!("{} {} {state}\n", paint.head(&format!("step {}", step.index)), first_line(&step.name, NAME))
}

/// Steps and the current agent.
pub fn workflow(kernel: &str, workflow: &Workflow, paint: Paint) -> String {
    let mut table = Table::new(&["STEP", "STATE", "AGENT", "BEGUN", "NAME"]);
    for step in &workflow.steps {
        let (state, painter): (_, fn(Paint, &str) -> String) = match step.completed_at_ms {
            Some(_) => ("completed", Paint::good),
            None => ("current", Paint::note),
        };
        let begun = ago(step.begun_at_ms, now_ms());
        table.row(&[step.index.to_string().as_str(), state, &step.agent, &begun, &first_line(&step.name, NAME)]);
        table.paint(1, painter);
    }
    let agent = match workflow.agent.as_str() {
        "" => String::new(),
        agent => format!("{} {}\n", paint.dim("agent:"), plain(agent)),
    };
    let none = format!("no steps; begin one: ryokan work step begin {} TEXT", plain(kernel));
    format!("{}{agent}", table.text(&none, paint))
}

fn state_of(decision: &Decision) -> (&'static str, fn(Paint, &str) -> String) {
    match decision.state {
        DecisionState::Open => ("open", Paint::note),
        DecisionState::Locked => ("locked", Paint::good),
        DecisionState::Superseded => ("superseded", Paint::dim),
    }
}

/// One decision.
pub fn decision_line(decision: &Decision, paint: Paint) -> String {
    let (state, painter) = state_of(decision);
    let number = paint.head(&format!("decision {}", decision.id));
    format!("{number} {} {}\n", first_line(&decision.title, NAME), painter(paint, state))
}

/// Decisions, oldest first.
pub fn decisions(kernel: &str, all: &[Decision], paint: Paint) -> String {
    let mut table = Table::new(&["ID", "STATE", "STEP", "AGENT", "OPENED", "DECISION"]);
    for decision in all {
        let (state, painter) = state_of(decision);
        let step = if decision.step == 0 { String::new() } else { decision.step.to_string() };
        let opened = ago(decision.opened_at_ms, now_ms());
        let title = first_line(&decision.title, NAME);
        table.row(&[decision.id.to_string().as_str(), state, &step, &decision.agent, &opened, &title]);
        table.paint(1, painter);
    }
    let none = format!("no decisions; record one: ryokan work decision open {} TEXT", plain(kernel));
    table.text(&none, paint)
}

/// One decision in detail.
pub fn decision(decision: &Decision, paint: Paint) -> String {
    let mut text = decision_line(decision, paint);
    let mut fact = |what: &str, by: &str, at_ms: Option<i64>| {
        if let Some(at_ms) = at_ms {
            text.push_str(&format!("{} {} by {}\n", paint.dim(what), stamp(at_ms), plain(by)));
        }
    };
    fact("opened:", &decision.opened_by, Some(decision.opened_at_ms));
    fact("locked:", &decision.locked_by, decision.locked_at_ms);
    fact("superseded:", &decision.superseded_by, decision.superseded_at_ms);
    if !decision.text.is_empty() {
        text.push_str(&format!("\n{}\n", plain(decision.text.trim_end())));
    }
    text
}

/// Artifacts, or versions of one.
pub fn artifacts(kernel: &str, all: &[Artifact], paint: Paint) -> String {
    let mut table = Table::new(&["ARTIFACT", "VERSION", "SIZE", "TYPE", "PUT", "HASH"]);
    for artifact in all {
        let version = match artifact.reverts_to {
            0 => artifact.version.to_string(),
            reverts_to => format!("{} (as {reverts_to})", artifact.version),
        };
        let (size, hash) = match artifact.hash {
            Some(hash) => (format_size(artifact.bytes), hash.to_string()),
            None => (String::new(), "withdrawn".into()),
        };
        let put = ago(artifact.at_ms, now_ms());
        table.row(&[artifact.name.as_str(), &version, &size, &artifact.content_type, &put, &hash]);
        if artifact.hash.is_none() {
            table.paint(5, Paint::warn);
        }
    }
    let none = format!("no artifacts; store one: ryokan work artifact put {} ARTIFACT FILE", plain(kernel));
    table.text(&none, paint)
}
