//! Differences between two states of a group.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::core::diff::Deed;
use crate::core::limits;

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupDifference {
    /// The member's name.
    pub member: String,
    /// The member's kind.
    pub kind: String,
    /// What differs: an area of a kernel, or `member`, `head`, `branch`, `commit`, `dependencies`, `file`, `index`,
    /// `schema`, `table`, `rows` and so on.
    pub what: String,
    /// The kind of the difference.
    pub deed: Deed,
    /// Name of the item: a path, a table, a commit.
    pub name: String,
    /// The former value, bounded.
    pub before: String,
    /// The present value, bounded.
    pub after: String,
    /// The changed properties, if known; `uncommitted` for a file of a repository; why it was not compared.
    pub details: Vec<String>,
}

/// The differences between two states, member by member.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupDiff {
    /// The differences, at most [`limits::GROUP_DIFFERENCES`].
    pub differences: Vec<GroupDifference>,
    /// Number of further ones.
    pub omitted: u64,
}

/// Adds the differences of one member.
#[derive(Debug)]
pub struct Subject<'a> {
    diff: &'a mut GroupDiff,
    member: String,
    kind: String,
    count: u64,
}

impl<'a> Subject<'a> {
    /// A member without differences.
    pub fn new(diff: &'a mut GroupDiff, member: &str, kind: &str) -> Subject<'a> {
        Subject { diff, member: member.to_owned(), kind: kind.to_owned(), count: 0 }
    }

    /// Number of its differences.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Counts differences that are not listed.
    pub fn omit(&mut self, count: u64) {
        self.count += count;
        self.diff.omitted += count;
    }

    /// Adds a difference.
    pub fn push(&mut self, what: &str, deed: Deed, name: &str, (before, after): (&str, &str), details: Vec<String>) {
        self.count += 1;
        if self.diff.differences.len() >= limits::GROUP_DIFFERENCES {
            self.diff.omitted += 1;
            return;
        }
        let bounded = |text: &str, most: usize| text.chars().take(most).collect::<String>();
        self.diff.differences.push(GroupDifference {
            member: self.member.clone(),
            kind: self.kind.clone(),
            what: what.to_owned(),
            deed,
            name: bounded(name, limits::GROUP_DIFFERENCE_NAME),
            before: bounded(before, limits::DIFF_SHOWN_CHARS),
            after: bounded(after, limits::DIFF_SHOWN_CHARS),
            details,
        });
    }

    /// Adds a difference without details.
    pub fn add(&mut self, what: &str, deed: Deed, name: &str, before: &str, after: &str) {
        self.push(what, deed, name, (before, after), Vec::new());
    }

    /// Says that something may differ, and why it was not compared.
    pub fn unknown(&mut self, what: &str, name: &str, why: &str) {
        self.push(what, Deed::Unknown, name, ("", ""), vec![format!("not compared: {why}")]);
    }

    /// Adds a difference if two values differ; an empty one is absent.
    pub fn change(&mut self, what: &str, name: &str, before: &str, after: &str) {
        match (before, after) {
            (before, after) if before == after => {}
            ("", after) => self.add(what, Deed::Added, name, "", after),
            (before, "") => self.add(what, Deed::Removed, name, before, ""),
            (before, after) => self.add(what, Deed::Changed, name, before, after),
        }
    }

    /// Adds the differences between two sets of values by name.
    pub fn change_each(&mut self, what: &str, before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) {
        let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        let of = |all: &'_ BTreeMap<String, String>, name: &String| all.get(name).cloned().unwrap_or_default();
        for name in names {
            self.change(what, name, &of(before, name), &of(after, name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_bounded_and_counted() {
        let mut diff = GroupDiff::default();
        let mut subject = Subject::new(&mut diff, "code", "repository");
        subject.change("head", "HEAD", "a", "a");
        assert_eq!(subject.count(), 0);
        for n in 0..limits::GROUP_DIFFERENCES + 2 {
            subject.change("file", &n.to_string(), "", &"x".repeat(5000));
        }
        subject.omit(3);
        assert_eq!(subject.count(), limits::GROUP_DIFFERENCES as u64 + 5);
        assert_eq!((diff.differences.len(), diff.omitted), (limits::GROUP_DIFFERENCES, 5));
        assert_eq!(diff.differences[0].deed, Deed::Added);
        assert_eq!(diff.differences[0].after.len(), limits::DIFF_SHOWN_CHARS);
    }

    #[test]
    fn sets_are_compared_by_name() {
        let set = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let mut diff = GroupDiff::default();
        let before = set(&[("a", "1"), ("b", "1"), ("c", "1")]);
        Subject::new(&mut diff, "data", "database").change_each(
            "table",
            &before,
            &set(&[("a", "1"), ("b", "2"), ("d", "1")]),
        );
        let found: Vec<(&str, Deed)> = diff.differences.iter().map(|one| (one.name.as_str(), one.deed)).collect();
        assert_eq!(found, [("b", Deed::Changed), ("c", Deed::Removed), ("d", Deed::Added)]);
    }
}
