//! Workflow records: steps, the current agent, decisions, artifacts. Each change has its journal entry, in one
//! transaction.

use rusqlite::types::{Type, ValueRef};
use rusqlite::{OptionalExtension as _, Row, params};

use super::journal::{self, EntryKind, NewEntry};
use super::keys::{self, Kind};
use super::{StateHandle, grants};
use crate::catalog::error::CatalogError;
use crate::catalog::row::{bytes, signed, unsigned, unsigned32, wrong};
use crate::catalog::sqlite::{Db, Result};
use crate::catalog::thread::Pending;
use crate::core::error::Error;
use crate::core::ids::{CheckpointId, Digest};
use crate::core::limits;
use crate::core::workflow::{
    self, Artifact, Change, Content, Decision, DecisionEvent, DecisionState, Outcome, Request, Step, Workflow,
    WorkflowPart,
};

/// Result of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// Its outcome.
    pub outcome: Outcome,
    /// Its journal entry; none: the change had been made before, nothing was written.
    pub sequence: Option<u64>,
}

impl StateHandle {
    /// Steps and current agent.
    ///
    /// # Errors
    /// Database errors.
    pub fn workflow(&self) -> Pending<Workflow> {
        self.read(workflow_now)
    }

    /// The workflow records for a checkpoint.
    ///
    /// # Errors
    /// Database errors.
    pub fn workflow_part(&self) -> Pending<WorkflowPart> {
        self.read(part)
    }

    /// Changes the workflow records, with a journal entry.
    ///
    /// # Errors
    /// `Refused` as `core::workflow` says, `NotFound`, `Limit`.
    pub fn change_workflow(&self, request: Request) -> Pending<Done> {
        self.write("state.workflow.change", move |db| change(db, &request))
    }

    /// The outcome of an unexpired key.
    ///
    /// # Errors
    /// `Refused` if the key belongs to another kind of change.
    pub fn changed_by_key(&self, request: Request) -> Pending<Option<Outcome>> {
        self.read(move |db| before(db, &request))
    }

    /// Decisions after a number, oldest first, at most a page.
    ///
    /// # Errors
    /// Database errors.
    pub fn decisions(&self, after: u64) -> Pending<Vec<Decision>> {
        self.read(move |db| decisions(db, after))
    }

    /// The newest version of each artifact after a name, by name, at most [`PAGE_ROWS`](limits::PAGE_ROWS).
    ///
    /// # Errors
    /// Database errors.
    pub fn artifacts(&self, after: String) -> Pending<Vec<Artifact>> {
        self.read(move |db| artifacts_after(db, &after, limits::PAGE_ROWS as u64))
    }

    /// Versions of one artifact before a number, newest first, at most [`PAGE_ROWS`](limits::PAGE_ROWS).
    ///
    /// # Errors
    /// Database errors.
    pub fn artifact_versions(&self, name: String, before: u32) -> Pending<Vec<Artifact>> {
        self.read(move |db| versions_before(db, &name, before, limits::PAGE_ROWS))
    }

    /// One version of an artifact; 0: the newest.
    ///
    /// # Errors
    /// Database errors.
    pub fn artifact(&self, name: String, version: u32) -> Pending<Option<Artifact>> {
        self.read(move |db| artifact(db, &name, version))
    }
}

/// The workflow records for a checkpoint taken now.
pub(super) fn part(db: &Db) -> Result<WorkflowPart> {
    Ok(WorkflowPart::of(workflow_now(db)?, &decision_heads(db)?, &newest_artifacts(db)?))
}

/// Makes one change, within the caller's transaction.
pub(super) fn change(db: &Db, request: &Request) -> Result<Done> {
    if let Some(outcome) = before(db, request)? {
        return Ok(Done { outcome, sequence: None });
    }
    let Request { change, actor, at_ms, key } = request;
    let (outcome, text, detail) = match change {
        Change::BeginStep { name } => begin_step(db, name, *at_ms)?,
        Change::CompleteStep => complete_step(db, *at_ms)?,
        Change::HandOver { agent, note } => hand_over(db, agent, note)?,
        Change::OpenDecision { title, text } => open_decision(db, title, text, actor, *at_ms)?,
        Change::LockDecision { id } => step_decision(db, *id, DecisionEvent::Lock, actor, *at_ms)?,
        Change::SupersedeDecision { id } => step_decision(db, *id, DecisionEvent::Supersede, actor, *at_ms)?,
        Change::PutArtifact { name, content } => match put_artifact(db, name, content, actor, *at_ms)? {
            Put::New(artifact) => put_words(artifact),
            Put::Same(artifact) => {
                let outcome = Outcome::Artifact(artifact);
                remember(db, key, &outcome, *at_ms)?;
                return Ok(Done { outcome, sequence: None });
            }
        },
        Change::RevertArtifact { name, version } => put_words(revert_artifact(db, name, *version, actor, *at_ms)?),
    };
    let (kind, at_ms) = (EntryKind::Mark, *at_ms);
    let entry = NewEntry { kind, at_ms, actor: actor.clone(), text, detail_json: detail.to_string() };
    let sequence = journal::append_one(db, entry)?;
    remember(db, key, &outcome, at_ms)?;
    Ok(Done { outcome, sequence: Some(sequence) })
}

fn remember(db: &Db, key: &str, outcome: &Outcome, at_ms: i64) -> Result<()> {
    match outcome {
        _ if key.is_empty() => Ok(()),
        Outcome::Decision(decision) => keys::remember(db, key, Kind::Decision, "", decision.id, at_ms),
        Outcome::Artifact(artifact) => {
            keys::remember(db, key, Kind::Artifact, &artifact.name, artifact.version.into(), at_ms)
        }
        Outcome::Step(_) | Outcome::Agent(_) => Ok(()),
    }
}

type JournalledChange = (Outcome, String, serde_json::Value);

fn before(db: &Db, request: &Request) -> Result<Option<Outcome>> {
    let kind = match &request.change {
        Change::OpenDecision { .. } => Kind::Decision,
        Change::PutArtifact { .. } => Kind::Artifact,
        Change::BeginStep { .. }
        | Change::CompleteStep
        | Change::HandOver { .. }
        | Change::LockDecision { .. }
        | Change::SupersedeDecision { .. }
        | Change::RevertArtifact { .. } => return Ok(None),
    };
    let Some((name, number)) = keys::recall(db, &request.key, kind, request.at_ms)? else { return Ok(None) };
    Ok(match kind {
        Kind::Message => None,
        Kind::Decision => decision(db, number)?.map(Outcome::Decision),
        Kind::Artifact => artifact(db, &name, u32::try_from(number).unwrap_or(0))?.map(Outcome::Artifact),
    })
}

pub(super) fn workflow_now(db: &Db) -> Result<Workflow> {
    let steps = db.sql("list steps", |c| {
        c.prepare_cached("SELECT number, name, agent, begun_at_ms, completed_at_ms FROM steps ORDER BY number")?
            .query_map([], read_step)?
            .collect()
    })?;
    Ok(Workflow { steps, agent: agent(db)? })
}

fn newest_step(db: &Db) -> Result<Option<Step>> {
    db.sql("read step", |c| {
        c.prepare_cached(
            "SELECT number, name, agent, begun_at_ms, completed_at_ms FROM steps ORDER BY number DESC LIMIT 1",
        )?
        .query_row([], read_step)
        .optional()
    })
}

fn agent(db: &Db) -> Result<String> {
    let found = db.sql("read agent", |c| {
        c.prepare_cached("SELECT name FROM agent")?.query_row([], |row| row.get::<_, String>(0)).optional()
    })?;
    Ok(found.unwrap_or_default())
}

pub(super) fn set_agent(db: &Db, name: &str) -> Result<()> {
    db.sql("set agent", |c| {
        c.prepare_cached("INSERT OR REPLACE INTO agent (one, name) VALUES (1, ?)")?.execute([name]).map(drop)
    })
}

pub(super) fn put_step(db: &Db, step: &Step) -> Result<()> {
    db.sql("record step", |c| {
        c.prepare_cached(
            "INSERT OR REPLACE INTO steps (number, name, agent, begun_at_ms, completed_at_ms) VALUES (?, ?, ?, ?, ?)",
        )?
        .execute(params![step.index, step.name, step.agent, step.begun_at_ms, step.completed_at_ms])
        .map(drop)
    })
}

fn begin_step(db: &Db, name: &str, at_ms: i64) -> Result<JournalledChange> {
    let step = workflow::begin(newest_step(db)?.as_ref(), name, &agent(db)?, at_ms).map_err(refused)?;
    put_step(db, &step)?;
    let text = format!("step {} begun: {name}", step.index);
    let detail = serde_json::json!({ "step": step.index });
    Ok((Outcome::Step(step), text, detail))
}

fn complete_step(db: &Db, at_ms: i64) -> Result<JournalledChange> {
    let step = workflow::complete(newest_step(db)?.as_ref(), at_ms).map_err(refused)?;
    put_step(db, &step)?;
    let text = format!("step {} completed: {}", step.index, step.name);
    let detail = serde_json::json!({ "step": step.index });
    Ok((Outcome::Step(step), text, detail))
}

fn hand_over(db: &Db, to: &str, note: &str) -> Result<JournalledChange> {
    let from = agent(db)?;
    workflow::hand_over(&from, to).map_err(refused)?;
    set_agent(db, to)?;
    let whom = if from.is_empty() { String::new() } else { format!(" from {from}") };
    let why = if note.is_empty() { String::new() } else { format!(": {note}") };
    let detail = serde_json::json!({ "from": from, "to": to });
    Ok((Outcome::Agent(to.to_owned()), format!("handed over{whom} to {to}{why}"), detail))
}

const DECISION: &str = "SELECT id, title, text, state, agent, step, opened_by, opened_at_ms, locked_by, locked_at_ms,
     superseded_by, superseded_at_ms, restored FROM decisions";

fn decision(db: &Db, id: u64) -> Result<Option<Decision>> {
    db.sql("read decision", |c| {
        c.prepare_cached(&format!("{DECISION} WHERE id = ?"))?.query_row([signed(id)], read_decision).optional()
    })
}

fn decisions(db: &Db, after: u64) -> Result<Vec<Decision>> {
    db.sql("list decisions", |c| {
        let mut statement = c.prepare_cached(&format!("{DECISION} WHERE id > ? ORDER BY id LIMIT ?"))?;
        let rows = statement.query_map(params![signed(after), limits::PAGE_ROWS as i64], read_decision)?;
        let (mut page, mut bytes) = (Vec::new(), 0);
        for decision in rows {
            let decision = decision?;
            bytes += decision.text.len();
            page.push(decision);
            if bytes > limits::JOURNAL_PAGE_BYTES {
                break;
            }
        }
        Ok(page)
    })
}

/// Every decision without its text.
pub(super) fn decision_heads(db: &Db) -> Result<Vec<Decision>> {
    db.sql("list decisions", |c| {
        c.prepare_cached(&format!("{} ORDER BY id", DECISION.replace("title, text", "title, ''")))?
            .query_map([], read_decision)?
            .collect()
    })
}

fn open_decision(db: &Db, title: &str, text: &str, actor: &str, at_ms: i64) -> Result<JournalledChange> {
    let (agent, step) = (agent(db)?, newest_step(db)?.map_or(0, |step| step.index));
    let id = db.sql("open decision", |c| {
        c.prepare_cached(
            "INSERT INTO decisions (title, text, state, agent, step, opened_by, opened_at_ms) VALUES (?, ?, 0, ?, ?, ?, ?)",
        )?
        .insert(params![title, text, agent, step, actor, at_ms])
        .map(|id| id as u64)
    })?;
    // Decisions are never deleted: the newest number is their count.
    if id > limits::DECISIONS {
        return Err(CatalogError::Limit { what: "the number of decisions", most: limits::DECISIONS });
    }
    let detail = serde_json::json!({ "decision": id });
    let opened = decision(db, id)?.ok_or(CatalogError::Stopped)?;
    Ok((Outcome::Decision(opened), format!("decision {id} opened: {title}"), detail))
}

fn step_decision(db: &Db, id: u64, event: DecisionEvent, actor: &str, at_ms: i64) -> Result<JournalledChange> {
    let found = decision(db, id)?.ok_or_else(|| CatalogError::NotFound(format!("decision {id} in this kernel")))?;
    let state = found.state.step(id, event).map_err(refused)?;
    set_decision(db, id, state, (actor, at_ms), None)?;
    if state == DecisionState::Locked {
        db.sql("lock decision", |c| {
            c.prepare_cached("UPDATE decisions SET locked_by = ?, locked_at_ms = ? WHERE id = ?")?.execute(params![
                actor,
                at_ms,
                signed(id)
            ])
        })?;
    }
    let detail = serde_json::json!({ "decision": id });
    let now = decision(db, id)?.ok_or(CatalogError::Stopped)?;
    Ok((Outcome::Decision(now), format!("decision {id} {}: {}", state.name(), found.title), detail))
}

/// Sets a decision's state; `restored`: the safety checkpoint of the restore that does it.
pub(super) fn set_decision(
    db: &Db,
    id: u64,
    state: DecisionState,
    (actor, at_ms): (&str, i64),
    restored: Option<CheckpointId>,
) -> Result<()> {
    let by = (state == DecisionState::Superseded).then_some((actor, at_ms));
    let place = DecisionState::ALL.iter().position(|one| *one == state).map(|place| place as i64);
    db.sql("change decision", |c| {
        c.prepare_cached(
            "UPDATE decisions SET state = ?, superseded_by = ?, superseded_at_ms = ?, restored = ? WHERE id = ?",
        )?
        .execute(params![
            place,
            by.map(|(actor, _)| actor),
            by.map(|(_, at_ms)| at_ms),
            restored.map(|id| *id.as_bytes()),
            signed(id)
        ])
        .map(drop)
    })
}

const ARTIFACT: &str =
    "SELECT name, version, object, bytes, content_type, put_by, at_ms, reverts_to, restored FROM artifacts";

fn artifact(db: &Db, name: &str, version: u32) -> Result<Option<Artifact>> {
    db.sql("read artifact", |c| match version {
        0 => c
            .prepare_cached(&format!("{ARTIFACT} WHERE name = ? ORDER BY version DESC LIMIT 1"))?
            .query_row([name], read_artifact)
            .optional(),
        1.. => c
            .prepare_cached(&format!("{ARTIFACT} WHERE name = ? AND version = ?"))?
            .query_row(params![name, version], read_artifact)
            .optional(),
    })
}

pub(super) fn newest_artifacts(db: &Db) -> Result<Vec<Artifact>> {
    artifacts_after(db, "", limits::ARTIFACTS)
}

fn artifacts_after(db: &Db, after: &str, most: u64) -> Result<Vec<Artifact>> {
    db.sql("list artifacts", |c| {
        c.prepare_cached(&format!(
            "{ARTIFACT} WHERE (name, version) IN (SELECT name, max(version) FROM artifacts WHERE name > ? GROUP BY name)
             ORDER BY name LIMIT ?"
        ))?
        .query_map(params![after, signed(most)], read_artifact)?
        .collect()
    })
}

fn versions_before(db: &Db, name: &str, before: u32, most: usize) -> Result<Vec<Artifact>> {
    db.sql("list versions", |c| {
        c.prepare_cached(&format!("{ARTIFACT} WHERE name = ? AND version < ? ORDER BY version DESC LIMIT ?"))?
            .query_map(params![name, before, most as i64], read_artifact)?
            .collect()
    })
}

pub(super) fn add_version(db: &Db, artifact: &Artifact) -> Result<()> {
    db.sql("record artifact", |c| {
        c.prepare_cached(
            "INSERT INTO artifacts (name, version, object, bytes, content_type, put_by, at_ms, reverts_to, restored)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute(params![
            artifact.name,
            artifact.version,
            artifact.hash.map(|hash| *hash.as_bytes()),
            signed(artifact.bytes),
            artifact.content_type,
            artifact.put_by,
            artifact.at_ms,
            artifact.reverts_to,
            artifact.restored.map(|id| *id.as_bytes()),
        ])
        .map(drop)
    })
}

enum Put {
    New(Artifact),
    /// The newest version has this content already.
    Same(Artifact),
}

fn put_artifact(db: &Db, name: &str, content: &Content, actor: &str, at_ms: i64) -> Result<Put> {
    let newest = artifact(db, name, 0)?;
    if let Some(newest) = &newest
        && newest.hash == Some(content.hash)
        && newest.content_type == content.content_type
    {
        return Ok(Put::Same(newest.clone()));
    }
    if newest.is_none() {
        let names = db.sql("count artifacts", |c| {
            c.prepare_cached("SELECT count(DISTINCT name) FROM artifacts")?.query_row([], |row| unsigned(row, 0))
        })?;
        if names >= limits::ARTIFACTS {
            return Err(CatalogError::Limit { what: "the number of artifacts", most: limits::ARTIFACTS });
        }
    }
    let put = Artifact {
        name: name.to_owned(),
        version: next_version(newest.as_ref())?,
        hash: Some(content.hash),
        bytes: content.bytes,
        content_type: content.content_type.clone(),
        put_by: actor.to_owned(),
        at_ms,
        reverts_to: 0,
        restored: None,
    };
    add_version(db, &put)?;
    grants::grant_blobs(db, &[content.hash], at_ms)?;
    Ok(Put::New(put))
}

fn next_version(newest: Option<&Artifact>) -> Result<u32> {
    match newest.map_or(0, |newest| newest.version) {
        last if last >= limits::ARTIFACT_VERSIONS => {
            let most = limits::ARTIFACT_VERSIONS.into();
            Err(CatalogError::Limit { what: "the number of versions of an artifact", most })
        }
        last => Ok(last + 1),
    }
}

fn revert_artifact(db: &Db, name: &str, version: u32, actor: &str, at_ms: i64) -> Result<Artifact> {
    let none = |what: String| move || CatalogError::NotFound(what);
    let newest = artifact(db, name, 0)?.ok_or_else(none(format!("artifact {name:?} in this kernel")))?;
    let wanted = artifact(db, name, version)?.ok_or_else(none(format!("version {version} of artifact {name:?}")))?;
    if wanted.hash.is_none() {
        return Err(CatalogError::Conflict(format!("artifact {name:?} was withdrawn in version {version}")));
    }
    if (wanted.hash, &wanted.content_type) == (newest.hash, &newest.content_type) {
        return Err(CatalogError::Conflict(format!("artifact {name:?} is as in version {version} already")));
    }
    let (version, put_by) = (next_version(Some(&newest))?, actor.to_owned());
    let again = Artifact { version, put_by, at_ms, reverts_to: wanted.version, restored: None, ..wanted };
    add_version(db, &again)?;
    Ok(again)
}

fn put_words(artifact: Artifact) -> JournalledChange {
    let Artifact { name, version, .. } = &artifact;
    let text = match artifact.reverts_to {
        0 => format!("artifact {name:?} version {version}, {} bytes", artifact.bytes),
        reverts_to => format!("artifact {name:?} version {version}, as version {reverts_to}"),
    };
    let detail = serde_json::json!({ "artifact": name, "version": version, "hash": artifact.hash });
    (Outcome::Artifact(artifact), text, detail)
}

fn refused(error: Error) -> CatalogError {
    CatalogError::Refused(Box::new(error))
}

fn read_step(row: &Row<'_>) -> rusqlite::Result<Step> {
    Ok(Step {
        index: unsigned32(row, 0)?,
        name: row.get(1)?,
        agent: row.get(2)?,
        begun_at_ms: row.get(3)?,
        completed_at_ms: row.get(4)?,
    })
}

fn read_decision(row: &Row<'_>) -> rusqlite::Result<Decision> {
    let place: i64 = row.get(3)?;
    let state = usize::try_from(place).ok().and_then(|place| DecisionState::ALL.get(place).copied());
    Ok(Decision {
        id: unsigned(row, 0)?,
        title: row.get(1)?,
        text: row.get(2)?,
        state: state.ok_or_else(|| wrong(3, Type::Integer, format!("{place} is no state of a decision")))?,
        agent: row.get(4)?,
        step: unsigned32(row, 5)?,
        opened_by: row.get(6)?,
        opened_at_ms: row.get(7)?,
        locked_by: row.get::<_, Option<String>>(8)?.unwrap_or_default(),
        locked_at_ms: row.get(9)?,
        superseded_by: row.get::<_, Option<String>>(10)?.unwrap_or_default(),
        superseded_at_ms: row.get(11)?,
        restored: optional(row, 12)?.map(CheckpointId::from_bytes),
    })
}

fn read_artifact(row: &Row<'_>) -> rusqlite::Result<Artifact> {
    Ok(Artifact {
        name: row.get(0)?,
        version: unsigned32(row, 1)?,
        hash: optional(row, 2)?.map(Digest::from_bytes),
        bytes: unsigned(row, 3)?,
        content_type: row.get(4)?,
        put_by: row.get(5)?,
        at_ms: row.get(6)?,
        reverts_to: unsigned32(row, 7)?,
        restored: optional(row, 8)?.map(CheckpointId::from_bytes),
    })
}

fn optional<const N: usize>(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<[u8; N]>> {
    match row.get_ref(column)? {
        ValueRef::Null => Ok(None),
        _ => bytes(row, column).map(Some),
    }
}
