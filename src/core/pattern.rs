//! Patterns with `*` and `?` for names of kernels and paths, without classes and escapes.

use std::fmt;

/// A pattern over one name: `*` matches any text, `?` any character, everything else itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pattern(String);

impl Pattern {
    /// Creates a pattern; every text is valid.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The pattern's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the whole of `name` matches.
    ///
    /// Takes time proportional to the product of both lengths at most.
    pub fn matches(&self, name: &str) -> bool {
        let pattern: Vec<char> = self.0.chars().collect();
        let name: Vec<char> = name.chars().collect();
        let (mut p, mut n) = (0, 0);
        let mut star: Option<(usize, usize)> = None;
        while n < name.len() {
            match pattern.get(p) {
                Some('*') => {
                    star = Some((p, n));
                    p += 1;
                }
                Some(c) if *c == '?' || *c == name[n] => (p, n) = (p + 1, n + 1),
                _ => match star {
                    // Let the last star match one more character.
                    Some((at, taken)) => {
                        star = Some((at, taken + 1));
                        (p, n) = (at + 1, taken + 1);
                    }
                    None => return false,
                },
            }
        }
        pattern[p..].iter().all(|c| *c == '*')
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(pattern: &[char], name: &[char]) -> bool {
        match (pattern.split_first(), name.split_first()) {
            (None, None) => true,
            (Some(('*', rest)), _) => model(rest, name) || (!name.is_empty() && model(pattern, &name[1..])),
            (Some((p, rest)), Some((n, name))) => (*p == '?' || p == n) && model(rest, name),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn pattern_matches_model(pattern in "[ab*?é]{0,8}", name in "[abé]{0,8}") {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            prop_assert_eq!(Pattern::new(&*pattern).matches(&name), model(&chars(&pattern), &chars(&name)));
        }
    }

    #[test]
    fn long_patterns_match_quickly() {
        assert!(!Pattern::new("*a".repeat(100)).matches(&"a".repeat(5000).replace('a', "b")));
    }
}
