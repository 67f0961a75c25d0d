//! The details of one kernel, as lines.

use ratatui::style::Style;

use super::{Theme, shown};
use crate::cli::paint::Paint;
use crate::cli::render;
use crate::cli::top::model::{Kernel, Model};
use crate::cli::top::news::is_trouble;
use crate::core::ids::KernelId;
use crate::core::info::{Job, JournalEntry};
use crate::core::quantity::format_size;
use crate::core::rights::Rights;

/// Number of events shown.
const EVENTS: usize = 5;

/// The style of a line, resolved when it is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Unstyled.
    Plain,
    /// A heading.
    Head,
    /// Less important.
    Dim,
    /// A failure.
    Bad,
}

impl Look {
    /// The terminal style.
    pub fn style(self, theme: Theme) -> Style {
        match self {
            Look::Plain => Style::new(),
            Look::Head => theme.head(),
            Look::Dim => theme.dim(),
            Look::Bad => theme.bad(),
        }
    }
}

/// The lines of a kernel's details: changing values first, then fixed ones.
pub fn details_of(model: &Model, id: KernelId) -> Vec<(Look, String)> {
    let Some(kernel) = model.kernels.get(&id) else {
        return vec![(Look::Dim, "this kernel is gone; Esc leads back".into())];
    };
    let mut lines = vec![(Look::Plain, now(model, kernel))];
    part(&mut lines, "newest events", events(model, kernel));
    match model.inspected.as_ref().filter(|(of, _)| *of == id) {
        Some((_, inspection)) => {
            part(&mut lines, "journal, newest first", inspection.journal.iter().rev().map(entry));
            let job = |job: &Job| (Look::Plain, shown(&format!("{}  {}", job.id, job.command)));
            part(&mut lines, "background jobs", inspection.jobs.iter().map(job));
        }
        None => lines.push((Look::Dim, "asking …".into())),
    }
    let facts = render::kernel(&kernel.info, Rights::ALL, model.now_ms, Paint::OFF);
    part(&mut lines, "kernel", facts.lines().map(|fact| (Look::Plain, shown(fact))));
    lines
}

/// Appends a section with its heading.
fn part(lines: &mut Vec<(Look, String)>, heading: &str, content: impl Iterator<Item = (Look, String)>) {
    lines.push((Look::Plain, String::new()));
    lines.push((Look::Head, heading.into()));
    let before = lines.len();
    lines.extend(content);
    if lines.len() == before {
        lines.push((Look::Dim, "none".into()));
    }
}

fn now(model: &Model, kernel: &Kernel) -> String {
    let info = &kernel.info;
    let since = match kernel.since_ms {
        Some(at_ms) => format!(" since {}, {}", render::stamp(at_ms), render::ago(at_ms, model.now_ms)),
        None => String::new(),
    };
    let why = if info.state_reason.is_empty() { String::new() } else { format!(" ({})", info.state_reason) };
    let executions = render::counted(info.executions, "execution");
    let memory = format_size(info.memory_bytes);
    let of = format_size(info.in_force.as_deref().unwrap_or(&info.spec).limits.memory_bytes);
    shown(&format!("{}{why}{since}; {executions}, memory {memory} of {of}", info.state))
}

fn events(model: &Model, kernel: &Kernel) -> impl Iterator<Item = (Look, String)> {
    model.news.of(&kernel.info).rev().take(EVENTS).map(|event| {
        let look = if is_trouble(&event.kind) { Look::Bad } else { Look::Plain };
        (look, shown(render::event(event, Paint::OFF).trim_end()))
    })
}

fn entry(entry: &JournalEntry) -> (Look, String) {
    let is_bad = !matches!(entry.status.as_str(), "" | "done" | "running" | "queued");
    let line = render::journal_entry(entry, false, Paint::OFF);
    (if is_bad { Look::Bad } else { Look::Plain }, shown(line.trim_end()))
}
