//! Freezes and restores of a group of two kernels, a git repository and a PostgreSQL database, beside `pg_dump`,
//! `git bundle` and `tar` by hand. On Btrfs also with the whole server, by snapshots.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ryokan::core::engine::EngineName;
use ryokan::core::freeze::cost::FreezeCost;
use ryokan::core::freeze::drain::Drain;

use crate::World;
use crate::checkpoint::keepers::Loop;
use crate::daemon::{Daemon, create, run};
use crate::report::{Report, Samples, Target};

/// Bytes of files in each kernel.
const FILES_MB: usize = 20;
/// Largest database of which dumps are measured, in MB: they grow with the data, and 1 GB takes an hour.
const DUMPED_MB: usize = 100;
const KERNELS: [&str; 2] = ["one", "two"];

pub fn freeze(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let most = world.size.map_or_else(|| world.times(100, 10), |bytes| (bytes / 1_000_000) as usize).max(1);
    let base = std::env::var_os("RYOKAN_BENCH_DIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    let dir = tempfile::Builder::new().prefix("rf").tempdir_in(base)?;
    // The server's user passes through.
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let kind = text(Command::new("stat").args(["-f", "-c", "%T"]).arg(dir.path()))?;
    let dumped = most.min(DUMPED_MB);
    measure(world, report, (kind.trim(), Method::Dump), dir.path(), dumped)?;
    // Databases, dumps, kernels, and both ways to keep them.
    let bytes = (most as u64 * 14 + 4000) * 1_000_000;
    let mounted = match Loop::mount(dir.path(), "btrfs", &["mkfs.btrfs", "-q"], bytes) {
        Ok(mounted) => mounted,
        Err(error) => {
            report.failed(&format!("without Btrfs: {error:#}"));
            return Ok(());
        }
    };
    measure(world, report, ("Btrfs", Method::Dump), &mounted.at, dumped)?;
    let few = (most / 10).max(1);
    let small = measure(world, report, ("Btrfs", Method::Snapshot), &mounted.at, few)?;
    let large = measure(world, report, ("Btrfs", Method::Snapshot), &mounted.at, most)?;
    report.figure(
        &format!("Btrfs, snapshot: pause with {most} MB ÷ with {few} MB"),
        large.p50() / small.p50(),
        "×",
        Some(Target::AtMost(1.5)),
    );
    Ok(())
}

/// How PostgreSQL is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    /// One database, by a dump.
    Dump,
    /// The whole server, by snapshots of its Btrfs subvolume.
    Snapshot,
}

fn measure(
    world: &World,
    report: &mut Report,
    (kind, method): (&str, Method),
    base: &Path,
    megabytes: usize,
) -> anyhow::Result<Samples> {
    let estate = Estate::make(world, base, megabytes, method)?;
    let by = if method == Method::Dump { "dump" } else { "snapshot" };
    let at = |what: &str| format!("{kind}, {by}, {megabytes} MB in PostgreSQL: {what}");
    let first = estate.freeze("first")?;
    report.figure(&at("first freeze, total"), first.total_us as f64 / 1000.0, "ms", None);
    let before = estate.stored()?;
    let (mut pause, mut admission, mut total) = (Samples::default(), Samples::default(), Samples::default());
    let (mut hand, mut hand_back, mut back) = (Samples::default(), Samples::default(), Samples::default());
    let rounds = world.times(5, 2);
    let mut members: BTreeMap<String, Samples> = BTreeMap::new();
    for round in 0..rounds {
        estate.change(round)?;
        let cost = estate.freeze(&format!("round {round}"))?;
        for member in &cost.members {
            members.entry(member.name.clone()).or_default().add_ms(member.pause_us as f64 / 1000.0);
        }
        pause.add_ms(cost.pause_us as f64 / 1000.0);
        admission.add_ms(cost.admission_us as f64 / 1000.0);
        total.add_ms(cost.total_us as f64 / 1000.0);
        hand.add(estate.by_hand()?);
        crate::go_on()?;
    }
    let grown = (estate.stored()? - before) as f64 / rounds as f64;
    for _ in 0..world.times(3, 1) {
        back.add(estate.restore("first")?);
        hand_back.add(estate.back_by_hand()?);
        crate::go_on()?;
    }
    let (most_pause, most_restore) = match method {
        Method::Dump => (1000.0, None),
        Method::Snapshot => (150.0, Some(Target::AtMost(2000.0))),
    };
    report.times(&at("pause of a freeze"), &pause, Some(Target::AtMost(most_pause)));
    for (name, spent) in &members {
        report.times(&format!("  of it in member {name}"), spent, None);
    }
    report.times(&at("until kernels execute again"), &admission, None);
    report.times(&at("total of a freeze"), &total, None);
    report.times(&at("by hand, with everything stopped"), &hand, None);
    report.figure(&at("bytes stored by a freeze after a small change"), grown / 1e6, "MB", None);
    report.times(&at("restore until the database answers"), &back, most_restore);
    report.times(&at("the same by hand"), &hand_back, None);
    Ok(pause)
}

/// The group, with what belongs to it. Fields are dropped in this order.
struct Estate {
    daemon: Daemon,
    server: Server,
    place: tempfile::TempDir,
}

impl Estate {
    fn make(world: &World, base: &Path, megabytes: usize, method: Method) -> anyhow::Result<Estate> {
        let place = tempfile::Builder::new().prefix("re").tempdir_in(base)?;
        std::fs::set_permissions(place.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let server = Server::start(place.path(), megabytes, method)?;
        let daemon = Daemon::start_in(world, place.path(), &server.configuration()?)?;
        let estate = Estate { daemon, server, place };
        let code = estate.code();
        let mut clone = Command::new("git");
        clone.args(["clone", "-q", "--no-hardlinks", "--", env!("CARGO_MANIFEST_DIR")]).arg(&code);
        done(&mut clone).context("a copy of this repository")?;
        let fill = format!(
            "import os\nfor i in range({FILES_MB}):\n with open(f'f{{i}}', 'wb') as f: f.write(os.urandom(1 << 20))"
        );
        estate.daemon.with(async |host| {
            for name in KERNELS {
                run(&create(&host, name, EngineName::Python).await?, &fill).await?;
            }
            host.create_group("all").await?;
            for name in KERNELS {
                host.add_member("all", "kernel", name, "").await?;
            }
            host.add_member("all", "repository", &code.display().to_string(), "code").await?;
            match method {
                Method::Dump => host.add_member("all", "postgres", &estate.server.connection("bench"), "data").await?,
                Method::Snapshot => host.add_member("all", "server", "bench", "data").await?,
            };
            Ok(())
        })?;
        Ok(estate)
    }

    fn code(&self) -> PathBuf {
        self.place.path().join("code")
    }

    /// A little of everything.
    fn change(&self, round: usize) -> anyhow::Result<()> {
        std::fs::write(self.code().join("README.md"), format!("round {round}"))?;
        self.server.sql(&format!("UPDATE t SET body = md5({round}::text) WHERE id % 100 = {round}"))?;
        self.daemon.with(async |host| {
            for name in KERNELS {
                run(
                    &host.open_kernel(name).await?.0,
                    &format!("open('f0', 'wb').write(os.urandom(1 << 20)); r = {round}"),
                )
                .await?;
            }
            Ok(())
        })
    }

    fn freeze(&self, message: &str) -> anyhow::Result<FreezeCost> {
        let taken = self.daemon.with(async |host| Ok(host.freeze("all", message, Drain::default(), None).await?))?;
        taken.cost.context("the daemon reports no cost")
    }

    /// Restores a freeze; returns the time until the database answers.
    fn restore(&self, name: &str) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        self.daemon.with(async |host| Ok(host.restore_group("all", name, &[], Drain::default()).await?))?;
        self.server.sql("SELECT count(*) FROM t")?;
        Ok(begun.elapsed())
    }

    /// Bytes of the store.
    fn stored(&self) -> anyhow::Result<u64> {
        let listed = text(Command::new("du").arg("-sb").arg(self.daemon.data().join("store")))?;
        Ok(listed.split_whitespace().next().unwrap_or_default().parse()?)
    }

    fn kept(&self) -> PathBuf {
        self.place.path().join("kept")
    }

    fn by_hand(&self) -> anyhow::Result<Duration> {
        let _ = std::fs::remove_dir_all(self.kept());
        std::fs::create_dir(self.kept())?;
        let begun = Instant::now();
        done(self.server.client("pg_dump", "bench").args(["-Fc", "-f"]).arg(self.kept().join("dump")))?;
        let mut bundle = Command::new("git");
        bundle.arg("-C").arg(self.code()).args(["bundle", "create", "-q"]).arg(self.kept().join("bundle"));
        done(bundle.args(["--all"]))?;
        let mut tar = Command::new("tar");
        // The kernels' databases are in use: tar ends with 1 if one changed meanwhile.
        tar.args(["--exclude=*.db-wal", "--exclude=*.db-shm", "--warning=no-file-changed"]);
        tar.arg("-cf").arg(self.kept().join("tar")).arg("-C").arg(self.daemon.data().join("kernels")).arg(".");
        ended(&mut tar, &[0, 1])?;
        done(Command::new("sync").arg("-f").arg(self.kept()))?;
        Ok(begun.elapsed())
    }

    fn back_by_hand(&self) -> anyhow::Result<Duration> {
        let to = self.kept().join("back");
        let _ = std::fs::remove_dir_all(&to);
        std::fs::create_dir(&to)?;
        let begun = Instant::now();
        done(self.server.client("createdb", "").arg("back"))?;
        done(self.server.client("pg_restore", "back").arg(self.kept().join("dump")))?;
        done(Command::new("git").args(["clone", "-q"]).arg(self.kept().join("bundle")).arg(to.join("code")))?;
        done(Command::new("tar").arg("-xf").arg(self.kept().join("tar")).arg("-C").arg(&to))?;
        text(self.server.client("psql", "back").args(["-X", "-q", "-c", "SELECT count(*) FROM t"]))?;
        let took = begun.elapsed();
        done(self.server.client("dropdb", "").arg("back"))?;
        Ok(took)
    }
}

/// A server on a Unix socket. It refuses to run as root: then it runs as the user of Debian's package.
struct Server {
    folder: PathBuf,
    programs: PathBuf,
}

impl Server {
    fn start(place: &Path, megabytes: usize, method: Method) -> anyhow::Result<Server> {
        let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let mut found: Vec<PathBuf> =
            versions.map(|entry| entry.path().join("bin")).filter(|bin| bin.join("initdb").exists()).collect();
        found.sort();
        let programs = found.pop().context("PostgreSQL is not installed (Debian: postgresql)")?;
        let server = Server { folder: place.join("pg"), programs };
        std::fs::create_dir(&server.folder)?;
        let data = server.data();
        match method {
            Method::Dump => std::fs::create_dir(&data)?,
            Method::Snapshot => done(Command::new("btrfs").args(["subvolume", "create"]).arg(&data))?,
        }
        std::fs::create_dir(server.socket())?;
        for path in [&data, &server.socket()] {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
            if nix::unistd::geteuid().is_root() {
                done(Command::new("chown").arg("postgres:").arg(path))?;
            }
        }
        // Only this user and root reach the socket.
        let init = ["-A", "trust", "-U", "bench", "-E", "UTF8", "--no-locale", "-N"];
        done(server.own("initdb").args(init).arg(&data))?;
        done(&mut server.control("start"))?;
        done(server.client("createdb", "").arg("bench"))?;
        server.sql(&format!(
            "CREATE TABLE t AS SELECT g AS id, (SELECT string_agg(md5((g * 31 + i)::text), '') \
             FROM generate_series(1, 31) AS i) AS body FROM generate_series(1, {}) AS g; \
             ALTER TABLE t ADD PRIMARY KEY (id); CHECKPOINT",
            megabytes * 1000
        ))?;
        Ok(server)
    }

    fn own(&self, program: &str) -> Command {
        let program = self.programs.join(program);
        let mut command = if nix::unistd::geteuid().is_root() {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command.current_dir("/");
        command
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }

    fn control(&self, verb: &str) -> Command {
        let options = format!("-c listen_addresses= -c unix_socket_directories={}", self.socket().display());
        let mut command = self.own("pg_ctl");
        command.args([verb, "-w", "-m", "fast", "-o", &options, "-l"]).arg(self.socket().join("log"));
        command.arg("-D").arg(self.data());
        command
    }

    /// The daemon's configuration of it.
    fn configuration(&self) -> anyhow::Result<String> {
        let argv = |verb: &str| {
            let command = self.control(verb);
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            let mut words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
            if let Some(program) = words.first_mut().filter(|program| !program.starts_with('/')) {
                *program =
                    text(Command::new("sh").args(["-c", "command -v \"$0\"", program.as_str()]))?.trim().to_owned();
            }
            anyhow::Ok(format!("{verb} = {words:?}\n"))
        };
        Ok(format!(
            "[postgres.bench]\ndata = {:?}\nconnection = {:?}\nprograms = {:?}\n{}{}",
            self.data(),
            self.connection("postgres"),
            self.programs,
            argv("start")?,
            argv("stop")?
        ))
    }

    fn client(&self, program: &str, database: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.args(["-w", "-U", "bench", "-h"]).arg(self.socket());
        if !database.is_empty() {
            command.args(["-d", database]);
        }
        command
    }

    fn sql(&self, statement: &str) -> anyhow::Result<String> {
        text(self.client("psql", "bench").args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", statement]))
    }

    fn connection(&self, database: &str) -> String {
        format!("dbname={database} host={} user=bench", self.socket().display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut stop = self.own("pg_ctl");
        stop.args(["stop", "-m", "immediate", "-D"]).arg(self.data());
        if let Err(error) = done(&mut stop) {
            eprintln!("  the server did not stop: {error:#}");
        }
    }
}

fn done(command: &mut Command) -> anyhow::Result<()> {
    text(command).map(drop)
}

fn text(command: &mut Command) -> anyhow::Result<String> {
    ended(command, &[0])
}

/// Runs a program to one of these exit codes.
fn ended(command: &mut Command, codes: &[i32]) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    // A server inherits neither: its output would never end.
    let log = tempfile::tempfile()?;
    let command = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
    let status = ryokan::sys::process::unblocked(command).status().with_context(|| name.clone())?;
    let mut said = String::new();
    let mut log = log;
    std::io::Seek::rewind(&mut log)?;
    std::io::Read::read_to_string(&mut log, &mut said)?;
    let is_expected = status.code().is_some_and(|code| codes.contains(&code));
    anyhow::ensure!(is_expected, "{name} ended with {status}: {}", said.trim());
    Ok(said)
}
