//! The system's `ssh` as a transport: arguments without a shell on this side, and clear errors.
//!
//! It never asks: the daemon has no terminal. The command at the far end is that of the configuration, not the client's.

use std::fmt;

use tokio::process::Command;

use super::child::Ended;
use crate::core::error::{Error, Result};
use crate::core::limits;

/// Seconds in which a connection must be made; less than the time for a greeting.
const CONNECT_SECONDS: u32 = 20;
/// Options that precede those of the user's ssh_config.
const OPTIONS: [&str; 6] = [
    "BatchMode=yes",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "RemoteCommand=none",
    // A dead network is noticed after a minute.
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
];

/// How `ssh://` connects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The program and its first arguments.
    pub ssh: Vec<String>,
    /// The command at the far end, for the shell there.
    pub command: String,
}

/// A host in the notation `[user@]host[:port][/socket]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    user: Option<String>,
    host: String,
    port: Option<u16>,
    /// The absolute path of the daemon's socket there; `None`: that of the command.
    socket: Option<String>,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(user) = &self.user {
            write!(f, "{user}@")?;
        }
        f.write_str(&self.host)
    }
}

/// A name that is no option, and nothing that ssh or a `ProxyCommand` could expand.
fn is_name(name: &str, more: &[char]) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c) || more.contains(&c);
    !name.is_empty() && !name.starts_with('-') && name.chars().all(is_plain)
}

/// An absolute path that the shell at the far end reads as one word, whatever its rules are.
fn is_socket(path: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let is_part = |part: &str| !part.is_empty() && part != "." && part != ".." && part.chars().all(is_plain);
    path.len() <= limits::SOCKET_PATH_BYTES && path.strip_prefix('/').is_some_and(|parts| parts.split('/').all(is_part))
}

impl Address {
    /// Parses what follows `ssh:`.
    pub(super) fn parse(text: &str) -> Result<Address> {
        let wrong = |what: &str| {
            Err(Error::invalid(format!("'ssh:{text}': {what}")).hint("write ssh://[USER@]HOST[:PORT][/SOCKET]"))
        };
        let Some(place) = text.strip_prefix("//") else { return wrong("it names no host") };
        let (place, socket) = match place.find('/') {
            Some(at) if at + 1 < place.len() => (&place[..at], Some(&place[at..])),
            Some(at) => (&place[..at], None),
            None => (place, None),
        };
        if socket.is_some_and(|path| !is_socket(path)) {
            return wrong("this is no path of a socket: letters, digits, '-', '.', '_' and single '/' only");
        }
        let (user, place) = match place.rsplit_once('@') {
            Some((user, place)) => (Some(user), place),
            None => (None, place),
        };
        if user.is_some_and(|user| !is_name(user, &[])) {
            return wrong("this is no user's name; passwords are not taken");
        }
        let (host, port) = match place.strip_prefix('[').and_then(|place| place.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, port)) => (host, port.strip_prefix(':').or(Some(""))),
            None => place.split_once(':').map_or((place, None), |(host, port)| (host, Some(port))),
        };
        let more: &[char] = if place.starts_with('[') { &[':', '%'] } else { &[] };
        if !is_name(host, more) {
            return wrong("this is no host's name");
        }
        let port = match port.map(|port| port.parse::<u16>()) {
            None => None,
            Some(Ok(port @ 1..)) => Some(port),
            Some(_) => return wrong("this is no port"),
        };
        let (user, socket) = (user.map(str::to_owned), socket.map(str::to_owned));
        Ok(Address { user, host: host.to_owned(), port, socket })
    }

    /// The program that connects.
    pub(super) fn command(&self, settings: &Settings) -> Result<Command> {
        let (program, first) =
            settings.ssh.split_first().ok_or_else(|| Error::internal("the configuration names no ssh"))?;
        let mut command = Command::new(program);
        command.args(first).args(["-T", "-o", &format!("ConnectTimeout={CONNECT_SECONDS}")]);
        for option in OPTIONS {
            command.args(["-o", option]);
        }
        if let Some(user) = &self.user {
            command.args(["-l", user]);
        }
        if let Some(port) = self.port {
            command.args(["-p", &port.to_string()]);
        }
        command.args(["--", &self.host, &self.far_command(settings)]);
        Ok(command)
    }

    /// The command at the far end, with the socket.
    fn far_command(&self, settings: &Settings) -> String {
        match &self.socket {
            Some(socket) => format!("{} --socket {socket}", settings.command),
            None => settings.command.clone(),
        }
    }

    /// The error for an ssh that cannot be started.
    pub(super) fn not_started(settings: &Settings, error: &std::io::Error) -> Error {
        let program = settings.ssh.first().map_or("ssh", String::as_str);
        match error.kind() {
            std::io::ErrorKind::NotFound => Error::unsupported(format!("the program {program} is not on this host"))
                .reason("ssh_missing")
                .hint("install it (Debian: apt install openssh-client), or name it in [teleport] ssh"),
            _ => Error::unavailable(format!("{program} cannot be started: {error}")).reason("ssh_missing"),
        }
    }

    /// Explains why there is no connection.
    pub(super) fn explain(&self, settings: &Settings, error: Error, ended: &Ended) -> Error {
        let Ended { code, said } = ended;
        let try_it = format!("ssh {self} true");
        match code {
            Some(255) if said.contains("Host key verification failed") => {
                Error::refused(format!("ssh does not trust the host key of {self}: {said}"))
                    .reason("ssh_host_key")
                    .hint(format!("as the daemon's user, run `{try_it}` once and compare the fingerprint"))
            }
            Some(255) if said.contains("Permission denied") || said.contains("Too many authentication failures") => {
                Error::refused(format!("{self} refuses the daemon's ssh keys: {said}"))
                    .reason("ssh_auth")
                    .hint(format!("`{try_it}` must succeed without a question, with the daemon's user and environment"))
            }
            Some(255) => Error::unavailable(format!("ssh cannot connect to {self}: {said}"))
                .reason("connection")
                .hint(format!("try `{try_it}`")),
            Some(126 | 127) => {
                Error::unavailable(format!("{self} cannot run `{}`: {said}", self.far_command(settings)))
                    .reason("far_command")
                    .hint("install ryokan there, or set [teleport] command to its path on that host")
            }
            _ if said.is_empty() => error,
            _ => Error { message: format!("{}; {self} reports: {said}", error.message), ..error },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorCode;

    fn settings() -> Settings {
        Settings { ssh: vec!["ssh".into(), "-v".into()], command: "ryokan pipe".into() }
    }

    fn arguments(text: &str) -> Vec<String> {
        let command = Address::parse(text).expect("an address").command(&settings()).expect("a command");
        command.as_std().get_args().map(|arg| arg.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn addresses_become_arguments() {
        let end = |text: &str| {
            let all = arguments(text);
            let last = all.iter().rposition(|arg| arg == "ServerAliveCountMax=4").expect("the last option");
            all[last + 1..].join(" ")
        };
        assert_eq!(end("//host"), "-- host ryokan pipe");
        assert_eq!(end("//me@host.example:2222/"), "-l me -p 2222 -- host.example ryokan pipe");
        assert_eq!(end("//[fe80::1%eth0]:22"), "-p 22 -- fe80::1%eth0 ryokan pipe");
        assert_eq!(end("//[::1]"), "-- ::1 ryokan pipe");
        let socket = "/run/user/1000/ryokan/ryokan.sock";
        assert_eq!(end(&format!("//me@host:22{socket}")), format!("-l me -p 22 -- host ryokan pipe --socket {socket}"));
        assert_eq!(end("//[::1]/a-b/c_d.e"), "-- ::1 ryokan pipe --socket /a-b/c_d.e");
        assert!(arguments("//host").contains(&"BatchMode=yes".into()), "it never asks");
    }

    #[test]
    fn options_as_addresses_are_refused() {
        for text in [
            "",
            "//",
            "host",
            "//-oProxyCommand=x",
            "//me@-oProxyCommand=x",
            "//-lroot@host",
            "//me:secret@host",
            "//host:0",
            "//host:",
            "//host:70000",
            "//host:22x",
            "//[::1",
            "//[::1]22",
            "//ho st",
            "//$(id)",
            "//host;id",
            "//host?x=1",
            "//[-x]",
            "//@host",
            "//h\nost",
            "//::1",
            "//host//socket",
            "//host/socket/",
            "//host/../socket",
            "//host/a/./socket",
            "//host/a b",
            "//host/a;id",
            "//host/$HOME/s",
            "//host/`id`",
            "//host/a\nid",
            "//host/a'b",
            "//host/~root/s",
            "//host/a%20b",
            "//host/s?x=1",
            &format!("//host/{}", "a".repeat(limits::SOCKET_PATH_BYTES)),
        ] {
            let refused = Address::parse(text).expect_err(text);
            assert_eq!(refused.code, ErrorCode::InvalidArgument, "{text:?}");
        }
    }

    #[test]
    fn failures_are_explained() {
        let address = Address::parse("//me@host").expect("an address");
        let lost = Error::unavailable("it was closed").reason("connection");
        for (code, said, reason) in [
            (Some(255), "Host key verification failed.", "ssh_host_key"),
            (Some(255), "me@host: Permission denied (publickey).", "ssh_auth"),
            (Some(255), "connect to host h port 22: Connection refused", "connection"),
            (Some(127), "sh: 1: ryokan: not found", "far_command"),
            (Some(69), "no daemon answers", "connection"),
            (None, "", "connection"),
        ] {
            let ended = Ended { code, said: said.into() };
            let error = address.explain(&settings(), lost.clone(), &ended);
            assert_eq!(error.reason, reason, "{said}");
            assert!(error.message.contains(said), "{error:?}");
        }
    }
}
