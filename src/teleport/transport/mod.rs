//! Transports: how the stream to another host is made.

mod exec;

use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::teleport::Wire;

/// A named transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transport {
    /// A shell command whose standard streams are the wire; at its far end is `ryokan pipe`.
    Exec(String),
}

/// A connection to another host.
pub struct Connection {
    wire: Wire,
    child: Option<exec::Child>,
}

impl Transport {
    /// Parses `exec:COMMAND`.
    ///
    /// # Errors
    /// `invalidArgument`; `unsupported` for a transport that this release does not have.
    pub fn parse(text: &str) -> Result<Transport> {
        if text.len() > limits::HANDOVER_TRANSPORT_BYTES || text.contains('\0') {
            return Err(Error::invalid("the transport's name is too long, or contains a NUL"));
        }
        match text.split_once(':') {
            Some(("exec", command)) if !command.trim().is_empty() => Ok(Transport::Exec(command.to_owned())),
            Some(("ssh", rest)) => Err(Error::unsupported("the transport ssh: is not available in this release")
                .reason("transport")
                .hint(format!("use 'exec:ssh {} ryokan pipe'", rest.trim_start_matches('/')))),
            _ => Err(Error::invalid(format!("{text:?} names no transport"))
                .hint("a transport is exec:COMMAND, for example 'exec:ssh host ryokan pipe'")),
        }
    }

    /// Connects. The daemon's own user runs the command.
    ///
    /// # Errors
    /// `unavailable` if the command cannot be started.
    pub fn connect(&self) -> Result<Connection> {
        match self {
            Transport::Exec(command) => {
                let (wire, child) = exec::start(command)?;
                Ok(Connection { wire, child: Some(child) })
            }
        }
    }
}

impl Connection {
    /// A connection to the other end of a test.
    #[cfg(test)]
    pub(super) fn of(wire: Wire) -> Connection {
        Connection { wire, child: None }
    }

    pub(super) fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }

    /// Adds what the command reports to an error.
    pub(super) async fn explain(self, error: Error) -> Error {
        let Some(child) = self.child else { return error };
        let said = child.stderr().await;
        match said.is_empty() {
            true => error,
            false => Error { message: format!("{}; the command reports: {said}", error.message), ..error },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorCode;

    #[test]
    fn transport_names_are_checked() {
        let code = |text: &str| Transport::parse(text).map_err(|error| error.code);
        assert_eq!(code("exec:ssh h ryokan pipe"), Ok(Transport::Exec("ssh h ryokan pipe".into())));
        for text in ["", "exec:", "exec:  ", "file:/x", "exec", "exec:a\0b"] {
            assert_eq!(code(text), Err(ErrorCode::InvalidArgument), "{text:?}");
        }
        assert_eq!(code("ssh://me@host"), Err(ErrorCode::Unsupported));
    }
}
