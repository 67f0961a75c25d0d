//! Maintenance: results of garbage collection and verification, and lines of the audit log.

use super::checkpoint::{read_checkpoint, write_checkpoint};
use super::text::{bounded, count, malformed, read_text};
use crate::core::audit::{AuditLine, FORMAT, NewAudit};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::upkeep::{Affected, Damage, GcItem, GcReport, GcThing, VerifyReport};
use crate::rpc::schema::ryokan_capnp as wire;

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T> {
    text.parse().map_err(|error: T::Err| Error::invalid(error.to_string()))
}

/// Reads a collection's decision about one checkpoint or object.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_gc_item(reader: wire::gc_item::Reader<'_>) -> Result<GcItem> {
    let thing = match reader.which().map_err(|error| malformed("item", error))? {
        wire::gc_item::Which::Checkpoint(group) => {
            let checkpoint = group.get_checkpoint().map_err(|error| malformed("checkpoint", error))?;
            let kernel = read_text(group.get_kernel(), "kernel")?;
            GcThing::Checkpoint { kernel, checkpoint: Box::new(read_checkpoint(checkpoint)?.0) }
        }
        wire::gc_item::Which::Object(group) => {
            GcThing::Object { digest: parsed(&read_text(group.get_hash(), "hash")?)?, bytes: group.get_bytes() }
        }
    };
    Ok(GcItem { thing, stays: reader.get_stays(), why: read_text(reader.get_why(), "why")? })
}

/// Writes a collection's decision about one checkpoint or object.
pub fn write_gc_item(mut builder: wire::gc_item::Builder<'_>, item: &GcItem) {
    match &item.thing {
        GcThing::Checkpoint { kernel, checkpoint } => {
            let mut group = builder.reborrow().init_checkpoint();
            group.set_kernel(kernel.as_str());
            write_checkpoint(group.init_checkpoint(), checkpoint, false);
        }
        GcThing::Object { digest, bytes } => {
            let mut group = builder.reborrow().init_object();
            group.set_hash(digest.to_string());
            group.set_bytes(*bytes);
        }
    }
    builder.set_stays(item.stays);
    builder.set_why(item.why.as_str());
}

/// Reads the report of a collection.
pub fn read_gc_report(reader: wire::gc_report::Reader<'_>) -> GcReport {
    GcReport {
        dry_run: reader.get_dry_run(),
        checkpoints_kept: reader.get_checkpoints_kept(),
        checkpoints_removed: reader.get_checkpoints_removed(),
        objects_kept: reader.get_objects_kept(),
        bytes_kept: reader.get_bytes_kept(),
        objects_removed: reader.get_objects_removed(),
        bytes_removed: reader.get_bytes_removed(),
        objects_recent: reader.get_objects_recent(),
        packs_removed: reader.get_packs_removed(),
        pack_bytes_removed: reader.get_pack_bytes_removed(),
        bytes_copied: reader.get_bytes_copied(),
    }
}

/// Writes the report of a collection.
pub fn write_gc_report(mut builder: wire::gc_report::Builder<'_>, report: &GcReport) {
    builder.set_dry_run(report.dry_run);
    builder.set_checkpoints_kept(report.checkpoints_kept);
    builder.set_checkpoints_removed(report.checkpoints_removed);
    builder.set_objects_kept(report.objects_kept);
    builder.set_bytes_kept(report.bytes_kept);
    builder.set_objects_removed(report.objects_removed);
    builder.set_bytes_removed(report.bytes_removed);
    builder.set_objects_recent(report.objects_recent);
    builder.set_packs_removed(report.packs_removed);
    builder.set_pack_bytes_removed(report.pack_bytes_removed);
    builder.set_bytes_copied(report.bytes_copied);
}

/// Reads a finding of damage.
///
/// # Errors
/// `invalidArgument` for malformed data or data beyond a limit.
pub fn read_damage(reader: wire::damage::Reader<'_>) -> Result<Damage> {
    let list = reader.get_affects().map_err(|error| malformed("affects", error))?;
    bounded(list.len(), "affects", limits::VALUE_ITEMS)?;
    let affected = |one: wire::affected::Reader<'_>| {
        Ok(Affected {
            kernel: read_text(one.get_kernel(), "kernel")?,
            what: read_text(one.get_what(), "what")?,
            name: read_text(one.get_name(), "name")?,
        })
    };
    Ok(Damage {
        what: read_text(reader.get_what(), "what")?,
        name: read_text(reader.get_name(), "name")?,
        why: read_text(reader.get_why(), "why")?,
        affects: list.iter().map(affected).collect::<Result<_>>()?,
    })
}

/// Writes a finding of damage.
pub fn write_damage(mut builder: wire::damage::Builder<'_>, damage: &Damage) {
    builder.set_what(damage.what.as_str());
    builder.set_name(damage.name.as_str());
    builder.set_why(damage.why.as_str());
    let mut list = builder.init_affects(count(damage.affects.len()));
    for (i, affected) in damage.affects.iter().enumerate() {
        let mut one = list.reborrow().get(count(i));
        one.set_kernel(affected.kernel.as_str());
        one.set_what(affected.what.as_str());
        one.set_name(affected.name.as_str());
    }
}

/// Reads the report of a verification.
pub fn read_verify_report(reader: wire::verify_report::Reader<'_>) -> VerifyReport {
    VerifyReport {
        kernels: reader.get_kernels(),
        checkpoints: reader.get_checkpoints(),
        objects: reader.get_objects(),
        bytes: reader.get_bytes(),
        damaged: reader.get_damaged(),
    }
}

/// Writes the report of a verification.
pub fn write_verify_report(mut builder: wire::verify_report::Builder<'_>, report: &VerifyReport) {
    builder.set_kernels(report.kernels);
    builder.set_checkpoints(report.checkpoints);
    builder.set_objects(report.objects);
    builder.set_bytes(report.bytes);
    builder.set_damaged(report.damaged);
}

/// Reads a line of the audit log, in the present format. The kernel's owner is not on the wire.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_audit_line(reader: wire::audit_line::Reader<'_>) -> Result<AuditLine> {
    let manifest = read_text(reader.get_manifest(), "manifest")?;
    let version = |version: u64| (version != 0).then_some(version);
    Ok(AuditLine {
        sequence: reader.get_sequence(),
        format: FORMAT,
        what: NewAudit {
            at_ms: reader.get_at_ms(),
            uid: reader.get_uid(),
            client: read_text(reader.get_client(), "client")?,
            action: read_text(reader.get_action(), "action")?,
            kernel: read_text(reader.get_kernel(), "kernel")?,
            version_before: version(reader.get_version_before()),
            version_after: version(reader.get_version_after()),
            outcome: read_text(reader.get_outcome(), "outcome")?,
            owner: None,
            manifest: if manifest.is_empty() { None } else { Some(parsed(&manifest)?) },
            detail: read_text(reader.get_detail(), "detail")?,
        },
        hash: parsed(&read_text(reader.get_hash(), "hash")?)?,
    })
}

/// Writes a line of the audit log.
pub fn write_audit_line(mut builder: wire::audit_line::Builder<'_>, line: &AuditLine) {
    let what = &line.what;
    builder.set_sequence(line.sequence);
    builder.set_at_ms(what.at_ms);
    builder.set_uid(what.uid);
    builder.set_client(what.client.as_str());
    builder.set_action(what.action.as_str());
    builder.set_kernel(what.kernel.as_str());
    builder.set_version_before(what.version_before.unwrap_or(0));
    builder.set_version_after(what.version_after.unwrap_or(0));
    builder.set_outcome(what.outcome.as_str());
    builder.set_manifest(what.manifest.map(|manifest| manifest.to_string()).unwrap_or_default());
    builder.set_detail(what.detail.as_str());
    builder.set_hash(line.hash.to_string());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::ids::Digest;
    use crate::rpc::convert::testing::check_round_trip;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn gc_item_round_trips(bytes in any::<u64>(), digest in any::<[u8; 32]>(), stays in any::<bool>(), why in ".{0,20}") {
            let thing = GcThing::Object { digest: Digest::from_bytes(digest), bytes };
            let item = GcItem { thing, stays, why };
            let write = |builder: wire::gc_item::Builder<'_>, item: &GcItem| { write_gc_item(builder, item); Ok(()) };
            check_round_trip::<wire::gc_item::Owned, _>(&item, write, read_gc_item)?;
        }

        #[test]
        fn damage_report_round_trips(texts in prop::array::uniform3(".{0,20}"), affects in prop::collection::vec(prop::array::uniform3(".{0,9}"), 0..5)) {
            let [what, name, why] = texts;
            let affects = affects.into_iter().map(|[kernel, what, name]| Affected { kernel, what, name }).collect();
            let damage = Damage { what, name, why, affects };
            let write = |builder: wire::damage::Builder<'_>, damage: &Damage| { write_damage(builder, damage); Ok(()) };
            check_round_trip::<wire::damage::Owned, _>(&damage, write, read_damage)?;
        }

        #[test]
        fn audit_line_round_trips(
            numbers in any::<(u64, i64, u32)>(), texts in prop::array::uniform5(".{0,20}"),
            versions in (prop::option::of(1..u64::MAX), prop::option::of(1..u64::MAX)),
            digests in (any::<[u8; 32]>(), prop::option::of(any::<[u8; 32]>())),
        ) {
            let [client, action, kernel, outcome, detail] = texts;
            let what = NewAudit {
                at_ms: numbers.1, uid: numbers.2, client, action, kernel, version_before: versions.0,
                version_after: versions.1, outcome, owner: None, manifest: digests.1.map(Digest::from_bytes), detail,
            };
            let line = AuditLine { sequence: numbers.0, format: FORMAT, what, hash: Digest::from_bytes(digests.0) };
            let write = |builder: wire::audit_line::Builder<'_>, line: &AuditLine| { write_audit_line(builder, line); Ok(()) };
            check_round_trip::<wire::audit_line::Owned, _>(&line, write, read_audit_line)?;
        }
    }
}
