//! How long it takes to look at many checkpoints. Run by hand: `cargo test --release --test runner workflow::speed -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;

use super::named;
use crate::support::{Host, kernel, out};

const CHECKPOINTS: usize = 1000;
const MOST: Duration = Duration::from_millis(50);

#[test]
#[ignore = "it measures: for a release build on a quiet machine"]
fn log_and_diff_speed() {
    let host = Host::start();
    host.with(async |client| {
        let k = kernel(&client, "k", EngineName::Kaish).await;
        for n in 0..CHECKPOINTS {
            if n % 10 == 0 {
                out(&k, &format!("x={n}; echo {n} > f{}", n / 10)).await;
            }
            k.checkpoint(&named(&format!("c{n}"))).await.unwrap();
        }
    });
    for args in [
        &["log", "k"][..],
        &["log", "k", "--graph"],
        &["diff", "k", "c0", "c999", "--stat"],
        &["diff", "k", "c500", "--stat"],
    ] {
        let mut times: Vec<Duration> = (0..20)
            .map(|_| {
                let began = Instant::now();
                host.ok(args);
                began.elapsed()
            })
            .collect();
        times.sort();
        eprintln!("{args:?}: median {:?}, slowest {:?}", times[times.len() / 2], times[times.len() - 1]);
        assert!(cfg!(debug_assertions) || times[times.len() / 2] <= MOST, "{args:?}: {times:?}");
    }
}
