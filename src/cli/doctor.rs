//! The host and the daemon's configuration: doctor, config.

use std::path::PathBuf;
use std::process::Stdio;

use clap::{Args, Subcommand};

use super::context::Context;
use super::failure::Failure;
use super::{autostart, exit, json, render};
use crate::core::error::{Error, ErrorCode};
use crate::core::info::Ability;
use crate::core::limits;

/// `ryokan config`
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: ConfigAction,
}

/// What to do with the configuration.
#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// Say whether a configuration is right, and if not, where
    Check {
        /// The file; without: the daemon's own
        file: Option<PathBuf>,
    },
    /// Print the configuration as the daemon reads it, defaults filled in
    Show,
}

/// Shows what the host can do; fails if kernels cannot run.
pub async fn doctor(context: &Context) -> Result<(), Failure> {
    let abilities = match context.host().await {
        Ok(host) => host.abilities().await?,
        // A daemon that cannot start is what one asks a doctor about: then its program looks without serving.
        Err(Failure::Error(error)) if error.code == ErrorCode::Unavailable => {
            context.say(&format!("no daemon: {}", render::plain(&error.message)));
            abilities_without_daemon().await?
        }
        Err(failure) => return Err(failure),
    };
    context.show(|| json::list(&abilities), || render::abilities(&abilities, context.terminal.paint))?;
    match abilities.iter().any(|ability| ability.required && !ability.present) {
        true => Err(Failure::Quiet(exit::UNSUPPORTED)),
        false => Ok(()),
    }
}

async fn abilities_without_daemon() -> Result<Vec<Ability>, Failure> {
    // What the host can do is the same for every daemon.
    let mut command = tokio::process::Command::new(autostart::program());
    command.arg("--abilities").stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
    let output = tokio::time::timeout(limits::CLIENT_CALL, command.output())
        .await
        .map_err(|_| Error::deadline("ryokand --abilities did not end"))?
        .map_err(no_program)?;
    serde_json::from_slice(&output.stdout)
        .map_err(|e| Error::unavailable(format!("ryokand --abilities ({}): {e}", output.status)).into())
}

/// Lets the daemon's program check or show its configuration: the code that checks is the code that starts.
pub async fn config(context: &Context, args: ConfigArgs) -> Result<(), Failure> {
    let mut command = daemon(context);
    match args.action {
        ConfigAction::Check { file: Some(file) } => {
            std::fs::metadata(&file).map_err(|e| Failure::of_file("check", &file, &e))?;
            command.arg("--check-config").arg(file)
        }
        ConfigAction::Check { file: None } => command.arg("--check-config"),
        ConfigAction::Show => command.arg("--show-config"),
    };
    if context.options.json {
        command.arg("--json");
    }
    let status = command.stdin(Stdio::null()).status().await.map_err(no_program)?;
    match status.code() {
        Some(0) => Ok(()),
        Some(code) => Err(Failure::Quiet(exit::of_execution(code))),
        None => Err(Error::unavailable(format!("ryokand ended with {status}")).into()),
    }
}

fn daemon(context: &Context) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(autostart::program());
    if context.options.system {
        command.arg("--system");
    }
    command
}

fn no_program(error: std::io::Error) -> Error {
    Error::unavailable(format!("could not run {}: {error}", autostart::program().display()))
        .hint("install ryokand beside ryokan or in PATH")
}
