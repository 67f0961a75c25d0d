//! A source that the user's own programs freeze, capture, thaw and restore: `[sources.NAME]` of the configuration.
//!
//! Only the owner of the daemon can write the configuration, and only groups of the daemon's own user may name a source.
//! The data is what `capture` writes to its standard output.

use std::path::PathBuf;
use std::rc::Rc;

use async_trait::async_trait;

use super::{DataSource, NOT_STORED, other_content};
use crate::config::Source;
use crate::core::error::{Error, Result};
use crate::core::freeze::Captured;
use crate::core::freeze::cost::Driver;
use crate::core::kernel::transition::Kind;
use crate::programs::{Output, Program};
use crate::supervisor::freeze::{access, objects};
use crate::supervisor::host::Host;
use crate::sys::fault;

/// The revision: what the programs do not say.
const REVISION: &str = "command";

/// The source.
pub(super) struct CommandSource {
    host: Rc<Host>,
    name: String,
    source: Source,
    scratch: PathBuf,
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
        Ok(CommandSource { host, name: name.to_owned(), source, scratch, is_switched: false })
    }

    async fn run(&self, argv: &[String], input: Option<&str>, output: Option<&str>) -> Result<()> {
        let (input, output) = (input.map(|file| self.scratch.join(file)), output.map(|file| self.scratch.join(file)));
        let output = output.as_deref();
        let program = Program {
            argv,
            kept: &[],
            env: &[("RYOKAN_SOURCE", &self.name)],
            input: input.as_deref(),
            output: output.map_or(Output::Ignored, |file| Output::File(file, self.source.max_size)),
            timeout: self.source.timeout,
            user: None,
        };
        access::programs(&self.host).await?.run(&program).await.map(drop)
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
        Ok(REVISION.into())
    }

    async fn present(&mut self) -> Result<Option<Captured>> {
        Ok(None)
    }

    async fn pin(&mut self, _any: bool) -> Result<(Captured, String)> {
        self.run(&self.source.capture, None, Some("data")).await?;
        let (source, data) = (self.name.clone(), NOT_STORED);
        Ok((Captured::Command { source, data, bytes: 0 }, REVISION.into()))
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

    async fn switch(&mut self, _target: &Captured, _safety: &Captured) -> Result<()> {
        self.is_switched = true;
        fault::point("source.command.restore").map_err(|error| Error::unavailable(error.to_string()))?;
        self.run(&self.source.restore, Some("target"), None).await
    }

    async fn revert(&mut self, safety: &Captured, _target: Option<&Captured>) -> Result<()> {
        if !self.is_switched {
            return Ok(());
        }
        self.fetch(safety, "safety").await?;
        self.run(&self.source.restore, Some("safety"), None).await
    }

    fn may_be_switched(&mut self) {
        self.is_switched = true;
    }

    async fn discard(&mut self) {}
}
