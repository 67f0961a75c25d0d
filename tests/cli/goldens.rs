//! Golden tests of the command line's output, in `golden/`. `RYOKAN_BLESS=1` rewrites the files.

use std::path::Path;

use ryokan::cli::args;
use ryokan::cli::failure;
use ryokan::cli::json;
use ryokan::cli::paint::Paint;
use ryokan::cli::render;
use ryokan::core::engine::EngineName;
use ryokan::core::error::Error;
use ryokan::core::exec::{ExecEnd, ExecResult, ExecStatus};
use ryokan::core::ids::{Epoch, ExecId, KernelId};
use ryokan::core::info::{Ability, Event, JournalEntry, KernelInfo, McpInfo, MountInfo, ToolInfo, VarInfo};
use ryokan::core::rights::{Right, Rights};
use ryokan::core::spec::{AllowedPath, KernelSpec};
use ryokan::core::usage::DiskFigures;
use ryokan::core::value::Value;

const NOW_MS: i64 = 1_763_762_400_000;

fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/golden").join(name);
    if std::env::var_os("RYOKAN_BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == text, "{name} differs; RYOKAN_BLESS=1 rewrites it. Now:\n{text}");
}

/// Indented, with keys in alphabetical order: the default order depends on a feature of some
/// dependency.
fn sorted(json: &serde_json::Value) -> String {
    fn sort(json: &serde_json::Value) -> serde_json::Value {
        match json {
            serde_json::Value::Object(fields) => {
                let fields: std::collections::BTreeMap<_, _> =
                    fields.iter().map(|(k, v)| (k.clone(), sort(v))).collect();
                fields.into_iter().collect()
            }
            serde_json::Value::Array(items) => items.iter().map(sort).collect(),
            other => other.clone(),
        }
    }
    format!("{:#}\n", sort(json))
}

#[test]
fn golden_help_pages() {
    let mut cli = args::command();
    cli.build();
    let mut pages = vec![cli];
    while let Some(page) = pages.pop() {
        let name = page.get_bin_name().unwrap_or("ryokan").replace(' ', "-");
        let text = page.clone().term_width(100).render_help().to_string();
        assert!(!text.contains("  \n\n          "), "{name}: an option of more than one line");
        golden(&format!("help-{name}.txt"), &text);
        pages.extend(page.get_subcommands().filter(|sub| sub.get_name() != "help").cloned());
    }
}

fn kernel(name: &str) -> KernelInfo {
    let in_force = KernelSpec::new(name.parse().unwrap(), EngineName::Kaish);
    let mut spec = in_force.clone();
    spec.limits.memory_bytes = 1 << 30;
    KernelInfo {
        id: KernelId::from_bytes([0xab; 16]),
        spec,
        state: "stopped".into(),
        state_reason: String::new(),
        version: 3,
        epoch: Epoch(1),
        checkpoints: 0,
        created_at_ms: NOW_MS - 86_400_000,
        last_used_at_ms: NOW_MS - 90_000,
        memory_bytes: 0,
        sandbox: vec![],
        uid: 1000,
        executions: 12,
        origin: Default::default(),
        thread_of: None,
        capture: "reflink (the workspace was made as a folder, not in a subvolume)".into(),
        at_next_start: vec!["memory 512 MiB -> 1 GiB".into()],
        in_force: Some(in_force.into()),
        disk: None,
    }
}

fn busy_kernel() -> KernelInfo {
    let mut info = kernel("data-1");
    info.spec.engine = EngineName::Python;
    info.spec.paths = vec![AllowedPath::new("/home/amy/src", true), AllowedPath::new("/opt/sdk", false)];
    info.spec.labels = vec![("project".into(), "x".into())];
    info.spec.degraded = vec!["cgroup".into()];
    info.spec.idle_timeout_ms = 0;
    info.state = "busy".into();
    info.memory_bytes = 45 << 20;
    info.disk = Some(DiskFigures {
        workspace_bytes: 12 << 20,
        history_bytes: 3 << 19,
        saved_memory_bytes: 1 << 30,
        other_bytes: 64 << 10,
        measured_at_ms: NOW_MS - 30_000,
    });
    info.sandbox = vec!["landlock ABI 6".into(), "seccomp 61 rules".into()];
    info
}

#[test]
fn golden_kernel_views() {
    let mut crashed = kernel("odd");
    crashed.state = "crashed".into();
    crashed.state_reason = "killed by signal 9\u{1b}[31m".into();
    let all = [kernel("demo"), busy_kernel(), crashed.clone()];
    golden("kernels.txt", &render::kernels(&all, "none", NOW_MS, Paint::OFF));
    golden("kernels-painted.txt", &render::kernels(&all, "none", NOW_MS, Paint::ON));
    golden("kernels-none.txt", &render::kernels(&[], "no kernel matches", NOW_MS, Paint::OFF));
    golden("kernel.txt", &render::kernel(&busy_kernel(), Rights::ALL, NOW_MS, Paint::OFF));
    let few: Rights = [Right::Read, Right::Execute].into_iter().collect();
    golden("kernel-crashed.txt", &render::kernel(&crashed, few, NOW_MS, Paint::OFF));
    golden("kernel.json", &sorted(&json::shown_kernel(&busy_kernel(), few, &[], &[])));
}

#[test]
fn golden_lists() {
    let var = |name: &str, type_name: &str, summary: &str| VarInfo {
        name: name.into(),
        type_name: type_name.into(),
        summary: summary.into(),
    };
    let vars = [var("x", "int", "42"), var("frame", "DataFrame", "   a  b\n0  1  2"), var("évil", "str", "\u{1b}[2J")];
    golden("vars.txt", &render::vars(&vars, Paint::OFF));
    let mounts = [
        MountInfo { path: "/data".into(), source: "/srv/data".into(), writable: false },
        MountInfo { path: "/out".into(), source: "/home/amy/out put".into(), writable: true },
    ];
    golden("mounts.txt", &render::mounts(&mounts, Paint::OFF));
    let tools = [ToolInfo {
        name: "weather__forecast".into(),
        description: "What the weather will be, in a very long sentence that no terminal shows in full.\nMore.".into(),
        source: "mcp".into(),
        schema_json: "{\"type\":\"object\"}".into(),
    }];
    golden("tools.txt", &render::tools(&tools, Paint::OFF));
    golden("tools.json", &sorted(&json::tools(&tools)));
    let server = |name: &str, state: &str, tools, error: &str| McpInfo {
        name: name.into(),
        state: state.into(),
        tools,
        error: error.into(),
    };
    let servers = [server("files", "ready", 12, ""), server("weather", "failed", 0, "connection refused")];
    golden("mcp.txt", &render::mcp_servers(&servers, Paint::OFF));
}

#[test]
fn golden_abilities() {
    let ability = |name: &str, present, required, detail: &str, hint: &str| Ability {
        name: name.into(),
        present,
        required,
        detail: detail.into(),
        hint: hint.into(),
    };
    let all = [
        ability("user-namespaces", true, true, "may be made", ""),
        ability("landlock", false, true, "kernel 5.4", "a kernel from 5.13 on with Landlock enabled"),
        ability("kvm", false, false, "no /dev/kvm", "enable virtualisation in the firmware"),
    ];
    golden("abilities.txt", &render::abilities(&all, Paint::OFF));
}

#[test]
fn golden_journal_and_events() {
    let entry = |sequence, kind: &str, exec, status: &str, code, err: &str, text: &str| JournalEntry {
        sequence,
        at_ms: NOW_MS,
        kind: kind.into(),
        actor: "ryokan-cli 0.1.0 (uid 1000)".into(),
        exec,
        text: text.into(),
        status: status.into(),
        code,
        err: err.into(),
        duration_us: 73_500,
        output_bytes: if exec == 1 { 2048 } else { 0 },
        truncated_bytes: if exec == 1 { 1 << 20 } else { 0 },
    };
    let entries = [
        entry(1, "execution", 1, "done", 0, "", "import csv\nrows = list(csv.reader(open('x')))"),
        entry(2, "message", 0, "", 0, "", "user: count the rows"),
        entry(3, "execution", 2, "failed", 1, "NameError: name 'x' is not defined", "x"),
        entry(4, "execution", 3, "running", 0, "", "while True: pass"),
    ];
    let text = |full| entries.iter().map(|e| render::journal_entry(e, full, Paint::OFF)).collect::<String>();
    golden("journal.txt", &text(false));
    golden("journal-full.txt", &text(true));
    golden("journal.json", &sorted(&json::journal_entry(&entries[2])));
    let event = Event {
        sequence: 7,
        at_ms: NOW_MS,
        kernel: "demo".into(),
        kind: "worker_crashed".into(),
        detail_json: "{\"signal\":9}".into(),
    };
    golden("event.txt", &render::event(&event, Paint::OFF));
    golden("event.json", &sorted(&json::event(&event)));
}

#[test]
fn golden_results() {
    let result = |value: Option<Value>| ExecResult {
        exec: ExecId(7),
        end: ExecEnd { status: ExecStatus::Done, code: 0, err: String::new(), value, output: None, duration_us: 1234 },
        stdout: b"text\n".to_vec(),
        stderr: vec![0xff, b'x'],
        truncated_bytes: 0,
        stdout_tail: Vec::new(),
        stderr_tail: Vec::new(),
        displays: Vec::new(),
    };
    golden("result.json", &sorted(&json::exec_result(&result(Some(Value::Int(42))))));
    for (value, text) in [
        (None, None),
        (Some(Value::Null), None),
        (Some(Value::Int(42)), Some("42\n")),
        (Some(Value::Float(1.0)), Some("1.0\n")),
        (Some(Value::String("it's\n".into())), Some("'it\\'s\\n'\n")),
        (Some(Value::Array(vec![Value::Bool(true), Value::Null])), Some("[True, None]\n")),
    ] {
        assert_eq!(render::value_of(&result(value.clone()), EngineName::Python).as_deref(), text);
        assert_eq!(render::value_of(&result(value), EngineName::Kaish), None, "kaish prints its results itself");
    }
}

#[test]
fn golden_errors() {
    let refused = Error::refused("kernel demo may not have /etc").hint("mount a copy").reason("reserved path");
    golden("error.txt", &failure::render(&refused, Paint::OFF));
    golden("error-painted.txt", &failure::render(&refused, Paint::ON));
    let evil = Error::not_found("there is no \u{1b}]0;title\u{7} kernel");
    golden("error-control.txt", &failure::render(&evil, Paint::OFF));
}
