//! Files and processes of a machine from outside: the same tables as for a kernel without one.

use ryokan::core::engine::EngineName;
use ryokan::core::files::FileAttributes;

use super::{Machines, NEW_LAB};
use crate::files::{access, copy, hostile, reason};
use crate::processes::{Inside, table};
use crate::support::{User, eventually, users};

#[test]
fn running_machine_serves_files() {
    for user in users() {
        let mut host = Machines::start(user);
        host.ok(&NEW_LAB);
        let folder = hostile::secret(&host);
        host.with(async |client| {
            let (kernel, _) = client.open_kernel("lab").await.expect("opened");
            let files = kernel.files().await.expect("its files");
            let inside = Inside { kernel: &kernel, engine: EngineName::Python };
            inside.sh("true").await;
            access::changes(&inside, &files).await;
            assert!(host.ok(&["journal", "lab"]).contains("files: wrote /workspace/a/f"));
            // What does not depend on the daemon's user is done once.
            if users().last() == Some(&user) {
                copy::folders(&host, "lab", false);
                inside.sh("chmod -R u+rwX . && rm -rf ./*").await;
                access::checkpoints(&host, "lab", &inside, &files).await;
                access::contents(&inside, &files).await;
                table::starts(&kernel).await;
                // Python takes seconds to start in a machine.
                table::ends(&inside, 40_000).await;
                table::attaches(&kernel).await;
            }
            access::refusals(&inside, &files, "not_found").await;
            hostile::links(&inside, &files, &folder).await;
            // A count of the workspace's bytes, which is made from time to time, sees what code inside wrote.
            let fill = "import resource\nfor name in 'ab': open(name, 'w').truncate(resource.getrlimit(resource.RLIMIT_FSIZE)[0])";
            crate::support::out(&kernel, fill).await;
            let is_refused = async || {
                let written = files.write(b"g", b"x").await;
                written.is_err_and(|error| error.reason == "workspace_size")
            };
            eventually("a refusal", is_refused).await;
            for name in [b"a", b"b"] {
                files.remove(name, false).await.expect("removed");
            }
            files.write(b"g", b"before").await.expect("written");
        });
        hostile::assert_untouched(&folder);
        assert_eq!(host.machines().len(), 1, "{user:?}: all of it was one machine\n{}", host.log());
        // The next daemon's machine is the same.
        host.restart();
        host.with(async |client| {
            let (kernel, _) = client.open_kernel("lab").await.expect("opened");
            let files = kernel.files().await.expect("its files");
            files.write(b"g", b"after").await.expect("written");
        });
        assert_eq!(host.run("lab", "print(open('g').read())"), "after");
        assert_eq!(host.machines().len(), 1, "{user:?}: it was adopted\n{}", host.log());
    }
}

#[test]
fn stopped_machine_changes_nothing() {
    let host = Machines::start(User::Own);
    host.ok(&NEW_LAB);
    host.run("lab", "open('f', 'w').write('inside')");
    host.with(async |client| {
        let (kernel, _) = client.open_kernel("lab").await.expect("opened");
        let files = kernel.files().await.expect("its files");
        let begin = async || {
            let mut half = files.create(b"half", FileAttributes::default()).await.expect("begun");
            half.write(b"half").await.expect("taken");
            half
        };
        let mut half = begin().await;
        host.ok(&["suspend", "lab"]);
        assert_eq!(files.read(b"f").await.expect("read"), b"inside");
        assert_eq!(reason(files.write(b"f", b"").await), "suspended");
        assert_eq!(reason(files.remove(b"f", false).await), "suspended");
        // It is sent ahead: its refusal is that of the end.
        let _ = half.write(b"more").await;
        assert_eq!(reason(half.finish().await), "suspended");
        host.ok(&["resume", "lab"]);
        files.write(b"f", b"outside").await.expect("written");
        // What is begun in a machine does not appear on this host, nor the other way round.
        let half = begin().await;
        kernel.stop(false).await.expect("stopped");
        assert_eq!(reason(half.finish().await), "moved");
        assert_eq!(files.read(b"f").await.expect("read"), b"outside");
        files.write(b"g", b"stopped").await.expect("written");
        let half = begin().await;
        let seen =
            crate::support::out(&kernel, "import os; print(sorted(os.listdir()), open('f').read(), open('g').read())");
        assert_eq!(seen.await, "['f', 'g'] outside stopped");
        assert_eq!(reason(half.finish().await), "moved");
        assert_eq!(reason(files.read(b"half").await), "not_found");
    });
}
