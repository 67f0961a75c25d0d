//! Images of virtual machines.

use super::text::{bounded, malformed};
use super::{read_name, read_text, read_text_list, write_text_list};
use crate::core::error::Result;
use crate::core::info::ImageInfo;
use crate::core::limits;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads the images of a host.
///
/// # Errors
/// `invalidArgument` for malformed data and for more than [`limits::VM_IMAGES`].
pub fn read_images(
    reader: capnp::Result<capnp::struct_list::Reader<'_, wire::image_info::Owned>>,
) -> Result<Vec<ImageInfo>> {
    let list = reader.map_err(|e| malformed("images", e))?;
    bounded(list.len(), "images", limits::VM_IMAGES)?;
    list.iter().map(read_image).collect()
}

fn read_image(reader: wire::image_info::Reader<'_>) -> Result<ImageInfo> {
    Ok(ImageInfo {
        version: read_name(reader.get_version(), "version of an image")?,
        engines: read_text_list(reader.get_engines(), "engines", limits::VALUE_ITEMS)?,
        engine_versions: read_text_list(reader.get_engine_versions(), "versions of engines", limits::VALUE_ITEMS)?,
        summary: read_text(reader.get_summary(), "summary")?,
        bytes: reader.get_bytes(),
        built_at_ms: reader.get_built_at_ms(),
        is_current: reader.get_current(),
        is_pinned: reader.get_pinned(),
        kernels: read_text_list(reader.get_kernels(), "kernels", limits::VALUE_ITEMS)?,
        trouble: read_text(reader.get_trouble(), "trouble")?,
    })
}

/// Writes an image.
pub fn write_image(mut builder: wire::image_info::Builder<'_>, image: &ImageInfo) {
    builder.set_version(image.version.as_str());
    write_text_list(builder.reborrow().init_engines(image.engines.len() as u32), &image.engines);
    let versions = builder.reborrow().init_engine_versions(image.engine_versions.len() as u32);
    write_text_list(versions, &image.engine_versions);
    builder.set_summary(image.summary.as_str());
    builder.set_bytes(image.bytes);
    builder.set_built_at_ms(image.built_at_ms);
    builder.set_current(image.is_current);
    builder.set_pinned(image.is_pinned);
    write_text_list(builder.reborrow().init_kernels(image.kernels.len() as u32), &image.kernels);
    builder.set_trouble(image.trouble.as_str());
}
