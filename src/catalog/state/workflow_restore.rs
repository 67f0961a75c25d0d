//! Restores workflow records from a checkpoint: in a restore, and in a kernel created from it.

use rusqlite::params;

use super::grants;
use super::workflow::{add_version, decision_heads, newest_artifacts, put_step, set_agent, set_decision, workflow_now};
use crate::catalog::row::signed;
use crate::catalog::sqlite::{Db, Result};
use crate::core::ids::CheckpointId;
use crate::core::workflow::{Artifact, Decision, DecisionState, Options, WorkflowPart, restore_effects};

/// Writes the workflow records of a kernel created from a checkpoint, within its first transaction. Artifacts start at
/// the checkpoint's version.
pub(super) fn begin_from(db: &Db, part: &WorkflowPart, known: &[Decision], (actor, at_ms): (&str, i64)) -> Result<()> {
    part.workflow.steps.iter().try_for_each(|step| put_step(db, step))?;
    if !part.workflow.agent.is_empty() {
        set_agent(db, &part.workflow.agent)?;
    }
    for then in &part.decisions {
        let known = known.iter().find(|decision| decision.id == then.id);
        db.sql("record decision", |c| {
            c.prepare_cached(
                "INSERT INTO decisions (id, title, text, state, agent, step, opened_by, opened_at_ms, locked_by, locked_at_ms)
                 VALUES (?, ?, ?, 0, ?, ?, ?, ?, ?, ?)",
            )?
            .execute(params![
                signed(then.id),
                then.title,
                known.map_or("", |decision| &decision.text),
                known.map_or("", |decision| &decision.agent),
                known.map_or(0, |decision| decision.step),
                known.map_or(actor, |decision| &decision.opened_by),
                known.map_or(at_ms, |decision| decision.opened_at_ms),
                known.filter(|_| then.state != DecisionState::Open).map(|decision| decision.locked_by.as_str()),
                known.filter(|_| then.state != DecisionState::Open).and_then(|decision| decision.locked_at_ms),
            ])
        })?;
        set_decision(db, then.id, then.state, (actor, at_ms), None)?;
    }
    for then in &part.artifacts {
        let first = Artifact {
            name: then.name.clone(),
            version: then.version,
            hash: Some(then.hash),
            bytes: then.bytes,
            content_type: then.content_type.clone(),
            put_by: actor.to_owned(),
            at_ms,
            reverts_to: 0,
            restored: None,
        };
        add_version(db, &first)?;
        grants::grant_blobs(db, &[then.hash], at_ms)?;
    }
    Ok(())
}

/// Restores the workflow records, within the restore's transaction. Returns the numbers of changed decisions and
/// artifacts.
pub(super) fn restore(
    db: &Db,
    part: &WorkflowPart,
    (target, safety): (CheckpointId, CheckpointId),
    options: Options,
    (actor, at_ms): (&str, i64),
) -> Result<(u32, u32)> {
    if workflow_now(db)? != part.workflow {
        db.sql("clear steps", |c| c.prepare_cached("DELETE FROM steps")?.execute([]))?;
        part.workflow.steps.iter().try_for_each(|step| put_step(db, step))?;
        set_agent(db, &part.workflow.agent)?;
    }
    let decisions = restore_effects::decisions(part, &decision_heads(db)?, target, options);
    for (id, state) in &decisions {
        set_decision(db, *id, *state, (actor, at_ms), Some(safety))?;
    }
    let newest = newest_artifacts(db)?;
    let artifacts = restore_effects::artifacts(part, &newest, target, options);
    for (name, wanted) in &artifacts {
        let Some(newest) = newest.iter().find(|one| one.name == *name) else { continue };
        let then = part.artifacts.iter().find(|then| wanted.is_some() && then.name == *name);
        let again = Artifact {
            name: name.clone(),
            version: newest.version.saturating_add(1),
            hash: then.map(|then| then.hash),
            bytes: then.map_or(0, |then| then.bytes),
            content_type: then.map(|then| then.content_type.clone()).unwrap_or_default(),
            put_by: actor.to_owned(),
            at_ms,
            reverts_to: wanted.unwrap_or(0),
            restored: Some(safety),
        };
        add_version(db, &again)?;
    }
    Ok((decisions.len() as u32, artifacts.len() as u32))
}
