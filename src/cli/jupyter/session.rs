//! The ryokan kernel behind a Jupyter kernel: found or created, reached again after the daemon's end.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::RunArgs;
use super::cell::Cell as CellOutput;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::core::engine::EngineName;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::exec::{ExecRequest, ExecResult, OutputEvent, Work};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::rpc::client::{ExecutionClient, HostClient, KernelClient};
use crate::rpc::convert::spec::SpecRequest;

/// Pause before a lost daemon is looked for again.
const RETRY: Duration = Duration::from_millis(250);

/// The kernel of a notebook.
pub struct Session<'a> {
    context: &'a Context,
    name: KernelName,
    /// Whether it is removed when Jupyter ends it: no notebook belongs to it.
    is_temporary: bool,
    engine: Cell<EngineName>,
    connected: RefCell<Option<KernelClient>>,
    /// The execution that runs.
    running: RefCell<Option<ExecutionClient>>,
}

impl<'a> Session<'a> {
    /// Finds or creates the kernel.
    pub async fn open(context: &'a Context, args: &RunArgs) -> std::result::Result<Session<'a>, Failure> {
        let notebook = std::env::var("JPY_SESSION_NAME").ok().filter(|name| !name.is_empty());
        let is_temporary = args.kernels.kernel.is_none() && notebook.is_none();
        let name = match (&args.kernels.kernel, notebook) {
            (Some(name), _) => name.parse().map_err(|error| Error::invalid(format!("{name:?}: {error}")))?,
            (None, Some(notebook)) => of_notebook(&notebook)?,
            (None, None) => of_connection(&args.connection_file)?,
        };
        let engine = Cell::new(args.kernels.engine);
        let (connected, running) = (RefCell::default(), RefCell::default());
        let session = Session { context, name, is_temporary, engine, connected, running };
        session.kernel().await?;
        Ok(session)
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The kernel's engine.
    pub fn engine(&self) -> EngineName {
        self.engine.get()
    }

    async fn host(&self) -> Result<HostClient> {
        self.context.host().await.map_err(Failure::into_error)
    }

    /// The kernel, through the present daemon.
    pub async fn kernel(&self) -> Result<KernelClient> {
        if let Some(kernel) = self.connected.borrow().as_ref() {
            return Ok(kernel.clone());
        }
        let host = self.host().await?;
        let (kernel, info) = match host.open_kernel(self.name.as_str()).await {
            Err(error) if error.code == ErrorCode::NotFound => {
                let mut spec = SpecRequest::new(self.name.clone());
                spec.engine = Some(self.engine.get());
                host.create_kernel(&spec, "").await?
            }
            opened => opened?,
        };
        self.engine.set(info.spec.engine);
        *self.connected.borrow_mut() = Some(kernel.clone());
        Ok(kernel)
    }

    /// Runs `work` on the kernel; once more, with a new connection, if the present one is lost.
    pub async fn with<T>(&self, work: impl AsyncFn(KernelClient) -> Result<T>) -> Result<T> {
        match work(self.kernel().await?).await {
            Err(error) if error.code == ErrorCode::Unavailable => {
                self.connected.take();
                work(self.kernel().await?).await
            }
            done => done,
        }
    }

    /// Runs a cell to its end, also through the end of the daemon. `id` makes it one execution, whatever is repeated.
    /// With `asks`, the code may request input.
    pub async fn run(
        &self,
        code: &str,
        (id, asks): (&str, bool),
        output: &RefCell<CellOutput>,
        mut show: impl AsyncFnMut(OutputEvent) -> Result<()>,
    ) -> Result<ExecResult> {
        let key = format!("jupyter {}", blake3::hash(id.as_bytes()));
        let mut request = ExecRequest { what: Work::Code(code.to_owned()), key, ..ExecRequest::default() };
        // Only the driver of Python has a way to request it; elsewhere reading ends at once.
        if asks && self.engine() == EngineName::Python {
            request.stdin_open = true;
            request.env = vec![("RYOKAN_INPUT".into(), "ask".into())];
        }
        request.check().map_err(|error| Error::invalid(error.to_string()))?;
        let mut lost_at = None;
        loop {
            let attempt = async {
                let execution = self.kernel().await?.run(&request).await?;
                lost_at = None;
                *self.running.borrow_mut() = Some(execution.clone());
                let from = output.borrow().offset;
                let shown = execution.output(from, async |event| show(event).await);
                let (result, ()) = futures::future::try_join(execution.result(), shown).await?;
                Ok(result)
            };
            let done: Result<ExecResult> = attempt.await;
            match done {
                Err(error) if error.code == ErrorCode::Unavailable => {
                    let since = *lost_at.get_or_insert_with(Instant::now);
                    if since.elapsed() > limits::JUPYTER_RECONNECT {
                        self.running.take();
                        return Err(error);
                    }
                    self.connected.take();
                    output.borrow_mut().reconnected();
                    tokio::time::sleep(RETRY).await;
                }
                done => {
                    self.running.take();
                    return done;
                }
            }
        }
    }

    /// Passes a line of input to the running cell, or the end of its input.
    pub async fn answer(&self, line: Option<&str>) -> Result<()> {
        let running = self.running.borrow().clone();
        match (running, line) {
            (Some(execution), Some(line)) => execution.stdin(format!("{line}\n").as_bytes()).await,
            (Some(execution), None) => execution.close_stdin().await,
            (None, _) => Ok(()),
        }
    }

    /// Interrupts the running cell.
    pub async fn interrupt(&self) -> Result<()> {
        let running = self.running.borrow().as_ref().map(ExecutionClient::exec);
        match running {
            Some(exec) => self.with(async |kernel| kernel.interrupt_execution(exec).await.map(drop)).await,
            None => Ok(()),
        }
    }

    /// Gives the kernel the state of a new one, and ends its worker: the next cell has a new interpreter. Files stay.
    /// With `is_stuck`, a cell does not end: it ends with the worker.
    pub async fn clear(&self, is_stuck: bool) -> Result<()> {
        if is_stuck {
            self.with(async |kernel| kernel.stop(true).await).await?;
        }
        let host = self.host().await?;
        let mut spec = self.with(async |kernel| Ok(SpecRequest::exactly(&kernel.info().await?.spec))).await?;
        spec.name = of_hash("cleared", &[self.name(), &std::process::id().to_string()])?;
        (spec.paths, spec.labels, spec.ephemeral) = (Vec::new(), Vec::new(), true);
        let (empty, _) = host.create_kernel(&spec, "").await?;
        let state = empty.save_state().await?.data;
        // It ends with this connection at the latest.
        drop(empty.remove(0).await);
        self.with(async |kernel| kernel.put_state(&state, 0).await).await?;
        self.with(async |kernel| kernel.stop(true).await).await
    }

    /// Ends the use of the kernel: one without a notebook is removed.
    pub async fn close(&self) -> Result<()> {
        match self.is_temporary {
            true => self.with(async |kernel| kernel.remove(0).await).await,
            false => Ok(()),
        }
    }
}

/// The name of a notebook's kernel: the notebook's, and a part that tells notebooks of equal names apart.
fn of_notebook(notebook: &str) -> Result<KernelName> {
    let here = std::env::current_dir().unwrap_or_default();
    let stem = Path::new(notebook).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    of_hash(&stem, &[&here.display().to_string(), notebook])
}

/// The name of a kernel without a notebook. A restarted kernel has the same connection file.
fn of_connection(file: &Path) -> Result<KernelName> {
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    of_hash("jupyter", &[&name])
}

fn of_hash(word: &str, parts: &[&str]) -> Result<KernelName> {
    let plain: String = word.chars().filter(|c| c.is_ascii_alphanumeric() || "-_".contains(*c)).take(32).collect();
    let plain = plain.trim_start_matches(['-', '_']);
    let plain = if plain.is_empty() { "notebook" } else { plain };
    let hash: String = blake3::hash(parts.join("\0").as_bytes()).to_hex().chars().take(8).collect();
    format!("{plain}-{hash}").parse().map_err(|error| Error::internal(format!("a kernel's name: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_notebook_has_a_kernel_name() {
        for notebook in ["Untitled.ipynb", "a b/ü .ipynb", "", "..", "-x", &"long".repeat(99), "日本.ipynb"] {
            let name = of_notebook(notebook).expect("a name");
            assert_eq!(name, of_notebook(notebook).expect("a name"));
            assert_ne!(name, of_notebook(&format!("other/{notebook}")).expect("a name"));
        }
    }
}
