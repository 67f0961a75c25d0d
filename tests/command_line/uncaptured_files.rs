//! Unreadable files are missing from checkpoints, forks and exports, with a warning.

use ryokan::core::engine::EngineName;

use crate::support::{Host, User, kernel, out};

#[test]
fn unreadable_files_reported() {
    // A daemon of root reads all of them.
    let Some(user) = crate::support::users().into_iter().find(|user| *user == User::Unprivileged) else { return };
    let host = Host::start_as(user);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Bash).await;
        // A socket is useless without its process, so it causes no warning.
        let bind = "import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")";
        out(&k, &format!("echo a > s; echo b > t; chmod 000 s; python3 -c '{bind}'; [ -S socket ]")).await;
        let said = |args: &[&str]| {
            let output = host.cli(args);
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stderr).expect("text")
        };
        for args in [&["checkpoint", "k", "-m", "c"][..], &["fork", "k", "copy"]] {
            let said = said(args);
            assert!(said.contains("warning: not included: s (not readable)"), "{args:?}: {said}");
        }
        let file = host.given(user).join("k.ryo").display().to_string();
        assert!(said(&["export", "k", &file]).contains("warning: not included: s (not readable)"));
        let events = host.ok(&["events", "--json"]);
        assert!(events.contains("\"unreadable\":[\"file/s\"]"), "{events}");
        out(&k, "chmod 600 s").await;
        assert_eq!(said(&["checkpoint", "k", "-m", "d"]), "");
    });
}
