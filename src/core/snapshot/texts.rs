//! Texts that name an image or a machine, with their bounds: they may come from any host, or from a file.

use serde::{Deserialize as _, Deserializer, de};

use super::KindError;
use crate::core::limits;

fn bounded<'de, D: Deserializer<'de>>(from: D, most: usize, rule: KindError) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    match text.chars().nth(most) {
        None => Ok(text),
        Some(_) => Err(de::Error::custom(rule)),
    }
}

/// Reads the version of an image.
///
/// # Errors
/// [`KindError::LongImageVersion`].
pub fn image_version<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    bounded(from, limits::IMAGE_VERSION_CHARS, KindError::LongImageVersion)
}

/// Reads a text of a machine.
///
/// # Errors
/// [`KindError::LongMachineText`].
pub(super) fn machine<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    bounded(from, limits::MACHINE_TEXT_CHARS, KindError::LongMachineText)
}
