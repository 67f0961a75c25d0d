//! Completion: the word at the cursor and its kind.

/// Limit of returned matches.
pub const MATCHES: usize = 200;
/// Keywords that may precede a command.
pub const KEYWORDS: [&str; 13] =
    ["if", "then", "else", "elif", "fi", "for", "while", "do", "done", "case", "esac", "function", "local"];

/// The kind of the word at the cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A command's name.
    Command,
    /// A variable's name, after `$` or `${`.
    Variable,
    /// A path.
    Path,
}

/// The word before the cursor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    /// Its start, bytes.
    pub start: usize,
    /// Its text.
    pub text: String,
    /// Its kind.
    pub kind: Kind,
}

/// Finds the word before the cursor. A cursor past the end or inside a character is moved back.
pub fn word_at(code: &str, cursor: usize) -> Word {
    let mut cursor = cursor.min(code.len());
    while !code.is_char_boundary(cursor) {
        cursor -= 1;
    }
    let before = &code[..cursor];
    let name_start = before
        .rfind(|c: char| !(c.is_alphanumeric() || c == '_'))
        .map_or(0, |at| at + before[at..].chars().next().map_or(1, char::len_utf8));
    let lead = &before[..name_start];
    if lead.ends_with('$') || lead.ends_with("${") {
        return Word { start: name_start, text: before[name_start..].to_owned(), kind: Kind::Variable };
    }
    let breaks = |c: char| c.is_whitespace() || "|&;(){}<>\"'=`".contains(c);
    let start = before.rfind(breaks).map_or(0, |at| at + before[at..].chars().next().map_or(1, char::len_utf8));
    let text = before[start..].to_owned();
    let lead = before[..start].trim_end_matches([' ', '\t']);
    let starts_command = lead.is_empty()
        || lead.ends_with(['|', '&', ';', '(', '{', '\n', '!'])
        || ["then", "do", "else", "elif", "if", "while"].iter().any(|keyword| {
            lead.strip_suffix(keyword)
                .is_some_and(|rest| rest.is_empty() || rest.ends_with(|c: char| c.is_whitespace() || c == ';'))
        });
    let kind = if starts_command && !text.contains('/') { Kind::Command } else { Kind::Path };
    Word { start, text, kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kaish_completion_word_kinds() {
        use Kind::{Command, Path, Variable};
        for (code, start, text, kind) in [
            ("", 0, "", Command),
            ("ec", 0, "ec", Command),
            ("echo he", 5, "he", Path),
            ("ls | gr", 5, "gr", Command),
            ("if true; then ec", 14, "ec", Command),
            ("echo $HO", 6, "HO", Variable),
            ("echo \"${HO", 8, "HO", Variable),
            ("cat src/ma", 4, "src/ma", Path),
            ("./ru", 0, "./ru", Path),
            ("x=$(da", 4, "da", Command),
            ("cat < fi", 6, "fi", Path),
            ("é ü", 3, "ü", Path),
        ] {
            assert_eq!(word_at(code, code.len()), Word { start, text: text.into(), kind }, "{code:?}");
        }
    }

    #[test]
    fn completion_accepts_any_cursor() {
        for cursor in 0..20 {
            let word = word_at("echo é $x/ü", cursor);
            assert!(word.start <= 14);
        }
    }
}
