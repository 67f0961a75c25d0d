//! A source that the user's own programs freeze, capture, thaw and restore: `[sources.NAME]` of the configuration.
//!
//! Only the owner of the daemon can write the configuration, and only groups of the daemon's own user may name a source.
//! The data is what `capture` writes to its standard output. What `revision` prints identifies it; without that program,
//! a change during a freeze is not noticed.

use std::path::PathBuf;
use std::rc::Rc;

use async_trait::async_trait;

use super::{DataSource, NOT_STORED, other_content};
use crate::config::Source;
use crate::core::error::{Error, Result};
use crate::core::freeze::Captured;
use crate::core::freeze::cost::Driver;
use crate::core::kernel::transition::Kind;
use crate::core::limits;
use crate::programs::{Output, Program};
use crate::supervisor::freeze::{access, objects};
use crate::supervisor::host::Host;
use crate::sys::fault;

/// The revision of a source without a program for it.
const REVISION: &str = "command";

/// The source.
pub(super) struct CommandSource {
    host: Rc<Host>,
    name: String,
    source: Source,
    scratch: PathBuf,
    /// The revision at the last look, if a program says it.
    seen: String,
    is_switched: bool,
}

impl CommandSource {
    /// A configured source.
    ///
    /// # Errors
    /// `notFound`.
    pub fn new(host: Rc<Host>, name: &str, scratch: PathBuf) -> Result<CommandSource> {
        let source = host.config.sources.get(name).cloned().ok_or_else(|| {
            Error::not_found(format!("no data source {name:?} is configured"))
                .reason("source")
                .hint(format!("add [sources.{name}] to the configuration"))
        })?;
        Ok(CommandSource { host, name: name.to_owned(), source, scratch, seen: String::new(), is_switched: false })
    }

    async fn run(&self, argv: &[String], input: Option<&str>, output: Option<&str>) -> Result<()> {
        let output = output.map(|file| self.scratch.join(file));
        let output = output.as_deref().map_or(Output::Ignored, |file| Output::File(file, self.source.max_size));
        self.run_to(argv, input, output).await.map(drop)
    }

    async fn run_to(&self, argv: &[String], input: Option<&str>, output: Output<'_>) -> Result<Vec<u8>> {
        let input = input.map(|file| self.scratch.join(file));
        let program = Program {
            argv,
            kept: &[],
            env: &[("RYOKAN_SOURCE", &self.name)],
            input: input.as_deref(),
            output,
            timeout: self.source.timeout,
            user: None,
        };
        access::programs(&self.host).await?.run(&program).await
    }

    /// A hash of what identifies the present data; empty: no program says it.
    ///
    /// # Errors
    /// Errors of the program, `unavailable` (`source_revision`) if it prints nothing.
    async fn data_revision(&self) -> Result<String> {
        if self.source.revision.is_empty() {
            return Ok(String::new());
        }
        let printed = self.run_to(&self.source.revision, None, Output::Bytes(limits::SOURCE_REVISION_BYTES)).await?;
        if printed.is_empty() {
            return Err(Error::unavailable(format!("the revision program of source {} printed nothing", self.name))
                .reason("source_revision")
                .hint("it must print what identifies the data"));
        }
        Ok(format!("{}{}", self.program_mark(), &blake3::hash(&printed).to_hex()[..32]))
    }

    /// The beginning of revisions of this program: those of another one are not comparable.
    fn program_mark(&self) -> String {
        let mut mark = blake3::hash(self.source.revision.join("\0").as_bytes()).to_hex()[..8].to_owned();
        mark.push('-');
        mark
    }

    /// Checks that the data is the one with this revision, as far as that is known.
    ///
    /// # Errors
    /// Errors of the program, and `conflict` (`source_changed`).
    async fn check_data(&self, captured: &Captured, otherwise: &str) -> Result<()> {
        let Captured::Command { revision, .. } = captured else { return Err(other_content()) };
        let is_known = !self.source.revision.is_empty() && revision.starts_with(&self.program_mark());
        if !is_known || self.data_revision().await? == *revision {
            return Ok(());
        }
        Err(Error::conflict(format!("source {}: {otherwise}", self.name)).reason("source_changed"))
    }

    async fn fetch(&self, captured: &Captured, file: &str) -> Result<()> {
        let Captured::Command { data, .. } = captured else { return Err(other_content()) };
        objects::get(&self.host, *data, &self.scratch.join(file)).await
    }
}

#[async_trait(?Send)]
impl DataSource for CommandSource {
    fn must_resume(&self, _transition: Kind) -> bool {
        !self.source.thaw.is_empty()
    }

    async fn quiesce(&mut self, _transition: Kind) -> Result<()> {
        if self.source.freeze.is_empty() { Ok(()) } else { self.run(&self.source.freeze, None, None).await }
    }

    async fn resume(&mut self) -> Result<()> {
        if self.source.thaw.is_empty() { Ok(()) } else { self.run(&self.source.thaw, None, None).await }
    }

    async fn revision(&mut self, _any: bool) -> Result<String> {
        self.seen = self.data_revision().await?;
        Ok(if self.seen.is_empty() { REVISION.into() } else { self.seen.clone() })
    }

    async fn present(&mut self) -> Result<Option<Captured>> {
        let revision = self.data_revision().await?;
        let (source, data) = (self.name.clone(), NOT_STORED);
        Ok((!revision.is_empty()).then_some(Captured::Command { source, data, bytes: 0, revision }))
    }

    /// The revision is that of the look before: another one after the capture is found by the next look.
    async fn pin(&mut self, any: bool) -> Result<(Captured, String)> {
        if self.seen.is_empty() {
            self.revision(any).await?;
        }
        self.run(&self.source.capture, None, Some("data")).await?;
        let (source, data, revision) = (self.name.clone(), NOT_STORED, self.seen.clone());
        let reported = if revision.is_empty() { REVISION.into() } else { revision.clone() };
        Ok((Captured::Command { source, data, bytes: 0, revision }, reported))
    }

    fn driver(&self) -> Driver {
        Driver::Program
    }

    async fn store(&mut self, captured: &mut Captured) -> Result<()> {
        let Captured::Command { data, bytes, .. } = captured else { return Err(other_content()) };
        (*data, *bytes) = objects::put(&self.host, self.scratch.join("data")).await?;
        Ok(())
    }

    async fn verify(&mut self, target: &Captured) -> Result<()> {
        self.fetch(target, "target").await
    }

    async fn prepare(&mut self, _target: &Captured) -> Result<()> {
        Ok(())
    }

    async fn switch(&mut self, target: &Captured, safety: &Captured) -> Result<()> {
        self.check_data(safety, "its data was changed during the restore").await?;
        self.is_switched = true;
        fault::point("source.command.restore").map_err(|error| Error::unavailable(error.to_string()))?;
        self.run(&self.source.restore, Some("target"), None).await?;
        self.check_data(target, "its restore program did not bring the data back").await
    }

    async fn revert(&mut self, safety: &Captured, _target: Option<&Captured>) -> Result<()> {
        if !self.is_switched {
            return Ok(());
        }
        self.fetch(safety, "safety").await?;
        self.run(&self.source.restore, Some("safety"), None).await?;
        self.check_data(safety, "its restore program did not bring the former data back").await
    }

    fn may_be_switched(&mut self) {
        self.is_switched = true;
    }

    async fn discard(&mut self) {}
}
