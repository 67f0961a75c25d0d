//! Reports the worker's state: when asked, which also shows that the guest is alive, and at its end.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Machine;
use super::port::Port;
use crate::link::machine::{EVENT_ENDED, EVENT_QUERY, EVENT_RUNS};

/// Pause between two looks at the worker's state, milliseconds.
const PAUSE_MS: u16 = 100;

/// Serves the port until it is over.
pub(super) fn run(port: &Port, machine: &Machine) {
    let mut is_reported = false;
    loop {
        let mut fds = [PollFd::new(port.file().as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut fds, PollTimeout::from(PAUSE_MS));
        let has_ended = machine.has_ended.load(Ordering::Acquire);
        let mut asked = [0; 64];
        let answer = match port.file().read(&mut asked) {
            // Closed on the host.
            Ok(0) if port.is_connection() => return,
            Ok(0) => {
                is_reported = false;
                std::thread::sleep(Duration::from_millis(PAUSE_MS.into()));
                continue;
            }
            Ok(count) => asked[..count].contains(&EVENT_QUERY),
            Err(error) if port.is_connection() && error.kind() != io::ErrorKind::WouldBlock => return,
            Err(_) => false,
        };
        if answer || (has_ended && !is_reported) {
            // Unread states are superseded by later ones.
            let _ = port.file().write(&[if has_ended { EVENT_ENDED } else { EVENT_RUNS }]);
            is_reported = has_ended;
        }
    }
}
