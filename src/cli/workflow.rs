//! Records of the work in a kernel: steps, hand-offs, decisions, artifacts.

use std::io::Read;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;

use super::args::NameArgs;
use super::context::Context;
use super::failure::Failure;
use super::names::KernelArg;
use super::{blobs, json, render};
use crate::core::limits;
use crate::core::workflow::{Artifact, Decision, Source};
use crate::rpc::client::KernelClient;

/// `ryokan work`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan work step begin demo \"read the data\"
  ryokan work handoff demo reviewer -m \"the tests fail\"
  ryokan work decision open demo \"use SQLite\"
  ryokan work artifact put demo report report.md")]
pub struct WorkArgs {
    /// The record.
    #[command(subcommand)]
    pub record: WorkCommand,
}

/// Kinds of records.
#[derive(Debug, Subcommand)]
pub enum WorkCommand {
    /// Begin, complete and list steps
    Step(StepArgs),
    /// Hand the work over to another agent, with a checkpoint
    Handoff(HandoffArgs),
    /// Open, lock, supersede and list decisions
    Decision(DecisionArgs),
    /// Put, get, list and revert artifacts: named, versioned results
    Artifact(ArtifactArgs),
}

/// Runs a command on a kernel's records.
pub async fn work(context: &Context, args: WorkArgs) -> Result<(), Failure> {
    match args.record {
        WorkCommand::Step(args) => step(context, args).await,
        WorkCommand::Handoff(args) => handoff(context, args).await,
        WorkCommand::Decision(args) => decision(context, args).await,
        WorkCommand::Artifact(args) => artifact(context, args).await,
    }
}

/// `ryokan work step`
#[derive(Debug, Args)]
pub struct StepArgs {
    /// The action.
    #[command(subcommand)]
    pub action: StepAction,
}

/// Actions on steps.
#[derive(Debug, Subcommand)]
pub enum StepAction {
    /// Begin a step
    Begin {
        /// Name or id of the kernel
        name: KernelArg,
        /// Description of the step
        text: String,
    },
    /// Complete the current step, with a checkpoint
    Complete(NameArgs),
    /// List a kernel's steps and its current agent
    Ls(NameArgs),
}

/// `ryokan work handoff`
#[derive(Debug, Args)]
pub struct HandoffArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Name of the next agent
    pub agent: String,
    /// Note for the next agent
    #[arg(short, long, value_name = "TEXT", default_value = "")]
    pub message: String,
}

/// `ryokan work decision`
#[derive(Debug, Args)]
pub struct DecisionArgs {
    /// The action.
    #[command(subcommand)]
    pub action: DecisionAction,
}

/// Actions on decisions.
#[derive(Debug, Subcommand)]
pub enum DecisionAction {
    /// Record a new decision
    Open {
        /// Name or id of the kernel
        name: KernelArg,
        /// The decision in one line
        title: String,
        /// Full text of the decision; - reads standard input
        #[arg(short, long, value_name = "TEXT", default_value = "")]
        message: String,
    },
    /// Lock a decision, after a checkpoint
    Lock(DecisionIdArgs),
    /// Mark a decision as superseded
    Supersede(DecisionIdArgs),
    /// Show a decision in detail
    Show(DecisionIdArgs),
    /// List a kernel's decisions
    Ls(NameArgs),
}

/// A decision of a kernel.
#[derive(Debug, Args)]
pub struct DecisionIdArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Number of the decision
    pub id: u64,
}

/// `ryokan work artifact`
#[derive(Debug, Args)]
pub struct ArtifactArgs {
    /// The action.
    #[command(subcommand)]
    pub action: ArtifactAction,
}

/// Actions on artifacts.
#[derive(Debug, Subcommand)]
pub enum ArtifactAction {
    /// Store a new version of an artifact
    Put {
        /// Name or id of the kernel
        name: KernelArg,
        /// Name of the artifact
        artifact: String,
        /// The file; - is standard input
        #[arg(required_unless_present = "path")]
        file: Option<PathBuf>,
        /// Use a file of the workspace instead
        #[arg(long, value_name = "PATH", conflicts_with = "file")]
        path: Option<PathBuf>,
        /// Media type, such as text/markdown
        #[arg(long = "type", value_name = "TYPE", default_value = "")]
        content_type: String,
    },
    /// Print a version of an artifact, or write it to a file
    Get {
        /// Name or id of the kernel
        name: KernelArg,
        /// Name of the artifact
        artifact: String,
        /// The version; the newest by default
        #[arg(long, value_name = "N", default_value_t = 0)]
        version: u32,
        /// Write to this file
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// List a kernel's artifacts, or all versions of one
    Ls {
        /// Name or id of the kernel
        name: KernelArg,
        /// Name of the artifact
        #[arg(default_value = "")]
        artifact: String,
    },
    /// Make the content of an earlier version the newest
    Revert {
        /// Name or id of the kernel
        name: KernelArg,
        /// Name of the artifact
        artifact: String,
        /// The version
        version: u32,
    },
}

/// Begins, completes or lists steps.
async fn step(context: &Context, args: StepArgs) -> Result<(), Failure> {
    let paint = context.terminal.paint;
    match args.action {
        StepAction::Begin { name, text } => {
            let begun = context.kernel(&name).await?.0.begin_step(&text, 0).await?;
            context.show(|| json::of(&begun), || render::step(&begun, paint))
        }
        StepAction::Complete(NameArgs { name }) => {
            let (step, checkpoint) = context.kernel(&name).await?.0.complete_step(0).await?;
            context.show(
                || json!({ "step": step, "checkpoint": json::checkpoint(&checkpoint, true) }),
                || render::step(&step, paint) + &render::checkpoint_line(&checkpoint, true, paint),
            )
        }
        StepAction::Ls(NameArgs { name }) => {
            let workflow = context.kernel(&name).await?.0.workflow().await?;
            context.show(|| json::of(&workflow), || render::workflow(&name, &workflow, paint))
        }
    }
}

/// Hands the work over to another agent.
async fn handoff(context: &Context, args: HandoffArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    let checkpoint = kernel.hand_over(&args.agent, &args.message, 0).await?;
    let paint = context.terminal.paint;
    context.show(|| json::checkpoint(&checkpoint, true), || render::checkpoint_line(&checkpoint, true, paint))
}

/// Opens, locks, supersedes, shows or lists decisions.
async fn decision(context: &Context, args: DecisionArgs) -> Result<(), Failure> {
    let paint = context.terminal.paint;
    match args.action {
        DecisionAction::Open { name, title, message } => {
            let text = if message == "-" { standard_input()? } else { message };
            let opened = context.kernel(&name).await?.0.open_decision(&title, &text, "", 0).await?;
            context.show(|| json::of(&opened), || render::decision_line(&opened, paint))
        }
        DecisionAction::Lock(DecisionIdArgs { name, id }) => {
            let (locked, checkpoint) = context.kernel(&name).await?.0.lock_decision(id, 0).await?;
            context.show(
                || json!({ "decision": locked, "checkpoint": json::checkpoint(&checkpoint, true) }),
                || render::checkpoint_line(&checkpoint, true, paint) + &render::decision_line(&locked, paint),
            )
        }
        DecisionAction::Supersede(DecisionIdArgs { name, id }) => {
            let superseded = context.kernel(&name).await?.0.supersede_decision(id, 0).await?;
            context.show(|| json::of(&superseded), || render::decision_line(&superseded, paint))
        }
        DecisionAction::Show(DecisionIdArgs { name, id }) => {
            let all = decisions(&context.kernel(&name).await?.0).await?;
            let found = all.into_iter().find(|decision| decision.id == id);
            let none = || crate::core::error::Error::not_found(format!("kernel {name} has no decision {id}"));
            let found = found.ok_or_else(none)?;
            context.show(|| json::of(&found), || render::decision(&found, paint))
        }
        DecisionAction::Ls(NameArgs { name }) => {
            let all = decisions(&context.kernel(&name).await?.0).await?;
            context.show(|| json::list(&all), || render::decisions(&name, &all, paint))
        }
    }
}

async fn decisions(kernel: &KernelClient) -> Result<Vec<Decision>, Failure> {
    let mut all = Vec::new();
    let collected = kernel.decisions(async |decision| {
        all.push(decision);
        Ok(())
    });
    collected.await?;
    Ok(all)
}

/// Puts, gets, lists or reverts artifacts.
async fn artifact(context: &Context, args: ArtifactArgs) -> Result<(), Failure> {
    let paint = context.terminal.paint;
    match args.action {
        ArtifactAction::Put { name, artifact, file, path, content_type } => {
            let (kernel, _) = context.kernel(&name).await?;
            let source = match (file, path) {
                (_, Some(path)) => Source::File(path.as_os_str().as_bytes().to_vec()),
                (file, None) => {
                    let file = file.unwrap_or_else(|| Path::new("-").into());
                    Source::Blob(blobs::upload(context, &kernel, &file).await?.0)
                }
            };
            let put = kernel.put_artifact(&artifact, &source, &content_type, "", 0).await?;
            context.show(|| json::of(&put), || render::artifacts(&name, std::slice::from_ref(&put), paint))
        }
        ArtifactAction::Get { name, artifact, version, output } => {
            let (kernel, _) = context.kernel(&name).await?;
            let (found, download) = kernel.artifact(&artifact, version).await?;
            blobs::save(context, download, output.as_deref()).await?;
            match context.options.json && output.is_some() {
                true => context.print_json(&json::of(&found)),
                false => Ok(()),
            }
        }
        ArtifactAction::Ls { name, artifact } => {
            let (kernel, _) = context.kernel(&name).await?;
            let mut all: Vec<Artifact> = Vec::new();
            let collected = kernel.artifacts(&artifact, async |artifact| {
                all.push(artifact);
                Ok(())
            });
            collected.await?;
            context.show(|| json::list(&all), || render::artifacts(&name, &all, paint))
        }
        ArtifactAction::Revert { name, artifact, version } => {
            let reverted = context.kernel(&name).await?.0.revert_artifact(&artifact, version, 0).await?;
            context.show(|| json::of(&reverted), || render::artifacts(&name, std::slice::from_ref(&reverted), paint))
        }
    }
}

fn standard_input() -> Result<String, Failure> {
    let mut text = String::new();
    let read = std::io::stdin().lock().take(limits::RECORD_TEXT_BYTES as u64 + 1).read_to_string(&mut text);
    read.map_err(|e| Failure::usage(format!("standard input: {e}"), "a decision's words are UTF-8 text"))?;
    Ok(text)
}
