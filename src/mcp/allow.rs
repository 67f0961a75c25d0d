//! The MCP servers that kernels may use: the configuration's `[mcp.servers.NAME]`.
//!
//! A client's request only *selects* an entry; the entry itself is what runs. A request with an
//! argument, variable or header that its entry lacks is refused, so none can be smuggled in.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::core::error::{Error, Result};
use crate::core::info::McpTransport;
use crate::core::limits;
use crate::core::pattern::Pattern;

/// Longest name of a server, bytes: with `__` and a tool's name it must fit [`limits::IDENTIFIER_BYTES`].
pub const NAME_BYTES: usize = 64;
/// Default limit of a server's instances over all kernels.
pub const DEFAULT_INSTANCES: u32 = 64;
/// Separator between a server's name and its tool's.
pub const SEPARATOR: &str = "__";
/// The reason of every refusal in this module.
pub const REASON: &str = "mcp_allow_list";

/// An allowed server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerEntry {
    /// Its name in the configuration.
    pub name: String,
    /// The transport. Values of `env` and `headers` may refer to `${VAR}`.
    pub transport: McpTransport,
    /// Variables of the daemon's environment that `${VAR}` may name.
    pub pass_env: Vec<String>,
    /// Name patterns of the kernels that may use the server.
    pub kernels: Vec<Pattern>,
    /// Time limit of a call.
    pub timeout: Duration,
    /// Limit of simultaneous instances over all kernels.
    pub max_instances: u32,
}

/// A server's name: `A-Z a-z 0-9 - _`, no `__` and no `_` at the end, so that `server__tool` splits in one way only.
///
/// # Errors
/// What is wrong with the name.
pub fn check_server_name(name: &str) -> std::result::Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if name.is_empty() || name.len() > NAME_BYTES || !name.chars().all(plain) {
        return Err(format!("a server's name has 1 to {NAME_BYTES} letters, digits, '-' and '_'"));
    }
    if name.contains(SEPARATOR) || name.ends_with('_') {
        return Err(
            "a server's name has no \"__\" and no '_' at its end: they separate it from its tools' names".into()
        );
    }
    Ok(())
}

/// The allowed servers, with the number of running instances.
#[derive(Debug)]
pub struct AllowList {
    file: PathBuf,
    entries: BTreeMap<String, (Arc<ServerEntry>, Arc<Semaphore>)>,
}

/// Permission to run one instance of a server; released when dropped.
#[derive(Debug)]
pub struct Admission {
    /// The entry to run.
    pub entry: Arc<ServerEntry>,
    _instance: OwnedSemaphorePermit,
}

impl AllowList {
    /// Creates the allow-list of these entries; hints refer to `file`.
    pub fn new(entries: impl IntoIterator<Item = ServerEntry>, file: PathBuf) -> Self {
        let entries = entries.into_iter().map(|entry| {
            let instances = Arc::new(Semaphore::new(entry.max_instances as usize));
            (entry.name.clone(), (Arc::new(entry), instances))
        });
        Self { file, entries: entries.collect() }
    }

    /// The entries, by name.
    pub fn entries(&self) -> impl Iterator<Item = &ServerEntry> {
        self.entries.values().map(|(entry, _)| &**entry)
    }

    /// Finds the entry that `transport` selects for this kernel. A stdio transport without a
    /// command selects the entry called `name`. Of several matches the one called `name` is
    /// preferred, then the first by name.
    ///
    /// # Errors
    /// `invalidArgument` for an invalid name, `refused` with the reason [`REASON`] without a match,
    /// `busy` at the entry's instance limit.
    pub fn admit(&self, kernel: &str, name: &str, transport: &McpTransport) -> Result<Admission> {
        check_server_name(name).map_err(Error::invalid)?;
        let fits: Vec<_> = self.entries.values().filter(|(entry, _)| selects(transport, name, entry)).collect();
        let admitted = fits.iter().filter(|(entry, _)| entry.kernels.iter().any(|pattern| pattern.matches(kernel)));
        let Some((entry, instances)) = admitted.min_by_key(|(entry, _)| entry.name != name) else {
            return Err(self.refusal(kernel, name, transport, fits.first().map(|(entry, _)| &**entry)));
        };
        let instance = Arc::clone(instances).try_acquire_owned().map_err(|_| {
            Error::busy(format!("MCP server {:?} already has {} instances", entry.name, entry.max_instances))
                .hint(format!("raise max_instances of [mcp.servers.{}] in {}", entry.name, self.file.display()))
        })?;
        Ok(Admission { entry: Arc::clone(entry), _instance: instance })
    }

    fn refusal(&self, kernel: &str, name: &str, asked: &McpTransport, near: Option<&ServerEntry>) -> Error {
        let file = self.file.display();
        if let Some(entry) = near {
            return Error::refused(format!("MCP server {:?} is not for kernel {kernel:?}", entry.name))
                .reason(REASON)
                .hint(format!("add the kernel's name to `kernels` of [mcp.servers.{}] in {file}", entry.name));
        }
        let (what, keys) = match asked {
            McpTransport::Stdio { command, .. } if command.is_empty() => ("of that name", "`command` or `url`"),
            McpTransport::Stdio { .. } => ("with exactly this command, arguments and environment", "`command`, `args`"),
            McpTransport::Http { .. } => ("with exactly this URL and these headers", "`url`"),
        };
        Error::refused(format!("MCP server {name:?} is not allowed: there is no entry {what}"))
            .reason(REASON)
            .hint(format!("add [mcp.servers.{name}] with {keys} to {file} and restart the daemon"))
    }
}

fn selects(asked: &McpTransport, name: &str, entry: &ServerEntry) -> bool {
    let within = |asked: &[(String, String)], allowed: &[(String, String)], same: fn(&str, &str) -> bool| {
        asked.iter().all(|(k, v)| allowed.iter().any(|(allowed, value)| same(k, allowed) && v == value))
    };
    match (asked, &entry.transport) {
        (McpTransport::Stdio { command, args, env }, _) if command.is_empty() => {
            args.is_empty() && env.is_empty() && entry.name == name
        }
        (
            McpTransport::Stdio { command, args, env },
            McpTransport::Stdio { command: allowed, args: allowed_args, env: allowed_env },
        ) => command == allowed && args == allowed_args && within(env, allowed_env, |a, b| a == b),
        (McpTransport::Http { url, headers }, McpTransport::Http { url: allowed, headers: allowed_headers }) => {
            url == allowed && within(headers, allowed_headers, |a, b| a.eq_ignore_ascii_case(b))
        }
        (McpTransport::Stdio { .. }, McpTransport::Http { .. })
        | (McpTransport::Http { .. }, McpTransport::Stdio { .. }) => false,
    }
}

/// The variables that `text` refers to as `${VAR}`.
pub fn references(text: &str) -> impl Iterator<Item = &str> {
    text.split("${").skip(1).filter_map(|rest| rest.split_once('}')).map(|(name, _)| name)
}

/// Replaces each `${VAR}` by the daemon's value. Done when a server starts, so no secret appears in
/// a displayed configuration or in the catalog.
///
/// # Errors
/// The variable that is unset or missing from `pass_env`.
pub fn expand(
    text: &str,
    pass_env: &[String],
    env: impl Fn(&str) -> Option<String>,
) -> std::result::Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let Some((name, after)) = after.split_once('}') else { break };
        if !pass_env.iter().any(|allowed| allowed == name) {
            return Err(format!("${{{name}}} is not listed in pass_env"));
        }
        out.push_str(before);
        out.push_str(&env(name).ok_or_else(|| format!("the daemon's environment has no variable {name}"))?);
        if out.len() > limits::ENV_BYTES {
            return Err(format!("${{{name}}} is larger than {} bytes", limits::ENV_BYTES));
        }
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorCode;

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn stdio(command: &str, args: &[&str], env: &[(&str, &str)]) -> McpTransport {
        McpTransport::Stdio {
            command: command.into(),
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            env: pairs(env),
        }
    }

    fn http(url: &str, headers: &[(&str, &str)]) -> McpTransport {
        McpTransport::Http { url: url.into(), headers: pairs(headers) }
    }

    fn entry(name: &str, transport: McpTransport, kernels: &[&str]) -> ServerEntry {
        ServerEntry {
            name: name.into(),
            transport,
            pass_env: Vec::new(),
            kernels: kernels.iter().map(|text| Pattern::new(*text)).collect(),
            timeout: limits::MCP_CALL,
            max_instances: 2,
        }
    }

    fn list() -> AllowList {
        let entries = [
            entry("files", stdio("mcp-files", &["--root", "/data"], &[("A", "1"), ("B", "${B}")]), &["*"]),
            entry("private", stdio("mcp-private", &[], &[]), &["amy-*"]),
            entry("web", http("https://example.org/mcp", &[("Authorization", "Bearer ${TOKEN}")]), &["*"]),
        ];
        AllowList::new(entries, "/etc/ryokan/config.toml".into())
    }

    #[test]
    fn admission_needs_exact_match() {
        let list = list();
        for (kernel, name, transport, entry) in [
            ("k", "files", stdio("", &[], &[]), "files"),
            ("k", "mine", stdio("mcp-files", &["--root", "/data"], &[]), "files"),
            ("k", "mine", stdio("mcp-files", &["--root", "/data"], &[("A", "1")]), "files"),
            ("amy-1", "private", stdio("", &[], &[]), "private"),
            ("k", "web", stdio("", &[], &[]), "web"),
            ("k", "w", http("https://example.org/mcp", &[]), "web"),
            ("k", "w", http("https://example.org/mcp", &[("authorization", "Bearer ${TOKEN}")]), "web"),
        ] {
            let admission = list.admit(kernel, name, &transport).expect("allowed");
            assert_eq!(admission.entry.name, entry, "{transport:?}");
        }
        for (kernel, name, transport) in [
            ("k", "other", stdio("", &[], &[])),
            ("k", "files", stdio("", &["--root"], &[])),
            ("k", "files", stdio("", &[], &[("A", "1")])),
            ("k", "files", stdio("/bin/sh", &["-c", "id"], &[])),
            ("k", "files", stdio("mcp-files", &["--root", "/"], &[])),
            ("k", "files", stdio("mcp-files", &["--root", "/data", "--more"], &[])),
            ("k", "files", stdio("mcp-files", &["--root", "/data"], &[("LD_PRELOAD", "/x")])),
            ("k", "files", stdio("mcp-files", &["--root", "/data"], &[("A", "2")])),
            ("k", "private", stdio("", &[], &[])),
            ("k", "web", http("https://example.org/mcp/", &[])),
            ("k", "web", http("https://example.org/mcp", &[("X-Smuggled", "1")])),
            ("k", "web", http("https://example.org/mcp", &[("Authorization", "Bearer mine")])),
        ] {
            let error = list.admit(kernel, name, &transport).expect_err("not allowed");
            assert_eq!((error.code, error.reason.as_str()), (ErrorCode::Refused, REASON), "{transport:?}");
            assert!(error.hint.contains("/etc/ryokan/config.toml") && error.hint.contains("[mcp.servers."));
        }
    }

    #[test]
    fn instances_count_per_host() {
        let list = list();
        let asked = stdio("", &[], &[]);
        let held =
            [list.admit("a", "files", &asked).expect("first"), list.admit("b", "files", &asked).expect("second")];
        assert_eq!(list.admit("c", "files", &asked).expect_err("one too many").code, ErrorCode::Busy);
        drop(held);
        assert!(list.admit("c", "files", &asked).is_ok());
    }

    #[test]
    fn server_names_are_checked() {
        for good in ["a", "my-server", "my_server", "S3"] {
            assert_eq!(check_server_name(good), Ok(()), "{good}");
        }
        for bad in ["", "a__b", "a_", "a b", "a/b", "a.b", "é", "a\n", &"n".repeat(NAME_BYTES + 1)] {
            assert!(check_server_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn only_listed_variables_expand() {
        let env = |name: &str| (name == "TOKEN").then(|| "s3cret ${OTHER}".to_owned());
        let pass = ["TOKEN".to_owned(), "UNSET".to_owned()];
        for (text, want) in [
            ("plain $HOME {x}", Some("plain $HOME {x}")),
            ("Bearer ${TOKEN}!", Some("Bearer s3cret ${OTHER}!")),
            ("open ${TOKEN", Some("open ${TOKEN")),
            ("${UNSET}", None),
            ("${HOME}", None),
            ("${}", None),
        ] {
            assert_eq!(expand(text, &pass, env).ok().as_deref(), want, "{text}");
        }
        assert_eq!(references("${A} $B ${C}${D").collect::<Vec<_>>(), ["A", "C"]);
    }
}
