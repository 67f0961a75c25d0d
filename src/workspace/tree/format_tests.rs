//! Every entry has one encoding; what is none is refused.

use proptest::prelude::*;

use super::*;
use crate::workspace::tree::entry::Reason;

fn name() -> impl Strategy<Value = Name> {
    prop::collection::vec(1u8..=255, 1..20)
        .prop_map(|mut bytes| {
            bytes.iter_mut().filter(|b| **b == b'/').for_each(|b| *b = b'x');
            bytes.into_boxed_slice()
        })
        .prop_filter("a name", |bytes| is_name(bytes))
}

fn digest() -> impl Strategy<Value = Digest> {
    any::<[u8; 32]>().prop_map(Digest::from_bytes)
}

fn meta() -> impl Strategy<Value = Meta> {
    let attributes = prop::collection::btree_map(name(), prop::collection::vec(any::<u8>(), 0..9), 0..3);
    let parts = (0..=MODE_BITS, any::<i64>(), 0u32..1_000_000_000, any::<Option<(u32, u32)>>(), attributes);
    parts.prop_map(|(mode, secs, nanos, owner, attributes)| {
        let list: Vec<(Name, Box<[u8]>)> = attributes
            .into_iter()
            .map(|(name, value)| ([b"user.", &*name].concat().into_boxed_slice(), value.into_boxed_slice()))
            .collect();
        let attributes = (!list.is_empty()).then(|| Box::new(list));
        Meta { mode, modified: Moment { secs, nanos }, owner, attributes }
    })
}

fn node() -> impl Strategy<Value = Node> {
    let inline = prop::collection::vec(any::<u8>(), 0..limits::TREE_INLINE_BYTES);
    prop_oneof![
        (inline, any::<Option<[u8; 16]>>()).prop_map(|(bytes, group)| {
            Node::File { size: bytes.len() as u64, content: Content::Inline(bytes.into()), group }
        }),
        (any::<u64>(), digest(), any::<Option<[u8; 16]>>()).prop_map(|(size, d, group)| Node::File {
            size,
            content: Content::Whole(d),
            group
        }),
        (any::<u64>(), digest()).prop_map(|(size, d)| Node::File { size, content: Content::Map(d), group: None }),
        digest().prop_map(|digest| Node::Folder { digest }),
        name().prop_map(|target| Node::Symlink { target }),
        Just(Node::Fifo),
        Just(Node::Missing { reason: Reason::Socket }),
    ]
}

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    prop::collection::btree_map(name(), (meta(), node()), 0..8).prop_map(|map| {
        let entry = |(name, (meta, node))| match node {
            Node::Missing { .. } => Entry { name, meta: Meta::default(), node },
            node => Entry { name, meta, node },
        };
        map.into_iter().map(entry).collect()
    })
}

fn page(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    entries.iter().for_each(|entry| encode_entry(&mut bytes, entry));
    encode_page(entries.len(), &bytes)
}

proptest! {
    #[test]
    fn entries_round_trip(entries in entries()) {
        let bytes = page(&entries);
        prop_assert_eq!(decode_folder(&bytes), Ok(Folder::Page(entries)));
        for cut in 0..bytes.len() {
            prop_assert!(decode_folder(&bytes[..cut]).is_err());
        }
        let longer = [bytes.as_slice(), b"x"].concat();
        prop_assert!(decode_folder(&longer).is_err());
    }

    /// Whatever is understood is written in exactly the same way.
    #[test]
    fn tree_encoding_is_canonical(entries in entries(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = page(&entries);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(Folder::Page(entries)) = decode_folder(&bytes) {
            prop_assert_eq!(page(&entries), bytes);
        }
    }

    #[test]
    fn tree_garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for shape in [b'R', b'P', b'I', b'M'] {
            let bytes = [b"ryt\x01", [shape].as_slice(), &bytes].concat();
            let _ = (decode_folder(&bytes), decode_root(&bytes), decode_map(&bytes));
        }
    }
}

#[test]
fn unsafe_entry_names_are_refused() {
    for name in [b"".as_slice(), b".", b"..", b"a/b", b"/", b"a\0b", &[b'x'; 256]] {
        let entry = Entry { name: name.into(), meta: Meta::default(), node: Node::Fifo };
        assert!(decode_folder(&page(&[entry])).is_err(), "{name:?}");
    }
    let set_id = Meta { mode: 0o4755, ..Meta::default() };
    let entry = Entry { name: b"x".as_slice().into(), meta: set_id, node: Node::Fifo };
    assert!(decode_folder(&page(&[entry])).is_err());
}

#[test]
fn file_maps_round_trip() {
    let piece = |offset, length| Piece { offset, length, digest: Digest::from_bytes([7; 32]) };
    let map = Map { size: 10_000, pieces: vec![piece(0, 10), piece(10, 90), piece(5000, 5000)] };
    assert_eq!(decode_map(&encode_map(&map)), Ok(map));
    let beyond = Map { size: 10, pieces: vec![piece(5, 6)] };
    assert!(decode_map(&encode_map(&beyond)).is_err());
}

#[test]
fn newer_tree_format_is_reported() {
    let mut bytes = page(&[]);
    bytes[3] = 2;
    assert_eq!(decode_folder(&bytes), Err(FormatError::Version(2)));
    assert_eq!(decode_map(&page(&[])), Err(FormatError::Version(1)).or(Err(FormatError::Shape)));
}
