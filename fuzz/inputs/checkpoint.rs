//! The parts of a checkpoint from an untrusted store. The first byte selects the part.

use ryokan::core::checkpoint::{Manifest, StateParts};
use ryokan::workspace::tree::format::{
    Folder, decode_folder, decode_map, decode_root, encode_entry, encode_map, encode_page, encode_pages, encode_root,
};

pub fn run(data: &[u8]) {
    let Some((choice, bytes)) = data.split_first() else { return };
    match choice % 5 {
        0 => {
            let Ok(manifest) = Manifest::decode(bytes) else { return };
            let Ok(again) = manifest.encode() else { return };
            assert_eq!(Manifest::decode(&again).ok(), Some(manifest));
        }
        1 => {
            let Ok(parts) = StateParts::decode(bytes) else { return };
            let Ok(again) = parts.encode() else { return };
            assert_eq!(StateParts::decode(&again).ok(), Some(parts));
        }
        2 => {
            let Ok(folder) = decode_folder(bytes) else { return };
            let again = match &folder {
                Folder::Page(entries) => {
                    let mut lines = Vec::new();
                    entries.iter().for_each(|entry| encode_entry(&mut lines, entry));
                    encode_page(entries.len(), &lines)
                }
                Folder::Pages(pages) => encode_pages(pages),
            };
            assert_eq!(decode_folder(&again).ok(), Some(folder));
        }
        3 => {
            let Ok(root) = decode_root(bytes) else { return };
            assert_eq!(decode_root(&encode_root(&root)).ok(), Some(root));
        }
        _ => {
            let Ok(map) = decode_map(bytes) else { return };
            assert_eq!(decode_map(&encode_map(&map)).ok(), Some(map));
        }
    }
}
