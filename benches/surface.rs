//! What users do all day: files in and out, listings, programs by argv, whole commands of the command line.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, Program, Work};
use ryokan::core::files::FileAttributes;
use ryokan::core::limits;
use ryokan::core::spec::WORKSPACE;
use ryokan::rpc::client::{FilesClient, KernelClient};

use crate::daemon::{create, run};
use crate::peers::{StandingSandbox, bubblewrap};
use crate::report::{Report, Samples};
use crate::{Daemon, World, go_on};

/// Entries of the directory that is listed.
const ENTRIES: usize = 10_000;

async fn write(files: &FilesClient, path: &str, chunk: &[u8], bytes: u64) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let mut upload = files.create(path.as_bytes(), FileAttributes::default()).await?;
    let mut left = bytes;
    while left > 0 {
        let part = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        upload.write(&chunk[..part]).await?;
        left -= part as u64;
    }
    let info = upload.finish().await?;
    anyhow::ensure!(info.bytes == bytes, "{} of {bytes} bytes are there", info.bytes);
    Ok(begun.elapsed())
}

async fn read(files: &FilesClient, path: &str, bytes: u64) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let (mut download, mut came) = (files.open(path.as_bytes()).await?, 0);
    while let Some(part) = download.next().await? {
        came += part.len() as u64;
    }
    anyhow::ensure!(came == bytes, "{came} of {bytes} bytes came");
    Ok(begun.elapsed())
}

/// Reads and writes through the interface, listings, and programs beside the engine.
pub fn files(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let daemon = Daemon::start(world)?;
    let large = world.size.unwrap_or(if world.quick { 16 << 20 } else { 1 << 30 });
    daemon.with(async |host| {
        let kernel = create(&host, "files", EngineName::Bash).await?;
        run(&kernel, "true").await?;
        let files = kernel.files().await?;
        // Not compressible, and no two chunks alike.
        let mut chunk = vec![0; limits::CHUNK_BYTES];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut chunk)?;
        for (what, bytes, times) in
            [("1 KiB", 1 << 10, world.times(500, 50)), ("1 MB", 1_000_000, world.times(200, 20))]
        {
            let (mut writes, mut reads) = (Samples::default(), Samples::default());
            for _ in 0..times {
                go_on()?;
                writes.add(write(&files, "file", &chunk, bytes).await?);
                reads.add(read(&files, "file", bytes).await?);
            }
            report.times(&format!("write {what}"), &writes, None);
            report.times(&format!("read {what}"), &reads, None);
        }
        let speed = |took: Duration| large as f64 / 1e6 / took.as_secs_f64();
        report.figure("write a large file", speed(write(&files, "large", &chunk, large).await?), "MB/s", None);
        report.note(format!("{} MB, complete when the call returns", large / 1_000_000));
        report.figure("read a large file", speed(read(&files, "large", large).await?), "MB/s", None);
        go_on()?;
        plain_files(&daemon, &chunk, large, report)?;
        listings(&kernel, &files, world, report).await?;
        programs(&kernel, world, report).await
    })
}

/// The same writes and reads of the same file system without ryokan.
fn plain_files(daemon: &Daemon, chunk: &[u8], bytes: u64, report: &mut Report) -> anyhow::Result<()> {
    let path = daemon.data().join("plain");
    let speed = |took: Duration| bytes as f64 / 1e6 / took.as_secs_f64();
    let begun = Instant::now();
    let (mut file, mut left) = (std::fs::File::create(&path)?, bytes);
    while left > 0 {
        let part = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        file.write_all(&chunk[..part])?;
        left -= part as u64;
    }
    report.figure("  beside: write without ryokan", speed(begun.elapsed()), "MB/s", None);
    let begun = Instant::now();
    let (mut file, mut buffer) = (std::fs::File::open(&path)?, vec![0; chunk.len()]);
    while file.read(&mut buffer)? > 0 {}
    report.figure("  beside: read without ryokan", speed(begun.elapsed()), "MB/s", None);
    Ok(std::fs::remove_file(&path)?)
}

async fn listings(
    kernel: &KernelClient,
    files: &FilesClient,
    world: &World,
    report: &mut Report,
) -> anyhow::Result<()> {
    run(kernel, &format!("mkdir many; for ((i = 0; i < {ENTRIES}; i++)); do : > many/$i; done")).await?;
    let mut samples = Samples::default();
    for _ in 0..world.times(50, 5) {
        go_on()?;
        let begun = Instant::now();
        let entries = files.list(b"many").await?;
        samples.add(begun.elapsed());
        anyhow::ensure!(entries.len() == ENTRIES, "{} entries", entries.len());
    }
    report.times(&format!("list {ENTRIES} entries"), &samples, None);
    Ok(())
}

async fn programs(kernel: &KernelClient, world: &World, report: &mut Report) -> anyhow::Result<()> {
    let [mut own, mut code, mut peer, mut entered] = <[Samples; 4]>::default();
    let standing = StandingSandbox::start().ok();
    let program = Program { argv: vec!["/bin/true".into()], cwd: WORKSPACE.into(), detached: false, terminal: None };
    let request = ExecRequest { what: Work::Process(program), ..ExecRequest::default() };
    for _ in 0..world.times(300, 30) {
        go_on()?;
        let begun = Instant::now();
        let process = kernel.spawn(&request).await?;
        let result = process.execution.result().await?;
        own.add(begun.elapsed());
        anyhow::ensure!(result.end.code == 0, "{}", result.end.err);
        let begun = Instant::now();
        run(kernel, "/bin/true").await?;
        code.add(begun.elapsed());
        if let Ok(took) = bubblewrap(Path::new("/bin/true"), &[]) {
            peer.add(took);
        }
        if let Some(Ok(took)) = standing.as_ref().map(|standing| standing.enter(Path::new("/bin/true"))) {
            entered.add(took);
        }
    }
    report.times("program by argv in a running kernel", &own, None);
    report.times("  beside: the engine, bash, runs the program", &code, None);
    if peer.count() > 0 {
        report.times("  beside: bwrap with a new sandbox for each", &peer, None);
    }
    if entered.count() > 0 {
        report.times("  beside: nsenter into a standing sandbox", &entered, None);
    }
    Ok(())
}

/// Whole commands: start of the program, connection, answer, end.
pub fn cli(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let daemon = Daemon::start(world)?;
    let here = tempfile::tempdir()?;
    let file = here.path().join("in");
    std::fs::write(&file, vec![7; 1_000_000])?;
    let file = file.display().to_string();
    let command = |arguments: &[&str]| -> anyhow::Result<Duration> {
        let begun = Instant::now();
        let mut command = daemon.cli(arguments);
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit()).status()?;
        anyhow::ensure!(status.success(), "{arguments:?}: {status}");
        Ok(begun.elapsed())
    };
    command(&["new", "cli", "--engine", "bash"])?;
    for arguments in [
        &["--version"][..],
        &["exec", "cli", "true"],
        &["spawn", "cli", "--", "true"],
        &["run", "--engine", "bash", "true"],
        &["run", "--engine", "python", "1"],
        &["cp", &file, "cli:in"],
        &["cp", "cli:in", "-"],
        &["ls"],
    ] {
        let mut samples = Samples::default();
        command(arguments)?;
        for _ in 0..world.times(50, 5) {
            go_on()?;
            samples.add(command(arguments)?);
        }
        let shown: Vec<&str> = arguments.iter().map(|word| if *word == file { "FILE" } else { word }).collect();
        report.times(&format!("ryokan {}", shown.join(" ")), &samples, None);
        if arguments[0] == "cp" {
            report.note("1 MB");
        }
    }
    Ok(())
}
