//! Files and processes of a machine from outside: the same tables as for a kernel without one.

use ryokan::core::engine::EngineName;
use ryokan::core::files::{FileAttributes, FileEvent, FileEventKind};
use ryokan::core::limits::FILE_WATCHES;

use super::{Machines, NEW_LAB, users};
use crate::files::watch::Watched;
use crate::files::{access, copy, hostile, reason};
use crate::processes::{Inside, table};
use crate::support::{User, eventually};

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
            if user == User::Unprivileged {
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
    refuses_links(&host);
    is_watched(&host);
    host.run("lab", "import os; os.system('rm -rf ./*'); open('f', 'w').write('inside')");
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

/// A daemon that is root follows no name out of the workspace.
fn refuses_links(host: &Machines) {
    let folder = hostile::secret(host);
    host.with(async |client| {
        let (kernel, _) = client.open_kernel("lab").await.expect("opened");
        let files = kernel.files().await.expect("its files");
        let inside = Inside { kernel: &kernel, engine: EngineName::Python };
        access::refusals(&inside, &files, "not_found").await;
        hostile::links(&inside, &files, &folder).await;
        inside.sh("chmod -R u+rwX . && rm -rf ./*").await;
    });
    hostile::assert_untouched(&folder);
}

/// Code inside and clients change files of a machine; a start and an end of the machine end a watch.
fn is_watched(host: &Machines) {
    host.run("lab", "import os; os.makedirs('old/er')");
    host.with(async |client| {
        let (kernel, _) = client.open_kernel("lab").await.expect("opened");
        let files = kernel.files().await.expect("its files");
        let inside = Inside { kernel: &kernel, engine: EngineName::Python };
        let (all, top) = (Watched::begin(&files, ".", true).await, Watched::begin(&files, ".", false).await);
        inside.sh("echo 1 > old/er/f; mkdir -p a/b; echo 1 > a/b/new; ln -s / out").await;
        for (kind, path) in [
            (FileEventKind::Created, "old/er/f"),
            (FileEventKind::Closed, "old/er/f"),
            (FileEventKind::Created, "a/b/new"),
            (FileEventKind::Created, "out"),
        ] {
            all.sees(kind, path).await;
        }
        files.write(b"a/mine", b"x").await.expect("written");
        all.sees(FileEventKind::Created, "a/mine").await;
        inside.sh("rm old/er/f").await;
        all.sees(FileEventKind::Removed, "old/er/f").await;
        assert!(top.has(FileEventKind::Created, "a") && !top.has(FileEventKind::Created, "a/b"), "{:?}", top.events);
        let outside = |event: &FileEvent| event.path.starts_with(b"out/") || event.path.contains(&0);
        assert!(!all.events.borrow().iter().any(outside), "{:?}", all.events);
        assert_eq!(reason(files.watch(b"none", false, async |_| Ok(())).await), "not_found");
        assert_eq!(reason(files.watch(b"out", false, async |_| Ok(())).await), "outside");
        // It continues after a suspension.
        host.ok(&["suspend", "lab"]);
        assert_eq!(reason(files.watch(b".", false, async |_| Ok(())).await), "suspended");
        host.ok(&["resume", "lab"]);
        inside.sh("echo 1 > late").await;
        all.sees(FileEventKind::Created, "late").await;
        // Closed watches make room.
        top.call.abort();
        for _ in 0..2 * FILE_WATCHES {
            Watched::begin(&files, ".", false).await.call.abort();
        }
        host.ok(&["stop", "lab"]);
        all.call.await.expect("no panic").expect("ended");
        assert_eq!(all.events.borrow().last().map(|event| event.kind), Some(FileEventKind::Ended));
        let stopped = Watched::begin(&files, ".", true).await;
        files.write(b"a/stopped", b"x").await.expect("written");
        stopped.sees(FileEventKind::Created, "a/stopped").await;
        inside.sh("true").await;
        stopped.call.await.expect("no panic").expect("ended");
        assert_eq!(stopped.events.borrow().last().map(|event| event.kind), Some(FileEventKind::Ended));
    });
}
