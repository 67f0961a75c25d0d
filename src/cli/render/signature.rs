//! Keys and signers.

use super::plain;
use super::table::Table;
use crate::cli::paint::Paint;
use crate::core::signature::{KnownKey, SignedUnit, Signer, Standing};

/// Keys, one per line.
pub fn known_keys(known: &[KnownKey], paint: Paint) -> String {
    let mut table = Table::new(&["NAME", "STANDING", "KEY"]);
    for key in known {
        let name = if key.name.is_empty() { "(this host)".into() } else { plain(&key.name) };
        table.row(&[name, key.standing.name().into(), key.key.to_string()]);
    }
    table.text("no keys", paint)
}

/// A signer in words.
pub fn signer(signer: &Signer, paint: Paint) -> String {
    let key = signer.key.map(|key| key.to_string()).unwrap_or_default();
    match signer.standing {
        Standing::Own => paint.good("signed by this host"),
        Standing::Trusted => paint.good(&format!("signed by {}, trusted", plain(&signer.name))),
        Standing::Former => paint.warn(&format!("signed by a former key of this host: {key}")),
        Standing::Unknown => paint.warn(&format!("signed by an unknown key: {key}")),
        Standing::Missing => paint.warn("not signed"),
        Standing::Damaged => paint.bad("damaged"),
    }
}

/// A sealed unit with its signer.
pub fn signed_unit(unit: &SignedUnit, paint: Paint) -> String {
    let SignedUnit { unit: kind, of, number, id, detail, .. } = unit;
    let id: String = id.chars().take(10).collect();
    let detail = if detail.is_empty() { String::new() } else { format!("  {}", paint.dim(&plain(detail))) };
    let head = paint.head(&format!("{kind} {number} of {}", plain(of)));
    format!("{head} {}  {}{detail}\n", plain(&id), signer(&unit.signer, paint))
}
