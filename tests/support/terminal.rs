//! A program on a pseudo-terminal: key-by-key input, and the screen.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};

use super::Host;

/// A program on its own terminal.
pub struct Terminal {
    /// None: the terminal is closed.
    keys: Option<File>,
    /// The reader of the screen ends with it.
    reads: Option<OwnedFd>,
    shown: Receiver<Vec<u8>>,
    /// The screen output since the last look, without escape sequences.
    text: String,
    child: Child,
}

impl Terminal {
    /// Starts the command line on a terminal of 200 columns and 50 lines.
    pub fn start(host: &Host, args: &[&str]) -> Terminal {
        // No program inherits the master: a copy would keep a closed terminal open.
        let master = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let slave = ptsname_r(&master).unwrap();
        let slave = File::options().read(true).write(true).custom_flags(OFlag::O_NOCTTY.bits()).open(slave).unwrap();
        let keys = File::from(OwnedFd::from(master));
        ryokan::sys::terminal::resize(&keys, 50, 200).unwrap();
        // As in a terminal window: a session with this controlling terminal, so that Ctrl-C is a
        // signal.
        let mut command = std::process::Command::new("setsid");
        let ryokan = host.command("ryokan");
        // Tests run in the background of a script, or under nohup, inherit these signals as
        // ignored.
        command.args(["--ctty", "/usr/bin/env", "--default-signal=INT,HUP"]);
        command.arg(ryokan.get_program()).args(ryokan.get_args()).arg("--no-autostart").args(args);
        command.env_clear().env("TERM", "xterm");
        command.envs(ryokan.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let end = || Stdio::from(slave.try_clone().unwrap());
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let mut screen = keys.try_clone().unwrap();
        let (sender, shown) = channel();
        let (closed, reads) = nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            loop {
                let mut fds = [screen.as_fd(), closed.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
                let _ = poll(&mut fds, PollTimeout::NONE);
                if fds[1].any() != Some(false) {
                    return;
                }
                // On Linux, reading fails once the other end is closed.
                match screen.read(&mut bytes) {
                    Ok(read) if read > 0 && sender.send(bytes[..read].to_vec()).is_ok() => {}
                    Ok(_) | Err(_) => return,
                }
            }
        });
        Terminal { keys: Some(keys), reads: Some(reads), shown, text: String::new(), child }
    }

    /// Closes the terminal, as the end of its window does.
    pub fn close(&mut self) {
        self.keys = None;
        self.reads = None;
    }

    fn keys(&self) -> &File {
        self.keys.as_ref().expect("the terminal is open")
    }

    /// Types text.
    pub fn press(&mut self, keys: &str) {
        self.keys().write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the screen shows the text; later calls look only at what follows.
    pub fn wait_for(&mut self, wanted: &str) {
        let deadline = Instant::now() + Duration::from_secs(180);
        loop {
            let plain = plain(&self.text);
            if let Some(at) = plain.find(wanted) {
                self.text = plain[at + wanted.len()..].to_owned();
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => self.text.push_str(&String::from_utf8_lossy(&bytes)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("{wanted:?} did not appear: {plain:?}")
                }
            }
        }
    }

    /// Presses a key, again every two seconds, until the screen shows the text: the program may not read keys yet.
    pub fn press_until(&mut self, key: &str, wanted: &str) {
        let deadline = Instant::now() + Duration::from_secs(180);
        while Instant::now() < deadline {
            self.press(key);
            let again = Instant::now() + Duration::from_secs(2);
            while let Ok(bytes) = self.shown.recv_timeout(again.saturating_duration_since(Instant::now())) {
                self.text.push_str(&String::from_utf8_lossy(&bytes));
                if plain(&self.text).contains(wanted) {
                    return;
                }
            }
        }
        panic!("{wanted:?} did not appear: {:?}", self.text)
    }

    /// Waits until the program has written the text, including escape sequences; discards
    /// everything before.
    pub fn wait_for_raw(&mut self, wanted: &str) {
        let deadline = Instant::now() + Duration::from_secs(180);
        while !self.text.contains(wanted) {
            match self.shown.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(bytes) => self.text.push_str(&String::from_utf8_lossy(&bytes)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("{wanted:?} did not appear: {:?}", self.text)
                }
            }
        }
    }

    /// The screen output since the last look.
    pub fn shown(&mut self) -> String {
        while let Ok(bytes) = self.shown.try_recv() {
            self.text.push_str(&String::from_utf8_lossy(&bytes));
        }
        plain(&self.text)
    }

    /// Types a line once the prompt is there.
    pub fn enter(&mut self, prompt: &str, line: &str) {
        self.wait_for(prompt);
        self.press(line);
        self.press("\r");
    }

    /// Presses the last key once the prompt is there; the program must then succeed.
    pub fn leave(mut self, prompt: &str, key: &str) {
        self.wait_for(prompt);
        self.press(key);
        self.ended();
    }

    /// The terminal's settings: echo, whole lines, signals from keys.
    pub fn settings(&self) -> nix::sys::termios::Termios {
        nix::sys::termios::tcgetattr(self.keys()).unwrap()
    }

    /// Changes the terminal's size.
    pub fn resize(&self, rows: u16, columns: u16) {
        ryokan::sys::terminal::resize(self.keys(), rows, columns).unwrap();
    }

    /// The program's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the program's successful end.
    pub fn ended(&mut self) {
        self.ended_with(0);
    }

    /// Waits for the program's end with that exit code, as a shell reports it: 128 plus the number
    /// of a signal.
    pub fn ended_with(&mut self, code: i32) {
        let deadline = Instant::now() + Duration::from_secs(180);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let ended = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
                assert_eq!(ended, Some(code), "{status}");
                return;
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The program has ended already, unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Removes escape sequences: those of xterm that rustyline uses end with a letter, those of keypads with `=` or `>`.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' => {
                let end = chars.find(|c| !"[?;0123456789".contains(*c));
                debug_assert!(end.is_none_or(|end| end.is_ascii_alphabetic() || "=>".contains(end)), "{end:?}");
            }
            c => plain.push(c),
        }
    }
    plain
}
