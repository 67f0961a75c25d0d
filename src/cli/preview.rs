//! `restore --preview`: what a restore would change. It changes nothing.

use super::context::Context;
use super::failure::Failure;
use super::{json, render};
use crate::core::checkpoint::Checkpoint;
use crate::core::diff::{Area, Difference};
use crate::core::info::{Job, KernelInfo};
use crate::core::missed::MissedEntry;
use crate::rpc::client::KernelClient;

/// What a restore would do.
pub struct Preview<'a> {
    /// The kernel's name.
    pub name: &'a str,
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// From the present to the checkpoint.
    pub changes: Vec<Difference>,
    /// Jobs and processes that end.
    pub ends: Vec<Job>,
    /// Parts of the present that no checkpoint can hold, so that `undo` does not bring them back.
    pub lost: Vec<MissedEntry>,
}

/// Whether a restore brings that part back.
fn is_restored(area: Area) -> bool {
    match area {
        Area::State | Area::File | Area::Mount | Area::Mcp => true,
        // Tools come with their servers, sizes with what is in them; records stay as they are.
        Area::Tool
        | Area::Journal
        | Area::Step
        | Area::Agent
        | Area::Decision
        | Area::Artifact
        | Area::Limit
        | Area::Size => false,
    }
}

/// Shows what a restore of `checkpoint` would change.
pub async fn preview(
    context: &Context,
    kernel: &KernelClient,
    info: &KernelInfo,
    checkpoint: &Checkpoint,
) -> Result<(), Failure> {
    let changes = changes(kernel, checkpoint).await?;
    let (ends, lost) = (kernel.jobs().await?, kernel.missed().await?);
    let preview = Preview { name: info.spec.name.as_str(), checkpoint, changes, ends, lost };
    context.show(|| json::preview(&preview), || render::preview(&preview, context.terminal.paint))
}

/// What a restore of `checkpoint` changes, from the present to the checkpoint.
pub async fn changes(kernel: &KernelClient, checkpoint: &Checkpoint) -> Result<Vec<Difference>, Failure> {
    let (id, mut changes) = (checkpoint.id.to_string(), Vec::new());
    let collected = kernel.diff(&id, "", async |difference| {
        if is_restored(difference.area) {
            changes.push(difference.reversed());
        }
        Ok(())
    });
    collected.await?;
    Ok(changes)
}
