//! `ryokan images`: what virtual machines boot.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use clap::{Args, Subcommand};

use super::context::Context;
use super::failure::Failure;
use super::names::ImageArg;
use super::render;
use super::spec::engines;
use crate::core::engine::EngineName;
use crate::core::error::Error;
use crate::sys::random;

/// The script that builds an image.
const SCRIPT: &str = include_str!("../../scripts/build-image");

/// `ryokan images`
#[derive(Debug, Args)]
pub struct ImagesArgs {
    /// What to do; a list by default.
    #[command(subcommand)]
    pub action: Option<ImagesCommand>,
}

/// The actions of `ryokan images`.
#[derive(Debug, Subcommand)]
pub enum ImagesCommand {
    /// List images (default)
    List {
        /// Print versions only
        #[arg(short, long)]
        quiet: bool,
    },
    /// Build an image from Debian packages, for the ryokan-worker beside this program
    Build {
        /// Another ryokan-worker: that of the daemon which will use the image
        #[arg(long, value_name = "FILE")]
        worker: Option<PathBuf>,
        /// Its engines; every image has kaish and bash
        #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "python,bash,node", value_parser = engines())]
        engines: Vec<EngineName>,
    },
    /// Protect an image from removal
    Pin {
        /// Its version, or the first digits
        version: ImageArg,
    },
    /// Protect an image no more
    Unpin {
        /// Its version, or the first digits
        version: ImageArg,
    },
    /// Make an image current once its machines have started; kernels that name no image run it from their next start
    Rotate {
        /// Its version, or the first digits; the newest by default
        version: Option<ImageArg>,
    },
    /// Remove an image that no kernel and no checkpoint's memory uses
    Rm {
        /// Its version, or the first digits
        version: ImageArg,
    },
}

/// Lists and changes images.
pub async fn images(context: &Context, args: ImagesArgs) -> Result<(), Failure> {
    let host = context.host().await?;
    let shown = |what: &str, version: &str| {
        context.show(|| serde_json::json!({ "version": version, "done": what }), || format!("{version} is {what}\n"))
    };
    match args.action.unwrap_or(ImagesCommand::List { quiet: false }) {
        ImagesCommand::List { quiet } => {
            let (all, _) = host.images().await?;
            if quiet && !context.options.json {
                let short = |version: &str| render::plain(&version.chars().take(12).collect::<String>());
                return context.print(&all.iter().map(|image| short(&image.version) + "\n").collect::<String>());
            }
            context.show(|| serde_json::json!(all), || render::images(&all, context.terminal.paint))
        }
        ImagesCommand::Build { worker, engines } => {
            let (before, folder) = host.images().await?;
            let built = build(worker.as_deref(), &engines, &folder).await?;
            let note = match before.iter().any(|image| image.is_current && image.version != built) {
                true => format!("ryokan images rotate {} makes it current\n", &built[..built.len().min(12)]),
                false => String::new(),
            };
            context.show(
                || serde_json::json!({ "version": built, "done": "built" }),
                || format!("{built} is built\n{note}"),
            )
        }
        ImagesCommand::Pin { version } => shown("pinned", &host.pin_image(&version, true).await?),
        ImagesCommand::Unpin { version } => shown("not pinned", &host.pin_image(&version, false).await?),
        ImagesCommand::Rotate { version } => {
            shown("current", &host.rotate_image(version.as_deref().unwrap_or_default()).await?)
        }
        ImagesCommand::Rm { version } => {
            context.confirm(&format!("remove image {version}"))?;
            shown("removed", &host.remove_image(&version).await?)
        }
    }
}

/// Runs the script, whose messages go to this terminal. Returns the image's version.
async fn build(worker: Option<&Path>, engines: &[EngineName], folder: &Path) -> Result<String, Failure> {
    let failed = |error: std::io::Error| Failure::from(Error::unavailable(format!("build an image: {error}")));
    let worker = match worker {
        Some(worker) => std::path::absolute(worker).map_err(failed)?,
        None => std::env::current_exe().map_err(failed)?.with_file_name("ryokan-worker"),
    };
    // The script works in the folder above its own, and reads itself.
    let place = Place::new().map_err(failed)?;
    let script = place.0.join("scripts/build-image");
    std::fs::create_dir(place.0.join("scripts")).map_err(failed)?;
    std::fs::write(&script, SCRIPT).map_err(failed)?;
    let mut command = tokio::process::Command::new("bash");
    command.arg(&script).arg("--worker").arg(worker).arg("--out").arg(folder);
    command.arg("--engines").arg(engines.iter().map(|engine| engine.name()).collect::<Vec<_>>().join(","));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
    let done = command.spawn().map_err(failed)?.wait_with_output().await.map_err(failed)?;
    let path = PathBuf::from(String::from_utf8_lossy(&done.stdout).trim());
    match (done.status.success(), path.file_name()) {
        (true, Some(version)) => Ok(version.to_string_lossy().into_owned()),
        _ => Err(Error::unavailable("no image was built").hint("the messages above say why").into()),
    }
}

/// A private temporary folder, removed with this value.
struct Place(PathBuf);

impl Place {
    fn new() -> std::io::Result<Place> {
        let name = format!("ryokan-build-{:032x}", u128::from_le_bytes(random::bytes()));
        let place = std::env::temp_dir().join(name);
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&place)?;
        Ok(Place(place))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
