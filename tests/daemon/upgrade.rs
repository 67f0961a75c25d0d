//! Replacement of the programs while the daemon runs.

use std::os::unix::fs::PermissionsExt as _;

use ryokan::core::engine::EngineName;

use crate::support::{Host, kernel, out, users};

#[test]
fn replaced_worker_binary() {
    for user in users() {
        let host = Host::start_as(user);
        let (program, aside) = (host.path("bin/ryokan-worker"), host.path("bin/next"));
        std::fs::write(&aside, "#!/bin/sh\necho another build >&2; exit 1\n").unwrap();
        std::fs::set_permissions(&aside, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(&aside, &program).unwrap();
        for engine in [EngineName::Kaish, EngineName::Python] {
            host.with(async |client| {
                let made = kernel(&client, engine.name(), engine).await;
                let code = if engine == EngineName::Python { "print('as before')" } else { "echo as before" };
                assert_eq!(out(&made, code).await, "as before", "{}", host.log());
            });
        }
        std::fs::remove_file(&program).unwrap();
        host.with(async |client| {
            let made = kernel(&client, "third", EngineName::Kaish).await;
            assert_eq!(out(&made, "echo as before").await, "as before", "{}", host.log());
        });
    }
}
