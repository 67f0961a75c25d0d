//! Frames of the handover protocol from another host: what is read can be written, and reads back as the same.

use ryokan::core::limits;
use ryokan::teleport::reframe;

pub fn run(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (once, twice) = runtime.block_on(async {
        let once = reframe(data.to_vec()).await;
        (once.clone(), reframe(once).await)
    });
    assert_eq!(once, twice);
    // Each frame of a few bytes unpacks to one bounded piece at most.
    let most = data.len().div_ceil(5).saturating_mul(limits::HANDOVER_PIECE_BYTES + 5) + limits::HANDOVER_MESSAGE_BYTES;
    assert!(once.len() <= most, "{} bytes became {}", data.len(), once.len());
}
