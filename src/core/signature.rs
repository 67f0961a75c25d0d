//! Signatures of hosts over sealed manifests, and what a user thinks of them.
//!
//! ```text
//! statement = "ryokan signature 1" LF subject LF digest in hexadecimal LF
//! ```
//! The digest names an object whose content names everything else, so one signature covers a freeze with its kernels, or
//! an exported file.

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::ids::{Digest, PublicKey, Signature};

/// What a signature is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The manifest of a freeze.
    Freeze,
    /// The head of an exported file.
    Export,
}

impl Subject {
    /// The signed bytes.
    pub fn statement(self, digest: Digest) -> Vec<u8> {
        let name = match self {
            Subject::Freeze => "freeze",
            Subject::Export => "export",
        };
        format!("ryokan signature 1\n{name}\n{digest}\n").into_bytes()
    }
}

/// A signature with the key that is said to have made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signed {
    /// The key.
    pub key: PublicKey,
    /// The signature.
    pub signature: Signature,
}

impl Signed {
    /// Whether the key made this signature over this digest.
    pub fn holds(&self, subject: Subject, digest: Digest) -> bool {
        let key = ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, self.key.as_bytes());
        key.verify(&subject.statement(digest), self.signature.as_bytes()).is_ok()
    }
}

/// What a signature is worth to a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    /// This host made it.
    Own,
    /// The user trusts the key.
    Trusted,
    /// This host made it with a key that it no longer has.
    Former,
    /// The key is not known.
    Unknown,
    /// There is none.
    Missing,
    /// The signature, or what it is about, is not what was signed.
    Damaged,
}

impl Standing {
    /// Every standing.
    pub const ALL: [Standing; 6] =
        [Standing::Own, Standing::Trusted, Standing::Former, Standing::Unknown, Standing::Missing, Standing::Damaged];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Standing::Own => "own",
            Standing::Trusted => "trusted",
            Standing::Former => "former",
            Standing::Unknown => "unknown",
            Standing::Missing => "missing",
            Standing::Damaged => "damaged",
        }
    }
}

/// A key with its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KnownKey {
    /// The key.
    pub key: PublicKey,
    /// The peer's name; empty for this host.
    pub name: String,
    /// `Own`, `Former` or `Trusted`.
    pub standing: Standing,
    /// Milliseconds since 1970: made or added.
    pub at_ms: i64,
}

/// The signer of something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Signer {
    /// What the signature is worth.
    pub standing: Standing,
    /// The trusted peer's name, else empty.
    pub name: String,
    /// The key, unless the signature is missing.
    pub key: Option<PublicKey>,
}

impl Signer {
    /// The signer of `digest`, as the owner of `known` keys sees it. The names of a key's holders are not proven by a
    /// damaged signature, so it gets none.
    pub fn of(signed: Option<&Signed>, subject: Subject, digest: Digest, known: &[KnownKey]) -> Signer {
        let Some(signed) = signed else {
            return Signer { standing: Standing::Missing, name: String::new(), key: None };
        };
        let key = Some(signed.key);
        if !signed.holds(subject, digest) {
            return Signer { standing: Standing::Damaged, name: String::new(), key };
        }
        let of = |standing| known.iter().find(|one| one.key == signed.key && one.standing == standing);
        let found = [Standing::Own, Standing::Trusted, Standing::Former].into_iter().find_map(of);
        match found {
            Some(found) => Signer { standing: found.standing, name: found.name.clone(), key },
            None => Signer { standing: Standing::Unknown, name: String::new(), key },
        }
    }
}

/// Reason of the refusal of a freeze that neither this host nor a trusted one sealed.
pub const UNTRUSTED_SEALER: &str = "untrusted_sealer";

impl Signer {
    /// Checks that this host, or one that the user trusts, sealed a freeze from elsewhere.
    ///
    /// # Errors
    /// `refused` ([`UNTRUSTED_SEALER`]) names the key and the command that trusts it; `corrupt` for a seal that does not
    /// fit.
    pub fn require_trusted(&self) -> Result<()> {
        let key = self.key.map(|key| key.to_string()).unwrap_or_default();
        let trust = format!("compare the key with `ryokan trust list` on that host, then: ryokan trust add NAME {key}");
        let (why, hint) = match self.standing {
            Standing::Own | Standing::Trusted => return Ok(()),
            Standing::Damaged => {
                return Err(Error::corrupt("the seal of the freeze does not fit its content")
                    .reason("signature")
                    .hint("get the file again from where it was written"));
            }
            Standing::Missing => {
                ("no host sealed the freeze".to_owned(), "freeze the group again there, and export that".to_owned())
            }
            Standing::Former => (format!("a former key of this host sealed the freeze: {key}"), trust),
            Standing::Unknown => (format!("a host that you do not trust sealed the freeze: {key}"), trust),
        };
        Err(Error::refused(why).reason(UNTRUSTED_SEALER).hint(hint))
    }
}

/// A sealed unit with its signer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SignedUnit {
    /// `freeze` or `checkpoint`.
    pub unit: String,
    /// Name of the group or the kernel.
    pub of: String,
    /// Its number there.
    pub number: u64,
    /// Its id.
    pub id: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Its signer.
    pub signer: Signer,
    /// What else there is to say, perhaps empty.
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use ring::signature::{Ed25519KeyPair, KeyPair as _};

    use super::*;

    fn pair(seed: u8) -> (Ed25519KeyPair, PublicKey) {
        let pair = Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).expect("a seed");
        let key = PublicKey::from_bytes(pair.public_key().as_ref().try_into().expect("32 bytes"));
        (pair, key)
    }

    fn signed(seed: u8, digest: Digest) -> Signed {
        let (pair, key) = pair(seed);
        let signature = pair.sign(&Subject::Freeze.statement(digest));
        Signed { key, signature: Signature::from_bytes(signature.as_ref().try_into().expect("64 bytes")) }
    }

    #[test]
    fn unknown_sealer_is_named() {
        let digest = Digest::from_bytes([7; 32]);
        let known = [KnownKey { key: pair(1).1, name: "alpha".into(), standing: Standing::Trusted, at_ms: 0 }];
        let of = |signed: Option<&Signed>| Signer::of(signed, Subject::Freeze, digest, &known).require_trusted();
        assert_eq!(of(Some(&signed(1, digest))), Ok(()));
        let refused = of(Some(&signed(2, digest))).expect_err("unknown");
        assert_eq!(refused.reason, UNTRUSTED_SEALER);
        assert!(refused.hint.contains(&format!("ryokan trust add NAME {}", pair(2).1)), "{refused:?}");
        assert_eq!(of(None).expect_err("missing").reason, UNTRUSTED_SEALER);
        let other = signed(1, Digest::from_bytes([8; 32]));
        assert_eq!(of(Some(&other)).expect_err("damaged").reason, "signature");
    }

    #[test]
    fn signer_has_a_standing() {
        let digest = Digest::from_bytes([7; 32]);
        let known = |seed, name: &str, standing| KnownKey { key: pair(seed).1, name: name.into(), standing, at_ms: 0 };
        let all = [
            known(1, "", Standing::Own),
            known(2, "", Standing::Former),
            known(2, "old", Standing::Trusted),
            known(3, "", Standing::Former),
            known(4, "peer", Standing::Trusted),
        ];
        let of = |signed: Option<&Signed>, subject| {
            let signer = Signer::of(signed, subject, digest, &all);
            (signer.standing, signer.name)
        };
        for (seed, standing, name) in [
            (1, Standing::Own, ""),
            (2, Standing::Trusted, "old"),
            (3, Standing::Former, ""),
            (4, Standing::Trusted, "peer"),
            (5, Standing::Unknown, ""),
        ] {
            assert_eq!(of(Some(&signed(seed, digest)), Subject::Freeze), (standing, name.into()), "{seed}");
        }
        assert_eq!(of(None, Subject::Freeze).0, Standing::Missing);
        let good = signed(1, digest);
        let mut bytes = *good.signature.as_bytes();
        bytes[0] ^= 1;
        let changed = Signed { signature: Signature::from_bytes(bytes), ..good };
        let swapped = Signed { key: pair(4).1, ..good };
        let other = signed(1, Digest::from_bytes([8; 32]));
        for wrong in [changed, swapped, other] {
            assert_eq!(of(Some(&wrong), Subject::Freeze), (Standing::Damaged, String::new()));
        }
        // A signature of one kind is none of another.
        assert_eq!(of(Some(&good), Subject::Export).0, Standing::Damaged);
    }
}
