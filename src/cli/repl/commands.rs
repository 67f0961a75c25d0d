//! The session's own commands.

use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::render;
use crate::core::error::Error;
use crate::rpc::client::KernelClient;

/// The continuation after a command.
pub enum Next {
    /// The next prompt.
    Continue,
    /// The end of the session.
    Exit,
}

const HELP: &str = "\
:help      this list
:vars      the kernel's variables
:mounts    its mounts
:tools     its tools
:jobs      its background jobs
:missed    what its saved state lacks
:info      its details
:restart   restart its worker; state is kept
:quit      exit; the kernel continues
";

/// Executes one of the session's own commands.
pub async fn command(context: &Context, kernel: &KernelClient, words: &str) -> Result<Next, Failure> {
    let paint = context.terminal.paint;
    let text = match words.trim() {
        "help" | "h" | "?" => HELP.to_owned(),
        "vars" => render::vars(&kernel.vars().await?, paint),
        "mounts" => render::mounts(&kernel.mounts().await?, paint),
        "tools" => render::tools(&kernel.tools().await?, paint),
        "jobs" => {
            kernel.jobs().await?.iter().map(|job| render::plain(&format!("{}  {}\n", job.id, job.command))).collect()
        }
        "missed" => {
            let missed = kernel.missed().await?;
            missed.iter().map(|m| render::plain(&format!("{}  {}  {}\n", m.key, m.type_name, m.reason))).collect()
        }
        "info" => {
            let (info, rights) = kernel.info_and_rights().await?;
            render::kernel(&info, rights, render::now_ms(), paint)
        }
        "restart" => {
            kernel.stop(true).await?;
            kernel.start().await?;
            "restarted\n".to_owned()
        }
        "quit" | "q" | "exit" => return Ok(Next::Exit),
        other => {
            return Err(Error::not_found(format!("there is no command :{other}")).hint(":help lists them").into());
        }
    };
    context.print(&text)?;
    Ok(Next::Continue)
}
