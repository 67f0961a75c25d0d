//! The loop `ryokan repl` on a real terminal: what is typed, key by key, is what runs.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::pty::{Winsize, openpty};

use crate::support::Host;

const UP: &str = "\x1b[A";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";

/// A program on a terminal of its own.
struct Terminal {
    keys: File,
    shown: Receiver<Vec<u8>>,
    /// What is on the screen since the last look, without the terminal's own commands.
    text: String,
    child: Child,
}

impl Terminal {
    fn start(host: &Host, args: &[&str]) -> Terminal {
        let size = Winsize { ws_row: 50, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(&size, None).unwrap();
        // As a terminal's window does it: a session whose controlling terminal this is, so that Ctrl-C is a signal.
        let mut command = std::process::Command::new("setsid");
        let ryokan = host.command("ryokan");
        command.arg("--ctty").arg(ryokan.get_program()).args(ryokan.get_args()).arg("--no-autostart").args(args);
        command.env_clear().env("TERM", "xterm");
        command.envs(ryokan.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let end = || Stdio::from(pty.slave.try_clone().unwrap());
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let keys = File::from(pty.master);
        let mut screen = keys.try_clone().unwrap();
        let (sender, shown) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The terminal's other end is closed: an error, on Linux.
            while let Ok(read) = screen.read(&mut bytes) {
                if read == 0 || sender.send(bytes[..read].to_vec()).is_err() {
                    return;
                }
            }
        });
        Terminal { keys, shown, text: String::new(), child }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this is on the screen, and looks only at what follows from then on.
    fn wait_for(&mut self, wanted: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
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
                    panic!("{wanted:?} never came; there is {plain:?}")
                }
            }
        }
    }

    /// Types a line when the prompt is there.
    fn enter(&mut self, prompt: &str, line: &str) {
        self.wait_for(prompt);
        self.press(line);
        self.press("\r");
    }

    fn leave(mut self, prompt: &str) {
        self.wait_for(prompt);
        self.press(CTRL_D);
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert_eq!(status.code(), Some(0));
                return;
            }
            assert!(Instant::now() < deadline, "Ctrl-D does not leave");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Left already, unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Without escape sequences: those of xterm that rustyline uses end with a letter.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' => {
                let end = chars.find(|c| !"[?;0123456789".contains(*c));
                debug_assert!(end.is_none_or(|end| end.is_ascii_alphabetic()), "{end:?}");
            }
            c => plain.push(c),
        }
    }
    plain
}

/// The newest execution's code, as the journal has it.
fn newest(host: &Host, kernel: &str) -> String {
    let line = host.ok(&["journal", kernel, "--json", "-n", "1"]);
    serde_json::from_str::<serde_json::Value>(&line).unwrap()["text"].as_str().unwrap().to_owned()
}

#[test]
fn what_is_typed_is_what_runs() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut terminal = Terminal::start(&host, &["repl", "k"]);
    for (lines, shown) in [
        (&["cat <<END", "none", "  two", "none again", "END"][..], "  two\r\nnone again\r\n"),
        (&["text=\"a", "b", "   c\"; echo \"$text\""], "a\r\nb\r\n   c\r\n"),
        (&["if true; then", "echo inside", "fi"], "inside\r\n"),
    ] {
        for (at, line) in lines.iter().enumerate() {
            terminal.enter(if at == 0 { "k:kaish> " } else { "........ " }, line);
        }
        terminal.wait_for(shown);
        assert_eq!(newest(&host, "k"), lines.join("\n") + "\n");
    }
    terminal.leave("k:kaish> ");
}

#[test]
fn blocks_are_indented_and_texts_are_not() {
    let host = Host::start();
    host.ok(&["new", "p", "--engine", "python"]);
    let mut terminal = Terminal::start(&host, &["repl", "p"]);
    terminal.enter("p:python> ", "def six(a):");
    terminal.enter("......... ", "return 6 * a");
    terminal.enter("......... ", "");
    terminal.enter("p:python> ", "six(7)");
    terminal.wait_for("42");
    terminal.enter("p:python> ", "text = '''a:");
    terminal.enter("......... ", "  b:");
    terminal.enter("......... ", "c'''");
    terminal.enter("p:python> ", "text");
    terminal.wait_for("'a:\\n  b:\\nc'");
    terminal.leave("p:python> ");
    assert!(host.ok(&["journal", "p", "--full"]).contains("    return 6 * a"), "the block was indented");
}

#[test]
fn the_history_is_there_again_the_next_time() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut terminal = Terminal::start(&host, &["repl", "k"]);
    terminal.enter("k:kaish> ", "echo first");
    terminal.wait_for("\nfirst\r\n");
    terminal.enter("k:kaish> ", UP);
    terminal.wait_for("\nfirst\r\n");
    terminal.leave("k:kaish> ");
    let mut again = Terminal::start(&host, &["repl", "k"]);
    again.enter("k:kaish> ", UP);
    again.wait_for("\nfirst\r\n");
    again.leave("k:kaish> ");
    assert!(host.ok(&["journal", "k"]).contains("#3 done"));
}

#[test]
fn ctrl_c_clears_a_line_and_interrupts_what_runs() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut terminal = Terminal::start(&host, &["repl", "k"]);
    terminal.wait_for("k:kaish> ");
    terminal.press(&format!("never{CTRL_C}"));
    terminal.enter("k:kaish> ", "x=kept; echo begun; sleep 600");
    terminal.wait_for("\nbegun\r\n");
    let began = Instant::now();
    terminal.press(CTRL_C);
    terminal.wait_for("interrupting; Ctrl-C once more gives the prompt back");
    terminal.enter("k:kaish> ", "echo $x");
    terminal.wait_for("\nkept\r\n");
    assert!(began.elapsed() < Duration::from_secs(30));
    terminal.leave("k:kaish> ");
    let journal = host.ok(&["journal", "k"]);
    assert!(journal.contains("#1 interrupted") && !journal.contains("never"), "{journal}");
    assert_eq!(host.ok(&["exec", "k", "echo $x"]), "kept\n", "the kernel lives on");
}
