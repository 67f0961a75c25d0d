//! Suggestions for misspelt words.

/// The candidate most similar to `word`, if any is close.
pub fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let close = (word.chars().count() / 3).max(1);
    let distances = candidates.iter().map(|candidate| (distance(word, candidate), *candidate));
    distances.min().filter(|(far, _)| *far <= close).map(|(_, candidate)| candidate)
}

/// Number of letters to insert, remove, replace or swap with their neighbour between two words.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().take(64).collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replace = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replace.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_word_has_candidate() {
        let keys = ["memory", "cpus", "pids", "open_files", "idle_timeout", "output_kept"];
        for (word, want) in [
            ("memroy", Some("memory")),
            ("cpu", Some("cpus")),
            ("openfiles", Some("open_files")),
            ("idle-timeout", Some("idle_timeout")),
            ("pdis", Some("pids")),
            ("zzz", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, &keys), want, "{word}");
        }
    }
}
