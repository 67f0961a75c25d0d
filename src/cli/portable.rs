//! Kernels and groups as files: export, import.

use std::path::{Path, PathBuf};

use clap::Args;

use super::blobs::{self, Progress, Target};
use super::context::Context;
use super::failure::Failure;
use super::kernels::warn_unreadable;
use super::names::KernelOrGroupArg;
use super::spec::{nets, parse_allowed};
use super::{groups, json, render};
use crate::core::error::{Error, ErrorCode};
use crate::core::freeze::portable::{GroupArrival, ImportedGroup, PackedGroup};
use crate::core::host_resource::{HostResource, ResourceKind};
use crate::core::name::KernelName;
use crate::core::quantity::format_size;
use crate::core::signature::Signer;
use crate::core::spec::{AllowedPath, Net};
use crate::rpc::client::{BundleReview, ImportedKernel};

/// `ryokan export`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan export demo demo.ryokan
  ryokan export demo - --checkpoint one | ssh other ryokan import -

The file of a whole kernel has its journal: code, standard input and output of its executions, and the lines of the audit log about it. To share a kernel without them, name checkpoints: their file has none. Programs that run are not in the file.")]
pub struct ExportArgs {
    /// Name or id of the kernel, or name of a group
    pub name: KernelOrGroupArg,
    /// The file to write; - is standard output
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Only this checkpoint, not all and a new one; repeatable
    #[arg(long = "checkpoint", value_name = "REF")]
    pub checkpoints: Vec<String>,
    /// Of a group: this freeze, not the newest
    #[arg(long, value_name = "REF", conflicts_with = "checkpoints")]
    pub freeze: Option<String>,
}

/// `ryokan import`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan import demo.ryokan
  ryokan import demo.ryokan --as copy --allow-path /srv/data:ro
  ryokan import shop.ryokan --place code=/srv/shop --place data=/srv/shop/shop.db
  ryokan import shop.ryokan --as copy --place agent=agent-2 --leave-out code --leave-out data")]
pub struct ImportArgs {
    /// The file to read; - is standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Name of the new kernel or group; the former name by default
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
    #[arg(long, value_name = "NET", value_parser = nets(), hide_possible_values = true)]
    pub net: Option<Net>,
    /// Waive a requested sandbox layer that this host lacks; repeatable
    #[arg(long, value_name = "LAYER")]
    pub allow_degraded: Vec<String>,
    /// Of a group: a member's place, or a kernel's new name; repeatable
    #[arg(long = "place", value_name = "MEMBER=PLACE", value_parser = parse_place)]
    pub places: Vec<(String, String)>,
    /// Of a group: import it without this member; repeatable
    #[arg(long = "leave-out", value_name = "MEMBER")]
    pub leave_out: Vec<String>,
}

pub(super) fn parse_place(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((member, place)) if !member.is_empty() && !place.is_empty() => Ok((member.into(), place.into())),
        _ => Err("expected MEMBER=PLACE, such as code=/srv/code".into()),
    }
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

/// Writes a kernel, or a freeze of a group, to a file.
pub async fn export(context: &Context, args: ExportArgs) -> Result<(), Failure> {
    let to_stdout = args.file == Path::new("-");
    if !to_stdout && args.file.exists() {
        context.confirm(&format!("replace {}", args.file.display()))?;
    }
    let kernel = match context.kernel(&args.name).await {
        Err(failure) if groups::is_group(&failure) && args.checkpoints.is_empty() => None,
        Err(failure) if groups::is_group(&failure) => {
            return Err(Failure::usage("--checkpoint is for kernels", "name a freeze of the group with --freeze"));
        }
        opened => Some(opened?.0),
    };
    if kernel.is_some() && args.freeze.is_some() {
        return Err(Failure::usage("--freeze is for groups", "name checkpoints with --checkpoint"));
    }
    let host = context.host().await?;
    let (mut to, mut signals) = Target::open(Some(&args.file))?;
    let mut download = match &kernel {
        Some(kernel) => blobs::unless_signalled(&mut signals, kernel.export(&args.checkpoints)).await?,
        None => {
            let reference = args.freeze.as_deref().unwrap_or_default();
            blobs::unless_signalled(&mut signals, host.export_group(&args.name, reference)).await?
        }
    };
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
    if let Some(kernel) = kernel.filter(|_| args.checkpoints.is_empty()) {
        warn_unreadable(context, &kernel).await;
    }
    if to_stdout {
        return Ok(());
    }
    context.show(
        || json::blob(digest, bytes),
        || {
            let (name, file) = (render::plain(&args.name), args.file.display().to_string());
            format!("exported {name} to {} ({})\n", render::plain(&file), format_size(bytes))
        },
    )
}

/// Creates a kernel or a group from an exported file.
pub async fn import(context: &Context, args: ImportArgs) -> Result<(), Failure> {
    let imported = imported(context, &args).await.map_err(|failure| match failure {
        Failure::Error(error) if error.code == ErrorCode::AlreadyExists => {
            error.hint("choose another name with --as, or another place with --place").into()
        }
        other => other,
    })?;
    match imported {
        Imported::Kernel(imported, signer) => context.show(
            || json::imported(&imported, &signer),
            || {
                let signer = render::signer(&signer, context.terminal.paint);
                format!("{}the file is {signer}\n", render::imported(&imported))
            },
        ),
        Imported::Group(imported, signer, sealer) => context.show(
            || json::imported_group(&imported, &signer, &sealer),
            || render::imported_group(&imported, &signer, &sealer, context.terminal.paint),
        ),
    }
}

/// What came of a file.
enum Imported {
    Kernel(Box<ImportedKernel>, Signer),
    /// The group, the signer of the file, and that of the freeze.
    Group(Box<ImportedGroup>, Signer, Signer),
}

async fn imported(context: &Context, args: &ImportArgs) -> Result<Imported, Failure> {
    let from = blobs::open(&args.file)?;
    let name = args.name.as_ref().map(KernelName::as_str).unwrap_or_default();
    let mut upload = context.host().await?.import_kernel(name).await?;
    blobs::each_piece(context, "read", &args.file, from, async |piece| upload.write(piece).await).await?;
    let BundleReview { requested, signer, group } = upload.review().await?;
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
    let Some(group) = group else {
        if !args.places.is_empty() || !args.leave_out.is_empty() {
            return Err(Failure::usage("--place and --leave-out are for groups", "the file is a kernel's"));
        }
        return Ok(Imported::Kernel(Box::new(upload.finish(&granted).await?), signer));
    };
    let places = args.places.iter().map(|(member, place)| place_of(&group, member, place)).collect::<Result<_, _>>()?;
    let arrival = GroupArrival { name: String::new(), places, left_out: args.leave_out.clone(), granted, moved: false };
    Ok(Imported::Group(Box::new(upload.finish_group(&arrival).await?), signer, group.sealer))
}

/// A place as the daemon takes it: a path is made absolute.
fn place_of(group: &PackedGroup, member: &str, place: &str) -> Result<(String, String), Failure> {
    let kind = group.members.iter().find(|one| one.name == member).map(|one| one.kind.as_str());
    let is_path = matches!(kind, Some("repository" | "database" | "directory"));
    let place = if is_path { super::paths::for_daemon(Path::new(place))? } else { place.to_owned() };
    Ok((member.to_owned(), place))
}
