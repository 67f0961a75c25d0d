//! The guided tour: `scripts/tour` with the installed programs.

use std::process::Stdio;

use clap::Args;

use super::context::Context;
use super::exit;
use super::failure::Failure;
use crate::core::error::Error;

/// The one source of the tour.
const SCRIPT: &str = include_str!("../../scripts/tour");

/// `ryokan tour`
#[derive(Debug, Args)]
pub struct TourArgs {
    /// Print the script, do not run it
    #[arg(long)]
    pub print: bool,
    /// Build an image of virtual machines if there is none (fetches packages, takes minutes)
    #[arg(long)]
    pub image: bool,
    /// Keep the tour's directory and print its path
    #[arg(long)]
    pub keep: bool,
}

/// Runs the tour with a separate daemon and directories.
pub async fn tour(context: &Context, args: TourArgs) -> Result<(), Failure> {
    if args.print {
        return context.print(SCRIPT);
    }
    let me = std::env::current_exe().map_err(|e| Error::internal(format!("where this program is: {e}")))?;
    let folder = me.parent().unwrap_or(std::path::Path::new("/"));
    let mut command = tokio::process::Command::new("bash");
    command.arg("-c").arg(SCRIPT).arg("tour").env("RYOKAN_TOUR_BIN", folder).stdin(Stdio::null());
    command.args(args.image.then_some("--image")).args(args.keep.then_some("--keep"));
    let status = command
        .status()
        .await
        .map_err(|e| Error::unsupported(format!("could not run bash: {e}")).hint("install bash"))?;
    match status.code() {
        Some(0) => Ok(()),
        Some(code) => Err(Failure::Quiet(exit::of_execution(code))),
        None => Err(Failure::Quiet(exit::FAILED)),
    }
}
