//! Kernels as files: export, import.

use std::path::{Path, PathBuf};

use clap::Args;

use super::blobs::{self, Progress, Target};
use super::context::Context;
use super::failure::Failure;
use super::kernels::tell_unreadable;
use super::{json, render};
use crate::core::error::{Error, ErrorCode};
use crate::core::info::KernelInfo;
use crate::core::name::KernelName;
use crate::core::quantity::format_size;

/// `ryokan export`
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Name or id of the kernel
    pub name: String,
    /// The file to write; - is standard output
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Only this checkpoint, not all and a new one; repeatable
    #[arg(long = "checkpoint", value_name = "REF")]
    pub checkpoints: Vec<String>,
}

/// `ryokan import`
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// The file to read; - is standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Name of the new kernel; its former name by default
    #[arg(long = "as", value_name = "NAME", value_parser = super::kernels::parse_name)]
    pub name: Option<KernelName>,
    /// Omit its host paths, mounts and MCP servers
    #[arg(long)]
    pub without_host: bool,
}

/// Writes a kernel to a file.
pub async fn export(context: &Context, args: ExportArgs) -> Result<(), Failure> {
    let to_stdout = args.file == Path::new("-");
    if !to_stdout && args.file.exists() {
        context.confirm(&format!("replace {}", args.file.display()))?;
    }
    let (kernel, info) = context.kernel(&args.name).await?;
    let (mut to, mut signals) = Target::open(Some(&args.file))?;
    let mut download = blobs::unless_signalled(&mut signals, kernel.export(&args.checkpoints)).await?;
    let mut progress = Progress::new(context, "written");
    while let Some(piece) = blobs::unless_signalled(&mut signals, download.next()).await? {
        to.write(&piece)?;
        progress.add(piece.len());
    }
    let Some((digest, bytes)) = download.end() else {
        return Err(Error::internal("the export ended early").into());
    };
    to.finish()?;
    progress.end();
    if args.checkpoints.is_empty() {
        tell_unreadable(context, &kernel).await;
    }
    if to_stdout {
        return Ok(());
    }
    context.show(
        || json::blob(digest, bytes),
        || {
            let (name, file) = (&info.spec.name, args.file.display().to_string());
            format!("exported {name} to {} ({})\n", render::plain(&file), format_size(bytes))
        },
    )
}

/// Creates a kernel from an exported file.
pub async fn import(context: &Context, args: ImportArgs) -> Result<(), Failure> {
    let info = imported(context, &args).await.map_err(|failure| match failure {
        Failure::Error(error) if error.code == ErrorCode::AlreadyExists => {
            error.hint("choose another name with --as").into()
        }
        other => other,
    })?;
    context.show(
        || json::kernel(&info),
        || format!("imported {} ({})\n", info.spec.name, render::counted(u64::from(info.checkpoints), "checkpoint")),
    )
}

async fn imported(context: &Context, args: &ImportArgs) -> Result<KernelInfo, Failure> {
    let from = blobs::open(&args.file)?;
    let name = args.name.as_ref().map(KernelName::as_str).unwrap_or_default();
    let mut upload = context.host().await?.import_kernel(name, args.without_host).await?;
    blobs::each_piece(context, "read", &args.file, from, async |piece| upload.write(piece).await).await?;
    let (_, info) = upload.finish().await?;
    Ok(info)
}
