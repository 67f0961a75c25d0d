//! The work in a kernel: steps, hand-overs, decisions, artifacts; what restores bring back of it, and what they never touch.

mod compaction;
mod crash_safety;
mod records;
mod restore_guarantees;
mod unified_diff;

use ryokan::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType};
use ryokan::core::workflow::{Artifact, Decision, DecisionState};
use ryokan::rpc::client::KernelClient;

/// A checkpoint that somebody asks for.
fn named(name: &str) -> CheckpointRequest {
    CheckpointRequest::new(CheckpointType::Manual, name)
}

async fn decisions(kernel: &KernelClient) -> Vec<Decision> {
    let mut all = Vec::new();
    kernel
        .decisions(async |decision| {
            all.push(decision);
            Ok(())
        })
        .await
        .expect("decisions");
    all
}

async fn states(kernel: &KernelClient) -> Vec<DecisionState> {
    decisions(kernel).await.into_iter().map(|decision| decision.state).collect()
}

async fn artifacts(kernel: &KernelClient, name: &str) -> Vec<Artifact> {
    let mut all = Vec::new();
    kernel
        .artifacts(name, async |artifact| {
            all.push(artifact);
            Ok(())
        })
        .await
        .expect("artifacts");
    all
}

async fn put(kernel: &KernelClient, name: &str, content: &str) -> Artifact {
    let hash = kernel.put_blob(content.as_bytes()).await.expect("stored");
    let source = ryokan::core::workflow::Source::Blob(hash);
    kernel.put_artifact(name, &source, "text/plain", "", 0).await.expect("put")
}

/// The newest content of an artifact.
async fn content(kernel: &KernelClient, name: &str) -> String {
    let (_, mut download) = kernel.artifact(name, 0).await.expect("there");
    let mut all = Vec::new();
    while let Some(part) = download.next().await.expect("readable") {
        all.extend(part);
    }
    String::from_utf8(all).unwrap()
}

/// Newest first.
async fn checkpoints(kernel: &KernelClient) -> Vec<Checkpoint> {
    let mut all = Vec::new();
    kernel
        .checkpoints(0, async |checkpoint, _| {
            all.push(checkpoint);
            Ok(())
        })
        .await
        .expect("checkpoints");
    all
}
