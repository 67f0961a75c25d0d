//! `[mcp.servers.NAME]`: the MCP servers that kernels may use.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::check::{Faults, check_command};
use super::problem::Fault;
use super::values::{Span, span};
use crate::core::info::McpTransport;
use crate::core::limits;
use crate::core::pattern::Pattern;
use crate::mcp::allow::{DEFAULT_INSTANCES, ServerEntry, check_server_name, references};

/// Maximum entries of the allow-list.
const SERVERS: usize = 256;
/// Upper bound of a call's time limit.
const LONGEST_CALL: Duration = Duration::from_secs(24 * 3600);
/// Headers that the protocol itself sets.
const RESERVED_HEADERS: &[&str] = &[
    "accept",
    "connection",
    "content-length",
    "content-type",
    "host",
    "last-event-id",
    "mcp-protocol-version",
    "mcp-session-id",
    "transfer-encoding",
];

/// `[mcp]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mcp {
    /// `[mcp.servers.NAME]`, by name.
    pub servers: BTreeMap<String, Server>,
}

impl Mcp {
    /// The entries of the allow-list, by name.
    pub fn entries(&self) -> impl Iterator<Item = ServerEntry> {
        self.servers.iter().map(|(name, server)| entry(name, server).expect("the configuration was checked"))
    }
}

/// A server: either `command` with its keys, or `url` with its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// The program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Its arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub args: Option<Vec<String>>,
    /// The URL of an HTTP server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Variables of the daemon's environment that `${VAR}` may name.
    pub pass_env: Vec<String>,
    /// Patterns of the names of the kernels that may use it.
    pub kernels: Vec<String>,
    /// Time limit of a call.
    #[serde(with = "span")]
    pub timeout: Duration,
    /// Maximum instances at once, over all kernels.
    pub max_instances: u32,
    // Tables come after plain keys, as TOML requires.
    /// The program's environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// Headers of every request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, String>>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            command: None,
            args: None,
            url: None,
            pass_env: Vec::new(),
            kernels: vec!["*".into()],
            timeout: limits::MCP_CALL,
            max_instances: DEFAULT_INSTANCES,
            env: None,
            headers: None,
        }
    }
}

/// Checks every entry.
pub(super) fn check(mcp: &Mcp, faults: &mut Faults) {
    if mcp.servers.len() > SERVERS {
        faults.add(Fault::new(&["mcp", "servers"], format!("more than {SERVERS} servers")));
    }
    for (name, server) in &mcp.servers {
        for (key, what) in entry(name, server).err().into_iter().flatten() {
            let path = ["mcp", "servers", name.as_str(), key];
            // A fault without a key concerns the whole entry.
            faults.add(Fault::new(if key.is_empty() { &path[..3] } else { &path }, what));
        }
    }
}

type Wrong = Vec<(&'static str, String)>;

fn entry(name: &str, server: &Server) -> Result<ServerEntry, Wrong> {
    let mut wrong = Wrong::new();
    if let Err(why) = check_server_name(name) {
        wrong.push(("", why));
    }
    let transport = transport(server, &mut wrong);
    if server.timeout.is_zero() || server.timeout > LONGEST_CALL {
        wrong.push(("timeout", format!("a call's time is above zero and at most {}", Span(LONGEST_CALL))));
    }
    if !(1..=10_000).contains(&server.max_instances) {
        wrong.push(("max_instances", format!("{} is out of range: possible: 1 to 10000", server.max_instances)));
    }
    if server.kernels.is_empty() {
        wrong.push(("kernels", "no kernel may use it: give names or patterns such as \"*\"".into()));
    }
    for variable in server.pass_env.iter().filter(|variable| !is_variable(variable)) {
        wrong.push(("pass_env", format!("{variable:?} cannot be the name of an environment variable")));
    }
    if !wrong.is_empty() {
        return Err(wrong);
    }
    Ok(ServerEntry {
        name: name.to_owned(),
        transport: transport.ok_or(wrong)?,
        pass_env: server.pass_env.clone(),
        kernels: server.kernels.iter().map(Pattern::new).collect(),
        timeout: server.timeout,
        max_instances: server.max_instances,
    })
}

fn transport(server: &Server, wrong: &mut Wrong) -> Option<McpTransport> {
    match (&server.command, &server.url) {
        (Some(_), Some(_)) => wrong.push(("url", "a server has either `command` or `url`, not both".into())),
        (None, None) => wrong.push(("", "a server needs either `command` or `url`".into())),
        (Some(command), None) => {
            if server.headers.is_some() {
                wrong.push(("headers", "headers belong to `url`; for a command use `env`".into()));
            }
            return stdio(command, server, wrong);
        }
        (None, Some(url)) => {
            for (key, given) in [("args", server.args.is_some()), ("env", server.env.is_some())] {
                if given {
                    wrong.push((key, format!("{key} belongs to `command`, this server has `url`")));
                }
            }
            return http(url, server, wrong);
        }
    }
    None
}

fn stdio(command: &str, server: &Server, wrong: &mut Wrong) -> Option<McpTransport> {
    if let Err(why) = check_command(Path::new(command)) {
        wrong.push(("command", why));
    }
    let args = server.args.clone().unwrap_or_default();
    if args.iter().map(|arg| arg.len() + 1).sum::<usize>() > limits::ENV_BYTES || args.iter().any(|a| a.contains('\0'))
    {
        wrong.push(("args", format!("arguments have at most {} bytes and no NUL", limits::ENV_BYTES)));
    }
    let env = pairs(server.env.as_ref());
    for (variable, value) in &env {
        if !is_variable(variable) || value.contains('\0') {
            wrong.push(("env", format!("{variable:?} cannot be an environment variable with that value")));
        }
        check_references(value, "env", server, wrong);
    }
    if env.iter().map(|(k, v)| k.len() + v.len() + 2).sum::<usize>() > limits::ENV_BYTES {
        wrong.push(("env", format!("larger than {} bytes", limits::ENV_BYTES)));
    }
    Some(McpTransport::Stdio { command: command.to_owned(), args, env })
}

fn http(url: &str, server: &Server, wrong: &mut Wrong) -> Option<McpTransport> {
    if let Err(why) = check_url(url) {
        wrong.push(("url", why.into()));
    }
    let headers = pairs(server.headers.as_ref());
    for (header, value) in &headers {
        let token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
        if header.is_empty() || !header.chars().all(token) || !value.chars().all(|c| (' '..='~').contains(&c)) {
            wrong.push(("headers", format!("{header:?} cannot be a header with that value")));
        }
        if RESERVED_HEADERS.iter().any(|reserved| header.eq_ignore_ascii_case(reserved)) {
            wrong.push(("headers", format!("{header:?} is set by the protocol itself")));
        }
        check_references(value, "headers", server, wrong);
    }
    Some(McpTransport::Http { url: url.to_owned(), headers })
}

fn check_url(url: &str) -> Result<(), &'static str> {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let Some(rest) = rest else { return Err("a URL starts with http:// or https://") };
    if url.len() > limits::PATH_BYTES || !url.chars().all(|c| c.is_ascii_graphic()) || url.contains('#') {
        return Err("a URL is printable ASCII without spaces and '#'");
    }
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    if authority.contains('@') {
        return Err("a URL has no user or password: use `headers` with ${VAR}");
    }
    if authority.is_empty() || authority.starts_with(':') { Err("a URL names a host") } else { Ok(()) }
}

fn check_references(value: &str, key: &'static str, server: &Server, wrong: &mut Wrong) {
    for variable in references(value).filter(|variable| !server.pass_env.iter().any(|passed| passed == variable)) {
        wrong.push((key, format!("${{{variable}}} must be listed in pass_env")));
    }
}

fn is_variable(name: &str) -> bool {
    let rest = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty()
        && name.len() <= limits::IDENTIFIER_BYTES
        && name.chars().all(rest)
        && !name.as_bytes()[0].is_ascii_digit()
}

fn pairs(map: Option<&BTreeMap<String, String>>) -> Vec<(String, String)> {
    map.into_iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect()
}
