//! A snapshot of an engine's state as one byte string.
//!
//! ```text
//!  "RYKS"  version u8
//!  engine  text              engine's version  text
//!  count   u32               entries, keys strictly ascending:  key text, meta text (one JSON object), body u64 + bytes
//!  count   u32               missed:  key text, type text, reason text
//!  BLAKE3 of all before, 32 bytes
//! ```
//!
//! Numbers are little-endian; a text is a `u32` length and UTF-8. Each state has exactly one
//! encoding, and any other byte string is refused.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json};

use super::error::Error;
use super::limits;
use super::missed::MissedEntry;

/// First bytes of a snapshot.
pub const MAGIC: [u8; 4] = *b"RYKS";
/// Version of the format.
pub const VERSION: u8 = 1;

const HASH_BYTES: usize = 32;
/// Maximum length of one entry's meta, bytes of JSON.
const META_BYTES: usize = 64 << 10;
/// Maximum length of other texts, bytes.
const TEXT_BYTES: usize = limits::PATH_BYTES;

/// An engine's state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EngineState {
    /// The engine's name.
    pub engine: String,
    /// The engine's version.
    pub version: String,
    /// The entries by key.
    pub entries: BTreeMap<String, StateEntry>,
    /// Parts that the state does not hold.
    pub missed: Vec<MissedEntry>,
}

/// One entry.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StateEntry {
    /// Displayed properties, and other data of the engine.
    pub meta: Map<String, Json>,
    /// The engine's own encoding.
    pub body: Vec<u8>,
}

/// Why a state cannot be encoded or decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The bytes are not a snapshot.
    #[error("these bytes are no snapshot of an engine's state")]
    Magic,
    /// The format has another version.
    #[error("snapshot format version {0} is unknown; this is version {VERSION}")]
    Version(u8),
    /// The checksum does not match.
    #[error("the snapshot's checksum is wrong")]
    Checksum,
    /// The content violates the format.
    #[error("the snapshot is malformed: {0}")]
    Malformed(&'static str),
    /// A limit of the format is exceeded.
    #[error("{what} is beyond the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The snapshot is of another engine.
    #[error("this is a snapshot of the {found} engine, and the kernel runs {wanted}")]
    OtherEngine {
        /// Engine of the snapshot.
        found: String,
        /// Engine of the kernel.
        wanted: String,
    },
}

impl From<StateError> for Error {
    fn from(error: StateError) -> Self {
        match &error {
            StateError::OtherEngine { .. } => Error::refused(error.to_string()).reason("engine"),
            StateError::Magic | StateError::Version(_) | StateError::TooLarge { .. } => {
                Error::invalid(error.to_string())
            }
            StateError::Checksum | StateError::Malformed(_) => Error::corrupt(error.to_string()),
        }
    }
}

impl EngineState {
    /// Encodes the state.
    ///
    /// # Errors
    /// [`StateError::TooLarge`], so that every encoded state can be decoded.
    pub fn pack(&self) -> Result<Vec<u8>, StateError> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.push(VERSION);
        put_text(&mut out, "engine name", &self.engine, TEXT_BYTES)?;
        put_text(&mut out, "engine version", &self.version, TEXT_BYTES)?;
        put_count(&mut out, "number of entries", self.entries.len())?;
        for (key, entry) in &self.entries {
            put_text(&mut out, "key", key, TEXT_BYTES)?;
            let meta =
                serde_json::to_string(&entry.meta).map_err(|_| StateError::Malformed("meta has no JSON form"))?;
            put_text(&mut out, "meta", &meta, META_BYTES)?;
            out.extend((entry.body.len() as u64).to_le_bytes());
            out.extend(&entry.body);
        }
        put_count(&mut out, "number of missed entries", self.missed.len())?;
        for missed in &self.missed {
            put_text(&mut out, "key", &missed.key, TEXT_BYTES)?;
            put_text(&mut out, "type", &missed.type_name, TEXT_BYTES)?;
            put_text(&mut out, "reason", &missed.reason, TEXT_BYTES)?;
        }
        let hash = blake3::hash(&out);
        out.extend(hash.as_bytes());
        Ok(out)
    }

    /// Decodes a state of `engine`.
    ///
    /// # Errors
    /// See [`StateError`]; every changed byte is detected.
    pub fn unpack_of(bytes: &[u8], engine: &str) -> Result<EngineState, StateError> {
        let state = EngineState::unpack(bytes)?;
        if state.engine != engine {
            return Err(StateError::OtherEngine { found: state.engine, wanted: engine.to_owned() });
        }
        Ok(state)
    }

    /// Decodes a state of any engine.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn unpack(bytes: &[u8]) -> Result<EngineState, StateError> {
        let after_magic = bytes.strip_prefix(&MAGIC).ok_or(StateError::Magic)?;
        match after_magic.first() {
            Some(&VERSION) => {}
            Some(&other) => return Err(StateError::Version(other)),
            None => return Err(StateError::Magic),
        }
        let (content, hash) = bytes
            .len()
            .checked_sub(HASH_BYTES)
            .and_then(|at| bytes.split_at_checked(at))
            .ok_or(StateError::Malformed("it is too short"))?;
        if blake3::hash(content).as_bytes().as_slice() != hash {
            return Err(StateError::Checksum);
        }
        let rest = content.get(MAGIC.len() + 1..).ok_or(StateError::Malformed("it is too short"))?;
        let mut reader = Reader { rest };
        let mut state = EngineState {
            engine: reader.text("engine name", TEXT_BYTES)?,
            version: reader.text("engine version", TEXT_BYTES)?,
            ..EngineState::default()
        };
        for _ in 0..reader.count("number of entries")? {
            let key = reader.text("key", TEXT_BYTES)?;
            let meta = reader.text("meta", META_BYTES)?;
            let meta: Map<String, Json> =
                serde_json::from_str(&meta).map_err(|_| StateError::Malformed("meta is no JSON object"))?;
            let body = reader.body()?;
            if state.entries.last_key_value().is_some_and(|(last, _)| *last >= key) {
                return Err(StateError::Malformed("keys are not ascending"));
            }
            state.entries.insert(key, StateEntry { meta, body });
        }
        for _ in 0..reader.count("number of missed entries")? {
            state.missed.push(MissedEntry {
                key: reader.text("key", TEXT_BYTES)?,
                type_name: reader.text("type", TEXT_BYTES)?,
                reason: reader.text("reason", TEXT_BYTES)?,
            });
        }
        if reader.rest.is_empty() { Ok(state) } else { Err(StateError::Malformed("it goes on after its end")) }
    }
}

fn put_text(out: &mut Vec<u8>, what: &'static str, text: &str, limit: usize) -> Result<(), StateError> {
    if text.len() > limit {
        return Err(StateError::TooLarge { what, limit });
    }
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
    Ok(())
}

fn put_count(out: &mut Vec<u8>, what: &'static str, count: usize) -> Result<(), StateError> {
    if count > limits::STATE_ENTRIES {
        return Err(StateError::TooLarge { what, limit: limits::STATE_ENTRIES });
    }
    out.extend((count as u32).to_le_bytes());
    Ok(())
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], StateError> {
        let (head, tail) = self.rest.split_at_checked(n).ok_or(StateError::Malformed("it ends too early"))?;
        self.rest = tail;
        Ok(head)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], StateError> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    fn text(&mut self, what: &'static str, limit: usize) -> Result<String, StateError> {
        let n = u32::from_le_bytes(self.number()?) as usize;
        if n > limit {
            return Err(StateError::TooLarge { what, limit });
        }
        String::from_utf8(self.take(n)?.to_vec()).map_err(|_| StateError::Malformed("text is not UTF-8"))
    }

    fn count(&mut self, what: &'static str) -> Result<usize, StateError> {
        let n = u32::from_le_bytes(self.number()?) as usize;
        if n > limits::STATE_ENTRIES {
            return Err(StateError::TooLarge { what, limit: limits::STATE_ENTRIES });
        }
        Ok(n)
    }

    fn body(&mut self) -> Result<Vec<u8>, StateError> {
        let n = usize::try_from(u64::from_le_bytes(self.number()?))
            .map_err(|_| StateError::Malformed("a body's length is beyond this machine"))?;
        Ok(self.take(n)?.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_state() -> impl Strategy<Value = EngineState> {
        let meta = (".{0,10}", ".{0,30}").prop_map(|(kind, summary)| {
            Map::from_iter([("type".to_owned(), Json::from(kind)), ("summary".to_owned(), Json::from(summary))])
        });
        let entry =
            (meta, prop::collection::vec(any::<u8>(), 0..100)).prop_map(|(meta, body)| StateEntry { meta, body });
        let missed =
            (".{0,9}", ".{0,9}", ".{0,9}").prop_map(|(key, type_name, reason)| MissedEntry { key, type_name, reason });
        (
            "[a-z]{1,8}",
            "[0-9.]{1,8}",
            prop::collection::btree_map("(var|fn)/.{0,12}", entry, 0..8),
            prop::collection::vec(missed, 0..4),
        )
            .prop_map(|(engine, version, entries, missed)| EngineState { engine, version, entries, missed })
    }

    proptest! {
        #[test]
        fn engine_state_round_trips(state in any_state()) {
            let bytes = state.pack().map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(EngineState::unpack(&bytes), Ok(state.clone()));
            let other = EngineState::unpack_of(&bytes, "other engine");
            prop_assert!(matches!(other, Err(StateError::OtherEngine { found: _, wanted: _ })), "{:?}", other);
            prop_assert_eq!(EngineState::unpack_of(&bytes, &state.engine), Ok(state));
        }

        #[test]
        fn altered_state_is_refused(state in any_state(), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let mut bytes = state.pack().map_err(|e| TestCaseError::fail(e.to_string()))?;
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert!(EngineState::unpack(&bytes).is_err());
            bytes[at] ^= flip;
            prop_assert!(EngineState::unpack(&bytes[..at]).is_err());
            bytes.push(flip);
            prop_assert!(EngineState::unpack(&bytes).is_err());
        }

        /// Invalid content with a correct checksum is refused, without a panic and without memory
        /// beyond its own size.
        #[test]
        fn checksummed_garbage_is_refused(garbage in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = MAGIC.to_vec();
            bytes.push(VERSION);
            bytes.extend(garbage);
            let hash = blake3::hash(&bytes);
            bytes.extend(hash.as_bytes());
            if let Ok(state) = EngineState::unpack(&bytes) {
                prop_assert!(state.entries.len() < 200);
            }
        }
    }

    #[test]
    fn state_errors_are_distinct() {
        assert_eq!(EngineState::unpack(b""), Err(StateError::Magic));
        assert_eq!(EngineState::unpack(b"PK\x03\x04...."), Err(StateError::Magic));
        assert_eq!(EngineState::unpack(b"RYKS"), Err(StateError::Magic));
        assert_eq!(EngineState::unpack(b"RYKS\x09"), Err(StateError::Version(9)));
        assert!(matches!(EngineState::unpack(b"RYKS\x01"), Err(StateError::Malformed(_))));
        let mut bytes = EngineState::default().pack().expect("small");
        bytes[6] ^= 1;
        assert_eq!(EngineState::unpack(&bytes), Err(StateError::Checksum));
    }

    #[test]
    fn oversized_state_is_not_packed() {
        let mut state = EngineState::default();
        state.entries.insert("k".repeat(TEXT_BYTES + 1), StateEntry::default());
        assert!(matches!(state.pack(), Err(StateError::TooLarge { .. })));
    }
}
