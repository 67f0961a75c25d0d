//! How a PostgreSQL database is reached: without a password.

use crate::core::limits;

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
