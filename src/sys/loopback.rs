//! The user at the other end of a TCP connection on the loopback, of this process's network namespace.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Readings of the tables. One may skip an entry while the table changes.
const READINGS: usize = 3;

/// Returns the uid of the socket at `peer` that is connected to `local`. `None`: no process has it open.
///
/// # Errors
/// The tables cannot be read.
pub fn peer_uid(local: SocketAddr, peer: SocketAddr) -> io::Result<Option<u32>> {
    for _ in 0..READINGS {
        for table in ["tcp", "tcp6"] {
            let text = match std::fs::read_to_string(format!("/proc/self/net/{table}")) {
                // A host without IPv6.
                Err(error) if table == "tcp6" && error.kind() == io::ErrorKind::NotFound => continue,
                text => text?,
            };
            if let Some(uid) = uid_in(&text, peer, local) {
                return Ok(Some(uid));
            }
        }
    }
    Ok(None)
}

/// The uid of the open socket at `own` that is connected to `other`.
fn uid_in(table: &str, own: SocketAddr, other: SocketAddr) -> Option<u32> {
    let plain = |address: SocketAddr| Some((address.ip().to_canonical(), address.port()));
    table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let &[_, local, remote, _, _, _, _, uid, _, inode, ..] = fields.as_slice() else { return None };
        let is_it = address(local) == plain(own) && address(remote) == plain(other);
        // The kernel shows a socket that its process has closed as one of root.
        (is_it && inode != "0").then(|| uid.parse().ok()).flatten()
    })
}

/// An address of a table: words in the host's byte order, and a port.
fn address(text: &str) -> Option<(IpAddr, u16)> {
    let (address, port) = text.split_once(':')?;
    let mut bytes = Vec::new();
    for at in (0..address.len()).step_by(8) {
        bytes.extend(u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    }
    let address = match bytes.len() {
        4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        _ => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)).to_canonical(),
    };
    Some((address, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn loopback_peer_has_uid() {
        let own = nix::unistd::geteuid().as_raw();
        for bound in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let Ok(listener) = TcpListener::bind(bound) else {
                assert!(bound != "127.0.0.1:0");
                continue;
            };
            let there = listener.local_addr().expect("bound");
            let client = TcpStream::connect((there.ip().to_canonical(), there.port())).expect("connected");
            let (served, peer) = listener.accept().expect("accepted");
            let local = served.local_addr().expect("connected");
            assert_eq!(peer_uid(local, peer).expect("read"), Some(own), "{bound}");
            drop(client);
            assert_eq!(peer_uid(local, peer).expect("read"), None, "closed: the table names root");
        }
    }

    #[test]
    fn tables_are_parsed() {
        let v4 = "   1: 0100007F:1F90 0100007F:CAFE 01 00000000:00000000 00:00000000 00000000  1000 0 77 1 0\n";
        let six = "0000000000000000FFFF00000100007F";
        let mapped = format!("  0: {six}:1F90 {six}:CAFE 08 0:0 00:0 0  7 0 78 1 0\n");
        let [own, other] = [0x1f90, 0xcafe].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        if cfg!(target_endian = "little") {
            assert_eq!((uid_in(v4, own, other), uid_in(&mapped, own, other)), (Some(1000), Some(7)));
        }
        assert_eq!(uid_in(v4, other, own), None);
        let closed = v4.replace(" 77 ", " 0 ");
        for wrong in ["", "a b c", &closed, &v4.replace("0100007F:1F90", "01:1F90"), &v4.replace("1000", "x")] {
            assert_eq!(uid_in(wrong, own, other), None, "{wrong}");
        }
    }
}
