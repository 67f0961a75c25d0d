//! How things look. Without colours there are still bold, dim and reversed.

use ratatui::style::{Color, Modifier, Style};

/// With colours, or without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Theme {
    /// Whether there are colours.
    pub colours: bool,
}

impl Theme {
    fn colour(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    /// A heading.
    pub fn head(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// What went well.
    pub fn good(self) -> Style {
        self.colour(Color::Green)
    }

    /// What went wrong.
    pub fn bad(self) -> Style {
        self.colour(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// What to look at.
    pub fn note(self) -> Style {
        self.colour(Color::Cyan)
    }

    /// What to look at with care.
    pub fn warn(self) -> Style {
        self.colour(Color::Yellow)
    }

    /// What matters less.
    pub fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    /// The selected line.
    pub fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// A kernel's state: the daemon's word.
    pub fn state(self, state: &str) -> Style {
        match state {
            "ready" | "busy" => self.good(),
            "crashed" => self.bad(),
            "starting" | "stopping" => self.warn(),
            "stopped" | "created" | "archived" => self.dim(),
            // This build does not know it.
            _ => Style::new(),
        }
    }
}
