//! Conversion between kaish's and our forms of a tool call's arguments, schema and structured
//! output.

use kaish_kernel::ast::Value as Kv;
use kaish_kernel::interpreter::{OutputData as KaishOutput, OutputNode as KaishNode};
use kaish_kernel::tools::{ParamSchema, ToolSchema};
use serde_json::{Value as Json, json};

use super::values;
use crate::core::exec::{OutputData, OutputNode};
use crate::core::value::Value;

/// Arguments of a call as kaish's literal words.
///
/// # Errors
/// If they are neither named nor positional, or contain a value that kaish cannot represent.
pub fn literal_argv(args: &Value, schema: Option<&ToolSchema>) -> Result<Vec<Kv>, String> {
    let literal = |value: &Value| values::to_kaish(value).map_err(|error| error.to_string());
    match args {
        Value::Null => Ok(Vec::new()),
        Value::Array(items) => items.iter().map(literal).collect(),
        Value::Object(fields) => {
            let params = schema.map(|schema| schema.params.as_slice()).unwrap_or_default();
            let mut argv = Vec::new();
            let mut operands: Vec<(usize, Vec<Kv>)> = Vec::new();
            for (name, value) in fields {
                let place = params.iter().position(|param| param.positional && param.name == *name);
                if let Some(place) = place {
                    let words = match value {
                        Value::Array(items) => items.iter().map(literal).collect::<Result<_, _>>()?,
                        Value::Null => Vec::new(),
                        other => vec![literal(other)?],
                    };
                    operands.push((place, words));
                } else {
                    flag(name, value, &mut argv)?;
                }
            }
            operands.sort_by_key(|(place, _)| *place);
            if !operands.is_empty() {
                argv.push(Kv::String("--".into()));
            }
            argv.extend(operands.into_iter().flat_map(|(_, words)| words));
            Ok(argv)
        }
        _ => Err("arguments are an object (named) or an array (positional)".into()),
    }
}

fn flag(name: &str, value: &Value, argv: &mut Vec<Kv>) -> Result<(), String> {
    if name.is_empty() || name.starts_with('-') || name.contains('=') {
        return Err(format!("{:?} cannot be the name of an argument", values::one_line(name)));
    }
    let dashes = if name.chars().count() == 1 { "-" } else { "--" };
    match value {
        Value::Null | Value::Bool(false) => {}
        Value::Bool(true) => argv.push(Kv::String(format!("{dashes}{name}"))),
        Value::Array(items) => {
            for item in items {
                flag(name, item, argv)?;
            }
        }
        Value::Object(_) => {
            let json = value.to_plain_json().to_string();
            argv.push(Kv::String(format!("--{name}={json}")));
        }
        other => {
            let text = match other {
                Value::String(text) => text.clone(),
                Value::Int(i) => i.to_string(),
                Value::Float(f) => f.to_string(),
                _ => return Err(format!("the argument {name} has no text form")),
            };
            if dashes == "-" {
                argv.push(Kv::String(format!("-{name}")));
                argv.push(Kv::String(text));
            } else {
                argv.push(Kv::String(format!("--{name}={text}")));
            }
        }
    }
    Ok(())
}

/// A tool's parameters as a JSON schema.
pub fn json_schema(schema: &ToolSchema) -> Json {
    let property = |param: &ParamSchema| {
        let kind = match param.param_type.as_str() {
            "int" => "integer",
            "float" => "number",
            "bool" | "boolean" => "boolean",
            "array" => "array",
            "object" => "object",
            _ => "string",
        };
        let mut property = json!({ "type": kind });
        if param.repeatable {
            property = json!({ "type": "array", "items": property });
        }
        if !param.description.is_empty() {
            property["description"] = param.description.clone().into();
        }
        if let Some(default) = &param.default {
            property["default"] = values::from_kaish(default).to_plain_json();
        }
        if param.positional {
            property["x-positional"] = true.into();
        }
        property
    };
    let properties: serde_json::Map<String, Json> =
        schema.params.iter().map(|param| (param.name.clone(), property(param))).collect();
    let required: Vec<&str> = schema.params.iter().filter(|p| p.required).map(|p| p.name.as_str()).collect();
    json!({ "type": "object", "properties": properties, "required": required })
}

/// kaish's structured output for clients.
pub fn output_data(output: &KaishOutput) -> OutputData {
    OutputData {
        headers: output.headers.clone().unwrap_or_default(),
        root: output.root.iter().map(output_node).collect(),
    }
}

fn output_node(node: &KaishNode) -> OutputNode {
    use kaish_kernel::interpreter::EntryType;
    let entry_type = match node.entry_type {
        EntryType::File => "file",
        EntryType::Directory => "directory",
        EntryType::Executable => "executable",
        EntryType::Symlink => "symlink",
        _ => "text",
    };
    OutputNode {
        name: node.name.clone(),
        entry_type: entry_type.into(),
        text: node.text.clone().unwrap_or_default(),
        cells: node.cells.clone(),
        children: node.children.iter().map(output_node).collect(),
    }
}
