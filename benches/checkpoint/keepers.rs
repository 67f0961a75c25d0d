//! Other tools that back up and restore a directory, driven as their users drive them.
//!
//! Each works on its own copy of the same files. It backs up the directory once, then several times
//! after ten files were touched, and restores it after ten more were.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::files::{self, Size};
use crate::report::Samples;

const TOUCHED: usize = 10;

/// Measurements of one tool.
#[derive(Debug, Default)]
pub struct Kept {
    pub name: &'static str,
    /// The reason why there are no figures.
    pub lacks: Option<String>,
    pub first: Option<Duration>,
    pub again: Samples,
    pub back: Samples,
    /// Bytes of the backup on the device; none for tools that share blocks with the directory.
    pub bytes: Option<u64>,
    /// The tool's notion of a restore.
    pub note: &'static str,
}

/// One tool, ready to back up a directory.
struct Keeper<'a> {
    name: &'static str,
    note: &'static str,
    /// The directory, which the tool may change.
    folder: PathBuf,
    prepare: Vec<Vec<String>>,
    /// The commands for a round's backup; the first round is 0.
    keep: Box<dyn Fn(u64) -> Vec<Vec<String>> + 'a>,
    /// The commands that restore the backup of the last round.
    back: Box<dyn Fn(u64) -> Vec<Vec<String>> + 'a>,
    repository: Option<PathBuf>,
}

fn run(arguments: &[String], dir: &Path) -> anyhow::Result<()> {
    crate::go_on()?;
    let (program, arguments) = arguments.split_first().context("a program")?;
    let output = Command::new(program)
        .args(arguments)
        .current_dir(dir)
        .env("RESTIC_PASSWORD", "x")
        // Their caches are part of the measured directory.
        .env("RESTIC_CACHE_DIR", dir.join("remembered"))
        .env("BORG_BASE_DIR", dir.join("remembered"))
        .env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes")
        .env("BORG_RELOCATED_REPO_ACCESS_IS_OK", "yes")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_SYSTEM", "/dev/null")
        .stdin(Stdio::null())
        .output()
        .with_context(|| program.clone())?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    anyhow::ensure!(output.status.success(), "{program} {arguments:?} failed: {said}");
    Ok(())
}

fn words(line: &[&str]) -> Vec<String> {
    line.iter().map(|word| (*word).to_owned()).collect()
}

fn is_installed(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()));
    found || Path::new("/usr/sbin").join(program).is_file()
}

/// The packages that a missing tool needs, with a hint.
fn lacking(programs: &[(&str, &str)]) -> Option<String> {
    let missing: Vec<&str> =
        programs.iter().filter(|(program, _)| !is_installed(program)).map(|(_, package)| *package).collect();
    (!missing.is_empty()).then(|| format!("not installed: on Debian, apt-get install {}", missing.join(" ")))
}

impl Keeper<'_> {
    fn measure(&self, size: Size, rounds: u64) -> anyhow::Result<Kept> {
        let mut kept = Kept { name: self.name, note: self.note, ..Kept::default() };
        // Outside the directory, which some tools replace.
        let dir = self.folder.parent().context("the directory has a parent")?;
        self.prepare.iter().try_for_each(|command| run(command, dir))?;
        nix::unistd::sync();
        let time = |commands: Vec<Vec<String>>| -> anyhow::Result<Duration> {
            let begun = Instant::now();
            commands.iter().try_for_each(|command| run(command, dir))?;
            Ok(begun.elapsed())
        };
        kept.first = Some(time((self.keep)(0))?);
        kept.bytes = self.repository.as_deref().map(files::on_disk);
        for round in 1..=rounds {
            files::touch(&self.folder, size, round, TOUCHED)?;
            kept.again.add(time((self.keep)(round))?);
        }
        // One restore: a tool that takes as long as the first time is not repeated.
        files::touch(&self.folder, size, rounds + 1, TOUCHED)?;
        kept.back.add(time((self.back)(rounds))?);
        Ok(kept)
    }
}

/// A file system in a file, mounted.
pub struct Loop {
    pub at: PathBuf,
    image: PathBuf,
}

impl Loop {
    pub fn mount(dir: &Path, name: &str, make: &[&str], bytes: u64) -> anyhow::Result<Loop> {
        let (image, at) = (dir.join(format!("{name}.image")), dir.join(name));
        std::fs::File::create(&image)?.set_len(bytes)?;
        std::fs::create_dir(&at)?;
        let mounted = Loop { at: at.clone(), image: image.clone() };
        let mut command = words(make);
        command.push(image.display().to_string());
        run(&command, dir)?;
        run(&words(&["mount", "-o", "loop", &image.display().to_string(), &at.display().to_string()]), dir)?;
        Ok(mounted)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.at).stderr(Stdio::null()).status();
        let _ = std::fs::remove_file(&self.image);
    }
}

/// Every tool. `source` is copied, never changed.
pub fn all(size: Size, source: &Path, dir: &Path, rounds: u64, tell: &mut dyn FnMut(Kept)) -> anyhow::Result<()> {
    let plain: [fn(&Path, &Path) -> Keeper<'static>; 6] = [restic, borg, borg_zstd, rsync, git, copy];
    let needs: [&[(&str, &str)]; 6] = [
        &[("restic", "restic")],
        &[("borg", "borgbackup")],
        &[("borg", "borgbackup")],
        &[("rsync", "rsync")],
        &[("git", "git")],
        &[],
    ];
    for (make, needs) in plain.into_iter().zip(needs) {
        let folder = dir.join("copy");
        let keeper = make(&folder, &dir.join("kept"));
        if let Some(lacks) = lacking(needs) {
            tell(Kept { name: keeper.name, lacks: Some(lacks), ..Kept::default() });
            continue;
        }
        std::fs::create_dir_all(dir.join("kept"))?;
        run(&words(&["cp", "-a", &source.display().to_string(), &folder.display().to_string()]), dir)?;
        let kept = keeper.measure(size, rounds);
        std::fs::remove_dir_all(&folder)?;
        std::fs::remove_dir_all(dir.join("kept"))?;
        tell(kept.with_context(|| keeper.name)?);
    }
    mounted(size, source, dir, rounds, tell)
}

/// The tools that need a file system of their own.
fn mounted(size: Size, source: &Path, dir: &Path, rounds: u64, tell: &mut dyn FnMut(Kept)) -> anyhow::Result<()> {
    type Made =
        (&'static str, &'static [(&'static str, &'static str)], &'static [&'static str], fn(&Path) -> Keeper<'static>);
    let ways: [Made; 2] = [
        ("btrfs subvolume snapshot", &[("mkfs.btrfs", "btrfs-progs")], &["mkfs.btrfs", "-q"], btrfs),
        ("cp --reflink (XFS)", &[("mkfs.xfs", "xfsprogs")], &["mkfs.xfs", "-q"], reflink),
    ];
    for (name, needs, make, keeper) in ways {
        let root = nix::unistd::Uid::effective().is_root();
        let lacks = lacking(needs).or_else(|| (!root).then(|| "needs root, to mount a file system".to_owned()));
        if let Some(lacks) = lacks {
            tell(Kept { name, lacks: Some(lacks), ..Kept::default() });
            continue;
        }
        let here = match Loop::mount(dir, "mounted", make, 6 << 30) {
            Ok(here) => here,
            Err(error) => {
                tell(Kept { name, lacks: Some(format!("cannot be mounted here: {error:#}")), ..Kept::default() });
                let _ = std::fs::remove_dir(dir.join("mounted"));
                continue;
            }
        };
        let keeper = keeper(&here.at);
        let copied = || -> anyhow::Result<Kept> {
            let folder = keeper.folder.display().to_string();
            if name.starts_with("btrfs") {
                run(&words(&["btrfs", "-q", "subvolume", "create", &folder]), dir)?;
            } else {
                std::fs::create_dir(&keeper.folder)?;
            }
            run(&words(&["cp", "-a", &format!("{}/.", source.display()), &folder]), dir)?;
            keeper.measure(size, rounds)
        };
        let kept = copied();
        drop(here);
        std::fs::remove_dir(dir.join("mounted"))?;
        tell(kept.context(name)?);
    }
    Ok(())
}

fn restic(folder: &Path, kept: &Path) -> Keeper<'static> {
    let repository = kept.display().to_string();
    let (source, back) = (folder.display().to_string(), kept.with_file_name("back").display().to_string());
    let there = repository.clone();
    Keeper {
        name: "restic",
        note: "all of it, into an empty folder: it knows no other way",
        folder: folder.to_owned(),
        prepare: vec![words(&["restic", "init", "-q", "-r", &repository])],
        keep: Box::new(move |_| vec![words(&["restic", "backup", "-q", "-r", &repository, &source])]),
        back: Box::new(move |_| {
            vec![
                words(&["restic", "restore", "-q", "-r", &there, "latest", "--target", &back]),
                words(&["rm", "-rf", &back]),
            ]
        }),
        repository: Some(kept.to_owned()),
    }
}

fn borg(folder: &Path, kept: &Path) -> Keeper<'static> {
    borg_with(folder, kept, "borg", "lz4")
}

fn borg_zstd(folder: &Path, kept: &Path) -> Keeper<'static> {
    borg_with(folder, kept, "borg --compression zstd,3", "zstd,3")
}

fn borg_with(folder: &Path, kept: &Path, name: &'static str, compression: &'static str) -> Keeper<'static> {
    let repository = kept.display().to_string();
    let (source, back) = (folder.display().to_string(), kept.with_file_name("back").display().to_string());
    let there = repository.clone();
    Keeper {
        name,
        note: "all of it, into an empty folder: it knows no other way",
        folder: folder.to_owned(),
        prepare: vec![words(&["borg", "init", "-e", "none", &repository])],
        keep: Box::new(move |round| {
            vec![words(&["borg", "create", "-C", compression, &format!("{repository}::{round}"), &source])]
        }),
        back: Box::new(move |round| {
            let script = format!("mkdir '{back}' && cd '{back}' && borg extract '{there}::{round}' && rm -rf '{back}'");
            vec![words(&["sh", "-c", &script])]
        }),
        repository: Some(kept.to_owned()),
    }
}

fn rsync(folder: &Path, kept: &Path) -> Keeper<'static> {
    let (source, kept_text) = (format!("{}/", folder.display()), kept.display().to_string());
    let (target, there) = (source.clone(), kept_text.clone());
    Keeper {
        name: "rsync --link-dest",
        note: "in place",
        folder: folder.to_owned(),
        prepare: Vec::new(),
        keep: Box::new(move |round| {
            let mut command = words(&["rsync", "-a"]);
            command.extend(round.checked_sub(1).map(|before| format!("--link-dest={kept_text}/{before}")));
            command.extend([source.clone(), format!("{kept_text}/{round}")]);
            vec![command]
        }),
        back: Box::new(move |round| vec![words(&["rsync", "-a", "--delete", &format!("{there}/{round}/"), &target])]),
        repository: Some(kept.to_owned()),
    }
}

fn git(folder: &Path, _: &Path) -> Keeper<'static> {
    let place = folder.display().to_string();
    let git = move |arguments: &[&str]| {
        let mut command = words(&["git", "-C", &place, "-c", "user.name=bench", "-c", "user.email=bench@localhost"]);
        command.extend(words(arguments));
        command
    };
    let again = git.clone();
    Keeper {
        name: "git commit, then git stash and its pop",
        note: "in place, only what was touched: the stash took it away",
        folder: folder.to_owned(),
        prepare: vec![git(&["init", "-q"]), git(&["config", "gc.auto", "0"])],
        keep: Box::new(move |round| match round {
            0 => vec![git(&["add", "-A"]), git(&["commit", "-q", "-m", "first"])],
            _ => vec![git(&["stash", "push", "-q"])],
        }),
        back: Box::new(move |_| vec![again(&["checkout", "-q", "."]), again(&["stash", "pop", "-q"])]),
        repository: Some(folder.join(".git")),
    }
}

fn copy(folder: &Path, kept: &Path) -> Keeper<'static> {
    copied(folder, kept, "cp -a", &["cp", "-a"], Some(kept.to_owned()))
}

fn reflink(at: &Path) -> Keeper<'static> {
    copied(&at.join("folder"), &at.join("kept"), "cp --reflink (XFS)", &["cp", "-a", "--reflink=always"], None)
}

fn copied(
    folder: &Path,
    kept: &Path,
    name: &'static str,
    how: &'static [&'static str],
    repository: Option<PathBuf>,
) -> Keeper<'static> {
    let (source, there) = (folder.display().to_string(), kept.display().to_string());
    let (from, target) = (there.clone(), source.clone());
    let with = |from: String, to: String| {
        let mut command = words(how);
        command.extend([from, to]);
        command
    };
    Keeper {
        name,
        note: "all of it: the folder away, the copy in its place",
        folder: folder.to_owned(),
        prepare: vec![words(&["mkdir", "-p", &there])],
        keep: Box::new(move |round| vec![with(source.clone(), format!("{there}/{round}"))]),
        back: Box::new(move |round| {
            let script = format!("rm -rf '{target}'");
            vec![words(&["sh", "-c", &script]), with(format!("{from}/{round}"), target.clone())]
        }),
        repository,
    }
}

fn btrfs(at: &Path) -> Keeper<'static> {
    let (folder, kept) = (at.join("folder"), at.display().to_string());
    let (source, target, there) = (folder.display().to_string(), folder.display().to_string(), kept.clone());
    Keeper {
        name: "btrfs subvolume snapshot",
        note: "the subvolume away, a snapshot in its place",
        folder,
        prepare: Vec::new(),
        keep: Box::new(move |round| {
            vec![words(&["btrfs", "-q", "subvolume", "snapshot", "-r", &source, &format!("{kept}/{round}")])]
        }),
        back: Box::new(move |round| {
            let (mount, kept) = (there.clone(), format!("{there}/{round}"));
            // From outside, because the directory itself is replaced.
            let script = format!(
                "cd '{mount}' && mv '{target}' away && btrfs -q subvolume snapshot '{kept}' '{target}' && btrfs -q subvolume delete away"
            );
            vec![words(&["sh", "-c", &script])]
        }),
        repository: None,
    }
}
