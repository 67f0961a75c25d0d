//! Public keys: those of this host, and those that users trust.

use rusqlite::params;

use super::error::CatalogError;
use super::handle::{CatalogHandle, Notes, Written};
use super::row::{bytes, signed};
use super::thread::Pending;
use crate::core::ids::PublicKey;
use crate::core::limits;
use crate::core::signature::{KnownKey, Standing};

impl CatalogHandle {
    /// The public keys that this host had, the newest first.
    ///
    /// # Errors
    /// Database errors.
    pub fn host_keys(&self) -> Pending<Vec<(PublicKey, i64)>> {
        self.read(|db| {
            db.sql("list host keys", |c| {
                c.prepare_cached("SELECT key, at_ms FROM host_keys ORDER BY at_ms DESC, key")?
                    .query_map([], |row| Ok((PublicKey::from_bytes(bytes(row, 0)?), row.get(1)?)))?
                    .collect()
            })
        })
    }

    /// Records a key of this host.
    ///
    /// # Errors
    /// Database errors.
    pub fn add_host_key(&self, key: PublicKey, at_ms: i64, notes: Notes) -> Pending<Written<()>> {
        self.write("catalog.host.key", move |db| {
            db.sql("record host key", |c| {
                c.execute("INSERT INTO host_keys (key, at_ms) VALUES (?, ?)", params![key.as_bytes(), at_ms])
            })?;
            notes.write(db, ())
        })
    }

    /// The keys that a user trusts, by name.
    ///
    /// # Errors
    /// Database errors.
    pub fn trusted_keys(&self, uid: u32) -> Pending<Vec<KnownKey>> {
        self.read(move |db| {
            db.sql("list trusted keys", |c| {
                c.prepare_cached("SELECT name, key, at_ms FROM trusted_keys WHERE uid = ? ORDER BY name")?
                    .query_map([uid], |row| {
                        Ok(KnownKey {
                            key: PublicKey::from_bytes(bytes(row, 1)?),
                            name: row.get(0)?,
                            standing: Standing::Trusted,
                            at_ms: row.get(2)?,
                        })
                    })?
                    .collect()
            })
        })
    }

    /// Trusts a key.
    ///
    /// # Errors
    /// `Exists` if the name or the key is there; `Limit` beyond [`limits::TRUSTED_KEYS`].
    pub fn add_trusted_key(&self, uid: u32, key: KnownKey, notes: Notes) -> Pending<Written<()>> {
        self.write("catalog.trust.add", move |db| {
            let (count, name, same): (i64, bool, Option<String>) = db.sql("count trusted keys", |c| {
                c.query_row(
                    "SELECT count(*), coalesce(max(name = ?2), 0), max(iif(key = ?3, name, NULL))
                     FROM trusted_keys WHERE uid = ?1",
                    params![uid, key.name, key.key.as_bytes()],
                    |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
                )
            })?;
            if let Some(other) = same {
                return Err(CatalogError::Exists(format!("this key, as {other}")));
            }
            if name {
                return Err(CatalogError::Exists(format!("a trusted key {}", key.name)));
            }
            if count >= signed(limits::TRUSTED_KEYS) {
                return Err(CatalogError::Limit { what: "the number of trusted keys", most: limits::TRUSTED_KEYS });
            }
            db.sql("trust key", |c| {
                c.execute(
                    "INSERT INTO trusted_keys (uid, name, key, at_ms) VALUES (?, ?, ?, ?)",
                    params![uid, key.name, key.key.as_bytes(), key.at_ms],
                )
            })?;
            notes.write(db, ())
        })
    }

    /// Trusts a key no longer; returns whether it was trusted.
    ///
    /// # Errors
    /// Database errors.
    pub fn remove_trusted_key(&self, uid: u32, name: String, notes: Notes) -> Pending<Written<bool>> {
        self.write("catalog.trust.remove", move |db| {
            let gone = db.sql("distrust key", |c| {
                c.execute("DELETE FROM trusted_keys WHERE uid = ? AND name = ?", params![uid, name])
            })?;
            notes.write(db, gone > 0)
        })
    }
}
