//! Output of an execution: the two streams and their order.
//!
//! [`Runs`] encodes the order: run lengths as LEB128 numbers, of stdout and stderr in turn, stdout first (perhaps 0).
//! Output of one stream only, the usual case, is one number.

use crate::core::exec::{Display, Stream};
use crate::core::ids::Digest;

/// The order in which bytes of two streams were written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runs {
    done: Vec<u8>,
    /// The current run, and its stream.
    open: Option<(Stream, u64)>,
}

impl Runs {
    /// Appends `bytes` of `stream`.
    pub fn push(&mut self, stream: Stream, bytes: u64) {
        if bytes == 0 {
            return;
        }
        match &mut self.open {
            Some((open, length)) if *open == stream => *length += bytes,
            Some((_, length)) => {
                write_number(&mut self.done, *length);
                self.open = Some((stream, bytes));
            }
            None => {
                if stream == Stream::Stderr {
                    self.done.push(0);
                }
                self.open = Some((stream, bytes));
            }
        }
    }

    /// The compact form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.done.clone();
        if let Some((_, length)) = self.open {
            write_number(&mut bytes, length);
        }
        bytes
    }

    /// Parses the compact form; `None` if it is malformed.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Runs> {
        let mut runs = Runs::default();
        let mut stream = Stream::Stdout;
        while !bytes.is_empty() {
            let length = read_number(&mut bytes)?;
            let first = runs.open.is_none() && runs.done.is_empty();
            if length == 0 && !(first && stream == Stream::Stdout && !bytes.is_empty()) {
                return None;
            }
            runs.push(stream, length);
            stream = other(stream);
        }
        Some(runs)
    }

    /// The runs in order.
    pub fn iter(&self) -> impl Iterator<Item = (Stream, u64)> + '_ {
        let mut rest = self.done.as_slice();
        let mut stream = Stream::Stdout;
        let done = std::iter::from_fn(move || {
            let length = read_number(&mut rest)?;
            let run = (stream, length);
            stream = other(stream);
            Some(run)
        });
        done.filter(|(_, length)| *length > 0).chain(self.open)
    }

    /// Bytes of one stream in all runs.
    pub fn bytes_of(&self, stream: Stream) -> u64 {
        self.iter().filter(|(of, _)| *of == stream).map(|(_, length)| length).fold(0, u64::saturating_add)
    }
}

fn other(stream: Stream) -> Stream {
    match stream {
        Stream::Stdout => Stream::Stderr,
        Stream::Stderr => Stream::Stdout,
    }
}

fn write_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn read_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let part = u64::from(byte & 0x7f);
        number |= part.checked_shl(shift).filter(|shifted| shifted >> shift == part)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// The kept bytes of one stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept {
    /// In the row: up to [`OUTPUT_INLINE_BYTES`](crate::core::limits::OUTPUT_INLINE_BYTES).
    Inline(Vec<u8>),
    /// An object of the store, stored before this row.
    Object {
        /// Its address.
        digest: Digest,
        /// Its length.
        bytes: u64,
    },
}

impl Kept {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Kept::Inline(bytes) => bytes.len() as u64,
            Kept::Object { bytes, .. } => *bytes,
        }
    }
}

/// The kept output of an execution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputRecord {
    /// Stdout.
    pub stdout: Kept,
    /// Stderr.
    pub stderr: Kept,
    /// Their order; covers exactly the kept bytes.
    pub runs: Runs,
    /// Bytes beyond those.
    pub truncated_bytes: u64,
    /// The newest of those bytes, of both streams in order of arrival.
    pub tail: Vec<u8>,
    /// Their order; covers exactly `tail`.
    pub tail_runs: Runs,
    /// Rich forms, in order.
    pub displays: Vec<Display>,
}

impl Default for OutputRecord {
    fn default() -> Self {
        let none = || Kept::Inline(Vec::new());
        OutputRecord {
            stdout: none(),
            stderr: none(),
            runs: Runs::default(),
            truncated_bytes: 0,
            tail: Vec::new(),
            tail_runs: Runs::default(),
            displays: Vec::new(),
        }
    }
}

impl OutputRecord {
    /// Bytes in the row itself.
    pub(super) fn inline_bytes(&self) -> usize {
        let inline = |kept: &Kept| if let Kept::Inline(bytes) = kept { bytes.len() } else { 0 };
        let displays: usize = self.displays.iter().map(|display| display.mime.len() + display.data.len()).sum();
        inline(&self.stdout) + inline(&self.stderr) + self.tail.len() + displays
    }

    /// Whether the runs cover exactly the kept bytes.
    pub fn is_consistent(&self) -> bool {
        self.runs.bytes_of(Stream::Stdout) == self.stdout.bytes()
            && self.runs.bytes_of(Stream::Stderr) == self.stderr.bytes()
            && self.tail_runs.iter().map(|(_, bytes)| bytes).fold(0, u64::saturating_add) == self.tail.len() as u64
            && self.tail.len() as u64 <= self.truncated_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn single_stream_is_one_number() {
        let mut runs = Runs::default();
        for _ in 0..100 {
            runs.push(Stream::Stdout, 1);
        }
        assert_eq!(runs.to_bytes(), [100]);
    }

    #[test]
    fn invalid_run_encoding_is_refused() {
        for bytes in [&[0u8][..], &[0, 0], &[1, 0], &[0x80], &[0xff; 10], &[1, 0x80]] {
            assert_eq!(Runs::from_bytes(bytes), None, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn stream_order_round_trips(chunks in prop::collection::vec((any::<bool>(), prop_oneof![0u64..300, any::<u32>().prop_map(u64::from)]), 0..60)) {
            let mut runs = Runs::default();
            let mut model: Vec<(Stream, u64)> = Vec::new();
            for (err, length) in chunks {
                let stream = if err { Stream::Stderr } else { Stream::Stdout };
                runs.push(stream, length);
                match model.last_mut() {
                    Some((last, total)) if *last == stream => *total += length,
                    _ if length > 0 => model.push((stream, length)),
                    _ => {}
                }
            }
            prop_assert_eq!(runs.iter().collect::<Vec<_>>(), model.clone());
            let back = Runs::from_bytes(&runs.to_bytes());
            prop_assert_eq!(back.map(|runs| runs.iter().collect::<Vec<_>>()), Some(model));
        }

        #[test]
        fn run_decoder_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some(runs) = Runs::from_bytes(&bytes) {
                let _ = runs.bytes_of(Stream::Stdout);
            }
        }
    }
}
