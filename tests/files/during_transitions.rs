//! File operations while a transition or a checkpoint holds the kernel: they wait, or fail as the client chose.

use std::time::Duration;

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::error::{Error, ErrorCode};
use ryokan::core::files::WhileHeld;
use ryokan::rpc::client::{FilesClient, KernelClient};

use super::{bash, each_user, shell};
use crate::processes::Inside;
use crate::support::{Host, eventually, out};

fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> (ErrorCode, String) {
    let error = result.expect_err("the kernel is held");
    (error.code, error.reason)
}

/// A restore waits for the running execution, and has the kernel from its request on. Calls wait, or are refused.
pub(crate) async fn restores(host: &Host, name: &str, inside: &Inside<'_>, files: &FilesClient) {
    let kernel = inside.kernel;
    let hasty = kernel.files_with(WhileHeld::Refuse).await.expect("its files");
    files.write(b"f", b"before").await.expect("written");
    host.ok(&["checkpoint", name, "-m", "here"]);
    hasty.write(b"f", b"between").await.expect("nothing holds the kernel");
    let exec = kernel.submit(inside.sleep()).await.expect("it runs");
    let restoring = kernel.restore_checkpoint("here", 0);
    let operating = async {
        let restoring = (ErrorCode::Busy, "restoring".to_owned());
        eventually("the restore has the kernel", || async {
            hasty.stat(b"f", true).await.is_err_and(|error| (error.code, error.reason) == restoring)
        })
        .await;
        let waiting = (files.write(b"f", b"after"), files.read(b"f"), files.list(b"."));
        let waiting = async { futures::join!(waiting.0, waiting.1, waiting.2) };
        let refusing = async {
            assert_eq!(refused(hasty.read(b"f").await), restoring);
            assert_eq!(refused(hasty.list(b".").await), restoring);
            assert_eq!(refused(hasty.write(b"f", b"x").await), restoring);
            assert_eq!(refused(hasty.make_dir(b"d", 0o755).await), restoring);
            assert_eq!(refused(hasty.watch(b".", false, async |_| Ok(())).await), restoring);
            let cp = host.cli(&["cp", "--no-wait", &format!("{name}:f"), "-"]);
            let said = String::from_utf8_lossy(&cp.stderr).into_owned();
            let held = format!("kernel {name} is being restored");
            assert!(cp.status.code() == Some(4) && said.contains(&held), "{said}");
            kernel.interrupt_execution(exec).await.expect("interrupted");
        };
        let ((written, read, listed), ()) = futures::join!(waiting, refusing);
        written.expect("it waits");
        let read = read.expect("it waits");
        assert!(read == b"before" || read == b"after", "{read:?}");
        assert!(listed.expect("it waits").iter().any(|file| file.name == b"f"));
    };
    let (restored, ()) = futures::join!(restoring, operating);
    restored.expect("restored");
    assert_eq!(files.read(b"f").await.expect("read"), b"after", "written after the restore");
}

#[test]
fn operations_wait_for_restores() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            restores(&host, "k", &shell(&kernel), &files).await;
        });
    });
}

#[test]
fn hasty_take_and_watch_are_refused() {
    let host = Host::start();
    host.with(async |client| {
        let (kernel, files) = bash(&client, "k").await;
        files.write(b"f", b"before").await.expect("written");
        host.ok(&["fork", "k", "try"]);
        host.ok(&["exec", "try", "echo after > f"]);
        let hasty = kernel.files_with(WhileHeld::Refuse).await.expect("its files");
        let exec = kernel.submit("sleep 600").await.expect("it runs");
        let operating = async {
            eventually("the restore has the kernel", || async { hasty.stat(b"f", true).await.is_err() }).await;
            for args in [&["watch", "k", "--no-wait"][..], &["take", "k", "--from", "try", "--no-wait"]] {
                let said = host.cli(args);
                let text = String::from_utf8_lossy(&said.stderr).into_owned();
                assert!(
                    said.status.code() == Some(4) && text.contains("kernel k is being restored"),
                    "{args:?}: {text}"
                );
            }
            kernel.interrupt_execution(exec).await.expect("interrupted");
        };
        futures::join!(kernel.restore_checkpoint("latest", 0), operating).0.expect("restored");
        host.ok(&["take", "k", "--from", "try", "--no-wait"]);
        assert_eq!(files.read(b"f").await.expect("read"), b"after\n");
    });
}

/// An upload that began before a restore ends after it.
#[test]
fn uploads_finish_after_restores() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            let hasty = kernel.files_with(WhileHeld::Refuse).await.expect("its files");
            out(&kernel, "echo 1 > f").await;
            host.ok(&["checkpoint", "k", "-m", "here"]);
            let mut upload = files.create(b"new", Default::default()).await.expect("begun");
            let mut refused_once = hasty.create(b"refused", Default::default()).await.expect("begun");
            upload.write(b"whole").await.expect("taken");
            refused_once.write(b"whole").await.expect("taken");
            let exec = kernel.submit("sleep 600").await.expect("it runs");
            let finishing = async {
                eventually("the restore has the kernel", || async { hasty.stat(b"f", true).await.is_err() }).await;
                let refusing = async {
                    assert_eq!(refused(refused_once.finish().await), (ErrorCode::Busy, "restoring".into()));
                    kernel.interrupt_execution(exec).await.expect("interrupted");
                };
                futures::join!(upload.finish(), refusing).0.expect("it waits");
            };
            let (restored, ()) = futures::join!(kernel.restore_checkpoint("here", 0), finishing);
            restored.expect("restored");
            assert_eq!(files.read(b"new").await.expect("there"), b"whole");
            assert!(files.stat(b"refused", true).await.is_err(), "it was refused");
            refused_once.finish().await.expect("it is kept");
            assert_eq!(files.read(b"refused").await.expect("there"), b"whole");
        });
    });
}

/// Takes checkpoints until `during` has seen one that captures the files, and returns true. `during` gets files whose
/// changes fail then, and the round.
async fn in_capture(kernel: &KernelClient, mut during: impl AsyncFnMut(&FilesClient, usize) -> bool) {
    let hasty = kernel.files_with(WhileHeld::Refuse).await.expect("its files");
    for round in 0..50 {
        out(kernel, "head -c 16M /dev/urandom > data").await;
        let request = CheckpointRequest::new(CheckpointType::Manual, &format!("c{round}"));
        let done = std::cell::Cell::new(false);
        let taking = async {
            kernel.checkpoint(&request).await.expect("taken");
            done.set(true);
        };
        let changing = async {
            while !done.get() {
                if captures(&hasty).await {
                    return during(&hasty, round).await;
                }
            }
            false
        };
        if futures::join!(taking, changing).1 {
            return;
        }
    }
    panic!("no change met a checkpoint");
}

/// Whether the files are being captured.
async fn captures(hasty: &FilesClient) -> bool {
    match hasty.make_dir(b"d", 0o755).await {
        Ok(()) => false,
        Err(error) => {
            assert_eq!((error.code, error.reason.as_str()), (ErrorCode::Busy, "checkpointing"));
            true
        }
    }
}

#[test]
fn dropped_calls_change_nothing() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            in_capture(&kernel, async |hasty, round| {
                let name = format!("late{round}");
                let waiting = Box::pin(files.make_dir(name.as_bytes(), 0o755));
                // The daemon answers in order: it has the call that waits, and then has lost it.
                let asked = Box::pin(hasty.stat(b".", true));
                let futures::future::Either::Right((asked, waiting)) = futures::future::select(waiting, asked).await
                else {
                    return false;
                };
                asked.expect("a read waits for no checkpoint");
                drop(waiting);
                let is_held = captures(hasty).await;
                // Changes take turns: this one comes after the lost one.
                files.make_dir(b"next", 0o755).await.expect("it waits");
                assert!(!is_held || files.stat(name.as_bytes(), true).await.is_err(), "changed without its caller");
                is_held
            })
            .await;
        });
    });
}

#[test]
fn leases_count_after_waiting() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            in_capture(&kernel, async |_, round| {
                let name = format!("late{round}");
                let leasing = async {
                    let lease = kernel.lease("other", Duration::from_secs(600), b"").await.expect("granted");
                    let holder = lease.kernel().await.expect("its kernel");
                    let holder = holder.files_with(WhileHeld::Refuse).await.expect("its files");
                    (captures(&holder).await, lease)
                };
                let (made, (is_held, lease)) = futures::join!(files.make_dir(name.as_bytes(), 0o755), leasing);
                if is_held {
                    assert_eq!(refused(made), (ErrorCode::Busy, "lease".into()));
                }
                lease.release().await.expect("released");
                is_held
            })
            .await;
        });
    });
}

/// Changes are refused while the files are captured; reads never are, and those of a waiting client neither.
#[test]
fn hasty_changes_fail_in_checkpoints() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            in_capture(&kernel, async |hasty, _| {
                hasty.stat(b"data", true).await.expect("a read waits for no checkpoint");
                files.make_dir(b"e", 0o755).await.expect("it waits");
                true
            })
            .await;
        });
    });
}
