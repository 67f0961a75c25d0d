//! Calls by name: a function, a builtin or a program with literal words, or a tool of an MCP server.

use std::io::Write as _;
use std::path::Path;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value as Json, json};

use super::complete::BUILTINS;
use super::entries::{self, found_in_path, one_line, scalar};
use super::execute::{self, Execution, Outcome};
use super::link::{Link, Stop, WAITING};
use super::quote::quote;
use super::session::Session;
use super::{toolcalls, values};
use crate::core::value::Value;
use crate::link::frames::{EndStatus, Event, Request};

/// Result of a call.
pub struct Called {
    /// The result of an execution.
    pub outcome: Outcome,
    /// A tool's answer.
    pub value: Option<Value>,
    /// Serving must end.
    pub stop: Option<Stop>,
}

/// Exit status of a missing command.
const NOT_FOUND: i32 = 127;

/// Performs the call.
///
/// # Errors
/// If serving must end.
pub fn run(
    session: &mut Session,
    link: &mut Link,
    name: &str,
    args: &Json,
    execution: Execution<'_>,
) -> Result<Called, Stop> {
    let refused = |code, err: String| Ok(Called { outcome: Outcome::refused(code, err), value: None, stop: None });
    let args = match Value::from_json(args) {
        Ok(args) => args,
        Err(error) => return refused(2, error.to_string()),
    };
    if !session.functions.contains_key(name.as_bytes()) && session.tools.iter().any(|tool| tool.name == name) {
        return tool(session, link, name, &args, execution.exec);
    }
    if !is_command(session, name) {
        let shown = one_line(name.as_bytes());
        return refused(NOT_FOUND, format!("there is no function, builtin or program {shown:?} to call"));
    }
    let words = match values::words(&args) {
        Ok(words) => words,
        Err(message) => return refused(2, message),
    };
    // Quoted, so neither an alias nor a keyword.
    let mut code = Vec::new();
    quote(name.as_bytes(), &mut code);
    for word in &words {
        code.push(b' ');
        quote(word, &mut code);
    }
    let code = String::from_utf8_lossy(&code).into_owned();
    let (outcome, stop) = execute::run(session, link, &code, execution)?;
    Ok(Called { outcome, value: None, stop })
}

fn is_command(session: &Session, name: &str) -> bool {
    let path = session.snapshot.variables.get("PATH").and_then(|path| scalar(&path.content)).unwrap_or_default();
    if name.contains('/') {
        let cwd = String::from_utf8_lossy(&session.snapshot.cwd).into_owned();
        return Path::new(&cwd).join(name).is_file();
    }
    session.functions.contains_key(name.as_bytes())
        || BUILTINS.contains(&name)
        || !name.is_empty() && !name.contains('\0') && found_in_path(name.as_bytes(), path).is_some()
}

/// Forwards a call to the tool and its answer to standard output.
fn tool(session: &mut Session, link: &mut Link, name: &str, args: &Value, exec: u64) -> Result<Called, Stop> {
    let (Value::Object(_) | Value::Null) = args else {
        let outcome = Outcome::refused(2, "a tool of an MCP server takes named arguments");
        return Ok(Called { outcome, value: None, stop: None });
    };
    let args = if *args == Value::Null { Value::Object(Vec::new()) } else { args.clone() };
    execute::tell(link, &Event::ToolCall { call: 1, exec, name: name.to_owned(), args: args.to_json() })?;
    loop {
        let Some((request, tail)) = link.try_next()? else {
            let mut waiting = [PollFd::new(link.socket(), PollFlags::POLLIN)];
            match poll(&mut waiting, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => continue,
                Err(error) => return Err(std::io::Error::from(error).into()),
            }
        };
        let interrupted = || Outcome { status: EndStatus::Interrupted, code: 130, err: String::new() };
        let failed = |err: String| Outcome { status: EndStatus::Failed, code: 1, err };
        let (outcome, value) = match request {
            Request::ToolResult { call: 1, ok: true, value, text, .. } => match Value::from_json(&value) {
                Ok(value) => {
                    let shown = toolcalls::shown(&value, &text);
                    let written = session.stdout().and_then(|mut stdout| stdout.write_all(shown.as_bytes()));
                    let err = written.err().map(|error| error.to_string()).unwrap_or_default();
                    (Outcome { status: EndStatus::Done, code: 0, err }, Some(value))
                }
                Err(error) => (failed(format!("the result is malformed: {error}")), None),
            },
            Request::ToolResult { call: 1, ok: false, message, .. } => (failed(message), None),
            Request::ToolResult { .. } => continue,
            Request::Interrupt { exec: wanted } if wanted == exec => (interrupted(), None),
            Request::Interrupt { .. } => continue,
            Request::DynamicTools { tools } => {
                super::serve::announce(session, tools);
                continue;
            }
            Request::Shutdown => {
                link.waiting.push_back((Request::Shutdown, tail));
                (interrupted(), None)
            }
            other => {
                if link.waiting.len() >= WAITING {
                    return Err(Stop::Protocol);
                }
                link.waiting.push_back((other, tail));
                continue;
            }
        };
        return Ok(Called { outcome, value, stop: None });
    }
}

/// The callable names, for the list of tools.
pub fn tools(session: &Session) -> Vec<Json> {
    let schema = json!({ "type": "array", "items": { "type": "string" } });
    let own = session.functions.iter().map(|(name, function)| {
        let text = entries::one_line(&function.text);
        json!({ "name": String::from_utf8_lossy(name), "description": text, "source": "user", "schema": schema })
    });
    let builtins = BUILTINS.iter().filter(|name| !session.snapshot.disabled.iter().any(|off| off == *name));
    let builtins =
        builtins.map(|name| json!({ "name": name, "description": format!("bash's builtin {name}"), "source": "builtin", "schema": schema }));
    own.chain(builtins).collect()
}
