//! Keys and signers.

use super::text::{bounded, count, malformed, unknown};
use super::{read_name, read_text};
use crate::core::error::{Error, Result};
use crate::core::ids::{ParseIdError, PublicKey};
use crate::core::limits;
use crate::core::signature::{KnownKey, SignedUnit, Signer, Standing};
use crate::rpc::schema::ryokan_capnp as wire;

fn standing_to_wire(standing: Standing) -> wire::Standing {
    match standing {
        Standing::Own => wire::Standing::Own,
        Standing::Trusted => wire::Standing::Trusted,
        Standing::Former => wire::Standing::Former,
        Standing::Unknown => wire::Standing::Unknown,
        Standing::Missing => wire::Standing::Missing,
        Standing::Damaged => wire::Standing::Damaged,
    }
}

fn read_standing(found: std::result::Result<wire::Standing, capnp::NotInSchema>) -> Result<Standing> {
    Ok(match found.map_err(|n| unknown("standing", n))? {
        wire::Standing::Own => Standing::Own,
        wire::Standing::Trusted => Standing::Trusted,
        wire::Standing::Former => Standing::Former,
        wire::Standing::Unknown => Standing::Unknown,
        wire::Standing::Missing => Standing::Missing,
        wire::Standing::Damaged => Standing::Damaged,
    })
}

fn read_key(text: &str) -> Result<PublicKey> {
    text.parse().map_err(|error: ParseIdError| Error::invalid(error.to_string()))
}

/// Reads a key with its owner.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_known_key(reader: wire::known_key::Reader<'_>) -> Result<KnownKey> {
    Ok(KnownKey {
        key: read_key(&read_name(reader.get_key(), "key")?)?,
        name: read_name(reader.get_name(), "name of a key")?,
        standing: read_standing(reader.get_standing())?,
        at_ms: reader.get_at_ms(),
    })
}

/// Writes a key with its owner.
pub fn write_known_key(mut builder: wire::known_key::Builder<'_>, key: &KnownKey) {
    builder.set_key(key.key.to_string());
    builder.set_name(key.name.as_str());
    builder.set_standing(standing_to_wire(key.standing));
    builder.set_at_ms(key.at_ms);
}

/// Reads a signer.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_signer(reader: wire::signer::Reader<'_>) -> Result<Signer> {
    let key = read_name(reader.get_key(), "key of a signer")?;
    Ok(Signer {
        standing: read_standing(reader.get_standing())?,
        name: read_name(reader.get_name(), "name of a signer")?,
        key: if key.is_empty() { None } else { Some(read_key(&key)?) },
    })
}

/// Writes a signer.
pub fn write_signer(mut builder: wire::signer::Builder<'_>, signer: &Signer) {
    builder.set_standing(standing_to_wire(signer.standing));
    builder.set_name(signer.name.as_str());
    builder.set_key(signer.key.map(|key| key.to_string()).unwrap_or_default());
}

/// Reads a list of signed units.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_signed_units(
    list: capnp::Result<capnp::struct_list::Reader<'_, wire::signed_unit::Owned>>,
) -> Result<Vec<SignedUnit>> {
    let list = list.map_err(|error| malformed("signed units", error))?;
    bounded(list.len(), "signed units", limits::SIGNED_UNITS)?;
    list.iter().map(read_signed_unit).collect()
}

fn read_signed_unit(reader: wire::signed_unit::Reader<'_>) -> Result<SignedUnit> {
    Ok(SignedUnit {
        unit: read_name(reader.get_unit(), "kind of a unit")?,
        of: read_name(reader.get_of(), "name of a unit")?,
        number: reader.get_number(),
        id: read_name(reader.get_id(), "id of a unit")?,
        at_ms: reader.get_at_ms(),
        signer: read_signer(reader.get_signer().map_err(|error| malformed("signer", error))?)?,
        detail: read_text(reader.get_detail(), "detail of a unit")?,
    })
}

/// Writes signed units.
pub fn write_signed_units(mut list: capnp::struct_list::Builder<'_, wire::signed_unit::Owned>, units: &[SignedUnit]) {
    for (at, unit) in units.iter().enumerate() {
        let mut builder = list.reborrow().get(count(at));
        builder.set_unit(unit.unit.as_str());
        builder.set_of(unit.of.as_str());
        builder.set_number(unit.number);
        builder.set_id(unit.id.as_str());
        builder.set_at_ms(unit.at_ms);
        builder.set_detail(unit.detail.as_str());
        write_signer(builder.init_signer(), &unit.signer);
    }
}
