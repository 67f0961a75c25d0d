//! Parameters of tools: one table for their JSON schema and for reading them.

use rmcp::model::JsonObject;
use serde_json::{Value, json};

use crate::core::error::{Error, Result};

/// The type of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A string.
    Text,
    /// A number of at least zero.
    Number,
    /// A boolean.
    Flag,
}

impl Kind {
    /// The type's name in JSON schema.
    const fn name(self) -> &'static str {
        match self {
            Kind::Text => "string",
            Kind::Number => "number",
            Kind::Flag => "boolean",
        }
    }
}

/// A parameter of a tool.
#[derive(Debug)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Whether it must be there.
    pub is_required: bool,
    /// What it means.
    pub about: &'static str,
}

/// A required text.
pub const fn text(name: &'static str, about: &'static str) -> Parameter {
    Parameter { name, kind: Kind::Text, is_required: true, about }
}

/// An optional parameter.
pub const fn optional(name: &'static str, kind: Kind, about: &'static str) -> Parameter {
    Parameter { name, kind, is_required: false, about }
}

/// The JSON schema of these parameters.
pub fn schema(parameters: &[Parameter]) -> JsonObject {
    let property = |parameter: &Parameter| {
        (parameter.name.to_owned(), json!({ "type": parameter.kind.name(), "description": parameter.about }))
    };
    let required: Vec<&str> = parameters.iter().filter(|p| p.is_required).map(|p| p.name).collect();
    let mut schema = JsonObject::new();
    schema.insert("type".into(), "object".into());
    schema.insert("properties".into(), Value::Object(parameters.iter().map(property).collect()));
    schema.insert("required".into(), json!(required));
    schema.insert("additionalProperties".into(), false.into());
    schema
}

/// The checked arguments of one call.
#[derive(Debug)]
pub struct Arguments(JsonObject);

impl Arguments {
    /// Checks arguments against a tool's parameters.
    ///
    /// # Errors
    /// `invalidArgument` for a missing, unknown or mistyped one.
    pub fn check(parameters: &[Parameter], given: JsonObject) -> Result<Arguments> {
        for (name, value) in &given {
            let Some(parameter) = parameters.iter().find(|parameter| parameter.name == name) else {
                let names: Vec<&str> = parameters.iter().map(|parameter| parameter.name).collect();
                let name: String = name.chars().take(40).collect();
                return Err(Error::invalid(format!("there is no parameter {name:?}"))
                    .hint(format!("the parameters are {}", names.join(", "))));
            };
            let fits = match parameter.kind {
                Kind::Text => value.is_string(),
                Kind::Number => value.as_f64().is_some_and(|number| number >= 0.0),
                Kind::Flag => value.is_boolean(),
            };
            if !fits && !value.is_null() {
                return Err(Error::invalid(format!("parameter {name}: expected a {}", parameter.kind.name())));
            }
        }
        let missing =
            |parameter: &&Parameter| parameter.is_required && given.get(parameter.name).is_none_or(Value::is_null);
        match parameters.iter().find(missing) {
            Some(parameter) => Err(Error::invalid(format!("parameter {} is missing", parameter.name))),
            None => Ok(Arguments(given)),
        }
    }

    /// A text; empty if it is not there.
    pub fn text(&self, name: &str) -> &str {
        self.0.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    /// A number, if it is there.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.0.get(name).and_then(Value::as_f64)
    }

    /// A whole number, if it is there.
    pub fn whole(&self, name: &str) -> Option<u64> {
        // A float beyond the range saturates.
        self.number(name).map(|number| number as u64)
    }

    /// A boolean; false if it is not there.
    pub fn flag(&self, name: &str) -> bool {
        self.0.get(name).and_then(Value::as_bool).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_checked() {
        let parameters = [text("kernel", "a"), optional("count", Kind::Number, "b"), optional("all", Kind::Flag, "c")];
        let check = |given: Value| {
            let given = given.as_object().expect("an object").clone();
            Arguments::check(&parameters, given)
        };
        let good = check(json!({ "kernel": "demo", "count": 3, "all": null })).expect("they fit");
        assert_eq!((good.text("kernel"), good.whole("count"), good.flag("all")), ("demo", Some(3), false));
        for (bad, said) in [
            (json!({}), "kernel is missing"),
            (json!({ "kernel": null }), "kernel is missing"),
            (json!({ "kernel": 1 }), "expected a string"),
            (json!({ "kernel": "k", "count": -1 }), "expected a number"),
            (json!({ "kernel": "k", "other": 1 }), "no parameter \"other\""),
        ] {
            assert!(check(bad.clone()).expect_err("refused").message.contains(said), "{bad}");
        }
        assert_eq!(schema(&parameters)["required"], json!(["kernel"]));
    }
}
