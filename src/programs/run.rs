//! One program at a time.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::log::{Place, ProgramLog, RunningGroup};
use crate::core::error::{Error, Result};
use crate::core::limits;

/// The variables of the daemon's environment that every program receives.
const KEPT: [&str; 4] = ["PATH", "HOME", "LANG", "XDG_CONFIG_HOME"];

/// What becomes of a program's output.
#[derive(Debug, Clone, Copy)]
pub enum Output<'a> {
    /// Nothing.
    Ignored,
    /// A new file of at most this size.
    File(&'a Path, u64),
    /// It is returned; at most this size.
    Bytes(u64),
    /// It is passed on in pieces, whatever its size.
    Sink(&'a dyn Sink),
}

/// Takes a program's output.
pub trait Sink: std::fmt::Debug {
    /// Takes the next piece.
    fn take(&self, piece: &[u8]);
}

/// Size of a piece of output, bytes.
const PIECE: usize = 64 << 10;

/// A program.
#[derive(Debug)]
pub struct Program<'a> {
    /// Its name and its arguments.
    pub argv: &'a [String],
    /// Variables of the daemon's environment that it receives, besides the usual ones.
    pub kept: &'a [&'a str],
    /// Further variables.
    pub env: &'a [(&'a str, &'a str)],
    /// The file that it reads; without one it reads nothing.
    pub input: Option<&'a Path>,
    /// Its output.
    pub output: Output<'a>,
    /// When it is killed.
    pub timeout: Duration,
    /// The user and the group that it runs as; `None`: the daemon's. Only root may choose.
    pub user: Option<(u32, u32)>,
}

/// Runs programs.
#[derive(Debug)]
pub struct Programs {
    log: ProgramLog,
}

impl Programs {
    /// Opens the log of programs, and waits for those of a former daemon. Blocks.
    ///
    /// # Errors
    /// File errors.
    pub fn open(path: PathBuf) -> Result<Programs> {
        let failed = |error: std::io::Error| Error::unavailable(format!("{}: {error}", path.display()));
        if let Some(log) = ProgramLog::open(&path, limits::PROGRAM_ORPHAN).map_err(failed)? {
            return Ok(Programs { log });
        }
        // A service that a program started may have inherited the file, and hold it as long as it lives.
        tracing::warn!("a data source's program of the former daemon, or what it started, still runs");
        std::fs::remove_file(&path).map_err(failed)?;
        let log = ProgramLog::open(&path, Duration::ZERO).map_err(failed)?;
        Ok(Programs { log: log.ok_or_else(|| Error::internal("a new file is locked"))? })
    }

    /// Runs a program to its end; returns its output if that is requested. At the deadline, or if this is dropped, it is
    /// killed with everything that it started.
    ///
    /// # Errors
    /// `deadline` (`program_late`); `refused` (`source_size`) for a larger output; `unavailable` (`program_failed`) for
    /// another exit code than 0.
    pub async fn run(&self, program: &Program<'_>) -> Result<Vec<u8>> {
        let name = program.name()?;
        let failed = |error: std::io::Error| Error::unavailable(format!("{name}: {error}"));
        let input = match program.input {
            Some(file) => Stdio::from(File::open(file).map_err(failed)?),
            None => Stdio::null(),
        };
        let output = if matches!(program.output, Output::Ignored) { Stdio::null() } else { Stdio::piped() };
        let (mut child, mut group, place) = self.spawn(program, input, output)?;
        let stdout = child.stdout.take();
        let work = async {
            let output = match stdout {
                Some(stdout) => read(stdout, name, program.output).await?,
                None => Vec::new(),
            };
            Ok::<_, Error>((child.wait().await.map_err(failed)?, output))
        };
        let ended = tokio::time::timeout(program.timeout, work).await;
        let (status, output) = ended.map_err(|_| {
            Error::deadline(format!("{name} did not end within {:?}", program.timeout)).reason("program_late")
        })??;
        group.ended();
        match status.code() {
            Some(0) => Ok(output),
            code => {
                let code = code.map_or_else(|| "a signal".into(), |code| format!("exit code {code}"));
                let said = self.log.said_since(&place);
                Err(Error::unavailable(format!("{name} ended with {code}")).reason("program_failed").said(said))
            }
        }
    }
}

impl Programs {
    fn spawn(&self, program: &Program<'_>, input: Stdio, output: Stdio) -> Result<(Child, RunningGroup, Place)> {
        let name = program.name()?;
        let failed = |error: std::io::Error| Error::unavailable(format!("{name}: {error}"));
        let (errors, place) = self.log.begin().map_err(failed)?;
        let mut command = Command::new(name);
        command.args(&program.argv[1..]).current_dir("/").process_group(0).kill_on_drop(true).env_clear();
        let kept = KEPT.iter().chain(program.kept);
        command.envs(kept.filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs(program.env.iter().copied()).stderr(errors).stdin(input).stdout(output);
        if let Some((uid, gid)) = program.user {
            // This drops root's further groups, too.
            command.uid(uid).gid(gid);
        }
        let child = command.spawn().map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::not_found(format!("there is no program {name}")).reason("program"),
            _ => failed(error),
        })?;
        let group = RunningGroup::of(child.id());
        Ok((child, group, place))
    }

    /// Starts a program that answers requests. It ends with its input, or with the daemon.
    ///
    /// # Errors
    /// As [`Programs::run`].
    pub fn start(self: &Rc<Self>, program: &Program<'_>) -> Result<Session> {
        let (mut child, group, place) = self.spawn(program, Stdio::piped(), Stdio::piped())?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.ok_or_else(|| Error::internal("a program has no pipes"))?;
        let (name, timeout, programs) = (program.name()?.to_owned(), program.timeout, Rc::clone(self));
        Ok(Session { programs, name, timeout, child, group, place, input, output: BufReader::new(output) })
    }
}

impl Program<'_> {
    fn name(&self) -> Result<&str> {
        self.argv.first().map(String::as_str).ok_or_else(|| Error::internal("there is no program"))
    }
}

/// A program that answers requests. Dropping it kills the program.
#[derive(Debug)]
pub struct Session {
    programs: Rc<Programs>,
    name: String,
    /// Of each request.
    timeout: Duration,
    child: Child,
    group: RunningGroup,
    place: Place,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Session {
    /// Sends a request, and returns the next line of the output, of at most `most` bytes.
    ///
    /// # Errors
    /// `deadline` (`program_late`); `unavailable` (`program_failed`) if the program ends.
    pub async fn ask(&mut self, request: &str, most: u64) -> Result<String> {
        let name = self.name.clone();
        let failed = |error: std::io::Error| Error::unavailable(format!("{name}: {error}"));
        let (input, output) = (&mut self.input, &mut self.output);
        let asked = async {
            let mut line = String::new();
            // A program that has ended reports that by the end of its output.
            let _ = input.write_all(request.as_bytes()).await;
            output.take(most).read_line(&mut line).await.map_err(failed)?;
            Ok::<_, Error>(line)
        };
        let line = tokio::time::timeout(self.timeout, asked).await.map_err(|_| {
            Error::deadline(format!("{name} did not answer within {:?}", self.timeout)).reason("program_late")
        })??;
        match line.strip_suffix('\n') {
            Some(line) => Ok(line.to_owned()),
            None => {
                // What it wrote to its standard error is complete once it has ended.
                let _ = tokio::time::timeout(self.timeout, self.child.wait()).await;
                let said = self.programs.log.said_since(&self.place);
                Err(Error::unavailable(format!("{name} ended")).reason("program_failed").said(said))
            }
        }
    }

    /// Ends the input, and waits for the program.
    pub async fn end(self) {
        let Session { mut child, mut group, input, timeout, .. } = self;
        drop(input);
        if tokio::time::timeout(timeout, child.wait()).await.is_ok() {
            group.ended();
        }
    }
}

/// Reads an output to its end, or to one byte more than allowed.
async fn read(stdout: impl AsyncRead + Unpin, name: &str, output: Output<'_>) -> Result<Vec<u8>> {
    let failed = |error: std::io::Error| Error::unavailable(format!("{name}: {error}"));
    let (mut bytes, most) = (
        Vec::new(),
        match output {
            Output::Ignored | Output::Sink(_) => 0,
            Output::File(_, most) | Output::Bytes(most) => most,
        },
    );
    if let Output::Sink(sink) = output {
        let (mut stdout, mut piece) = (stdout, vec![0; PIECE]);
        loop {
            match stdout.read(&mut piece).await.map_err(failed)? {
                0 => return Ok(bytes),
                count => sink.take(&piece[..count]),
            }
        }
    }
    let mut stdout = stdout.take(most.saturating_add(1));
    let size = match output {
        Output::File(path, _) => {
            let mut file = tokio::fs::File::create(path).await.map_err(failed)?;
            let size = tokio::io::copy(&mut stdout, &mut file).await.map_err(failed)?;
            file.flush().await.map_err(failed)?;
            size
        }
        Output::Ignored | Output::Bytes(_) | Output::Sink(_) => {
            stdout.read_to_end(&mut bytes).await.map_err(failed)? as u64
        }
    };
    if size > most {
        return Err(Error::refused(format!("{name} wrote more than {most} bytes"))
            .reason("source_size")
            .hint("raise max_size of the source"));
    }
    Ok(bytes)
}
