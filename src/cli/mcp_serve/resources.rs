//! Resources: the journal of each kernel, and its files.
//!
//! `ryokan://NAME/journal`, `ryokan://NAME/files/PATH` with the path's bytes percent-encoded (RFC 3986).

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::percent_decode_str;
use rmcp::model::{ErrorData, ReadResourceResult, Resource, ResourceContents, ResourceTemplate};

use super::access::Access;
use super::tools::{describe, read_range};
use crate::cli::paint::Paint;
use crate::cli::render;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::rights::Right;

const SCHEME: &str = "ryokan://";

/// The templates of addresses.
pub fn templates() -> Vec<ResourceTemplate> {
    vec![
        ResourceTemplate::new("ryokan://{kernel}/journal", "journal")
            .with_description("The newest executions, checkpoints and messages of a kernel")
            .with_mime_type("text/plain"),
        ResourceTemplate::new("ryokan://{kernel}/files/{+path}", "file")
            .with_description("A file of a kernel, by its path below /workspace"),
    ]
}

/// The journals of the served kernels.
pub async fn list(access: &Access) -> Result<Vec<Resource>, ErrorData> {
    if !access.has(Right::Read) {
        return Ok(Vec::new());
    }
    let all = access.list().await.map_err(|error| ErrorData::internal_error(describe(&error), None))?;
    let journal = |name: &str| {
        Resource::new(format!("{SCHEME}{name}/journal"), format!("journal of {name}")).with_mime_type("text/plain")
    };
    Ok(all.iter().map(|info| journal(info.spec.name.as_str())).collect())
}

/// Reads a resource.
pub async fn read(access: &Access, uri: &str) -> Result<ReadResourceResult, ErrorData> {
    let content = contents(access, uri).await.map_err(|error| match error.code {
        ErrorCode::NotFound => ErrorData::resource_not_found(describe(&error), None),
        ErrorCode::InvalidArgument => ErrorData::invalid_params(describe(&error), None),
        _ => ErrorData::internal_error(describe(&error), None),
    })?;
    Ok(ReadResourceResult::new(vec![content]))
}

async fn contents(access: &Access, uri: &str) -> Result<ResourceContents> {
    let unknown = || Error::new(ErrorCode::NotFound, "there is no such resource").hint("see resources/templates/list");
    let (name, rest) = uri.strip_prefix(SCHEME).and_then(|rest| rest.split_once('/')).ok_or_else(unknown)?;
    if rest == "journal" {
        return Ok(ResourceContents::text(journal(access, name).await?, uri));
    }
    let path = rest.strip_prefix("files/").ok_or_else(unknown)?;
    let path: Vec<u8> = percent_decode_str(path).collect();
    let (kernel, _) = access.kernel(name).await?;
    let (bytes, more) = read_range(&kernel, &path, 0, access.most_bytes).await?;
    if more > 0 {
        return Err(Error::invalid(format!("the file is larger than {} bytes", access.most_bytes))
            .hint("read it in parts with the tool read_file, or start the server with a larger --output-limit"));
    }
    Ok(match String::from_utf8(bytes) {
        Ok(text) => ResourceContents::text(text, uri),
        Err(bytes) => {
            let blob = BASE64_STANDARD.encode(bytes.as_bytes());
            ResourceContents::blob(blob, uri).with_mime_type("application/octet-stream")
        }
    })
}

/// The newest entries that fit, oldest first.
async fn journal(access: &Access, name: &str) -> Result<String> {
    let (kernel, _) = access.kernel(name).await?;
    let (mut lines, mut bytes) = (std::collections::VecDeque::new(), 0);
    kernel
        .each_journal_entry(0, 0, async |entry| {
            let line = render::journal_entry(&entry, false, Paint::OFF);
            bytes += line.len();
            lines.push_back(line);
            while bytes > access.most_bytes {
                bytes -= lines.pop_front().map_or(bytes, |line: String| line.len());
            }
            Ok(())
        })
        .await?;
    Ok(lines.into_iter().collect())
}
