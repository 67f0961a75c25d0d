//! Files that cannot be read are in no checkpoint and no fork; whoever takes one is told.

use ryokan::core::engine::EngineName;

use crate::support::{Host, User, kernel, out};

#[test]
fn whoever_takes_a_checkpoint_or_forks_is_told_which_files_are_not_in_it() {
    // Root's daemon reads them all.
    let Some(user) = crate::support::users().into_iter().find(|user| *user == User::Unprivileged) else { return };
    let host = Host::start_as(user);
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Bash).await;
        out(&k, "echo a > s; echo b > t; chmod 000 s").await;
        let said = |args: &[&str]| {
            let output = host.cli(args);
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stderr).expect("text")
        };
        for args in [&["checkpoint", "k", "-m", "c"][..], &["fork", "k", "copy"]] {
            let said = said(args);
            assert!(said.contains("warning: not in it: s (not readable)"), "{args:?}: {said}");
        }
        assert!(host.ok(&["events", "--json"]).contains("file/s (not readable)"));
        out(&k, "chmod 600 s").await;
        assert_eq!(said(&["checkpoint", "k", "-m", "d"]), "");
    });
}
