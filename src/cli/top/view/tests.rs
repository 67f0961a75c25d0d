//! The drawn screen, as text.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Color;

use super::{Theme, cursor, draw, shown, span};
use crate::cli::top::fixtures::{NOW_MS, event, host, kernel, pool};
use crate::cli::top::key::Key;
use crate::cli::top::layout::Size;
use crate::cli::top::model::{Input, Inspection, Model};
use crate::core::info::{Job, JournalEntry, KernelInfo};
use crate::core::usage::DiskFigures;

fn model(columns: u16, lines: u16) -> Model {
    let mut model = Model::new(NOW_MS, Size { columns, lines }, host(), false);
    model.step(NOW_MS, Input::Ticked);
    model.step(NOW_MS, Input::PoolsTold(vec![pool("kaish", 3, 3), pool("python", 1, 3)]));
    let disk = Some(DiskFigures { workspace_bytes: 2 << 20, history_bytes: 1 << 20, ..DiskFigures::default() });
    let busy = KernelInfo { memory_bytes: 45 << 20, executions: 12, disk, ..kernel("data", "busy") };
    let crashed = KernelInfo { state_reason: "killed by\u{1b}[31m signal 9".into(), ..kernel("odd", "crashed") };
    model.step(NOW_MS, Input::Listed(vec![busy, crashed, kernel("web-server", "stopped")]));
    let crash =
        event(3, "odd", "kernel_crashed", "{\"state\":\"crashed\",\"reason\":\"killed by\\u001b[31m signal 9\"}");
    model.step(NOW_MS, Input::Happened { event: crash, past: false });
    model.settle();
    model.now_ms = NOW_MS + 5003;
    model
}

fn backend(model: &Model, theme: Theme) -> TestBackend {
    let mut terminal = Terminal::new(TestBackend::new(model.size.columns, model.size.lines)).expect("a terminal");
    let drawn = terminal.draw(|frame| {
        draw(model, theme, frame.buffer_mut());
        if let Some(position) = cursor(model) {
            frame.set_cursor_position(position);
        }
    });
    drawn.expect("it draws");
    terminal.backend().clone()
}

fn screen(model: &Model) -> Vec<String> {
    let backend = backend(model, Theme { colours: false });
    let buffer = backend.buffer();
    let line = |y| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..buffer.area.height).map(line).collect()
}

fn press(model: &mut Model, keys: &str) {
    for c in keys.chars() {
        model.step(model.now_ms, Input::Pressed(if c == '\r' { Key::Enter } else { Key::Char(c) }));
    }
}

#[test]
fn typical_screen_text() {
    assert_eq!(
        screen(&model(120, 12)),
        [
            "ryokan top  mill (x86_64, ryokan 0.1.0)  2025-11-21T22:00:05Z",
            "3 kernels  1 busy  0 ready  1 crashed  memory 45 MiB  executions -  created -  errors - (1 in all)",
            "pool kaish   3 ready of 3 wanted, 0 in creation, 2 with kernels, 5 taken, 1 missed",
            "pool python  1 ready of 3 wanted, 2 in creation, 2 with kernels, 5 taken, 1 missed",
            "NAME▼       ENGINE   STATE      SINCE   EXECUTIONS      MEMORY        DISK   IDLE   JOBS  WHY",
            "data        kaish    busy           -           12      45 MiB       3 MiB      -      -",
            "odd         kaish    crashed       5s            0           -           -    95s      -  killed by\\u{1b}[31m signal 9",
            "web-server  kaish    stopped        -            0           -           -    95s      -",
            "",
            "",
            "",
            "? help  Enter inspect  s start  x stop  c checkpoint  i interrupt  / filter  ←→ sort  q quit",
        ]
        .map(|line| line.replace("95s", " 1m"))
    );
}

#[test]
fn small_screens_show_kernels_first() {
    assert_eq!(
        screen(&model(40, 6)),
        [
            "ryokan top  mill (x86_64, ryokan 0.1.0)",
            "3 kernels  1 busy  0 ready  1 crashed  m",
            "NAME▼       STATE         MEMORY",
            "data        busy          45 MiB",
            "odd         crashed            -",
            "? help  Enter inspect  s start  x stop",
        ]
    );
    assert_eq!(screen(&model(12, 3)), ["NAME▼", "data", "? help  Ente"]);
    assert_eq!(screen(&model(5, 1)), ["da"].map(|_| "data"));
    assert_eq!(screen(&model(3, 1)), ["da…"]);
    let mut asked = model(20, 1);
    press(&mut asked, "x");
    assert_eq!(screen(&asked), ["stop data? y: after"], "a question is more than a kernel");
}

#[test]
fn any_screen_size_renders() {
    for (columns, lines) in [(0, 0), (1, 1), (0, 5), (5, 0), (1, 40), (300, 2), (500, 200), (2, 2), (80, 3)] {
        for keys in ["", "/abc", "?", "\r", "x", "i", "cname", "\rcname"] {
            let mut model = model(columns, lines);
            press(&mut model, keys);
            let _ = backend(&model, Theme { colours: true });
        }
    }
}

#[test]
fn prompts_use_last_line() {
    for (keys, line) in [
        ("x", "stop data? y: after what runs, f: interrupt what runs, any other key: no"),
        ("i", "interrupt what runs in data? y: yes, any other key: no"),
        ("cgood", "name of the checkpoint of data (Enter takes it, Esc does not): good"),
        ("/o", "filter: o"),
        ("?", "any key leads back"),
        (
            "/od\r",
            "1 with od  ? help  Enter inspect  s start  x stop  c checkpoint  i interrupt  / filter  ←→ sort  q q",
        ),
        ("s", "starting data …"),
    ] {
        let mut model = model(100, 12);
        press(&mut model, keys);
        let screen = screen(&model);
        assert_eq!(screen.last().map(String::as_str), Some(line.trim_end()), "{keys:?}");
    }
    let mut typed = model(100, 12);
    press(&mut typed, "/dätä");
    let position = cursor(&typed).expect("there is a cursor");
    assert_eq!((position.x, position.y), (12, 11));
}

#[test]
fn details_screen_contents() {
    let mut model = model(120, 60);
    press(&mut model, "j\r");
    let id = kernel("odd", "").id;
    let entry = JournalEntry {
        sequence: 4,
        at_ms: NOW_MS,
        kind: "execution".into(),
        actor: "test".into(),
        exec: 2,
        text: "print(1)\u{1b}]0;title\u{7}".into(),
        status: "failed".into(),
        code: 1,
        err: "NameError\u{9b}31m".into(),
        duration_us: 1500,
        output_bytes: 0,
        truncated_bytes: 0,
    };
    let jobs = vec![Job { id: "1".into(), command: "sleep 9\u{202e}\n".into() }];
    model.step(model.now_ms, Input::Inspected(id, Ok(Inspection { jobs, journal: vec![entry] })));
    let text = screen(&model).join("\n");
    for line in [
        "Kernel odd",
        "state         crashed (killed by\\u{1b}[31m signal 9)",
        "crashed (killed by\\u{1b}[31m signal 9) since 2025-11-21T22:00:00Z, 5 s ago; 0 executions, memory 0 B of 512 MiB",
        "newest events",
        "    3  2025-11-21T22:00:00Z  kernel_crashed  odd  {\"state\":\"crashed\"",
        "journal, newest first",
        "#2 failed 1 (1 ms) print(1)\\u{1b}]0;title\\u{7}  NameError\\u{9b}31m",
        "background jobs",
        "1  sleep 9\\u{202e}",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
    model.step(model.now_ms, Input::Resized(Size { columns: 120, lines: 12 }));
    press(&mut model, "G");
    assert!(screen(&model).join("\n").contains("owner         uid 1000"));
    press(&mut model, "g");
    assert!(screen(&model).join("\n").contains("5 s ago; 0 executions"));
}

#[test]
fn lost_daemon_is_shown() {
    let mut model = model(80, 10);
    model.step(model.now_ms, Input::Lost("the connection\u{1b}c was lost".into()));
    model.step(model.now_ms + 65_000, Input::Ticked);
    let screen = screen(&model);
    assert_eq!(screen[0], "ryokan top  no daemon for 1m, waiting for one: the connection\\u{1b}c was lost");
    assert!(screen.iter().any(|line| line.starts_with("web-server")), "what was known last");
    let mut silent = self::model(80, 10);
    silent.now_ms += 60_000;
    assert!(self::screen(&silent)[0].contains("no answer for 1m"), "{:?}", self::screen(&silent)[0]);
}

#[test]
fn empty_host_shows_hint() {
    let mut model = Model::new(NOW_MS, Size { columns: 80, lines: 8 }, host(), false);
    assert!(screen(&model).join("\n").contains("asking for kernels"));
    model.step(NOW_MS, Input::Listed(vec![]));
    assert!(screen(&model).join("\n").contains("no kernels; make one: ryokan new NAME"));
}

#[test]
fn colours_can_be_disabled() {
    for colours in [false, true] {
        let backend = backend(&model(110, 12), Theme { colours });
        let coloured = backend.buffer().content().iter().filter(|cell| cell.fg != Color::Reset).count();
        assert_eq!(coloured > 0, colours);
    }
}

#[test]
fn cells_have_no_control_chars() {
    let all: String = (0..0x300).chain(0x2000..0x2100).filter_map(char::from_u32).collect();
    assert!(!shown(&all).chars().any(|c| c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c)));
    let mut model = model(200, 20);
    model.step(model.now_ms, Input::Lost(all));
    let backend = backend(&model, Theme { colours: true });
    assert!(!backend.buffer().content().iter().any(|cell| cell.symbol().chars().any(char::is_control)));
}

#[test]
fn time_spans_use_one_unit() {
    for (ms, text) in [(-5, "0s"), (59_999, "59s"), (60_000, "1m"), (7_200_000, "2h"), (172_800_000, "2d")] {
        assert_eq!(span(ms), text);
    }
}
