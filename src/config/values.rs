//! Sizes, durations and processor counts in the configuration file's notation.
//!
//! Values are checked during deserialisation, so that an error knows its line, and serialise back
//! exactly. Fields have plain types and name their notation: `#[serde(with = "size")]`.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

use crate::core::quantity;

/// Bytes: `"512M"`, or a bare number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

/// A duration: `"5m"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

/// A duration or `"never"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait(pub Option<Duration>);

/// Thousandths of a processor: `1`, `0.5` or `"1.5"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpus(pub u32);

/// Bytes; 0 means unlimited.
struct Bound(Option<u64>);

/// A path; empty means none.
struct OptionalPath(Option<PathBuf>);

/// A loopback address; empty means none. Every local user who can connect can read the metrics.
struct Loopback(Option<SocketAddr>);

/// A module for `#[serde(with = …)]`: a field of a plain type in one of the notations above.
macro_rules! with {
    ($module:ident: $plain:ty as $form:ident) => {
        pub(super) mod $module {
            use super::*;

            pub(in crate::config) fn serialize<S: Serializer>(plain: &$plain, s: S) -> Result<S::Ok, S::Error> {
                $form(plain.to_owned()).serialize(s)
            }

            pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<$plain, D::Error> {
                $form::deserialize(d).map(|form| form.0)
            }
        }
    };
}

with!(size: u64 as Size);
with!(bound: Option<u64> as Bound);
with!(span: Duration as Span);
with!(wait: Option<Duration> as Wait);
with!(cpus: u32 as Cpus);
with!(optional_path: Option<PathBuf> as OptionalPath);
with!(loopback: Option<SocketAddr> as Loopback);

struct Text<T> {
    expected: &'static str,
    parse: fn(&str) -> Result<T, String>,
}

impl<T> Visitor<'_> for Text<T> {
    type Value = T;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.parse)(text).map_err(E::custom)
    }
}

/// The same for notations in which a bare number is valid too.
struct TextOrNumber<T>(Text<T>);

impl<T> Visitor<'_> for TextOrNumber<T> {
    type Value = T;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.expected)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        self.0.visit_str(text)
    }
    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        self.0.visit_str(&number.to_string())
    }
    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        self.0.visit_str(&number.to_string())
    }
    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        self.0.visit_str(&number.to_string())
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(TextOrNumber(Text {
            expected: "a size, for example \"512M\"",
            parse: |text| quantity::parse_size(text).map(Size).map_err(|e| e.to_string()),
        }))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(Text {
            expected: "a duration, for example \"5m\"",
            parse: |text| quantity::parse_duration(text).map(Span).map_err(|e| e.to_string()),
        })
    }
}

impl<'de> Deserialize<'de> for Wait {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(Text {
            expected: "a duration, for example \"5m\", or \"never\"",
            parse: |text| match text {
                "never" => Ok(Wait(None)),
                text => match quantity::parse_duration(text) {
                    Ok(Duration::ZERO) => Err("a duration above zero, or \"never\"".into()),
                    Ok(duration) => Ok(Wait(Some(duration))),
                    Err(e) => Err(format!("{e}, or \"never\"")),
                },
            },
        })
    }
}

impl<'de> Deserialize<'de> for Cpus {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(TextOrNumber(Text {
            expected: "a number of processors, for example 1 or 0.5",
            parse: |text| quantity::parse_cpu_milli(text).map(Cpus).map_err(|e| e.to_string()),
        }))
    }
}

impl<'de> Deserialize<'de> for Bound {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Size::deserialize(d).map(|Size(bytes)| Bound((bytes > 0).then_some(bytes)))
    }
}

impl<'de> Deserialize<'de> for OptionalPath {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        PathBuf::deserialize(d).map(|path| OptionalPath((!path.as_os_str().is_empty()).then_some(path)))
    }
}

impl<'de> Deserialize<'de> for Loopback {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let short: String = text.chars().take(80).collect();
        match text.parse::<SocketAddr>() {
            _ if text.is_empty() => Ok(Loopback(None)),
            Ok(address) if address.ip().is_loopback() => Ok(Loopback(Some(address))),
            Ok(_) => {
                Err(de::Error::custom(format_args!("{short:?} is no address of the loopback: take 127.0.0.1 or [::1]")))
            }
            Err(_) => {
                Err(de::Error::custom(format_args!("{short:?} is no address with a port, such as \"127.0.0.1:9464\"")))
            }
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
        match units.iter().find(|(shift, _)| self.0 > 0 && self.0.is_multiple_of(1 << shift)) {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s")];
        match units.iter().find(|(unit_ms, _)| ms > 0 && ms.is_multiple_of(*unit_ms)) {
            Some((unit_ms, unit)) => write!(f, "{}{unit}", ms / unit_ms),
            None => write!(f, "{ms}ms"),
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(duration) => Span(duration).fmt(f),
            None => f.write_str("never"),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl Serialize for Bound {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        Size(self.0.unwrap_or(0)).serialize(s)
    }
}

impl Serialize for OptionalPath {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        self.0.clone().unwrap_or_default().serialize(s)
    }
}

impl Serialize for Loopback {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        self.0.map(|address| address.to_string()).unwrap_or_default().serialize(s)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl Serialize for Wait {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl Serialize for Cpus {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.0 % 1000 {
            0 => s.serialize_u32(self.0 / 1000),
            _ => s.serialize_f64(f64::from(self.0) / 1000.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    fn back<T: Serialize + for<'de> Deserialize<'de>>(value: &T) -> Option<T> {
        serde_json::from_value(serde_json::to_value(value).ok()?).ok()
    }

    proptest! {
        #[test]
        fn config_values_round_trip(bytes in any::<u64>(), ms in 1..=1u64 << 50, milli in 1..=1_024_000u32) {
            prop_assert_eq!(back(&Size(bytes)), Some(Size(bytes)));
            prop_assert_eq!(back(&Span(Duration::from_millis(ms))), Some(Span(Duration::from_millis(ms))));
            prop_assert_eq!(back(&Wait(Some(Duration::from_millis(ms)))), Some(Wait(Some(Duration::from_millis(ms)))));
            prop_assert_eq!(back(&Cpus(milli)), Some(Cpus(milli)));
        }
    }

    #[test]
    fn config_values_use_short_form() {
        let size = |json: Json| serde_json::from_value::<Size>(json).ok().map(|size| size.to_string());
        assert_eq!(size(json!("512MiB")), Some("512M".into()));
        assert_eq!(size(json!(1025)), Some("1025".into()));
        assert_eq!((size(json!("5m5")), size(json!(-1)), size(json!(true))), (None, None, None));
        let wait = |text: &str| serde_json::from_value::<Wait>(json!(text)).ok().map(|wait| wait.to_string());
        assert_eq!(wait("90s"), Some("90s".into()));
        assert_eq!(wait("300s"), Some("5m".into()));
        assert_eq!(wait("never"), Some("never".into()));
        assert_eq!((wait("0"), wait("5"), wait("always")), (None, None, None));
        let cpus = |json: Json| serde_json::from_value::<Cpus>(json).ok();
        assert_eq!(cpus(json!(0.5)), Some(Cpus(500)));
        assert_eq!(cpus(json!("1.5")), Some(Cpus(1500)));
        assert_eq!((cpus(json!(0)), cpus(json!(-1)), cpus(json!(0.0001))), (None, None, None));
    }
}
