//! Output: events of a running execution, tables and trees.

use super::text::{bounded, count, malformed, read_data, read_text, read_text_list, unknown, write_text_list};
use crate::core::error::{Error, Result};
use crate::core::exec::{OutputData, OutputEvent, OutputNode};
use crate::core::limits;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads an event of a running execution.
///
/// # Errors
/// `invalidArgument` for malformed data or a chunk beyond [`limits::CHUNK_BYTES`].
pub fn read_output_event(reader: wire::output_event::Reader<'_>) -> Result<OutputEvent> {
    use wire::output_event::Which;
    Ok(match reader.which().map_err(|n| unknown("output event", n))? {
        Which::Stdout(chunk) => OutputEvent::Stdout(read_data(chunk, "stdout chunk", limits::CHUNK_BYTES)?),
        Which::Stderr(chunk) => OutputEvent::Stderr(read_data(chunk, "stderr chunk", limits::CHUNK_BYTES)?),
        Which::Structured(data) => {
            OutputEvent::Structured(read_output_data(data.map_err(|e| malformed("structured output", e))?)?)
        }
        Which::ExitCode(code) => OutputEvent::ExitCode(code),
        Which::Truncated(bytes) => OutputEvent::Truncated(bytes),
        Which::Display(display) => {
            let display = display.map_err(|e| malformed("display", e))?;
            OutputEvent::Display {
                mime: read_text(display.get_mime(), "media type")?,
                data: read_data(display.get_data(), "display data", limits::CHUNK_BYTES)?,
            }
        }
    })
}

/// Writes an event of a running execution.
///
/// # Errors
/// As [`write_output_data`].
pub fn write_output_event(mut builder: wire::output_event::Builder<'_>, event: &OutputEvent) -> Result<()> {
    match event {
        OutputEvent::Stdout(chunk) => builder.set_stdout(chunk),
        OutputEvent::Stderr(chunk) => builder.set_stderr(chunk),
        OutputEvent::Structured(data) => write_output_data(builder.init_structured(), data)?,
        OutputEvent::Display { mime, data } => {
            let mut display = builder.init_display();
            display.set_mime(mime.as_str());
            display.set_data(data);
        }
        OutputEvent::Truncated(bytes) => builder.set_truncated(*bytes),
        OutputEvent::ExitCode(code) => builder.set_exit_code(*code),
    }
    Ok(())
}

/// Reads a table or tree.
///
/// # Errors
/// `invalidArgument` beyond the limits of nodes and nesting.
pub fn read_output_data(reader: wire::output_data::Reader<'_>) -> Result<OutputData> {
    let headers = read_text_list(reader.get_headers(), "headers", limits::OUTPUT_COLUMNS)?;
    let root = reader.get_root().map_err(|e| malformed("rows", e))?;
    Ok(OutputData { headers, root: read_nodes(root, limits::VALUE_DEPTH)? })
}

/// Writes a table or tree.
///
/// # Errors
/// `invalidArgument` for a tree nested deeper than [`limits::VALUE_DEPTH`].
pub fn write_output_data(mut builder: wire::output_data::Builder<'_>, data: &OutputData) -> Result<()> {
    write_text_list(builder.reborrow().init_headers(count(data.headers.len())), &data.headers);
    write_nodes(builder.init_root(count(data.root.len())), &data.root, limits::VALUE_DEPTH)
}

type NodesReader<'a> = capnp::struct_list::Reader<'a, wire::output_node::Owned>;
type NodesBuilder<'a> = capnp::struct_list::Builder<'a, wire::output_node::Owned>;

fn too_deep() -> Error {
    Error::invalid(format!("output tree nested deeper than {} levels", limits::VALUE_DEPTH))
}

fn read_nodes(nodes: NodesReader<'_>, depth: usize) -> Result<Vec<OutputNode>> {
    bounded(nodes.len(), "rows", limits::VALUE_ITEMS)?;
    if nodes.is_empty() {
        return Ok(Vec::new());
    }
    let depth = depth.checked_sub(1).ok_or_else(too_deep)?;
    nodes
        .iter()
        .map(|node| {
            Ok(OutputNode {
                name: read_text(node.get_name(), "row name")?,
                entry_type: read_text(node.get_entry_type(), "row type")?,
                text: read_text(node.get_text(), "row text")?,
                cells: read_text_list(node.get_cells(), "cells", limits::OUTPUT_COLUMNS)?,
                children: read_nodes(node.get_children().map_err(|e| malformed("rows", e))?, depth)?,
            })
        })
        .collect()
}

fn write_nodes(mut builder: NodesBuilder<'_>, nodes: &[OutputNode], depth: usize) -> Result<()> {
    if nodes.is_empty() {
        return Ok(());
    }
    let depth = depth.checked_sub(1).ok_or_else(too_deep)?;
    for (i, node) in nodes.iter().enumerate() {
        let mut out = builder.reborrow().get(count(i));
        out.set_name(node.name.as_str());
        out.set_entry_type(node.entry_type.as_str());
        out.set_text(node.text.as_str());
        write_text_list(out.reborrow().init_cells(count(node.cells.len())), &node.cells);
        write_nodes(out.init_children(count(node.children.len())), &node.children, depth)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::convert::testing::{any_event, check_round_trip};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn output_event_round_trips(event in any_event()) {
            check_round_trip::<wire::output_event::Owned, _>(&event, write_output_event, read_output_event)?;
        }
    }

    #[test]
    fn chunks_and_trees_are_bounded() {
        let mut message = capnp::message::Builder::new_default();
        let mut event = message.init_root::<wire::output_event::Builder<'_>>();
        event.set_stdout(&vec![0; limits::CHUNK_BYTES + 1]);
        assert!(read_output_event(event.reborrow().into_reader()).is_err());
        let deep = (0..=limits::VALUE_DEPTH)
            .fold(OutputNode::default(), |inner, _| OutputNode { children: vec![inner], ..OutputNode::default() });
        let data = OutputData { headers: Vec::new(), root: vec![deep] };
        assert!(write_output_data(event.init_structured(), &data).is_err());
    }
}
