//! The examples of `docs/examples` that need no Python package, as they are.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::Host;

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples").join(name)
}

/// A shell that finds ryokan's programs first.
fn shell(host: &Host) -> Command {
    let ryokan = host.command("ryokan");
    let bin = Path::new(ryokan.get_program()).parent().unwrap().display().to_string();
    let mut shell = Command::new("bash");
    shell.env_clear().envs(ryokan.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.env("PATH", format!("{bin}:/usr/local/bin:/usr/bin:/bin")).current_dir(host.path("home"));
    shell
}

fn printed(mut command: Command) -> (String, Option<i32>) {
    let ran = command.output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    (said, ran.status.code())
}

#[test]
fn attempts_example_runs() {
    let host = Host::start();
    let mut sh = shell(&host);
    sh.arg(example("attempts.sh"));
    let (said, code) = printed(sh);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("best: try-2") && said.contains("+fig pear apple"), "{said}");
    assert!(said.contains("took 1 change of try-2") && said.contains("\nfig pear apple\n"), "{said}");
    assert_eq!(host.ok(&["ls", "--quiet"]), "");
}

#[test]
fn ci_example_reports_status() {
    let host = Host::start();
    let text = fs::read_to_string(example("ci.yml")).unwrap();
    let (_, block) = text.split_once("run: |\n").expect("the job's commands");
    let script: String = block.lines().map(|line| format!("{}\n", line.trim_start())).collect();
    let project = host.path("home/project");
    fs::create_dir(&project).unwrap();
    for (test, wanted) in [("echo fine", 0), ("echo broken; exit 3", 3)] {
        fs::write(project.join("test.sh"), format!("#!/bin/sh\n{test}\n")).unwrap();
        fs::set_permissions(project.join("test.sh"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let mut sh = shell(&host);
        // As the runner executes it.
        sh.args(["-e", "-c", &script]).current_dir(&project);
        let (said, code) = printed(sh);
        assert_eq!(code, Some(wanted), "{said}");
        let report = fs::read_to_string(project.join("report.txt")).unwrap();
        assert_eq!(report.trim(), test.split([' ', ';']).nth(1).unwrap());
        assert_eq!(host.ok(&["ls", "--quiet"]), "");
    }
}

#[test]
fn mcp_example_serves_its_kernel() {
    let host = Host::start();
    host.ok(&["new", "agent", "--engine", "bash"]);
    host.ok(&["new", "other", "--engine", "bash"]);
    let config: serde_json::Value = serde_json::from_slice(&fs::read(example("mcp.json")).unwrap()).unwrap();
    let server = &config["mcpServers"]["ryokan"];
    let words: Vec<&str> = server["args"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let mut command = host.command(server["command"].as_str().unwrap());
    let mut child = command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut to, mut from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let mut ask = |message: serde_json::Value| {
        writeln!(to, "{message}").unwrap();
        let mut line = String::new();
        if message.get("id").is_some() {
            from.read_line(&mut line).unwrap();
        }
        line
    };
    let client = serde_json::json!({ "name": "test", "version": "1" });
    let hello = serde_json::json!({ "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client });
    ask(serde_json::json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello }));
    ask(serde_json::json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }));
    let listed = ask(serde_json::json!({ "jsonrpc": "2.0", "id": 2, "method": "resources/list" }));
    assert!(listed.contains("agent") && !listed.contains("other"), "{listed}");
    drop(to);
    assert!(child.wait().unwrap().success());
}

#[test]
fn index_names_every_example() {
    let index = fs::read_to_string(example("README.md")).unwrap();
    for entry in fs::read_dir(example("")).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        assert!(name == "README.md" || index.contains(&format!("({name})")), "{name}");
    }
}
