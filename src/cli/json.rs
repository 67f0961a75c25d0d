//! JSON for programs, in the formats of `docs/cli-json.md`. Fields may be added but never renamed
//! or removed.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Serialize;
use serde_json::{Value as Json, json};

use super::preview::Preview;
use crate::core::audit::{AuditBreak, AuditHead, AuditLine};
use crate::core::checkpoint::{Checkpoint, Restoration, RestoredFrom};
use crate::core::diff::{Area, Deed, Patch};
use crate::core::exec::{Display, ExecResult};
use crate::core::fork::ForkWay;
use crate::core::freeze::portable::ImportedGroup;
use crate::core::ids::{Digest, ExecId};
use crate::core::info::{
    Event, HandoverInfo, JournalEntry, KernelInfo, MountInfo, ProcessInfo, TeleportReport, ToolInfo,
};
use crate::core::limits::engine_state_bytes;
use crate::core::missed::MissedEntry;
use crate::core::retention::Retention;
use crate::core::rights::Rights;
use crate::core::signature::Signer;
use crate::core::spec::KernelLimits;
use crate::core::upkeep::{Damage, GcItem, GcReport, GcThing, VerifyReport};
use crate::core::usage::DiskUsage;
use crate::core::value::Value;
use crate::rpc::client::{Forks, ImportedKernel};

/// A kernel.
pub fn kernel(info: &KernelInfo) -> Json {
    let spec = &info.spec;
    let path = |allowed: &crate::core::spec::AllowedPath| json!({ "path": allowed.path.to_string_lossy(), "writable": allowed.writable });
    json!({
        "id": info.id.to_string(),
        "name": spec.name.as_str(),
        "engine": spec.engine.name(),
        "isolation": spec.isolation.name(),
        "image": spec.image,
        "net": spec.net.name(),
        "paths": spec.paths.iter().map(path).collect::<Vec<_>>(),
        "venv": spec.venv.as_ref().map(|venv| venv.to_string_lossy()),
        "labels": pairs(&spec.labels),
        "degraded": spec.degraded,
        "limits": limits(&spec.limits),
        "at_next_start": info.at_next_start,
        "in_force": info.in_force.as_ref().map(|now| json!({
            "net": now.net.name(),
            "paths": now.paths.iter().map(path).collect::<Vec<_>>(),
            "venv": now.venv.as_ref().map(|venv| venv.to_string_lossy()),
            "limits": limits(&now.limits),
        })),
        "idle_timeout_ms": spec.idle_timeout_ms,
        "retention": retention(&spec.retention),
        "ephemeral": spec.ephemeral,
        "state": info.state,
        "state_reason": info.state_reason,
        "version": info.version,
        "epoch": info.epoch.0,
        "generation": info.origin.generation,
        "origin": info.origin,
        "thread_of": info.thread_of,
        "checkpoints": info.checkpoints,
        "created_at_ms": info.created_at_ms,
        "last_used_at_ms": info.last_used_at_ms,
        "memory_bytes": info.memory_bytes,
        "disk": info.disk,
        "sandbox": info.sandbox,
        "uid": info.uid,
        "executions": info.executions,
        "capture": info.capture,
    })
}

fn limits(limits: &KernelLimits) -> Json {
    json!({
        "memory_bytes": limits.memory_bytes,
        "cpu_milli": limits.cpu_milli,
        "pids": limits.pids,
        "open_files": limits.open_files,
        "workspace_bytes": limits.workspace_bytes,
        "engine_state_bytes": engine_state_bytes(limits.memory_bytes),
    })
}

/// An imported kernel: KERNEL, with the resources of the host that its file requests.
pub fn imported(imported: &ImportedKernel, signer: &Signer) -> Json {
    let mut json = kernel(&imported.info);
    json["granted"] = json!(imported.granted);
    json["withheld"] = json!(imported.withheld);
    json["signer"] = of(signer);
    json
}

/// A group that was created from a file.
pub fn imported_group(imported: &ImportedGroup, signer: &Signer, sealer: &Signer) -> Json {
    let mut json = of(imported);
    json["signer"] = of(signer);
    json["sealer"] = of(sealer);
    json
}

/// A kernel, the rights of the called capability, what is not saved, and the mounts.
pub fn shown_kernel(info: &KernelInfo, rights: Rights, missed: &[MissedEntry], mounts: &[MountInfo]) -> Json {
    let mut json = kernel(info);
    json["missed"] = json!(missed);
    json["mounts"] = list(mounts);
    json["rights"] = rights.iter().map(|right| right.name()).collect();
    json
}

/// How long checkpoints are kept.
pub fn retention(retention: &Retention) -> Json {
    json!({ "newest": retention.newest, "keep_for_ms": retention.keep_for_ms })
}

/// A collection's decision about one checkpoint or object.
pub fn gc_item(item: &GcItem) -> Json {
    let mut json = match &item.thing {
        GcThing::Checkpoint { kernel, checkpoint } => {
            json!({ "kernel": kernel, "checkpoint": self::checkpoint(checkpoint, false) })
        }
        GcThing::Object { digest, bytes } => json!({ "object": digest.to_string(), "bytes": bytes }),
    };
    json["stays"] = item.stays.into();
    json["why"] = item.why.as_str().into();
    json
}

/// The report of a garbage collection.
pub fn gc_report(report: &GcReport) -> Json {
    json!(report)
}

/// What takes room on the disk; with `one`, of a single kernel.
pub fn disk_usage(usage: &DiskUsage, one: bool) -> Json {
    match usage.kernels.first().filter(|_| one) {
        Some(kernel) => json!(kernel),
        None => json!(usage),
    }
}

/// A finding of damage.
pub fn damage(damage: &Damage) -> Json {
    json!(damage)
}

/// The report of a verification.
pub fn verify_report(report: &VerifyReport) -> Json {
    json!(report)
}

/// A line of the audit log.
pub fn audit_line(line: &AuditLine) -> Json {
    let what = &line.what;
    json!({
        "sequence": line.sequence,
        "at_ms": what.at_ms,
        "uid": what.uid,
        "client": what.client,
        "action": what.action,
        "kernel": what.kernel,
        "version_before": what.version_before,
        "version_after": what.version_after,
        "outcome": what.outcome,
        "manifest": what.manifest.map(|manifest| manifest.to_string()),
        "detail": what.detail,
        "hash": line.hash.to_string(),
    })
}

/// The result of verifying the audit log.
pub fn audit_proof(proved: &Result<AuditHead, AuditBreak>) -> Json {
    match proved {
        Ok(head) => json!({ "whole": true, "lines": head.sequence, "head": head.to_string() }),
        Err(broken) => {
            json!({ "whole": false, "gap": broken.is_gap, "broken_at": broken.sequence, "why": broken.why })
        }
    }
}

fn pairs(pairs: &[(String, String)]) -> Json {
    Json::Object(pairs.iter().map(|(k, v)| (k.clone(), Json::String(v.clone()))).collect())
}

/// The end of an execution and its output.
pub fn exec_result(result: &ExecResult) -> Json {
    let end = &result.end;
    let mut json = json!({
        "exec": result.exec.0,
        "status": end.status.name(),
        "code": end.code,
        "err": end.err,
        "unsaved": end.unsaved(),
        "value": end.value.as_ref().map(Value::to_plain_json),
        "has_value": end.value.is_some(),
        "output": end.output,
        "duration_us": end.duration_us,
        "truncated_bytes": result.truncated_bytes,
        "displays": result.displays.iter().map(display).collect::<Json>(),
    });
    bytes(&mut json, "stdout", &result.stdout);
    bytes(&mut json, "stderr", &result.stderr);
    if result.truncated_bytes > 0 {
        bytes(&mut json, "stdout_tail", &result.stdout_tail);
        bytes(&mut json, "stderr_tail", &result.stderr_tail);
    }
    json
}

/// A rich form: text as it is, other content in Base64.
fn display(display: &Display) -> Json {
    match std::str::from_utf8(&display.data) {
        Ok(text) => json!({ "mime": display.mime, "data": text }),
        Err(_) => json!({ "mime": display.mime, "data_base64": BASE64.encode(&display.data) }),
    }
}

/// Output as text; if it is not UTF-8, also as bytes.
fn bytes(json: &mut Json, name: &str, bytes: &[u8]) {
    json[name] = Json::String(String::from_utf8_lossy(bytes).into_owned());
    if std::str::from_utf8(bytes).is_err() {
        json[format!("{name}_base64")] = Json::String(BASE64.encode(bytes));
    }
}

/// A variable: its value for people and its tagged form, which loses no type.
pub fn var(name: &str, value: &Value) -> Json {
    json!({ "name": name, "value": value.to_plain_json(), "tagged": value.to_json() })
}

/// An item that serialises to its JSON directly.
pub fn of<T: Serialize>(item: &T) -> Json {
    serde_json::to_value(item).unwrap_or_default()
}

/// Items that serialise to their JSON directly.
pub fn list<T: Serialize>(items: &[T]) -> Json {
    items.iter().map(|item| serde_json::to_value(item).unwrap_or_default()).collect()
}

/// A started process.
pub fn spawned(exec: ExecId) -> Json {
    json!({ "process": exec.0 })
}

/// Processes beside the engine.
pub fn processes(processes: &[ProcessInfo]) -> Json {
    let process = |process: &ProcessInfo| {
        json!({
            "process": process.exec.0,
            "argv": process.argv,
            "started_at_ms": process.started_at_ms,
            "detached": process.detached,
            "terminal": process.terminal,
        })
    };
    processes.iter().map(process).collect()
}

/// Tools, with their schemas as JSON.
pub fn tools(tools: &[ToolInfo]) -> Json {
    let tool = |tool: &ToolInfo| {
        json!({
            "name": tool.name,
            "description": tool.description,
            "source": tool.source,
            "schema": serde_json::from_str::<Json>(&tool.schema_json).unwrap_or_default(),
        })
    };
    tools.iter().map(tool).collect()
}

/// A stored blob.
pub fn blob(hash: Digest, bytes: u64) -> Json {
    json!({ "hash": hash.to_string(), "bytes": bytes })
}

/// A checkpoint, and whether it is the kernel's current one.
pub fn checkpoint(checkpoint: &Checkpoint, is_head: bool) -> Json {
    let mut json = serde_json::to_value(checkpoint).unwrap_or_default();
    json["is_head"] = is_head.into();
    json["kind"] = checkpoint.snapshot_kind().name().into();
    json
}

/// The outcome of a fork: each child is a kernel or an error.
pub fn forks(forks: &Forks) -> Json {
    let child = |(name, made): &(String, crate::core::error::Result<_>)| match made {
        Ok((_, info)) => json!({ "name": name, "kernel": kernel(info), "error": null }),
        Err(error) => json!({ "name": name, "kernel": null, "error": error }),
    };
    json!({
        "checkpoint": forks.checkpoint,
        "kind": forks.way.as_ref().map(ForkWay::name),
        "reason": match &forks.way {
            Some(ForkWay::Checkpoint { reason }) if !reason.is_empty() => Some(reason),
            _ => None,
        },
        "pause_us": match &forks.way {
            Some(ForkWay::Machine { pause }) => Some(pause.as_micros() as u64),
            _ => None,
        },
        "children": forks.children.iter().map(child).collect::<Vec<_>>(),
    })
}

/// The differences of one file, as text.
pub fn patch(patch: &Patch) -> Json {
    let mut json = json!({ "deed": patch.deed, "note": patch.note });
    for (name, held) in [("path", &patch.path), ("before", &patch.before), ("text", &patch.text)] {
        bytes(&mut json, name, held);
    }
    json
}

/// Numbers of differences, by area and kind.
pub fn difference_counts(counts: &BTreeMap<(Area, Deed), u64>) -> Json {
    let mut areas = serde_json::Map::new();
    for area in Area::ALL {
        let of = Deed::ALL
            .iter()
            .map(|deed| (deed.name().to_owned(), counts.get(&(area, *deed)).copied().unwrap_or(0).into()));
        areas.insert(area.name().into(), Json::Object(of.collect()));
    }
    Json::Object(areas)
}

/// The result of a restore.
pub fn restoration(done: &Restoration) -> Json {
    let (engine_from, why_not_memory) = match &done.engine {
        RestoredFrom::Memory => ("memory", ""),
        RestoredFrom::Saved { why_not_memory } => ("saved", why_not_memory.as_str()),
    };
    json!({
        "checkpoint": checkpoint(&done.checkpoint, true),
        "safety": done.safety,
        "version": done.version,
        "missed": done.missed,
        "files_changed": done.files_changed,
        "engine_from": engine_from,
        "why_not_memory": why_not_memory,
        "decisions_changed": done.decisions_changed,
        "artifacts_changed": done.artifacts_changed,
        "ended": done.ended,
    })
}

/// What a restore would do.
pub fn preview(preview: &Preview<'_>) -> Json {
    json!({
        "checkpoint": checkpoint(preview.checkpoint, false),
        "changes": preview.changes,
        "ends": preview.ends.iter().map(|job| json!({ "id": job.id, "command": job.command })).collect::<Vec<_>>(),
        "lost": preview.lost,
    })
}

/// An entry of a journal.
pub fn journal_entry(entry: &JournalEntry) -> Json {
    json!({
        "sequence": entry.sequence,
        "at_ms": entry.at_ms,
        "kind": entry.kind,
        "actor": entry.actor,
        "exec": entry.exec,
        "text": entry.text,
        "status": entry.status,
        "code": entry.code,
        "err": entry.err,
        "duration_us": entry.duration_us,
        "output_bytes": entry.output_bytes,
        "truncated_bytes": entry.truncated_bytes,
    })
}

/// An event.
pub fn event(event: &Event) -> Json {
    json!({
        "sequence": event.sequence,
        "at_ms": event.at_ms,
        "kernel": event.kernel,
        "kind": event.kind,
        "detail": serde_json::from_str::<Json>(&event.detail_json).unwrap_or_default(),
    })
}

/// A move between hosts.
pub fn handover(info: &HandoverInfo) -> Json {
    json!({
        "id": info.id, "kernel": info.kernel, "name": info.name, "state": info.state, "peer": info.peer,
        "epoch": info.epoch.0, "at_ms": info.at_ms, "problem": info.problem,
    })
}

/// A completed move.
pub fn teleport(report: &TeleportReport) -> Json {
    json!({
        "handover": report.handover, "host": report.host, "epoch": report.epoch.0, "objects": report.objects,
        "bytes": report.bytes, "sent_objects": report.sent_objects, "sent_bytes": report.sent_bytes,
        "pause_ms": report.pause_ms, "missing": report.missing, "acknowledged": report.acknowledged,
        "kind": report.kind.name(), "kind_reason": report.kind_reason, "elapsed_ms": report.elapsed_ms,
        "wire_bytes": report.wire_bytes, "stays": report.stays,
    })
}
