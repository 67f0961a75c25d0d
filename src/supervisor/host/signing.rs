//! This host's key, which signs what the host seals; and the keys that users trust.
//!
//! `host.key` holds the private key. It is made at the first use, readable by the daemon's user only, and never leaves
//! the host: no bundle, event, log or audit line has it. A lost key is replaced, which an event and the audit log record.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::signature::{Ed25519KeyPair, KeyPair as _};

use super::Host;
use super::actor::Actor;
use crate::catalog::Notes;
use crate::core::audit::NewAudit;
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, PublicKey, Signature};
use crate::core::signature::{KnownKey, Signed, Standing, Subject};
use crate::sys::{fs, random};

/// The private key's file.
const FILE: &str = "host.key";
/// First line of that file.
const HEADING: &str = "ryokan host key 1: keep it secret";
/// Largest file that is read, bytes.
const MOST: u64 = 512;

/// This host's key pair.
pub(crate) struct HostKey {
    pair: Ed25519KeyPair,
    public: PublicKey,
}

impl HostKey {
    /// Signs a digest.
    pub fn sign(&self, subject: Subject, digest: Digest) -> Signed {
        let signature = self.pair.sign(&subject.statement(digest));
        let bytes = signature.as_ref().try_into().expect("ed25519 signatures have 64 bytes");
        Signed { key: self.public, signature: Signature::from_bytes(bytes) }
    }

    /// Reads the key, or makes it. Blocks.
    fn open(path: &Path) -> Result<HostKey> {
        let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
        match file {
            Ok(file) => HostKey::read(path, file),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let seed: [u8; 32] = random::bytes();
                let pair = Ed25519KeyPair::from_seed_unchecked(&seed).map_err(|error| unusable(path, &error))?;
                let (secret, public) = (BASE64.encode(seed), BASE64.encode(pair.public_key().as_ref()));
                let text = format!("{HEADING}\n{secret}\n{public}\n");
                fs::write_new(path, text.as_bytes(), 0o600, "host.key.write")
                    .map_err(|error| Error::unavailable(format!("{error}: {}", error.source)))?;
                HostKey::of(path, pair)
            }
            Err(error) => Err(unusable(path, &error)),
        }
    }

    fn read(path: &Path, file: File) -> Result<HostKey> {
        let meta = file.metadata().map_err(|error| unusable(path, &error))?;
        let own = nix::unistd::geteuid().as_raw();
        if !meta.is_file() || meta.uid() != own || meta.mode() & 0o077 != 0 {
            let what = format!("owner {}, mode {:o}", meta.uid(), meta.mode() & 0o7777);
            return Err(Error::refused(format!("others could have read or changed {}: {what}", path.display()))
                .reason("host_key")
                .hint(format!(
                    "if you trust it still, `chown {own}` and `chmod 600` it; else remove it: the next use makes another key"
                )));
        }
        let mut text = String::new();
        file.take(MOST).read_to_string(&mut text).map_err(|error| unusable(path, &error))?;
        let lines: Vec<&str> = text.lines().collect();
        let [HEADING, seed, public] = lines.as_slice() else { return Err(unusable(path, &"it is damaged")) };
        let decoded = |text: &str| BASE64.decode(text).map_err(|_| unusable(path, &"it is damaged"));
        let pair = Ed25519KeyPair::from_seed_and_public_key(&decoded(seed)?, &decoded(public)?);
        HostKey::of(path, pair.map_err(|_| unusable(path, &"it is damaged"))?)
    }

    fn of(path: &Path, pair: Ed25519KeyPair) -> Result<HostKey> {
        let public = pair.public_key().as_ref().try_into();
        let public = public.map_err(|_| unusable(path, &"it is damaged"))?;
        Ok(HostKey { pair, public: PublicKey::from_bytes(public) })
    }
}

fn unusable(path: &Path, why: &dyn std::fmt::Display) -> Error {
    Error::refused(format!("the host's key {} cannot be used: {why}", path.display()))
        .reason("host_key")
        .hint("bring it back from a backup, or remove it: the next use makes another key")
}

impl Host {
    /// This host's key; makes it at the first use.
    ///
    /// # Errors
    /// `refused` (`host_key`) if others may have read or changed it, or it is damaged; file and database errors.
    pub(crate) async fn signing_key(&self) -> Result<Arc<HostKey>> {
        self.key.get_or_try_init(|| self.open_key()).await.map(Arc::clone)
    }

    /// This host's public key; makes it at the first use.
    ///
    /// # Errors
    /// As `signing_key`.
    pub async fn public_key(&self) -> Result<PublicKey> {
        Ok(self.signing_key().await?.public)
    }

    async fn open_key(&self) -> Result<Arc<HostKey>> {
        let path = self.environment.data.join(FILE);
        let opened = tokio::task::spawn_blocking(move || HostKey::open(&path)).await;
        let key = opened.map_err(|error| Error::internal(error.to_string()))??;
        let former = self.catalog.host_keys().await?;
        if former.iter().all(|(known, _)| *known != key.public) {
            let (kind, detail) = match former.first() {
                None => ("host_key_created", key.public.to_string()),
                Some((former, _)) => ("host_key_replaced", format!("{} in place of {former}", key.public)),
            };
            let action = if former.is_empty() { "key.create" } else { "key.replace" };
            let audit = vec![NewAudit { detail, ..self.line(&self.own_actor(), action, None) }];
            self.catalog.add_host_key(key.public, self.now_ms(), Notes { events: Vec::new(), audit }).await?;
            let former = former.first().map(|(former, _)| former.to_string());
            self.events.publish("", kind, serde_json::json!({ "key": key.public, "former": former }));
        }
        Ok(Arc::new(key))
    }

    /// The keys that a user knows: this host's, its former ones, and trusted ones.
    ///
    /// # Errors
    /// Database errors.
    pub async fn known_keys(&self, uid: u32) -> Result<Vec<KnownKey>> {
        let own = self.key.get().map(|key| key.public);
        let hosts = self.catalog.host_keys().await?.into_iter();
        // The newest is the present one, unless the file says otherwise.
        let mut known: Vec<KnownKey> = hosts
            .enumerate()
            .map(|(at, (key, at_ms))| {
                let is_own = own.map_or(at == 0, |own| own == key);
                let standing = if is_own { Standing::Own } else { Standing::Former };
                KnownKey { key, name: String::new(), standing, at_ms }
            })
            .collect();
        known.extend(self.catalog.trusted_keys(uid).await?);
        Ok(known)
    }

    /// Trusts a key for a user.
    ///
    /// # Errors
    /// `invalidArgument`, `alreadyExists`, `refused` beyond the limit.
    pub async fn trust(&self, actor: &Actor, name: &str, key: &str) -> Result<KnownKey> {
        let name: crate::core::name::KernelName = name.parse().map_err(|error: crate::core::name::NameError| {
            Error::invalid(error.to_string().replace("a kernel's name", "a name"))
        })?;
        let key: PublicKey = key.parse().map_err(|error: crate::core::ids::ParseIdError| {
            Error::invalid(error.to_string()).hint("`ryokan trust list` prints a host's own key there")
        })?;
        let known = KnownKey { key, name: name.to_string(), standing: Standing::Trusted, at_ms: self.now_ms() };
        let notes = self.trust_notes(actor, "trust.add", format!("{name}: {key}"));
        self.catalog.add_trusted_key(actor.uid, known.clone(), notes).await?;
        Ok(known)
    }

    /// Trusts a user's key no longer.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn distrust(&self, actor: &Actor, name: &str) -> Result<()> {
        let notes = self.trust_notes(actor, "trust.remove", super::audit::bounded(name));
        match self.catalog.remove_trusted_key(actor.uid, name.to_owned(), notes).await?.value {
            true => Ok(()),
            false => Err(Error::not_found(format!("no trusted key is named {name:?}"))
                .hint("`ryokan trust list` shows what there is")),
        }
    }

    fn trust_notes(&self, actor: &Actor, action: &str, detail: String) -> Notes {
        let line = self.line(actor, action, None);
        Notes { events: Vec::new(), audit: vec![NewAudit { owner: Some(actor.uid), detail, ..line }] }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn at(dir: &tempfile::TempDir) -> std::path::PathBuf {
        dir.path().join(FILE)
    }

    #[test]
    fn key_is_made_once() {
        let dir = tempfile::tempdir().expect("a folder");
        let made = HostKey::open(&at(&dir)).expect("made");
        let meta = std::fs::metadata(at(&dir)).expect("there");
        assert_eq!(meta.mode() & 0o7777, 0o600);
        assert_eq!(HostKey::open(&at(&dir)).expect("read").public, made.public);
        let digest = Digest::from_bytes([1; 32]);
        assert!(made.sign(Subject::Freeze, digest).holds(Subject::Freeze, digest));
    }

    #[test]
    fn exposed_key_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        HostKey::open(&at(&dir)).expect("made");
        for mode in [0o640, 0o604, 0o620] {
            std::fs::set_permissions(at(&dir), std::fs::Permissions::from_mode(mode)).expect("changed");
            let error = HostKey::open(&at(&dir)).err().expect("refused");
            assert_eq!(error.reason, "host_key", "{mode:o}: {error}");
        }
        let moved = dir.path().join("moved");
        std::fs::rename(at(&dir), &moved).expect("moved");
        std::fs::set_permissions(&moved, std::fs::Permissions::from_mode(0o600)).expect("changed");
        std::os::unix::fs::symlink(&moved, at(&dir)).expect("linked");
        assert!(HostKey::open(&at(&dir)).is_err(), "a link is followed");
    }

    #[test]
    fn damaged_key_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        HostKey::open(&at(&dir)).expect("made");
        let whole = std::fs::read_to_string(at(&dir)).expect("read");
        let lines: Vec<&str> = whole.lines().collect();
        // Another seed does not fit the public key beside it.
        let swapped = format!("{HEADING}\n{}\n{}\n", BASE64.encode([9; 32]), lines[2]);
        for text in [swapped.as_str(), "", HEADING, &whole[..whole.len() - 8], &whole.repeat(9)] {
            std::fs::write(at(&dir), text).expect("written");
            let error = HostKey::open(&at(&dir)).err().expect("refused");
            assert_eq!(error.reason, "host_key", "{text}");
            // The file's content is in no message.
            assert!(!error.to_string().contains(lines[1]), "{error}");
        }
    }
}
