//! Shared parts of the conversions' property tests: strategies for every type, and the round trip
//! through a real message.

use capnp::message::Builder;
use capnp::traits::Owned;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::reader_options;
use super::spec::SpecRequest;
use crate::core::engine::EngineName;
use crate::core::error::Result;
use crate::core::exec::{
    Display, ExecEnd, ExecRequest, ExecResult, ExecStatus, OutputData, OutputEvent, OutputNode, Work,
};
use crate::core::ids::{CheckpointId, Digest, Epoch, ExecId, HostId, KernelId};
use crate::core::info::{Ability, Event, HostInfo, JournalEntry, KernelFilter, KernelInfo, McpTransport};
use crate::core::name::KernelName;
use crate::core::origin::{ForkPoint, Origin, OriginKind};
use crate::core::retention::Retention;
use crate::core::rights::{Right, Rights};
use crate::core::spec::{AllowedPath, Isolation, KernelLimits, KernelSpec, Net};
use crate::core::usage::DiskFigures;
use crate::core::value::{BlobRef, Value};

/// Adapts writers that cannot fail.
#[allow(clippy::unit_arg, reason = "lets a writer without a result stand where one with a result is expected")]
pub fn infallible(written: ()) -> Result<()> {
    Ok(written)
}

/// A message as bytes, as sent over a socket.
pub fn round_trip<T: Owned>(write: impl FnOnce(T::Builder<'_>) -> Result<()>) -> Result<Vec<u8>> {
    let mut message = Builder::new_default();
    write(message.init_root::<T::Builder<'_>>())?;
    Ok(capnp::serialize::write_message_to_words(&message))
}

/// Writes, serialises, parses, reads, and compares by `same`.
pub fn check_round_trip_with<T: Owned, X: std::fmt::Debug>(
    item: &X,
    write: impl Fn(T::Builder<'_>, &X) -> Result<()>,
    read: impl Fn(T::Reader<'_>) -> Result<X>,
    same: impl Fn(&X, &X) -> bool,
) -> TestCaseResult {
    let fail = |e: &dyn std::fmt::Display| TestCaseError::fail(e.to_string());
    let bytes = round_trip::<T>(|builder| write(builder, item)).map_err(|e| fail(&e))?;
    let message = capnp::serialize::read_message(&mut bytes.as_slice(), reader_options()).map_err(|e| fail(&e))?;
    let back = read(message.get_root::<T::Reader<'_>>().map_err(|e| fail(&e))?).map_err(|e| fail(&e))?;
    prop_assert!(same(item, &back), "{item:?} came back as {back:?}");
    Ok(())
}

/// Writes, serialises, parses, reads, and compares.
pub fn check_round_trip<T: Owned, X: std::fmt::Debug + PartialEq>(
    item: &X,
    write: impl Fn(T::Builder<'_>, &X) -> Result<()>,
    read: impl Fn(T::Reader<'_>) -> Result<X>,
) -> TestCaseResult {
    check_round_trip_with::<T, X>(item, write, read, |a, b| a == b)
}

/// Equality that distinguishes -0.0 from 0.0 and equates NaN with itself.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Float(x), Value::Float(y)) => x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan()),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len() && x.iter().zip(y).all(|(x, y)| x.0 == y.0 && same(&x.1, &y.1))
        }
        _ => a == b,
    }
}

/// Bytes of a field.
pub fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..64)
}

fn pairs() -> impl Strategy<Value = Vec<(String, String)>> {
    prop::collection::vec(("[A-Z_]{1,8}", "[^\0]{0,12}"), 0..4)
}

pub fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        any::<f64>().prop_map(Value::Float),
        prop_oneof![Just(f64::NAN), Just(-0.0), Just(f64::INFINITY)].prop_map(Value::Float),
        prop_oneof![".*", Just("a\0b".to_owned())].prop_map(Value::String),
        bytes().prop_map(Value::Bytes),
        "-?[1-9][0-9]{19,60}".prop_map(Value::BigInt),
        (".{0,20}", ".{0,20}").prop_map(|(type_name, repr)| Value::Opaque { type_name, repr }),
        (".{0,8}", any::<u64>(), any::<[u8; 32]>()).prop_map(|(id, size, hash)| {
            Value::Blob(BlobRef { id, size, content_type: "text/plain".into(), hash: Digest::from_bytes(hash) })
        }),
    ];
    leaf.prop_recursive(5, 64, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::Array),
            prop::collection::vec((".{0,8}", inner), 0..8).prop_map(Value::Object),
        ]
    })
}

pub fn any_output() -> impl Strategy<Value = OutputData> {
    let cells = || prop::collection::vec(".{0,8}", 0..4);
    let leaf = (".{0,8}", "[a-z]{0,9}", ".{0,8}", cells()).prop_map(|(name, entry_type, text, cells)| OutputNode {
        name,
        entry_type,
        text,
        cells,
        children: Vec::new(),
    });
    let node = leaf.prop_recursive(3, 16, 4, |inner| {
        (".{0,8}", prop::collection::vec(inner, 0..4)).prop_map(|(name, children)| OutputNode {
            name,
            children,
            ..OutputNode::default()
        })
    });
    (cells(), prop::collection::vec(node, 0..4)).prop_map(|(headers, root)| OutputData { headers, root })
}

pub fn any_event() -> impl Strategy<Value = OutputEvent> {
    prop_oneof![
        bytes().prop_map(OutputEvent::Stdout),
        bytes().prop_map(OutputEvent::Stderr),
        any_output().prop_map(OutputEvent::Structured),
        ("[a-z/]{0,20}", bytes()).prop_map(|(mime, data)| OutputEvent::Display { mime, data }),
        any::<u64>().prop_map(OutputEvent::Truncated),
        any::<i32>().prop_map(OutputEvent::ExitCode),
    ]
}

pub fn any_request() -> impl Strategy<Value = ExecRequest> {
    let what = prop_oneof![
        "[^\0]{0,80}".prop_map(Work::Code),
        ("[a-z_]{1,20}", any_value()).prop_map(|(name, args)| Work::Call { name, args }),
    ];
    let numbers = (any::<u64>(), any::<u64>(), any::<u64>());
    (what, bytes(), any::<bool>(), pairs(), "[a-z0-9]{0,20}", numbers).prop_map(
        |(what, stdin, stdin_open, env, key, n)| ExecRequest {
            what,
            stdin,
            stdin_open,
            env,
            timeout_ms: n.0,
            output_limit_bytes: n.1,
            key,
            expected_version: n.2,
        },
    )
}

pub fn any_result() -> impl Strategy<Value = ExecResult> {
    let end = (
        prop::sample::select(ExecStatus::ALL.to_vec()),
        any::<i32>(),
        ".{0,20}",
        prop::option::of(any_value()),
        prop::option::of(any_output()),
        any::<u64>(),
    )
        .prop_map(|(status, code, err, value, output, duration_us)| ExecEnd {
            status,
            code,
            err,
            value,
            output,
            duration_us,
        });
    let display = ("[a-z/]{0,20}", bytes()).prop_map(|(mime, data)| Display { mime, data });
    let displays = prop::collection::vec(display, 0..3);
    (any::<u64>(), end, bytes(), bytes(), any::<u64>(), bytes(), bytes(), displays).prop_map(
        |(exec, end, stdout, stderr, truncated_bytes, stdout_tail, stderr_tail, displays)| ExecResult {
            exec: ExecId(exec),
            end,
            stdout,
            stderr,
            truncated_bytes,
            stdout_tail,
            stderr_tail,
            displays,
        },
    )
}

fn any_name() -> impl Strategy<Value = KernelName> {
    "[a-z][a-z0-9._-]{0,20}".prop_map(|text| text.parse().expect("a valid name"))
}

fn any_paths() -> impl Strategy<Value = Vec<AllowedPath>> {
    let path = ("/[a-z/:é ]{1,20}", any::<bool>());
    prop::collection::vec(path.prop_map(|(path, writable)| AllowedPath::new(path, writable)), 0..4)
}

pub fn any_spec() -> impl Strategy<Value = KernelSpec> {
    let names = (any_name(), prop::sample::select(EngineName::ALL.to_vec()), "[a-z]{0,8}");
    let kinds = (
        prop_oneof![Just(Isolation::Process), Just(Isolation::Microvm)],
        prop_oneof![Just(Net::None), Just(Net::Host)],
    );
    let numbers = (1..u64::MAX, 1..u32::MAX, 1..u32::MAX, 1..u32::MAX, 1..u64::MAX, 0..u64::MAX);
    let retention = (prop::option::of(1..u32::MAX), prop::option::of(1..u64::MAX));
    let venv = prop::option::of("/[a-z/]{1,9}");
    let degraded = (prop::collection::vec("[a-z]{1,8}", 0..3), any::<bool>(), retention, venv);
    (names, kinds, numbers, any_paths(), pairs(), degraded).prop_map(|(names, kinds, n, paths, labels, rest)| {
        KernelSpec {
            name: names.0,
            engine: names.1,
            isolation: kinds.0,
            image: names.2,
            paths,
            net: kinds.1,
            limits: KernelLimits {
                memory_bytes: n.0,
                cpu_milli: n.1,
                pids: n.2,
                open_files: n.3,
                workspace_bytes: n.4,
            },
            idle_timeout_ms: n.5,
            labels,
            degraded: rest.0,
            ephemeral: rest.1,
            retention: Retention { newest: rest.2.0, keep_for_ms: rest.2.1 },
            venv: rest.3.map(Into::into),
        }
    })
}

pub fn any_spec_request() -> impl Strategy<Value = SpecRequest> {
    (any_spec(), any::<[bool; 9]>(), prop::option::of("/[a-z]{1,9}")).prop_map(|(spec, given, from_dir)| {
        let all = SpecRequest::exactly(&spec);
        SpecRequest {
            engine: all.engine.filter(|_| given[0]),
            isolation: all.isolation.filter(|_| given[1]),
            net: all.net.filter(|_| given[2]),
            memory_bytes: all.memory_bytes.filter(|_| given[3]),
            cpu_milli: all.cpu_milli.filter(|_| given[4]),
            pids: all.pids.filter(|_| given[5]),
            open_files: all.open_files.filter(|_| given[6]),
            workspace_bytes: all.workspace_bytes.filter(|_| given[7]),
            idle_timeout_ms: all.idle_timeout_ms.filter(|_| given[8]),
            keep_checkpoints: all.keep_checkpoints.filter(|_| given[8]),
            keep_checkpoints_for_ms: all.keep_checkpoints_for_ms.filter(|_| given[7]),
            from_dir: from_dir.map(Into::into),
            ..all
        }
    })
}

pub fn any_info() -> impl Strategy<Value = (KernelInfo, Rights)> {
    let rights = prop::collection::vec(prop::sample::select(Right::ALL.to_vec()), 0..8);
    let texts = ("[a-z]{0,9}", ".{0,20}", prop::collection::vec(".{0,9}", 0..4), ".{0,20}");
    let numbers = (any::<[u64; 4]>(), any::<[u32; 3]>(), any::<[i64; 2]>());
    (any::<[u8; 16]>(), any_spec(), texts, numbers, rights).prop_map(
        |(id, spec, texts, (long, short, times), rights)| {
            let info = KernelInfo {
                in_force: long[1].is_multiple_of(3).then(|| Box::new(spec.clone())),
                id: KernelId::from_bytes(id),
                spec,
                state: texts.0,
                state_reason: texts.1,
                version: long[0],
                epoch: Epoch(long[1]),
                checkpoints: short[1],
                created_at_ms: times[0],
                last_used_at_ms: times[1],
                memory_bytes: long[2],
                sandbox: texts.2,
                uid: short[2],
                executions: long[3],
                origin: Origin {
                    kind: OriginKind::ALL[short[0] as usize % 3],
                    generation: short[0],
                    from: long[0].is_multiple_of(2).then(|| ForkPoint {
                        kernel: KernelId::from_bytes(id),
                        name: "parent".into(),
                        checkpoint: CheckpointId::from_bytes(id),
                    }),
                    restored: long[1].is_multiple_of(2).then(|| CheckpointId::from_bytes(id)),
                },
                thread_of: long[2].is_multiple_of(2).then(|| KernelId::from_bytes(id)),
                capture: texts.3,
                at_next_start: vec!["net none -> host".into()],
                disk: long[3].is_multiple_of(2).then(|| DiskFigures {
                    workspace_bytes: long[0],
                    history_bytes: long[1],
                    saved_memory_bytes: long[2],
                    other_bytes: long[3],
                    measured_at_ms: times[0].max(1),
                }),
            };
            (info, rights.into_iter().collect())
        },
    )
}

pub fn any_filter() -> impl Strategy<Value = KernelFilter> {
    (pairs(), prop::collection::vec("[a-z]{1,8}", 0..4), "[a-z]{0,8}")
        .prop_map(|(labels, states, prefix)| KernelFilter { labels, states, prefix })
}

pub fn any_host() -> impl Strategy<Value = HostInfo> {
    let engines = prop::sample::subsequence(EngineName::ALL.to_vec(), 0..=EngineName::ALL.len());
    (any::<[u8; 16]>(), "[a-z]{0,9}", "[0-9.]{0,9}", "[a-z0-9_]{0,9}", engines, any::<u32>()).prop_map(
        |(id, name, version, arch, engines, pid)| HostInfo {
            id: HostId::from_bytes(id),
            name,
            version,
            arch,
            engines,
            pid,
        },
    )
}

pub fn any_ability() -> impl Strategy<Value = Ability> {
    ("[a-z]{0,9}", any::<bool>(), any::<bool>(), ".{0,20}", ".{0,20}")
        .prop_map(|(name, present, required, detail, hint)| Ability { name, present, required, detail, hint })
}

pub fn any_event_entry() -> impl Strategy<Value = Event> {
    (any::<u64>(), any::<i64>(), "[a-z]{0,9}", "[a-z_]{0,9}", ".{0,20}")
        .prop_map(|(sequence, at_ms, kernel, kind, detail_json)| Event { sequence, at_ms, kernel, kind, detail_json })
}

pub fn any_journal_entry() -> impl Strategy<Value = JournalEntry> {
    let texts = ("[a-z]{0,9}", ".{0,9}", ".{0,40}", "[a-z]{0,9}", ".{0,20}");
    (any::<[u64; 5]>(), any::<i64>(), texts, any::<i32>()).prop_map(|(n, at_ms, texts, code)| JournalEntry {
        sequence: n[0],
        at_ms,
        kind: texts.0,
        actor: texts.1,
        exec: n[1],
        text: texts.2,
        status: texts.3,
        code,
        err: texts.4,
        duration_us: n[2],
        output_bytes: n[3],
        truncated_bytes: n[4],
    })
}

pub fn any_transport() -> impl Strategy<Value = McpTransport> {
    let args = prop::collection::vec("[^\0]{0,9}", 0..4);
    prop_oneof![
        ("[^\0]{1,20}", args, pairs()).prop_map(|(command, args, env)| McpTransport::Stdio { command, args, env }),
        ("https?://[a-z]{1,9}", pairs()).prop_map(|(url, headers)| McpTransport::Http { url, headers }),
    ]
}
