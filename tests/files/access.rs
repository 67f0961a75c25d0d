//! Reads and changes by path.

use ryokan::core::checkpoint::{CheckpointRequest, CheckpointType};
use ryokan::core::engine::EngineName;
use ryokan::core::files::{FileAttributes, FileKind};
use ryokan::core::rights::{Right, Rights};
use ryokan::rpc::client::FilesClient;
use ryokan::session::Session as _;

use super::{bash, each_user, reason, shell};
use crate::processes::Inside;
use crate::support::{Host, kernel, out, users};

/// Contents of several sizes, whole and in parts, in both directions.
pub(crate) async fn contents(inside: &Inside<'_>, files: &FilesClient) {
    for size in [0, 1 << 10, 5 << 20] {
        let data: Vec<u8> = (0..size).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let path = format!("/workspace/deep/er/{size}");
        let info = files.write(path.as_bytes(), &data).await.expect("written");
        assert_eq!((info.bytes, info.mode, info.kind), (u64::from(size), 0o644, FileKind::File));
        assert!(files.read(path.as_bytes()).await.expect("read") == data, "{size} bytes differ");
        let open = files.open(path.as_bytes()).await.expect("opened");
        for (from, most) in [(0, 10), (1000, 100), (u64::from(size) / 2, 1 << 20), (u64::from(size), 5)] {
            let start = (from as usize).min(data.len());
            let end = (start + most).min(data.len());
            assert_eq!(open.range(from, most).await.expect("read"), data[start..end], "{from} {most}");
        }
        assert!(open.range(u64::MAX, 5).await.expect("read").is_empty());
        assert_eq!(inside.sh(&format!("stat -c %s {path}; [ -O {path} ] && echo own")).await, format!("{size}\nown"));
    }
    assert_eq!(inside.sh("[ -O deep/er ] && touch deep/er/x && rm deep/er/x && echo own").await, "own");
    inside.sh("printf 'a\\0b\\377' > made").await;
    assert_eq!(files.read(b"made").await.expect("read"), b"a\0b\xff");
}

/// Each refusal of what code inside made. A pipe is not in the mirror of a virtual machine.
pub(crate) async fn refusals(inside: &Inside<'_>, files: &FilesClient, pipe: &str) {
    inside.sh("mkdir -p d/sub closed; echo x > f; mkfifo p; echo x > secret; chmod 0 secret closed").await;
    assert_eq!(reason(files.read(b"none").await), "not_found");
    assert_eq!(reason(files.read(b"none/x").await), "not_found");
    assert_eq!(reason(files.rename(b"none", b"other", false).await), "not_found");
    assert_eq!(reason(files.remove(b"none", true).await), "not_found");
    assert_eq!(reason(files.read(b"d").await), "is_directory");
    assert_eq!(reason(files.write(b"d", b"").await), "is_directory");
    assert_eq!(reason(files.read(b"f/x").await), "not_directory");
    assert_eq!(reason(files.write(b"f/x", b"").await), "not_directory");
    assert_eq!(reason(files.list(b"f").await), "not_directory");
    assert_eq!(reason(files.make_dir(b"f", 0o755).await), "not_directory");
    assert_eq!(reason(files.read(b"p").await), pipe);
    assert_eq!(
        reason(files.set_attributes(b"p", FileAttributes { mode: Some(0o600), modified_ns: None }).await),
        "not_regular"
    );
    assert_eq!(reason(files.read(b"secret").await), "permission");
    assert_eq!(reason(files.write(b"closed/x", b"").await), "permission");
    assert_eq!(reason(files.list(b"closed").await), "permission");
    for path in [b"/etc/passwd".as_slice(), b"../x", b"d/../../x", b"/"] {
        assert_eq!(reason(files.read(path).await), "outside");
        assert_eq!(reason(files.write(path, b"").await), "outside");
    }
    assert_eq!(reason(files.rename(b"f", b"p", false).await), "exists");
    assert_eq!(reason(files.remove(b"d", false).await), "not_empty");
    assert_eq!(inside.sh("cat f; ls -A d").await, "x\nsub", "nothing changed");
}

#[test]
fn contents_round_trip() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            contents(&shell(&kernel), &files).await;
        });
    });
}

#[test]
fn every_refusal_has_its_reason() {
    for user in users() {
        let host = Host::start_as(user);
        let given = host.given(user).canonicalize().expect("a path");
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            refusals(&shell(&kernel), &files, "not_regular").await;
            let source = given.to_str().expect("text");
            kernel.mount("/workspace/m", source, false).await.expect("mounted");
            assert_eq!(reason(files.read(b"m/file").await), "mount");
            assert_eq!(reason(files.remove(b"m", true).await), "mount");
            let reader =
                kernel.attenuate([Right::Read].into_iter().collect::<Rights>(), "r").await.expect("fewer rights");
            let reader = reader.files().await.expect("its files");
            assert_eq!(reader.read(b"f").await.expect("read"), b"x\n");
            assert_eq!(reason(reader.write(b"f", b"").await), "rights");
            assert_eq!(reason(reader.remove(b"f", false).await), "rights");
            let mut small = crate::support::spec("small", EngineName::Bash);
            small.workspace_bytes = Some(2 << 20);
            let (small, _) = client.create_kernel(&small, "").await.expect("made");
            let small = small.files().await.expect("its files");
            assert_eq!(reason(small.write(b"large", &vec![1; 3 << 20]).await), "too_large");
            assert!(small.list(b".").await.expect("listed").is_empty());
        });
    }
}

#[test]
fn writes_share_workspace_limit() {
    each_user(|host| {
        host.with(async |client| {
            let mut spec = crate::support::spec("small", EngineName::Bash);
            spec.workspace_bytes = Some(4 << 20);
            let (kernel, _) = client.create_kernel(&spec, "").await.expect("made");
            let files = kernel.files().await.expect("its files");
            let part = vec![1; 3 << 19];
            // Without a worker, which would count them.
            files.write(b"one", &part).await.expect("room");
            files.write(b"two", &part).await.expect("room");
            assert_eq!(reason(files.write(b"three", &part).await), "too_large");
            // Replaced and removed files make room at once; so does a refused one.
            files.write(b"two", b"").await.expect("replaced");
            files.write(b"three", &part).await.expect("room");
            files.remove(b"one", false).await.expect("removed");
            files.write(b"four", &part).await.expect("room");
        });
    });
}

/// Changes of an empty workspace, which is empty again afterwards.
pub(crate) async fn changes(inside: &Inside<'_>, files: &FilesClient) {
    files.write(b"a/f", b"one").await.expect("written");
    let set = FileAttributes { mode: Some(0o4750), modified_ns: Some(1_000_000_000_123_456_789) };
    files.set_attributes(b"a/f", set).await.expect("set");
    files.write(b"a/f", b"two").await.expect("replaced");
    assert_eq!(files.stat(b"a/f", true).await.expect("there").mode, 0o750, "a replaced file keeps its mode");
    files.set_attributes(b"a/f", set).await.expect("set");
    assert_eq!(inside.sh("stat -c %a:%.Y a/f").await, "750:1000000000.123456789");
    files.make_link(b"l", b"a/f", FileAttributes::default()).await.expect("made");
    assert_eq!(files.read(b"l").await.expect("read"), b"two");
    assert_eq!(files.stat(b"l", false).await.expect("there").target, b"a/f");
    files.rename(b"a/f", b"g", false).await.expect("renamed");
    files.rename(b"g", b"l", true).await.expect("replaced");
    files.make_dir(b"new", 0o751).await.expect("made");
    assert_eq!(inside.sh("stat -c %a:%F new; rmdir new").await, "751:directory");
    let names: Vec<_> = files.list(b"/workspace").await.expect("listed").into_iter().map(|f| f.name).collect();
    assert_eq!(names, [b"a".to_vec(), b"l".to_vec()]);
    inside.sh("mkdir -p a/x/y; touch a/x/y/z; chmod 0 a/x").await;
    files.remove(b"a", true).await.expect("removed");
    files.remove(b"l", false).await.expect("removed");
    assert_eq!(inside.sh("ls -A | wc -l").await, "0");
}

#[test]
fn changes_apply_by_path() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            changes(&shell(&kernel), &files).await;
            assert!(host.ok(&["journal", "k"]).contains("files: wrote /workspace/a/f"));
        });
    });
}

#[test]
fn stopped_kernel_serves_files() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            out(&kernel, "echo inside > f").await;
            kernel.stop(false).await.expect("stopped");
            assert_eq!(files.read(b"f").await.expect("read"), b"inside\n");
            files.write(b"g", b"outside").await.expect("written");
            assert_eq!(kernel.info().await.expect("there").state, "stopped");
            assert_eq!(out(&kernel, "[ -O g ] && cat g").await, "outside");
        });
    });
}

/// A checkpoint between two writes of the only file holds the first one.
pub(crate) async fn checkpoints(host: &Host, name: &str, inside: &Inside<'_>, files: &FilesClient) {
    inside.sh("echo 0 > f").await;
    let mut half = files.create(b"f", FileAttributes::default()).await.expect("begun");
    half.write(b"half").await.expect("taken");
    files.write(b"f", b"one").await.expect("written");
    host.ok(&["checkpoint", name, "-m", "between"]);
    half.write(b" and whole").await.expect("taken");
    half.finish().await.expect("placed");
    assert_eq!(files.read(b"f").await.expect("read"), b"half and whole");
    host.ok(&["restore", name, "between", "--yes"]);
    assert_eq!(files.read(b"f").await.expect("read"), b"one");
    assert_eq!(inside.sh("ls -A; cat f").await, "f\none");
}

#[test]
fn checkpoint_holds_earlier_writes_only() {
    each_user(|host| {
        host.with(async |client| {
            let (kernel, files) = bash(&client, "k").await;
            checkpoints(&host, "k", &shell(&kernel), &files).await;
            // An archive keeps what was written after the last checkpoint; its files cannot be reached meanwhile.
            files.write(b"early", b"x").await.expect("written");
            host.ok(&["checkpoint", "k", "-m", "last"]);
            files.write(b"late", b"kept").await.expect("written");
            host.ok(&["archive", "k"]);
            assert_eq!(reason(files.read(b"late").await), "archived");
            assert_eq!(reason(files.write(b"late", b"").await), "archived");
            host.ok(&["unarchive", "k"]);
            assert_eq!(files.read(b"late").await.expect("read"), b"kept");
        });
    });
}

/// Writes go on while checkpoints and restores are made; each of these sees one write, whole.
#[test]
fn writes_beside_captures_are_whole() {
    let host = Host::start();
    host.with(async |client| {
        let (kernel, files) = bash(&client, "k").await;
        files.write(b"f", &vec![0; 1 << 20]).await.expect("written");
        let done = std::cell::Cell::new(false);
        let writing = async {
            let mut written = 0;
            for byte in (1..=u8::MAX).cycle() {
                files.write(b"f", &vec![byte; 1 << 20]).await.expect("it waits");
                written += 1;
                if done.get() {
                    break;
                }
            }
            written
        };
        let capturing = async {
            for n in 0..5 {
                let name = format!("c{n}");
                let request = CheckpointRequest::new(CheckpointType::Manual, &name);
                let taken = kernel.checkpoint(&request).await.expect("taken");
                assert_eq!(taken.files, 1, "an unfinished file was captured");
            }
            for n in 0..5 {
                kernel.restore_checkpoint(&format!("c{n}"), 0).await.expect("restored");
                let data = files.read(b"f").await.expect("read");
                assert!(data.len() == 1 << 20 && data.iter().all(|byte| *byte == data[0]));
            }
            done.set(true);
        };
        let (written, ()) = futures::join!(writing, capturing);
        assert!(written > 0);
    });
}

#[test]
fn dropped_upload_leaves_nothing() {
    let host = Host::start();
    host.with(async |client| {
        let kernel = kernel(&client, "k", EngineName::Bash).await;
        let files = kernel.files().await.expect("its files");
        let mut upload = files.create(b"f", FileAttributes::default()).await.expect("begun");
        upload.write(&vec![7; 3 << 20]).await.expect("taken");
        drop(upload);
        assert_eq!(reason(files.read(b"f").await), "not_found");
        let id = kernel.info().await.expect("there").id.to_string();
        let staging = host.data().join("kernels").join(id).join("staging");
        assert_eq!(staging.read_dir().expect("made").count(), 0);
    });
}
