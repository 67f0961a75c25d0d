//! The meaning of keys in the list, in a kernel's details and in a question. Part of the model, and
//! pure.

use super::key::Key;
use super::model::{Action, Deed, Kernel, Model};
use crate::core::ids::KernelId;

/// Maximum length of a filter or a checkpoint's name, characters.
const TEXT: usize = 200;

/// The view on the screen, which determines the meaning of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    /// The list of kernels.
    List,
    /// A filter is being entered; `before` is the previous one.
    Filter { before: String },
    /// The help for all keys.
    Help { back: Box<Mode> },
    /// One kernel's details: the first visible line, and the time of the last request.
    Inspect { id: KernelId, first: usize, asked_ms: Option<i64> },
    /// A question whether to execute an operation.
    Confirm { id: KernelId, deed: Deed, back: Box<Mode> },
    /// A question for a checkpoint's name.
    Name { id: KernelId, text: String, back: Box<Mode> },
}

impl Mode {
    /// The kernel whose details are on the screen or behind a question.
    pub fn inspects(&self) -> Option<KernelId> {
        match self {
            Mode::Inspect { id, .. } => Some(*id),
            Mode::Help { back } | Mode::Confirm { back, .. } | Mode::Name { back, .. } => back.inspects(),
            Mode::List | Mode::Filter { .. } => None,
        }
    }
}

impl Model {
    /// The kernel of a question.
    pub fn mode_kernel(&self) -> Option<&Kernel> {
        match &self.mode {
            Mode::Inspect { id, .. } | Mode::Confirm { id, .. } | Mode::Name { id, .. } => self.kernels.get(id),
            Mode::List | Mode::Filter { .. } | Mode::Help { .. } => None,
        }
    }

    /// Handles a key.
    pub(super) fn press(&mut self, key: Key) -> Vec<Action> {
        let everywhere = [('c', Action::Quit), ('z', Action::Suspend), ('l', Action::Redraw)];
        if let Some((_, action)) = everywhere.into_iter().find(|(letter, _)| key == Key::Control(*letter)) {
            return vec![action];
        }
        match std::mem::replace(&mut self.mode, Mode::List) {
            Mode::List => self.in_list(key),
            Mode::Filter { before } => self.in_filter(key, before),
            // Any key returns to the previous view.
            Mode::Help { back } => self.back(*back),
            Mode::Inspect { id, first, asked_ms } => self.in_details(key, id, first, asked_ms),
            Mode::Confirm { id, deed, back } => self.in_question(key, id, deed, *back),
            Mode::Name { id, text, back } => self.in_name(key, id, text, *back),
        }
    }

    fn back(&mut self, mode: Mode) -> Vec<Action> {
        self.mode = mode;
        Vec::new()
    }

    fn in_list(&mut self, key: Key) -> Vec<Action> {
        let lines = self.lines();
        let page = lines.saturating_sub(1).max(1) as isize;
        match key {
            Key::Char('q') => return vec![Action::Quit],
            Key::Up | Key::Char('k') => self.list.select(-1, lines),
            Key::Down | Key::Char('j') => self.list.select(1, lines),
            Key::PageUp | Key::Control('b') => self.list.select(-page, lines),
            Key::PageDown | Key::Control('f') => self.list.select(page, lines),
            Key::Home | Key::Char('g') => self.list.select(isize::MIN, lines),
            Key::End | Key::Char('G') => self.list.select(isize::MAX, lines),
            Key::Left | Key::Char('<') => self.list.column = self.list.column.moved(-1),
            Key::Right | Key::Char('>') => self.list.column = self.list.column.moved(1),
            Key::Char('r') => self.list.reversed = !self.list.reversed,
            Key::Char('/') => self.mode = Mode::Filter { before: self.list.filter.clone() },
            Key::Escape => self.list.filter.clear(),
            Key::Enter => {
                if let Some(id) = self.list.selected() {
                    self.inspected = None;
                    self.mode = Mode::Inspect { id, first: 0, asked_ms: None };
                }
            }
            Key::Char('?' | 'h') => self.mode = Mode::Help { back: Box::new(Mode::List) },
            Key::Char(letter) => return self.deed(letter, self.list.selected(), Mode::List),
            Key::Backspace | Key::Control(_) => {}
        }
        Vec::new()
    }

    fn in_filter(&mut self, key: Key, before: String) -> Vec<Action> {
        match key {
            Key::Enter => return self.back(Mode::List),
            Key::Escape => {
                self.list.filter = before;
                return self.back(Mode::List);
            }
            other => edit(&mut self.list.filter, other),
        }
        self.back(Mode::Filter { before })
    }

    fn in_details(&mut self, key: Key, id: KernelId, first: usize, asked_ms: Option<i64>) -> Vec<Action> {
        let page = self.lines().saturating_sub(1).max(1);
        let first = match key {
            Key::Escape | Key::Enter | Key::Left | Key::Backspace | Key::Char('q') => return self.back(Mode::List),
            Key::Up | Key::Char('k') => first.saturating_sub(1),
            Key::Down | Key::Char('j') => first + 1,
            Key::PageUp | Key::Control('b') => first.saturating_sub(page),
            Key::PageDown | Key::Control('f') | Key::Char(' ') => first.saturating_add(page),
            Key::Home | Key::Char('g') => 0,
            Key::End | Key::Char('G') => usize::MAX / 2,
            Key::Char('?' | 'h') => {
                let back = Box::new(Mode::Inspect { id, first, asked_ms });
                return self.back(Mode::Help { back });
            }
            Key::Char(letter) => return self.deed(letter, Some(id), Mode::Inspect { id, first, asked_ms }),
            Key::Right | Key::Control(_) => first,
        };
        // Limited to the content, which is counted as the view counts it.
        let last = super::view::details_of(self, id).len().saturating_sub(self.lines());
        self.back(Mode::Inspect { id, first: first.min(last), asked_ms })
    }

    /// A letter that starts an operation on a kernel. Destructive operations ask first.
    fn deed(&mut self, letter: char, id: Option<KernelId>, back: Mode) -> Vec<Action> {
        self.mode = back.clone();
        let Some(id) = id else { return Vec::new() };
        let back = Box::new(back);
        match letter {
            's' => return self.begin(id, Deed::Start),
            'x' | 'i' => {
                let deed = if letter == 'x' { Deed::Stop { force: false } } else { Deed::Interrupt };
                if self.assume_yes {
                    return self.begin(id, deed);
                }
                self.mode = Mode::Confirm { id, deed, back };
            }
            'c' => self.mode = Mode::Name { id, text: String::new(), back },
            _ => {}
        }
        Vec::new()
    }

    fn in_question(&mut self, key: Key, id: KernelId, deed: Deed, back: Mode) -> Vec<Action> {
        self.mode = back;
        match (key, &deed) {
            (Key::Char('y' | 'Y'), _) => self.begin(id, deed),
            (Key::Char('f' | 'F'), Deed::Stop { .. }) => self.begin(id, Deed::Stop { force: true }),
            _ => {
                self.say("nothing was done".into(), false);
                Vec::new()
            }
        }
    }

    fn in_name(&mut self, key: Key, id: KernelId, mut text: String, back: Mode) -> Vec<Action> {
        match key {
            Key::Enter => {
                self.mode = back;
                return self.begin(id, Deed::Checkpoint(text.trim().to_owned()));
            }
            Key::Escape => {
                self.say("nothing was done".into(), false);
                return self.back(back);
            }
            other => edit(&mut text, other),
        }
        self.back(Mode::Name { id, text, back: Box::new(back) })
    }

    /// Inserts pasted text into an open text field, else ignores it. It never acts as keys.
    pub(super) fn paste(&mut self, pasted: &str) {
        let text = match &mut self.mode {
            Mode::Filter { .. } => &mut self.list.filter,
            Mode::Name { text, .. } => text,
            Mode::List | Mode::Help { .. } | Mode::Inspect { .. } | Mode::Confirm { .. } => return,
        };
        for c in pasted.lines().next().unwrap_or_default().chars() {
            edit(text, Key::Char(c));
        }
    }
}

fn edit(text: &mut String, key: Key) {
    match key {
        Key::Char(c) if !c.is_control() && text.chars().count() < TEXT => text.push(c),
        Key::Backspace => drop(text.pop()),
        Key::Control('u') => text.clear(),
        Key::Char(_)
        | Key::Control(_)
        | Key::Up
        | Key::Down
        | Key::Left
        | Key::Right
        | Key::PageUp
        | Key::PageDown
        | Key::Home
        | Key::End
        | Key::Enter
        | Key::Escape => {}
    }
}
