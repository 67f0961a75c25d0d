//! Figures, not pass or fail: `cargo test --release --test runner measure -- --ignored --nocapture --test-threads 1`.
//! `MEASURE=text` takes only the throughput of programs that contain the text.

use std::fs;
use std::io::Read;
use std::time::{Duration, Instant};

use super::contract::Engine;

fn percentile(times: &mut [Duration], per_cent: usize) -> Duration {
    times.sort();
    times[(times.len() - 1) * per_cent / 100]
}

#[test]
#[ignore = "measures; run it alone, in release"]
fn measure_latency() {
    for (code, rounds) in [
        ("echo hi", 3000),
        ("x=1", 3000),
        ("x=$((x + 1)); echo $x", 3000),
        ("echo a | cat", 1000),
        ("f() { echo hi; }; f", 1000),
        ("/bin/true", 300),
        ("/bin/echo hi", 300),
        ("/bin/echo hi | /bin/cat", 200),
        ("y=$(/bin/echo hi)", 200),
    ] {
        let mut engine = Engine::start();
        engine.run("x=0");
        let mut times = Vec::new();
        for round in 0..rounds + 100 {
            let began = Instant::now();
            engine.run(code);
            if round >= 100 {
                times.push(began.elapsed());
            }
            engine.output();
        }
        println!("{code:32} p50 {:>9.1?}  p99 {:>9.1?}", percentile(&mut times, 50), percentile(&mut times, 99));
    }
    let mut times: Vec<Duration> = (0..50)
        .map(|_| {
            let began = Instant::now();
            let mut engine = Engine::start();
            engine.run("echo hi");
            began.elapsed()
        })
        .collect();
    println!("start to first end               p50 {:>9.1?}", percentile(&mut times, 50));
}

fn status_kib(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("proc");
    let line = status.lines().find(|line| line.starts_with(field)).expect("there");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

#[test]
#[ignore = "measures; run it alone, in release"]
fn measure_throughput() {
    let file = tempfile::NamedTempFile::new_in(std::env::temp_dir()).expect("a file");
    file.as_file().set_len(1 << 30).expect("room");
    let path = file.path().display().to_string();
    let line = "x".repeat(99);
    for (code, expected) in [
        ("/usr/bin/seq 1 5000000".to_owned(), 38_888_896u64),
        ("seq 1 5000000".to_owned(), 38_888_896),
        (format!("/bin/cat {path}"), 1 << 30),
        (format!("cat {path}"), 1 << 30),
        ("/usr/bin/head -c 1G /dev/zero".to_owned(), 1 << 30),
        ("head -c 1073741824 /dev/zero".to_owned(), 1 << 30),
        ("/usr/bin/head -c 1G /dev/zero | /bin/cat".to_owned(), 1 << 30),
        (format!("for i in $(seq 1 500000); do echo {line}; done"), 50_000_000),
        ("for i in $(seq 1 200); do /usr/bin/seq 1 50000; done".to_owned(), 200 * 288_894),
    ] {
        if std::env::var("MEASURE").is_ok_and(|wanted| !code.contains(&wanted)) {
            continue;
        }
        for pause in [Duration::ZERO, Duration::from_secs(5)] {
            let mut engine = Engine::start();
            let before = status_kib("VmRSS");
            let began = Instant::now();
            let id = engine.exec(&code);
            let mut stdout = engine.stdout.try_clone().expect("clones");
            let reader = std::thread::spawn(move || {
                let mut buffer = vec![0; 256 << 10];
                let (mut sum, mut most, mut paused) = (0u64, 0, pause.is_zero());
                while sum < expected {
                    let n = stdout.read(&mut buffer).unwrap_or(0);
                    if n == 0 {
                        break;
                    }
                    sum += n as u64;
                    if !paused && sum > 4 << 20 {
                        paused = true;
                        std::thread::sleep(pause);
                        most = status_kib("VmRSS");
                    }
                    if sum % (16 << 20) < n as u64 {
                        most = most.max(status_kib("VmRSS"));
                    }
                }
                (sum, most)
            });
            engine.patiently().until_end(id);
            let took = began.elapsed().saturating_sub(pause);
            let (sum, most) = reader.join().expect("reads");
            let rate = sum as f64 / 1e6 / took.as_secs_f64();
            let grown = most.saturating_sub(before) / 1024;
            let shown: String = code.chars().take(48).collect();
            println!(
                "{shown:48} pause {pause:>4.0?}: {sum:>10} of {expected} bytes, {rate:>6.0} MB/s, RSS +{grown} MiB"
            );
            assert_eq!(sum, expected);
        }
    }
}
