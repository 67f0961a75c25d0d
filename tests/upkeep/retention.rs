//! Retention of checkpoints.

use ryokan::core::checkpoint::CheckpointType;
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::retention::Retention;

use super::{auto, edit, gc, host, kernel_folder, log, manual, names, taking};
use crate::support::{User, eventually, kernel, out, users};

const DAY_MS: i64 = 86_400_000;

#[test]
fn default_retention_policy() {
    for user in users() {
        let mut host = host(user);
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Kaish).await;
            manual(&k, "mine").await;
            for n in 1..=25 {
                out(&k, &format!("x={n}")).await;
                auto(&k, &format!("auto {n}")).await;
                if n == 1 {
                    k.pin_checkpoint("auto 1", true).await.expect("pinned");
                }
            }
            eventually("the oldest go", async || log(&k).await.len() == 22).await;
            let names = names(&k).await;
            assert_eq!(names.first().map(String::as_str), Some("auto 25"));
            assert_eq!(names[19..], ["auto 6", "auto 1", "mine"], "{names:?}");
            assert_eq!(k.info().await.expect("info").checkpoints, 22);
            // The parent of a removed checkpoint's child is the nearest remaining ancestor.
            let all = log(&k).await;
            assert_eq!(all[19].parent, Some(all[20].id));
            assert_eq!(all[20].parent, Some(all[21].id));
            // Remaining checkpoints are complete.
            k.restore_checkpoint("auto 6", 0).await.expect("restored");
            assert_eq!(out(&k, "echo $x").await, "6");
            k.restore_checkpoint("mine", 0).await.expect("restored");
        });
        // Of two checkpoints that are an hour too old, the manual one stays.
        host.kill();
        let old = 90 * DAY_MS + 3_600_000;
        let state_db = kernel_folder(&host).join("state.db");
        edit(&state_db, &format!("UPDATE checkpoints SET at_ms = at_ms - {old} WHERE name IN ('auto 9', 'mine')"));
        host.launch();
        host.with(async |client| {
            let k = client.open_kernel("k").await.expect("there").0;
            let before = names(&k).await;
            let (_, report) = gc(&client, false).await;
            let after = names(&k).await;
            assert_eq!(report.checkpoints_removed, 1, "{before:?} {after:?}");
            assert!(!after.contains(&"auto 9".to_owned()) && after.contains(&"mine".to_owned()));
            assert_eq!(after.len() + 1, before.len());
        });
    }
}

#[test]
fn safety_checkpoint_retained() {
    let host = host(User::Own);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        k.set_retention(&Retention { newest: Some(1), keep_for_ms: None }, 0).await.expect("set");
        out(&k, "x=one; echo one > file").await;
        manual(&k, "one").await;
        out(&k, "x=two; echo two > file").await;
        let done = k.restore_checkpoint("one", 0).await.expect("restored");
        for n in 0..6 {
            out(&k, &format!("y={n}")).await;
            auto(&k, &format!("auto {n}")).await;
        }
        eventually("the other checkpoints are removed", async || log(&k).await.len() == 3).await;
        let (items, _) = gc(&client, true).await;
        let why = |id| {
            let is = |item: &&ryokan::core::upkeep::GcItem| match &item.thing {
                ryokan::core::upkeep::GcThing::Checkpoint { checkpoint, .. } => checkpoint.id == id,
                ryokan::core::upkeep::GcThing::Object { .. } => false,
            };
            items.iter().find(is).map(|item| (item.stays, item.why.clone())).expect("the checkpoint is listed")
        };
        assert_eq!(why(done.safety), (true, "safety checkpoint: undo goes back to it".into()));
        // Removal by request is refused, too.
        let refused = k.remove_checkpoint(&done.safety.to_string(), 0).await.expect_err("undo needs it");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Conflict, "in_use"));
        gc(&client, false).await;
        k.undo(0).await.expect("undone");
        assert_eq!(out(&k, "echo $x; cat file").await, "two\ntwo");
    });
}

#[test]
fn backward_clock_removes_nothing() {
    let mut host = host(User::Own);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        for n in 0..5 {
            out(&k, &format!("x={n}")).await;
            auto(&k, &format!("auto {n}")).await;
        }
    });
    host.kill();
    // As if taken while the clock was years ahead, one of them beyond the calendar's range.
    let state_db = kernel_folder(&host).join("state.db");
    edit(&state_db, &format!("UPDATE checkpoints SET at_ms = at_ms + {}", 3000 * DAY_MS));
    edit(&state_db, "UPDATE checkpoints SET at_ms = 9223372036854775807 WHERE number = 2");
    host.launch();
    host.with(async |client| {
        let k = client.open_kernel("k").await.expect("there").0;
        let (_, report) = gc(&client, false).await;
        assert_eq!((report.checkpoints_removed, log(&k).await.len()), (0, 5));
        auto(&k, "later").await;
        assert_eq!(log(&k).await.len(), 6);
        k.restore_checkpoint("auto 1", 0).await.expect("restored");
    });
}

#[test]
fn retention_settings() {
    let mut host = host(User::Own);
    host.ok(&["new", "k", "--keep", "3", "--keep-for", "7d"]);
    assert!(host.ok(&["show", "k"]).contains("keeps newest 3, for 7d"), "{}", host.ok(&["show", "k"]));
    assert_eq!(host.ok(&["retention", "k"]), "newest 3, for 7d\n");
    assert_eq!(host.ok(&["retention", "k", "--newest", "all", "--for", "never"]), "all, for ever\n");
    host.restart();
    assert_eq!(host.ok(&["retention", "k", "--newest", "2"]), "newest 2, for ever\n");
    host.restart();
    assert_eq!(host.ok(&["retention", "k"]), "newest 2, for ever\n");
    assert!(!host.cli(&["retention", "k", "--newest", "0"]).status.success());
    host.with(async |client| {
        let k = client.open_kernel("k").await.expect("there").0;
        for n in 0..4 {
            out(&k, &format!("x={n}")).await;
            k.checkpoint(&taking(CheckpointType::Conflict, &format!("c{n}"))).await.expect("taken");
        }
        eventually("two stay", async || names(&k).await == ["c3", "c2"]).await;
        // A wider policy: existing and new checkpoints stay.
        k.set_retention(&Retention { newest: Some(4), keep_for_ms: None }, 0).await.expect("set");
        auto(&k, "more").await;
        assert_eq!(names(&k).await, ["more", "c3", "c2"]);
        let narrow = Retention { newest: Some(0), keep_for_ms: None };
        assert_eq!(k.set_retention(&narrow, 1).await.expect_err("a stale version").code, ErrorCode::Conflict);
    });
    assert_eq!(host.ok(&["retention", "k", "--newest", "1"]), "newest 1, for ever; 2 checkpoints removed\n");
    assert_eq!(host.ok(&["retention", "k", "--for", "30d"]), "newest 1, for 30d\n");
}

#[test]
fn checkpoint_removal_and_unpinning() {
    let host = host(User::Own);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        for n in 0..3 {
            out(&k, &format!("x={n}")).await;
            manual(&k, &format!("m{n}")).await;
        }
        let version = k.info().await.expect("info").version;
        assert_eq!(k.remove_checkpoint("m1", version - 1).await.expect_err("stale").code, ErrorCode::Conflict);
        assert_eq!(k.remove_checkpoint("m2", 0).await.expect_err("the head").code, ErrorCode::Conflict);
        assert_eq!(k.remove_checkpoint("m1", version).await.expect("removed").name, "m1");
        assert_eq!(k.remove_checkpoint("m1", 0).await.expect_err("gone").code, ErrorCode::NotFound);
        let all = log(&k).await;
        assert_eq!((all.len(), all[0].parent), (2, Some(all[1].id)));
        assert_eq!(k.info().await.expect("info").version, version + 1, "it is in the journal");
    });
    let refused = host.cli(&["checkpoint", "k", "--delete", "m0"]);
    assert_eq!(refused.status.code(), Some(2), "without a terminal it wants --yes");
    host.ok(&["checkpoint", "k", "--delete", "m0", "--yes"]);
    host.ok(&["retention", "k", "--newest", "1"]);
    host.with(async |client| {
        let k = client.open_kernel("k").await.expect("there").0;
        out(&k, "x=5").await;
        auto(&k, "kept").await;
        k.pin_checkpoint("kept", true).await.expect("pinned");
        for n in 0..3 {
            out(&k, &format!("x={n}")).await;
            auto(&k, &format!("a{n}")).await;
        }
        eventually("one other checkpoint stays", async || names(&k).await == ["a2", "kept", "m2"]).await;
    });
    host.ok(&["checkpoint", "k", "--unpin", "kept"]);
    host.with(async |client| {
        let k = client.open_kernel("k").await.expect("there").0;
        eventually("it is removed", async || names(&k).await == ["a2", "m2"]).await;
    });
}
