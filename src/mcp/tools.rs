//! The list of one server's tools, bounded in number and size.

use std::collections::BTreeSet;

use rmcp::RoleClient;
use rmcp::model::{PaginatedRequestParams, Tool};
use rmcp::service::Peer;

use super::allow::SEPARATOR;
use super::limits;
use super::wire::chain;
use crate::core::info::ToolInfo;
use crate::core::limits::IDENTIFIER_BYTES;

/// The tools, and a note on omissions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ToolList {
    /// In the server's order, with their full names.
    pub(super) tools: Vec<ToolInfo>,
    /// What was left out and why; empty if nothing.
    pub(super) note: String,
}

/// Lists all tools of a server.
///
/// # Errors
/// The error of the server or its connection.
pub(super) async fn list(server: &str, peer: &Peer<RoleClient>) -> Result<ToolList, String> {
    let mut collected = Collector::new(server);
    let mut cursor = None;
    for _ in 0..limits::TOOL_PAGES {
        let params = PaginatedRequestParams::default().with_cursor(cursor);
        let page = peer.list_tools(Some(params)).await.map_err(|e| format!("did not list its tools: {}", chain(&e)))?;
        let room = page.tools.into_iter().all(|tool| collected.take(&tool));
        cursor = page.next_cursor.filter(|_| room);
        if cursor.is_none() {
            return Ok(collected.finish());
        }
    }
    collected.full = true;
    Ok(collected.finish())
}

struct Collector<'s> {
    server: &'s str,
    names: BTreeSet<String>,
    tools: Vec<ToolInfo>,
    schemas_bytes: usize,
    left_out: usize,
    full: bool,
}

impl<'s> Collector<'s> {
    fn new(server: &'s str) -> Self {
        Self { server, names: BTreeSet::new(), tools: Vec::new(), schemas_bytes: 0, left_out: 0, full: false }
    }

    /// Adds one tool; false if there is no room for more.
    fn take(&mut self, tool: &Tool) -> bool {
        if self.tools.len() >= limits::TOOLS {
            self.full = true;
            return false;
        }
        let name = format!("{}{SEPARATOR}{}", self.server, tool.name);
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
        let schema_json = serde_json::to_string(&*tool.input_schema).unwrap_or_default();
        if tool.name.is_empty()
            || name.len() > IDENTIFIER_BYTES
            || !tool.name.chars().all(plain)
            || schema_json.len() > limits::SCHEMA_BYTES
            || !self.names.insert(name.clone())
        {
            self.left_out += 1;
            return true;
        }
        self.schemas_bytes += schema_json.len();
        if self.schemas_bytes > limits::SCHEMAS_BYTES {
            self.full = true;
            return false;
        }
        let description = tool.description.as_deref().unwrap_or_default();
        self.tools.push(ToolInfo { name, description: cut(description), source: "mcp".into(), schema_json });
        true
    }

    fn finish(self) -> ToolList {
        let mut notes = Vec::new();
        if self.left_out > 0 {
            notes.push(format!(
                "{} tools left out: an invalid or repeated name, or a schema of more than {} bytes",
                self.left_out,
                limits::SCHEMA_BYTES
            ));
        }
        if self.full {
            notes.push(format!("only its first {} tools are listed", self.tools.len()));
        }
        ToolList { tools: self.tools, note: notes.join("; ") }
    }
}

/// A description of bounded size, without control characters except line breaks.
fn cut(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars().filter(|c| !c.is_control() || *c == '\n') {
        if out.len() + c.len_utf8() > limits::DESCRIPTION_BYTES {
            out.push('…');
            break;
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn collect(tools: impl IntoIterator<Item = serde_json::Value>) -> ToolList {
        let mut collected = Collector::new("s");
        for tool in tools {
            let tool: Tool = serde_json::from_value(tool).expect("a tool");
            if !collected.take(&tool) {
                break;
            }
        }
        collected.finish()
    }

    #[test]
    fn names_are_prefixed_and_checked() {
        let tool = |name: &str| json!({ "name": name, "inputSchema": { "type": "object" } });
        let list = collect(["echo", "a b", "echo", "", "x\n", "n/s.t-u_v"].map(tool));
        let names: Vec<&str> = list.tools.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["s__echo", "s__n/s.t-u_v"]);
        assert!(list.note.starts_with("4 tools left out"), "{}", list.note);
        assert_eq!(list.tools[0].schema_json, r#"{"type":"object"}"#);
    }

    #[test]
    fn listed_tools_are_bounded() {
        let tool = |i: usize| json!({ "name": format!("t{i}"), "inputSchema": {}, "description": "d".repeat(10_000) });
        let list = collect((0..limits::TOOLS + 1).map(tool));
        assert_eq!(list.tools.len(), limits::TOOLS);
        assert!(list.note.contains("only its first 512"), "{}", list.note);
        assert!(list.tools[0].description.len() <= limits::DESCRIPTION_BYTES + "…".len());
        let wide = |bytes: usize| json!({ "x": "y".repeat(bytes) });
        assert!(collect([json!({ "name": "t", "inputSchema": wide(limits::SCHEMA_BYTES) })]).tools.is_empty());
        let many = (0..200).map(|i| json!({ "name": format!("t{i}"), "inputSchema": wide(60_000) }));
        assert!((60..80).contains(&collect(many).tools.len()));
    }
}
