//! Lists: a kernel's contents, and the host's abilities.

use super::{Table, first_line, time};
use crate::cli::paint::Paint;
use crate::core::exec::Program;
use crate::core::info::{Ability, McpInfo, MountInfo, ProcessInfo, ToolInfo, VarInfo};

/// Columns left for a description on a usual terminal.
const DESCRIPTION: usize = 60;

/// Variables.
pub fn vars(vars: &[VarInfo], paint: Paint) -> String {
    let mut table = Table::new(&["NAME", "TYPE", "VALUE"]);
    for var in vars {
        table.row(&[var.name.as_str(), &var.type_name, &first_line(&var.summary, DESCRIPTION)]);
    }
    table.text("no variables", paint)
}

/// Mounts.
pub fn mounts(mounts: &[MountInfo], paint: Paint) -> String {
    let mut table = Table::new(&["PATH", "MODE", "SOURCE"]);
    for mount in mounts {
        table.row(&[mount.path.as_str(), if mount.writable { "rw" } else { "ro" }, &mount.source]);
    }
    table.text("no mounts", paint)
}

/// Processes beside the engine.
pub fn processes(processes: &[ProcessInfo], now_ms: i64, paint: Paint) -> String {
    let mut table = Table::new(&["PROCESS", "SINCE", "MODE", "COMMAND"]);
    for process in processes {
        let mode = if process.detached { "detached" } else { "foreground" };
        let command = first_line(&command_line(process), DESCRIPTION);
        table.row(&[&process.exec.to_string(), &time::ago(process.started_at_ms, now_ms), mode, &command]);
    }
    table.text("no processes", paint)
}

/// One process, in a sentence.
pub fn process(process: &ProcessInfo) -> String {
    format!("process {} ({})", process.exec, first_line(&command_line(process), DESCRIPTION))
}

fn command_line(process: &ProcessInfo) -> String {
    Program { argv: process.argv.clone(), ..Program::default() }.command_line()
}

/// Tools.
pub fn tools(tools: &[ToolInfo], paint: Paint) -> String {
    let mut table = Table::new(&["NAME", "SOURCE", "DESCRIPTION"]);
    for tool in tools {
        table.row(&[tool.name.as_str(), &tool.source, &first_line(&tool.description, DESCRIPTION)]);
    }
    table.text("no tools", paint)
}

/// MCP servers.
pub fn mcp_servers(servers: &[McpInfo], paint: Paint) -> String {
    let mut table = Table::new(&["NAME", "STATE", "TOOLS", "ERROR"]);
    for server in servers {
        table.row(&[server.name.as_str(), &server.state, &server.tools.to_string(), &server.error]);
        match server.state.as_str() {
            "ready" => table.paint(1, Paint::good),
            "failed" => table.paint(1, Paint::bad),
            _ => {}
        }
    }
    table.text("no MCP servers", paint)
}

/// The host's abilities, with hints for missing ones.
pub fn abilities(abilities: &[Ability], paint: Paint) -> String {
    let mut table = Table::new(&["ABILITY", "", "FOUND"]);
    for ability in abilities {
        let (word, painter): (_, fn(Paint, &str) -> String) = match (ability.present, ability.required) {
            (true, _) => ("yes", Paint::good),
            (false, true) => ("MISSING", Paint::bad),
            (false, false) => ("no", Paint::warn),
        };
        table.row(&[ability.name.as_str(), word, &ability.detail]);
        table.paint(1, painter);
    }
    let mut text = table.text("the daemon named no abilities", paint);
    let missing = |ability: &&Ability| !ability.present && !ability.hint.is_empty();
    for (i, ability) in abilities.iter().filter(missing).enumerate() {
        let gap = if i == 0 { "\n" } else { "" };
        let need = if ability.required { " (kernels cannot run without it)" } else { "" };
        let hint = super::plain(&ability.hint);
        text.push_str(&format!("{gap}{} {}{need}: {hint}\n", paint.note("hint:"), super::plain(&ability.name)));
    }
    text
}
