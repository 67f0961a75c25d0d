//! Kernels.

use std::time::Duration;

use super::{Table, ago, plain, stamp};
use crate::cli::paint::Paint;
use crate::core::fork::ForkWay;
use crate::core::host_resource::HostResource;
use crate::core::ids::CheckpointId;
use crate::core::info::{KernelInfo, MountInfo};
use crate::core::limits::engine_state_bytes;
use crate::core::missed::MissedEntry;
use crate::core::origin::{Origin, OriginKind};
use crate::core::quantity::{format_cpus, format_size};
use crate::core::rights::Rights;
use crate::core::spec::KernelSpec;
use crate::core::usage::DiskFigures;
use crate::rpc::client::{Forks, ImportedKernel};

/// An imported kernel, with the resources of the host that its file requests.
pub fn imported(imported: &ImportedKernel) -> String {
    let ImportedKernel { info, granted, withheld, .. } = imported;
    let mut text =
        format!("imported {} ({})\n", info.spec.name, super::counted(u64::from(info.checkpoints), "checkpoint"));
    if !granted.is_empty() {
        text.push_str(&format!("granted from this host:\n{}", host_resources(granted)));
    }
    if !withheld.is_empty() {
        text.push_str(&format!("withheld, although the file requests it:\n{}", host_resources(withheld)));
        text.push_str("import again with --with-host to grant all of it, or with --allow-path, --mcp and --net\n");
    }
    text
}

/// Resources of the host, one per line.
pub fn host_resources(resources: &[HostResource]) -> String {
    let line = |resource: &HostResource| format!("  {}\n", plain(&resource.to_string()).replace(['\n', '\t'], " "));
    resources.iter().map(line).collect()
}

/// A list of kernels, or `none` if it is empty.
pub fn kernels(kernels: &[KernelInfo], none: &str, now_ms: i64, paint: Paint) -> String {
    let mut table = Table::new(&["NAME", "ENGINE", "STATE", "ISOLATION", "MEMORY", "DISK", "EXECUTIONS", "LAST USED"]);
    for info in kernels {
        let memory = if info.memory_bytes == 0 { "-".into() } else { format_size(info.memory_bytes) };
        table.row(&[
            info.spec.name.as_str(),
            info.spec.engine.name(),
            &info.state,
            info.spec.isolation.name(),
            &memory,
            &disk_total(info),
            &info.executions.to_string(),
            &ago(info.last_used_at_ms, now_ms),
        ]);
        table.paint(2, state_painter(&info.state));
    }
    table.text(none, paint)
}

/// What a kernel takes on the disk, in a table.
pub fn disk_total(info: &KernelInfo) -> String {
    info.disk.map_or_else(|| "-".into(), |disk| format_size(disk.total_bytes()))
}

/// What a kernel takes on the disk, with its parts; empty before the first measurement.
fn disk(disk: Option<DiskFigures>, now_ms: i64) -> String {
    let Some(disk) = disk else { return String::new() };
    let parts = [
        ("workspace", disk.workspace_bytes),
        ("history", disk.history_bytes),
        ("saved memory", disk.saved_memory_bytes),
        ("other", disk.other_bytes),
    ];
    let shown = parts.iter().filter(|(_, bytes)| *bytes > 0);
    let shown: Vec<String> = shown.map(|(name, bytes)| format!("{name} {}", format_size(*bytes))).collect();
    let parts = if shown.is_empty() { String::new() } else { format!(": {}", shown.join(", ")) };
    format!("{}{parts} (measured {})", format_size(disk.total_bytes()), ago(disk.measured_at_ms, now_ms))
}

/// The colour of a state. Unknown states of a newer daemon are unpainted.
pub fn state_painter(state: &str) -> fn(Paint, &str) -> String {
    match state {
        "ready" | "busy" => Paint::good,
        "crashed" => Paint::bad,
        "starting" | "freezing" | "departing" => Paint::warn,
        "stopped" | "created" | "suspended" | "archived" | "departed" => Paint::dim,
        _ => |_, text| text.to_owned(),
    }
}

/// One kernel in detail.
pub fn kernel(info: &KernelInfo, rights: Rights, now_ms: i64, paint: Paint) -> String {
    let spec = &info.spec;
    let now = info.in_force.as_deref().unwrap_or(spec);
    // A value of the present worker, and the one from the next start if it differs.
    let in_force = |shown: fn(&KernelSpec) -> String| match (shown(now), shown(spec)) {
        (now, then) if now == then => now,
        (now, then) => {
            let or_none = |text: String| if text.is_empty() { "none".into() } else { text };
            format!("{} (from the next start: {})", or_none(now), or_none(then))
        }
    };
    let mut text = String::new();
    let mut field = |name: &str, value: String| {
        let value = plain(&value);
        if !value.is_empty() {
            let gap = " ".repeat(14usize.saturating_sub(name.len()));
            text.push_str(&format!("{}{gap}{value}\n", paint.head(name)));
        }
    };
    let with_reason = |reason: &str| if reason.is_empty() { String::new() } else { format!(" ({reason})") };
    field("name", spec.name.to_string());
    field("id", info.id.to_string());
    field("state", format!("{}{}", info.state, with_reason(&info.state_reason)));
    field("engine", spec.engine.to_string());
    field("venv", in_force(|spec| spec.venv.as_ref().map_or(String::new(), |venv| venv.display().to_string())));
    field("isolation", format!("{}{}", spec.isolation.name(), with_reason(&spec.image)));
    field("network", in_force(|spec| spec.net.name().into()));
    for (i, allowed) in spec.paths.iter().enumerate() {
        let mode = if allowed.writable { "rw" } else { "ro" };
        field(if i == 0 { "paths" } else { "" }, format!("{}:{mode}", allowed.path.display()));
    }
    let used = if info.memory_bytes == 0 { String::new() } else { format!("{} of ", format_size(info.memory_bytes)) };
    field("memory", format!("{used}{}", in_force(|spec| format_size(spec.limits.memory_bytes))));
    field("disk", disk(info.disk, now_ms));
    field("cpus", in_force(|spec| format_cpus(spec.limits.cpu_milli)));
    field("pids", in_force(|spec| spec.limits.pids.to_string()));
    field("open files", in_force(|spec| spec.limits.open_files.to_string()));
    field("workspace", in_force(|spec| format_size(spec.limits.workspace_bytes)));
    field("engine state", in_force(|spec| format_size(engine_state_bytes(spec.limits.memory_bytes))));
    field("capture", info.capture.clone());
    field("idle timeout", idle(spec.idle_timeout_ms));
    field("checkpoints", format!("{}, keeps {}", info.checkpoints, spec.retention));
    for (i, change) in info.at_next_start.iter().enumerate() {
        field(if i == 0 { "at next start" } else { "" }, change.clone());
    }
    field("ephemeral", if spec.ephemeral { "removed with its client's connection".into() } else { String::new() });
    field("labels", spec.labels.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" "));
    for (i, layer) in info.sandbox.iter().enumerate() {
        field(if i == 0 { "sandbox" } else { "" }, layer.clone());
    }
    field("without", spec.degraded.join(" "));
    field("executions", info.executions.to_string());
    field("version", format!("{} (generation {}, epoch {})", info.version, info.origin.generation, info.epoch.0));
    field("origin", origin(&info.origin));
    field("thread of", info.thread_of.map(|owner| owner.to_string()).unwrap_or_default());
    field("created", format!("{}, {}", stamp(info.created_at_ms), ago(info.created_at_ms, now_ms)));
    field("last used", ago(info.last_used_at_ms, now_ms));
    field("owner", format!("uid {}", info.uid));
    if rights != Rights::ALL {
        field("rights", rights.iter().map(|right| right.name()).collect::<Vec<_>>().join(" "));
    }
    text
}

/// What no checkpoint holds and no restart keeps, as further lines of [`kernel`].
pub fn missed(missed: &[MissedEntry], paint: Paint) -> String {
    let mut text = String::new();
    for (i, entry) in missed.iter().enumerate() {
        let name = if i == 0 { paint.head("not saved") } else { " ".repeat(9) };
        text.push_str(&format!("{name}     {}\n", plain(&format!("{} ({})", entry.key, entry.reason))));
    }
    text
}

/// The mounts, as further lines of [`kernel`].
pub fn kernel_mounts(mounts: &[MountInfo], paint: Paint) -> String {
    let mut text = String::new();
    for (i, mount) in mounts.iter().enumerate() {
        let name = if i == 0 { paint.head("mounts") } else { " ".repeat(6) };
        let mode = if mount.writable { "rw" } else { "ro" };
        text.push_str(&format!("{name}        {}\n", plain(&format!("{} from {}:{mode}", mount.path, mount.source))));
    }
    text
}

fn origin(origin: &Origin) -> String {
    let short = |id: &CheckpointId| id.to_string().chars().take(10).collect::<String>();
    let mut words = vec![origin.kind.name().to_owned()];
    if let Some(restored) = &origin.restored {
        words.push(format!("to {}", short(restored)));
    }
    if let Some(from) = &origin.from {
        let forked = if origin.kind == OriginKind::Forked { "" } else { "; forked " };
        words.push(format!("{forked}from {} at {}", from.name, short(&from.checkpoint)).trim_start().to_owned());
    }
    words.join(" ").replace(" ;", ";")
}

/// The result of a fork.
pub fn forks(parent: &str, forks: &Forks, paint: Paint) -> String {
    let mut text = String::new();
    let at = forks.checkpoint.as_ref().map(|point| format!(" at {}", point.short_id())).unwrap_or_default();
    for (name, made) in &forks.children {
        text.push_str(&match made {
            Ok((_, info)) => format!("forked {} from {}{at}\n", paint.head(info.spec.name.as_str()), plain(parent)),
            Err(error) => format!("{} {}: {}\n", paint.bad("not forked"), plain(name), plain(&error.message)),
        });
    }
    match &forks.way {
        Some(ForkWay::Machine { pause }) => {
            let pause = humantime::format_duration(Duration::from_millis(pause.as_millis() as u64));
            text.push_str(&format!(
                "the machine was copied with its memory; {} stood still for {pause}\n",
                plain(parent)
            ));
        }
        Some(ForkWay::Checkpoint { reason }) if !reason.is_empty() => {
            text.push_str(&format!("from the checkpoint, without the machine's memory: {}\n", plain(reason)));
        }
        Some(ForkWay::Checkpoint { .. }) | None => {}
    }
    text
}

fn idle(ms: u64) -> String {
    match ms {
        0 => "never".into(),
        ms => humantime::format_duration(std::time::Duration::from_millis(ms)).to_string(),
    }
}
