//! The measurements as one table with their conditions.

use std::fmt::Write as _;
use std::time::Duration;

use crate::World;
use crate::process;

/// Times of one operation, milliseconds.
#[derive(Debug, Default, Clone)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn add(&mut self, took: Duration) {
        self.0.push(took.as_secs_f64() * 1000.0);
    }

    pub fn add_ms(&mut self, ms: f64) {
        self.0.push(ms);
    }

    pub fn append(&mut self, more: Samples) {
        self.0.extend(more.0);
    }

    /// The value below which that share of the samples lies.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
    }

    pub fn p50(&self) -> f64 {
        self.quantile(0.5)
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }
}

#[derive(Debug, Clone, serde::Serialize)]
struct Row {
    section: String,
    what: String,
    value: f64,
    unit: &'static str,
    p99: Option<f64>,
    samples: usize,
    note: String,
    /// The target, and whether the value meets it.
    target: Option<(String, bool)>,
}

/// The table of all measurements.
pub struct Report {
    rows: Vec<Row>,
    section: String,
    conditions: Vec<String>,
}

/// A bound for a figure.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    AtMost(f64),
    AtLeast(f64),
}

impl Target {
    fn met(self, value: f64) -> bool {
        match self {
            Target::AtMost(most) => value <= most,
            Target::AtLeast(least) => value >= least,
        }
    }

    fn text(self) -> String {
        match self {
            Target::AtMost(most) => format!("≤ {most}"),
            Target::AtLeast(least) => format!("≥ {least}"),
        }
    }
}

impl Report {
    pub fn new(world: &World) -> Self {
        Report { rows: Vec::new(), section: String::new(), conditions: conditions(world) }
    }

    pub fn section(&mut self, name: &str) {
        name.clone_into(&mut self.section);
    }

    fn row(&mut self, what: &str, value: f64, unit: &'static str, p99: Option<f64>, samples: usize) -> &mut Row {
        eprintln!("  {what}: {} {unit}", figure(value));
        self.rows.push(Row {
            section: self.section.clone(),
            what: what.to_owned(),
            value,
            unit,
            p99,
            samples,
            note: String::new(),
            target: None,
        });
        self.rows.last_mut().expect("a row was just pushed")
    }

    /// Times, by median and 99th percentile.
    pub fn times(&mut self, what: &str, samples: &Samples, target: Option<Target>) {
        let p50 = samples.p50();
        let row = self.row(what, p50, "ms", Some(samples.quantile(0.99)), samples.count());
        row.target = target.map(|target| (target.text(), target.met(p50)));
    }

    /// Times with a target for the 99th percentile.
    pub fn tail(&mut self, what: &str, samples: &Samples, target: Option<Target>) {
        let (p50, p99) = (samples.p50(), samples.quantile(0.99));
        let row = self.row(what, p50, "ms", Some(p99), samples.count());
        row.target = target.map(|target| (format!("p99 {}", target.text()), target.met(p99)));
    }

    /// Adds one figure.
    pub fn figure(&mut self, what: &str, value: f64, unit: &'static str, target: Option<Target>) {
        let row = self.row(what, value, unit, None, 1);
        row.target = target.map(|target| (target.text(), target.met(value)));
    }

    /// Adds a note to the newest row.
    pub fn note(&mut self, note: impl Into<String>) {
        if let Some(row) = self.rows.last_mut() {
            row.note = note.into();
        }
    }

    pub fn failed(&mut self, why: &str) {
        self.row("did not run", f64::NAN, "", None, 0).note = why.to_owned();
    }

    pub fn json(&self) -> String {
        let value = serde_json::json!({ "conditions": self.conditions, "rows": self.rows });
        serde_json::to_string_pretty(&value).unwrap_or_default()
    }

    /// The table as Markdown, which is readable as it is.
    pub fn table(&self) -> String {
        let mut out = String::new();
        for condition in &self.conditions {
            let _ = writeln!(out, "- {condition}");
        }
        let _ = writeln!(out, "- load average after the run: {}", process::load());
        let head = ["benchmark", "what", "p50 or figure", "p99", "n", "target", "note"].map(str::to_owned);
        let mut lines = vec![head];
        for row in &self.rows {
            let target = row
                .target
                .as_ref()
                .map_or(String::new(), |(text, met)| format!("{text}: {}", if *met { "met" } else { "**missed**" }));
            lines.push([
                row.section.clone(),
                row.what.clone(),
                format!("{} {}", figure(row.value), row.unit),
                row.p99.map(figure).unwrap_or_default(),
                row.samples.to_string(),
                target,
                row.note.clone(),
            ]);
        }
        let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..7).map(width).collect();
        let _ = writeln!(out);
        for (i, line) in lines.iter().enumerate() {
            let cells: Vec<String> = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            let _ = writeln!(out, "| {} |", cells.join(" | "));
            if i == 0 {
                let rule: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
                let _ = writeln!(out, "| {} |", rule.join(" | "));
            }
        }
        out
    }
}

fn figure(value: f64) -> String {
    if value.is_nan() {
        "–".into()
    } else if value.abs() >= 100.0 {
        format!("{value:.0}")
    } else if value.abs() >= 1.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

fn conditions(world: &World) -> Vec<String> {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let guest = if cpu.contains("hypervisor") { ", a virtual machine" } else { "" };
    let os = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut lines = vec![
        format!("{cores} cores ({}){guest}, Linux {}", model.trim_start_matches([' ', '\t', ':']), os.trim()),
        format!("ryokan {}, release build, catalog durability \"process\"", env!("CARGO_PKG_VERSION")),
        format!("python: {}", process::version_of(&world.python, &["--version"])),
    ];
    if let Some(python) = &world.ipykernel {
        let code = "import ipykernel, jupyter_client as j, sys; print(f'ipykernel {ipykernel.__version__}, jupyter_client {j.__version__}, python', sys.version.split()[0])";
        lines.push(process::version_of(python, &["-c", code]));
    }
    if let Some(python) = &world.python_client {
        let code =
            "import capnp, sys; print(f'Python client: pycapnp {capnp.__version__}, python', sys.version.split()[0])";
        lines.push(process::version_of(python, &["-c", code]));
    }
    lines.push(process::version_of("bwrap".as_ref(), &["--version"]));
    if world.quick {
        lines.push("--quick: few repetitions, coarse figures".into());
    }
    lines.push(format!("load average before the run: {}", process::load()));
    lines
}
