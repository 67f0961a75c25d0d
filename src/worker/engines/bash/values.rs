//! Conversion between clients' values and bash: variables as values, values as commands, and a
//! call's words.

use super::printed::{Content, Variable};
use super::restore;
use crate::core::value::Value;

/// A variable as a value; invalid UTF-8 becomes bytes.
pub fn of(variable: &Variable) -> Value {
    match &variable.content {
        Content::Unset if variable.is('a') => Value::Array(Vec::new()),
        Content::Unset if variable.is('A') => Value::Object(Vec::new()),
        Content::Unset => Value::Null,
        Content::Scalar(bytes) => {
            let whole = variable.is('i').then(|| std::str::from_utf8(bytes).ok()?.parse().ok()).flatten();
            whole.map_or_else(|| text(bytes), Value::Int)
        }
        Content::Indexed(elements) => {
            let dense = elements.iter().enumerate().all(|(place, (index, _))| place as u64 == *index);
            if dense {
                Value::Array(elements.iter().map(|(_, bytes)| text(bytes)).collect())
            } else {
                Value::Object(elements.iter().map(|(index, bytes)| (index.to_string(), text(bytes))).collect())
            }
        }
        Content::Associative(elements) => Value::Object(
            elements.iter().map(|(name, bytes)| (String::from_utf8_lossy(name).into_owned(), text(bytes))).collect(),
        ),
    }
}

fn text(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => Value::String(text.to_owned()),
        Err(_) => Value::Bytes(bytes.to_vec()),
    }
}

/// Commands that set a variable to a value; `present`: its current variable.
///
/// # Errors
/// The part that bash cannot represent.
pub fn variable(name: &str, value: &Value, present: Option<&Variable>) -> Result<Variable, String> {
    if !restore::is_name(name) {
        return Err(format!("{:?} cannot name a variable", super::entries::one_line(name.as_bytes())));
    }
    if name.starts_with(super::snapshot::RESERVED) {
        return Err(format!("names that begin with {} are reserved", super::snapshot::RESERVED));
    }
    if present.is_some_and(|present| present.is('r')) {
        return Err(format!("{name} is readonly"));
    }
    let (mut attributes, content) = match value {
        Value::Null => (String::new(), Content::Unset),
        Value::Int(_) => (String::from("i"), Content::Scalar(scalar(value)?)),
        Value::Array(items) => {
            let items = items.iter().map(scalar).collect::<Result<Vec<_>, _>>()?;
            (String::from("a"), Content::Indexed((0..).zip(items).collect()))
        }
        Value::Object(fields) => {
            let field = |(name, value): &(String, Value)| match name.as_str() {
                "" => Err("bash has no empty names in its arrays".to_owned()),
                name if name.contains('\0') => Err("bash cannot hold a zero byte".to_owned()),
                name => Ok((name.as_bytes().to_vec(), scalar(value)?)),
            };
            let fields = fields.iter().map(field).collect::<Result<Vec<_>, String>>()?;
            (String::from("A"), Content::Associative(fields))
        }
        other => (String::new(), Content::Scalar(scalar(other)?)),
    };
    if present.is_some_and(|present| present.is('x')) {
        attributes.push('x');
    }
    Ok(Variable { name: name.to_owned(), attributes, content })
}

fn scalar(value: &Value) -> Result<Vec<u8>, String> {
    let bytes = match value {
        Value::Null => Vec::new(),
        Value::Bool(truth) => truth.to_string().into_bytes(),
        Value::Int(whole) => whole.to_string().into_bytes(),
        Value::BigInt(digits) => digits.clone().into_bytes(),
        Value::Float(float) => float.to_string().into_bytes(),
        Value::String(text) => text.clone().into_bytes(),
        Value::Bytes(bytes) => bytes.clone(),
        Value::Array(_) | Value::Object(_) => return Err("bash has no arrays in arrays".into()),
        Value::Blob(_) => return Err("bash has no blob values; read the blob's bytes into the variable".into()),
        Value::Opaque { type_name, .. } => return Err(format!("an opaque {type_name} cannot become a bash value")),
    };
    if bytes.contains(&0) { Err("bash cannot hold a zero byte".into()) } else { Ok(bytes) }
}

/// A call's arguments as words: positional ones unchanged, named ones as options.
///
/// # Errors
/// If they are neither, or contain a value without a word form.
pub fn words(args: &Value) -> Result<Vec<Vec<u8>>, String> {
    match args {
        Value::Null => Ok(Vec::new()),
        Value::Array(items) => items.iter().map(word).collect(),
        Value::Object(fields) => {
            let mut words = Vec::new();
            for (name, value) in fields {
                option(name, value, &mut words)?;
            }
            Ok(words)
        }
        _ => Err("arguments are an object (named) or an array (positional)".into()),
    }
}

fn word(value: &Value) -> Result<Vec<u8>, String> {
    match value {
        Value::Array(_) | Value::Object(_) => Ok(value.to_plain_json().to_string().into_bytes()),
        other => scalar(other),
    }
}

fn option(name: &str, value: &Value, words: &mut Vec<Vec<u8>>) -> Result<(), String> {
    if name.is_empty() || name.starts_with('-') || name.contains(['=', '\0']) {
        return Err(format!("{:?} cannot be the name of an argument", super::entries::one_line(name.as_bytes())));
    }
    let dashes = if name.chars().count() == 1 { "-" } else { "--" };
    match value {
        Value::Null | Value::Bool(false) => {}
        Value::Bool(true) => words.push(format!("{dashes}{name}").into_bytes()),
        Value::Array(items) => items.iter().try_for_each(|item| option(name, item, words))?,
        other if dashes == "-" => words.extend([format!("-{name}").into_bytes(), word(other)?]),
        other => words.push([format!("--{name}=").into_bytes(), word(other)?].concat()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_bash_values_fail() {
        let nested = Value::Array(vec![Value::Array(vec![])]);
        for (name, value) in
            [("x", nested), ("1x", Value::Null), ("x", Value::String("a\0".into())), ("__ryokan_x", Value::Null)]
        {
            assert!(variable(name, &value, None).is_err(), "{name} {value:?}");
        }
        let readonly = Variable { name: "x".into(), attributes: "r".into(), content: Content::Unset };
        assert!(variable("x", &Value::Null, Some(&readonly)).is_err());
    }

    #[test]
    fn named_arguments_are_options() {
        let args = Value::Object(vec![
            ("v".into(), Value::Bool(true)),
            ("n".into(), Value::Int(3)),
            ("name".into(), Value::String("a b".into())),
            ("tag".into(), Value::Array(vec![Value::String("x".into()), Value::String("y".into())])),
            ("off".into(), Value::Bool(false)),
        ]);
        let texts: Vec<String> =
            words(&args).expect("words").into_iter().map(|word| String::from_utf8(word).expect("text")).collect();
        assert_eq!(texts, ["-v", "-n", "3", "--name=a b", "--tag=x", "--tag=y"]);
        assert!(words(&Value::Int(1)).is_err());
    }
}
