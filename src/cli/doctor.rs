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
    /// The action.
    #[command(subcommand)]
    pub action: ConfigAction,
}

/// Actions on the configuration.
#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// Check a configuration and report its mistakes
    Check {
        /// The file; the daemon's own by default
        file: Option<PathBuf>,
    },
    /// Print the effective configuration, with defaults
    Show,
}

/// Shows the host's abilities; fails if kernels cannot run.
pub async fn doctor(context: &Context) -> Result<(), Failure> {
    let abilities = match context.host().await {
        Ok(host) => host.abilities().await?,
        // The daemon may be unable to start: then its program probes the host without serving.
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
    // The host's abilities are the same for every daemon.
    let mut command = tokio::process::Command::new(autostart::program());
    command.arg("--abilities").stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
    let output = tokio::time::timeout(limits::CLIENT_CALL, command.output())
        .await
        .map_err(|_| Error::deadline("ryokand --abilities did not exit in time"))?
        .map_err(no_program)?;
    serde_json::from_slice(&output.stdout)
        .map_err(|e| Error::unavailable(format!("ryokand --abilities ({}): {e}", output.status)).into())
}

/// Checks or shows the configuration with the daemon's own program, so both read it alike.
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
        None => Err(Error::unavailable(format!("ryokand exited with {status}")).into()),
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
