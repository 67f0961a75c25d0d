//! Log lines on standard error: for people, or one JSON object each.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::{Config, LogFormat};

/// Sets the process's log up. `RYOKAN_LOG` overrides the configured level.
pub(super) fn start(config: &Config) -> anyhow::Result<()> {
    let level = std::env::var("RYOKAN_LOG").unwrap_or_else(|_| config.daemon.log_filter());
    let filter = EnvFilter::try_new(&level).map_err(|error| anyhow::anyhow!("log level {level:?}: {error}"))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // Were a line that cannot be written reported on stderr, a reader of it that left would make the daemon panic.
    let builder = builder.log_internal_errors(false);
    let set = match config.daemon.log_format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    set.map_err(|error| anyhow::anyhow!("the log could not be set up: {error}"))
}
