//! Lists of a kernel: variables, mounts, tools, jobs and values missing from its saved state.

use capnp::struct_list;

use super::text::{bounded, count, malformed, read_name, read_text};
use crate::core::error::{Error, Result};
use crate::core::host_resource::{HostResource, ResourceKind};
use crate::core::info::{Job, MountInfo, ToolInfo, VarInfo};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::rpc::schema::ryokan_capnp as wire;

macro_rules! list {
    ($(#[$doc:meta])* $read_list:ident, $write_list:ident, $read:ident, $write:ident, $owned:ty, $item:ty, $what:literal) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// `invalidArgument` for malformed data and for more than [`limits::VALUE_ITEMS`].
        pub fn $read_list(reader: capnp::Result<struct_list::Reader<'_, $owned>>) -> Result<Vec<$item>> {
            let list = reader.map_err(|e| malformed($what, e))?;
            bounded(list.len(), $what, limits::VALUE_ITEMS)?;
            list.iter().map($read).collect()
        }

        /// Writes into a builder of the same length.
        pub fn $write_list(mut builder: struct_list::Builder<'_, $owned>, items: &[$item]) {
            for (i, item) in items.iter().enumerate() {
                $write(builder.reborrow().get(count(i)), item);
            }
        }
    };
}

list!(
    /// Reads mounts.
    read_mounts, write_mounts, read_mount, write_mount, wire::mount_info::Owned, MountInfo, "mounts"
);
list!(
    /// Reads tools.
    read_tools, write_tools, read_tool, write_tool, wire::tool_info::Owned, ToolInfo, "tools"
);
list!(
    /// Reads variables.
    read_vars, write_vars, read_var, write_var, wire::var_info::Owned, VarInfo, "variables"
);
list!(
    /// Reads the values missing from saved state.
    read_missed, write_missed, read_missed_entry, write_missed_entry, wire::missed_entry::Owned, MissedEntry, "missed"
);
list!(
    /// Reads resources of the host.
    read_host_resources, write_host_resources, read_host_resource, write_host_resource,
    wire::host_resource::Owned, HostResource, "resources of the host"
);
list!(
    /// Reads background jobs.
    read_jobs, write_jobs, read_job, write_job, wire::job::Owned, Job, "jobs"
);

fn read_mount(reader: wire::mount_info::Reader<'_>) -> Result<MountInfo> {
    Ok(MountInfo {
        path: read_name(reader.get_path(), "path of a mount")?,
        source: read_name(reader.get_source(), "source of a mount")?,
        writable: reader.get_writable(),
    })
}

fn write_mount(mut builder: wire::mount_info::Builder<'_>, mount: &MountInfo) {
    builder.set_path(mount.path.as_str());
    builder.set_source(mount.source.as_str());
    builder.set_writable(mount.writable);
}

fn read_host_resource(reader: wire::host_resource::Reader<'_>) -> Result<HostResource> {
    let kind = read_name(reader.get_kind(), "kind of a resource")?;
    let unknown = || Error::invalid(format!("{kind:?} is no kind of resource"));
    Ok(HostResource {
        kind: ResourceKind::from_name(&kind).ok_or_else(unknown)?,
        name: read_name(reader.get_name(), "name of a resource")?,
        source: read_name(reader.get_source(), "source of a resource")?,
        writable: reader.get_writable(),
    })
}

fn write_host_resource(mut builder: wire::host_resource::Builder<'_>, resource: &HostResource) {
    builder.set_kind(resource.kind.name());
    builder.set_name(resource.name.as_str());
    builder.set_source(resource.source.as_str());
    builder.set_writable(resource.writable);
}

fn read_tool(reader: wire::tool_info::Reader<'_>) -> Result<ToolInfo> {
    Ok(ToolInfo {
        name: read_name(reader.get_name(), "tool name")?,
        description: read_text(reader.get_description(), "description of a tool")?,
        source: read_name(reader.get_source(), "source of a tool")?,
        schema_json: read_text(reader.get_schema_json(), "schema of a tool")?,
    })
}

fn write_tool(mut builder: wire::tool_info::Builder<'_>, tool: &ToolInfo) {
    builder.set_name(tool.name.as_str());
    builder.set_description(tool.description.as_str());
    builder.set_source(tool.source.as_str());
    builder.set_schema_json(tool.schema_json.as_str());
}

fn read_var(reader: wire::var_info::Reader<'_>) -> Result<VarInfo> {
    Ok(VarInfo {
        name: read_name(reader.get_name(), "variable name")?,
        type_name: read_text(reader.get_type(), "type of a variable")?,
        summary: read_text(reader.get_summary(), "summary of a variable")?,
    })
}

fn write_var(mut builder: wire::var_info::Builder<'_>, var: &VarInfo) {
    builder.set_name(var.name.as_str());
    builder.set_type(var.type_name.as_str());
    builder.set_summary(var.summary.as_str());
}

fn read_missed_entry(reader: wire::missed_entry::Reader<'_>) -> Result<MissedEntry> {
    Ok(MissedEntry {
        key: read_text(reader.get_key(), "key of a missed entry")?,
        type_name: read_text(reader.get_type(), "type of a missed entry")?,
        reason: read_text(reader.get_reason(), "reason of a missed entry")?,
    })
}

fn write_missed_entry(mut builder: wire::missed_entry::Builder<'_>, missed: &MissedEntry) {
    builder.set_key(missed.key.as_str());
    builder.set_type(missed.type_name.as_str());
    builder.set_reason(missed.reason.as_str());
}

fn read_job(reader: wire::job::Reader<'_>) -> Result<Job> {
    Ok(Job { id: read_text(reader.get_id(), "job id")?, command: read_text(reader.get_command(), "command of a job")? })
}

fn write_job(mut builder: wire::job::Builder<'_>, job: &Job) {
    builder.set_id(job.id.as_str());
    builder.set_command(job.command.as_str());
}

#[cfg(test)]
#[expect(clippy::unit_arg, reason = "`infallible` turns a writer that cannot fail into one that the checks take")]
mod tests {
    use super::*;
    use crate::rpc::convert::testing::{check_round_trip, infallible};
    use proptest::prelude::*;

    const NAME: &str = "[^\0]{0,20}";

    proptest! {
        #[test]
        fn mount_info_round_trips((path, source, writable) in (NAME, NAME, any::<bool>())) {
            let mount = MountInfo { path, source, writable };
            check_round_trip::<wire::mount_info::Owned, _>(&mount, |b, m| infallible(write_mount(b, m)), read_mount)?;
        }

        #[test]
        fn tool_info_round_trips((name, description, source, schema_json) in (NAME, ".*", NAME, ".*")) {
            let tool = ToolInfo { name, description, source, schema_json };
            check_round_trip::<wire::tool_info::Owned, _>(&tool, |b, t| infallible(write_tool(b, t)), read_tool)?;
        }

        #[test]
        fn variable_info_round_trips((name, type_name, summary) in (NAME, ".*", ".*")) {
            let var = VarInfo { name, type_name, summary };
            check_round_trip::<wire::var_info::Owned, _>(&var, |b, v| infallible(write_var(b, v)), read_var)?;
        }

        #[test]
        fn missed_entry_round_trips((key, type_name, reason) in (".*", ".*", ".*")) {
            let missed = MissedEntry { key, type_name, reason };
            check_round_trip::<wire::missed_entry::Owned, _>(
                &missed, |b, m| infallible(write_missed_entry(b, m)), read_missed_entry)?;
        }

        #[test]
        fn job_info_round_trips((id, command) in (".*", ".*")) {
            let job = Job { id, command };
            check_round_trip::<wire::job::Owned, _>(&job, |b, j| infallible(write_job(b, j)), read_job)?;
        }
    }
}
