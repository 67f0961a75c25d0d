//! Summaries that replace messages: the journal's view of them, and that no message is lost.

use ryokan::core::checkpoint::{CheckpointRequest, Span};
use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::rpc::client::{JournalSeen, KernelClient};

use super::named;
use crate::support::{Host, kernel, out};

async fn seen(k: &KernelClient, how: JournalSeen<'_>) -> Vec<(u64, String, String)> {
    let mut all = Vec::new();
    let each = k.each_entry_seen(how, 0, 0, async |entry| {
        all.push((entry.sequence, entry.kind, entry.text));
        Ok(())
    });
    each.await.unwrap();
    all
}

fn compacting(name: &str, summary: &str, spans: &[(u64, u64)]) -> CheckpointRequest {
    let compact = spans.iter().map(|(first, last)| Span { first: *first, last: *last }).collect();
    CheckpointRequest { summary: summary.into(), compact, ..named(name) }
}

#[test]
fn compacted_messages_show_summary() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        for text in ["one", "two"] {
            k.message("user", text).await.unwrap();
        }
        out(&k, "echo between").await;
        k.message("user", "three").await.unwrap();
        let taken = k.checkpoint(&compacting("short", "they counted", &[(1, 4)])).await.unwrap();
        assert_eq!((taken.compacted, taken.summary.as_str()), (3, "they counted"));
        k.message("user", "four").await.unwrap();
        let texts = |all: Vec<(u64, String, String)>| all.into_iter().map(|(_, _, text)| text).collect::<Vec<_>>();
        let short = seen(&k, JournalSeen::Compacted).await;
        assert_eq!(short[1], (4, "checkpoint".into(), "[checkpoint] they counted".into()));
        let short = texts(short);
        assert_eq!((short.len(), short[0].as_str(), short[3].as_str()), (4, "echo between", "user: four"), "{short:?}");
        let whole = texts(seen(&k, JournalSeen::Whole).await);
        assert_eq!(whole[..4], ["user: one", "user: two", "echo between", "user: three"]);
        let held = texts(seen(&k, JournalSeen::Of("short")).await);
        assert_eq!(held, ["user: one", "user: two", "user: three"]);
        // A later, larger summary replaces an earlier one; a later summary of a part leaves the larger one in place.
        let newest = k.info().await.unwrap().version;
        k.checkpoint(&compacting("wider", "all of it", &[(1, newest)])).await.unwrap();
        let shown = texts(seen(&k, JournalSeen::Compacted).await);
        assert!(shown.contains(&"[checkpoint] all of it".into()), "{shown:?}");
        assert!(!shown.iter().any(|text| text.contains("they counted")), "{shown:?}");
        k.checkpoint(&compacting("narrow", "only the first", &[(1, 1)])).await.unwrap();
        let shown = texts(seen(&k, JournalSeen::Compacted).await);
        assert_eq!(shown[0], "[checkpoint] only the first");
        assert!(shown.contains(&"[checkpoint] all of it".into()), "{shown:?}");
        // A restore changes none of that.
        k.restore_checkpoint("short", 0).await.unwrap();
        assert_eq!(texts(seen(&k, JournalSeen::Compacted).await)[..shown.len()], shown[..]);
        let none = k.checkpoint(&compacting("none", "nothing", &[(3, 3)])).await.unwrap_err();
        assert_eq!(none.code, ErrorCode::NotFound, "{none:?}");
        for wrong in [compacting("x", "", &[(1, 2)]), compacting("x", "s", &[(2, 1)])] {
            assert_eq!(k.checkpoint(&wrong).await.unwrap_err().code, ErrorCode::InvalidArgument);
        }
    });
    host.ok(&["message", "k", "--role", "user", "five"]);
    host.ok(&["checkpoint", "k", "-m", "cli", "--summary", "by hand", "--compact", "1.."]);
    assert!(host.ok(&["journal", "k"]).contains("[checkpoint] by hand"));
    assert!(host.ok(&["journal", "k", "--full"]).contains("user: one"));
    assert!(host.ok(&["journal", "k", "--checkpoint", "short"]).contains("user: two"));
    assert_eq!(host.cli(&["checkpoint", "k", "--compact", "1..2"]).status.code(), Some(2));
}
