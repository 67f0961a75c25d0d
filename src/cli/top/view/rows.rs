//! The list's columns: their content, and which of them a narrow screen omits.

use super::{shown, span};
use crate::cli::render;
use crate::cli::top::list::Column;
use crate::cli::top::model::Kernel;
use crate::core::quantity::format_size;

/// Maximum width of a name.
const NAME: usize = 32;
/// Minimum width of a name.
const LEAST_NAME: usize = 8;
/// The columns that a narrow screen omits, first to last.
const LEFT_OUT: [Column; 8] = [
    Column::Jobs,
    Column::Since,
    Column::Engine,
    Column::Idle,
    Column::Executions,
    Column::Disk,
    Column::Memory,
    Column::State,
];

/// The shown columns with their widths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// From left to right.
    pub columns: Vec<(Column, usize)>,
    /// Remaining cells, for the reason of a kernel's state.
    pub rest: usize,
}

/// The text of a kernel in a column.
pub fn cell(column: Column, kernel: &Kernel, now_ms: i64) -> String {
    let info = &kernel.info;
    let age = |at_ms: i64| if at_ms <= 0 { "-".into() } else { span(now_ms.saturating_sub(at_ms)) };
    match column {
        Column::Name => shown(info.spec.name.as_str()),
        Column::Engine => info.spec.engine.name().to_owned(),
        Column::State => shown(&info.state),
        Column::Since => kernel.since_ms.map_or_else(|| "-".into(), age),
        Column::Executions => info.executions.to_string(),
        Column::Memory if info.memory_bytes == 0 => "-".into(),
        Column::Memory => format_size(info.memory_bytes),
        Column::Disk => render::disk_total(info),
        // A busy kernel is not idle; a kernel without a worker shows the time since its last use.
        Column::Idle if info.state == "busy" => "-".into(),
        Column::Idle => age(info.last_used_at_ms),
        Column::Jobs => kernel.jobs.filter(|jobs| *jobs > 0).map_or_else(|| "-".into(), |jobs| jobs.to_string()),
    }
}

/// Whether the column is right-aligned.
pub fn is_number(column: Column) -> bool {
    match column {
        Column::Name | Column::Engine | Column::State => false,
        Column::Since | Column::Executions | Column::Memory | Column::Disk | Column::Idle | Column::Jobs => true,
    }
}

impl Columns {
    /// The columns for a screen of this width and the longest name's length.
    pub fn of(width: usize, longest_name: usize) -> Columns {
        let wanted = longest_name.clamp(LEAST_NAME, NAME);
        let mut shown: Vec<Column> = Column::ALL.to_vec();
        let others = |shown: &[Column]| shown.iter().skip(1).map(|column| fixed(*column) + 2).sum::<usize>();
        for column in LEFT_OUT {
            if wanted + others(&shown) <= width {
                break;
            }
            shown.retain(|kept| *kept != column);
        }
        let name = wanted.min(width);
        let rest = width.saturating_sub(name + others(&shown));
        let width_of = |column: &Column| if *column == Column::Name { name } else { fixed(*column) };
        Columns {
            columns: shown.iter().map(|column| (*column, width_of(column))).collect(),
            rest: rest.saturating_sub(2),
        }
    }
}

/// The width of a column other than the name: one more than its heading, for the sort mark.
fn fixed(column: Column) -> usize {
    match column {
        Column::Name => 0,
        Column::Engine => 7,
        Column::State => 8,
        Column::Since => 6,
        Column::Executions => 11,
        Column::Memory => 10,
        Column::Disk => 10,
        Column::Idle => 5,
        Column::Jobs => 5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_any_width() {
        for width in 0..300 {
            for longest in [0, 5, 20, 64, 1000] {
                let Columns { columns, rest } = Columns::of(width, longest);
                let used: usize = columns.iter().map(|(_, cells)| cells + 2).sum::<usize>() - 2;
                assert!(used <= width && used + rest <= width, "{width} {longest}: {columns:?}");
                assert_eq!(columns[0].0, Column::Name);
            }
        }
        let kept = |width| Columns::of(width, 8).columns.iter().map(|(column, _)| column.heading()).collect::<Vec<_>>();
        assert_eq!((kept(92).len(), kept(80).len()), (9, 8));
        assert_eq!(kept(32), ["NAME", "STATE", "MEMORY"]);
        assert_eq!(kept(10), ["NAME"]);
    }
}
