//! An untrusted bundle: raw, and as records with valid frame, compression and digest.

use std::io::Write as _;
use std::sync::OnceLock;

use ryokan::bundle::{GROUP_VERSION, MAGIC, VERSION, read};
use ryokan::store::Store;

/// One store for all inputs; no input depends on its content.
fn store() -> &'static Store {
    static STORE: OnceLock<Store> = OnceLock::new();
    STORE.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("ryokan-fuzz-{}", std::process::id()));
        Store::open(&dir).expect("opened")
    })
}

pub fn run(data: &[u8]) {
    let _ = read(store(), data, |_| Ok(()));
    for version in [VERSION, GROUP_VERSION] {
        let mut framed = [&MAGIC[..], &version.to_le_bytes()].concat();
        let mut to = zstd::stream::write::Encoder::new(Vec::new(), 1).expect("begun");
        to.write_all(data).expect("memory takes it");
        for piece in to.finish().expect("finished").chunks(100_000) {
            framed.extend((piece.len() as u32).to_le_bytes());
            framed.extend(piece);
        }
        framed.extend([0; 4]);
        framed.extend(blake3::hash(&framed).as_bytes());
        let _ = read(store(), &framed[..], |_| Ok(()));
    }
}
