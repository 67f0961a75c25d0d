//! What an offered kernel comes without.

use crate::core::error::{Error, Result};
use crate::core::handover::{Allowed, Missing};
use crate::core::limits;
use crate::teleport::Offer;

/// What an offered kernel comes without: this host grants none of it by its name.
///
/// # Errors
/// `refused` names what the source does not allow to be missing.
pub(super) fn missing(offer: &Offer) -> Result<Vec<String>> {
    let says = "this host grants an incoming kernel none of";
    let of_spec = Missing::of_spec(&offer.spec);
    let names = offer.allowed.iter().map(String::as_str);
    let allowed = match offer.allow_missing {
        true => Allowed::named(offer.allowed.is_empty(), names)?,
        false => Allowed::default(),
    };
    allowed.check(&of_spec, says)?;
    let mut missing: Vec<String> = of_spec.into_iter().map(|left| left.text).collect();
    // The source has judged these by their kinds.
    let resources = &offer.resources[..offer.resources.len().min(limits::MOUNTS + limits::MCP_SERVERS)];
    if !resources.is_empty() && !offer.allow_missing {
        return Err(Error::refused(format!("{says}: {}", resources.join(", ")))
            .reason("missing")
            .hint("--allow-missing moves the kernel without them"));
    }
    missing.extend_from_slice(resources);
    Ok(missing)
}
