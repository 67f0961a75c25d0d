//! Keys, independent of the terminal.

/// A key that was pressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// Arrow.
    Up,
    /// Arrow.
    Down,
    /// Arrow.
    Left,
    /// Arrow.
    Right,
    /// A screen up.
    PageUp,
    /// A screen down.
    PageDown,
    /// To the first.
    Home,
    /// To the last.
    End,
    /// Return.
    Enter,
    /// Escape.
    Escape,
    /// Deletes the character before the cursor.
    Backspace,
    /// A character.
    Char(char),
    /// A letter with Ctrl, in lower case.
    Control(char),
}

/// What `?` shows: keys and what they do.
pub const HELP: [(&str, &str); 14] = [
    ("↑ ↓  k j", "one kernel up or down"),
    ("PgUp PgDn", "a screen up or down"),
    ("Home End  g G", "the first or the last"),
    ("← →  < >", "sort by another column"),
    ("r", "the other way round"),
    ("/", "only kernels with these words in name, engine, state or labels; Esc: all"),
    ("Enter", "all there is to know of a kernel; Esc: back"),
    ("s", "start its worker"),
    ("x", "stop its worker; asks"),
    ("c", "take a checkpoint; asks for its name"),
    ("i", "interrupt what runs in it; asks"),
    ("Ctrl-Z", "back to the shell, until fg"),
    ("Ctrl-L", "draw everything anew"),
    ("q  Ctrl-C", "leave; kernels are not touched"),
];
