//! Sizes, processors and durations as people write them: `512M`, `1.5`, `5m`.

use std::time::Duration;

/// Why a text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not a size.
    #[error("{0:?} is not a size: a number and one of B, K, M, G, T, for example 512M")]
    Size(String),
    /// Not a number of processors.
    #[error("{0:?} is not a number of processors, for example 1 or 0.5")]
    Cpus(String),
    /// Not a duration.
    #[error("{0:?} is not a duration: a number and one of ms, s, m, h, d, for example 90s")]
    Duration(String),
}

/// Reads a size in bytes; units are powers of 1024 (`K`, `KiB` and `KB` mean the same).
///
/// # Errors
/// [`QuantityError::Size`] for anything else, fractions of a byte and overflow included.
pub fn parse_size(text: &str) -> Result<u64, QuantityError> {
    let wrong = || QuantityError::Size(text.chars().take(40).collect());
    let (number, unit) = split(text).ok_or_else(wrong)?;
    let shift = match unit.to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err(wrong()),
    };
    let scaled = scale(number, 1u64 << shift).ok_or_else(wrong)?;
    Ok(scaled)
}

/// Reads processors as thousandths.
///
/// # Errors
/// [`QuantityError::Cpus`] for anything else, zero included.
pub fn parse_cpu_milli(text: &str) -> Result<u32, QuantityError> {
    let wrong = || QuantityError::Cpus(text.chars().take(40).collect());
    match split(text) {
        Some((number, "")) => {
            scale(number, 1000).and_then(|milli| u32::try_from(milli).ok()).filter(|milli| *milli > 0).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

/// Reads a duration of whole milliseconds.
///
/// # Errors
/// [`QuantityError::Duration`] for anything else. A number without a unit is refused, except 0.
pub fn parse_duration(text: &str) -> Result<Duration, QuantityError> {
    let wrong = || QuantityError::Duration(text.chars().take(40).collect());
    let (number, unit) = split(text).ok_or_else(wrong)?;
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "" if number == "0" => 1,
        _ => return Err(wrong()),
    };
    scale(number, unit_ms).map(Duration::from_millis).ok_or_else(wrong)
}

/// Formats a size in the largest unit with at most one decimal.
pub fn format_size(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].into_iter().peekable();
    while let Some(unit) = units.next() {
        if value < 1024.0 || units.peek().is_none() {
            return if value.fract() == 0.0 || unit == "B" {
                format!("{value:.0} {unit}")
            } else {
                format!("{value:.1} {unit}")
            };
        }
        value /= 1024.0;
    }
    format!("{bytes} B")
}

/// Formats processors as [`parse_cpu_milli`] reads them.
pub fn format_cpus(milli: u32) -> String {
    (f64::from(milli) / 1000.0).to_string()
}

/// Formats a duration exactly, in the largest unit that divides it.
pub fn format_duration(ms: u64) -> String {
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s")];
    match units.iter().find(|(unit_ms, _)| ms > 0 && ms.is_multiple_of(*unit_ms)) {
        Some((unit_ms, unit)) => format!("{}{unit}", ms / unit_ms),
        None => format!("{ms}ms"),
    }
}

fn split(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let digits = number.bytes().any(|b| b.is_ascii_digit());
    (digits && number.matches('.').count() <= 1).then_some((number, unit.trim_start()))
}

/// Returns `number × factor` if it is a whole number that fits.
fn scale(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.len() > 9 {
        return None;
    }
    let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let power = 10u128.pow(fraction.len() as u32);
    let digits: u128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let total = whole.checked_mul(power)?.checked_add(digits)?.checked_mul(u128::from(factor))?;
    if total % power != 0 {
        return None;
    }
    u64::try_from(total / power).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
        for (text, bytes) in
            [("0", 0), ("512M", 512 << 20), ("1.5K", 1536), ("1GiB", 1 << 30), ("7 KB", 7168), ("3b", 3)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1", "1.2.3", "1X", "0.3B", "99999999999T", "1e9", "٣"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cpu_counts_are_parsed() {
        assert_eq!(parse_cpu_milli("1"), Ok(1000));
        assert_eq!(parse_cpu_milli("0.25"), Ok(250));
        for text in ["0", "", "1s", "0.0001", "9999999999"] {
            assert!(parse_cpu_milli(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_are_parsed() {
        for (text, ms) in
            [("0", 0), ("250ms", 250), ("1.5s", 1500), ("5m", 300_000), ("2h", 7_200_000), ("1d", 86_400_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "5", "s", "1.0001ms", "-1s", "5 weeks"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_formatted() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (512 << 20, "512 MiB")]
        {
            assert_eq!(format_size(bytes), text);
        }
    }
}
