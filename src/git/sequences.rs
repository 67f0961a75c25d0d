//! Operations of git that wait for their user: their progress is in files of the `.git` directory.

use super::Repository;

/// The files, and the command that goes on or ends.
const FILES: [(&str, &str); 8] = [
    ("rebase-merge", "rebase"),
    ("rebase-apply/applying", "am"),
    ("rebase-apply", "rebase"),
    ("MERGE_HEAD", "merge"),
    ("CHERRY_PICK_HEAD", "cherry-pick"),
    ("REVERT_HEAD", "revert"),
    // Between two picks.
    ("sequencer", "cherry-pick"),
    ("BISECT_LOG", "bisect"),
];

/// How an operation is ended, by the name of its command.
pub fn end_of(operation: &str) -> String {
    match operation {
        "bisect" => "`git bisect reset`".to_owned(),
        operation => format!("`git {operation} --continue`, or `git {operation} --abort`"),
    }
}

impl Repository {
    /// The operation that is under way, by the name of its command.
    pub fn under_way(&self) -> Option<&'static str> {
        let is_there = |name: &str| std::fs::symlink_metadata(self.git_dir().join(name)).is_ok();
        FILES.into_iter().find(|(file, _)| is_there(file)).map(|(_, command)| command)
    }
}
