//! Images of virtual machines.

use super::{Table, ago, now_ms, plain};
use crate::cli::paint::Paint;
use crate::core::info::ImageInfo;
use crate::core::quantity::format_size;

/// The names of an image's engines, with their versions.
fn engines(image: &ImageInfo) -> String {
    let versions = image.engine_versions.iter().map(String::as_str).chain(std::iter::repeat(""));
    let engines = image.engines.iter().zip(versions);
    engines.map(|(name, version)| format!("{name} {version}").trim_end().to_owned()).collect::<Vec<_>>().join(", ")
}

/// A table of images.
pub fn images(images: &[ImageInfo], paint: Paint) -> String {
    let mut table = Table::new(&["VERSION", "BUILT", "SIZE", "ENGINES", "STATE", "KERNELS"]);
    for image in images {
        let flags =
            [(image.is_current, "current"), (image.is_pinned, "pinned"), (!image.trouble.is_empty(), "unusable")];
        let state: Vec<&str> = flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect();
        table.row(&[
            plain(&image.version.chars().take(12).collect::<String>()),
            ago(image.built_at_ms, now_ms()),
            format_size(image.bytes),
            plain(&engines(image)),
            state.join(", "),
            plain(&image.kernels.join(", ")),
        ]);
    }
    let mut text = table.text("no image; ryokan images build makes one", paint);
    for image in images.iter().filter(|image| !image.trouble.is_empty()) {
        let version: String = image.version.chars().take(12).collect();
        text.push_str(&format!("{}: {}\n", plain(&version), plain(&image.trouble)));
    }
    text
}
