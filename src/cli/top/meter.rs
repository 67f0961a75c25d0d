//! Rates of counters that are sampled irregularly.

use std::collections::VecDeque;

/// Window of a rate, if there are samples that old.
const WINDOW_MS: i64 = 10_000;

/// Samples of a counter. The first and last sample in the window determine the rate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meter {
    samples: VecDeque<(i64, u64)>,
}

impl Meter {
    /// Adds a sample. A decrease of the counter or of the clock resets the meter.
    pub fn add(&mut self, at_ms: i64, total: u64) {
        if self.samples.back().is_some_and(|(last_ms, last)| at_ms < *last_ms || total < *last) {
            self.samples.clear();
        }
        self.samples.push_back((at_ms, total));
        // The newest two samples stay, however far apart: a rate over a longer time is better than
        // none.
        while self.samples.len() > 2 && self.samples.front().is_some_and(|(first_ms, _)| at_ms - first_ms > WINDOW_MS) {
            self.samples.pop_front();
        }
    }

    /// The rate per second; `None` with fewer than two samples.
    pub fn per_second(&self) -> Option<f64> {
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        between(*first, *last)
    }
}

/// The rate between two samples, `(milliseconds, total)`.
fn between(first: (i64, u64), last: (i64, u64)) -> Option<f64> {
    let ms = last.0.checked_sub(first.0).filter(|ms| *ms > 0)?;
    let more = last.1.checked_sub(first.1)?;
    Some(more as f64 * 1000.0 / ms as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_from_two_samples() {
        for (first, last, rate) in [
            ((0, 0), (1000, 5), Some(5.0)),
            ((0, 10), (2000, 11), Some(0.5)),
            ((0, 3), (1000, 3), Some(0.0)),
            ((5, 3), (5, 4), None),
            ((9, 3), (5, 4), None),
            ((0, 4), (5, 3), None),
            ((i64::MIN, 0), (i64::MAX, 1), None),
        ] {
            assert_eq!(between(first, last), rate, "{first:?} {last:?}");
        }
    }

    #[test]
    fn old_samples_are_dropped() {
        let mut meter = Meter::default();
        assert_eq!(meter.per_second(), None);
        for second in 0..100 {
            // Ten a second, and a hundred a second in the last ten seconds.
            let total = if second < 89 { second * 10 } else { 890 + (second - 89) * 100 };
            meter.add(second as i64 * 1000, total);
        }
        assert_eq!(meter.per_second(), Some(100.0));
        assert!(meter.samples.len() <= 12);
        meter.add(1_099_000, 2890);
        assert_eq!(meter.per_second(), Some(1.0), "from the last sample before a long pause");
        meter.add(1_100_000, 3);
        assert_eq!(meter.per_second(), None, "the counter began anew");
    }
}
