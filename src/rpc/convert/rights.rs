//! Rights.

use capnp::enum_list;

use super::text::{bounded, count, malformed, unknown};
use crate::core::error::Result;
use crate::core::rights::{Right, Rights};
use crate::rpc::schema::ryokan_capnp as wire;

fn to_wire(right: Right) -> wire::Right {
    match right {
        Right::Read => wire::Right::Read,
        Right::Execute => wire::Right::Execute,
        Right::Write => wire::Right::Write,
        Right::Checkpoint => wire::Right::Checkpoint,
        Right::Restore => wire::Right::Restore,
        Right::Fork => wire::Right::Fork,
        Right::Teleport => wire::Right::Teleport,
        Right::Admin => wire::Right::Admin,
    }
}

fn from_wire(right: wire::Right) -> Right {
    match right {
        wire::Right::Read => Right::Read,
        wire::Right::Execute => Right::Execute,
        wire::Right::Write => Right::Write,
        wire::Right::Checkpoint => Right::Checkpoint,
        wire::Right::Restore => Right::Restore,
        wire::Right::Fork => Right::Fork,
        wire::Right::Teleport => Right::Teleport,
        wire::Right::Admin => Right::Admin,
    }
}

/// Reads a set of rights.
///
/// # Errors
/// `invalidArgument` for a right unknown to this build: a right must never be lost silently.
pub fn read_rights(reader: capnp::Result<enum_list::Reader<'_, wire::Right>>) -> Result<Rights> {
    let list = reader.map_err(|e| malformed("rights", e))?;
    bounded(list.len(), "rights", Right::ALL.len() * 4)?;
    list.iter().map(|right| right.map(from_wire).map_err(|n| unknown("right", n))).collect()
}

/// Length of the list for `rights`.
pub fn rights_len(rights: Rights) -> u32 {
    count(rights.iter().count())
}

/// Writes a set of rights into a builder of [`rights_len`] items.
pub fn write_rights(mut builder: enum_list::Builder<'_, wire::Right>, rights: Rights) {
    for (i, right) in rights.iter().enumerate() {
        builder.set(count(i), to_wire(right));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rights_set_round_trips() {
        for bits in 0..=255u8 {
            let rights: Rights =
                Right::ALL.into_iter().enumerate().filter(|(i, _)| bits & (1 << i) != 0).map(|(_, r)| r).collect();
            let mut message = capnp::message::Builder::new_default();
            let mut info = message.init_root::<wire::kernel_info::Builder<'_>>();
            write_rights(info.reborrow().init_rights(rights_len(rights)), rights);
            assert_eq!(read_rights(info.into_reader().get_rights()), Ok(rights));
        }
    }
}
