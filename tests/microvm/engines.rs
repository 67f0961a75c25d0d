//! Each engine in a machine does what it does in processes.

use ryokan::core::engine::EngineName;
use ryokan::core::spec::Isolation;

use super::Machines;
use crate::engines::contract;
use crate::engines::dialect::Dialect;
use crate::support::{User, spec, until};

/// One machine at a time. What the contract's other tests do with files of the host, `files.rs` does through the guest.
#[test]
fn machines_keep_engine_contract() {
    let host = Machines::start(User::Own);
    for engine in EngineName::ALL {
        let d = &Dialect::of(engine);
        host.with(async |client| {
            let mut spec = spec("lab", engine);
            spec.isolation = Some(Isolation::Microvm);
            let (k, _) = client.create_kernel(&spec, "").await.expect("made");
            assert_eq!(k.info().await.expect("info").spec.isolation, Isolation::Microvm);
            contract::ends(&k, d).await;
            contract::inputs(&k, d).await;
            contract::values(&k, d).await;
            contract::edits(&k, d).await;
            contract::interrupts(&k, d).await;
            contract::state(&k, d).await;
            client.remove_kernel("lab", 0).await.expect("removed");
        });
        until("the machine's end", || host.machines().is_empty());
    }
    let of_node = |file: &std::path::PathBuf| {
        std::fs::read_to_string(file).is_ok_and(|text| text.replace(' ', "").contains("\"engine\":\"node\""))
    };
    until("a template of machines with Node.js", || host.templates().iter().any(of_node));
}
