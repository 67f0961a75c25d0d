//! Credentials that a dump of a PostgreSQL database would hold.
//!
//! Options of foreign data are all that a dump holds of other servers: subscriptions are left out, and settings of roles
//! and databases are in no dump. Texts that users wrote themselves (rows, functions, comments) are content.

use serde::Deserialize;

use crate::core::error::{Error, Result};

/// Options whose name says that they hold a secret. The others with such a name are files, and settings of postgres_fdw.
const SECRET: &str = "(option_name ~* 'pass|pwd|secret|token|credential|(api|access|private|client|server)_?key' \
    AND option_name NOT IN ('passfile', 'password_required', 'use_scram_passthrough') \
    OR option_value ~* '://[^/@[:space:]]*:[^/@[:space:]]+@|(password|passwd|pwd)[[:space:]]*=') AND option_value <> ''";
/// Options that an error names, at most.
const NAMED: usize = 4;
/// Characters of each.
const NAMED_CHARS: usize = 200;

/// What begins a pin.
#[derive(Debug, Deserialize)]
pub(super) struct Begun {
    /// The name of the exported snapshot.
    pub snapshot: String,
    /// The options in it that hold a secret.
    credentials: Vec<String>,
}

/// Exports a snapshot, and lists the options in it that hold a secret: one statement has one snapshot. The role sees the
/// options that `pg_dump` would write for it.
pub(super) fn export() -> String {
    let listed = [
        (
            "format('%s of the user mapping of role %s for server %s', option_name, usename, srvname)",
            "pg_user_mappings, pg_options_to_table(umoptions)",
        ),
        ("format('%s of server %s', option_name, srvname)", "pg_foreign_server, pg_options_to_table(srvoptions)"),
        (
            "format('%s of foreign-data wrapper %s', option_name, fdwname)",
            "pg_foreign_data_wrapper, pg_options_to_table(fdwoptions)",
        ),
        (
            "format('%s of foreign table %s', option_name, ftrelid::regclass)",
            "pg_foreign_table, pg_options_to_table(ftoptions)",
        ),
        (
            "format('%s of column %s of %s', option_name, attname, attrelid::regclass)",
            "pg_attribute, pg_options_to_table(attfdwoptions)",
        ),
    ]
    .map(|(shown, from)| format!("SELECT {shown} AS found FROM {from} WHERE {SECRET}"))
    .join(" UNION ALL ");
    format!(
        "SELECT json_build_object('snapshot', pg_export_snapshot(), 'credentials', \
         (SELECT coalesce(json_agg(left(found, {NAMED_CHARS})), '[]') FROM ({listed} LIMIT {}) AS options));\n",
        NAMED + 1
    )
}

impl Begun {
    /// Reads the answer of [`export`].
    ///
    /// # Errors
    /// `refused` (`credentials`) if a dump would hold secrets of `database`.
    pub fn parse(answer: &str, database: &str) -> Result<Begun> {
        let begun: Begun = serde_json::from_str(answer)
            .map_err(|error| Error::unavailable(format!("the server's answer is malformed: {error}")))?;
        if begun.credentials.is_empty() {
            return Ok(begun);
        }
        let named: Vec<&str> = begun.credentials.iter().take(NAMED).map(String::as_str).collect();
        let more = if begun.credentials.len() > NAMED { ", and more" } else { "" };
        let named = named.join(", ").replace(char::is_control, "?");
        Err(Error::refused(format!("a dump of database {database} would hold credentials: option {named}{more}"))
            .reason("credentials")
            .hint(
                "drop these options (`ALTER USER MAPPING … OPTIONS (DROP password)`) and give the server's own user a \
                 password file (option `passfile`), or freeze with a role that cannot see them",
            ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_named() {
        let begun = Begun::parse(r#"{"snapshot": "0-1", "credentials": []}"#, "shop").expect("it holds none");
        assert_eq!(begun.snapshot, "0-1");
        let many = r#"{"snapshot": "0-1", "credentials": ["a of server x\n", "b", "c", "d", "e"]}"#;
        let error = Begun::parse(many, "shop").expect_err("it holds some");
        assert_eq!(error.reason, "credentials");
        assert!(error.message.ends_with("option a of server x?, b, c, d, and more"), "{}", error.message);
    }
}
