//! One snapshot of everything, for programs and non-interactive terminals: `--once` and `--json`.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt as _;
use serde_json::{Value as Json, json};

use super::model::Kernel;
use super::news::News;
use super::view::span;
use crate::cli::json;
use crate::cli::paint::Paint;
use crate::cli::render::{self, Table, counted};
use crate::core::error::Result;
use crate::core::ids::KernelId;
use crate::core::info::{HostInfo, Job, KernelFilter, PoolInfo};
use crate::core::quantity::format_size;
use crate::rpc::client::HostClient;

/// Kernels queried in parallel.
const AT_ONCE: usize = 32;
/// Time limit for reading past events. Without them the times of state changes are unknown.
const PAST: Duration = Duration::from_secs(10);

/// The state of a daemon at one time.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// The time.
    pub at_ms: i64,
    /// The daemon's host.
    pub host: HostInfo,
    /// All kernels, by name.
    pub kernels: Vec<Kernel>,
    /// Background jobs of the kernels that have any.
    pub jobs: BTreeMap<KernelId, Vec<Job>>,
    /// All pools.
    pub pools: Vec<PoolInfo>,
}

/// Takes a snapshot.
///
/// # Errors
/// The daemon's errors.
pub async fn take(host: &HostClient) -> Result<Snapshot> {
    let (past, all) = (tokio::time::timeout(PAST, past(host)), KernelFilter::default());
    let (kernels, pools, news) = futures::join!(host.list_kernels(&all), host.pools(), past);
    let news = news.unwrap_or_else(|_| Ok(News::default()))?;
    let mut kernels: Vec<Kernel> = kernels?.into_iter().map(Kernel::new).collect();
    let live: Vec<KernelId> = kernels.iter().filter(|kernel| kernel.is_live()).map(|kernel| kernel.info.id).collect();
    let jobs = live.into_iter().map(|id| async move {
        // A kernel removed meanwhile has none.
        let opened = host.open_kernel(&id.to_string()).await;
        let jobs = match opened {
            Ok((kernel, _)) => kernel.jobs().await,
            Err(error) => Err(error),
        };
        (id, jobs.unwrap_or_default())
    });
    let jobs: BTreeMap<KernelId, Vec<Job>> = futures::stream::iter(jobs).buffer_unordered(AT_ONCE).collect().await;
    for kernel in &mut kernels {
        kernel.since_ms = news.since_ms(&kernel.info);
        kernel.jobs = jobs.get(&kernel.info.id).map(Vec::len);
    }
    Ok(Snapshot { at_ms: render::now_ms(), host: host.info().clone(), kernels, jobs, pools: pools? })
}

async fn past(host: &HostClient) -> Result<News> {
    let mut events = host.events(0).await?;
    let mut news = News::default();
    while let Some(event) = events.next_past().await? {
        news.take(event, true);
    }
    Ok(news)
}

impl Snapshot {
    fn states(&self) -> BTreeMap<&str, usize> {
        let mut states = BTreeMap::new();
        for kernel in &self.kernels {
            *states.entry(kernel.info.state.as_str()).or_default() += 1;
        }
        states
    }

    fn memory_bytes(&self) -> u64 {
        self.kernels.iter().map(|kernel| kernel.info.memory_bytes).sum()
    }

    /// What the measured kernels take on the disk.
    fn disk_bytes(&self) -> u64 {
        self.kernels.iter().filter_map(|kernel| kernel.info.disk).map(|disk| disk.total_bytes()).sum()
    }

    fn executions(&self) -> u64 {
        self.kernels.iter().map(|kernel| kernel.info.executions).sum()
    }

    /// The snapshot as text for people.
    pub fn text(&self, paint: Paint) -> String {
        let states: String =
            self.states().iter().map(|(state, count)| format!(", {count} {}", render::plain(state))).collect();
        let mut text = format!(
            "{} {}  {}{states}; memory {}, disk {}, {}\n\n",
            paint.head(&render::plain(&self.host.name)),
            render::stamp(self.at_ms),
            counted(self.kernels.len() as u64, "kernel"),
            format_size(self.memory_bytes()),
            format_size(self.disk_bytes()),
            counted(self.executions(), "execution"),
        );
        let mut table =
            Table::new(&["NAME", "ENGINE", "STATE", "SINCE", "EXECUTIONS", "MEMORY", "DISK", "IDLE", "JOBS"]);
        let age = |at_ms: i64| span(self.at_ms.saturating_sub(at_ms));
        for kernel in &self.kernels {
            let info = &kernel.info;
            table.row(&[
                kernel.name(),
                info.spec.engine.name().to_owned(),
                info.state.clone(),
                kernel.since_ms.map_or_else(|| "-".into(), age),
                info.executions.to_string(),
                if info.memory_bytes == 0 { "-".into() } else { format_size(info.memory_bytes) },
                render::disk_total(info),
                if info.state == "busy" { "-".into() } else { age(info.last_used_at_ms) },
                kernel.jobs.filter(|jobs| *jobs > 0).map_or_else(|| "-".into(), |jobs| jobs.to_string()),
            ]);
            table.paint(2, render::state_painter(&info.state));
        }
        text.push_str(&table.text("no kernels; make one: ryokan new NAME", paint));
        text.push('\n');
        text.push_str(&render::pools(&self.pools, paint));
        text
    }

    /// The snapshot for programs, in the format of `docs/cli-json.md`.
    pub fn json(&self) -> Json {
        let kernel = |kernel: &Kernel| {
            let mut json = json::kernel(&kernel.info);
            json["since_ms"] = kernel.since_ms.into();
            json["jobs"] = json!(self.jobs.get(&kernel.info.id).map_or(&[][..], Vec::as_slice));
            json
        };
        json!({
            "at_ms": self.at_ms,
            "host": self.host,
            "kernels": self.kernels.iter().map(kernel).collect::<Vec<_>>(),
            "pools": self.pools,
            "totals": {
                "kernels": self.kernels.len(),
                "states": self.states(),
                "memory_bytes": self.memory_bytes(),
                "disk_bytes": self.disk_bytes(),
                "executions": self.executions(),
            },
        })
    }
}
