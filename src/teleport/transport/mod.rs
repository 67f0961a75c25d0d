//! Transports: how the stream to another host is made.

mod child;
mod ssh;

use tokio::process::Command;

pub use self::ssh::{Address, Settings};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::limits;
use crate::teleport::Wire;

/// A named transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transport {
    /// A shell command whose standard streams are the wire; at its far end is `ryokan pipe`.
    Exec(String),
    /// The system's ssh, which runs `ryokan pipe` there.
    Ssh(Address),
}

/// A connection to another host.
pub struct Connection {
    wire: Wire,
    program: Option<(child::Child, Transport, Settings)>,
}

impl Transport {
    /// Parses `ssh://[USER@]HOST[:PORT][/SOCKET]` or `exec:COMMAND`.
    ///
    /// # Errors
    /// `invalidArgument`.
    pub fn parse(text: &str) -> Result<Transport> {
        if text.len() > limits::HANDOVER_TRANSPORT_BYTES || text.contains('\0') {
            return Err(Error::invalid("the transport's name is too long, or contains a NUL"));
        }
        match text.split_once(':') {
            Some(("exec", command)) if !command.trim().is_empty() => Ok(Transport::Exec(command.to_owned())),
            Some(("ssh", place)) => Address::parse(place).map(Transport::Ssh),
            _ => Err(Error::invalid(format!("{text:?} names no transport")).hint(
                "a transport is ssh://[USER@]HOST[:PORT][/SOCKET], or exec:COMMAND whose far end is `ryokan pipe`",
            )),
        }
    }

    /// Connects. The daemon's own user runs the program.
    ///
    /// # Errors
    /// `unavailable` if the program cannot be started, `unsupported` if there is no ssh.
    pub fn connect(&self, settings: &Settings) -> Result<Connection> {
        let command = match self {
            Transport::Exec(command) => {
                let mut shell = Command::new("/bin/sh");
                shell.arg("-c").arg(command);
                shell
            }
            Transport::Ssh(address) => address.command(settings)?,
        };
        let started = child::start(command).map_err(|error| match self {
            Transport::Exec(_) => Error::unavailable(format!("the transport's command cannot be started: {error}")),
            Transport::Ssh(_) => Address::not_started(settings, &error),
        })?;
        let (wire, child) = started?;
        Ok(Connection { wire, program: Some((child, self.clone(), settings.clone())) })
    }
}

/// Whether an error says that the other host cannot be reached, whatever is asked of it.
pub fn is_unreachable(error: &Error) -> bool {
    let is_of_ssh = matches!(error.reason.as_str(), "ssh_host_key" | "ssh_auth" | "ssh_missing");
    is_of_ssh || (error.code == ErrorCode::Unavailable && matches!(error.reason.as_str(), "connection" | "far_command"))
}

impl Connection {
    /// A connection to the other end of a test.
    #[cfg(test)]
    pub(super) fn of(wire: Wire) -> Connection {
        Connection { wire, program: None }
    }

    pub(super) fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }

    /// Adds what the program reports to an error.
    pub(super) async fn explain(self, error: Error) -> Error {
        let Connection { wire, program } = self;
        let Some((child, transport, settings)) = program else { return error };
        // The end of its input ends a program that waits for more.
        drop(wire);
        let ended = child.end().await;
        match transport {
            Transport::Ssh(address) => address.explain(&settings, error, &ended),
            Transport::Exec(_) if ended.said.is_empty() => error,
            Transport::Exec(_) => {
                Error { message: format!("{}; the command reports: {}", error.message, ended.said), ..error }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transport_names_are_checked() {
        let code = |text: &str| Transport::parse(text).map_err(|error| error.code);
        assert_eq!(code("exec:ssh h ryokan pipe"), Ok(Transport::Exec("ssh h ryokan pipe".into())));
        for text in ["", "exec:", "exec:  ", "file:/x", "exec", "exec:a\0b", "ssh:", "ssh://-oProxyCommand=x"] {
            assert_eq!(code(text), Err(ErrorCode::InvalidArgument), "{text:?}");
        }
        assert!(matches!(code("ssh://me@host:22"), Ok(Transport::Ssh(_))));
    }
}
