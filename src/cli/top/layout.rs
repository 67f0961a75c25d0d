//! The number of lines of each part of the screen. Small screens omit the parts around the list.

/// A terminal's size in cells.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Cells in a line.
    pub columns: u16,
    /// Lines.
    pub lines: u16,
}

/// Maximum number of pools shown.
const POOLS: u16 = 6;

/// Lines of each part, from top to bottom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The daemon.
    pub title: u16,
    /// Counts and rates.
    pub summary: u16,
    /// One line per pool.
    pub pools: u16,
    /// The column headings of the list.
    pub headings: u16,
    /// The list, or the view that replaces it.
    pub body: u16,
    /// Keys, questions, notes.
    pub footer: u16,
}

impl Layout {
    /// The layout of a screen with `lines` lines and `pools` known pools.
    pub fn of(lines: u16, pools: usize) -> Layout {
        let from = |least: u16, wanted: u16| if lines >= least { wanted } else { 0 };
        let (title, summary, headings, footer) = (from(4, 1), from(6, 1), from(3, 1), from(2, 1));
        let pools = u16::try_from(pools).unwrap_or(POOLS).min(POOLS).min(lines.saturating_sub(8) / 2);
        let body = lines - title - summary - headings - footer - pools;
        Layout { title, summary, pools, headings, body, footer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_fills_every_screen() {
        for lines in 0..200 {
            for pools in [0, 1, 2, 5, 100_000] {
                let Layout { title, summary, pools, headings, body, footer } = Layout::of(lines, pools);
                assert_eq!(title + summary + pools + headings + body + footer, lines);
                assert!(body >= lines.min(1) && (lines < 12 || body >= lines / 2), "{lines}: {body}");
            }
        }
        let usual = Layout::of(24, 2);
        assert_eq!(usual, Layout { title: 1, summary: 1, pools: 2, headings: 1, body: 18, footer: 1 });
    }
}
