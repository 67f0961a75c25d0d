//! Frames of the handover protocol from another host: what is read can be written, and reads back as the same.

use ryokan::teleport::reframe;

/// Fields that a message leaves out, bytes.
const DEFAULTS: usize = 4096;

pub fn run(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (once, twice) = runtime.block_on(async {
        let once = reframe(data.to_vec()).await;
        (once.clone(), reframe(once).await)
    });
    assert_eq!(once, twice);
    // Nothing is unpacked.
    let most = data.len() + data.len().div_ceil(5) * DEFAULTS;
    assert!(once.len() <= most, "{} bytes became {}", data.len(), once.len());
}
