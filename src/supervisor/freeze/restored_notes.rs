//! What a user must know of a restored group.

use crate::core::checkpoint::Restoration;

/// Ended programs, and unrestored parts, that a note names of one member.
const NOTED: usize = 8;
/// Characters of each, at most.
const NOTED_CHARS: usize = 100;

/// What the restore of a member kernel has ended, and what it could not bring back.
pub(super) fn of_restored(member: &str, restored: &Restoration) -> Vec<String> {
    let excerpt = |text: &str| text.lines().next().unwrap_or_default().chars().take(NOTED_CHARS).collect::<String>();
    let listed = |what: &str, entries: Vec<String>| {
        let (all, named) = (entries.len(), entries.iter().take(NOTED).cloned().collect::<Vec<_>>().join("; "));
        let more = if all > NOTED { format!("; and {} more", all - NOTED) } else { String::new() };
        (all > 0).then(|| format!("member {member}: {what}: {named}{more}"))
    };
    let ended = restored.ended.iter().map(|job| format!("{} ({})", job.id, excerpt(&job.command)));
    let missed = restored.missed.iter().map(|missed| format!("{} ({})", missed.key, excerpt(&missed.reason)));
    [listed("ended", ended.collect()), listed("not restored", missed.collect())].into_iter().flatten().collect()
}
