//! Parses bash's output about itself: variables, aliases, traps, jobs, the hash table of commands.

use super::quote::{ReadError, Reader};

/// A variable's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Declared without a value.
    Unset,
    /// A text; for a name reference, the referenced name.
    Scalar(Vec<u8>),
    /// An indexed array: indices and texts.
    Indexed(Vec<(u64, Vec<u8>)>),
    /// An associative array.
    Associative(Named),
}

/// A variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Attribute letters, sorted.
    pub attributes: String,
    /// Its value.
    pub content: Content,
}

impl Variable {
    /// Whether it has the attribute.
    pub fn is(&self, attribute: char) -> bool {
        self.attributes.contains(attribute)
    }
}

/// Reads `declare -p`.
///
/// # Errors
/// If it is not of that form.
pub fn variables(printed: &[u8]) -> Result<Vec<Variable>, ReadError> {
    let mut reader = Reader::new(printed);
    let mut found = Vec::new();
    while reader.peek().is_some() {
        reader.expect(b"declare -")?;
        let attributes = reader.until(b" ")?;
        reader.expect(b" ")?;
        let name = String::from_utf8_lossy(reader.until(b"=\n")?).into_owned();
        let mut attributes: Vec<char> = attributes.iter().map(|b| char::from(*b)).filter(|c| *c != '-').collect();
        attributes.sort_unstable();
        let attributes: String = attributes.into_iter().collect();
        let content = if !reader.take(b"=") {
            Content::Unset
        } else if attributes.contains(['a', 'A']) && reader.take(b"(") {
            elements(&mut reader, attributes.contains('A'))?
        } else {
            Content::Scalar(reader.word(b"\n")?)
        };
        reader.expect(b"\n")?;
        found.push(Variable { name, attributes, content });
    }
    Ok(found)
}

fn elements(reader: &mut Reader<'_>, named: bool) -> Result<Content, ReadError> {
    let (mut indexed, mut associative) = (Vec::new(), Vec::new());
    loop {
        while reader.take(b" ") {}
        if reader.take(b")") {
            break;
        }
        reader.expect(b"[")?;
        let key = reader.word(b"]")?;
        reader.expect(b"]=")?;
        let value = reader.word(b" )")?;
        if named {
            associative.push((key, value));
        } else {
            let index = std::str::from_utf8(&key).ok().and_then(|key| key.parse().ok()).ok_or(ReadError::Short)?;
            indexed.push((index, value));
        }
    }
    // bash orders them by hash, which differs between processes.
    associative.sort();
    Ok(if named { Content::Associative(associative) } else { Content::Indexed(indexed) })
}

/// Names with their values.
pub type Named = Vec<(Vec<u8>, Vec<u8>)>;

/// Reads `alias -p`: names and replacements.
///
/// # Errors
/// If it is not of that form.
pub fn aliases(printed: &[u8]) -> Result<Named, ReadError> {
    let mut reader = Reader::new(printed);
    let mut found = Vec::new();
    while reader.peek().is_some() {
        reader.expect(b"alias ")?;
        reader.take(b"-- ");
        let name = reader.until(b"=\n")?.to_vec();
        reader.expect(b"=")?;
        found.push((name, reader.word(b"\n")?));
        reader.expect(b"\n")?;
    }
    Ok(found)
}

/// Traps: signals without `SIG`, and actions.
pub type Traps = Vec<(String, Vec<u8>)>;

/// Reads `trap -p` followed by `enable -n`: names of disabled builtins.
///
/// # Errors
/// If it is not of that form.
pub fn traps(printed: &[u8]) -> Result<(Traps, Vec<String>), ReadError> {
    let mut reader = Reader::new(printed);
    let mut found = Vec::new();
    let mut disabled = Vec::new();
    while reader.peek().is_some() {
        if reader.take(b"enable -n ") {
            disabled.push(String::from_utf8_lossy(reader.until(b"\n")?).into_owned());
        } else {
            reader.expect(b"trap -- ")?;
            let action = reader.word(b" ")?;
            reader.expect(b" ")?;
            let signal = String::from_utf8_lossy(reader.until(b"\n")?).into_owned();
            found.push((signal.strip_prefix("SIG").unwrap_or(&signal).to_owned(), action));
        }
        reader.expect(b"\n")?;
    }
    Ok((found, disabled))
}

/// Reads `hash -l`: names and remembered paths. Other lines mean that there are none.
pub fn commands(printed: &[u8]) -> Named {
    let mut found = Vec::new();
    for line in printed.split(|b| *b == b'\n') {
        let mut line = line.to_vec();
        line.push(b'\n');
        let mut reader = Reader::new(&line);
        if !reader.take(b"builtin hash -p ") {
            continue;
        }
        let Ok(path) = reader.word(b" \n") else { continue };
        if let (true, Ok(name)) = (reader.take(b" "), reader.word(b"\n")) {
            found.push((name, path));
        }
    }
    found
}

/// Reads `declare -F`: function names and attribute letters.
pub fn functions(printed: &[u8]) -> Vec<(Vec<u8>, String)> {
    let lines = printed.split(|b| *b == b'\n').filter_map(|line| line.strip_prefix(b"declare -"));
    lines
        .filter_map(|line| {
            let blank = line.iter().position(|b| *b == b' ')?;
            let attributes = line[..blank].iter().map(|b| char::from(*b)).filter(|c| *c != 'f').collect();
            Some((line[blank + 1..].to_vec(), attributes))
        })
        .collect()
}

/// Reads `jobs -l`: process ids and commands, one per job.
pub fn jobs(printed: &[u8]) -> Vec<(i32, String)> {
    let mut found: Vec<(i32, String)> = Vec::new();
    for line in String::from_utf8_lossy(printed).lines() {
        let first = line.starts_with('[');
        let rest = if first { line.split_once(']').map_or("", |(_, rest)| rest) } else { line };
        let rest = rest.trim_start_matches(['+', '-', ' ']);
        let (pid, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let Ok(pid) = pid.parse() else { continue };
        // A state contains single blanks and is followed by several; a further process of a
        // pipeline has none.
        let command = rest.trim_start().split_once("  ").map_or(rest, |(_, command)| command).trim();
        if first {
            found.push((pid, command.trim_end_matches('&').trim_end().to_owned()));
        } else if let Some((last, text)) = found.last_mut() {
            // The job's process is the last of its pipeline, as in `$!`.
            *last = pid;
            // The states of individual processes are not needed.
            if let Some(pipe) = rest.find('|') {
                text.push(' ');
                text.push_str(rest[pipe..].trim_end_matches('&').trim_end());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bash_declarations_parse() {
        let printed =
            b"declare -- x=\"1\"\ndeclare -ir n=\"4\"\ndeclare -a e=()\ndeclare -a s=([0]=\"a b\" [7]=$'c\\n')\n\
            declare -A m=([$'k\\n]\"']=\"1\" [\"b c\"]=\"2\" )\ndeclare -n r=\"x\"\ndeclare -x u\n";
        let text = |text: &str| text.as_bytes().to_vec();
        let read = variables(printed).expect("reads");
        let contents: Vec<_> =
            read.iter().map(|v| (v.name.as_str(), v.attributes.as_str(), v.content.clone())).collect();
        assert_eq!(
            contents,
            [
                ("x", "", Content::Scalar(text("1"))),
                ("n", "ir", Content::Scalar(text("4"))),
                ("e", "a", Content::Indexed(vec![])),
                ("s", "a", Content::Indexed(vec![(0, text("a b")), (7, text("c\n"))])),
                ("m", "A", Content::Associative(vec![(text("b c"), text("2")), (text("k\n]\""), text("1"))])),
                ("r", "n", Content::Scalar(text("x"))),
                ("u", "x", Content::Unset),
            ]
        );
        for broken in
            [&b"declare -- x=\"1"[..], b"nonsense\n", b"declare -a x=([0]=\"1\"\n", b"declare -a x=([q]=\"1\")\n"]
        {
            assert!(variables(broken).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn bash_job_listing_parses() {
        let printed = b"[1]   4242 Running                 sleep 60 &\n[2]-  4243 Exit 3                  false\n\
            [3]+  4250 Done                    echo a\n      4251 Running                 | sleep 5 &\n";
        assert_eq!(
            jobs(printed),
            [(4242, "sleep 60".into()), (4243, "false".into()), (4251, "echo a | sleep 5".into())]
        );
    }
}
