//! Who sealed what: the signatures over freezes, and through them over the checkpoints of their kernels.

use super::{find_freeze, manifest};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::portable::FreezeOrigin;
use crate::core::freeze::{Captured, Freeze, FreezeManifest, Group};
use crate::core::ids::{CheckpointId, Digest};
use crate::core::limits;
use crate::core::signature::{KnownKey, SignedUnit, Signer, Standing, Subject, UNTRUSTED_SEALER};
use crate::supervisor::checkpoint::find;
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;

/// The signed units of a group or a kernel, the newest first, or one of them; with an empty `name` those of all groups.
/// Also the number of further ones.
///
/// # Errors
/// `notFound`, and database errors. A damaged unit is no error: its standing says so.
pub async fn provenance(
    supervisor: &Supervisor,
    name: &str,
    reference: &str,
    actor: &Actor,
) -> Result<(Vec<SignedUnit>, u64)> {
    let host = supervisor.host();
    let known = host.known_keys(actor.uid).await?;
    if let (false, Ok(kernel)) = (name.is_empty(), supervisor.find(actor.uid, name)) {
        return of_kernel(host, &kernel, reference, &known).await;
    }
    let groups = match name {
        "" => super::list(supervisor, actor.uid).await?,
        name => vec![super::find(supervisor, actor.uid, name).await?],
    };
    let (mut units, mut omitted) = (Vec::new(), 0);
    for group in &groups {
        let freezes = match reference {
            "" => host.catalog.freezes(group.id).await?,
            reference => vec![find_freeze(host, group, reference).await?],
        };
        for freeze in freezes {
            if units.len() >= limits::SIGNED_UNITS {
                omitted += 1;
                continue;
            }
            units.push(of_freeze(host, group, &freeze, &known).await?.0);
        }
    }
    Ok((units, omitted))
}

/// Refuses to restore a freeze without a seal of this host or of a trusted one, as an import does. A program that writes to
/// the catalog could remove a signature, or put another in its place.
///
/// # Errors
/// `corrupt` (`signature`) if the signature does not fit, `refused` ([`UNTRUSTED_SEALER`]).
pub(super) async fn admit(host: &Host, group: &Group, freeze: &Freeze, manifest: &FreezeManifest) -> Result<()> {
    check(group, freeze, manifest)?;
    let known = host.known_keys(group.uid).await?;
    let signer = Signer::of(freeze.signed.as_ref(), Subject::Freeze, freeze.manifest, &known);
    let key = signer.key.map(|key| key.to_string()).unwrap_or_default();
    let trust = format!("if it is a key that you know, trust it first: ryokan trust add NAME {key}");
    let (why, hint) = match signer.standing {
        Standing::Own | Standing::Trusted => return Ok(()),
        Standing::Former => (format!("a former key of this host sealed it: {key}"), trust),
        Standing::Unknown | Standing::Damaged => (format!("a host that you do not trust sealed it: {key}"), trust),
        Standing::Missing => ("no host sealed it".into(), "restore another freeze, and freeze the group anew".into()),
    };
    Err(Error::refused(format!("freeze {} of {}: {why}", freeze.number, group.name))
        .reason(UNTRUSTED_SEALER)
        .hint(hint))
}

/// Refuses a freeze whose signature does not fit.
///
/// # Errors
/// `corrupt` (`signature`).
pub(super) fn check(group: &Group, freeze: &Freeze, manifest: &FreezeManifest) -> Result<()> {
    let why = match &freeze.signed {
        Some(signed) if !signed.holds(Subject::Freeze, freeze.manifest) => "its signature does not fit its manifest",
        _ if (manifest.id, manifest.group) != (freeze.id, group.id) => "its manifest is another freeze's",
        _ => return Ok(()),
    };
    Err(Error::corrupt(format!("freeze {} of {}: {why}", freeze.number, group.name)).reason("signature"))
}

/// A freeze with its signer, and its manifest unless that is damaged.
async fn of_freeze(
    host: &Host,
    group: &Group,
    freeze: &Freeze,
    known: &[KnownKey],
) -> Result<(SignedUnit, Option<FreezeManifest>)> {
    let mut unit = SignedUnit {
        unit: "freeze".into(),
        of: group.name.clone(),
        number: freeze.number,
        id: freeze.id.to_string(),
        at_ms: freeze.at_ms,
        signer: Signer::of(freeze.signed.as_ref(), Subject::Freeze, freeze.manifest, known),
        detail: String::new(),
    };
    let read = match manifest(host, freeze).await {
        Ok(manifest) => check(group, freeze, &manifest).map(|()| manifest),
        Err(error) => Err(error),
    };
    match read {
        Ok(manifest) => {
            if let Some(origin) = &manifest.origin {
                unit.detail = origin_in_words(origin, known);
            }
            Ok((unit, Some(manifest)))
        }
        Err(error) if matches!(error.code, ErrorCode::Corrupt | ErrorCode::NotFound) => {
            unit.signer = Signer { standing: Standing::Damaged, name: String::new(), ..unit.signer };
            unit.detail = error.message;
            Ok((unit, None))
        }
        Err(error) => Err(error),
    }
}

/// Who sealed a freeze that came in a file, in words.
fn origin_in_words(origin: &FreezeOrigin, known: &[KnownKey]) -> String {
    let sealer = Signer::of(origin.signed.as_ref(), Subject::Freeze, origin.manifest, known);
    let key = sealer.key.map(|key| key.to_string()).unwrap_or_default();
    let by = match sealer.standing {
        Standing::Own => "sealed by this host".into(),
        Standing::Trusted => format!("sealed by {}, trusted", sealer.name),
        Standing::Former => format!("sealed by a former key of this host: {key}"),
        Standing::Unknown => format!("sealed by an unknown key: {key}"),
        Standing::Missing => "not sealed there".into(),
        Standing::Damaged => "with a seal that does not fit".into(),
    };
    format!("imported from host {}, {by}", origin.host)
}

async fn of_kernel(
    host: &Host,
    kernel: &Kernel,
    reference: &str,
    known: &[KnownKey],
) -> Result<(Vec<SignedUnit>, u64)> {
    let checkpoints = match reference {
        "" => kernel.records.all_checkpoints().await?,
        reference => vec![find(kernel, reference).await?],
    };
    let covering = host.catalog.freezes_of_kernel(kernel.id).await?;
    let groups = host.catalog.groups(None).await?;
    let (mut units, mut omitted) = (Vec::new(), 0);
    for checkpoint in checkpoints {
        if units.len() >= limits::SIGNED_UNITS {
            omitted += 1;
            continue;
        }
        let mut unit = SignedUnit {
            unit: "checkpoint".into(),
            of: kernel.spec().name.to_string(),
            number: checkpoint.number,
            id: checkpoint.id.to_string(),
            at_ms: checkpoint.at_ms,
            signer: Signer::of(None, Subject::Freeze, checkpoint.manifest, known),
            detail: "in no freeze".into(),
        };
        let freeze = covering.iter().find(|(id, ..)| *id == checkpoint.id);
        if let Some((_, _, group, freeze)) = freeze
            && let Some(group) = groups.iter().find(|one| one.id == *group)
        {
            let freezes = host.catalog.freezes(group.id).await?;
            if let Some(freeze) = freezes.iter().find(|one| one.id == *freeze) {
                let (of, manifest) = of_freeze(host, group, freeze, known).await?;
                let named = manifest.as_ref().and_then(|manifest| named(manifest, checkpoint.id));
                unit.detail = format!("freeze {} of {}", freeze.number, group.name);
                unit.signer = match named {
                    Some(named) if named != checkpoint.manifest => {
                        unit.detail.push_str(" has another manifest of it");
                        Signer { standing: Standing::Damaged, name: String::new(), ..of.signer }
                    }
                    // A freeze of an earlier release names no manifests of checkpoints.
                    None if manifest.is_some() => Signer::of(None, Subject::Freeze, checkpoint.manifest, known),
                    _ => of.signer,
                };
            }
        }
        units.push(unit);
    }
    Ok((units, omitted))
}

/// The manifest of a kernel's checkpoint that a freeze names.
fn named(manifest: &FreezeManifest, id: CheckpointId) -> Option<Digest> {
    manifest.parts.iter().find_map(|part| match part.captured {
        Captured::Kernel { checkpoint, manifest, .. } if checkpoint == id => manifest,
        _ => None,
    })
}
