//! `[mcp.servers.NAME]`: from the file to [`ServerEntry`] and back.

use std::collections::BTreeMap;
use std::time::Duration;

use super::check::{Faults, check_command};
use super::problem::Fault;
use super::raw::{RawMcp, RawServer};
use super::values::Span;
use crate::core::info::McpTransport;
use crate::core::limits;
use crate::core::pattern::Pattern;
use crate::mcp::allow::{ServerEntry, check_server_name, references};

/// Entries of the allow-list.
const SERVERS: usize = 256;
/// Longest time that a call may take.
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

/// Checks every entry; a wrong one is reported and left out.
pub(super) fn check(raw: &RawMcp, faults: &mut Faults) -> Vec<ServerEntry> {
    if raw.servers.len() > SERVERS {
        faults.add(Fault::new(&["mcp", "servers"], format!("more than {SERVERS} servers")));
    }
    let entries = raw.servers.iter().filter_map(|(name, server)| match entry(name, server) {
        Ok(entry) => Some(entry),
        Err(wrong) => {
            for (key, what) in wrong {
                let path = ["mcp", "servers", name.as_str(), key];
                // A fault without a key of its own concerns the whole entry.
                faults.add(Fault::new(if key.is_empty() { &path[..3] } else { &path }, what));
            }
            None
        }
    });
    entries.collect()
}

type Wrong = Vec<(&'static str, String)>;

fn entry(name: &str, raw: &RawServer) -> Result<ServerEntry, Wrong> {
    let mut wrong = Wrong::new();
    if let Err(why) = check_server_name(name) {
        wrong.push(("", why));
    }
    let transport = transport(raw, &mut wrong);
    if raw.timeout.0.is_zero() || raw.timeout.0 > LONGEST_CALL {
        wrong.push(("timeout", format!("a call's time is above zero and at most {}", Span(LONGEST_CALL))));
    }
    if !(1..=10_000).contains(&raw.max_instances) {
        wrong.push(("max_instances", format!("{} is out of range: possible: 1 to 10000", raw.max_instances)));
    }
    if raw.kernels.is_empty() {
        wrong.push(("kernels", "no kernel may use it: give names or patterns such as \"*\"".into()));
    }
    for variable in raw.pass_env.iter().filter(|variable| !is_variable(variable)) {
        wrong.push(("pass_env", format!("{variable:?} cannot be the name of an environment variable")));
    }
    if !wrong.is_empty() {
        return Err(wrong);
    }
    Ok(ServerEntry {
        name: name.to_owned(),
        transport: transport.ok_or(wrong)?,
        pass_env: raw.pass_env.clone(),
        kernels: raw.kernels.iter().map(Pattern::new).collect(),
        timeout: raw.timeout.0,
        max_instances: raw.max_instances,
    })
}

fn transport(raw: &RawServer, wrong: &mut Wrong) -> Option<McpTransport> {
    match (&raw.command, &raw.url) {
        (Some(_), Some(_)) => wrong.push(("url", "a server has either `command` or `url`, not both".into())),
        (None, None) => wrong.push(("", "a server needs either `command` or `url`".into())),
        (Some(command), None) => {
            if raw.headers.is_some() {
                wrong.push(("headers", "headers belong to `url`; for a command use `env`".into()));
            }
            return stdio(command, raw, wrong);
        }
        (None, Some(url)) => {
            for (key, given) in [("args", raw.args.is_some()), ("env", raw.env.is_some())] {
                if given {
                    wrong.push((key, format!("{key} belongs to `command`, this server has `url`")));
                }
            }
            return http(url, raw, wrong);
        }
    }
    None
}

fn stdio(command: &str, raw: &RawServer, wrong: &mut Wrong) -> Option<McpTransport> {
    if let Err(why) = check_command(command) {
        wrong.push(("command", why));
    }
    let args = raw.args.clone().unwrap_or_default();
    if args.iter().map(|arg| arg.len() + 1).sum::<usize>() > limits::ENV_BYTES || args.iter().any(|a| a.contains('\0'))
    {
        wrong.push(("args", format!("arguments have at most {} bytes and no NUL", limits::ENV_BYTES)));
    }
    let env = pairs(raw.env.as_ref());
    for (variable, value) in &env {
        if !is_variable(variable) || value.contains('\0') {
            wrong.push(("env", format!("{variable:?} cannot be an environment variable with that value")));
        }
        check_references(value, "env", raw, wrong);
    }
    if env.iter().map(|(k, v)| k.len() + v.len() + 2).sum::<usize>() > limits::ENV_BYTES {
        wrong.push(("env", format!("larger than {} bytes", limits::ENV_BYTES)));
    }
    Some(McpTransport::Stdio { command: command.to_owned(), args, env })
}

fn http(url: &str, raw: &RawServer, wrong: &mut Wrong) -> Option<McpTransport> {
    if let Err(why) = check_url(url) {
        wrong.push(("url", why.into()));
    }
    let headers = pairs(raw.headers.as_ref());
    for (header, value) in &headers {
        let token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
        if header.is_empty() || !header.chars().all(token) || !value.chars().all(|c| (' '..='~').contains(&c)) {
            wrong.push(("headers", format!("{header:?} cannot be a header with that value")));
        }
        if RESERVED_HEADERS.iter().any(|reserved| header.eq_ignore_ascii_case(reserved)) {
            wrong.push(("headers", format!("{header:?} is set by the protocol itself")));
        }
        check_references(value, "headers", raw, wrong);
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

fn check_references(value: &str, key: &'static str, raw: &RawServer, wrong: &mut Wrong) {
    for variable in references(value).filter(|variable| !raw.pass_env.iter().any(|passed| passed == variable)) {
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

/// The entry as the file would have it.
pub(super) fn to_raw(entry: &ServerEntry) -> RawServer {
    let map = |pairs: &[(String, String)]| (!pairs.is_empty()).then(|| pairs.iter().cloned().collect());
    let common = RawServer {
        pass_env: entry.pass_env.clone(),
        kernels: entry.kernels.iter().map(ToString::to_string).collect(),
        timeout: Span(entry.timeout),
        max_instances: entry.max_instances,
        ..RawServer::default()
    };
    match &entry.transport {
        McpTransport::Stdio { command, args, env } => {
            let args = (!args.is_empty()).then(|| args.clone());
            RawServer { command: Some(command.clone()), args, env: map(env), ..common }
        }
        McpTransport::Http { url, headers } => RawServer { url: Some(url.clone()), headers: map(headers), ..common },
    }
}
