//! bash's quoting in both directions: bytes to words that any bash in any locale reads as those
//! bytes, and the words printed by `declare -p`, `alias -p` and `trap -p` to bytes.

/// Why text is not valid bash output.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Ended inside a word or an array.
    #[error("it ends too soon")]
    Short,
    /// An unexpected character.
    #[error("byte {0} cannot be there")]
    Unexpected(usize),
}

/// Appends the text as one word for exactly these bytes.
pub fn quote(text: &[u8], out: &mut Vec<u8>) {
    if text.iter().all(|b| matches!(b, b' '..=b'~') && *b != b'\'') {
        out.push(b'\'');
        out.extend_from_slice(text);
        out.push(b'\'');
        return;
    }
    out.extend_from_slice(b"$'");
    for byte in text {
        match byte {
            b'\'' | b'\\' => out.extend([b'\\', *byte]),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\t' => out.extend_from_slice(b"\\t"),
            b' '..=b'~' => out.push(*byte),
            // Three digits, so a following digit is separate. Bytes beyond ASCII, too: no locale
            // then joins or drops them.
            other => out.extend_from_slice(format!("\\{other:03o}").as_bytes()),
        }
    }
    out.push(b'\'');
}

/// The text as one word.
pub fn quoted(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len() + 2);
    quote(text, &mut out);
    out
}

/// A parser of bash's output.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// From the beginning.
    pub fn new(text: &'a [u8]) -> Self {
        Reader { text, at: 0 }
    }

    /// Peeks at the next byte.
    pub fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    /// Consumes these bytes if they are next.
    pub fn take(&mut self, wanted: &[u8]) -> bool {
        let there = self.text[self.at..].starts_with(wanted);
        if there {
            self.at += wanted.len();
        }
        there
    }

    /// Requires these bytes next.
    ///
    /// # Errors
    /// If they are not.
    pub fn expect(&mut self, wanted: &[u8]) -> Result<(), ReadError> {
        if self.take(wanted) { Ok(()) } else { Err(self.unexpected()) }
    }

    fn unexpected(&self) -> ReadError {
        if self.at >= self.text.len() { ReadError::Short } else { ReadError::Unexpected(self.at) }
    }

    /// The bytes before the next of `ends`, which is not consumed.
    ///
    /// # Errors
    /// If none comes.
    pub fn until(&mut self, ends: &[u8]) -> Result<&'a [u8], ReadError> {
        let rest = &self.text[self.at..];
        let length = rest.iter().position(|b| ends.contains(b)).ok_or(ReadError::Short)?;
        self.at += length;
        Ok(&rest[..length])
    }

    /// A word up to one of `ends` outside of quotes, which is not consumed.
    ///
    /// # Errors
    /// If a quote is unclosed or no end follows.
    pub fn word(&mut self, ends: &[u8]) -> Result<Vec<u8>, ReadError> {
        let mut word = Vec::new();
        loop {
            let byte = self.peek().ok_or(ReadError::Short)?;
            if ends.contains(&byte) {
                return Ok(word);
            }
            self.at += 1;
            match byte {
                b'"' => self.in_double_quotes(&mut word)?,
                b'\'' => {
                    word.extend_from_slice(self.until(b"'")?);
                    self.at += 1;
                }
                b'$' if self.take(b"'") => self.in_ansi_quotes(&mut word)?,
                b'\\' => {
                    word.push(self.peek().ok_or(ReadError::Short)?);
                    self.at += 1;
                }
                other => word.push(other),
            }
        }
    }

    fn in_double_quotes(&mut self, word: &mut Vec<u8>) -> Result<(), ReadError> {
        loop {
            let byte = self.peek().ok_or(ReadError::Short)?;
            self.at += 1;
            match byte {
                b'"' => return Ok(()),
                b'\\' => match self.peek().ok_or(ReadError::Short)? {
                    escaped @ (b'"' | b'\\' | b'$' | b'`') => {
                        self.at += 1;
                        word.push(escaped);
                    }
                    _ => word.push(b'\\'),
                },
                other => word.push(other),
            }
        }
    }

    fn in_ansi_quotes(&mut self, word: &mut Vec<u8>) -> Result<(), ReadError> {
        loop {
            let byte = self.peek().ok_or(ReadError::Short)?;
            self.at += 1;
            match byte {
                b'\'' => return Ok(()),
                b'\\' => {
                    let escaped = self.peek().ok_or(ReadError::Short)?;
                    self.at += 1;
                    word.push(match escaped {
                        b'a' => 7,
                        b'b' => 8,
                        b'e' | b'E' => 27,
                        b'f' => 12,
                        b'n' => b'\n',
                        b'r' => b'\r',
                        b't' => b'\t',
                        b'v' => 11,
                        b'0'..=b'7' => self.octal(escaped),
                        other => other,
                    });
                }
                other => word.push(other),
            }
        }
    }

    /// Up to three digits; the first is consumed already.
    fn octal(&mut self, first: u8) -> u8 {
        let mut value = u32::from(first - b'0');
        for _ in 0..2 {
            let Some(digit @ b'0'..=b'7') = self.peek() else { break };
            value = value * 8 + u32::from(digit - b'0');
            self.at += 1;
        }
        (value & 0xff) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::process::Command;

    #[test]
    fn printed_bash_quotes_parse() {
        for (printed, meant) in [
            (&b"\"a\\\"b\\\\\\$x\\`y\"\n"[..], &b"a\"b\\$x`y"[..]),
            (b"$'a\\n\\001\\377\\'\\\\z'\n", b"a\n\x01\xff'\\z"),
            (b"'it'\\''s'\n", b"it's"),
            (b"bare\n", b"bare"),
            (b"\"\"\n", b""),
            (b"\"two\nlines\"\n", b"two\nlines"),
        ] {
            assert_eq!(Reader::new(printed).word(b"\n").as_deref(), Ok(meant), "{printed:?}");
        }
        for cut in [&b"\"a"[..], b"'a", b"$'a\\", b"a"] {
            assert_eq!(Reader::new(cut).word(b"\n"), Err(ReadError::Short), "{cut:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// The real bash reads our quoting, and we read its output.
        #[test]
        fn bash_quoting_round_trips(texts in prop::collection::vec(prop::collection::vec(1u8..=255, 0..40), 1..30)) {
            let mut script = Vec::new();
            for (i, text) in texts.iter().enumerate() {
                script.extend(format!("v{i}=").into_bytes());
                quote(text, &mut script);
                script.extend(format!("\nprintf '%s\\0' \"$v{i}\"; declare -p v{i}; printf '\\0'\n").into_bytes());
            }
            for locale in ["C", "C.UTF-8"] {
                let ran = Command::new("/bin/bash").arg("--norc").arg("-c").arg(std::ffi::OsStr::new("source /dev/stdin"))
                    .env("LC_ALL", locale).stdin(given(&script)).output().expect("bash runs");
                let mut parts = ran.stdout.split(|b| *b == 0);
                for (i, text) in texts.iter().enumerate() {
                    prop_assert_eq!(parts.next(), Some(&text[..]));
                    let mut printed = Reader::new(parts.next().expect("printed"));
                    printed.expect(format!("declare -- v{i}=").as_bytes()).expect("its name");
                    prop_assert_eq!(&printed.word(b"\n").expect("a word"), text);
                }
            }
        }
    }

    fn given(bytes: &[u8]) -> std::process::Stdio {
        use std::io::{Seek, Write};
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(bytes).expect("written");
        file.rewind().expect("rewound");
        file.into()
    }
}
