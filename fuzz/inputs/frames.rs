//! The byte stream between init and engine, cut anywhere: both directions.

use ryokan::link::frames::{Decoder, Event, Request, encode};
use serde::{Serialize, de::DeserializeOwned};

fn frames<T: DeserializeOwned>(pieces: &[&[u8]]) -> Vec<(T, Vec<u8>)> {
    let mut decoder = Decoder::default();
    let mut frames = Vec::new();
    for piece in pieces {
        decoder.feed(piece);
        loop {
            match decoder.frame::<T>() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(_) => return frames,
            }
        }
    }
    frames
}

fn check<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(cut: usize, bytes: &[u8]) {
    let whole = frames::<T>(&[bytes]);
    let pieces: Vec<&[u8]> = bytes.chunks(cut).collect();
    assert_eq!(whole, frames::<T>(&pieces), "frames depend on the cuts");
    for (frame, tail) in &whole {
        let mut bytes = Vec::new();
        encode(frame, tail, &mut bytes).expect("a decoded frame is within the limits");
        let again = frames::<T>(&[&bytes]);
        assert_eq!(again.first().map(|(frame, tail)| (frame, tail)), Some((frame, tail)));
    }
}

pub fn run(data: &[u8]) {
    let Some((cut, bytes)) = data.split_first() else { return };
    let cut = usize::from(*cut) + 1;
    check::<Event>(cut, bytes);
    check::<Request>(cut, bytes);
}
