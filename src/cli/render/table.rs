//! Aligned columns.

use super::plain;
use crate::cli::paint::Paint;

/// How a cell is painted.
type Painter = fn(Paint, &str) -> String;

/// Rows under a heading. The last column is not padded.
pub struct Table {
    headings: Vec<&'static str>,
    rows: Vec<Vec<(String, Option<Painter>)>>,
}

impl Table {
    /// A table of these columns.
    pub fn new(headings: &[&'static str]) -> Table {
        Table { headings: headings.to_vec(), rows: Vec::new() }
    }

    /// Adds a row of plain cells.
    pub fn row<S: AsRef<str>>(&mut self, cells: &[S]) {
        self.rows.push(cells.iter().map(|cell| (one_line(cell.as_ref()), None)).collect());
    }

    /// Paints the cell of the last row in that column.
    pub fn paint(&mut self, column: usize, painter: Painter) {
        if let Some(cell) = self.rows.last_mut().and_then(|row| row.get_mut(column)) {
            cell.1 = Some(painter);
        }
    }

    /// The table's text; `empty` if it has no rows.
    pub fn text(&self, empty: &str, paint: Paint) -> String {
        if self.rows.is_empty() {
            return format!("{}\n", paint.dim(empty));
        }
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(|(cell, _)| cell.chars().count());
            cells.chain([self.headings.get(column).map_or(0, |heading| heading.len())]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.headings.len()).map(width).collect();
        let heading: Vec<_> =
            self.headings.iter().map(|text| ((*text).to_owned(), Some(Paint::head as Painter))).collect();
        let mut text = line(&heading, &widths, paint);
        for row in &self.rows {
            text.push_str(&line(row, &widths, paint));
        }
        text
    }
}

fn one_line(text: &str) -> String {
    plain(text).replace(['\n', '\t'], " ")
}

fn line(cells: &[(String, Option<Painter>)], widths: &[usize], paint: Paint) -> String {
    let last = cells.iter().rposition(|(cell, _)| !cell.is_empty()).unwrap_or(0);
    let mut text = String::new();
    for (i, (cell, painter)) in cells.iter().enumerate().take(last + 1) {
        text.push_str(&painter.map_or_else(|| cell.clone(), |painter| painter(paint, cell)));
        if i < last {
            let width = widths.get(i).copied().unwrap_or(0);
            text.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.chars().count()) + 2));
        }
    }
    text.push('\n');
    text
}
