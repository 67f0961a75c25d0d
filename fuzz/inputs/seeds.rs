//! The first inputs of every target: a few small ones each, with which a short run reaches the
//! interesting code.

use ryokan::core::error::Error;
use ryokan::core::exec::{ExecEnd, ExecRequest, ExecResult, ExecStatus, OutputData, OutputEvent, OutputNode, Work};
use ryokan::core::ids::{Digest, ExecId};
use ryokan::core::info::{KernelFilter, McpTransport};
use ryokan::core::missed::MissedEntry;
use ryokan::core::state::{EngineState, StateEntry};
use ryokan::core::value::{BlobRef, Value};
use ryokan::link::frames::{Request, encode};
use ryokan::rpc::convert::{exec, info, mcp, output, spec, value};
use ryokan::sandbox::SandboxPlan;
use ryokan::workspace::tree::entry::{Content, Entry, Meta, Node};
use ryokan::workspace::tree::format;

/// An input: its target, its name, its bytes.
pub type Seed = (&'static str, String, Vec<u8>);

fn put(seeds: &mut Vec<Seed>, target: &'static str, name: &str, bytes: &[u8]) {
    seeds.push((target, name.to_owned(), bytes.to_owned()));
}

fn everything() -> Value {
    Value::Object(vec![
        ("n".into(), Value::Null),
        ("l".into(), Value::Array(vec![Value::Bool(true), Value::Int(-1), Value::Float(1.5), Value::Float(f64::NAN)])),
        ("x".into(), Value::Bytes(vec![0, 255])),
        ("I".into(), Value::BigInt("-123456789012345678901234567890".into())),
        ("O".into(), Value::Opaque { type_name: "t".into(), repr: "<t>".into() }),
        (
            "b".into(),
            Value::Blob(BlobRef {
                id: "i".into(),
                size: 12,
                content_type: "text/plain".into(),
                hash: Digest::from_bytes([7; 32]),
            }),
        ),
    ])
}

fn table() -> OutputData {
    OutputData {
        headers: vec!["a".into()],
        root: vec![OutputNode { name: "r".into(), text: "t".into(), cells: vec!["c".into()], ..OutputNode::default() }],
    }
}

fn message<T: capnp::traits::Owned>(seeds: &mut Vec<Seed>, choice: u8, name: &str, write: impl FnOnce(T::Builder<'_>)) {
    let mut message = capnp::message::Builder::new_default();
    write(message.init_root::<T::Builder<'_>>());
    let mut bytes = vec![choice];
    capnp::serialize::write_message(&mut bytes, &message).expect("memory takes it");
    put(seeds, "messages", name, &bytes);
}

fn messages(seeds: &mut Vec<Seed>) {
    use ryokan::rpc::schema::ryokan_capnp as wire;
    let name = "demo".parse().expect("a name");
    let spec = ryokan::core::spec::KernelSpec::new(name, ryokan::core::engine::EngineName::Python);
    message::<wire::kernel_spec::Owned>(seeds, 0, "spec_request", |b| {
        spec::write_spec_request(b, &spec::SpecRequest::exactly(&spec)).expect("plain");
    });
    message::<wire::kernel_spec::Owned>(seeds, 1, "spec", |b| spec::write_spec(b, &spec).expect("plain"));
    let request = ExecRequest { env: vec![("A".into(), "b".into())], ..ExecRequest::code("echo hi") };
    message::<wire::exec_request::Owned>(seeds, 2, "request", |b| {
        exec::write_exec_request(b, &request).expect("plain")
    });
    let call = ExecRequest { what: Work::Call { name: "t".into(), args: everything() }, ..ExecRequest::default() };
    message::<wire::exec_request::Owned>(seeds, 2, "call", |b| exec::write_exec_request(b, &call).expect("plain"));
    let result = ExecResult {
        exec: ExecId(7),
        end: ExecEnd {
            status: ExecStatus::Failed,
            code: 1,
            err: "e".into(),
            value: Some(everything()),
            output: Some(table()),
            duration_us: 5,
        },
        stdout: b"out".to_vec(),
        stderr: b"err".to_vec(),
        truncated_bytes: 9,
        stdout_tail: b"last".to_vec(),
        stderr_tail: Vec::new(),
        displays: Vec::new(),
    };
    message::<wire::exec_result::Owned>(seeds, 3, "result", |b| exec::write_exec_result(b, &result).expect("plain"));
    message::<wire::value::Owned>(seeds, 4, "value", |b| value::write_value(b, &everything()).expect("plain"));
    let events = [
        OutputEvent::Stdout(b"x".to_vec()),
        OutputEvent::Structured(table()),
        OutputEvent::Display { mime: "text/html".into(), data: b"<b>".to_vec() },
    ];
    for (i, event) in events.iter().enumerate() {
        message::<wire::output_event::Owned>(seeds, 5, &format!("event{i}"), |b| {
            output::write_output_event(b, event).expect("plain");
        });
    }
    let filter = KernelFilter { prefix: "d".into(), ..KernelFilter::default() };
    message::<wire::kernel_filter::Owned>(seeds, 7, "filter", |b| info::write_kernel_filter(b, &filter));
    let stdio =
        McpTransport::Stdio { command: "c".into(), args: vec!["a".into()], env: vec![("A".into(), "b".into())] };
    message::<wire::mcp_transport::Owned>(seeds, 9, "transport", |b| mcp::write_mcp_transport(b, &stdio));
}

const EVENTS: &[(&str, &str)] = &[
    ("ready", r#"{"ev":"ready","engine":"python","version":"3.11.2","interrupt":"signal"}"#),
    ("display", r#"{"ev":"display","exec":7,"mime":"text/html"}"#),
    (
        "structured",
        r#"{"ev":"structured","exec":7,"output":{"headers":["a"],"root":[{"name":"n","type":"t","text":"x","cells":["c"],"children":[]}]}}"#,
    ),
    ("tool_call", r#"{"ev":"tool_call","call":1,"exec":7,"name":"server__tool","args":{"o":[["k",{"i":"1"}]]}}"#),
    ("jobs", r#"{"ev":"jobs","jobs":[{"id":"1","command":"sleep 60"}]}"#),
    ("put", r#"{"ev":"put","key":"var/x","meta":{"type":"int","summary":"42"},"more":false}"#),
    ("missed", r#"{"ev":"missed","entries":[{"key":"var/f","type":"generator","reason":"r"}]}"#),
    (
        "end",
        r#"{"ev":"end","id":1,"exec":7,"status":"done","code":0,"err":"","value":[null,{"f":"1.5"}],"output":{"headers":[],"root":[]}}"#,
    ),
    ("reply", r#"{"ev":"reply","id":3,"ok":false,"code":"notFound","message":"m","hint":"h"}"#),
];

fn checkpoint_parts(seeds: &mut Vec<Seed>) {
    let digest = Digest::from_bytes([171; 32]);
    let state = format!(r#"{{"entries":[{{"key":"var/x","meta":{{"type":"int"}},"body":"{digest}","bytes":3}}]}}"#);
    put(seeds, "checkpoint", "state", &[&[1], state.as_bytes()].concat());
    let file = Entry {
        name: b"a".as_slice().into(),
        meta: Meta {
            mode: 0o644,
            attributes: Some(Box::new(vec![(b"user.k".as_slice().into(), b"v".as_slice().into())])),
            ..Meta::default()
        },
        node: Node::File { size: 1, content: Content::Inline(b"x".as_slice().into()), group: None },
    };
    let link = Entry {
        name: b"b".as_slice().into(),
        meta: Meta::default(),
        node: Node::Symlink { target: b"a".as_slice().into() },
    };
    let root = Entry { name: b"".as_slice().into(), meta: Meta::default(), node: Node::Folder { digest } };
    let mut lines = Vec::new();
    [file, link].iter().for_each(|entry| format::encode_entry(&mut lines, entry));
    put(seeds, "checkpoint", "folder", &[&[2], format::encode_page(2, &lines).as_slice()].concat());
    put(seeds, "checkpoint", "root", &[&[3], format::encode_root(&root).as_slice()].concat());
    let map = format::Map { size: 9, pieces: vec![format::Piece { offset: 2, length: 3, digest }] };
    put(seeds, "checkpoint", "map", &[&[4], format::encode_map(&map).as_slice()].concat());
}

/// A frame of the handover protocol.
fn wire(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind][..], &(body.len() as u32).to_le_bytes(), body].concat()
}

fn handover(seeds: &mut Vec<Seed>) {
    let (id, digest) = ("11".repeat(16), "ab".repeat(32));
    let name = "demo".parse().expect("a name");
    let spec = ryokan::core::spec::KernelSpec::new(name, ryokan::core::engine::EngineName::Python);
    let spec = serde_json::to_string(&spec).expect("a specification has a JSON form");
    let messages = [
        ("hello", format!(r#"{{"message":"hello","protocol":"ryokan-handover","version":3,"host":"{id}","check":7}}"#)),
        (
            "offer",
            format!(
                r#"{{"message":"offer","handover":"{id}","kernel":"{id}","epoch":2,"spec":{spec},"resources":["mount /a"],"allow_missing":true,"format":1,"bytes":7}}"#
            ),
        ),
        (
            "accept",
            r#"{"message":"accept","missing":["network host"],"takes_preview":true,"kind":"checkpoint","why":""}"#
                .into(),
        ),
        ("flush", r#"{"message":"flush","objects":3}"#.into()),
        ("seal", format!(r#"{{"message":"seal","description":"{digest}"}}"#)),
        ("working", r#"{"message":"working"}"#.into()),
        ("commit", format!(r#"{{"message":"commit","handover":"{id}","kernel":"{id}","epoch":2}}"#)),
        ("refused", r#"{"message":"refused","error":{"code":"refused","message":"m","hint":"h","reason":"r"}}"#.into()),
    ];
    for (name, message) in messages {
        let json = message.as_bytes();
        let check = ring::digest::digest(&ring::digest::SHA256, json);
        let checked = [&check.as_ref()[..8], json].concat();
        put(seeds, "wire", name, &if name == "hello" { wire(1, json) } else { wire(8, &checked) });
    }
    let packed = zstd::bulk::compress(&[7; 3000], 1).expect("memory takes it");
    let object = [&[171; 32][..], &3000u64.to_le_bytes()].concat();
    let chunk = |stored: u32, form: u8| {
        wire(5, &[&[171; 32][..], &3000u32.to_le_bytes(), &stored.to_le_bytes(), &[form]].concat())
    };
    let asked = [wire(2, &[171; 64]), wire(3, &[3]), wire(7, &[171; 64]), wire(3, &[1])];
    let sent = [wire(4, &object), chunk(packed.len() as u32, 1), wire(6, &packed), chunk(0, 2), chunk(5, 0)];
    let objects = [asked.concat(), sent.concat(), wire(6, b"piece")].concat();
    put(seeds, "wire", "objects", &objects);
}

/// All inputs.
pub fn all() -> Vec<Seed> {
    let mut all = Vec::new();
    let seeds = &mut all;
    put(seeds, "value_json", "everything", everything().to_json().to_string().as_bytes());
    put(seeds, "value_json", "plain", br#"{"a":[1,2.5,18446744073709551615,null,true,"s"]}"#);
    for (name, json) in EVENTS {
        let mut frame = vec![3];
        frame.extend((json.len() as u32).to_le_bytes());
        frame.extend(2u32.to_le_bytes());
        frame.extend(json.as_bytes());
        frame.extend(b"\x01t");
        put(seeds, "frames", name, &frame);
        put(seeds, "worker_link", name, json.as_bytes());
    }
    let requests = [
        Request::Exec { id: 1, exec: 7, code: "1".into(), env: vec![("K".into(), "V".into())], stdin: false },
        Request::Entry { key: "var/x".into(), meta: Default::default(), more: true },
        Request::Shutdown,
    ];
    let mut bytes = vec![9];
    for request in &requests {
        encode(request, b"tail", &mut bytes).expect("small");
    }
    put(seeds, "frames", "requests", &bytes);
    let mut state = EngineState { engine: "python".into(), version: "3".into(), ..EngineState::default() };
    let meta = serde_json::Map::from_iter([("type".to_owned(), "int".into())]);
    state.entries.insert("var/x".into(), StateEntry { meta, body: vec![1, 2, 3] });
    state.missed.push(MissedEntry { key: "var/f".into(), type_name: "t".into(), reason: "r".into() });
    let packed = state.pack().expect("small");
    put(seeds, "engine_state", "whole", &packed);
    // Without magic, version and checksum: the target seals it again.
    put(seeds, "engine_state", "content", &packed[5..packed.len() - 32]);
    put(seeds, "error_line", "refused", Error::refused("m").hint("h").reason("r").to_line().as_bytes());
    put(
        seeds,
        "error_line",
        "wrapped",
        format!("remote exception: {} (at x)", Error::lost("gone").to_line()).as_bytes(),
    );
    for (name, text) in [
        ("size", "1.5GiB"),
        ("time", "250ms"),
        ("cpus", "0.25"),
        ("name", "a.b_c-9"),
        ("path", "/opt/tools/x"),
        ("pattern", "*a?b*\nxxaxb"),
    ] {
        put(seeds, "words", name, text.as_bytes());
    }
    put(seeds, "words", "digest", Digest::from_bytes([171; 32]).to_string().as_bytes());
    put(seeds, "config", "example", include_bytes!("../../config.example.toml"));
    let open: String = include_str!("../../config.example.toml")
        .lines()
        .filter_map(|line| {
            line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).or(line.starts_with('[').then_some(line))
        })
        .map(|line| format!("{line}\n"))
        .collect();
    put(seeds, "config", "every_key", open.as_bytes());
    let mut plan = SandboxPlan::new("/data/kernels/1");
    plan.mounts.push(ryokan::sandbox::PlannedMount {
        inside: "/opt/a".into(),
        source: "/opt/a".into(),
        writable: true,
        system: false,
        is_mapped: false,
    });
    plan.protected.push("/data".into());
    put(seeds, "plan", "plan", &serde_json::to_vec(&plan).expect("a plan has a JSON form"));
    put(seeds, "runs", "both", &[3, 5, 0x80, 1, 7]);
    put(seeds, "runs", "stderr_first", &[0, 9]);
    let head = br#"{"ryokan":"0"}"#;
    let record = [&[1], &(head.len() as u64).to_le_bytes()[..], head].concat();
    put(seeds, "bundle", "head", &record);
    checkpoint_parts(seeds);
    handover(seeds);
    messages(seeds);
    all
}
