//! Unified diffs of files. Paths and contents are arbitrary bytes: unprintable ones are escaped.

use super::plain;
use crate::cli::paint::Paint;
use crate::core::diff::{Deed, Patch};

/// Bytes as one line of text: invalid UTF-8 as `\xNN`, control characters as escapes.
pub fn shown(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(&plain(chunk.valid()).replace('\n', "\\n"));
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

/// The differences of one file.
pub fn patch(patch: &Patch, paint: Paint) -> String {
    let path = shown(&patch.path);
    let before = if patch.before.is_empty() { path.clone() } else { shown(&patch.before) };
    if patch.deed == Deed::Renamed {
        return format!("{}\n", paint.note(&format!("renamed {before} → {path}")));
    }
    if !patch.note.is_empty() {
        return format!(
            "{} {}\n",
            paint.head(&format!("{} {path}", patch.deed.name())),
            paint.dim(&format!("({})", patch.note))
        );
    }
    let from = if patch.deed == Deed::Added { "/dev/null".into() } else { format!("a/{before}") };
    let to = if patch.deed == Deed::Removed { "/dev/null".into() } else { format!("b/{path}") };
    let mut text = format!("{}\n{}\n", paint.head(&format!("--- {from}")), paint.head(&format!("+++ {to}")));
    for line in patch.text.split_inclusive(|byte| *byte == b'\n') {
        let line = shown(line.strip_suffix(b"\n").unwrap_or(line));
        text.push_str(&match line.as_bytes().first() {
            Some(b'+') => paint.good(&line),
            Some(b'-') => paint.bad(&line),
            Some(b'@') => paint.note(&line),
            Some(_) | None => line,
        });
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patch_escapes_control_bytes() {
        let of = |path: &[u8], text: &[u8]| {
            let (path, text, before, note) = (path.to_vec(), text.to_vec(), Vec::new(), String::new());
            patch(&Patch { path, deed: Deed::Changed, before, note, text, more: false }, Paint::OFF)
        };
        let shown = of(b"a\x1b[31m\xff\n", b"@@ -1 +1 @@\n-\x1b]0;title\x07\n+\xff\xc2\x9b31m\ttab\r\n");
        assert!(shown.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'), "{shown:?}");
        assert!(shown.contains("\\xff") && shown.contains("\\u{1b}") && shown.contains("\ttab\\r"), "{shown}");
        assert_eq!(shown.lines().count(), 5);
    }
}
