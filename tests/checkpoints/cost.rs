//! Cost of a restore, in store objects instead of time; damage is found before anything is changed.

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::rpc::client::{HostClient, KernelClient};
use serde_json::Value;

use super::log;
use crate::support::{Host, kernel, out, users};

fn named(name: &str) -> CheckpointRequest {
    CheckpointRequest::new(CheckpointType::Manual, name)
}

/// Incompressible files: the store holds their bytes verbatim.
async fn fill(k: &KernelClient, folders: usize) {
    let code = format!(
        "import os\nfor d in range({folders}):\n    os.mkdir(f'd{{d}}')\n    for f in range(20): open(f'd{{d}}/f{{f}}', 'wb').write(os.urandom(500))"
    );
    out(k, &code).await;
}

/// Details of the events of one kind for a kernel, newest last.
async fn details(client: &HostClient, kernel: &str, kind: &str) -> Vec<Value> {
    let mut events = client.events(0).await.unwrap();
    let mut found = Vec::new();
    while let Some(event) = events.next_past().await.unwrap() {
        if event.kernel == kernel && event.kind == kind {
            found.push(serde_json::from_str(&event.detail_json).unwrap());
        }
    }
    found
}

#[test]
fn restore_cost_scales_with_changes() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let mut read = Vec::new();
            for (name, folders) in [("small", 5), ("large", 50)] {
                let k = kernel(&client, name, EngineName::Python).await;
                fill(&k, folders).await;
                out(&k, "x = {n: str(n) for n in range(1000)}").await;
                k.checkpoint(&named("one")).await.unwrap();
                // Nothing differs: nothing is read.
                k.restore_checkpoint("one", 0).await.unwrap();
                out(&k, "open('d1/f7', 'wb').write(b'other' * 100); open('d3/f2', 'ab').write(b'more'); None").await;
                k.restore_checkpoint("one", 0).await.unwrap();
                k.undo(0).await.unwrap();
                out(&k, "x[5] = 0").await;
                k.restore_checkpoint("one", 0).await.unwrap();
                assert_eq!(out(&k, "print(x[5], len(open('d3/f2', 'rb').read()))").await, "5 500", "{user:?}");
                let details = details(&client, name, "checkpoint_restored").await;
                let of = |field: &str| details.iter().map(|one| one[field].as_u64().unwrap()).collect::<Vec<_>>();
                assert_eq!(of("files_changed"), [0, 4, 4, 4], "{user:?} {name}: {details:?}");
                read.push(of("objects_read"));
                let taken = self::details(&client, name, "checkpoint_created").await;
                let again: Vec<u64> = taken.iter().skip(1).map(|one| one["files_read"].as_u64().unwrap()).collect();
                assert!(
                    again.iter().all(|read| *read <= 2),
                    "{user:?} {name}: each safety checkpoint reads what changed: {again:?}"
                );
                assert!(taken.iter().skip(1).all(|one| one["full_walk"] == ""), "{user:?} {name}: {taken:?}");
            }
            // Two trees, two folders of each, the roots; and the two files. Then the engine's state besides.
            let two_files = 2 * (1 + 1 + 2) + 2;
            assert_eq!(read[0][..3], [0, two_files, two_files], "{user:?}");
            assert!(read[0][3] > two_files && read[0][3] < two_files + 20, "{user:?}: {read:?}");
            assert_eq!(read[0], read[1], "{user:?}: ten times as many files, and no more is read");
        });
    }
}

/// Flips one bit of bytes that the store holds verbatim, or flips it back.
fn flip(host: &Host, bytes: &[u8]) {
    for pack in std::fs::read_dir(host.data().join("store/packs")).unwrap() {
        let path = pack.unwrap().path();
        let mut content = std::fs::read(&path).unwrap();
        // Flips the middle: the search uses the beginning and the end.
        let found = content
            .windows(bytes.len())
            .position(|window| window[..100] == bytes[..100] && window[400..] == bytes[400..]);
        if let Some(at) = found {
            content[at + 250] ^= 1;
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &content[at..at + bytes.len()], at as u64).unwrap();
            return;
        }
    }
    panic!("the store does not hold it");
}

#[test]
fn restore_validates_first() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        fill(&k, 5).await;
        let bytes = async |path: &str| -> Vec<u8> {
            let hex = out(&k, &format!("print(open('{path}', 'rb').read().hex())")).await;
            (0..hex.len() / 2).map(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).unwrap()).collect()
        };
        let (needed, not_needed) = (bytes("d1/f7").await, bytes("d2/f3").await);
        k.checkpoint(&named("one")).await.unwrap();
        out(&k, "open('d1/f7', 'w').write('other'); x = 1").await;
        flip(&host, &needed);
        flip(&host, &not_needed);
        let version = k.info().await.unwrap().version;
        let error = k.restore_checkpoint("one", 0).await.expect_err("it is damaged");
        assert!(error.code == ErrorCode::Corrupt && error.message.contains("damaged"), "{error:?}");
        assert_eq!(out(&k, "print(x, open('d1/f7').read())").await, "1 other");
        assert_eq!(log(&host, "k").len(), 1, "not even a safety checkpoint was taken");
        assert_eq!(k.info().await.unwrap().version, version + 1, "only the last execution");
        // Unchanged files need nothing of the store.
        flip(&host, &needed);
        k.restore_checkpoint("one", 0).await.expect("whole");
        assert_eq!((bytes("d1/f7").await, bytes("d2/f3").await), (needed.clone(), not_needed.clone()));
        // The damage matters once the object is needed.
        out(&k, "os.remove('d2/f3')").await;
        let error = k.restore_checkpoint("one", 0).await.expect_err("it is damaged");
        assert!(error.code == ErrorCode::Corrupt, "{error:?}");
        flip(&host, &not_needed);
        k.restore_checkpoint("one", 0).await.expect("whole");
        assert_eq!(bytes("d2/f3").await, not_needed);
    });
}
