//! How a PostgreSQL database is reached: without a password. And what a dump says about its tables.

use std::collections::BTreeMap;

use crate::core::limits;

/// Numbers of rows of tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rows {
    /// By the table's name, at most [`limits::TABLES_COMPARED`].
    pub rows: BTreeMap<String, u64>,
    /// Number of tables that were not counted.
    pub omitted: u64,
}

/// Counts the rows in the data of a dump, as `pg_restore --data-only` writes it. Keeps the beginning of one line only.
#[derive(Debug, Default)]
pub struct RowCounter {
    found: Rows,
    /// The beginning of the present line.
    line: Vec<u8>,
    /// The table whose rows follow, and their number so far.
    table: Option<(String, u64)>,
}

/// Bytes of a line that are looked at: more than `COPY` with the longest names of a schema and a table.
const LINE_BYTES: usize = 8 << 10;

impl RowCounter {
    /// Takes the next piece.
    pub fn take(&mut self, piece: &[u8]) {
        let mut lines = piece.split(|byte| *byte == b'\n');
        // The part behind the last line feed begins the next line.
        let rest = lines.next_back().unwrap_or_default();
        for part in lines {
            self.add(part);
            self.end_line();
        }
        self.add(rest);
    }

    fn add(&mut self, part: &[u8]) {
        let room = LINE_BYTES.saturating_sub(self.line.len());
        self.line.extend_from_slice(&part[..part.len().min(room)]);
    }

    fn end_line(&mut self) {
        match &mut self.table {
            Some(_) if self.line == b"\\." => {
                let (name, count) = self.table.take().unwrap_or_default();
                if self.found.rows.len() < limits::TABLES_COMPARED {
                    self.found.rows.insert(name, count);
                } else {
                    self.found.omitted += 1;
                }
            }
            Some((_, count)) => *count += 1,
            None => self.table = copied(&self.line).map(|name| (name, 0)),
        }
        self.line.clear();
    }

    /// What was counted.
    pub fn finish(self) -> Rows {
        self.found
    }
}

/// The table whose data follows a line, with its schema.
fn copied(line: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(line).ok()?;
    let name = text.strip_prefix("COPY ")?.strip_suffix(" FROM stdin;")?;
    // Behind it there are the columns, except of a table without any.
    Some(name.rsplit_once(" (").map_or(name, |(name, _)| name).to_owned())
}

/// A connection: the keys of libpq that name no secret.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connection {
    /// Directory of the server's socket, or its name; empty: the default.
    pub host: String,
    /// Empty: the default.
    pub port: String,
    /// The role; empty: the user's name.
    pub user: String,
    /// The database.
    pub database: String,
}

/// Text that is no usable connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectionError {
    /// A part is not `KEY=VALUE`.
    #[error("{0:?} is not KEY=VALUE")]
    Malformed(String),
    /// A key is not allowed.
    #[error("key {0:?} is not possible: only host, port, user and dbname")]
    Key(String),
    /// It has a password.
    #[error("a password is not taken: use a password file (PGPASSFILE) or peer authentication")]
    Password,
    /// A value has other characters.
    #[error("the value of {0} is empty, too long or has characters other than letters, digits and _ . / -")]
    Value(String),
    /// No database is named.
    #[error("dbname is missing")]
    NoDatabase,
}

impl std::str::FromStr for Connection {
    type Err = ConnectionError;

    fn from_str(text: &str) -> Result<Connection, ConnectionError> {
        let mut connection = Connection::default();
        for part in text.split_ascii_whitespace() {
            let short = || part.chars().take(40).collect::<String>();
            let (key, value) = part.split_once('=').ok_or_else(|| ConnectionError::Malformed(short()))?;
            let (place, most) = match key {
                "host" => (&mut connection.host, limits::POSTGRES_HOST_BYTES),
                "port" => (&mut connection.port, 5),
                "user" => (&mut connection.user, limits::POSTGRES_NAME_BYTES),
                "dbname" => (&mut connection.database, limits::POSTGRES_NAME_BYTES),
                "password" => return Err(ConnectionError::Password),
                other => return Err(ConnectionError::Key(other.chars().take(40).collect())),
            };
            let is_plain = |c: char| match key {
                "port" => c.is_ascii_digit(),
                "host" => c.is_ascii_alphanumeric() || "_./-".contains(c),
                _ => c.is_ascii_alphanumeric() || "_-".contains(c),
            };
            if value.is_empty() || value.len() > most || value.starts_with('-') || !value.chars().all(is_plain) {
                return Err(ConnectionError::Value(key.to_owned()));
            }
            value.clone_into(place);
        }
        if connection.database.is_empty() { Err(ConnectionError::NoDatabase) } else { Ok(connection) }
    }
}

impl std::fmt::Display for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "dbname={}", self.database)?;
        for (key, value) in [("host", &self.host), ("port", &self.port), ("user", &self.user)] {
            if !value.is_empty() {
                write!(f, " {key}={value}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_dumps_are_counted() {
        let dump = "SET x = 1;\n-- Data for Name: a\nCOPY public.a (id, b) FROM stdin;\n1\tx\n2\tCOPY public.c FROM stdin;\n\\.\n\n\
                    COPY public.\"odd (name\" (id) FROM stdin;\n\\.\nCOPY shop.none FROM stdin;\n\n\n\\.\nSELECT 1;\nCOPY cut (a) FROM stdin;\n1\n";
        let expected = [("public.\"odd (name\"", 0), ("public.a", 2), ("shop.none", 2)];
        for size in [1, 7, dump.len()] {
            let mut counter = RowCounter::default();
            dump.as_bytes().chunks(size).for_each(|piece| counter.take(piece));
            let found = counter.finish();
            let rows: Vec<(&str, u64)> = found.rows.iter().map(|(name, count)| (name.as_str(), *count)).collect();
            assert_eq!((rows.as_slice(), found.omitted), (&expected[..], 0), "{size}");
        }
        let mut counter = RowCounter::default();
        counter.take(b"COPY a (b) FROM stdin;\n");
        (0..100).for_each(|_| counter.take(&[b'x'; 1000]));
        assert!(counter.line.len() <= LINE_BYTES);
        counter.take(b"\n\\.\n");
        assert_eq!(counter.finish().rows, BTreeMap::from([("a".into(), 1)]));
    }

    #[test]
    fn connection_survives_display() {
        let text = "dbname=shop host=/run/postgresql port=5433 user=me";
        assert_eq!(text.parse::<Connection>().map(|one| one.to_string()), Ok(text.to_owned()));
        assert_eq!("dbname=shop".parse::<Connection>().map(|one| one.host), Ok(String::new()));
    }

    #[test]
    fn secrets_and_options_are_refused() {
        for (text, wrong) in [
            ("", ConnectionError::NoDatabase),
            ("shop", ConnectionError::Malformed("shop".into())),
            ("dbname=shop password=secret", ConnectionError::Password),
            ("dbname=shop options=-cfoo", ConnectionError::Key("options".into())),
            ("dbname=a\"b", ConnectionError::Value("dbname".into())),
            ("dbname=-x", ConnectionError::Value("dbname".into())),
            ("dbname=a port=5x", ConnectionError::Value("port".into())),
        ] {
            assert_eq!(text.parse::<Connection>(), Err(wrong), "{text}");
        }
        assert!(format!("dbname={}", "x".repeat(49)).parse::<Connection>().is_err());
    }
}
