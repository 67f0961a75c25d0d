//! The interleaving of an execution's two streams, as the journal keeps it.

use ryokan::catalog::state::Runs;
use ryokan::core::exec::Stream;

pub fn run(data: &[u8]) {
    let Some(runs) = Runs::from_bytes(data) else { return };
    let _ = (runs.bytes_of(Stream::Stdout), runs.bytes_of(Stream::Stderr));
    let again = Runs::from_bytes(&runs.to_bytes()).expect("written runs can be read");
    assert_eq!(runs.iter().collect::<Vec<_>>(), again.iter().collect::<Vec<_>>());
}
