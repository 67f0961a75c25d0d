//! Encoding of tree objects, as in docs/tree-format.md. Each content has exactly one encoding; any other is refused, so
//! a foreign tree has a trusted shape: no name leads out of its folder.

use super::entry::{Attributes, Content, Entry, MODE_BITS, Meta, Moment, Name, Node, Reason};
use crate::core::ids::Digest;
use crate::core::limits;

const MAGIC: &[u8; 3] = b"ryt";
const VERSION: u8 = 1;

/// Type of an object: its fifth byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Root = b'R' as isize,
    Page = b'P' as isize,
    Pages = b'I' as isize,
    Map = b'M' as isize,
}

const HAS_OWNER: u8 = 1;
const HAS_ATTRIBUTES: u8 = 2;
const HAS_GROUP: u8 = 4;

/// Why bytes are no valid tree object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Wrong magic.
    #[error("not a tree object of the expected shape")]
    Shape,
    /// A later format.
    #[error("tree format {0} is newer than this ryokan knows")]
    Version(u8),
    /// Truncated, too long, or not in the canonical encoding.
    #[error("tree object is not well formed: {0}")]
    Malformed(&'static str),
}

type Result<T> = std::result::Result<T, FormatError>;

/// A folder's object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Folder {
    /// All entries.
    Page(Vec<Entry>),
    /// The pages of a large folder.
    Pages(Vec<PageRef>),
}

/// One page of a large folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRef {
    /// The name of its last entry.
    pub last: Name,
    /// Number of its entries.
    pub count: u64,
    /// Its object.
    pub digest: Digest,
}

/// A piece of a file; between pieces are holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its offset.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Its object.
    pub digest: Digest,
}

/// A map object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    /// The file's length.
    pub size: u64,
    /// In order, not overlapping, not empty.
    pub pieces: Vec<Piece>,
}

/// Whether a page ends after an entry of this name, as its `count`-th. The names decide, so that one new name moves at
/// most one border; the maximum is for names chosen to have no border.
pub fn page_ends(name: &[u8], count: usize) -> bool {
    let hash = name.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3));
    (hash ^ (hash >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56 == 0 || count >= limits::TREE_PAGE_ENTRIES
}

fn begin(shape: Shape) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(MAGIC);
    out.push(VERSION);
    out.push(shape as u8);
    out
}

/// Appends a number as LEB128.
pub fn number(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends bytes with their length.
pub fn text(out: &mut Vec<u8>, bytes: &[u8]) {
    number(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Zigzag encoding: small for numbers near zero.
pub fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)).cast_unsigned()
}

fn kind(node: &Node) -> u8 {
    match node {
        Node::File { content: Content::Inline(_), .. } => 0,
        Node::File { content: Content::Whole(_), .. } => 1,
        Node::File { content: Content::Map(_), .. } => 2,
        Node::Folder { .. } => 3,
        Node::Symlink { .. } => 4,
        Node::Fifo => 5,
        Node::Missing { .. } => 6,
    }
}

fn reason_code(reason: Reason) -> u8 {
    match reason {
        Reason::Socket => 0,
        Reason::Device => 1,
        Reason::Unreadable => 2,
        Reason::Mount => 3,
        Reason::SetId => 4,
    }
}

/// Appends an entry.
pub fn encode_entry(out: &mut Vec<u8>, entry: &Entry) {
    text(out, &entry.name);
    out.push(kind(&entry.node));
    if let Node::Missing { reason } = &entry.node {
        return out.push(reason_code(*reason));
    }
    encode_meta(out, &entry.meta, matches!(&entry.node, Node::File { group: Some(_), .. }));
    match &entry.node {
        Node::File { size, content, group } => {
            if let Some(group) = group {
                out.extend_from_slice(group);
            }
            number(out, *size);
            match content {
                Content::Inline(bytes) => out.extend_from_slice(bytes),
                Content::Whole(digest) | Content::Map(digest) => out.extend_from_slice(digest.as_bytes()),
            }
        }
        Node::Folder { digest } => out.extend_from_slice(digest.as_bytes()),
        Node::Symlink { target } => text(out, target),
        Node::Fifo | Node::Missing { .. } => {}
    }
}

fn encode_meta(out: &mut Vec<u8>, meta: &Meta, group: bool) {
    let flag = |set: bool, bit: u8| if set { bit } else { 0 };
    out.push(
        flag(meta.owner.is_some(), HAS_OWNER)
            | flag(meta.attributes.is_some(), HAS_ATTRIBUTES)
            | flag(group, HAS_GROUP),
    );
    number(out, u64::from(meta.mode));
    number(out, zigzag(meta.modified.secs));
    number(out, u64::from(meta.modified.nanos));
    if let Some((user, group)) = meta.owner {
        number(out, u64::from(user));
        number(out, u64::from(group));
    }
    if let Some(attributes) = &meta.attributes {
        number(out, attributes.len() as u64);
        for (name, value) in attributes.iter() {
            text(out, name);
            text(out, value);
        }
    }
}

/// The object of a page with encoded entries.
pub fn encode_page(count: usize, entries: &[u8]) -> Vec<u8> {
    let mut out = begin(Shape::Page);
    number(&mut out, count as u64);
    out.extend_from_slice(entries);
    out
}

/// The object of a folder with several pages.
pub fn encode_pages(pages: &[PageRef]) -> Vec<u8> {
    let mut out = begin(Shape::Pages);
    number(&mut out, pages.len() as u64);
    for page in pages {
        text(&mut out, &page.last);
        number(&mut out, page.count);
        out.extend_from_slice(page.digest.as_bytes());
    }
    out
}

/// The root object of a tree.
pub fn encode_root(entry: &Entry) -> Vec<u8> {
    let mut out = begin(Shape::Root);
    encode_entry(&mut out, entry);
    out
}

/// The object of a file with holes or several pieces.
pub fn encode_map(map: &Map) -> Vec<u8> {
    let mut out = begin(Shape::Map);
    number(&mut out, map.size);
    number(&mut out, map.pieces.len() as u64);
    let mut end = 0;
    for piece in &map.pieces {
        number(&mut out, piece.offset - end);
        number(&mut out, piece.length);
        out.extend_from_slice(piece.digest.as_bytes());
        end = piece.offset + piece.length;
    }
    out
}

/// Decodes bytes from start to end.
pub struct Decoder<'a> {
    rest: &'a [u8],
}

impl<'a> Decoder<'a> {
    /// Decodes bytes without a header.
    pub fn bare(rest: &'a [u8]) -> Decoder<'a> {
        Decoder { rest }
    }

    fn open(bytes: &'a [u8], shapes: &[Shape]) -> Result<(Decoder<'a>, Shape)> {
        let mut decoder = Decoder { rest: bytes };
        if decoder.take(3).ok() != Some(MAGIC.as_slice()) {
            return Err(FormatError::Shape);
        }
        match decoder.byte()? {
            VERSION => {}
            newer => return Err(FormatError::Version(newer)),
        }
        let found = decoder.byte()?;
        let shape = shapes.iter().find(|shape| **shape as u8 == found).ok_or(FormatError::Shape)?;
        Ok((decoder, *shape))
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or(FormatError::Malformed("it ends too soon"))?;
        self.rest = rest;
        Ok(head)
    }

    /// One byte.
    pub fn byte(&mut self) -> Result<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    /// A number, in its shortest form only.
    pub fn number(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(FormatError::Malformed("a number is too large"));
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                let shortest = byte != 0 || shift == 0;
                return if shortest { Ok(value) } else { Err(FormatError::Malformed("a number is too long")) };
            }
        }
        Err(FormatError::Malformed("a number is too long"))
    }

    /// A 32-bit number.
    pub fn small(&mut self) -> Result<u32> {
        u32::try_from(self.number()?).map_err(|_| FormatError::Malformed("a number is too large"))
    }

    /// A signed number.
    pub fn signed(&mut self) -> Result<i64> {
        let raw = self.number()?;
        Ok((raw >> 1).cast_signed() ^ -(raw & 1).cast_signed())
    }

    /// Bytes with their length.
    pub fn text(&mut self) -> Result<Box<[u8]>> {
        let length = usize::try_from(self.number()?).map_err(|_| FormatError::Malformed("a text is too long"))?;
        self.take(length).map(Into::into)
    }

    /// A content address.
    pub fn digest(&mut self) -> Result<Digest> {
        self.fixed().map(Digest::from_bytes)
    }

    /// Whether all is decoded.
    pub fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| FormatError::Malformed("it ends too soon"))
    }

    fn end(&self) -> Result<()> {
        if self.is_at_end() { Ok(()) } else { Err(FormatError::Malformed("it goes on after its end")) }
    }

    /// An entry; the caller checks its name, which may be empty for the root only.
    pub fn entry(&mut self) -> Result<Entry> {
        let name = self.text()?;
        let kind = self.byte()?;
        if kind == 6 {
            let reason = match self.byte()? {
                0 => Reason::Socket,
                1 => Reason::Device,
                2 => Reason::Unreadable,
                3 => Reason::Mount,
                _ => return Err(FormatError::Malformed("an unknown reason")),
            };
            return Ok(Entry { name, meta: Meta::default(), node: Node::Missing { reason } });
        }
        let (meta, grouped) = self.meta()?;
        if grouped && kind > 2 {
            return Err(FormatError::Malformed("only files have several names"));
        }
        let node = match kind {
            0..=2 => {
                let group = if grouped { Some(self.fixed()?) } else { None };
                let size = self.number()?;
                let content = match kind {
                    0 if size > limits::TREE_INLINE_BYTES as u64 => {
                        return Err(FormatError::Malformed("an inline file is too large"));
                    }
                    0 => Content::Inline(self.take(usize::try_from(size).unwrap_or(usize::MAX))?.into()),
                    1 => Content::Whole(self.digest()?),
                    _ => Content::Map(self.digest()?),
                };
                Node::File { size, content, group }
            }
            3 => Node::Folder { digest: self.digest()? },
            4 => Node::Symlink { target: checked_target(self.text()?)? },
            5 => Node::Fifo,
            _ => return Err(FormatError::Malformed("an unknown kind")),
        };
        Ok(Entry { name, meta, node })
    }

    fn meta(&mut self) -> Result<(Meta, bool)> {
        let flags = self.byte()?;
        if flags & !(HAS_OWNER | HAS_ATTRIBUTES | HAS_GROUP) != 0 {
            return Err(FormatError::Malformed("an unknown flag"));
        }
        let mode = self.small()?;
        let modified = Moment { secs: self.signed()?, nanos: self.small()? };
        if mode & !MODE_BITS != 0 || modified.nanos >= 1_000_000_000 {
            return Err(FormatError::Malformed("a mode or a time is out of range"));
        }
        let owner = if flags & HAS_OWNER != 0 { Some((self.small()?, self.small()?)) } else { None };
        let attributes = if flags & HAS_ATTRIBUTES != 0 { self.attributes()? } else { None };
        Ok((Meta { mode, modified, owner, attributes }, flags & HAS_GROUP != 0))
    }

    fn attributes(&mut self) -> Result<Attributes> {
        let count = self.number()?;
        let mut list: Vec<(Name, Box<[u8]>)> = Vec::new();
        for _ in 0..count {
            let (name, value) = (self.text()?, self.text()?);
            let sorted = list.last().is_none_or(|(before, _)| *before < name);
            if !sorted || !is_kept_attribute(&name) {
                return Err(FormatError::Malformed("attributes are not sorted or not allowed"));
            }
            list.push((name, value));
        }
        if list.is_empty() { Err(FormatError::Malformed("attributes without any")) } else { Ok(Some(Box::new(list))) }
    }
}

fn checked_target(target: Box<[u8]>) -> Result<Box<[u8]>> {
    let fine = !target.is_empty() && target.len() < limits::PATH_BYTES && !target.contains(&0);
    if fine { Ok(target) } else { Err(FormatError::Malformed("a link's target is not one")) }
}

/// Whether trees keep an extended attribute: those that owners may set. Never capabilities, never labels of the host.
pub fn is_kept_attribute(name: &[u8]) -> bool {
    let list = [b"system.posix_acl_access".as_slice(), b"system.posix_acl_default"];
    !name.contains(&0) && ((name.starts_with(b"user.") && name.len() > 5) || list.contains(&name))
}

/// Whether bytes are a valid entry name, which leads nowhere else.
fn is_name(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && name.len() <= 255 && !name.contains(&b'/') && !name.contains(&0)
}

/// Decodes a folder's object.
///
/// # Errors
/// See [`FormatError`].
pub fn decode_folder(bytes: &[u8]) -> Result<Folder> {
    let (mut decoder, shape) = Decoder::open(bytes, &[Shape::Page, Shape::Pages])?;
    let count = decoder.number()?;
    if shape == Shape::Page {
        return page_entries(decoder, count).map(Folder::Page);
    }
    let mut pages: Vec<PageRef> = Vec::new();
    for _ in 0..count {
        let page = PageRef { last: decoder.text()?, count: decoder.number()?, digest: decoder.digest()? };
        if !is_name(&page.last) || pages.last().is_some_and(|before| before.last >= page.last) {
            return Err(FormatError::Malformed("pages are not sorted"));
        }
        pages.push(page);
    }
    decoder.end()?;
    if pages.len() < 2 { Err(FormatError::Malformed("pages that one page could be")) } else { Ok(Folder::Pages(pages)) }
}

fn page_entries(mut decoder: Decoder<'_>, count: u64) -> Result<Vec<Entry>> {
    if count > limits::TREE_PAGE_ENTRIES as u64 {
        return Err(FormatError::Malformed("a page has too many entries"));
    }
    let mut entries: Vec<Entry> = Vec::new();
    for _ in 0..count {
        let entry = decoder.entry()?;
        if !is_name(&entry.name) {
            return Err(FormatError::Malformed("a name that no entry can have"));
        }
        if entries.last().is_some_and(|before| before.name >= entry.name) {
            return Err(FormatError::Malformed("entries are not sorted"));
        }
        entries.push(entry);
    }
    decoder.end()?;
    Ok(entries)
}

/// Decodes a root object.
///
/// # Errors
/// See [`FormatError`].
pub fn decode_root(bytes: &[u8]) -> Result<Entry> {
    let (mut decoder, _) = Decoder::open(bytes, &[Shape::Root])?;
    let entry = decoder.entry()?;
    decoder.end()?;
    let is_root = entry.name.is_empty() && matches!(entry.node, Node::Folder { .. }) && entry.meta.owner.is_none();
    if is_root { Ok(entry) } else { Err(FormatError::Malformed("its root is no folder")) }
}

/// Decodes a map object.
///
/// # Errors
/// See [`FormatError`].
pub fn decode_map(bytes: &[u8]) -> Result<Map> {
    let (mut decoder, _) = Decoder::open(bytes, &[Shape::Map])?;
    let (size, count) = (decoder.number()?, decoder.number()?);
    let mut pieces = Vec::new();
    let mut end = 0u64;
    for _ in 0..count {
        let (gap, length, digest) = (decoder.number()?, decoder.number()?, decoder.digest()?);
        let offset = end.checked_add(gap).ok_or(FormatError::Malformed("a piece is out of range"))?;
        end = offset.checked_add(length).ok_or(FormatError::Malformed("a piece is out of range"))?;
        if length == 0 || length > limits::TREE_PIECE_BYTES as u64 || end > size {
            return Err(FormatError::Malformed("a piece is out of range"));
        }
        pieces.push(Piece { offset, length, digest });
    }
    decoder.end()?;
    Ok(Map { size, pieces })
}

#[cfg(test)]
#[path = "format_tests.rs"]
mod format_tests;
