//! File differences between two checkpoints of a kernel, as unified diffs.
//!
//! Contents are untrusted: their size, their lines and the time spent on them are bounded. All work runs on a blocking
//! thread, one file after the other, at the pace of the caller; it ends when the caller is gone.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use similar::{Algorithm, TextDiff};

use super::{compare, contents};
use crate::core::diff::{Deed, Patch};
use crate::core::error::Result;
use crate::core::limits;
use crate::store::Store;
use crate::supervisor::checkpoint::pruning::find_pinned;
use crate::supervisor::host::Host;
use crate::workspace::{self, Change, Text, TreeId, WorkspaceError};

/// Context lines around a difference.
const CONTEXT: usize = 3;
/// Leading bytes of a file that decide whether it is text.
const LOOKED_AT: usize = 8 << 10;

/// Reports to `take` the file differences from one state to another, perhaps of another kernel.
///
/// `paths` limits the comparison to these paths and their descendants; empty: all files.
///
/// # Errors
/// Comparison errors, and errors of `take`.
pub async fn diff_text(
    host: &Rc<Host>,
    (kernel, from): compare::State<'_>,
    (of, to): compare::State<'_>,
    paths: Vec<Vec<u8>>,
    mut take: impl AsyncFnMut(Patch) -> Result<()>,
) -> Result<()> {
    // Only this guard protects the tree of the present state from garbage collection.
    let _held = host.store.run(|store| Ok(store.guard())).await?;
    // The pins keep both checkpoints until the comparison ends.
    let (before, _from_held) = match from {
        "" if kernel.id != of.id => (compare::tree_now(host, kernel).await?, None),
        reference => {
            let (from, held) = find_pinned(kernel, reference).await?;
            (contents(host, &from).await?.0.workspace.tree, Some(held))
        }
    };
    let (after, _to_held) = match to {
        "" => (compare::tree_now(host, of).await?, None),
        reference => {
            let (to, held) = find_pinned(of, reference).await?;
            (contents(host, &to).await?.0.workspace.tree, Some(held))
        }
    };
    let walk = move |store: &Store, put: &mut dyn FnMut(Patch) -> bool| {
        walk(store, (TreeId(before), TreeId(after)), &paths, put)
    };
    compare::each_found(host, 1, walk, &mut take).await
}

/// Passes differences to `put` until `put` wants no more.
fn walk(
    store: &Store,
    (before, after): (TreeId, TreeId),
    paths: &[Vec<u8>],
    mut put: impl FnMut(Patch) -> bool,
) -> std::result::Result<(), WorkspaceError> {
    for change in workspace::diff(store, before, after)? {
        let change = change?;
        if !is_asked_for(change.path.as_os_str().as_bytes(), paths) {
            continue;
        }
        let Some((whole, text)) = of_change(store, (before, after), &change)? else { continue };
        for patch in pieces(whole, &text) {
            if !put(patch) {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Whether a path equals one of these or is beneath one of them.
fn is_asked_for(path: &[u8], paths: &[Vec<u8>]) -> bool {
    let beneath = |asked: &Vec<u8>| {
        let asked = asked.strip_prefix(b"/workspace/").unwrap_or(asked);
        let asked = asked.strip_prefix(b"./").unwrap_or(asked);
        let asked = asked.strip_suffix(b"/").unwrap_or(asked);
        match path.strip_prefix(asked) {
            Some(rest) => asked == b"." || asked.is_empty() || rest.is_empty() || rest[0] == b'/',
            None => asked == b".",
        }
    };
    paths.is_empty() || paths.iter().any(beneath)
}

/// The difference of one file; `None` if its content is equal.
fn of_change(
    store: &Store,
    (before, after): (TreeId, TreeId),
    change: &Change,
) -> std::result::Result<Option<(Patch, Vec<u8>)>, WorkspaceError> {
    use workspace::ChangeKind as Of;
    let (deed, from) = match &change.kind {
        Of::Added => (Deed::Added, None),
        Of::Removed => (Deed::Removed, None),
        Of::Renamed { from } => (Deed::Renamed, Some(from.as_os_str().as_bytes().to_vec())),
        Of::Kind => (Deed::Changed, None),
        Of::Changed(changed) if changed.content => (Deed::Changed, None),
        Of::Changed(_) => return Ok(None),
    };
    let read = |tree: TreeId, path: &Path| match workspace::find(store, tree, path)? {
        Some(entry) => workspace::text(store, &entry.node, limits::DIFF_TEXT_BYTES),
        None => Ok(Text::None),
    };
    let path = change.path.as_os_str().as_bytes().to_vec();
    let patch = |note: &str| Patch {
        path: path.clone(),
        deed,
        before: from.clone().unwrap_or_default(),
        note: note.into(),
        text: Vec::new(),
        more: false,
    };
    if deed == Deed::Renamed {
        return Ok(Some((patch(""), Vec::new())));
    }
    let (a, b) = (read(before, &change.path)?, read(after, &change.path)?);
    Ok(match (a, b) {
        (Text::None, Text::None) => None,
        (Text::Larger, _) | (_, Text::Larger) => Some((patch("too large"), Vec::new())),
        (a, b) => match unified(&bytes(a), &bytes(b)) {
            Ok(text) => Some((patch(""), text)),
            Err(note) => Some((patch(note), Vec::new())),
        },
    })
}

fn bytes(text: Text) -> Vec<u8> {
    match text {
        Text::Bytes(bytes) => bytes,
        Text::Larger | Text::None => Vec::new(),
    }
}

/// A unified diff without its two header lines, which name the files.
fn unified(a: &[u8], b: &[u8]) -> std::result::Result<Vec<u8>, &'static str> {
    let is_binary = |bytes: &[u8]| bytes[..bytes.len().min(LOOKED_AT)].contains(&0);
    if is_binary(a) || is_binary(b) {
        return Err("binary");
    }
    let lines = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count();
    if lines(a).max(lines(b)) > limits::DIFF_TEXT_LINES {
        return Err("too large");
    }
    let by = Instant::now() + limits::DIFF_TEXT_TIME;
    let diff = TextDiff::configure().algorithm(Algorithm::Myers).deadline(by).diff_lines(a, b);
    let mut text = Vec::new();
    // Hunk by hunk: the writer of whole diffs converts bytes that are no text. Writing to memory cannot fail.
    for hunk in diff.unified_diff().context_radius(CONTEXT).iter_hunks() {
        let _ = hunk.to_writer(&mut text);
    }
    Ok(text)
}

/// Splits a diff into parts that fit one message, at line ends where possible.
fn pieces(whole: Patch, text: &[u8]) -> Vec<Patch> {
    if text.is_empty() {
        return vec![whole];
    }
    let (mut pieces, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let end = match rest.len() <= limits::CHUNK_BYTES {
            true => rest.len(),
            false => {
                let room = &rest[..limits::CHUNK_BYTES];
                room.iter().rposition(|byte| *byte == b'\n').map_or(room.len(), |at| at + 1)
            }
        };
        let (piece, later) = rest.split_at(end);
        rest = later;
        pieces.push(Patch { text: piece.to_vec(), more: !rest.is_empty(), ..whole.clone() });
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_diff_or_named_reason() {
        let shown = |a: &[u8], b: &[u8]| unified(a, b).map(|text| String::from_utf8_lossy(&text).into_owned());
        assert_eq!(shown(b"a\nb\n", b"a\nc\n").expect("text"), "@@ -1,2 +1,2 @@\n a\n-b\n+c\n");
        assert_eq!(shown(b"", b"new\n").expect("text"), "@@ -0,0 +1 @@\n+new\n");
        assert!(shown(b"a\n", b"a").expect("text").contains("\\ No newline at end of file"));
        assert_eq!(shown(b"a\0b", b"a").expect_err("refused"), "binary");
        assert!(unified(b"\xff\xfe\n", b"\xff\xfd\n").expect("text").contains(&0xfd));
        let many = b"x\n".repeat(limits::DIFF_TEXT_LINES + 1);
        assert_eq!(unified(&many, b"").expect_err("refused"), "too large");
    }

    #[test]
    fn text_diff_time_is_bounded() {
        let lines = |seed: u64| {
            let mut state = seed;
            let mut line = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                format!("{}\n", state >> 40)
            };
            (0..50_000).map(|_| line()).collect::<String>().into_bytes()
        };
        let began = Instant::now();
        assert!(!unified(&lines(1), &lines(2)).expect("text").is_empty());
        assert!(began.elapsed() < limits::DIFF_TEXT_TIME * 20, "{:?}", began.elapsed());
    }

    #[test]
    fn long_diff_splits_at_lines() {
        let whole = Patch {
            path: b"f".to_vec(),
            deed: Deed::Changed,
            before: Vec::new(),
            note: String::new(),
            text: Vec::new(),
            more: false,
        };
        let text = b"+0123456789\n".repeat(limits::CHUNK_BYTES / 5);
        let parts = pieces(whole.clone(), &text);
        assert!(parts.len() > 2 && parts.iter().all(|part| part.text.ends_with(b"\n")));
        assert!(parts[..parts.len() - 1].iter().all(|part| part.more) && !parts[parts.len() - 1].more);
        assert_eq!(parts.iter().flat_map(|part| part.text.clone()).collect::<Vec<u8>>(), text);
        assert_eq!(pieces(whole, b"").len(), 1);
    }

    #[test]
    fn diff_paths_match_by_component() {
        let asked = |path: &str, by: &str| is_asked_for(path.as_bytes(), &[by.as_bytes().to_vec()]);
        assert!(asked("src/a", "src") && asked("src/a", "src/") && asked("src", "src") && asked("src/a", "./src/a"));
        assert!(asked("x", ".") && asked("x", "/workspace/x") && is_asked_for(b"any", &[]));
        assert!(!asked("srcs/a", "src") && !asked("a", "b") && !asked("sr", "src"));
    }
}
