//! The whole screen.

use ratatui::buffer::Buffer;
use ratatui::layout::Position;
use ratatui::style::Style;

use super::details::details_of;
use super::rows::{Columns, cell, is_number};
use super::{Theme, shown, span};
use crate::cli::render::{self, counted};
use crate::cli::top::key::HELP;
use crate::cli::top::list::Column;
use crate::cli::top::meter::Meter;
use crate::cli::top::mode::Mode;
use crate::cli::top::model::{Deed, Kernel, Link, Model};
use crate::core::info::PoolInfo;
use crate::core::quantity::format_size;

/// Silence after which a daemon is shown as silent.
const SILENT_MS: i64 = 5_000;

/// One line of the screen, written from left to right.
struct Line<'a> {
    buffer: &'a mut Buffer,
    y: u16,
    x: u16,
}

impl<'a> Line<'a> {
    fn at(buffer: &'a mut Buffer, y: u16) -> Line<'a> {
        let x = buffer.area.left();
        Line { buffer, y, x }
    }

    /// Writes text, cut to the remaining room.
    fn put(&mut self, text: &str, style: Style) -> &mut Self {
        let room = self.buffer.area.right().saturating_sub(self.x);
        if self.y < self.buffer.area.bottom() && room > 0 {
            self.x = self.buffer.set_stringn(self.x, self.y, text, usize::from(room), style).0;
        }
        self
    }
}

/// Draws the screen.
pub fn draw(model: &Model, theme: Theme, buffer: &mut Buffer) {
    let layout = model.layout();
    let mut y = buffer.area.top();
    let mut part = |lines: u16| {
        let from = y;
        y += lines;
        from..y
    };
    for y in part(layout.title) {
        title(model, theme, Line::at(buffer, y));
    }
    for y in part(layout.summary) {
        summary(model, theme, Line::at(buffer, y));
    }
    for (y, pool) in part(layout.pools).zip(&model.pools) {
        self::pool(pool, theme, Line::at(buffer, y));
    }
    let (headings, body) = (part(layout.headings), part(layout.body));
    match &model.mode {
        Mode::Help { .. } => {
            for y in headings {
                Line::at(buffer, y).put("Keys", theme.head());
            }
            for (y, (keys, what)) in body.zip(HELP) {
                Line::at(buffer, y).put(&format!("{keys:<15}"), theme.note()).put(what, Style::new());
            }
        }
        mode => match mode.inspects() {
            Some(id) => {
                let first = first_of(mode);
                for y in headings {
                    let name = model.kernels.get(&id).map_or_else(|| id.to_string(), Kernel::name);
                    Line::at(buffer, y).put(&format!("Kernel {}", shown(&name)), theme.head());
                }
                for (y, (look, text)) in body.zip(details_of(model, id).into_iter().skip(first)) {
                    Line::at(buffer, y).put(&text, look.style(theme));
                }
            }
            None => list(model, theme, buffer, headings, body),
        },
    }
    // On a one-line screen a question takes precedence over a kernel.
    let last = buffer.area.bottom().saturating_sub(1);
    if layout.footer > 0 || !matches!(model.mode, Mode::List) {
        let blank = " ".repeat(usize::from(buffer.area.width));
        Line::at(buffer, last).put(&blank, Style::new());
        footer(model, theme, Line::at(buffer, last));
    }
}

fn first_of(mode: &Mode) -> usize {
    match mode {
        Mode::Inspect { first, .. } => *first,
        Mode::Help { back } | Mode::Confirm { back, .. } | Mode::Name { back, .. } => first_of(back),
        Mode::List | Mode::Filter { .. } => 0,
    }
}

/// The cursor's position: after the entered text.
pub fn cursor(model: &Model) -> Option<Position> {
    let typed = match &model.mode {
        Mode::Filter { .. } => filter_line(model),
        Mode::Name { text, .. } => name_line(model, text),
        Mode::List | Mode::Help { .. } | Mode::Inspect { .. } | Mode::Confirm { .. } => return None,
    };
    let width = u16::try_from(ratatui::text::Span::raw(typed).width()).unwrap_or(u16::MAX);
    let last = Position { x: model.size.columns.checked_sub(1)?, y: model.size.lines.checked_sub(1)? };
    Some(Position { x: width.min(last.x), ..last })
}

fn title(model: &Model, theme: Theme, mut line: Line<'_>) {
    line.put("ryokan top", theme.head());
    match &model.link {
        Link::Waiting { since_ms, why } => {
            let since = span(model.now_ms.saturating_sub(*since_ms));
            line.put(&format!("  no daemon for {since}, waiting for one: "), theme.bad())
                .put(&shown(why), Style::new());
        }
        Link::Up { host, answered_ms } => {
            line.put(
                &format!("  {} ({}, ryokan {})", shown(&host.name), shown(&host.arch), shown(&host.version)),
                Style::new(),
            );
            let silent_ms = model.now_ms.saturating_sub(*answered_ms);
            if silent_ms > SILENT_MS + model.list_interval_ms() {
                line.put(&format!("  no answer for {}", span(silent_ms)), theme.bad());
            }
            line.put(&format!("  {}", render::stamp(model.now_ms)), theme.dim());
        }
    }
}

fn summary(model: &Model, theme: Theme, mut line: Line<'_>) {
    if !model.is_listed() && model.kernels.is_empty() {
        line.put("asking for kernels …", theme.dim());
        return;
    }
    line.put(&counted(model.kernels.len() as u64, "kernel"), theme.head());
    let of = |state: &str| model.kernels.values().filter(|kernel| kernel.info.state == state).count();
    let counts = ["busy", "ready", "crashed"].map(|state| (state, of(state)));
    for (state, count) in counts.iter().filter(|(state, count)| *state != "crashed" || *count > 0) {
        line.put(&format!("  {count} {state}"), if *count > 0 { theme.state(state) } else { theme.dim() });
    }
    let memory: u64 = model.kernels.values().map(|kernel| kernel.info.memory_bytes).sum();
    line.put(&format!("  memory {}", format_size(memory)), Style::new());
    let rate = |meter: &Meter| meter.per_second().map_or_else(|| "-".into(), |rate| format!("{rate:.1}/s"));
    line.put(&format!("  executions {}", rate(&model.executions)), Style::new());
    line.put(&format!("  created {}", rate(&model.created)), Style::new());
    let is_bad = model.troubles.per_second().is_some_and(|rate| rate > 0.0);
    let style = if is_bad { theme.bad() } else { Style::new() };
    line.put(&format!("  errors {}", rate(&model.troubles)), style);
    if model.news.troubles > 0 {
        line.put(&format!(" ({} in all)", model.news.troubles), style);
    }
}

fn pool(pool: &PoolInfo, theme: Theme, mut line: Line<'_>) {
    let style = match (pool.idle >= pool.target, pool.trouble.is_empty()) {
        (true, true) => theme.good(),
        (_, false) => theme.bad(),
        (false, true) => theme.warn(),
    };
    line.put(&format!("pool {:<8}", shown(&pool.engine)), theme.head());
    line.put(&format!("{} ready", pool.idle), style);
    line.put(
        &format!(
            " of {} wanted, {} in creation, {} with kernels, {} taken, {} missed",
            pool.target, pool.creating, pool.active, pool.taken, pool.missed
        ),
        Style::new(),
    );
    if !pool.trouble.is_empty() {
        line.put(&format!("  {}", shown(&pool.trouble)), theme.bad());
    }
}

fn list(model: &Model, theme: Theme, buffer: &mut Buffer, headings: std::ops::Range<u16>, body: std::ops::Range<u16>) {
    let shown_ids = model.list.on_screen(body.len());
    let longest =
        model.kernels.values().map(|kernel| kernel.info.spec.name.as_str().chars().count()).max().unwrap_or(0);
    let columns = Columns::of(usize::from(buffer.area.width), longest);
    for y in headings {
        let mut line = Line::at(buffer, y);
        for (column, width) in &columns.columns {
            let mark = match (*column == model.list.column, model.list.reversed) {
                (true, false) => "▼",
                (true, true) => "▲",
                (false, _) => "",
            };
            let text = format!("{}{mark}", column.heading());
            line.put(&padded(&text, *width, is_number(*column)), theme.head()).put("  ", Style::new());
        }
        line.put(if columns.rest >= 10 { "WHY" } else { "" }, theme.head());
    }
    if shown_ids.is_empty() {
        let why = match (model.is_listed(), model.list.filter.is_empty()) {
            (false, _) => "",
            (true, true) => "no kernels; make one: ryokan new NAME",
            (true, false) => "no kernel matches; Esc shows all",
        };
        Line::at(buffer, body.start).put(why, theme.dim());
    }
    for (y, id) in body.zip(shown_ids) {
        let Some(kernel) = model.kernels.get(id) else { continue };
        let mut line = Line::at(buffer, y);
        for (column, width) in &columns.columns {
            let style = if *column == Column::State { theme.state(&kernel.info.state) } else { Style::new() };
            let text = cell(*column, kernel, model.now_ms);
            line.put(&padded(&text, *width, is_number(*column)), style).put("  ", Style::new());
        }
        if columns.rest >= 10 {
            line.put(&shown(&kernel.info.state_reason), theme.dim());
        }
        if model.list.selected() == Some(*id) {
            let area = ratatui::layout::Rect { y, height: 1, ..buffer.area };
            buffer.set_style(area.intersection(buffer.area), theme.selected());
        }
    }
}

/// Text in exactly `width` cells, cut or padded.
fn padded(text: &str, width: usize, right: bool) -> String {
    let count = text.chars().count();
    if count > width {
        return text.chars().take(width.saturating_sub(1)).chain((width > 0).then_some('…')).collect();
    }
    let gap = " ".repeat(width - count);
    if right { format!("{gap}{text}") } else { format!("{text}{gap}") }
}

fn filter_line(model: &Model) -> String {
    format!("filter: {}", shown(&model.list.filter))
}

fn name_line(model: &Model, text: &str) -> String {
    let name = model.mode_kernel().map(Kernel::name).unwrap_or_default();
    format!("name of the checkpoint of {} (Enter takes it, Esc does not): {}", shown(&name), shown(text))
}

fn footer(model: &Model, theme: Theme, mut line: Line<'_>) {
    let name = model.mode_kernel().map(Kernel::name).unwrap_or_default();
    let name = shown(&name);
    match &model.mode {
        Mode::Filter { .. } => {
            line.put(&filter_line(model), theme.note());
        }
        Mode::Name { text, .. } => {
            line.put(&name_line(model, text), theme.note());
        }
        Mode::Confirm { deed: Deed::Stop { .. }, .. } => {
            line.put(
                &format!("stop {name}? y: after what runs, f: interrupt what runs, any other key: no"),
                theme.warn(),
            );
        }
        Mode::Confirm { .. } => {
            line.put(&format!("interrupt what runs in {name}? y: yes, any other key: no"), theme.warn());
        }
        Mode::Help { .. } => {
            line.put("any key leads back", theme.dim());
        }
        Mode::List | Mode::Inspect { .. } => match model.note() {
            Some(note) => {
                line.put(&shown(&note.text), if note.bad { theme.bad() } else { theme.note() });
            }
            None if model.mode == Mode::List => {
                if !model.list.filter.is_empty() {
                    let count = model.list.shown().len();
                    line.put(&format!("{} with {}  ", count, shown(&model.list.filter)), theme.note());
                }
                line.put(
                    "? help  Enter inspect  s start  x stop  c checkpoint  i interrupt  / filter  ←→ sort  q quit",
                    theme.dim(),
                );
            }
            None => {
                line.put("Esc back  ↑↓ scroll  s start  x stop  c checkpoint  i interrupt  ? help", theme.dim());
            }
        },
    }
}
