//! Specifications: as requested by a client (0 and empty: the daemon's default) and as a kernel has
//! one.

use std::path::{Path, PathBuf};

use super::text::{
    bounded, count, malformed, read_name, read_pairs, read_text, read_text_list, write_pairs, write_text_list,
};
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::retention::Retention;
use crate::core::spec::{AllowedPath, Isolation, KernelLimits, KernelSpec, Net};
use crate::core::spec_update::SpecUpdate;
use crate::rpc::schema::ryokan_capnp as wire;

/// A client's request for a kernel. `None`: the daemon's configuration decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecRequest {
    /// Its name.
    pub name: KernelName,
    /// The interpreter.
    pub engine: Option<EngineName>,
    /// Process or microVM.
    pub isolation: Option<Isolation>,
    /// Image, optionally with `@VERSION`.
    pub image: Option<String>,
    /// Host paths that it may use, mounted at the same paths inside.
    pub paths: Vec<AllowedPath>,
    /// Its network.
    pub net: Option<Net>,
    /// Memory of all its processes, bytes.
    pub memory_bytes: Option<u64>,
    /// Processors, thousandths.
    pub cpu_milli: Option<u32>,
    /// Processes and threads.
    pub pids: Option<u32>,
    /// Open files of one process.
    pub open_files: Option<u32>,
    /// The workspace, bytes.
    pub workspace_bytes: Option<u64>,
    /// Idle time after which it is stopped; zero: never.
    pub idle_timeout_ms: Option<u64>,
    /// Labels.
    pub labels: Vec<(String, String)>,
    /// Sandbox layers that may be missing.
    pub degraded: Vec<String>,
    /// Host directory to copy into the new workspace; absolute.
    pub from_dir: Option<PathBuf>,
    /// Whether it is removed with the connection that creates it.
    pub ephemeral: bool,
    /// Number of the newest automatic checkpoints to keep; the inner `None`: all.
    pub keep_checkpoints: Option<Option<u32>>,
    /// Maximum age of automatic checkpoints, milliseconds; the inner `None`: unlimited.
    pub keep_checkpoints_for_ms: Option<Option<u64>>,
    /// The virtual environment; without an engine it makes the kernel one of Python.
    pub venv: Option<PathBuf>,
}

impl SpecRequest {
    /// A request with the daemon's defaults for everything but the name.
    pub fn new(name: KernelName) -> Self {
        SpecRequest {
            name,
            engine: None,
            isolation: None,
            image: None,
            paths: Vec::new(),
            net: None,
            memory_bytes: None,
            cpu_milli: None,
            pids: None,
            open_files: None,
            workspace_bytes: None,
            idle_timeout_ms: None,
            labels: Vec::new(),
            degraded: Vec::new(),
            from_dir: None,
            ephemeral: false,
            keep_checkpoints: None,
            keep_checkpoints_for_ms: None,
            venv: None,
        }
    }

    /// The specification: the requested values, and `defaults` for the rest.
    ///
    /// Ignores the name, paths, labels and degraded layers of `defaults`. The result is not
    /// checked: see [`KernelSpec::check`].
    pub fn fill(&self, defaults: &KernelSpec) -> KernelSpec {
        KernelSpec {
            name: self.name.clone(),
            engine: self.engine.unwrap_or(if self.venv.is_some() { EngineName::Python } else { defaults.engine }),
            isolation: self.isolation.unwrap_or(defaults.isolation),
            image: self.image.clone().unwrap_or_else(|| defaults.image.clone()),
            paths: self.paths.clone(),
            net: self.net.unwrap_or(defaults.net),
            limits: KernelLimits {
                memory_bytes: self.memory_bytes.unwrap_or(defaults.limits.memory_bytes),
                cpu_milli: self.cpu_milli.unwrap_or(defaults.limits.cpu_milli),
                pids: self.pids.unwrap_or(defaults.limits.pids),
                open_files: self.open_files.unwrap_or(defaults.limits.open_files),
                workspace_bytes: self.workspace_bytes.unwrap_or(defaults.limits.workspace_bytes),
            },
            idle_timeout_ms: self.idle_timeout_ms.unwrap_or(defaults.idle_timeout_ms),
            labels: self.labels.clone(),
            degraded: self.degraded.clone(),
            ephemeral: self.ephemeral,
            retention: Retention {
                newest: self.keep_checkpoints.unwrap_or(defaults.retention.newest),
                keep_for_ms: self.keep_checkpoints_for_ms.unwrap_or(defaults.retention.keep_for_ms),
            },
            venv: self.venv.clone(),
        }
    }

    /// The request that results in exactly `spec`, independent of the defaults.
    pub fn exactly(spec: &KernelSpec) -> Self {
        SpecRequest {
            name: spec.name.clone(),
            engine: Some(spec.engine),
            isolation: Some(spec.isolation),
            image: (!spec.image.is_empty()).then(|| spec.image.clone()),
            paths: spec.paths.clone(),
            net: Some(spec.net),
            memory_bytes: Some(spec.limits.memory_bytes),
            cpu_milli: Some(spec.limits.cpu_milli),
            pids: Some(spec.limits.pids),
            open_files: Some(spec.limits.open_files),
            workspace_bytes: Some(spec.limits.workspace_bytes),
            idle_timeout_ms: Some(spec.idle_timeout_ms),
            labels: spec.labels.clone(),
            degraded: spec.degraded.clone(),
            from_dir: None,
            ephemeral: spec.ephemeral,
            keep_checkpoints: Some(spec.retention.newest),
            keep_checkpoints_for_ms: Some(spec.retention.keep_for_ms),
            venv: spec.venv.clone(),
        }
    }
}

/// Reads a client's request for a kernel.
///
/// # Errors
/// `invalidArgument` that names the field.
pub fn read_spec_request(reader: wire::kernel_spec::Reader<'_>) -> Result<SpecRequest> {
    let name = read_name(reader.get_name(), "kernel name")?;
    let engine = optional(read_name(reader.get_engine(), "engine")?);
    let isolation = optional(read_name(reader.get_isolation(), "isolation")?);
    let net = optional(read_name(reader.get_net(), "net")?);
    let from_dir = optional(read_name(reader.get_from_dir(), "fromDir")?).map(PathBuf::from);
    if let Some(relative) = from_dir.as_ref().filter(|dir| !dir.is_absolute()) {
        return Err(Error::invalid(format!("fromDir {relative:?} is not an absolute path")));
    }
    let retention = reader.get_retention().map_err(|e| malformed("retention", e))?;
    let (keep_checkpoints, keep_checkpoints_for_ms) = read_asked_retention(retention);
    Ok(SpecRequest {
        name: name.parse().map_err(|e| Error::invalid(format!("{e}")))?,
        engine: engine.map(|text| text.parse().map_err(|e| Error::invalid(format!("{e}")))).transpose()?,
        isolation: isolation.as_deref().map(read_isolation).transpose()?,
        image: optional(read_name(reader.get_image(), "image")?),
        paths: read_paths(reader.get_paths())?,
        net: net.map(|text| named(&text, "network", Net::from_name)).transpose()?,
        memory_bytes: nonzero(reader.get_memory_bytes()),
        cpu_milli: nonzero(reader.get_cpu_milli()),
        pids: nonzero(reader.get_pids()),
        open_files: nonzero(reader.get_open_files()),
        workspace_bytes: nonzero(reader.get_workspace_bytes()),
        idle_timeout_ms: read_idle(reader.get_idle_timeout_ms()),
        labels: read_pairs(reader.get_labels(), "labels", limits::LABELS)?,
        degraded: read_text_list(reader.get_allow_degraded(), "allowDegraded", limits::LABELS)?,
        from_dir,
        ephemeral: reader.get_ephemeral(),
        keep_checkpoints,
        keep_checkpoints_for_ms,
        venv: optional(read_name(reader.get_venv(), "venv")?).map(PathBuf::from),
    })
}

/// A requested retention: number and age.
type AskedRetention = (Option<Option<u32>>, Option<Option<u64>>);

fn read_asked_retention(reader: wire::retention::Reader<'_>) -> AskedRetention {
    let newest = nonzero(reader.get_newest()).map(|newest| (newest != u32::MAX).then_some(newest));
    let keep_for_ms = nonzero(reader.get_keep_for_ms()).map(|ms| (ms != NEVER).then_some(ms));
    (newest, keep_for_ms)
}

fn write_asked_retention(mut builder: wire::retention::Builder<'_>, (newest, keep_for_ms): AskedRetention) {
    builder.set_newest(newest.map_or(0, |newest| newest.unwrap_or(u32::MAX)));
    builder.set_keep_for_ms(keep_for_ms.map_or(0, |ms| ms.unwrap_or(NEVER)));
}

/// Reads a new retention; unset bounds are those of `before`.
pub fn read_retention(reader: wire::retention::Reader<'_>, before: Retention) -> Retention {
    let (newest, keep_for_ms) = read_asked_retention(reader);
    Retention { newest: newest.unwrap_or(before.newest), keep_for_ms: keep_for_ms.unwrap_or(before.keep_for_ms) }
}

/// Writes a retention.
pub fn write_retention(builder: wire::retention::Builder<'_>, retention: &Retention) {
    write_asked_retention(builder, (Some(retention.newest), Some(retention.keep_for_ms)));
}

/// Writes a client's request for a kernel.
///
/// # Errors
/// `invalidArgument` for a path that is not UTF-8.
pub fn write_spec_request(mut builder: wire::kernel_spec::Builder<'_>, request: &SpecRequest) -> Result<()> {
    builder.set_name(request.name.as_str());
    builder.set_engine(request.engine.map_or("", EngineName::name));
    builder.set_isolation(request.isolation.map_or("", Isolation::name));
    builder.set_image(request.image.as_deref().unwrap_or_default());
    write_paths(builder.reborrow().init_paths(count(request.paths.len())), &request.paths)?;
    builder.set_memory_bytes(request.memory_bytes.unwrap_or(0));
    builder.set_cpu_milli(request.cpu_milli.unwrap_or(0));
    builder.set_pids(request.pids.unwrap_or(0));
    builder.set_idle_timeout_ms(idle_on_wire(request.idle_timeout_ms));
    write_pairs(builder.reborrow().init_labels(count(request.labels.len())), &request.labels);
    builder.set_net(request.net.map_or("", Net::name));
    builder.set_open_files(request.open_files.unwrap_or(0));
    builder.set_workspace_bytes(request.workspace_bytes.unwrap_or(0));
    write_text_list(builder.reborrow().init_allow_degraded(count(request.degraded.len())), &request.degraded);
    builder.set_from_dir(request.from_dir.as_deref().map_or(Ok(""), utf8)?);
    builder.set_ephemeral(request.ephemeral);
    let retention = (request.keep_checkpoints, request.keep_checkpoints_for_ms);
    write_asked_retention(builder.reborrow().init_retention(), retention);
    builder.set_venv(request.venv.as_deref().map_or(Ok(""), utf8)?);
    Ok(())
}

/// Reads a change of a specification.
///
/// # Errors
/// `invalidArgument` that names the field.
pub fn read_spec_update(reader: wire::kernel_update::Reader<'_>) -> Result<SpecUpdate> {
    let net = optional(read_name(reader.get_net(), "net")?);
    let removed = read_text_list(reader.get_remove_paths(), "removePaths", limits::MOUNTS)?;
    Ok(SpecUpdate {
        net: net.map(|text| named(&text, "network", Net::from_name)).transpose()?,
        memory_bytes: nonzero(reader.get_memory_bytes()),
        cpu_milli: nonzero(reader.get_cpu_milli()),
        pids: nonzero(reader.get_pids()),
        open_files: nonzero(reader.get_open_files()),
        workspace_bytes: nonzero(reader.get_workspace_bytes()),
        idle_timeout_ms: read_idle(reader.get_idle_timeout_ms()),
        paths: read_paths(reader.get_paths())?,
        remove_paths: removed.into_iter().map(PathBuf::from).collect(),
        venv: optional(read_name(reader.get_venv(), "venv")?).map(|venv| (venv != NO_VENV).then(|| venv.into())),
    })
}

/// Writes a change of a specification.
///
/// # Errors
/// `invalidArgument` for a path that is not UTF-8.
pub fn write_spec_update(mut builder: wire::kernel_update::Builder<'_>, update: &SpecUpdate) -> Result<()> {
    builder.set_net(update.net.map_or("", Net::name));
    builder.set_memory_bytes(update.memory_bytes.unwrap_or(0));
    builder.set_cpu_milli(update.cpu_milli.unwrap_or(0));
    builder.set_pids(update.pids.unwrap_or(0));
    builder.set_open_files(update.open_files.unwrap_or(0));
    builder.set_workspace_bytes(update.workspace_bytes.unwrap_or(0));
    builder.set_idle_timeout_ms(idle_on_wire(update.idle_timeout_ms));
    write_paths(builder.reborrow().init_paths(count(update.paths.len())), &update.paths)?;
    let venv = update.venv.as_ref().map(|venv| venv.as_deref().map_or(Ok(NO_VENV), utf8));
    builder.set_venv(venv.transpose()?.unwrap_or_default());
    let removed = update.remove_paths.iter().map(|path| utf8(path)).collect::<Result<Vec<_>>>()?;
    write_text_list(builder.init_remove_paths(count(removed.len())), &removed);
    Ok(())
}

/// Reads a kernel's specification.
///
/// # Errors
/// `invalidArgument` for malformed data or a missing engine.
pub fn read_spec(reader: wire::kernel_spec::Reader<'_>) -> Result<KernelSpec> {
    let request = read_spec_request(reader)?;
    let engine = request.engine.ok_or_else(|| Error::invalid("specification without an engine"))?;
    Ok(request.fill(&KernelSpec::new(request.name.clone(), engine)))
}

/// Writes a kernel's specification.
///
/// # Errors
/// As [`write_spec_request`].
pub fn write_spec(builder: wire::kernel_spec::Builder<'_>, spec: &KernelSpec) -> Result<()> {
    write_spec_request(builder, &SpecRequest::exactly(spec))
}

/// No virtual environment, on the wire: an empty text means no change there.
const NO_VENV: &str = "none";

/// No idle timeout, on the wire: 0 means the default there.
const NEVER: u64 = u64::MAX;

fn optional(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

fn nonzero<T: Default + PartialEq>(number: T) -> Option<T> {
    (number != T::default()).then_some(number)
}

/// Reads the name of an isolation; `None` if it is empty.
///
/// # Errors
/// `invalidArgument`.
pub fn read_optional_isolation(text: capnp::Result<capnp::text::Reader<'_>>) -> Result<Option<Isolation>> {
    match &*read_text(text, "isolation")? {
        "" => Ok(None),
        name => read_isolation(name).map(Some),
    }
}

/// Reads the name of an isolation.
fn read_isolation(text: &str) -> Result<Isolation> {
    named(text, "isolation", Isolation::from_name)
}

fn named<T>(text: &str, what: &str, find: impl Fn(&str) -> Option<T>) -> Result<T> {
    find(text).ok_or_else(|| {
        let text: String = text.chars().take(40).collect();
        Error::invalid(format!("there is no {what} {text:?}"))
    })
}

fn utf8(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::invalid(format!("path {path:?} is not UTF-8")))
}

/// The requested idle timeout.
const fn read_idle(ms: u64) -> Option<u64> {
    match ms {
        0 => None,
        NEVER => Some(0),
        ms => Some(ms),
    }
}

const fn idle_on_wire(requested: Option<u64>) -> u64 {
    match requested {
        None => 0,
        Some(0) => NEVER,
        Some(ms) => ms,
    }
}

fn write_paths(
    mut paths: capnp::struct_list::Builder<'_, wire::mount_info::Owned>,
    allowed: &[AllowedPath],
) -> Result<()> {
    for (i, allowed) in allowed.iter().enumerate() {
        let mut out = paths.reborrow().get(count(i));
        out.set_path(utf8(&allowed.path)?);
        out.set_writable(allowed.writable);
    }
    Ok(())
}

fn read_paths(
    list: capnp::Result<capnp::struct_list::Reader<'_, wire::mount_info::Owned>>,
) -> Result<Vec<AllowedPath>> {
    let list = list.map_err(|e| malformed("paths", e))?;
    bounded(list.len(), "paths", limits::MOUNTS)?;
    list.iter()
        .map(|mount| {
            let path = read_name(mount.get_path(), "path")?;
            let source = read_name(mount.get_source(), "source of a path")?;
            if !source.is_empty() && source != path {
                return Err(Error::invalid(format!("path {path:?} of a specification has another source {source:?}"))
                    .hint("create the kernel, then mount it"));
            }
            Ok(AllowedPath::new(path, mount.get_writable()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::convert::testing::{any_spec, any_spec_request, check_round_trip};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn spec_request_round_trips(request in any_spec_request()) {
            check_round_trip::<wire::kernel_spec::Owned, _>(&request, write_spec_request, read_spec_request)?;
        }

        #[test]
        fn kernel_spec_round_trips(spec in any_spec()) {
            check_round_trip::<wire::kernel_spec::Owned, _>(&spec, write_spec, read_spec)?;
        }

        #[test]
        fn exact_spec_ignores_defaults(spec in any_spec(), other in any_spec()) {
            let defaults = KernelSpec { image: String::new(), ..other };
            prop_assert_eq!(SpecRequest::exactly(&spec).fill(&defaults), spec);
        }
    }

    #[test]
    fn spec_update_round_trips() {
        let full = SpecUpdate {
            net: Some(Net::Host),
            memory_bytes: Some(1 << 30),
            cpu_milli: Some(500),
            pids: Some(9),
            open_files: Some(64),
            workspace_bytes: Some(1 << 20),
            idle_timeout_ms: Some(0),
            paths: vec![AllowedPath::new("/data", true)],
            remove_paths: vec!["/src".into()],
            venv: Some(Some("/venv".into())),
        };
        let without = SpecUpdate { venv: Some(None), ..SpecUpdate::default() };
        for update in [SpecUpdate::default(), full, without] {
            check_round_trip::<wire::kernel_update::Owned, _>(&update, write_spec_update, read_spec_update)
                .expect("it comes back");
        }
    }

    #[test]
    fn empty_spec_uses_defaults() {
        let defaults =
            KernelSpec { idle_timeout_ms: 7, ..KernelSpec::new("d".parse().expect("name"), EngineName::Python) };
        let request = SpecRequest::new("k".parse().expect("name"));
        assert_eq!(request.fill(&defaults), KernelSpec { name: request.name.clone(), ..defaults });
    }

    #[test]
    fn invalid_spec_request_is_refused() {
        let refused = |fill: fn(&mut wire::kernel_spec::Builder<'_>)| {
            let mut message = capnp::message::Builder::new_default();
            let mut spec = message.init_root::<wire::kernel_spec::Builder<'_>>();
            spec.set_name("k");
            fill(&mut spec);
            read_spec_request(spec.into_reader()).is_err()
        };
        assert!(!refused(|_| ()));
        assert!(refused(|s| s.set_name("")));
        assert!(refused(|s| s.set_name("../x")));
        assert!(refused(|s| s.set_engine("perl")));
        assert!(refused(|s| s.set_isolation("chroot")));
        assert!(refused(|s| s.set_net("all")));
        assert!(refused(|s| s.set_image("a\0")));
        assert!(refused(|s| s.set_from_dir("relative")));
        assert!(refused(|s| {
            s.reborrow().init_paths(limits::MOUNTS as u32 + 1);
        }));
        assert!(refused(|s| {
            s.reborrow().init_labels(limits::LABELS as u32 + 1);
        }));
        assert!(refused(|s| {
            let mut path = s.reborrow().init_paths(1).get(0);
            path.set_path("/a");
            path.set_source("/b");
        }));
    }
}
