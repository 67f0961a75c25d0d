//! Decides when a template, from which warm workers start, is rebuilt beside its use.
//!
//! ```text
//!  made ── a worker starts from it ─▶ in use ── max_age ─▶ due ─▶ rebuilding ─┬ done ───▶ made
//!                                                ▲                            └ failed ─▶ the old one stays in use,
//!                                                └──────── interval ────────────────────   and as old as it is
//! ```
//!
//! A template that nothing starts from is not rebuilt. Two attempts at one template, failed or not, begin at least an
//! interval apart, and one template is rebuilt at a time.

/// When templates are rebuilt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefreshRules {
    /// Age in milliseconds from which a template in use is rebuilt; `None`: never.
    pub max_age_ms: Option<u64>,
    /// Least time between two attempts at one template, milliseconds.
    pub interval_ms: u64,
}

/// The last attempt to rebuild a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attempt {
    /// It was not rebuilt since the daemon began.
    Never,
    /// It is being rebuilt.
    Running,
    /// The attempt has ended, well or not.
    Ended {
        /// When it began, milliseconds.
        began_ms: u64,
    },
}

/// A template as the decision sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TemplateAge {
    /// When it was made, milliseconds of the wall clock; `None` if its description does not say: it counts as old.
    pub created_at_ms: Option<i64>,
    /// Whether a worker started from it since the daemon knows it.
    pub is_used: bool,
    /// The last attempt to rebuild it.
    pub attempt: Attempt,
}

/// The time of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefreshTime {
    /// Milliseconds of the wall clock, to which ages refer: they last longer than a daemon.
    pub wall_ms: i64,
    /// Milliseconds of a monotonic clock.
    pub now_ms: u64,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// Rebuild the template at this index.
    Rebuild(usize),
    /// Decide again after a change, or after that many milliseconds; `None`: after a change only.
    Wait(Option<u64>),
}

/// Decides which template is rebuilt now: the oldest of those that are due.
pub fn refresh(rules: &RefreshRules, templates: &[TemplateAge], time: RefreshTime) -> Refresh {
    if templates.iter().any(|template| template.attempt == Attempt::Running) {
        return Refresh::Wait(None);
    }
    let due = templates.iter().enumerate().filter_map(|(at, template)| {
        let (wait_ms, age_ms) = due_in_ms(rules, template, time)?;
        Some((wait_ms, std::cmp::Reverse(age_ms), at))
    });
    match due.min() {
        Some((0, _, at)) => Refresh::Rebuild(at),
        Some((wait_ms, _, _)) => Refresh::Wait(Some(wait_ms)),
        None => Refresh::Wait(None),
    }
}

/// Time until a template is due, and its age; `None`: a change must precede.
fn due_in_ms(rules: &RefreshRules, template: &TemplateAge, time: RefreshTime) -> Option<(u64, u64)> {
    let max_age_ms = rules.max_age_ms.filter(|_| template.is_used)?;
    // One from the future was made while the clock was wrong: its age is unknown.
    let age_ms = template.created_at_ms.filter(|created| *created <= time.wall_ms);
    let age_ms = age_ms.map_or(u64::MAX, |created| time.wall_ms.abs_diff(created));
    let pause_ms = match template.attempt {
        Attempt::Never => 0,
        Attempt::Running => return None,
        Attempt::Ended { began_ms } => began_ms.saturating_add(rules.interval_ms).saturating_sub(time.now_ms),
    };
    Some((max_age_ms.saturating_sub(age_ms).max(pause_ms), age_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: RefreshRules = RefreshRules { max_age_ms: Some(6_000), interval_ms: 1_000 };
    const WALL_MS: i64 = 1_700_000_000_000;
    const USED: TemplateAge = TemplateAge { created_at_ms: Some(WALL_MS), is_used: true, attempt: Attempt::Never };

    fn at(after_ms: u64) -> RefreshTime {
        RefreshTime { wall_ms: WALL_MS.saturating_add_unsigned(after_ms), now_ms: 50_000 + after_ms }
    }

    fn aged(age_ms: i64) -> TemplateAge {
        TemplateAge { created_at_ms: Some(WALL_MS - age_ms), ..USED }
    }

    #[test]
    fn used_template_is_rebuilt() {
        assert_eq!(refresh(&RULES, &[USED], at(0)), Refresh::Wait(Some(6_000)));
        assert_eq!(refresh(&RULES, &[USED], at(5_999)), Refresh::Wait(Some(1)));
        assert_eq!(refresh(&RULES, &[USED], at(6_000)), Refresh::Rebuild(0));
        let unused = TemplateAge { is_used: false, ..USED };
        assert_eq!(refresh(&RULES, &[unused], at(60_000)), Refresh::Wait(None));
        let never = RefreshRules { max_age_ms: None, ..RULES };
        assert_eq!(refresh(&never, &[aged(i64::MAX / 2)], at(0)), Refresh::Wait(None));
        assert_eq!(refresh(&RULES, &[], at(0)), Refresh::Wait(None));
    }

    /// Another pool stamped the time of a failed refresh, so that the old snapshot counted as new.
    #[test]
    fn failed_refresh_keeps_age() {
        let mut template = aged(6_000);
        assert_eq!(refresh(&RULES, &[template], at(0)), Refresh::Rebuild(0));
        template.attempt = Attempt::Ended { began_ms: at(0).now_ms };
        assert_eq!(refresh(&RULES, &[template], at(100)), Refresh::Wait(Some(900)));
        assert_eq!(refresh(&RULES, &[template], at(1_000)), Refresh::Rebuild(0), "it is as old as before");
    }

    #[test]
    fn unknown_age_counts_as_old() {
        let undated = TemplateAge { created_at_ms: None, ..USED };
        assert_eq!(refresh(&RULES, &[aged(9_000), undated], at(0)), Refresh::Rebuild(1));
        assert_eq!(refresh(&RULES, &[aged(-1)], at(0)), Refresh::Rebuild(0), "it is from the future");
    }

    #[test]
    fn templates_are_rebuilt_one_by_one() {
        let running = TemplateAge { attempt: Attempt::Running, ..aged(7_000) };
        assert_eq!(refresh(&RULES, &[running, aged(9_000)], at(0)), Refresh::Wait(None));
        assert_eq!(refresh(&RULES, &[aged(7_000), aged(9_000), aged(8_000)], at(0)), Refresh::Rebuild(1));
        let tried = TemplateAge { attempt: Attempt::Ended { began_ms: at(0).now_ms }, ..aged(9_000) };
        assert_eq!(refresh(&RULES, &[tried, aged(7_000)], at(0)), Refresh::Rebuild(1), "the other one is delayed");
    }

    /// Rebuilds take time and fail at random; the bounds hold all the same.
    #[test]
    fn attempts_keep_interval() {
        let mut seed = 7_u64;
        let mut random = |most: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % most
        };
        let (mut templates, mut now_ms) = ([aged(3_000), aged(0), TemplateAge { created_at_ms: None, ..USED }], 0);
        let mut began: [Vec<u64>; 3] = Default::default();
        let mut failures = [0; 3];
        while now_ms < 5_000_000 {
            match refresh(&RULES, &templates, at(now_ms)) {
                Refresh::Rebuild(which) => {
                    let created = templates[which].created_at_ms;
                    assert!(created.is_none_or(|created| at(now_ms).wall_ms - created >= 6_000), "it was not old");
                    began[which].push(now_ms);
                    templates[which].attempt = Attempt::Running;
                    assert_eq!(refresh(&RULES, &templates, at(now_ms)), Refresh::Wait(None));
                    let start_ms = at(now_ms).now_ms;
                    now_ms += random(300);
                    templates[which].attempt = Attempt::Ended { began_ms: start_ms };
                    match random(3) {
                        0 => failures[which] += 1,
                        _ => templates[which].created_at_ms = Some(at(now_ms).wall_ms),
                    }
                }
                Refresh::Wait(wait_ms) => {
                    let wait_ms = wait_ms.expect("all are used");
                    assert!(wait_ms > 0 && wait_ms <= 6_000);
                    // Something else may have changed meanwhile.
                    now_ms += if random(2) == 0 { wait_ms } else { random(wait_ms) + 1 };
                }
            }
        }
        for (began, failures) in began.iter().zip(failures) {
            assert!(began.windows(2).all(|two| two[1] - two[0] >= RULES.interval_ms), "{began:?}");
            assert!(failures > 50 && began.len() > 600, "{failures} failures of {}", began.len());
        }
    }
}
