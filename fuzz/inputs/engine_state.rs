//! A snapshot of engine state from a client: raw, and behind a valid checksum.

use ryokan::core::state::{EngineState, MAGIC, VERSION};

fn check(bytes: &[u8]) {
    if let Ok(state) = EngineState::unpack(bytes) {
        let again = state.pack().expect("an unpacked state can be packed");
        assert_eq!(EngineState::unpack(&again).as_ref(), Ok(&state));
    }
}

pub fn run(data: &[u8]) {
    check(data);
    let mut sealed = MAGIC.to_vec();
    sealed.push(VERSION);
    sealed.extend(data);
    sealed.extend(blake3::hash(&sealed).as_bytes());
    check(&sealed);
}
