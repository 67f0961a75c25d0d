//! Styles. Without colours, bold, dim and reversed remain.

use ratatui::style::{Color, Modifier, Style};

/// A theme with or without colours.
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

    /// A success.
    pub fn good(self) -> Style {
        self.colour(Color::Green)
    }

    /// A failure.
    pub fn bad(self) -> Style {
        self.colour(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// Something notable.
    pub fn note(self) -> Style {
        self.colour(Color::Cyan)
    }

    /// A warning.
    pub fn warn(self) -> Style {
        self.colour(Color::Yellow)
    }

    /// Less important text.
    pub fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    /// The selected line.
    pub fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// A kernel's state, by the daemon's name.
    pub fn state(self, state: &str) -> Style {
        match state {
            "ready" | "busy" => self.good(),
            "crashed" => self.bad(),
            "starting" | "stopping" => self.warn(),
            "suspended" | "stopped" | "created" | "archived" => self.dim(),
            // A state unknown to this build.
            _ => Style::new(),
        }
    }
}
