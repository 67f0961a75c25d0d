//! Captures and restores of a workspace, compared with other backup tools.
//!
//! The files come from a seed and are the same in each run.

use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ryokan::store::Store;
use ryokan::workspace::{Captured, Durability, Tracker, WorkspacePaths, branch};

use crate::World;
use crate::report::{Report, Samples, Target};

/// A directory of files: their number and total size.
struct Size {
    name: &'static str,
    files: usize,
    bytes: usize,
}

const SIZES: &[Size] = &[
    Size { name: "10,000 files, 500 MB", files: 10_000, bytes: 500_000_000 },
    Size { name: "100,000 files, 40 MB", files: 100_000, bytes: 40_000_000 },
];
const QUICK: &[Size] = &[Size { name: "2,000 files, 20 MB", files: 2_000, bytes: 20_000_000 }];
/// Files per directory.
const FOLDER: usize = 100;
const TOUCHED: usize = 10;

/// xorshift64*: enough for bytes that do not compress.
struct Seed(u64);

impl Seed {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }
}

fn file(root: &Path, n: usize) -> PathBuf {
    root.join(format!("d{:04}/f{:05}", n / FOLDER, n))
}

pub fn workspace(world: &World, report: &mut Report) -> anyhow::Result<()> {
    for size in if world.quick { QUICK } else { SIZES } {
        measure(world, report, size).with_context(|| size.name)?;
    }
    Ok(())
}

fn measure(world: &World, report: &mut Report, size: &Size) -> anyhow::Result<()> {
    let dir =
        tempfile::tempdir_in(std::env::var_os("RYOKAN_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from))?;
    let home = home(dir.path())?;
    let root = home.join("workspace");
    let mut seed = Seed(0x9e37_79b9_7f4a_7c15);
    for n in 0..size.files {
        if n % FOLDER == 0 {
            std::fs::create_dir_all(root.join(format!("d{:04}", n / FOLDER)))?;
        }
        std::fs::write(file(&root, n), seed.bytes(size.bytes / size.files))?;
    }
    let places =
        WorkspacePaths { workspace: root.clone(), staging: home.join("staging"), index: dir.path().join("index") };
    let store = Store::open(&dir.path().join("store"))?;
    let mut tracker = Tracker::open(places.clone())?;
    let begun = Instant::now();
    let first = tracker.capture(&store)?;
    report.figure(&format!("{}: first capture", size.name), begun.elapsed().as_secs_f64(), "s", None);
    report.note(format!("driver {}; {} folders watched", tracker.driver(), tracker.watched()));
    touched(world, report, size, &root, &mut tracker, &store, &first)?;
    tracker.save()?;
    forks(world, report, size, dir.path(), &mut tracker, &store)?;
    drop(tracker);
    let begun = Instant::now();
    let again = Tracker::open(places)?.capture(&store)?;
    report.figure(&format!("{}: first capture of a new process", size.name), ms(begun.elapsed()), "ms", None);
    report.note(format!("{} files read", again.stats.read));
    large_file(world, report, &store)?;
    peers(report, size, &root, dir.path())
}

/// The directory of workspace and staging: a subvolume where the file system supports them, as for
/// a kernel.
fn home(dir: &Path) -> anyhow::Result<PathBuf> {
    let opened = std::fs::File::open(dir)?;
    match ryokan::workspace::abilities(dir).subvolumes {
        Ok(()) => {
            ryokan::sys::btrfs::create(opened.as_fd(), "files")?;
            Ok(dir.join("files"))
        }
        Err(_) => Ok(dir.to_owned()),
    }
}

/// A second workspace from the live one, as a fork makes it, compared with `cp`.
fn forks(
    world: &World,
    report: &mut Report,
    size: &Size,
    dir: &Path,
    tracker: &mut Tracker,
    store: &Store,
) -> anyhow::Result<()> {
    let (mut whole, mut first) = (Samples::default(), Samples::default());
    let (source, times) = (tracker.workspace().to_owned(), world.times(5, 2));
    let mut how = String::new();
    for n in 0..times {
        let child = dir.join(format!("child{n}"));
        std::fs::create_dir(&child)?;
        let home = home(&child)?;
        let places = WorkspacePaths {
            workspace: home.join("workspace"),
            staging: home.join("staging"),
            index: child.join("index"),
        };
        std::fs::create_dir(&places.workspace)?;
        let begun = Instant::now();
        let captured = tracker.capture(store)?;
        let donor = tracker.donor()?;
        let donor = match &donor {
            Some(donor) => {
                let mut snapshot = donor.snapshot(&places)?;
                snapshot.iter_mut().for_each(|snapshot| tracker.record_changes(donor, snapshot));
                Some((donor, snapshot))
            }
            None => None,
        };
        let (mut branched, _, done) = branch(donor, captured.tree, places, store, Durability::Process)?;
        whole.add(begun.elapsed());
        how = format!("snapshot: {}, {} cloned, {} copied", done.snapshot, done.cloned, done.copied);
        let begun = Instant::now();
        let again = branched.capture(store)?;
        first.add(begun.elapsed());
        anyhow::ensure!(
            again.tree == captured.tree && again.stats.read == 0,
            "the first capture read {}",
            again.stats.read
        );
        drop(branched);
        std::fs::remove_dir_all(&child)?;
    }
    report.times(&format!("{}: fork of the live workspace", size.name), &whole, Some(Target::AtMost(60.0)));
    report.note(how);
    report.times(&format!("{}: first capture of the fork", size.name), &first, None);
    for option in ["--reflink=never", "--reflink=always"] {
        let mut copies = Samples::default();
        for _ in 0..times {
            let copy = dir.join("cp-copy");
            let begun = Instant::now();
            let status =
                Command::new("cp").args(["-a", option]).args([&source, &copy]).stderr(Stdio::null()).status()?;
            copies.add(begun.elapsed());
            std::fs::remove_dir_all(&copy)?;
            if !status.success() {
                copies = Samples::default();
                break;
            }
        }
        if option == "--reflink=always" && ryokan::workspace::abilities(dir).clones.is_err() {
            continue;
        }
        report.times(&format!("{}: cp -a {option}", size.name), &copies, None);
    }
    Ok(())
}

/// The pause for one open file in which a few bytes changed. It must not grow with the file where
/// files can be cloned.
fn large_file(world: &World, report: &mut Report, store: &Store) -> anyhow::Result<()> {
    for megabytes in [1, 100] {
        let dir =
            tempfile::tempdir_in(std::env::var_os("RYOKAN_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from))?;
        let home = home(dir.path())?;
        let places = WorkspacePaths {
            workspace: home.join("workspace"),
            staging: home.join("staging"),
            index: dir.path().join("index"),
        };
        std::fs::create_dir(&places.workspace)?;
        let file = std::fs::File::create(places.workspace.join("large"))?;
        file.write_all_at(&Seed(3).bytes(megabytes << 20), 0)?;
        let mut tracker = Tracker::open(places)?;
        let mut pause = Samples::default();
        for n in 0..world.times(8, 3) as u64 {
            file.write_all_at(&Seed(n + 9).bytes(100), n * 10_000)?;
            tracker.prepare(store)?;
            file.write_all_at(&Seed(n + 99).bytes(100), n * 10_000)?;
            let collected = tracker.collect(store)?;
            pause.add(collected.stats().pause);
            tracker.finish(collected)?;
        }
        report.times(&format!("pause, one open file of {megabytes} MiB touched"), &pause, Some(Target::AtMost(10.0)));
    }
    Ok(())
}

fn ms(took: Duration) -> f64 {
    took.as_secs_f64() * 1000.0
}

fn touched(
    world: &World,
    report: &mut Report,
    size: &Size,
    root: &Path,
    tracker: &mut Tracker,
    store: &Store,
    first: &Captured,
) -> anyhow::Result<()> {
    let (mut pause, mut whole, mut back) = (Samples::default(), Samples::default(), Samples::default());
    let mut seed = Seed(1);
    for _ in 0..world.times(30, 8) {
        for _ in 0..TOUCHED {
            let n = usize::try_from(seed.next()).unwrap_or_default() % size.files;
            std::fs::write(file(root, n), seed.bytes(size.bytes / size.files))?;
        }
        let begun = Instant::now();
        tracker.prepare(store)?;
        let frozen = Instant::now();
        let collected = tracker.collect(store)?;
        pause.add(frozen.elapsed());
        let captured = tracker.finish(collected)?;
        whole.add(begun.elapsed());
        anyhow::ensure!(captured.stats.full_scan.is_none(), "everything was walked: {:?}", captured.stats);
        let begun = Instant::now();
        tracker.restore(first.tree, store, Durability::Process)?;
        back.add(begun.elapsed());
    }
    report.times(&format!("{}: pause, {TOUCHED} files touched", size.name), &pause, Some(Target::AtMost(10.0)));
    report.times(
        &format!("{}: capture in all, {TOUCHED} files touched", size.name),
        &whole,
        Some(Target::AtMost(25.0)),
    );
    report.times(&format!("{}: restore, {TOUCHED} files touched", size.name), &back, None);
    Ok(())
}

/// A program, its preparation, and its runs.
type Peer<'a> = (&'a str, &'a [&'a str], &'a [&'a [&'a str]]);

/// Times of other tools for the same directory, at first and after ten files were touched.
///
/// A tool that is not installed is reported as such.
fn peers(report: &mut Report, size: &Size, root: &Path, dir: &Path) -> anyhow::Result<()> {
    let text = |path: PathBuf| path.display().to_string();
    let (source, copy) = (text(root.to_owned()), text(dir.join("copy")));
    let (restic, borg, rsync) = (text(dir.join("restic")), text(dir.join("borg")), text(dir.join("rsync")));
    let archives = [format!("{borg}::1"), format!("{borg}::2")];
    let backup = ["backup", "-q", "-r", restic.as_str(), source.as_str()];
    let sync = ["-a", source.as_str(), rsync.as_str()];
    let steps: &[Peer<'_>] = &[
        ("cp", &[], &[&["-a", &source, &copy]]),
        ("restic", &["init", "-q", "-r", &restic], &[&backup, &backup]),
        (
            "borg",
            &["init", "-e", "none", &borg],
            &[&["create", &archives[0], &source], &["create", &archives[1], &source]],
        ),
        ("rsync", &[], &[&sync, &sync]),
    ];
    for (program, prepare, runs) in steps {
        let run = |arguments: &[&str]| {
            let mut command = Command::new(program);
            command
                .args(arguments)
                .env("RESTIC_PASSWORD", "x")
                .env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes");
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()
        };
        let prepared = if prepare.is_empty() { run(&["--version"]) } else { run(prepare) };
        if !prepared.is_ok_and(|status| status.success()) {
            report.figure(&format!("{}: {program}", size.name), f64::NAN, "", None);
            report.note("not installed");
            continue;
        }
        for (n, arguments) in runs.iter().enumerate() {
            let begun = Instant::now();
            anyhow::ensure!(run(arguments)?.success(), "{program} failed");
            let what = if n == 0 { "first" } else { "after 10 files were touched" };
            report.figure(&format!("{}: {program}, {what}", size.name), ms(begun.elapsed()), "ms", None);
            let mut seed = Seed(7 + n as u64);
            for _ in 0..TOUCHED {
                let at = usize::try_from(seed.next()).unwrap_or_default() % size.files;
                std::fs::write(file(root, at), seed.bytes(size.bytes / size.files))?;
            }
        }
    }
    Ok(())
}
