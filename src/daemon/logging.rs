//! The log on standard error: text for people, or one JSON object per line.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::{Config, LogFormat};

/// Configures the process's log. `RYOKAN_LOG` overrides the configured level.
pub(super) fn start(config: &Config) -> anyhow::Result<()> {
    let level = std::env::var("RYOKAN_LOG").unwrap_or_else(|_| config.daemon.log_filter());
    let filter = EnvFilter::try_new(&level).map_err(|error| anyhow::anyhow!("log level {level:?}: {error}"))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // Reporting a failed write on stderr would panic once stderr is closed.
    let builder = builder.log_internal_errors(false);
    let set = match config.daemon.log_format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    set.map_err(|error| anyhow::anyhow!("the log could not be set up: {error}"))
}
