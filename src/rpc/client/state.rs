//! One kernel's state: variables, mounts, tools, MCP servers, blobs, snapshots, completion and
//! checks of code.

use super::connection::{answer, fields};
use super::kernel::KernelClient;
use crate::core::error::Result;
use crate::core::exec::ExecResult;
use crate::core::ids::Digest;
use crate::core::info::{CodeStatus, McpInfo, McpTransport, MountInfo, ToolInfo, VarInfo};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::value::Value;
use crate::rpc::convert::exec::{read_code_status, read_exec_result, read_matches};
use crate::rpc::convert::value::{read_value, write_value};
use crate::rpc::convert::{listing, mcp, read_data, read_name, read_text, read_text_list};
use crate::session::StateSnapshot;

/// Completions of code at a cursor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completions {
    /// Byte offset from which a match replaces the text up to the cursor.
    pub start: usize,
    /// The matches.
    pub matches: Vec<String>,
}

/// Whether code is a complete program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedCode {
    /// Complete, incomplete or invalid.
    pub status: CodeStatus,
    /// Indentation for the next line.
    pub indent: String,
}

impl KernelClient {
    /// Reads a variable.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn var(&self, name: &str) -> Result<Value> {
        let mut request = self.cap.get_var_request();
        request.get().set_name(name);
        let response = self.link.call(request.send().promise).await?;
        answer(read_value(fields(fields(response.get())?.get_value())?))
    }

    /// Sets a variable; `expected_version` 0: any version of the kernel.
    ///
    /// # Errors
    /// `invalidArgument`, `conflict`.
    pub async fn put_var(&self, name: &str, value: &Value, expected_version: u64) -> Result<()> {
        let mut request = self.cap.set_var_request();
        request.get().set_name(name);
        write_value(request.get().init_value(), value)?;
        request.get().set_expected_version(expected_version);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// The names of the user's variables.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn var_names(&self) -> Result<Vec<String>> {
        let response = self.link.call(self.cap.list_vars_request().send().promise).await?;
        answer(read_text_list(fields(response.get())?.get_names(), "variables", limits::VALUE_ITEMS))
    }

    /// The user's variables with type and summary.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn vars(&self) -> Result<Vec<VarInfo>> {
        let response = self.link.call(self.cap.describe_vars_request().send().promise).await?;
        answer(listing::read_vars(fields(response.get())?.get_vars()))
    }

    /// Mounts the host's directory or file `source` at `path`.
    ///
    /// # Errors
    /// `invalidArgument`, `notFound`, `refused`, `conflict`.
    pub async fn mount_at(&self, path: &str, source: &str, writable: bool, expected_version: u64) -> Result<()> {
        let mut request = self.cap.mount_request();
        request.get().set_path(path);
        request.get().set_source(source);
        request.get().set_writable(writable);
        request.get().set_expected_version(expected_version);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Removes a mount.
    ///
    /// # Errors
    /// `notFound`, `conflict`.
    pub async fn unmount_at(&self, path: &str, expected_version: u64) -> Result<()> {
        let mut request = self.cap.unmount_request();
        request.get().set_path(path);
        request.get().set_expected_version(expected_version);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// The mounts.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn mounts(&self) -> Result<Vec<MountInfo>> {
        let response = self.link.call(self.cap.list_mounts_request().send().promise).await?;
        answer(listing::read_mounts(fields(response.get())?.get_mounts()))
    }

    /// The tools.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn tools(&self) -> Result<Vec<ToolInfo>> {
        let response = self.link.call(self.cap.list_tools_request().send().promise).await?;
        answer(listing::read_tools(fields(response.get())?.get_tools()))
    }

    /// Calls a tool with named (object) or positional (array) arguments, as an execution.
    ///
    /// # Errors
    /// `notFound`, `invalidArgument`.
    pub async fn tool(&self, name: &str, args: &Value) -> Result<ExecResult> {
        let mut request = self.cap.call_tool_request();
        request.get().set_name(name);
        write_value(request.get().init_args(), args)?;
        let response = self.link.wait(request.send().promise).await?;
        answer(read_exec_result(fields(fields(response.get())?.get_result())?))
    }

    /// Registers an MCP server of the configuration's allow-list.
    ///
    /// # Errors
    /// `refused`, `alreadyExists`, `conflict`.
    pub async fn register_mcp(&self, name: &str, transport: &McpTransport, expected_version: u64) -> Result<()> {
        let mut request = self.cap.register_mcp_request();
        request.get().set_name(name);
        mcp::write_mcp_transport(request.get().init_transport(), transport);
        request.get().set_expected_version(expected_version);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Removes an MCP server.
    ///
    /// # Errors
    /// `notFound`, `conflict`.
    pub async fn unregister_mcp(&self, name: &str, expected_version: u64) -> Result<()> {
        let mut request = self.cap.unregister_mcp_request();
        request.get().set_name(name);
        request.get().set_expected_version(expected_version);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// The kernel's MCP servers.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn mcp_servers(&self) -> Result<Vec<McpInfo>> {
        let response = self.link.call(self.cap.list_mcp_servers_request().send().promise).await?;
        answer(mcp::read_mcp_servers(fields(response.get())?.get_servers()))
    }

    /// The engine's state as opaque, versioned bytes, and the values that they do not hold.
    ///
    /// # Errors
    /// `busy` if the state is larger than [`limits::STATE_INLINE_BYTES`].
    pub async fn save_state(&self) -> Result<StateSnapshot> {
        let response = self.link.wait(self.cap.snapshot_request().send().promise).await?;
        let response = fields(response.get())?;
        let data = answer(read_data(response.get_data(), "state", limits::STATE_INLINE_BYTES))?;
        Ok(StateSnapshot { data, missed: answer(listing::read_missed(response.get_missed()))? })
    }

    /// Replaces the engine's state, completely or not at all. Returns the values that could not be
    /// rebuilt.
    ///
    /// # Errors
    /// `invalidArgument`, `corrupt`, `conflict`.
    pub async fn put_state(&self, data: &[u8], expected_version: u64) -> Result<Vec<MissedEntry>> {
        within(data.len(), "state", limits::STATE_INLINE_BYTES)?;
        let mut request = self.cap.restore_request();
        request.get().set_data(data);
        request.get().set_expected_version(expected_version);
        let response = self.link.wait(request.send().promise).await?;
        answer(listing::read_missed(fields(response.get())?.get_missed()))
    }

    /// Values that the kernel holds now and its saved state does not.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn missed(&self) -> Result<Vec<MissedEntry>> {
        let response = self.link.call(self.cap.missed_request().send().promise).await?;
        answer(listing::read_missed(fields(response.get())?.get_missed()))
    }

    /// Reads a blob of at most [`limits::BLOB_INLINE_BYTES`]; larger: [`KernelClient::open_blob`].
    ///
    /// # Errors
    /// `notFound`, also for a blob that this kernel may not read.
    pub async fn blob(&self, hash: Digest) -> Result<Vec<u8>> {
        let mut request = self.cap.read_blob_request();
        request.get().set_hash(hash.to_string());
        let response = self.link.call(request.send().promise).await?;
        answer(read_data(fields(response.get())?.get_data(), "blob", limits::BLOB_INLINE_BYTES))
    }

    /// Stores a blob of at most [`limits::BLOB_INLINE_BYTES`]; larger: [`KernelClient::new_blob`].
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn put_blob(&self, data: &[u8]) -> Result<Digest> {
        within(data.len(), "blob", limits::BLOB_INLINE_BYTES)?;
        let mut request = self.cap.write_blob_request();
        request.get().set_data(data);
        let response = self.link.call(request.send().promise).await?;
        answer(read_digest(fields(response.get())?.get_hash()))
    }

    /// Completions for the byte offset `cursor` of `code`.
    ///
    /// # Errors
    /// `unsupported` if the engine offers none.
    pub async fn complete(&self, code: &str, cursor: usize) -> Result<Completions> {
        let mut request = self.cap.complete_request();
        request.get().set_code(code);
        request.get().set_cursor(u32::try_from(cursor).unwrap_or(u32::MAX));
        let response = self.link.call(request.send().promise).await?;
        let response = fields(response.get())?;
        let start = (response.get_start() as usize).min(cursor);
        Ok(Completions { start, matches: answer(read_matches(response.get_matches()))? })
    }

    /// Whether `code` is a complete program.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn check(&self, code: &str) -> Result<CheckedCode> {
        let mut request = self.cap.check_request();
        request.get().set_code(code);
        let response = self.link.call(request.send().promise).await?;
        let response = fields(response.get())?;
        Ok(CheckedCode {
            status: answer(read_code_status(response.get_status()))?,
            indent: answer(read_text(response.get_indent(), "indentation"))?,
        })
    }
}

/// Reads a content address.
pub(super) fn read_digest(reader: capnp::Result<capnp::text::Reader<'_>>) -> Result<Digest> {
    let text = read_name(reader, "hash")?;
    text.parse().map_err(|e| crate::core::error::Error::invalid(format!("{e}")))
}

/// Refuses data so large that the daemon would close the connection.
fn within(bytes: usize, what: &str, most: usize) -> Result<()> {
    match bytes > most {
        true => Err(crate::core::error::Error::invalid(format!("{what} of {bytes} bytes is larger than {most} bytes"))),
        false => Ok(()),
    }
}
