//! Reactions of the model.

use proptest::prelude::*;

use super::fixtures::{NOW_MS, event, host, kernel, pool};
use super::key::Key;
use super::layout::Size;
use super::list::Column;
use super::mode::Mode;
use super::model::{Action, Deed, Input, Inspection, LOOKED_AT, Link, Look, Model, Question};
use crate::core::error::Error;
use crate::core::info::KernelInfo;

const SIZE: Size = Size { columns: 100, lines: 24 };

fn model() -> Model {
    Model::new(NOW_MS, SIZE, host(), false)
}

/// A model that contains these kernels.
fn knowing(infos: &[KernelInfo]) -> Model {
    let mut model = model();
    model.step(NOW_MS, Input::Ticked);
    model.step(NOW_MS, Input::PoolsTold(vec![pool("kaish", 3, 3)]));
    model.step(NOW_MS, Input::Listed(infos.to_vec()));
    model
}

fn few() -> Vec<KernelInfo> {
    vec![kernel("a", "ready"), kernel("b", "busy"), kernel("c", "stopped")]
}

fn press(model: &mut Model, key: Key) -> Vec<Action> {
    model.step(model.now_ms, Input::Pressed(key))
}

fn type_in(model: &mut Model, text: &str) {
    for c in text.chars() {
        assert_eq!(press(model, Key::Char(c)), []);
    }
}

fn selected(model: &Model) -> String {
    model.list.selected().and_then(|id| model.kernels.get(&id)).map(|kernel| kernel.name()).unwrap_or_default()
}

#[test]
fn tick_requests_due_data_once() {
    let mut model = model();
    assert_eq!(model.step(NOW_MS, Input::Ticked), [Action::List, Action::Pools]);
    assert_eq!(model.step(NOW_MS + 1000, Input::Ticked), [], "both are under way");
    assert_eq!(model.step(NOW_MS + 1100, Input::PoolsTold(vec![])), [], "once a second");
    assert_eq!(model.step(NOW_MS + 1200, Input::Listed(few())), []);
    let looked: Vec<String> = few()[..2].iter().map(|info| info.id.to_string()).collect();
    let actions = model.step(NOW_MS + 2000, Input::Ticked);
    assert_eq!(actions[0], Action::Pools, "the list came 0.8 s ago");
    let Action::Look { kernels, with_usage: false } = &actions[1] else { panic!("{actions:?}") };
    assert_eq!(kernels.len(), 2, "the stopped one has nothing that changes unseen");
    assert!(looked.iter().all(|id| kernels.contains(id)));
    assert_eq!(model.step(NOW_MS + 3000, Input::Ticked), [Action::List]);
}

#[test]
fn large_hosts_poll_rarely() {
    let infos: Vec<KernelInfo> = (0..1000).map(|n| kernel(&format!("k{n:04}"), "ready")).collect();
    let mut model = knowing(&infos);
    assert_eq!(model.list_interval_ms(), 20_000);
    let (mut lists, mut looked) = (0, 0);
    for second in 1..=100 {
        let now_ms = NOW_MS + second * 1000;
        for action in model.step(now_ms, Input::Ticked) {
            match action {
                Action::List => {
                    lists += 1;
                    model.step(now_ms, Input::Listed(infos.clone()));
                }
                Action::Look { kernels, with_usage } => {
                    assert!(with_usage && kernels.len() <= LOOKED_AT);
                    looked += kernels.len();
                    model.step(now_ms, Input::Looked { looks: vec![], gone: vec![] });
                }
                Action::Pools => drop(model.step(now_ms, Input::PoolsTold(vec![]))),
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(lists, 5);
    assert!(
        (90 * model.lines()..=100 * model.lines()).contains(&looked),
        "{looked}: those on the screen, once a second"
    );
    let stopped: Vec<KernelInfo> = (0..1000).map(|n| kernel(&format!("k{n:04}"), "stopped")).collect();
    assert_eq!(knowing(&stopped).list_interval_ms(), 2000, "no worker has to answer");
}

#[test]
fn events_update_then_refresh() {
    let mut model = knowing(&few());
    let id = kernel("a", "").id;
    let entered = |sequence, kernel: &str, kind: &str, state: &str| Input::Happened {
        event: event(sequence, kernel, kind, &format!(r#"{{"state":"{state}","reason":"asked"}}"#)),
        past: false,
    };
    let actions = model.step(NOW_MS + 5, entered(5, "a", "kernel_stopped", "stopped"));
    let a = &model.kernels[&id];
    assert_eq!(
        (a.info.state.as_str(), a.info.state_reason.as_str(), a.since_ms),
        ("stopped", "asked", Some(NOW_MS + 5))
    );
    assert_eq!(actions, [Action::Look { kernels: vec![id.to_string()], with_usage: false }]);
    let actions = model.step(NOW_MS + 6, entered(6, "new", "kernel_ready", "ready"));
    assert_eq!(actions, [], "one look at a time");
    let look = Look { info: kernel("a", "stopped"), with_usage: false, jobs: 0 };
    let actions = model.step(NOW_MS + 7, Input::Looked { looks: vec![look], gone: vec![] });
    assert_eq!(actions, [Action::Look { kernels: vec!["new".into()], with_usage: false }]);
    let look = Look { info: kernel("new", "ready"), with_usage: true, jobs: 2 };
    model.step(NOW_MS + 8, Input::Looked { looks: vec![look], gone: vec!["b".into()] });
    let names: Vec<String> = model.list.shown().iter().map(|id| model.kernels[id].name()).collect();
    assert_eq!(names, ["a", "c", "new"]);
    let removed = Input::Happened { event: event(9, "new", "kernel_removed", "{}"), past: false };
    model.step(NOW_MS + 9, removed);
    model.settle();
    assert_eq!(model.list.shown().len(), 2);
}

#[test]
fn refresh_keeps_known_memory() {
    let mut known = kernel("a", "ready");
    known.memory_bytes = 7 << 20;
    let mut model = knowing(&[known]);
    let look = |state, with_usage, memory_bytes| Look {
        info: KernelInfo { memory_bytes, ..kernel("a", state) },
        with_usage,
        jobs: 1,
    };
    for (look, memory_bytes, jobs) in [
        (look("busy", false, 0), 7 << 20, Some(1)),
        (look("busy", true, 9 << 20), 9 << 20, Some(1)),
        (look("stopped", false, 0), 0, None),
    ] {
        model.step(NOW_MS, Input::Looked { looks: vec![look], gone: vec![] });
        let kernel = model.kernels.values().next().expect("it is there");
        assert_eq!((kernel.info.memory_bytes, kernel.jobs), (memory_bytes, jobs));
    }
}

#[test]
fn rates_count_new_executions() {
    let with =
        |name: &str, executions, created_at_ms| KernelInfo { executions, created_at_ms, ..kernel(name, "ready") };
    let mut model = knowing(&[with("old", 100, 0)]);
    assert_eq!(model.executions.per_second(), None);
    // "hidden" existed before it was first seen; "new" is new, so all its executions count.
    let infos = vec![with("old", 104, 0), with("hidden", 50, 0), with("new", 2, NOW_MS + 500)];
    model.step(NOW_MS + 2000, Input::Listed(infos.clone()));
    assert_eq!(model.executions.per_second(), Some(3.0));
    model.step(NOW_MS + 3000, Input::Listed(infos[..1].to_vec()));
    assert_eq!(model.executions.per_second(), Some(2.0), "who leaves takes nothing away");
    model.step(NOW_MS + 3000, Input::Ticked);
    for sequence in 1..=4 {
        model.step(NOW_MS, Input::Happened { event: event(sequence, "x", "kernel_created", "{}"), past: false });
    }
    model.step(NOW_MS, Input::Happened { event: event(5, "x", "kernel_crashed", "{}"), past: false });
    model.step(NOW_MS + 5000, Input::Ticked);
    assert_eq!((model.created.per_second(), model.troubles.per_second()), (Some(4.0 / 5.0), Some(1.0 / 5.0)));
}

#[test]
fn stop_is_confirmed_once() {
    let (id, stop) = (kernel("b", "").id, Deed::Stop { force: false });
    let mut model = knowing(&few());
    press(&mut model, Key::Down);
    assert_eq!(selected(&model), "b");
    for no in [Key::Char('n'), Key::Escape, Key::Enter, Key::Char('x')] {
        assert_eq!(press(&mut model, Key::Char('x')), []);
        assert!(matches!(&model.mode, Mode::Confirm { deed, .. } if *deed == stop));
        assert_eq!(press(&mut model, no), [], "{no:?}");
        assert_eq!(model.mode, Mode::List);
    }
    press(&mut model, Key::Char('x'));
    assert_eq!(press(&mut model, Key::Char('y')), [Action::Do(id, stop.clone())]);
    press(&mut model, Key::Char('x'));
    assert_eq!(press(&mut model, Key::Char('y')), [], "it is being stopped");
    press(&mut model, Key::Char('x'));
    assert_eq!(press(&mut model, Key::Char('f')), [Action::Do(id, Deed::Stop { force: true })]);
    let done = Input::Done { id, deed: stop.clone(), result: Err(Error::refused("no").hint("ask")) };
    model.step(NOW_MS + 9, done);
    let note = model.note().expect("it is said");
    assert_eq!((note.text.as_str(), note.bad), ("b: no (ask)", true));
    press(&mut model, Key::Char('x'));
    assert_eq!(press(&mut model, Key::Char('y')), [Action::Do(id, stop)]);
    model.step(NOW_MS + 60_000, Input::Ticked);
    assert_eq!(model.note(), None, "notes go");
}

#[test]
fn confirmation_keeps_its_kernel() {
    let mut model = knowing(&few());
    press(&mut model, Key::Char('i'));
    let mut infos = few();
    infos.insert(0, kernel("Z", "ready"));
    infos.retain(|info| info.spec.name.as_str() != "a");
    model.step(NOW_MS, Input::Listed(infos));
    assert_eq!(press(&mut model, Key::Char('y')), [], "a is gone, and nobody else is meant");
    assert!(model.note().is_some_and(|note| note.bad));
}

#[test]
fn assume_yes_skips_confirmation() {
    let mut model = knowing(&few());
    model.assume_yes = true;
    let id = kernel("a", "").id;
    assert_eq!(press(&mut model, Key::Char('x')), [Action::Do(id, Deed::Stop { force: false })]);
    assert_eq!(press(&mut model, Key::Char('i')), [Action::Do(id, Deed::Interrupt)]);
    assert_eq!(press(&mut model, Key::Char('s')), [Action::Do(id, Deed::Start)]);
}

#[test]
fn checkpoint_prompt_takes_name() {
    let id = kernel("a", "").id;
    let mut model = knowing(&few());
    press(&mut model, Key::Char('c'));
    type_in(&mut model, "good q");
    press(&mut model, Key::Backspace);
    model.step(NOW_MS, Input::Pasted("x\u{1b}[2J\nmore".into()));
    assert_eq!(press(&mut model, Key::Enter), [Action::Do(id, Deed::Checkpoint("good x[2J".into()))]);
    press(&mut model, Key::Char('c'));
    type_in(&mut model, "never");
    assert_eq!((press(&mut model, Key::Escape), &model.mode), (vec![], &Mode::List));
}

#[test]
fn pasted_text_triggers_no_keys() {
    let mut model = knowing(&few());
    for mode in ["", "x", "?"] {
        mode.chars().for_each(|key| drop(press(&mut model, Key::Char(key))));
        let before = model.clone();
        assert_eq!(model.step(NOW_MS, Input::Pasted("xyqxy".into())), []);
        assert_eq!(model, before);
        press(&mut model, Key::Escape);
    }
}

#[test]
fn filter_applies_while_typing() {
    let mut model = knowing(&few());
    press(&mut model, Key::Char('/'));
    type_in(&mut model, "busy");
    assert_eq!((model.list.shown().len(), selected(&model)), (1, "b".into()));
    press(&mut model, Key::Enter);
    press(&mut model, Key::Char('/'));
    type_in(&mut model, "q");
    assert_eq!(model.list.shown().len(), 0);
    press(&mut model, Key::Escape);
    assert_eq!(model.list.filter, "busy", "as it was");
    press(&mut model, Key::Escape);
    assert_eq!((model.list.shown().len(), selected(&model)), (3, "b".into()));
}

#[test]
fn sort_keys_change_order() {
    let mut model = knowing(&few());
    press(&mut model, Key::Right);
    press(&mut model, Key::Char('>'));
    assert_eq!(model.list.column, Column::State);
    assert_eq!(selected(&model), "a", "the selection stays on its kernel");
    press(&mut model, Key::Home);
    assert_eq!(selected(&model), "b");
    press(&mut model, Key::Char('r'));
    press(&mut model, Key::Home);
    assert_eq!(selected(&model), "c");
    press(&mut model, Key::End);
    press(&mut model, Key::PageUp);
    assert_eq!(selected(&model), "c");
}

#[test]
fn inspection_once_per_second() {
    let id = kernel("a", "").id;
    let mut model = knowing(&few());
    assert_eq!(press(&mut model, Key::Enter), [Action::Inspect(id)]);
    assert_eq!(press(&mut model, Key::Down), []);
    let found = Inspection { jobs: vec![], journal: vec![] };
    assert_eq!(model.step(NOW_MS + 10, Input::Inspected(id, Ok(found.clone()))), []);
    assert_eq!(model.inspected, Some((id, found)));
    let inspections =
        |actions: Vec<Action>| actions.iter().filter(|action| matches!(action, Action::Inspect(_))).count();
    assert_eq!(inspections(model.step(NOW_MS + 500, Input::Ticked)), 0);
    assert_eq!(inspections(model.step(NOW_MS + 1000, Input::Ticked)), 1);
    assert_eq!(inspections(model.step(NOW_MS + 2000, Input::Ticked)), 0, "under way");
    press(&mut model, Key::Char('x'));
    assert_eq!(model.mode.inspects(), Some(id), "behind the question");
    press(&mut model, Key::Char('n'));
    assert!(matches!(model.mode, Mode::Inspect { .. }));
    press(&mut model, Key::Char('q'));
    assert_eq!(model.mode, Mode::List);
    assert_eq!(press(&mut model, Key::Char('q')), [Action::Quit]);
}

#[test]
fn lost_daemon_is_reconnected() {
    let mut model = knowing(&few());
    press(&mut model, Key::Char('s'));
    assert_eq!(model.step(NOW_MS + 1000, Input::Lost("gone".into())), [], "not at once: it may be leaving");
    assert!(matches!(&model.link, Link::Waiting { why, .. } if why == "gone"));
    assert!(model.note().is_some_and(|note| note.text.contains("may have been done")));
    assert_eq!(model.kernels.len(), 3, "what was known last is still shown");
    assert_eq!(model.step(NOW_MS + 2000, Input::Ticked), [Action::Connect]);
    assert_eq!(model.step(NOW_MS + 2500, Input::NotConnected("still gone".into())), [], "with the next tick");
    assert_eq!(model.step(NOW_MS + 3000, Input::Ticked), [Action::Connect]);
    assert_eq!(model.step(NOW_MS + 4000, Input::Ticked), [], "under way");
    assert_eq!(press(&mut model, Key::Char('s')), [], "nobody would do it");
    assert_eq!(model.step(NOW_MS + 4100, Input::Connected(host())), [Action::List, Action::Pools]);
    assert!(matches!(model.link, Link::Up { .. }));
    assert_eq!(model.executions.per_second(), None);
}

#[test]
fn new_host_resets_event_cursor() {
    let mut model = knowing(&few());
    model.step(NOW_MS, Input::Happened { event: event(9, "a", "kernel_ready", "{}"), past: true });
    assert_eq!(model.events_known_of(&host()), 9);
    let mut other = host();
    other.id = crate::core::ids::HostId::from_bytes([8; 16]);
    assert_eq!((model.events_known_of(&other), model.kernels.len()), (0, 0));
}

#[test]
fn failed_request_retries_on_tick() {
    let mut model = model();
    model.step(NOW_MS, Input::Ticked);
    for question in [Question::Pools, Question::List, Question::Look] {
        assert_eq!(model.step(NOW_MS + 10, Input::Failed(question, Error::internal("no"))), []);
    }
    assert_eq!(model.step(NOW_MS + 1010, Input::Ticked), [Action::List, Action::Pools]);
}

#[test]
fn control_keys_always_work() {
    let mut model = knowing(&few());
    for before in ["", "/", "c", "x", "?"] {
        before.chars().for_each(|key| drop(press(&mut model, Key::Char(key))));
        assert_eq!(press(&mut model, Key::Control('z')), [Action::Suspend]);
        assert_eq!(press(&mut model, Key::Control('l')), [Action::Redraw]);
        assert_eq!(press(&mut model, Key::Control('c')), [Action::Quit]);
        press(&mut model, Key::Escape);
    }
}

/// Pending requests to the daemon.
#[derive(Debug, Default)]
struct Open(Vec<Action>);

impl Open {
    fn add(&mut self, actions: Vec<Action>) -> Result<(), TestCaseError> {
        for action in actions {
            if matches!(action, Action::Quit | Action::Suspend | Action::Redraw) {
                continue;
            }
            let same = |other: &Action| match (&action, other) {
                (Action::Do(..), other) => *other == action,
                (action, other) => std::mem::discriminant(action) == std::mem::discriminant(other),
            };
            prop_assert!(!self.0.iter().any(same), "{action:?} is under way: {:?}", self.0);
            if let Action::Look { kernels, .. } = &action {
                prop_assert!(kernels.len() <= LOOKED_AT);
            }
            self.0.push(action);
        }
        Ok(())
    }

    fn answer(&mut self, which: usize, kernels: u8) -> Option<Input> {
        (!self.0.is_empty()).then(|| {
            let infos =
                || (0..kernels).map(|n| kernel(&format!("k{n}"), ["ready", "busy", "stopped"][usize::from(n % 3)]));
            match self.0.remove(which % self.0.len()) {
                Action::List => Input::Listed(infos().collect()),
                Action::Pools if kernels.is_multiple_of(2) => Input::Failed(Question::Pools, Error::internal("x")),
                Action::Pools => Input::PoolsTold(vec![]),
                Action::Look { kernels: gone, .. } if kernels.is_multiple_of(2) => {
                    Input::Looked { looks: vec![], gone }
                }
                Action::Look { .. } => {
                    let look = |info| Look { info, with_usage: false, jobs: 1 };
                    Input::Looked { looks: infos().map(look).collect(), gone: vec![] }
                }
                Action::Inspect(id) => Input::Inspected(id, Ok(Inspection { jobs: vec![], journal: vec![] })),
                Action::Do(id, deed) => Input::Done { id, deed, result: Ok("done".into()) },
                Action::Connect if kernels.is_multiple_of(2) => Input::NotConnected("no".into()),
                Action::Connect => Input::Connected(host()),
                Action::Quit | Action::Suspend | Action::Redraw => Input::Ticked,
            }
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any sequence of inputs: at most one pending request of each kind, and the screen can be
    /// drawn.
    #[test]
    fn one_pending_request_per_kind(
        steps in prop::collection::vec((0u8..10, 0u8..40, any::<u8>(), 0i64..1500), 1..120)
    ) {
        let keys = "jkgG<>r/?hxyfsciq\u{1b}nz ";
        let mut model = model();
        let mut open = Open::default();
        let mut now_ms = NOW_MS;
        for (what, number, key, later) in steps {
            now_ms += later;
            let input = match what {
                0..=2 => open.answer(usize::from(key), number).unwrap_or(Input::Ticked),
                3 | 4 => Input::Ticked,
                5 | 6 => match keys.chars().nth(usize::from(key) % keys.chars().count()) {
                    Some('\u{1b}') | None => Input::Pressed(Key::Escape),
                    Some(' ') => Input::Pressed(Key::Enter),
                    Some(letter) => Input::Pressed(Key::Char(letter)),
                },
                7 => {
                    let kind = ["kernel_created", "kernel_removed", "kernel_ready", "x_not_y"][usize::from(key % 4)];
                    let name = format!("k{number}");
                    Input::Happened { event: event(1, &name, kind, r#"{"state":"ready"}"#), past: key > 200 }
                }
                8 => Input::Resized(Size { columns: u16::from(key), lines: u16::from(number) }),
                _ if key < 40 => {
                    open.0.clear();
                    Input::Lost("x".into())
                }
                _ => Input::CaughtUp,
            };
            let actions = model.step(now_ms, input);
            open.add(actions)?;
            if later % 4 != 0 {
                continue;
            }
            model.settle();
            let size = model.size;
            let mut buffer = ratatui::buffer::Buffer::empty(ratatui::layout::Rect::new(0, 0, size.columns, size.lines));
            super::view::draw(&model, super::view::Theme { colours: true }, &mut buffer);
        }
    }
}
