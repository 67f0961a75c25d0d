//! The tools: their list, and their calls.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rmcp::model::{CallToolRequestParams, CallToolResult, ContentBlock, ErrorData, Tool, ToolAnnotations};
use tokio_util::sync::CancellationToken;

use super::access::Access;
use super::parameters::{Arguments, Kind, Parameter, optional, schema, text};
use crate::cli::missing_module::missing_module;
use crate::cli::paint::Paint;
use crate::cli::{render, spec};
use crate::core::checkpoint::{CheckpointRequest, CheckpointType};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::exec::{Display, ExecRequest, ExecResult, ExecStatus, Work};
use crate::core::fork::Forking;
use crate::core::limits;
use crate::core::rights::{Right, Rights};
use crate::rpc::client::KernelClient;
use crate::rpc::convert::spec::SpecRequest;

/// Most bytes of an image in a result.
const IMAGE_BYTES: usize = 1 << 20;

/// A tool.
struct Definition {
    name: &'static str,
    about: &'static str,
    /// The right that it needs.
    right: Right,
    /// Whether it makes kernels beside the served ones.
    is_for_all: bool,
    /// Whether it can lose something that no `undo` brings back.
    is_destructive: bool,
    parameters: &'static [Parameter],
}

const fn tool(name: &'static str, right: Right, about: &'static str, parameters: &'static [Parameter]) -> Definition {
    Definition { name, about, right, is_for_all: false, is_destructive: false, parameters }
}

const KERNEL: Parameter = text("kernel", "Name or id of the kernel");
const PATH: Parameter = text("path", "Path below /workspace, or relative to it");

const TOOLS: &[Definition] = &[
    tool("list_kernels", Right::Read, "List the kernels: name, engine, state", &[]),
    Definition {
        is_for_all: true,
        ..tool(
            "create_kernel",
            Right::Admin,
            "Create a durable, sandboxed kernel",
            &[
                text("name", "Name of the new kernel"),
                optional("engine", Kind::Text, "python, bash, node or kaish; the default is the daemon's"),
                optional("isolation", Kind::Text, "process or microvm"),
            ],
        )
    },
    tool(
        "execute",
        Right::Execute,
        "Execute code in a kernel. Variables, functions and files are kept",
        &[
            KERNEL,
            text("code", "The code, in the language of the kernel's engine"),
            optional("timeout_seconds", Kind::Number, "Interrupt the code after this time; none by default"),
            optional("stdin", Kind::Text, "Standard input of the code"),
        ],
    ),
    tool(
        "read_file",
        Right::Read,
        "Read a file of a kernel",
        &[
            KERNEL,
            PATH,
            optional("offset", Kind::Number, "First byte; 0 by default"),
            optional("base64", Kind::Flag, "Return the bytes in base64, for files that are no text"),
        ],
    ),
    tool(
        "write_file",
        Right::Write,
        "Write a file of a kernel at once; missing directories are made",
        &[KERNEL, PATH, text("content", "The whole content"), optional("base64", Kind::Flag, "The content is base64")],
    ),
    tool(
        "list_files",
        Right::Read,
        "List a directory of a kernel",
        &[KERNEL, optional("path", Kind::Text, "Path below /workspace; /workspace by default")],
    ),
    tool(
        "checkpoint",
        Right::Checkpoint,
        "Take a checkpoint of variables and files",
        &[KERNEL, optional("message", Kind::Text, "Name of the checkpoint")],
    ),
    tool(
        "log",
        Right::Read,
        "List the checkpoints of a kernel, newest first",
        &[KERNEL, optional("limit", Kind::Number, "At most this many; all by default")],
    ),
    tool(
        "diff",
        Right::Read,
        "Compare two checkpoints, or a checkpoint with the present",
        &[
            KERNEL,
            text("from", "The older checkpoint: an id's beginning, a name, latest, or ~N"),
            optional("to", Kind::Text, "The newer checkpoint; the present by default"),
            optional("text", Kind::Flag, "Show the contents of changed files, as unified diffs"),
        ],
    ),
    tool(
        "restore",
        Right::Restore,
        "Restore a kernel to a checkpoint; undo takes it back",
        &[KERNEL, text("checkpoint", "An id's beginning, a name, latest, or ~N")],
    ),
    tool("undo", Right::Restore, "Undo the last restore of a kernel", &[KERNEL]),
    tool(
        "fork",
        Right::Fork,
        "Create kernels from a kernel's present or from a checkpoint",
        &[
            KERNEL,
            text("name", "Name of the new kernel; with count, NAME-1, NAME-2 and so on"),
            optional("checkpoint", Kind::Text, "Fork from this checkpoint; from the present by default"),
            optional("count", Kind::Number, "Number of forks; 1 by default"),
        ],
    ),
    Definition {
        is_destructive: true,
        ..tool("remove_kernel", Right::Admin, "Remove a kernel with its files and checkpoints, for good", &[KERNEL])
    },
];

/// The tools that these rights allow.
pub fn list(rights: Rights, is_restricted: bool) -> Vec<Tool> {
    let allowed = TOOLS.iter().filter(|tool| rights.has(tool.right) && !(is_restricted && tool.is_for_all));
    allowed
        .map(|tool| {
            let annotations = ToolAnnotations::new()
                .read_only(tool.right == Right::Read)
                .destructive(tool.is_destructive)
                .open_world(false);
            Tool::new(tool.name, tool.about, schema(tool.parameters)).with_annotations(annotations)
        })
        .collect()
}

/// Calls a tool. Its failure is a result that the model reads.
///
/// # Errors
/// An unknown tool.
pub async fn call(
    access: &Access,
    request: CallToolRequestParams,
    cancelled: &CancellationToken,
) -> Result<CallToolResult, ErrorData> {
    let found = TOOLS.iter().find(|tool| tool.name == request.name);
    let Some(tool) = found.filter(|tool| !(access.is_restricted() && tool.is_for_all)) else {
        let name: String = request.name.chars().take(80).collect();
        return Err(ErrorData::invalid_params(format!("there is no tool {name:?}"), None));
    };
    let called = async {
        access.require(tool.right)?;
        let arguments = Arguments::check(tool.parameters, request.arguments.unwrap_or_default())?;
        perform(access, tool.name, &arguments, cancelled).await
    };
    Ok(called.await.unwrap_or_else(|error| CallToolResult::error(vec![ContentBlock::text(describe(&error))])))
}

/// An error's message, code and hint as one text.
pub fn describe(error: &Error) -> String {
    let hint = if error.hint.is_empty() { String::new() } else { format!("\nhint: {}", error.hint) };
    format!("{} ({}){hint}", error.message, error.code.name())
}

async fn perform(
    access: &Access,
    tool: &str,
    arguments: &Arguments,
    cancelled: &CancellationToken,
) -> Result<CallToolResult> {
    let text = match tool {
        "list_kernels" => render::kernels(&access.list().await?, "no kernels\n", render::now_ms(), Paint::OFF),
        "create_kernel" => create(access, arguments).await?,
        "execute" => return execute(access, arguments, cancelled).await,
        "read_file" => read_file(access, arguments).await?,
        "write_file" => write_file(access, arguments).await?,
        "list_files" => list_files(access, arguments).await?,
        "checkpoint" => {
            let (kernel, _) = access.kernel(arguments.text("kernel")).await?;
            let wanted = CheckpointRequest::new(CheckpointType::Manual, arguments.text("message"));
            wanted.check()?;
            render::checkpoint_line(&kernel.checkpoint(&wanted).await?, true, Paint::OFF)
        }
        "log" => log(access, arguments).await?,
        "diff" => diff(access, arguments).await?,
        "restore" => {
            let name = arguments.text("kernel");
            let (kernel, _) = access.kernel(name).await?;
            render::restoration(name, &kernel.restore_checkpoint(arguments.text("checkpoint"), 0).await?, Paint::OFF)
        }
        "undo" => {
            let name = arguments.text("kernel");
            let (kernel, _) = access.kernel(name).await?;
            render::restoration(name, &kernel.undo(0).await?, Paint::OFF)
        }
        "fork" => return fork(access, arguments).await,
        "remove_kernel" => {
            let (kernel, info) = access.kernel(arguments.text("kernel")).await?;
            kernel.remove(0).await?;
            format!("kernel {} is removed\n", info.spec.name)
        }
        other => return Err(Error::internal(format!("tool {other} has no code"))),
    };
    Ok(CallToolResult::success(vec![ContentBlock::text(shorten(text, access.most_bytes))]))
}

async fn create(access: &Access, arguments: &Arguments) -> Result<String> {
    let name = arguments.text("name").parse().map_err(|error| Error::invalid(format!("{error}")))?;
    let mut wanted = SpecRequest::new(name);
    if !arguments.text("engine").is_empty() {
        wanted.engine = Some(arguments.text("engine").parse().map_err(|error| Error::invalid(format!("{error}")))?);
    }
    if !arguments.text("isolation").is_empty() {
        wanted.isolation = Some(spec::parse_isolation(arguments.text("isolation")).map_err(Error::invalid)?);
    }
    let (_, info) = access.host().await?.create_kernel(&wanted, "").await?;
    Ok(format!("kernel {} is created: engine {}\n", info.spec.name, info.spec.engine))
}

async fn execute(access: &Access, arguments: &Arguments, cancelled: &CancellationToken) -> Result<CallToolResult> {
    let (kernel, info) = access.kernel(arguments.text("kernel")).await?;
    let request = ExecRequest {
        what: Work::Code(arguments.text("code").to_owned()),
        stdin: arguments.text("stdin").as_bytes().to_vec(),
        // A timeout of zero would be none.
        timeout_ms: arguments.number("timeout_seconds").map_or(0, |seconds| ((seconds * 1000.0) as u64).max(1)),
        output_limit_bytes: access.most_bytes as u64,
        ..ExecRequest::default()
    };
    let execution = kernel.run(&request).await?;
    let result = tokio::select! {
        result = execution.result() => result?,
        () = cancelled.cancelled() => {
            kernel.interrupt_execution(execution.exec()).await?;
            execution.result().await?
        }
    };
    let value = render::value_of(&result, info.spec.engine);
    let mut text = shorten(outcome(&result, value), access.most_bytes);
    if let Some(hint) = missing_module(Some(info.spec.name.as_str()), info.spec.engine, &result.end.err) {
        text.push_str(&format!("{hint}\n"));
    }
    let mut content = vec![ContentBlock::text(text)];
    content.extend(result.displays.iter().filter_map(image));
    match result.end.status {
        ExecStatus::Done => Ok(CallToolResult::success(content)),
        _ => Ok(CallToolResult::error(content)),
    }
}

/// An execution's output, value and end.
fn outcome(result: &ExecResult, value: Option<String>) -> String {
    let mut text = String::from_utf8_lossy(&result.stdout).into_owned();
    let mut part = |head: &str, more: &str| {
        if !more.is_empty() {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(head);
            text.push_str(more);
        }
    };
    part("[stderr]\n", &String::from_utf8_lossy(&result.stderr));
    part("", value.as_deref().unwrap_or_default());
    if result.truncated_bytes > 0 {
        let dropped = result.truncated_bytes - (result.stdout_tail.len() + result.stderr_tail.len()) as u64;
        part("", &format!("[{dropped} more bytes of output were dropped]\n"));
        part("[the end of stdout]\n", &String::from_utf8_lossy(&result.stdout_tail));
        part("[the end of stderr]\n", &String::from_utf8_lossy(&result.stderr_tail));
    }
    if result.end.status != ExecStatus::Done {
        let (status, code, err) = (result.end.status.name(), result.end.code, &result.end.err);
        part("", &format!("[{status}, exit code {code}] {err}\n"));
    }
    if text.is_empty() { "[done, no output]\n".into() } else { text }
}

fn image(display: &Display) -> Option<ContentBlock> {
    let fits = display.mime.starts_with("image/") && display.data.len() <= IMAGE_BYTES;
    fits.then(|| ContentBlock::image(BASE64_STANDARD.encode(&display.data), display.mime.clone()))
}

/// At most `most` bytes of a file from byte `from`, and the number of bytes after them.
pub async fn read_range(kernel: &KernelClient, path: &[u8], from: u64, most: usize) -> Result<(Vec<u8>, u64)> {
    let download = kernel.files().await?.open(path).await?;
    let mut bytes = Vec::new();
    while bytes.len() < most {
        let part = download.range(from.saturating_add(bytes.len() as u64), most - bytes.len()).await?;
        if part.is_empty() {
            break;
        }
        bytes.extend(part);
    }
    let more = download.info().bytes.saturating_sub(from.saturating_add(bytes.len() as u64));
    Ok((bytes, more))
}

async fn read_file(access: &Access, arguments: &Arguments) -> Result<String> {
    let (kernel, _) = access.kernel(arguments.text("kernel")).await?;
    let from = arguments.whole("offset").unwrap_or(0);
    let in_base64 = arguments.flag("base64");
    // Three bytes become four characters.
    let most = if in_base64 { access.most_bytes / 4 * 3 } else { access.most_bytes };
    let (mut bytes, mut more) = read_range(&kernel, arguments.text("path").as_bytes(), from, most).await?;
    let mut text = match in_base64 {
        true => BASE64_STANDARD.encode(&bytes),
        false => {
            // A character that the end of the part cuts belongs to the next part.
            if let Err(error) = std::str::from_utf8(&bytes)
                && error.error_len().is_none()
                && more > 0
            {
                more += (bytes.len() - error.valid_up_to()) as u64;
                bytes.truncate(error.valid_up_to());
            }
            String::from_utf8(std::mem::take(&mut bytes)).map_err(|_| {
                Error::new(ErrorCode::Unsupported, "the file is no UTF-8 text").hint("read it with base64: true")
            })?
        }
    };
    if more > 0 {
        let read = if in_base64 { bytes.len() as u64 } else { text.len() as u64 };
        text.push_str(&format!("\n[{more} more bytes: go on with offset {}]\n", from.saturating_add(read)));
    }
    Ok(text)
}

async fn write_file(access: &Access, arguments: &Arguments) -> Result<String> {
    let (kernel, _) = access.kernel(arguments.text("kernel")).await?;
    let content = arguments.text("content");
    let decoded;
    let data = match arguments.flag("base64") {
        true => {
            decoded = BASE64_STANDARD.decode(content).map_err(|error| Error::invalid(format!("content: {error}")))?;
            decoded.as_slice()
        }
        false => content.as_bytes(),
    };
    let path = arguments.text("path");
    kernel.files().await?.write(path.as_bytes(), data).await?;
    Ok(format!("{} bytes are written to {path}\n", data.len()))
}

async fn list_files(access: &Access, arguments: &Arguments) -> Result<String> {
    let (kernel, _) = access.kernel(arguments.text("kernel")).await?;
    let path = arguments.text("path");
    let path = if path.is_empty() { crate::core::files::WORKSPACE } else { path };
    let files = kernel.files().await?.list(path.as_bytes()).await?;
    let line = |file: &crate::core::files::FileInfo| {
        let name = String::from_utf8_lossy(&file.name);
        format!("{} {} {}\n", file.kind.name(), file.bytes, render::plain(&name))
    };
    let text: String = files.iter().map(line).collect();
    Ok(if text.is_empty() { "the directory is empty\n".into() } else { text })
}

async fn log(access: &Access, arguments: &Arguments) -> Result<String> {
    let (kernel, _) = access.kernel(arguments.text("kernel")).await?;
    let limit = u32::try_from(arguments.whole("limit").unwrap_or(0)).unwrap_or(u32::MAX);
    let mut all = Vec::new();
    let listed = kernel.checkpoints(limit, async |checkpoint, is_head| {
        all.push((checkpoint, is_head));
        Ok(())
    });
    listed.await?;
    Ok(if all.is_empty() { "no checkpoints\n".into() } else { render::checkpoint_log(&all, None, Paint::OFF) })
}

async fn diff(access: &Access, arguments: &Arguments) -> Result<String> {
    let (kernel, _) = access.kernel(arguments.text("kernel")).await?;
    let (from, to) = (arguments.text("from"), arguments.text("to"));
    let (mut text, most) = (String::new(), access.most_bytes);
    let mut add = |line: &str| match text.len() > most {
        true => Err(Error::unavailable("the rest is not needed")),
        false => {
            text.push_str(line);
            Ok(())
        }
    };
    let streamed = match arguments.flag("text") {
        true => {
            let take = async |patch: crate::core::diff::Patch| add(&render::patch(&patch, Paint::OFF));
            kernel.diff_text(from, (None, to), &[], take).await
        }
        false => kernel.diff(from, to, async |difference| add(&render::difference(&difference, Paint::OFF))).await,
    };
    match streamed {
        Err(error) if text.len() <= most => Err(error),
        Ok(()) if text.is_empty() => Ok("no differences\n".into()),
        Ok(()) | Err(_) => Ok(text),
    }
}

async fn fork(access: &Access, arguments: &Arguments) -> Result<CallToolResult> {
    let (kernel, info) = access.kernel(arguments.text("kernel")).await?;
    let count = u32::try_from(arguments.whole("count").unwrap_or(1)).unwrap_or(u32::MAX);
    let from = arguments.text("checkpoint").to_owned();
    let forking = Forking { from, count, ..Forking::of(arguments.text("name")) };
    forking.check()?;
    let done = kernel.fork(&forking).await?;
    for (_, made) in done.children.iter().filter_map(|(_, made)| made.as_ref().ok()) {
        access.add(made.id);
    }
    let text = render::forks(info.spec.name.as_str(), &done, Paint::OFF);
    let failed: Vec<String> = done.children.iter().filter_map(|(_, made)| made.as_ref().err()).map(describe).collect();
    Ok(match failed.is_empty() {
        true => CallToolResult::success(vec![ContentBlock::text(text)]),
        false => CallToolResult::error(vec![ContentBlock::text(format!("{text}{}\n", failed.join("\n")))]),
    })
}

/// Shortens a text in its middle, and says so.
fn shorten(text: String, most: usize) -> String {
    let most = most.max(limits::CHECKPOINT_NAME_BYTES);
    if text.len() <= most {
        return text;
    }
    let (head, tail) = (text.floor_char_boundary(most / 2), text.ceil_char_boundary(text.len() - most / 2));
    format!("{}\n[{} bytes left out]\n{}", &text[..head], tail - head, &text[tail..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_choose_tools() {
        let names = |rights: Rights, restricted| {
            list(rights, restricted).into_iter().map(|tool| tool.name.into_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names(Rights::ALL, false).len(), TOOLS.len());
        assert!(!names(Rights::ALL, true).contains(&"create_kernel".to_owned()));
        let reading: Rights = [Right::Read].into_iter().collect();
        assert_eq!(names(reading, true), ["list_kernels", "read_file", "list_files", "log", "diff"]);
        assert!(names(Rights::NONE, false).is_empty());
    }

    #[test]
    fn long_text_is_shortened() {
        assert_eq!(shorten("short".into(), 1000), "short");
        let long = "äöü".repeat(10_000);
        let cut = shorten(long.clone(), 1000);
        assert!(cut.len() < 1100 && cut.contains("bytes left out") && cut.starts_with("äöü"), "{}", cut.len());
        assert!(cut.ends_with("äöü"));
    }
}
