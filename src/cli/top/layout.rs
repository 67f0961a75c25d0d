//! How many lines each part of the screen has. The list comes first: what is above and below it is left out where there is
//! little room.

/// A terminal's size in cells.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Cells in a line.
    pub columns: u16,
    /// Lines.
    pub lines: u16,
}

/// Pools that are shown at most.
const POOLS: u16 = 6;

/// Lines of each part, from the top to the bottom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Which daemon.
    pub title: u16,
    /// Counts and rates.
    pub summary: u16,
    /// One for each pool.
    pub pools: u16,
    /// The headings of the list.
    pub headings: u16,
    /// The list, or what stands in its place.
    pub body: u16,
    /// Keys, questions, what was done.
    pub footer: u16,
}

impl Layout {
    /// The parts of a screen with so many lines, where so many pools are known.
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
