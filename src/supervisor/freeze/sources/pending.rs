//! Which sources are quiesced: recorded before, removed after they are resumed.
//!
//! A daemon that finds records resumes these sources before anything else.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::{DataSource, open};
use crate::core::error::{Error, Result};
use crate::core::freeze::{Member, Target};
use crate::core::ids::GroupId;
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::sys;

/// The folder of the records.
pub(in crate::supervisor::freeze) const FOLDER: &str = "quiesced";

/// A record.
#[derive(Debug, Serialize, Deserialize)]
struct Quiesced {
    /// The group's owner.
    uid: u32,
    /// The group's name, for people.
    group: String,
    member: Member,
    /// The data directory of a server, which the configuration may name differently later.
    #[serde(default)]
    data: Option<PathBuf>,
}

/// The data directory that the configuration names now.
fn configured(host: &Host, member: &Member) -> Option<PathBuf> {
    match &member.target {
        Target::Server { server } => host.config.postgres.get(server).map(|server| server.data.clone()),
        _ => None,
    }
}

/// Refuses a server that was stopped with another data directory than it has now.
fn check_same(host: &Host, record: &Quiesced) -> Result<()> {
    match (&record.data, configured(host, &record.member)) {
        (Some(before), Some(now)) if *before != now => Err(Error::conflict(format!(
            "member {} was stopped with the data directory {}, and is configured with {}",
            record.member.name,
            before.display(),
            now.display()
        ))
        .reason("server_moved")
        .hint("set data in the configuration as before until the restore has ended")),
        _ => Ok(()),
    }
}

fn read(file: &std::path::Path) -> Result<Quiesced> {
    let failed = |error: std::io::Error| Error::unavailable(format!("{}: {error}", file.display()));
    if std::fs::metadata(file).map_err(failed)?.len() > limits::QUIESCED_BYTES {
        return Err(Error::corrupt(format!("{} is too large", file.display())));
    }
    let text = std::fs::read(file).map_err(failed)?;
    serde_json::from_slice(&text).map_err(|error| Error::corrupt(error.to_string()))
}

fn folder(host: &Host) -> PathBuf {
    host.environment.data.join("groups").join(FOLDER)
}

/// The record of a member.
pub(in crate::supervisor::freeze) fn path(host: &Host, group: GroupId, member: &str) -> PathBuf {
    folder(host).join(format!("{group}.{member}"))
}

/// Records that a source is about to be quiesced. Durable.
///
/// # Errors
/// File errors; `conflict` (`server_moved`) for a server that is still stopped in another place.
pub(in crate::supervisor::freeze) fn record(
    host: &Host,
    (id, uid, group): (GroupId, u32, &str),
    member: &Member,
) -> Result<()> {
    let failed = |error: sys::fs::FsError| Error::unavailable(error.to_string());
    sys::fs::create_dir_durable(&folder(host), 0o700, "freeze.quiesced.dir").map_err(failed)?;
    let place = path(host, id, &member.name);
    if matches!(member.target, Target::Server { .. }) && place.exists() {
        check_same(host, &read(&place)?)?;
    }
    let data = configured(host, member);
    let record = Quiesced { uid, group: group.to_owned(), member: member.clone(), data };
    let text = serde_json::to_vec(&record).map_err(|error| Error::internal(error.to_string()))?;
    sys::fs::replace(&place, &text, 0o600, "freeze.quiesced.record").map_err(failed)
}

/// Removes a record. Durable.
///
/// # Errors
/// File errors.
pub(in crate::supervisor::freeze) fn clear(host: &Host, group: GroupId, member: &str) -> Result<()> {
    let file = path(host, group, member);
    if !file.exists() {
        return Ok(());
    }
    sys::fs::remove_durable(&file, "freeze.quiesced.clear").map_err(|error| Error::unavailable(error.to_string()))
}

/// The groups of the records.
pub(in crate::supervisor::freeze) fn groups(host: &Host) -> BTreeSet<GroupId> {
    let entries = std::fs::read_dir(folder(host)).into_iter().flatten().flatten();
    let group = |entry: std::fs::DirEntry| entry.file_name().to_str()?.split_once('.')?.0.parse().ok();
    entries.filter_map(group).collect()
}

/// Resumes the recorded sources of the groups that `is_meant` accepts: not those of a restore that is still to be
/// reverted, which resumes them at its end. What fails stays recorded, and is reported.
///
/// # Errors
/// The first failure.
pub(in crate::supervisor::freeze) async fn resume(host: &Rc<Host>, is_meant: impl Fn(GroupId) -> bool) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(folder(host)) else { return Ok(()) };
    let mut failed = None;
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((group, member)) = name.split_once('.') else { continue };
        let Ok(id) = group.parse::<GroupId>() else { continue };
        if !is_meant(id) {
            continue;
        }
        if let Err(error) = resume_one(host, id, &entry.path()).await {
            tracing::error!(%member, %error, "a quiesced data source could not be resumed");
            let detail = serde_json::json!({ "member": member, "error": error.message });
            host.events.publish("", "source_not_resumed", detail);
            let message = format!("member {member} is still frozen: {}", error.message);
            failed.get_or_insert(Error { message, ..error });
        }
    }
    failed.map_or(Ok(()), Err)
}

async fn resume_one(host: &Rc<Host>, id: GroupId, file: &std::path::Path) -> Result<()> {
    let record = read(file)?;
    check_same(host, &record)?;
    let scratch = super::super::scratch(host, id).join(&record.member.name);
    std::fs::create_dir_all(&scratch).map_err(|error| Error::unavailable(error.to_string()))?;
    let source: Option<Box<dyn DataSource>> = open(host, record.uid, &record.member, scratch).await?;
    if let Some(mut source) = source {
        source.resume().await?;
    }
    clear(host, id, &record.member.name)
}
