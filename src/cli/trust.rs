//! Keys and signatures: trust, verify --provenance.

use clap::{Args, Subcommand};

use super::context::Context;
use super::failure::Failure;
use super::{exit, json, render};
use crate::core::signature::Standing;

/// `ryokan trust`
#[derive(Debug, Args)]
pub struct TrustArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: TrustCommand,
}

/// The actions of `ryokan trust`.
#[derive(Debug, Subcommand)]
pub enum TrustCommand {
    /// Trust the key of another host
    Add {
        /// Name for the host
        name: String,
        /// Its key: `ryokan trust list` prints it there
        key: String,
    },
    /// Trust a key no longer
    Rm {
        /// Name of the key
        name: String,
    },
    /// Show this host's key and the trusted keys
    List,
}

/// Shows and changes the trusted keys.
pub async fn trust(context: &Context, args: TrustArgs) -> Result<(), Failure> {
    let host = context.host().await?;
    match args.action {
        TrustCommand::Add { name, key } => {
            let trusted = host.trust_key(&name, &key).await?;
            context.show(|| json::of(&trusted), || format!("trusted {}\n", render::plain(&trusted.name)))
        }
        TrustCommand::Rm { name } => {
            host.distrust_key(&name).await?;
            let text = || format!("{} is no longer trusted\n", render::plain(&name));
            context.show(|| serde_json::json!({ "removed": name }), text)
        }
        TrustCommand::List => {
            let known = host.known_keys().await?;
            context.show(|| json::list(&known), || render::known_keys(&known, context.terminal.paint))
        }
    }
}

/// Shows who signed what; fails if something is damaged.
pub async fn provenance(context: &Context, name: &str, reference: &str) -> Result<(), Failure> {
    let (units, omitted) = context.host().await?.provenance(name, reference).await?;
    if omitted > 0 {
        context.say(&format!("{omitted} older ones are not listed"));
    }
    let lines: String = match context.options.json {
        true => units.iter().map(|unit| format!("{}\n", json::of(unit))).collect(),
        false if units.is_empty() => "nothing is sealed; freeze a group: ryokan freeze GROUP\n".into(),
        false => units.iter().map(|unit| render::signed_unit(unit, context.terminal.paint)).collect(),
    };
    context.print(&lines)?;
    match units.iter().any(|unit| unit.signer.standing == Standing::Damaged) {
        true => Err(Failure::Quiet(exit::FAILED)),
        false => Ok(()),
    }
}
