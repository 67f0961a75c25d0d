//! Bytes that are not the protocol, on the control socket and on a kernel's socket.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ryokan::core::engine::EngineName;

use super::{remove_all, rss, until};
use crate::support::{Host, kernel, out};

/// Random bytes, the same in every run.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A whole `bootstrap` message: one segment; `Message.bootstrap` with question 0.
fn bootstrap() -> Vec<u8> {
    let mut message = words(&[0, 5]);
    // Root: one word of data, one pointer. Union tag 8: bootstrap. Pointer: a struct of one word of data.
    message.extend(words(&[0, 0x0001_0001, 8, 0, 0, 0x0001_0001, 0, 0, 0, 0]));
    message
}

fn attacks() -> Vec<(String, Vec<u8>)> {
    let mut all = vec![
        ("nothing".to_owned(), vec![]),
        ("one byte".to_owned(), vec![0]),
        ("4 G segments".to_owned(), words(&[u32::MAX, 1, 1, 1])),
        ("4 G - 1 segments".to_owned(), words(&[u32::MAX - 1])),
        ("600 segments".to_owned(), words(&[&[599][..], &[1; 600][..]].concat())),
        ("512 segments of 8 GiB".to_owned(), words(&[&[511][..], &[1 << 30; 513][..]].concat())),
        ("a segment of 32 GiB".to_owned(), words(&[0, u32::MAX])),
        ("a segment of 64 MiB that never comes".to_owned(), words(&[0, 8 << 20, 0, 0])),
        ("an empty message".to_owned(), words(&[0, 0])),
        ("half a segment table".to_owned(), words(&[3, 1])),
        ("half a bootstrap".to_owned(), bootstrap()[..20].to_vec()),
        ("a bootstrap, then half a one".to_owned(), [bootstrap(), bootstrap()[..12].to_vec()].concat()),
        ("a bootstrap, then noise".to_owned(), [bootstrap(), noise(3, 5000)].concat()),
        ("a pointer out of the message".to_owned(), words(&[0, 1, 0xffff_fffc, 0xffff_ffff])),
        ("HTTP".to_owned(), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ("zeros".to_owned(), vec![0; 1 << 20]),
        ("ones".to_owned(), vec![0xff; 1 << 20]),
    ];
    all.extend((1..20).map(|seed| (format!("noise {seed}"), noise(seed, 1 << (seed % 17)))));
    // A complete message whose one segment is noise: it reaches the message reader.
    all.extend((30..60).map(|seed| (format!("framed noise {seed}"), [words(&[0, 64]), noise(seed, 512)].concat())));
    for at in 0..bootstrap().len() {
        let mut flipped = bootstrap();
        flipped[at] ^= 0xff;
        all.push((format!("a bootstrap with byte {at} flipped"), flipped));
    }
    all
}

/// Sends the bytes, optionally ends the sending side, and reads an answer if there is one.
fn attack(socket: &Path, bytes: &[u8], politely: bool) {
    let mut stream = UnixStream::connect(socket).expect("the daemon accepts");
    stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    // The daemon may have closed the connection already.
    let _ = stream.write_all(bytes);
    if politely {
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read(&mut [0; 4096]);
    }
}

#[test]
fn malformed_messages_are_harmless() {
    let host = Host::start();
    host.with(async |client| out(&kernel(&client, "k", EngineName::Kaish).await, "x=kept").await);
    let sockets = [host.socket(), host.kernel_socket("k")];
    let all = attacks();
    let round = |polite: bool| {
        for socket in &sockets {
            for (what, bytes) in &all {
                attack(socket, bytes, polite);
                assert!(Host::is_alive(host.pid() as u32), "{what} killed the daemon:\n{}", host.log());
            }
        }
    };
    round(true);
    let before = rss(host.pid());
    round(false);
    round(true);
    host.with(async |client| {
        client.ping().await.expect("it answers");
        let (shell, _) = client.open_kernel("k").await.expect("there");
        assert_eq!(out(&shell, "echo $x").await, "kept");
    });
    let after = rss(host.pid());
    eprintln!("the daemon had {before} KiB, and {after} KiB after {} attacks", all.len() * 4);
    assert!(after < before + (24 << 10), "memory grew from {before} to {after} KiB");
    assert!(!host.log().contains("panicked"), "{}", host.log());
    let open = || std::fs::read_dir(format!("/proc/{}/fd", host.pid())).unwrap().count();
    until("closed connections", || open() < 100);
    remove_all(&host);
}

/// Announced sizes take no memory before the data arrive.
#[test]
fn announced_size_not_allocated() {
    let host = Host::start();
    host.with(async |client| out(&kernel(&client, "k", EngineName::Kaish).await, "x=kept").await);
    let before = rss(host.pid());
    let mut held = Vec::new();
    for socket in [host.socket(), host.kernel_socket("k")] {
        for _ in 0..20 {
            let mut stream = UnixStream::connect(&socket).unwrap();
            // One segment of just less than the 64 MiB that a message may have, and its first word.
            stream.write_all(&words(&[0, (8 << 20) - 64, 0, 0])).unwrap();
            held.push(stream);
        }
    }
    std::thread::sleep(Duration::from_secs(3));
    let after = rss(host.pid());
    assert!(after < before + (24 << 10), "memory grew from {before} to {after} KiB for {} clients", held.len());
    host.with(async |client| client.ping().await.expect("it answers"));
}
