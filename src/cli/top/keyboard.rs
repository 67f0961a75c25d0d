//! Terminal events as inputs of the model. Reading blocks, so it has its own thread, which ends
//! with the process.

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;

use super::key::Key;
use super::layout::Size;
use super::model::Input;

/// Capacity of the channel; the thread blocks while it is full.
const WAITING: usize = 64;

/// Starts to read; the channel closes when the terminal does.
///
/// # Errors
/// If the thread cannot be started.
pub fn read() -> std::io::Result<mpsc::Receiver<Input>> {
    let (inputs, taken) = mpsc::channel(WAITING);
    std::thread::Builder::new().name("keyboard".into()).spawn(move || {
        while let Ok(event) = event::read() {
            if let Some(input) = input_of(event)
                && inputs.blocking_send(input).is_err()
            {
                return;
            }
        }
    })?;
    Ok(taken)
}

fn input_of(event: Event) -> Option<Input> {
    match event {
        Event::Key(key) => key_of(key).map(Input::Pressed),
        Event::Paste(text) => Some(Input::Pasted(text)),
        Event::Resize(columns, lines) => Some(Input::Resized(Size { columns, lines })),
        // Never enabled.
        Event::FocusGained | Event::FocusLost | Event::Mouse(_) => None,
    }
}

fn key_of(key: KeyEvent) -> Option<Key> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    Some(match key.code {
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::Left => Key::Left,
        KeyCode::Right => Key::Right,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::F(1) => Key::Char('?'),
        KeyCode::Char(letter) if control => Key::Control(letter.to_ascii_lowercase()),
        KeyCode::Char(_) if key.modifiers.contains(KeyModifiers::ALT) => return None,
        KeyCode::Char(letter) => Key::Char(letter),
        // Crossterm's enum is open; other keys have no meaning here.
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_events_map_to_inputs() {
        let press = |code, modifiers| input_of(Event::Key(KeyEvent::new(code, modifiers)));
        for (code, modifiers, key) in [
            (KeyCode::Char('x'), KeyModifiers::NONE, Some(Key::Char('x'))),
            (KeyCode::Char('G'), KeyModifiers::SHIFT, Some(Key::Char('G'))),
            (KeyCode::Char('C'), KeyModifiers::CONTROL, Some(Key::Control('c'))),
            (KeyCode::Char('x'), KeyModifiers::ALT, None),
            (KeyCode::F(1), KeyModifiers::NONE, Some(Key::Char('?'))),
            (KeyCode::Esc, KeyModifiers::NONE, Some(Key::Escape)),
            (KeyCode::Insert, KeyModifiers::NONE, None),
        ] {
            assert_eq!(press(code, modifiers), key.map(Input::Pressed), "{code:?}");
        }
        let released = KeyEvent::new_with_kind(KeyCode::Char('x'), KeyModifiers::NONE, KeyEventKind::Release);
        assert_eq!(input_of(Event::Key(released)), None);
        assert_eq!(input_of(Event::Resize(80, 24)), Some(Input::Resized(Size { columns: 80, lines: 24 })));
    }
}
