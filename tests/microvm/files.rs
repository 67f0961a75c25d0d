//! Files and processes of a machine from outside: the same tables as for a kernel without one.

use ryokan::core::files::FileAttributes;
use ryokan::rpc::client::KernelClient;

use super::{Machines, NEW_LAB};
use crate::files::{access, copy, hostile, reason};
use crate::processes::{says, table};
use crate::support::{User, users};

/// Empties the workspace from inside.
async fn empty(kernel: &KernelClient) {
    says(kernel, "chmod -R u+rwX . && rm -rf ./*").await;
}

#[test]
fn running_machine_serves_files() {
    for user in users() {
        let mut host = Machines::start(user);
        host.ok(&NEW_LAB);
        let folder = hostile::secret(&host);
        host.with(async |client| {
            let (kernel, _) = client.open_kernel("lab").await.expect("opened");
            let files = kernel.files().await.expect("its files");
            says(&kernel, "true").await;
            access::changes(&kernel, &files).await;
            assert!(host.ok(&["journal", "lab"]).contains("files: wrote /workspace/a/f"));
            access::checkpoints(&host, "lab", &kernel, &files).await;
            access::contents(&kernel, &files).await;
            empty(&kernel).await;
            access::refusals(&kernel, &files, "not_found").await;
            empty(&kernel).await;
            hostile::links(&kernel, &files, &folder).await;
            empty(&kernel).await;
            copy::folders(&host, "lab");
            empty(&kernel).await;
            table::starts(&kernel).await;
            table::ends(&kernel).await;
            table::attaches(&kernel).await;
            // A count of the workspace's bytes sees what code inside wrote.
            says(&kernel, "truncate -s 1T sparse").await;
            assert_eq!(reason(files.write(b"g", b"x").await), "workspace_size");
            files.remove(b"sparse", false).await.expect("removed");
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
            assert_eq!(says(&kernel, "cat g").await, "after");
        });
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
        assert_eq!(says(&kernel, "ls; cat f g").await, "f\ng\noutsidestopped");
        assert_eq!(reason(half.finish().await), "moved");
        assert_eq!(reason(files.read(b"half").await), "not_found");
    });
}
