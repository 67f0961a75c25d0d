//! Rules for the order of steps and hand-overs.

use super::Step;
use crate::core::error::{Error, Result};
use crate::core::limits;

/// Returns the step that follows `newest`.
///
/// # Errors
/// `conflict` with reason `step_open` while `newest` is not completed; `refused` when there are too
/// many steps.
pub fn begin(newest: Option<&Step>, name: &str, agent: &str, at_ms: i64) -> Result<Step> {
    match newest {
        Some(step) if step.completed_at_ms.is_none() => {
            Err(Error::conflict(format!("step {} ({}) is not completed", step.index, step.name))
                .reason("step_open")
                .hint("complete it first with `ryokan work step complete`"))
        }
        Some(step) if step.index >= limits::STEPS => {
            Err(Error::refused(format!("a kernel has at most {} steps", limits::STEPS)).reason("steps"))
        }
        Some(_) | None => Ok(Step {
            index: newest.map_or(0, |step| step.index) + 1,
            name: name.to_owned(),
            agent: agent.to_owned(),
            begun_at_ms: at_ms,
            completed_at_ms: None,
        }),
    }
}

/// Returns the current step, completed.
///
/// # Errors
/// `conflict` with reason `no_step` if there is no current step.
pub fn complete(newest: Option<&Step>, at_ms: i64) -> Result<Step> {
    match newest {
        Some(step) if step.completed_at_ms.is_none() => Ok(Step { completed_at_ms: Some(at_ms), ..step.clone() }),
        Some(_) | None => Err(Error::conflict("no step is under way")
            .reason("no_step")
            .hint("begin one with `ryokan work step begin`")),
    }
}

/// Checks that `to` can take over from `from`.
///
/// # Errors
/// `conflict` with reason `same_agent`.
pub fn hand_over(from: &str, to: &str) -> Result<()> {
    match from == to {
        true => Err(Error::conflict(format!("{to} is the one who works already")).reason("same_agent")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_never_overlap() {
        let first = begin(None, "one", "a", 1).expect("first step");
        assert_eq!((first.index, first.agent.as_str()), (1, "a"));
        assert_eq!(begin(Some(&first), "two", "a", 2).expect_err("step is open").reason, "step_open");
        let first = complete(Some(&first), 3).expect("step is open");
        assert_eq!(complete(Some(&first), 4).expect_err("step is completed").reason, "no_step");
        assert_eq!(complete(None, 4).expect_err("no step").reason, "no_step");
        assert_eq!(begin(Some(&first), "two", "b", 5).expect("second step").index, 2);
        let last = Step { index: limits::STEPS, ..first };
        assert_eq!(begin(Some(&last), "more", "b", 5).expect_err("too many steps").reason, "steps");
        assert!(hand_over("a", "a").is_err() && hand_over("", "a").is_ok());
    }
}
