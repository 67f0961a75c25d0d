//! Jupyter's messages (protocol 5.3): signed frames of JSON.

use std::time::SystemTime;

use ring::hmac;
use serde_json::{Value as Json, json};

use super::zmtp::Frames;

/// Separates the addresses of a message from its parts.
const DELIMITER: &[u8] = b"<IDS|MSG>";
/// The version of the protocol.
pub const PROTOCOL: &str = "5.3";

/// A message of a front end.
#[derive(Debug)]
pub struct Message {
    /// Returned in the reply, before its parts.
    pub addresses: Frames,
    /// Its header, the parent of everything that answers it.
    pub header: Json,
    /// Its content.
    pub content: Json,
}

impl Message {
    /// Its type.
    pub fn kind(&self) -> &str {
        self.header["msg_type"].as_str().unwrap_or_default()
    }

    /// Its id.
    pub fn id(&self) -> &str {
        self.header["msg_id"].as_str().unwrap_or_default()
    }
}

/// Signs and verifies messages of one connection.
pub struct Signer {
    key: hmac::Key,
    session: String,
}

fn random_id() -> String {
    let mut bytes = [0; 16];
    // Ids need not be secret: without randomness they are equal, and only answers are harder to tell apart.
    let _ = getrandom::fill(&mut bytes);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Signer {
    /// Signs with the key of a connection file.
    pub fn new(key: &str) -> Signer {
        Signer { key: hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()), session: random_id() }
    }

    /// Reads a message; `None` if it is malformed or its signature is wrong.
    pub fn read(&self, frames: Frames) -> Option<Message> {
        let at = frames.iter().position(|frame| frame == DELIMITER)?;
        let [signature, header, parent, metadata, content, ..] = &frames[at + 1..] else { return None };
        let mut signed = header.clone();
        [parent, metadata, content].into_iter().for_each(|part| signed.extend_from_slice(part));
        hmac::verify(&self.key, &signed, &from_hex(signature)?).ok()?;
        let part = |bytes: &[u8]| serde_json::from_slice(bytes).ok().filter(Json::is_object);
        let (header, content) = (part(header)?, part(content)?);
        Some(Message { addresses: frames[..at].to_vec(), header, content })
    }

    /// Writes a message that answers `parent`, with these frames before it.
    pub fn write(&self, before: Frames, kind: &str, parent: &Json, content: &Json) -> Frames {
        let header = json!({
            "msg_id": random_id(), "session": self.session, "username": "ryokan", "msg_type": kind,
            "date": humantime::format_rfc3339_micros(SystemTime::now()).to_string(), "version": PROTOCOL,
        });
        let parts = [&header, parent, &json!({}), content].map(|part| part.to_string().into_bytes());
        let signature = hmac::sign(&self.key, &parts.concat());
        let signature = signature.as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>().into_bytes();
        before.into_iter().chain([DELIMITER.to_vec(), signature]).chain(parts).collect()
    }
}

fn from_hex(text: &[u8]) -> Option<Vec<u8>> {
    let digits = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    text.chunks(2).map(digits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_signed_messages_are_read() {
        let (signer, other) = (Signer::new("key"), Signer::new("other"));
        let frames = signer.write(vec![b"peer".to_vec()], "execute_request", &json!({}), &json!({"code": "1"}));
        let read = signer.read(frames.clone()).expect("signed");
        assert_eq!((read.kind(), &read.addresses), ("execute_request", &vec![b"peer".to_vec()]));
        assert_eq!(read.content, json!({"code": "1"}));
        assert!(other.read(frames.clone()).is_none());
        for i in 0..frames.len() {
            let mut changed = frames.clone();
            changed[i].push(b' ');
            // Addresses are not signed; a space after the JSON is another text.
            assert_eq!(signer.read(changed).is_some(), i == 0, "frame {i}");
            assert!(signer.read(frames[..i].to_vec()).is_none());
        }
    }
}
