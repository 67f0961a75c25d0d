//! Unified diffs of files: text, other contents, and their output on a terminal.

use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::error::Error;

use super::named;
use crate::support::{Host, kernel, out, users};

#[test]
fn unified_diff_of_text_and_binary() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let k = kernel(&client, "k", EngineName::Python).await;
            out(&k, "import os; os.mkdir('src')\nopen('src/a.txt', 'w').write('one\\ntwo\\nthree\\n')").await;
            out(&k, "open('bin', 'wb').write(b'\\0a'); open(b'\\xff', 'wb').write(b'\\xfe\\n')").await;
            out(&k, "open('gone', 'w').write('bye\\n'); open('mode', 'w').write('same'); open('big', 'w').write('x' * (5 << 20))").await;
            k.checkpoint(&named("a")).await.unwrap();
            out(&k, "open('src/a.txt', 'w').write('one\\n2\\nthree\\n'); os.chmod('mode', 0o700)").await;
            out(&k, "open('bin', 'wb').write(b'\\0b'); open(b'\\xff', 'wb').write(b'\\xfd\\x1b[31m\\n')").await;
            out(&k, "os.remove('gone'); open('new', 'w').write('hi'); open('big', 'w').write('y' * (5 << 20))").await;
        });
        let text = host.ok(&["diff", "k", "a", "-p"]);
        assert!(text.contains("--- a/src/a.txt\n+++ b/src/a.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"), "{text}");
        assert!(text.contains("--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-bye\n"), "{text}");
        assert!(text.contains("--- /dev/null\n+++ b/new\n") && text.contains("\\ No newline at end of file"), "{text}");
        assert!(text.contains("changed bin (binary)") && text.contains("changed big (too large)"), "{text}");
        assert!(text.contains("--- a/\\xff\n") && text.contains("+\\xfd\\u{1b}[31m\n"), "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains("mode"), "{text}");
        let painted = host.ok(&["diff", "k", "a", "--text", "--color", "always", "--", "src"]);
        assert!(painted.contains("\u{1b}[32m+2") && !painted.contains("gone"), "{painted}");
        let json: Vec<serde_json::Value> = host
            .ok(&["diff", "k", "a", "-p", "--json"])
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let odd = json.iter().find(|one| one["path_base64"].is_string()).expect("a name that is no UTF-8");
        assert!(odd["text_base64"].is_string(), "{odd}");
        host.ok(&["checkpoint", "k", "-m", "b"]);
        assert_eq!(host.ok(&["diff", "k", "a", "b", "-p"]), text, "{user:?}: to a checkpoint as to now");
        assert_eq!(host.ok(&["diff", "k", "b", "b", "-p"]), "");
        assert_eq!(host.cli(&["diff", "k", "nowhere", "-p"]).status.code(), Some(3));
    }
}

#[test]
fn abandoned_diff_blocks_nothing() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Python).await;
        let write = |seed: u32| {
            format!("import random\nrandom.seed({seed})\nfor n in range(30): open(f'f{{n}}', 'w').write('\\n'.join(str(random.random()) for _ in range(60000)))")
        };
        out(&k, &write(1)).await;
        k.checkpoint(&named("a")).await.unwrap();
        out(&k, &write(2)).await;
        k.checkpoint(&named("b")).await.unwrap();
        let other = kernel(&client, "other", EngineName::Kaish).await;
        out(&other, "echo warm").await;
        // The caller stops after one file.
        let gone = k.diff_text("a", (None, "b"), &[], async |_| Err(Error::unavailable("enough"))).await.unwrap_err();
        assert!(gone.message.contains("enough"), "{gone:?}");
        let began = Instant::now();
        let one = [b"f1".to_vec()];
        let reported = k.diff_text("a", (None, "b"), &one, async |_| Ok(()));
        let aside = async {
            let mut slowest = Duration::ZERO;
            for _ in 0..20 {
                let began = Instant::now();
                out(&other, "echo aside").await;
                slowest = slowest.max(began.elapsed());
            }
            slowest
        };
        let (reported, slowest) = futures::join!(reported, aside);
        reported.unwrap();
        assert!(slowest < Duration::from_secs(120), "the daemon was blocked for {slowest:?}");
        assert!(began.elapsed() < Duration::from_secs(600), "{:?}", began.elapsed());
    });
}
