//! Code inside that lays links and renames directories while the daemon walks.

use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::error::Error;
use ryokan::rpc::client::{FilesClient, KernelClient};

use super::{bash, each_user, reason, shell};
use crate::processes::Inside;
use crate::support::{Host, kernel, out};

/// A directory of the host with a secret, and its path.
pub(crate) fn secret(host: &Host) -> String {
    let folder = host.path("home").join("secrets");
    std::fs::create_dir(&folder).expect("made");
    std::fs::write(folder.join("f"), "of the host").expect("written");
    // The unprivileged daemon could read and write it.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&folder, open).expect("opened");
    folder.display().to_string()
}

pub(crate) fn assert_untouched(folder: &str) {
    let names: Vec<_> = std::fs::read_dir(folder).expect("listed").flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(names, ["f"]);
    assert_eq!(std::fs::read(std::path::Path::new(folder).join("f")).expect("read"), b"of the host");
}

/// Links out of the workspace lead nowhere, and none of `folder`, a path of this host.
pub(crate) async fn links(inside: &Inside<'_>, files: &FilesClient, folder: &str) {
    let up = "../".repeat(20);
    inside.sh(&format!("ln -s {folder} abs; ln -s {up}{folder} rel; ln -s {folder}/f file; ln -s /proc/self/root proc; mkdir -p d; ln -s ../d d/inner; ln -s loop loop")).await;
    for link in ["abs", "rel", "proc", "loop"] {
        for path in [format!("{link}/f"), format!("{link}/new/f"), format!("d/inner/../{link}/f")] {
            assert_eq!(reason(files.read(path.as_bytes()).await), "outside", "{path}");
            assert_eq!(reason(files.write(path.as_bytes(), b"x").await), "outside", "{path}");
            assert_eq!(reason(files.remove(path.as_bytes(), true).await), "outside", "{path}");
        }
        assert_eq!(reason(files.list(link.as_bytes()).await), "outside");
        assert_eq!(reason(files.stat(link.as_bytes(), true).await), "outside");
    }
    assert_eq!(reason(files.read(b"file").await), "outside");
    // A link that stays inside is followed; one as the last name is replaced, or removed.
    files.write(b"d/inner/f", b"x").await.expect("written");
    assert_eq!(files.read(b"d/f").await.expect("read"), b"x");
    files.write(b"file", b"mine").await.expect("replaced");
    files.remove(b"abs", true).await.expect("removed");
    assert_eq!(inside.sh("cat file; [ -e abs ] || echo gone").await, "minegone");
}

#[test]
fn links_lead_nowhere_outside() {
    each_user(|host| {
        let folder = secret(&host);
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            links(&shell(&kernel), &files, &folder).await;
        });
        assert_untouched(&folder);
    });
}

/// Code inside swaps a directory and links to `targets`, outside of the workspace, while files in it are read, listed and
/// written. The engine is Python.
pub(crate) async fn swaps(kernel: &KernelClient, files: &FilesClient, targets: &[String]) {
    let swap = format!(
        "import os, threading\nos.makedirs('a/b/d')\nopen('a/b/d/f', 'w').write('mine')\n\
         links = dict(enumerate({targets:?}))\nfor i in links: os.symlink(links[i], 'l%d' % i)\n\
         n, swaps = 0, True\n\
         def move(a, b):\n global n\n try:\n  os.rename(a, b)\n except OSError:\n  n += 1\n  try:\n   os.rename(b, 'junk%d' % n); os.rename(a, b)\n  except OSError:\n   pass\n\
         def swap():\n while swaps:\n  for i in links:\n   l = 'l%d' % i; move('a/b/d', 'e'); move(l, 'a/b/d'); move('a/b/d', l); move('e', 'a/b/d')\n\
         swapper = threading.Thread(target=swap, daemon=True); swapper.start()"
    );
    out(kernel, &swap).await;
    let (until, mut counts, mut refused) = (Instant::now() + Duration::from_secs(4), [0, 0], 0);
    let known = ["outside", "not_found", "not_directory", "not_empty", "exists"];
    let latest = until + Duration::from_secs(180);
    // A slow host may need longer for one of each.
    while Instant::now() < until || (Instant::now() < latest && (counts.contains(&0) || refused == 0)) {
        let seen = async {
            assert_eq!(files.read(b"a/b/d/f").await?, b"mine");
            // The file outside has another size.
            for file in files.list(b"a/b/d").await? {
                assert!(file.name == b"n" || (file.name == b"f" && file.bytes == 4), "{file:?}");
            }
            Ok::<_, Error>(())
        };
        for (done, kind) in [
            (seen.await, 0),
            (files.write(b"a/b/d/f", b"mine").await.map(drop), 1),
            (files.write(b"a/b/d/n/f", b"x").await.map(drop), 1),
            (files.remove(b"a/b/d/n", true).await, 1),
        ] {
            match done {
                Ok(()) => counts[kind] += 1,
                Err(error) if known.contains(&error.reason.as_str()) => refused += 1,
                Err(error) => assert_eq!(error.code.name(), "busy", "{error}"),
            }
        }
    }
    assert!(!counts.contains(&0) && refused > 0, "{counts:?} {refused}");
    out(kernel, "swaps = False; swapper.join()").await;
}

#[test]
fn swapped_directories_leak_nothing() {
    each_user(|host| {
        let folder = secret(&host);
        host.with(async |client| {
            let kernel = kernel(&client, "k", EngineName::Python).await;
            let files = kernel.files().await.expect("its files");
            swaps(&kernel, &files, &["../".repeat(20) + &folder]).await;
        });
        assert_untouched(&folder);
    });
}
