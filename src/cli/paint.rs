//! Colours: on or off, decided once.

use std::io::IsTerminal;

use anstyle::{AnsiColor, Style};

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ColorChoice {
    /// On a terminal, unless `NO_COLOR` is set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Paints text, or leaves it unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint {
    on: bool,
}

impl Paint {
    /// No colours.
    pub const OFF: Paint = Paint { on: false };
    /// Colours.
    pub const ON: Paint = Paint { on: true };

    /// Decides whether to paint output to `stream`.
    pub fn choose(choice: ColorChoice, stream: &impl IsTerminal) -> Paint {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Paint {
            on: match choice {
                ColorChoice::Always => true,
                ColorChoice::Never => false,
                ColorChoice::Auto => stream.is_terminal() && !set("NO_COLOR") && !dumb,
            },
        }
    }

    /// Whether colours are on.
    pub fn is_on(self) -> bool {
        self.on
    }

    fn with(self, style: Style, text: &str) -> String {
        match self.on && !text.is_empty() {
            true => format!("{style}{text}{style:#}"),
            false => text.to_owned(),
        }
    }

    /// A heading.
    pub fn head(self, text: &str) -> String {
        self.with(Style::new().bold(), text)
    }

    /// A success.
    pub fn good(self, text: &str) -> String {
        self.with(AnsiColor::Green.on_default(), text)
    }

    /// A failure.
    pub fn bad(self, text: &str) -> String {
        self.with(AnsiColor::Red.on_default().bold(), text)
    }

    /// Something notable.
    pub fn note(self, text: &str) -> String {
        self.with(AnsiColor::Cyan.on_default(), text)
    }

    /// A warning.
    pub fn warn(self, text: &str) -> String {
        self.with(AnsiColor::Yellow.on_default(), text)
    }

    /// Less important text.
    pub fn dim(self, text: &str) -> String {
        self.with(Style::new().dimmed(), text)
    }
}
