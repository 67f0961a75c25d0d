//! What an execution, a start and a session's memory cost. The bounds are for busy hosts; the figures are printed.

use std::time::{Duration, Instant};

use super::kit::Engine;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn executions_and_starts_are_quick() {
    let starts = (0..9).map(|_| {
        let begun = Instant::now();
        let engine = Engine::start();
        let took = begun.elapsed();
        drop(engine);
        took
    });
    let start = median(starts.collect());
    let mut engine = Engine::start();
    let mut timed = |code: &str, count: usize| {
        let times = (0..count).map(|_| {
            let begun = Instant::now();
            let id = engine.begin(code);
            while !matches!(engine.event().0, crate::link::frames::Event::End { id: ended, .. } if ended == id) {}
            begun.elapsed()
        });
        median(times.collect())
    };
    let (nothing, function) = (timed(":", 300), timed("f() { echo; }; f", 100));
    let exits = timed("exit 0", 30);
    timed("big=({1..20000})", 1);
    let large = timed(":", 30);
    println!(
        "start {start:?}, `:` {nothing:?}, a function {function:?}, `exit 0` {exits:?}, `:` beside 20000 elements {large:?}"
    );
    assert!(start < Duration::from_millis(500) && nothing < Duration::from_millis(50), "{start:?} {nothing:?}");
    assert!(exits < Duration::from_millis(500), "{exits:?}");
}
