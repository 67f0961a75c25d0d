//! Events of watched directories.

use std::cell::RefCell;
use std::io::BufRead as _;
use std::process::Stdio;
use std::rc::Rc;

use ryokan::core::error::Result;
use ryokan::core::files::{FileEvent, FileEventKind};
use ryokan::core::limits::FILE_WATCHES;
use ryokan::rpc::client::FilesClient;
use tokio::task::JoinHandle;

use super::{bash, each_user, reason};
use crate::support::{Host, eventually, out};

/// A watch, and what it has reported.
pub(crate) struct Watched {
    pub(crate) events: Rc<RefCell<Vec<FileEvent>>>,
    pub(crate) call: JoinHandle<Result<()>>,
}

impl Watched {
    pub(crate) async fn begin(files: &FilesClient, path: &str, recursive: bool) -> Watched {
        let events: Rc<RefCell<Vec<FileEvent>>> = Rc::default();
        let (seen, files, path) = (Rc::clone(&events), files.clone(), path.to_owned());
        let call = tokio::task::spawn_local(async move {
            let take = async |event| {
                seen.borrow_mut().push(event);
                Ok(())
            };
            files.watch(path.as_bytes(), recursive, take).await
        });
        let watched = Watched { events, call };
        watched.sees(FileEventKind::Ready, "").await;
        watched
    }

    pub(crate) fn has(&self, kind: FileEventKind, path: &str) -> bool {
        self.events.borrow().iter().any(|event| event.kind == kind && event.path == path.as_bytes())
    }

    pub(crate) async fn sees(&self, kind: FileEventKind, path: &str) {
        eventually(&format!("{kind:?} {path}"), || async { self.has(kind, path) }).await;
    }
}

#[test]
fn changes_are_reported() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            out(&kernel, "mkdir -p old/er; echo 1 > old/er/f").await;
            let (all, top) =
                (Watched::begin(&files, ".", true).await, Watched::begin(&files, "/workspace", false).await);
            out(&kernel, "echo 2 >> old/er/f; chmod 600 old/er/f; mkdir -p a/b; echo 1 > a/b/new; echo x > top").await;
            for (kind, path) in [
                (FileEventKind::Written, "old/er/f"),
                (FileEventKind::Closed, "old/er/f"),
                (FileEventKind::Changed, "old/er/f"),
                (FileEventKind::Created, "a"),
                (FileEventKind::Created, "a/b"),
                (FileEventKind::Created, "a/b/new"),
                (FileEventKind::Written, "top"),
            ] {
                all.sees(kind, path).await;
            }
            // A moved directory is watched at its new place.
            out(&kernel, "mv a c; echo 3 > c/b/late").await;
            all.sees(FileEventKind::Removed, "a").await;
            all.sees(FileEventKind::Created, "c/b/late").await;
            files.write(b"c/b/mine", b"x").await.expect("written");
            all.sees(FileEventKind::Created, "c/b/mine").await;
            out(&kernel, "rm -r c; echo 4 > last").await;
            all.sees(FileEventKind::Removed, "c/b/late").await;
            top.sees(FileEventKind::Created, "last").await;
            let below = top.events.borrow().iter().any(|event| event.path.contains(&b'/'));
            assert!(!below && top.has(FileEventKind::Created, "a"), "{:?}", top.events);
            assert!(!all.has(FileEventKind::Created, "a/b/late"), "{:?}", all.events);
        });
    });
}

#[test]
fn watch_ends_with_directory() {
    let host = Host::start();
    host.with(async |client| {
        let (kernel, files) = bash(&client, "k").await;
        for end in ["rm -r d", "mv d e", "mv d e; mkdir d"] {
            out(&kernel, "rm -rf d e; mkdir d").await;
            let watched = Watched::begin(&files, "d", true).await;
            out(&kernel, end).await;
            watched.call.await.expect("no panic").expect("ended");
            let last = watched.events.borrow().last().map(|event| event.kind);
            assert_eq!(last, Some(FileEventKind::Ended), "{end}");
        }
        assert_eq!(reason(files.watch(b"none", false, async |_| Ok(())).await), "not_found");
        out(&kernel, "echo x > f").await;
        assert_eq!(reason(files.watch(b"f", false, async |_| Ok(())).await), "not_directory");
    });
}

#[test]
fn watch_follows_no_link() {
    each_user(|host| {
        let outside = host.path("home").join("outside");
        std::fs::create_dir(&outside).expect("made");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&outside, open).expect("opened");
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            out(&kernel, &format!("ln -s {} link; mkdir d; ln -s ../link d/link; ln -s d inner", outside.display()))
                .await;
            assert_eq!(reason(files.watch(b"link", false, async |_| Ok(())).await), "outside");
            let (all, inner) = (Watched::begin(&files, ".", true).await, Watched::begin(&files, "inner", false).await);
            std::fs::write(outside.join("secret"), "x").expect("written");
            out(&kernel, "mkdir later; ln -s ../link later/link; echo x > d/f").await;
            all.sees(FileEventKind::Created, "later/link").await;
            std::fs::write(outside.join("another"), "x").expect("written");
            out(&kernel, "echo x > d/last").await;
            all.sees(FileEventKind::Created, "d/last").await;
            inner.sees(FileEventKind::Created, "last").await;
            let named = |name: &str| all.events.borrow().iter().any(|event| event.path.ends_with(name.as_bytes()));
            assert!(!named("secret") && !named("another"), "{:?}", all.events);
        });
    });
}

#[test]
fn watches_are_bounded() {
    let host = Host::start();
    host.with(async |client| {
        let (kernel, files) = bash(&client, "k").await;
        let all = Watched::begin(&files, ".", true).await;
        out(&kernel, "for n in {1..3000}; do echo x > f$n; done").await;
        for n in 1..=3000 {
            all.sees(FileEventKind::Created, &format!("f{n}")).await;
        }
        assert!(!all.has(FileEventKind::Overflow, ""));
        let mut more = Vec::new();
        for _ in 1..FILE_WATCHES {
            more.push(Watched::begin(&files, ".", false).await);
        }
        assert_eq!(reason(files.watch(b".", false, async |_| Ok(())).await), "watches");
        more.drain(..).for_each(|watched| watched.call.abort());
        // With more directories than are watched, later events would be missing.
        out(&kernel, "mkdir -p many/d{1..4100}").await;
        all.call.await.expect("no panic").expect("ended");
        let last: Vec<_> = all.events.borrow().iter().rev().take(2).map(|event| event.kind).collect();
        assert_eq!(last, [FileEventKind::Ended, FileEventKind::Overflow]);
        assert_eq!(reason(files.watch(b".", true, async |_| Ok(())).await), "watch_size");
        assert!(files.watch(b"f", false, async |_| Ok(())).await.is_err());
    });
}

#[test]
fn command_prints_events() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut command = host.command("ryokan");
    command.args(["--no-autostart", "watch", "k", "--json"]);
    let mut watching = command.stdout(Stdio::piped()).spawn().expect("started");
    let mut lines = std::io::BufReader::new(watching.stdout.take().expect("a pipe")).lines();
    let mut next = || lines.next().expect("a line").expect("read");
    assert_eq!(next(), r#"{"event":"ready","path":""}"#);
    host.ok(&["exec", "k", "echo x > f"]);
    assert_eq!(next(), r#"{"event":"created","path":"f"}"#);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(watching.id() as i32), nix::sys::signal::Signal::SIGINT).unwrap();
    assert_eq!(watching.wait().expect("ended").code(), Some(0));
}
