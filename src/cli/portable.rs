//! Kernels as files: export, import.

use std::path::{Path, PathBuf};

use clap::Args;

use super::blobs::{self, Progress, Target};
use super::context::Context;
use super::failure::Failure;
use super::kernels::warn_unreadable;
use super::spec::{parse_allowed, parse_net};
use super::{json, render};
use crate::core::error::{Error, ErrorCode};
use crate::core::host_resource::{HostResource, ResourceKind};
use crate::core::name::KernelName;
use crate::core::quantity::format_size;
use crate::core::signature::Signer;
use crate::core::spec::{AllowedPath, Net};
use crate::rpc::client::{BundleReview, ImportedKernel};

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
    /// Grant all host paths, servers and network that the file requests
    #[arg(long, conflicts_with_all = ["allow_path", "mcp", "net", "allow_degraded"])]
    pub with_host: bool,
    /// Grant this requested host path; repeatable
    #[arg(long = "allow-path", value_name = "P:ro|rw", value_parser = parse_allowed)]
    pub allow_path: Vec<AllowedPath>,
    /// Grant this requested MCP server; repeatable
    #[arg(long, value_name = "SERVER")]
    pub mcp: Vec<String>,
    /// Network, if the file requests it: none or host
    #[arg(long, value_name = "NET", value_parser = parse_net)]
    pub net: Option<Net>,
    /// Waive a requested sandbox layer that this host lacks; repeatable
    #[arg(long, value_name = "LAYER")]
    pub allow_degraded: Vec<String>,
}

impl ImportArgs {
    /// Selects the resources that the options name.
    ///
    /// # Errors
    /// An option that names what the file does not request.
    fn named(&self, requested: &[HostResource]) -> Result<Vec<HostResource>, Failure> {
        let mut granted = Vec::new();
        let mut select = |what: String, fits: &dyn Fn(&HostResource) -> bool| {
            let found: Vec<_> = requested.iter().filter(|resource| fits(resource)).cloned().collect();
            if found.is_empty() {
                let hint = "import the file without options to see what it requests";
                return Err(Failure::usage(format!("the file does not request {what}"), hint));
            }
            granted.extend(found);
            Ok(())
        };
        for allowed in &self.allow_path {
            let source = super::paths::for_daemon(&allowed.path)?;
            let access = if allowed.writable { "rw" } else { "ro" };
            select(format!("{source}:{access}"), &|resource| {
                let is_path = matches!(resource.kind, ResourceKind::Path | ResourceKind::Mount);
                is_path && resource.source == source && resource.writable == allowed.writable
            })?;
        }
        if let Some(net) = self.net.filter(|net| *net != Net::None) {
            select(format!("network {}", net.name()), &|resource| resource.kind == ResourceKind::Net)?;
        }
        for server in &self.mcp {
            select(format!("MCP server {server}"), &|resource| {
                resource.kind == ResourceKind::Mcp && resource.name == *server
            })?;
        }
        for layer in &self.allow_degraded {
            select(format!("to lack {layer}"), &|resource| {
                resource.kind == ResourceKind::Layer && resource.name == *layer
            })?;
        }
        Ok(granted)
    }
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
        warn_unreadable(context, &kernel).await;
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
    let (imported, signer) = imported(context, &args).await.map_err(|failure| match failure {
        Failure::Error(error) if error.code == ErrorCode::AlreadyExists => {
            error.hint("choose another name with --as").into()
        }
        other => other,
    })?;
    context.show(
        || json::imported(&imported, &signer),
        || format!("{}the file is {}\n", render::imported(&imported), render::signer(&signer, context.terminal.paint)),
    )
}

async fn imported(context: &Context, args: &ImportArgs) -> Result<(ImportedKernel, Signer), Failure> {
    let from = blobs::open(&args.file)?;
    let name = args.name.as_ref().map(KernelName::as_str).unwrap_or_default();
    let mut upload = context.host().await?.import_kernel(name).await?;
    blobs::each_piece(context, "read", &args.file, from, async |piece| upload.write(piece).await).await?;
    let BundleReview { requested, signer } = upload.review().await?;
    let granted = match args.with_host {
        true if requested.is_empty() => Vec::new(),
        true => {
            context.say(&format!("the file is {}", render::signer(&signer, context.terminal.paint_stderr)));
            context.say(&format!("the file requests of this host:\n{}", render::host_resources(&requested)));
            context.confirm("grant all of it")?;
            requested
        }
        false => args.named(&requested)?,
    };
    Ok((upload.finish(&granted).await?, signer))
}
