//! The MCP servers of a test kernel.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ryokan::core::info::{McpInfo, McpTransport};
use ryokan::core::pattern::Pattern;
use ryokan::core::value::Value;
use ryokan::mcp::allow::{AllowList, ServerEntry};
use ryokan::mcp::{Launch, McpServers, Timing};

/// A program of this directory.
pub fn program(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mcp").join(name).display().to_string()
}

/// An entry that runs `server.py` with these arguments.
pub fn entry(name: &str, args: &[&str]) -> ServerEntry {
    let mut all = vec![program("server.py")];
    all.extend(args.iter().map(|arg| (*arg).to_owned()));
    ServerEntry {
        name: name.into(),
        transport: McpTransport::Stdio { command: "python3".into(), args: all, env: Vec::new() },
        pass_env: Vec::new(),
        kernels: vec![Pattern::new("*")],
        timeout: Duration::from_secs(120),
        max_instances: 4,
    }
}

/// The transport that selects an entry by its name.
pub fn by_name() -> McpTransport {
    McpTransport::Stdio { command: String::new(), args: Vec::new(), env: Vec::new() }
}

/// Short timings for tests that wait for a timeout.
pub fn launch() -> Launch {
    let timing = Timing {
        start: Duration::from_secs(120),
        backoff_first: Duration::from_millis(20),
        backoff_max: Duration::from_secs(2),
        stop_grace: Duration::from_millis(500),
    };
    Launch { timing, ..Launch::of_process(format!("test-{}", std::process::id())) }
}

/// The servers of a kernel called `k`, which may use these entries.
pub fn servers(entries: impl IntoIterator<Item = ServerEntry>, launch: Launch) -> McpServers {
    let allow = AllowList::new(entries, PathBuf::from("/etc/ryokan/config.toml"));
    McpServers::new("k".parse().expect("a name"), Arc::new(allow), launch)
}

/// Runs a test on its own thread with a `LocalSet`, as the daemon does, for at most ten minutes.
pub fn run<F: Future>(test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let local = tokio::task::LocalSet::new();
    let bounded = async { tokio::time::timeout(Duration::from_secs(600), test).await };
    local.block_on(&runtime, bounded).expect("the test ends in time")
}

/// One server called `s` in a mode of `server.py`, registered.
pub async fn registered(mode: &[&str]) -> McpServers {
    let servers = servers([entry("s", mode)], launch());
    servers.register("s", &by_name()).await.expect("registered");
    servers
}

/// An object value.
pub fn args(fields: &[(&str, Value)]) -> Value {
    Value::Object(fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect())
}

/// The only server.
pub fn info(servers: &McpServers) -> McpInfo {
    servers.list().into_iter().next().expect("one server")
}

/// Waits for a condition.
pub async fn until(what: &str, mut so: impl FnMut() -> bool) {
    for _ in 0..18_000 {
        if so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}

/// Whether a process runs; a zombie does not.
pub fn alive(pid: &str) -> bool {
    let state =
        |stat: String| stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next().map(str::to_owned));
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.ok().and_then(state).is_some_and(|state| state != "Z" && state != "X")
}

/// The words of a file that a server writes, once the file exists.
pub async fn words(path: &Path) -> Vec<String> {
    until("the server wrote its process ids", || std::fs::read_to_string(path).is_ok_and(|text| !text.is_empty()))
        .await;
    let text = std::fs::read_to_string(path).expect("readable");
    text.split_whitespace().map(str::to_owned).collect()
}
