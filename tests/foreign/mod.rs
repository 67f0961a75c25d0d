//! Clients in another language: one built on the schema file alone calls every method (`client.py`),
//! and the Python package runs its own tests (`clients/python/tests`).

mod jj;

use std::path::{Path, PathBuf};
use std::process::Command;

use ryokan::core::engine::EngineName;
use ryokan::core::info::McpTransport;
use ryokan::core::value::Value;

use crate::support::{Host, eventually, kernel, users};

fn allow_server(host: &Host) {
    let server = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mcp/server.py");
    host.configure(&format!("[mcp.servers.s]\ncommand = \"python3\"\nargs = [{server:?}, \"ok\"]\n"));
}

/// The interpreter of the virtual environment.
fn python() -> PathBuf {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/python/bin/python");
    assert!(python.exists(), "{} is missing: scripts/check makes it, with pycapnp in it", python.display());
    python
}

#[test]
fn foreign_client_covers_schema() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = python();
    for user in users() {
        let mut host = Host::prepare(user);
        allow_server(&host);
        host.launch();
        let folder = host.path("home").join("given");
        std::fs::create_dir(&folder).unwrap();
        // The client runs as the tests' user, and the kernel as another: both write there.
        std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let ran = Command::new(&python)
            .arg(root.join("tests/foreign/client.py"))
            .args([host.socket(), host.path("run").join("ryokan/kernels"), folder])
            .current_dir(root)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{user:?}: the daemon:\n{}\nthe client: {said}", host.log());
        assert!(said.contains("called 140 methods"), "{said}");
    }
}

/// The tests start daemons of their own, from the programs of this host.
#[test]
fn python_package_passes_tests() {
    let host = Host::prepare(crate::support::User::Own);
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/python");
    let path = format!("{}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", host.path("bin").display());
    let ran = Command::new(python())
        .args(["-W", "error", "-m", "unittest", "discover", "--start-directory", "tests"])
        .current_dir(&package)
        .env("PATH", path)
        .env("PYTHONPATH", package.join("src"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success() && !said.contains("skipped"), "{}{said}", String::from_utf8_lossy(&ran.stdout));
}

/// A Python program of this repository, with the directories of a host and the Python package.
pub(crate) fn script(host: &Host, path: &str) -> Command {
    let ryokan = host.command("ryokan");
    let mut command = Command::new(python());
    command.args(["-W", "error"]).arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).arg(ryokan.get_program());
    command.env_clear().envs(ryokan.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/python/src"));
    command.env("PYTHONDONTWRITEBYTECODE", "1").current_dir(host.path("home"));
    command
}

/// The official Python client of the Model Context Protocol, with the present and the former way to begin.
#[test]
fn python_mcp_client_works() {
    let host = Host::start();
    let ran = script(&host, "tests/mcp/client.py").args(["auto", "legacy"]).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert!(said.contains("2026-07-28") && said.contains("2025-11-25"), "{said}");
}

/// The official conformance suite of the Model Context Protocol; `tests/mcp/conformance.yml` names what does not apply.
#[test]
fn mcp_conformance_suite_passes() {
    let host = Host::start();
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/npm/node_modules");
    assert!(installed.exists(), "{} is missing: scripts/check makes it", installed.display());
    let ran = script(&host, "tests/mcp/conformance.py").arg(installed).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert!(said.contains("Total: 16 passed, 17 failed"), "{said}");
}

/// Jupyter's test suite for kernels, nbclient, and what its user expects beyond them. The bridge starts the daemons.
#[test]
fn jupyter_notebooks_run() {
    let host = Host::prepare(crate::support::User::Own);
    let mut command = script(&host, "tests/foreign/jupyter.py");
    let ran = command.env("JUPYTER_DATA_DIR", host.path("home").join("jupyter")).env("IPYTHONDIR", host.path("home"));
    let ran = ran.env("JUPYTER_RUNTIME_DIR", host.path("run").join("jupyter")).output().unwrap();
    host.cli(&["daemon", "stop"]);
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{}{said}", String::from_utf8_lossy(&ran.stdout));
    assert!(said.contains("test_cell_outlives_daemon") && said.contains("\nOK"), "{said}");
}

/// The Python examples of `docs/examples`, as they are.
#[test]
fn python_examples_run() {
    for (example, prints) in [
        ("agent_loop.py", "1 kept \n2 undone \n3 kept total 37.40\n[19.9, 5.0, 12.5] True\n"),
        ("notebook.py", "['[]']\n['[1, 3, 4]']\n"),
    ] {
        let host = Host::start();
        let jupyter = host.path("home").join("jupyter");
        let prefix = host.path("home").display().to_string();
        host.ok(&["jupyter", "install", "--kernel", "analysis", "--prefix", &prefix]);
        let mut command = script(&host, &format!("docs/examples/{example}"));
        command.env("PATH", format!("{}:/usr/local/bin:/usr/bin:/bin", host.path("bin").display()));
        command.env("IPYTHONDIR", host.path("home"));
        command.env("JUPYTER_PATH", host.path("home").join("share/jupyter")).env("JUPYTER_DATA_DIR", jupyter);
        let ran = command.env("JUPYTER_RUNTIME_DIR", host.path("run").join("jupyter")).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(String::from_utf8_lossy(&ran.stdout), prints, "{example}: {said}");
        assert!(ran.status.success(), "{example}: {said}");
    }
}

/// As documented in the example configuration, a kernel requests a server by name alone.
#[test]
fn mcp_server_added_by_name() {
    let mut host = Host::prepare(crate::support::User::Own);
    allow_server(&host);
    host.launch();
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        let by_name = McpTransport::Stdio { command: String::new(), args: Vec::new(), env: Vec::new() };
        shell.register_mcp("s", &by_name, 0).await.expect("allowed by its name");
        assert_eq!(shell.mcp_servers().await.expect("servers").len(), 1);
    });
    host.ok(&["new", "by-cli"]);
    host.ok(&["mcp", "add", "by-cli", "s"]);
}

/// `callTool` calls the tools of `listTools` and keeps the argument types, for every engine.
#[test]
fn tool_arguments_keep_number_types() {
    let mut host = Host::prepare(crate::support::User::Own);
    allow_server(&host);
    host.launch();
    let server = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mcp/server.py").display().to_string();
    let transport = McpTransport::Stdio { command: "python3".into(), args: vec![server, "ok".into()], env: Vec::new() };
    host.with(async |client| {
        for engine in [EngineName::Kaish, EngineName::Python] {
            let shell = kernel(&client, engine.name(), engine).await;
            shell.register_mcp("s", &transport, 0).await.expect("allowed");
            let connected = async || shell.mcp_servers().await.expect("servers")[0].tools > 3;
            eventually("the server is connected", connected).await;
            let name = "s__add";
            assert!(shell.tools().await.expect("tools").iter().any(|tool| tool.name == name), "{engine:?}");
            let args = Value::Object(vec![("a".into(), Value::Int(2)), ("b".into(), Value::Int(3))]);
            let result = shell.tool(name, &args).await.expect("accepted");
            let said = format!("{} {:?}", String::from_utf8_lossy(&result.stdout), result.end);
            assert!(result.end.code == 0 && said.contains('5'), "{engine:?}: 2 + 3 is {said}");
        }
    });
}
