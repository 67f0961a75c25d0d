//! Numbers of rows in PostgreSQL databases: of a dump by reading it, of the present one by asking the server.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use super::postgres::PostgresSource;
use crate::core::error::{Error, Result};
use crate::core::freeze::postgres::{ConnectionError, RowCounter, Rows};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::programs::{Output, Program, Sink};
use crate::supervisor::freeze::{access, objects};
use crate::supervisor::host::Host;

/// Lists the ordinary tables that a dump has the rows of, as the server quotes their names.
const TABLES: &str = "SELECT coalesce(json_agg(format('%I.%I', nspname, relname) ORDER BY 1), '[]') \
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace \
    WHERE relkind = 'r' AND relpersistence <> 't' AND nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') \
    AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = c.oid AND deptype = 'e')";

#[derive(Debug, Default)]
struct Counting(RefCell<RowCounter>);

impl Sink for Counting {
    fn take(&self, piece: &[u8]) {
        self.0.borrow_mut().take(piece);
    }
}

/// The numbers of rows in a dump; `None`: there was no database.
///
/// # Errors
/// Store errors, and errors of `pg_restore`.
pub(in crate::supervisor::freeze) async fn postgres_rows_of(
    host: &Rc<Host>,
    image: Option<Digest>,
    scratch: &Path,
) -> Result<Rows> {
    let Some(image) = image else { return Ok(Rows::default()) };
    let file = scratch.join("dump");
    objects::get(host, image, &file).await?;
    let argv = ["pg_restore", "--data-only", "-f", "-", &file.display().to_string()].map(str::to_owned);
    let counting = Counting::default();
    let program = Program {
        argv: &argv,
        kept: &[],
        env: &[("LC_ALL", "C")],
        input: None,
        output: Output::Sink(&counting),
        timeout: host.config.limits.freeze_store,
        user: None,
    };
    access::programs(host).await?.run(&program).await?;
    Ok(counting.0.into_inner().finish())
}

/// The numbers of rows in the present database, at one moment.
///
/// # Errors
/// Errors of the server's programs.
pub(in crate::supervisor::freeze) async fn postgres_rows_now(
    host: &Rc<Host>,
    connection: &str,
    scratch: &Path,
) -> Result<Rows> {
    let wrong = |error: ConnectionError| Error::corrupt(error.to_string());
    let source = PostgresSource::new(Rc::clone(host), connection.parse().map_err(wrong)?, scratch.to_owned());
    let Some(database) = source.present_name().await? else { return Ok(Rows::default()) };
    let malformed = |what: String| Error::unavailable(format!("the server's answer is malformed: {what}"));
    let ask = async |args: &[&str]| {
        let args = [&["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"], args].concat();
        source.run("psql", &database, &args, Output::Bytes(limits::POSTGRES_NAMES_BYTES)).await
    };
    let listed = ask(&["-c", TABLES]).await?;
    let mut tables: Vec<String> = serde_json::from_slice(&listed).map_err(|error| malformed(error.to_string()))?;
    // psql reads the script by lines.
    tables.retain(|table| !table.chars().any(char::is_control));
    let omitted = tables.len().saturating_sub(limits::TABLES_COMPARED) as u64;
    tables.truncate(limits::TABLES_COMPARED);
    let mut script = String::from("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;\n");
    tables.iter().for_each(|table| script.push_str(&format!("SELECT count(*) FROM {table};\n")));
    script.push_str("COMMIT;\n");
    let file = scratch.join("rows.sql");
    std::fs::write(&file, script).map_err(|error| Error::unavailable(format!("{}: {error}", file.display())))?;
    let counted = String::from_utf8_lossy(&ask(&["-f", &file.display().to_string()]).await?).into_owned();
    let counts = counted.split_ascii_whitespace().map(str::parse::<u64>);
    let counts: Vec<u64> =
        counts.collect::<std::result::Result<_, _>>().map_err(|error| malformed(error.to_string()))?;
    match counts.len() == tables.len() {
        true => Ok(Rows { rows: tables.into_iter().zip(counts).collect(), omitted }),
        false => Err(malformed(format!("{} numbers of {} tables", counts.len(), tables.len()))),
    }
}
