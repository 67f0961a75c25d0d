//! Processes beside the engine: byte-exact streams, one end for each, nothing left behind, and no way out of the sandbox.

pub(crate) mod attach;
pub(crate) mod escapes;
mod exits;
pub(crate) mod lifecycle;
pub(crate) mod ports;
pub(crate) mod streams;
pub(crate) mod table;
pub(crate) mod terminal;

use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecResult, Program, Work};
use ryokan::rpc::client::{HostClient, KernelClient};

use crate::support::{Host, users};

/// Runs a test on a daemon of each user.
fn each_user(test: impl Fn(Host)) {
    for user in users() {
        test(Host::start_as(user));
    }
}

/// A request for a program in the workspace.
pub(crate) fn program(argv: &[&str]) -> ExecRequest {
    let argv = argv.iter().map(|argument| (*argument).to_owned()).collect();
    ExecRequest {
        what: Work::Process(Program { argv, cwd: "/workspace".into(), ..Program::default() }),
        ..ExecRequest::default()
    }
}

/// A request for a script of `sh`.
pub(crate) fn script(text: &str) -> ExecRequest {
    program(&["sh", "-c", text])
}

pub(crate) fn detached(request: ExecRequest) -> ExecRequest {
    let Work::Process(program) = request.what else { panic!("a process") };
    ExecRequest { what: Work::Process(Program { detached: true, ..program }), ..request }
}

/// Runs a process to its end.
pub(crate) async fn finish(kernel: &KernelClient, request: &ExecRequest) -> ExecResult {
    kernel.spawn(request).await.expect("accepted").execution.result().await.expect("a result")
}

/// Runs a script to its end and returns its trimmed output.
pub(crate) async fn says(kernel: &KernelClient, text: &str) -> String {
    let result = finish(kernel, &script(text)).await;
    assert_eq!(result.end.code, 0, "{text:?}: {result:?}");
    String::from_utf8_lossy(&result.stdout).trim().to_owned()
}

/// The engine of a kernel, which runs scripts of `sh`.
pub(crate) struct Inside<'k> {
    pub kernel: &'k KernelClient,
    pub engine: EngineName,
}

impl Inside<'_> {
    /// Code that runs until it is interrupted.
    pub(crate) fn sleep(&self) -> &'static str {
        match self.engine {
            EngineName::Python => "import time; time.sleep(600)",
            EngineName::Node => "await new Promise(r => setTimeout(r, 600000))",
            EngineName::Bash | EngineName::Kaish => "sleep 600",
        }
    }

    /// Runs a script to its end and returns its trimmed output.
    pub(crate) async fn sh(&self, script: &str) -> String {
        let code = match self.engine {
            EngineName::Bash => script.to_owned(),
            EngineName::Python => format!(
                "import subprocess; print(subprocess.run(['sh', '-c', {script:?}], check=True, text=True, stdout=subprocess.PIPE).stdout)"
            ),
            EngineName::Node | EngineName::Kaish => panic!("no engine of a table"),
        };
        crate::support::out(self.kernel, &code).await
    }
}

async fn bash(client: &HostClient, name: &str) -> KernelClient {
    crate::support::kernel(client, name, EngineName::Bash).await
}

/// Number of processes of this host with exactly this command line. Inside, processes do not see each other.
fn count(command: &str) -> usize {
    let entries = std::fs::read_dir("/proc").expect("listed").flatten();
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| String::from_utf8_lossy(line).trim_end_matches('\0').replace('\0', " ") == command).count()
}
