//! Kernels, the host, events and journal entries, as shown to clients.

use super::rights::{read_rights, rights_len, write_rights};
use super::spec::{read_spec, write_spec};
use super::text::{
    bounded, count, malformed, read_name, read_pairs, read_text, read_text_list, write_pairs, write_text_list,
};
use super::usage::{read_disk_figures, write_disk_figures};
use crate::core::error::{Error, Result};
use crate::core::ids::Epoch;
use crate::core::info::{Ability, Event, HostInfo, JournalEntry, KernelFilter, KernelInfo};
use crate::core::limits;
use crate::core::origin::{ForkPoint, Origin, OriginKind};
use crate::core::rights::Rights;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads a kernel's present state and the rights of the called capability.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_kernel_info(reader: wire::kernel_info::Reader<'_>) -> Result<(KernelInfo, Rights)> {
    let info = KernelInfo {
        id: parsed(read_name(reader.get_id(), "kernel id")?)?,
        spec: read_spec(reader.get_spec().map_err(|e| malformed("specification", e))?)?,
        state: read_name(reader.get_state(), "state")?,
        state_reason: read_text(reader.get_state_reason(), "reason of the state")?,
        version: reader.get_version(),
        epoch: Epoch(reader.get_epoch()),
        checkpoints: reader.get_checkpoints(),
        created_at_ms: reader.get_created_at_ms(),
        last_used_at_ms: reader.get_last_used_at_ms(),
        memory_bytes: reader.get_memory_bytes(),
        sandbox: read_text_list(reader.get_sandbox(), "sandbox layers", limits::LABELS)?,
        uid: reader.get_uid(),
        executions: reader.get_executions(),
        origin: read_origin(reader.get_origin().map_err(|e| malformed("origin", e))?, reader.get_generation())?,
        thread_of: optional(read_name(reader.get_thread_of(), "kernel of a thread")?)?,
        capture: read_text(reader.get_capture(), "way of capture")?,
        at_next_start: read_text_list(reader.get_at_next_start(), "pending changes", limits::SPEC_CHANGES)?,
        in_force: match reader.has_in_force() {
            true => Some(Box::new(read_spec(reader.get_in_force().map_err(|e| malformed("specification", e))?)?)),
            false => None,
        },
        disk: read_disk_figures(reader.get_disk().map_err(|e| malformed("disk figures", e))?),
    };
    Ok((info, read_rights(reader.get_rights())?))
}

/// Writes a kernel's present state and the rights of the called capability.
///
/// # Errors
/// As [`write_spec`].
pub fn write_kernel_info(mut builder: wire::kernel_info::Builder<'_>, info: &KernelInfo, rights: Rights) -> Result<()> {
    builder.set_id(info.id.to_string());
    write_spec(builder.reborrow().init_spec(), &info.spec)?;
    builder.set_state(info.state.as_str());
    builder.set_state_reason(info.state_reason.as_str());
    builder.set_version(info.version);
    builder.set_epoch(info.epoch.0);
    builder.set_generation(info.origin.generation);
    write_origin(builder.reborrow().init_origin(), &info.origin);
    builder.set_thread_of(text_of(info.thread_of));
    builder.set_checkpoints(info.checkpoints);
    builder.set_created_at_ms(info.created_at_ms);
    builder.set_last_used_at_ms(info.last_used_at_ms);
    builder.set_memory_bytes(info.memory_bytes);
    write_text_list(builder.reborrow().init_sandbox(count(info.sandbox.len())), &info.sandbox);
    builder.set_uid(info.uid);
    builder.set_executions(info.executions);
    builder.set_capture(info.capture.as_str());
    write_text_list(builder.reborrow().init_at_next_start(count(info.at_next_start.len())), &info.at_next_start);
    if let Some(spec) = &info.in_force {
        write_spec(builder.reborrow().init_in_force(), spec)?;
    }
    if let Some(disk) = &info.disk {
        write_disk_figures(builder.reborrow().init_disk(), disk);
    }
    write_rights(builder.init_rights(rights_len(rights)), rights);
    Ok(())
}

fn read_origin(reader: wire::origin::Reader<'_>, generation: u32) -> Result<Origin> {
    let kind = read_name(reader.get_kind(), "kind of an origin")?;
    let name = read_name(reader.get_name(), "name in an origin")?;
    let kernel = optional(read_name(reader.get_kernel(), "kernel of an origin")?)?;
    let checkpoint = optional(read_name(reader.get_checkpoint(), "checkpoint of an origin")?)?;
    let kind = match kind.as_str() {
        // An older daemon does not send the kind.
        "" => OriginKind::Original,
        kind => OriginKind::from_name(kind).ok_or_else(|| Error::invalid(format!("{kind:?} is no kind of origin")))?,
    };
    let from = kernel.zip(checkpoint).map(|(kernel, checkpoint)| ForkPoint { kernel, name, checkpoint });
    let restored = optional(read_name(reader.get_restored(), "restored checkpoint")?)?;
    Ok(Origin { kind, generation, from, restored })
}

fn write_origin(mut builder: wire::origin::Builder<'_>, origin: &Origin) {
    builder.set_kind(origin.kind.name());
    if let Some(ForkPoint { kernel, name, checkpoint }) = &origin.from {
        builder.set_kernel(kernel.to_string());
        builder.set_name(name.as_str());
        builder.set_checkpoint(checkpoint.to_string());
    }
    builder.set_restored(text_of(origin.restored));
}

fn text_of(id: Option<impl std::fmt::Display>) -> String {
    id.map(|id| id.to_string()).unwrap_or_default()
}

fn optional<T: std::str::FromStr<Err: std::fmt::Display>>(text: String) -> Result<Option<T>> {
    if text.is_empty() { Ok(None) } else { parsed(text).map(Some) }
}

/// Reads a filter of kernels.
///
/// # Errors
/// `invalidArgument` for malformed data or data beyond a limit.
pub fn read_kernel_filter(reader: wire::kernel_filter::Reader<'_>) -> Result<KernelFilter> {
    Ok(KernelFilter {
        labels: read_pairs(reader.get_labels(), "labels", limits::LABELS)?,
        states: read_text_list(reader.get_states(), "states", limits::LABELS)?,
        prefix: read_name(reader.get_prefix(), "prefix")?,
    })
}

/// Writes a filter of kernels.
pub fn write_kernel_filter(mut builder: wire::kernel_filter::Builder<'_>, filter: &KernelFilter) {
    write_pairs(builder.reborrow().init_labels(count(filter.labels.len())), &filter.labels);
    write_text_list(builder.reborrow().init_states(count(filter.states.len())), &filter.states);
    builder.set_prefix(filter.prefix.as_str());
}

/// Reads the host's answer to `hello`. Unknown engines are skipped: a newer daemon may have more.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_host_info(reader: wire::host_info::Reader<'_>) -> Result<HostInfo> {
    let engines = read_text_list(reader.get_engines(), "engines", limits::LABELS)?;
    Ok(HostInfo {
        id: parsed(read_name(reader.get_id(), "host id")?)?,
        name: read_name(reader.get_name(), "host name")?,
        version: read_name(reader.get_version(), "version")?,
        arch: read_name(reader.get_arch(), "architecture")?,
        engines: engines.iter().filter_map(|name| name.parse().ok()).collect(),
        pid: reader.get_pid(),
    })
}

/// Writes the host's answer to `hello`.
pub fn write_host_info(mut builder: wire::host_info::Builder<'_>, host: &HostInfo) {
    builder.set_id(host.id.to_string());
    builder.set_name(host.name.as_str());
    builder.set_version(host.version.as_str());
    builder.set_arch(host.arch.as_str());
    builder.set_pid(host.pid);
    let engines: Vec<&str> = host.engines.iter().map(|engine| engine.name()).collect();
    write_text_list(builder.init_engines(count(engines.len())), &engines);
}

/// Reads an ability of the host, present or missing.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_ability(reader: wire::ability::Reader<'_>) -> Result<Ability> {
    Ok(Ability {
        name: read_name(reader.get_name(), "ability name")?,
        present: reader.get_present(),
        required: reader.get_required(),
        detail: read_text(reader.get_detail(), "ability detail")?,
        hint: read_text(reader.get_hint(), "ability hint")?,
    })
}

/// Writes an ability of the host.
pub fn write_ability(mut builder: wire::ability::Builder<'_>, ability: &Ability) {
    builder.set_name(ability.name.as_str());
    builder.set_present(ability.present);
    builder.set_required(ability.required);
    builder.set_detail(ability.detail.as_str());
    builder.set_hint(ability.hint.as_str());
}

/// Reads the host's abilities.
///
/// # Errors
/// `invalidArgument` for malformed data and for more than [`limits::VALUE_ITEMS`].
pub fn read_abilities(
    reader: capnp::Result<capnp::struct_list::Reader<'_, wire::ability::Owned>>,
) -> Result<Vec<Ability>> {
    let list = reader.map_err(|e| malformed("abilities", e))?;
    bounded(list.len(), "abilities", limits::VALUE_ITEMS)?;
    list.iter().map(read_ability).collect()
}

/// Writes the host's abilities into a builder of the same length.
pub fn write_abilities(mut builder: capnp::struct_list::Builder<'_, wire::ability::Owned>, abilities: &[Ability]) {
    for (i, ability) in abilities.iter().enumerate() {
        write_ability(builder.reborrow().get(count(i)), ability);
    }
}

/// Reads an event.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_event(reader: wire::event::Reader<'_>) -> Result<Event> {
    Ok(Event {
        sequence: reader.get_sequence(),
        at_ms: reader.get_at_ms(),
        kernel: read_name(reader.get_kernel(), "kernel of an event")?,
        kind: read_name(reader.get_kind(), "kind of an event")?,
        detail_json: read_text(reader.get_detail_json(), "detail of an event")?,
    })
}

/// Writes an event.
pub fn write_event(mut builder: wire::event::Builder<'_>, event: &Event) {
    builder.set_sequence(event.sequence);
    builder.set_at_ms(event.at_ms);
    builder.set_kernel(event.kernel.as_str());
    builder.set_kind(event.kind.as_str());
    builder.set_detail_json(event.detail_json.as_str());
}

/// Reads a journal entry.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_journal_entry(reader: wire::journal_entry::Reader<'_>) -> Result<JournalEntry> {
    Ok(JournalEntry {
        sequence: reader.get_sequence(),
        at_ms: reader.get_at_ms(),
        kind: read_name(reader.get_kind(), "kind of an entry")?,
        actor: read_text(reader.get_actor(), "actor of an entry")?,
        exec: reader.get_exec_id(),
        text: read_text(reader.get_text(), "text of an entry")?,
        status: read_name(reader.get_status(), "status of an entry")?,
        code: reader.get_code(),
        err: read_text(reader.get_err(), "error of an entry")?,
        duration_us: reader.get_duration_us(),
        output_bytes: reader.get_output_bytes(),
        truncated_bytes: reader.get_truncated_bytes(),
    })
}

/// Writes a journal entry.
pub fn write_journal_entry(mut builder: wire::journal_entry::Builder<'_>, entry: &JournalEntry) {
    builder.set_sequence(entry.sequence);
    builder.set_at_ms(entry.at_ms);
    builder.set_kind(entry.kind.as_str());
    builder.set_actor(entry.actor.as_str());
    builder.set_exec_id(entry.exec);
    builder.set_text(entry.text.as_str());
    builder.set_status(entry.status.as_str());
    builder.set_code(entry.code);
    builder.set_err(entry.err.as_str());
    builder.set_duration_us(entry.duration_us);
    builder.set_output_bytes(entry.output_bytes);
    builder.set_truncated_bytes(entry.truncated_bytes);
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: String) -> Result<T> {
    text.parse().map_err(|e: T::Err| Error::invalid(e.to_string()))
}

#[cfg(test)]
#[expect(clippy::unit_arg, reason = "`infallible` turns a writer that cannot fail into one that the checks take")]
mod tests {
    use super::*;
    use crate::rpc::convert::testing::{
        any_ability, any_event_entry, any_filter, any_host, any_info, any_journal_entry,
    };
    use crate::rpc::convert::testing::{check_round_trip, infallible};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn kernel_info_round_trips(info in any_info()) {
            let write = |b: wire::kernel_info::Builder<'_>, (i, r): &(KernelInfo, Rights)| write_kernel_info(b, i, *r);
            check_round_trip::<wire::kernel_info::Owned, _>(&info, write, read_kernel_info)?;
        }

        #[test]
        fn kernel_filter_round_trips(filter in any_filter()) {
            check_round_trip::<wire::kernel_filter::Owned, _>(
                &filter, |b, f| infallible(write_kernel_filter(b, f)), read_kernel_filter)?;
        }

        #[test]
        fn host_info_round_trips(host in any_host()) {
            check_round_trip::<wire::host_info::Owned, _>(
                &host, |b, h| infallible(write_host_info(b, h)), read_host_info)?;
        }

        #[test]
        fn ability_round_trips(ability in any_ability()) {
            check_round_trip::<wire::ability::Owned, _>(
                &ability, |b, a| infallible(write_ability(b, a)), read_ability)?;
        }

        #[test]
        fn host_event_round_trips(event in any_event_entry()) {
            check_round_trip::<wire::event::Owned, _>(&event, |b, e| infallible(write_event(b, e)), read_event)?;
        }

        #[test]
        fn journal_entry_round_trips(entry in any_journal_entry()) {
            check_round_trip::<wire::journal_entry::Owned, _>(
                &entry, |b, e| infallible(write_journal_entry(b, e)), read_journal_entry)?;
        }
    }
}
