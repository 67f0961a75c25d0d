//! The kernel in this process, and kaish's implementation of the engine contract.

mod contract;

use ryokan::session::Session;
use ryokan::worker::embedded::EmbeddedKernel;

use crate::session_suite;

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(future)
}

#[test]
fn embedded_session_suite() {
    let root = tempfile::tempdir().expect("a directory");
    let root = root.path().canonicalize().expect("a path");
    block_on(async {
        let session = EmbeddedKernel::start(&root).await.expect("starts");
        let other = EmbeddedKernel::start(&root).await.expect("starts");
        session_suite::suite(&session, &other, root.to_str().expect("text")).await;
        assert!(session.mount("/x", "/y", false).await.is_err());
    });
}
