//! File operations while a transition or a checkpoint holds the kernel: they wait, or fail as the client chose.

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::error::{Error, ErrorCode};
use ryokan::core::files::WhileHeld;

use super::{bash, each_user};
use crate::support::{eventually, out};

fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> (ErrorCode, String) {
    let error = result.expect_err("the kernel is held");
    (error.code, error.reason)
}

/// A restore waits for the running execution, and has the kernel from its request on.
#[test]
fn operations_wait_for_restores() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            let hasty = kernel.files_with(WhileHeld::Refuse).await.expect("its files");
            files.write(b"f", b"before").await.expect("written");
            host.ok(&["checkpoint", "k", "-m", "here"]);
            hasty.write(b"f", b"between").await.expect("nothing holds the kernel");
            let exec = kernel.submit("sleep 600").await.expect("it runs");
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
                    let cp = host.cli(&["cp", "--no-wait", "k:f", "-"]);
                    let said = String::from_utf8_lossy(&cp.stderr).into_owned();
                    assert!(cp.status.code() == Some(4) && said.contains("kernel k is being restored"), "{said}");
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
        });
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
            let mut lost = hasty.create(b"lost", Default::default()).await.expect("begun");
            upload.write(b"whole").await.expect("taken");
            lost.write(b"whole").await.expect("taken");
            let exec = kernel.submit("sleep 600").await.expect("it runs");
            let finishing = async {
                eventually("the restore has the kernel", || async { hasty.stat(b"f", true).await.is_err() }).await;
                let refusing = async {
                    assert_eq!(refused(lost.finish().await), (ErrorCode::Busy, "restoring".into()));
                    kernel.interrupt_execution(exec).await.expect("interrupted");
                };
                futures::join!(upload.finish(), refusing).0.expect("it waits");
            };
            let (restored, ()) = futures::join!(kernel.restore_checkpoint("here", 0), finishing);
            restored.expect("restored");
            assert_eq!(files.read(b"new").await.expect("there"), b"whole");
            assert!(files.stat(b"lost", true).await.is_err(), "it was refused");
        });
    });
}

/// Changes are refused while the files are captured; reads never are, and those of a waiting client neither.
#[test]
fn hasty_changes_fail_in_checkpoints() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            let hasty = kernel.files_with(WhileHeld::Refuse).await.expect("its files");
            let (mut busy, mut round) = (0, 0);
            while busy == 0 {
                round += 1;
                assert!(round < 50, "no change met a checkpoint");
                out(&kernel, "head -c 16M /dev/urandom > data").await;
                let request = CheckpointRequest::new(CheckpointType::Manual, &format!("c{round}"));
                let done = std::cell::Cell::new(false);
                let taking = async {
                    kernel.checkpoint(&request).await.expect("taken");
                    done.set(true);
                };
                let changing = async {
                    while !done.get() {
                        match hasty.make_dir(b"d", 0o755).await {
                            Ok(()) => {}
                            Err(error) => {
                                assert_eq!((error.code, error.reason.as_str()), (ErrorCode::Busy, "checkpointing"));
                                busy += 1;
                            }
                        }
                        hasty.stat(b"data", true).await.expect("a read waits for no checkpoint");
                        files.make_dir(b"e", 0o755).await.expect("it waits");
                    }
                };
                futures::join!(taking, changing);
            }
        });
    });
}
