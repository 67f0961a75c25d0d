//! Runs the fuzz targets on their first inputs and on damaged ones, so that they stay valid between
//! runs of `scripts/fuzz`.

use std::path::Path;

macro_rules! targets {
    ($($name:ident = $path:literal),* $(,)?) => {
        $(
            #[path = $path]
            #[allow(clippy::async_yields_async, clippy::redundant_closure, clippy::unit_arg, reason = "they are another crate's, of other lints")]
            mod $name;
        )*
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        fn run(target: &str, bytes: &[u8]) {
            match target {
                $(stringify!($name) => Input::give($name::run as fn(&_), bytes),)*
                other => panic!("no target {other}"),
            }
        }
    };
}

targets! {
    bundle = "../../fuzz/inputs/bundle.rs",
    checkpoint = "../../fuzz/inputs/checkpoint.rs",
    config = "../../fuzz/inputs/config.rs",
    engine_state = "../../fuzz/inputs/engine_state.rs",
    error_line = "../../fuzz/inputs/error_line.rs",
    frames = "../../fuzz/inputs/frames.rs",
    messages = "../../fuzz/inputs/messages.rs",
    plan = "../../fuzz/inputs/plan.rs",
    runs = "../../fuzz/inputs/runs.rs",
    value_json = "../../fuzz/inputs/value_json.rs",
    wire = "../../fuzz/inputs/wire.rs",
    words = "../../fuzz/inputs/words.rs",
    worker_link = "../../fuzz/inputs/worker_link.rs",
}

#[path = "../../fuzz/inputs/seeds.rs"]
mod seeds;

/// The input type of a target.
trait Input {
    fn give(self, bytes: &[u8]);
}

impl Input for fn(&[u8]) {
    fn give(self, bytes: &[u8]) {
        self(bytes);
    }
}

impl Input for fn(&str) {
    fn give(self, bytes: &[u8]) {
        if let Ok(text) = std::str::from_utf8(bytes) {
            self(text);
        }
    }
}

/// Damaged copies of an input, the same in each run.
fn damaged(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut all = vec![bytes[..bytes.len() / 2].to_vec(), [bytes, bytes].concat()];
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for _ in 0..60 {
        let mut other = bytes.to_vec();
        for _ in 0..3 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (state >> 33) as usize % other.len().max(1);
            if let Some(byte) = other.get_mut(at) {
                *byte = (state >> 56) as u8;
            }
        }
        all.push(other);
    }
    all
}

#[test]
fn fuzz_targets_run_seed_inputs() {
    let seeds = seeds::all();
    for (target, name, bytes) in &seeds {
        println!("{target}: {name}");
        run(target, bytes);
        damaged(bytes).iter().for_each(|bytes| run(target, bytes));
    }
    for left in ["", ".sock"] {
        let left = std::env::temp_dir().join(format!("ryokan-fuzz-{}{left}", std::process::id()));
        let _ = std::fs::remove_dir_all(&left).or_else(|_| std::fs::remove_file(&left));
    }
    for target in NAMES {
        assert!(seeds.iter().any(|(of, ..)| of == target), "{target} has no first input");
    }
}

#[test]
fn fuzz_targets_match_fuzz_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    for (folder, also) in [("fuzz_targets", ""), ("inputs", "seeds")] {
        let files = std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let mut names: Vec<String> = files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        names.retain(|name| name != also);
        names.sort();
        assert_eq!(names, NAMES, "{folder}");
    }
}
