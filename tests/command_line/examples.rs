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

/// `scripts/record` runs, and the recording in `docs` has its present commands.
#[test]
fn session_is_recorded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let host = Host::prepare(crate::support::User::Own);
    let record = |args: &[&str]| {
        let mut python = Command::new("python3");
        python.args(["-W", "error"]).arg(root.join("scripts/record")).args(args);
        let (said, code) = printed(python);
        assert_eq!(code, Some(0), "{args:?}: {said}");
        said
    };
    let commands = record(&["--commands"]);
    let ryokan = host.command("ryokan");
    let bin = Path::new(ryokan.get_program()).parent().unwrap().display().to_string();
    let out = host.path("home").display().to_string();
    record(&["--fast", "--bin", &bin, "--out", &out]);
    for folder in [host.path("home"), root.join("docs")] {
        let cast = fs::read_to_string(folder.join("session.cast")).unwrap();
        let mut lines = cast.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        assert_eq!(lines.next().expect("a header")["version"], 2);
        let (mut typed, mut last) = (String::new(), 0.0);
        for event in lines {
            let at = event[0].as_f64().expect("a time");
            assert!(at >= last && event[1] == "o", "{event}");
            last = at;
            typed.push_str(event[2].as_str().expect("text"));
        }
        let picture = fs::read_to_string(folder.join("session.svg")).unwrap();
        for command in commands.lines() {
            assert!(typed.contains(command), "{}: {command}: scripts/record records it anew", folder.display());
            assert!(picture.contains(command), "{}: {command}", folder.display());
        }
        assert!(typed.contains("removed try-2"), "{typed}");
    }
}

#[test]
fn each_example_has_test() {
    let folder = example("");
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    // The Python ones are run by tests/foreign.
    assert_eq!(names, ["README.md", "agent_loop.py", "attempts.sh", "ci.yml", "mcp.json", "notebook.py"]);
}

/// The example of the README, with a package of this host in place of one from the network.
#[test]
fn package_example_installs() {
    const WHEEL: &str = "import zipfile
with zipfile.ZipFile('six-9.9-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('six.py', 'answer = 42')
    wheel.writestr('six-9.9.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: six\\nVersion: 9.9\\n')
    wheel.writestr('six-9.9.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr('six-9.9.dist-info/RECORD', '')";
    let host = Host::start();
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let (_, rest) = readme.split_once("into the workspace (with the host's pip").expect("the section");
    let (_, block) = rest.split_once("```sh\n").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    let script = block
        .replace(" --net host", "")
        .replace("--target lib six", "--target lib --no-index six-9.9-py3-none-any.whl");
    assert_ne!(script, block);
    let lines: Vec<&str> = script.lines().collect();
    let (new, more) = lines.split_first().unwrap();
    let mut sh = shell(&host);
    sh.args([
        "-euc",
        &format!("/usr/bin/python3 -c \"{WHEEL}\"\n{new}\nryokan cp six-*.whl web:\n{}", more.join("\n")),
    ]);
    let (said, code) = printed(sh);
    assert_eq!(code, Some(0), "{said}");
    // The next execution finds the package without a word: sys.path is saved.
    host.ok(&["stop", "web"]);
    assert_eq!(host.ok(&["exec", "web", "import six; six.answer"]), "42\n");
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
