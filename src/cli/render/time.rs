//! Times and durations.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The current time, milliseconds since 1970.
pub fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// A time in UTC, to the second; empty for 0 and for times beyond the calendar.
pub fn stamp(at_ms: i64) -> String {
    /// 9999-12-31, the last representable day.
    const LAST_MS: i64 = 253_402_300_799_000;
    match u64::try_from(at_ms) {
        Ok(ms) if ms > 0 && at_ms <= LAST_MS => {
            humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(ms)).to_string()
        }
        Ok(_) | Err(_) => String::new(),
    }
}

/// The age in the largest unit that fits.
pub fn ago(at_ms: i64, now_ms: i64) -> String {
    if at_ms <= 0 {
        return "never".into();
    }
    let seconds = now_ms.saturating_sub(at_ms).max(0) / 1000;
    match seconds {
        0..5 => "now".into(),
        5..60 => format!("{seconds} s ago"),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

/// A duration given in microseconds.
pub fn span_us(us: u64) -> String {
    match us {
        0..1000 => format!("{us} µs"),
        1000..1_000_000 => format!("{} ms", us / 1000),
        1_000_000..60_000_000 => format!("{:.1} s", us as f64 / 1e6),
        _ => format!("{} min {} s", us / 60_000_000, us / 1_000_000 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn human_readable_times() {
        assert_eq!(stamp(0), "");
        assert_eq!(stamp(-1), "");
        assert_eq!(stamp(i64::MAX), "");
        assert_eq!(stamp(1_763_762_400_999), "2025-11-21T22:00:00Z");
        for (seconds, text) in [
            (0, "now"),
            (59, "59 s ago"),
            (60, "1 min ago"),
            (7200, "2 h ago"),
            (86_400 * 400, "400 d ago"),
            (-9, "now"),
        ] {
            assert_eq!(ago(1_000_000_000, 1_000_000_000 + seconds * 1000), text);
        }
        assert_eq!(ago(0, 5), "never");
        for (us, text) in [(0, "0 µs"), (73_000, "73 ms"), (1_500_000, "1.5 s"), (90_000_000, "1 min 30 s")] {
            assert_eq!(span_us(us), text);
        }
    }
}
