//! The view: `draw(model, theme, buffer)`. Pure: equal models give equal cells.
//!
//! All text from kernels passes through [`shown`]: no control character reaches a cell.

mod details;
mod frame;
mod rows;
#[cfg(test)]
mod tests;
mod theme;

pub use details::details_of;
pub use frame::{cursor, draw};
pub use theme::Theme;

use crate::cli::render;

/// One line of safe text: control characters and bidirectional controls are escaped.
pub fn shown(text: &str) -> String {
    let text = render::plain(text);
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c {
            '\n' | '\t' => out.push(' '),
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                out.extend(c.escape_default())
            }
            c => out.push(c),
        }
        out
    })
}

/// A duration in at most four characters: `12s`, `5m`, `3h`, `400d`.
pub fn span(ms: i64) -> String {
    let seconds = ms.max(0) / 1000;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}
