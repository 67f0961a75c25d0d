//! Rich forms of results: a line for each, and files on request.

use std::path::Path;

use super::context::Context;
use super::render;
use crate::core::error::{Error, Result};
use crate::core::exec::Display;
use crate::core::ids::ExecId;
use crate::core::quantity::format_size;

/// Names the rich forms on stderr: stdout is the code's.
pub fn tell(context: &Context, displays: &[Display]) {
    for (i, display) in displays.iter().enumerate() {
        let size = format_size(display.data.len() as u64);
        context.say(&format!("{} {} ({size})", i + 1, render::plain(&display.mime)));
    }
}

/// Writes the rich forms as files `EXECUTION-NUMBER.EXTENSION`.
pub fn save(folder: &Path, exec: ExecId, displays: &[Display]) -> Result<()> {
    let failed =
        |path: &Path, error: std::io::Error| Error::internal(format!("could not write {}: {error}", path.display()));
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
    for (i, display) in displays.iter().enumerate() {
        let path = folder.join(format!("{exec}-{}.{}", i + 1, extension(&display.mime)));
        std::fs::write(&path, &display.data).map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

fn extension(mime: &str) -> &'static str {
    match mime {
        "image/png" => "png",
        "image/jpeg" => "jpg",
        "image/svg+xml" => "svg",
        "application/pdf" => "pdf",
        "application/json" => "json",
        "text/html" => "html",
        "text/markdown" => "md",
        "text/latex" => "tex",
        "text/plain" => "txt",
        _ => "bin",
    }
}
