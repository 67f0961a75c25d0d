//! `ryokan rename` with real kernels.

use ryokan::core::engine::EngineName;

use crate::support::{Host, kernel, out};

fn names(host: &Host) -> String {
    host.ok(&["ls", "--quiet"])
}

#[test]
fn rename_keeps_running_kernel() {
    let mut host = Host::start();
    host.with(async |client| {
        let opened = kernel(&client, "old", EngineName::Bash).await;
        out(&opened, "x=1").await;
        let before = opened.info().await.expect("info");
        let version = client.rename_kernel("old", "new", before.version).await.expect("renamed");
        let after = opened.info().await.expect("info");
        assert_eq!((after.id, after.spec.name.as_str(), after.version), (before.id, "new", version));
        assert_eq!(version, before.version + 1);
        assert_eq!(out(&opened, "echo $x").await, "1", "the worker continues");
        let stale = client.rename_kernel("new", "other", before.version).await.expect_err("an old version");
        assert_eq!(stale.code, ryokan::core::error::ErrorCode::Conflict);
        assert!(client.rename_kernel("new", "no/name", 0).await.is_err());
    });
    assert!(host.kernel_socket("new").exists() && !host.kernel_socket("old").exists());
    assert_eq!(host.cli(&["show", "old"]).status.code(), Some(3));
    host.kill();
    host.launch();
    assert_eq!(names(&host), "new\n");
    assert_eq!(host.ok(&["exec", "new", "echo $x"]), "1\n");
    assert!(host.ok(&["journal", "new"]).contains("renamed from old to new"));
    let events = host.ok(&["events", "new"]);
    assert!(events.contains("kernel_created") && events.contains("kernel_renamed"), "{events}");
    let audit = host.ok(&["audit", "new"]);
    assert!(audit.contains("kernel.rename") && audit.contains("from old to new"), "{audit}");
    // The old name is free.
    host.ok(&["new", "old", "--engine", "bash"]);
    assert_eq!(host.ok(&["exec", "old", "echo $x"]), "\n");
}

#[test]
fn renamed_code_sees_new_name() {
    let host = Host::start();
    host.ok(&["new", "old", "--engine", "bash"]);
    host.ok(&["exec", "old", "true"]);
    assert_eq!(host.ok(&["rename", "old", "new"]), "renamed old to new\n");
    assert_eq!(host.ok(&["rename", "new", "new"]), "renamed new to new\n", "the present name is no error");
    assert_eq!(host.ok(&["spawn", "new", "--", "printenv", "RYOKAN_KERNEL"]), "new\n");
    host.ok(&["stop", "new"]);
    host.ok(&["rename", "new", "newer"]);
    assert_eq!(host.ok(&["exec", "newer", "echo $RYOKAN_KERNEL"]), "newer\n");
    host.ok(&["checkpoint", "newer"]);
    assert!(!host.ok(&["diff", "newer"]).contains("later"));
    host.ok(&["exec", "newer", "later=1"]);
    assert!(host.ok(&["diff", "newer"]).contains("later"), "compared with the newest checkpoint");
    host.ok(&["retention", "newer", "--newest", "3"]);
    host.ok(&["archive", "newer"]);
    host.ok(&["rename", "newer", "packed"]);
    host.ok(&["unarchive", "packed"]);
    assert_eq!(host.ok(&["exec", "packed", "echo $RYOKAN_KERNEL"]), "packed\n");
    assert!(host.ok(&["retention", "packed"]).contains('3'), "the retention stays");
}

#[test]
fn taken_names_are_refused() {
    let host = Host::start();
    host.ok(&["new", "one"]);
    host.ok(&["new", "two"]);
    host.ok(&["group", "new", "all"]);
    for taken in ["two", "all"] {
        let refused = host.cli(&["rename", "one", taken]);
        assert_eq!(refused.status.code(), Some(4), "{}", String::from_utf8_lossy(&refused.stderr));
    }
    assert_eq!(names(&host), "one\ntwo\n");
    host.with(async |client| {
        let (kernel, _) = client.open_kernel("two").await.expect("open");
        kernel.publish(ryokan::core::rights::Rights::ALL, "shown").await.expect("published");
        let taken = client.rename_kernel("one", "shown", 0).await.expect_err("a published socket");
        assert_eq!(taken.code, ryokan::core::error::ErrorCode::AlreadyExists);
        client.rename_kernel("two", "three", 0).await.expect("renamed");
    });
    assert!(host.kernel_socket("shown").exists() && host.kernel_socket("three").exists());
}
