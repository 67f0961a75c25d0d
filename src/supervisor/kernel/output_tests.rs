//! Replay, back-pressure and bounds of an execution's output.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::core::exec::ExecStatus;

fn end() -> ExecEnd {
    ExecEnd { status: ExecStatus::Done, code: 0, err: String::new(), value: None, output: None, duration_us: 1 }
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime.expect("a runtime"), future)
}

async fn read_all(mut reader: Reader) -> (Vec<u8>, u64, Option<i32>) {
    let (mut bytes, mut lost, mut code) = (Vec::new(), 0, None);
    while let Some(event) = reader.next().await {
        match event {
            OutputEvent::Stdout(data) | OutputEvent::Stderr(data) => bytes.extend(data),
            OutputEvent::Truncated(n) => lost += n,
            OutputEvent::ExitCode(c) => code = Some(c),
            OutputEvent::Structured(_) | OutputEvent::Display { .. } => {}
        }
    }
    (bytes, lost, code)
}

#[test]
fn readers_replay_output_in_order() {
    run(async {
        let output = Output::new(1 << 20);
        let early = tokio::task::spawn_local(read_all(output.reader(0)));
        output.push(0, Stream::Stdout, b"one ".to_vec()).await;
        output.push(4, Stream::Stderr, b"two ".to_vec()).await;
        let middle = tokio::task::spawn_local(read_all(output.reader(2)));
        output.push(8, Stream::Stdout, b"three".to_vec()).await;
        output.close(end());
        let late = read_all(output.reader(8)).await;
        assert_eq!(early.await.expect("no panic"), (b"one two three".to_vec(), 0, Some(0)));
        assert_eq!(middle.await.expect("no panic"), (b"e two three".to_vec(), 0, Some(0)));
        assert_eq!(late, (b"three".to_vec(), 0, Some(0)));
        assert_eq!(output.kept().chunks.len(), 3);
    });
}

#[test]
fn repeated_output_is_deduplicated() {
    run(async {
        let output = Output::new(1 << 20);
        output.push(0, Stream::Stdout, b"abcdef".to_vec()).await;
        output.push(0, Stream::Stdout, b"abcdefgh".to_vec()).await;
        output.push(3, Stream::Stdout, b"def".to_vec()).await;
        output.close(end());
        assert_eq!(read_all(output.reader(0)).await, (b"abcdefgh".to_vec(), 0, Some(0)));
    });
}

#[test]
fn slow_reader_slows_writer() {
    run(async {
        let output = Output::new(10);
        let mut slow = output.reader(0);
        let writer = Rc::clone(&output);
        let writing = tokio::task::spawn_local(async move {
            for n in 0..64u64 {
                writer.push(n << 18, Stream::Stdout, vec![n as u8; 1 << 18]).await;
            }
            writer.close(end());
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!writing.is_finished(), "the writer waits for the reader");
        let held = output.inner.borrow().window_bytes;
        assert!(held <= WINDOW_BYTES + (1 << 18), "{held} bytes are held");
        let mut total = 0;
        while let Some(event) = slow.next().await {
            if let OutputEvent::Stdout(data) = event {
                total += data.len();
            }
        }
        assert_eq!(total, 64 << 18, "and loses nothing by that");
        writing.await.expect("no panic");
    });
}

#[test]
fn dropped_reader_unblocks_writer() {
    run(async {
        let output = Output::new(0);
        let reader = output.reader(0);
        let writer = Rc::clone(&output);
        let writing = tokio::task::spawn_local(async move {
            for n in 0..16u64 {
                writer.push(n << 20, Stream::Stdout, vec![0; 1 << 20]).await;
            }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!writing.is_finished());
        drop(reader);
        writing.await.expect("no panic");
        assert_eq!(output.inner.borrow().window.len(), 0);
    });
}

#[test]
fn newest_output_is_kept() {
    run(async {
        let output = Output::new(1 << 20);
        let mut all = Vec::new();
        for n in 0..4000u64 {
            let line = format!("line {n} {}\n", "x".repeat(1000)).into_bytes();
            let stream = if n % 10 == 0 { Stream::Stderr } else { Stream::Stdout };
            output.push(all.len() as u64, stream, line.clone()).await;
            all.extend(line);
        }
        let late = output.reader(all.len() as u64 - 10);
        output.close(end());
        assert_eq!(read_all(late).await, (all[all.len() - 10..].to_vec(), 0, Some(0)));
        assert!(output.inner.borrow().window_bytes < (64 << 10) + 2000, "memory is bounded");
        let kept = output.kept();
        let tail: Vec<u8> = kept.tail.iter().flat_map(|(_, data)| data.clone()).collect();
        assert_eq!(tail.len(), 64 << 10);
        assert!(all.ends_with(&tail));
        assert!(kept.tail.iter().any(|(stream, _)| *stream == Stream::Stderr));
        let again = read_all(Output::ended(kept, end()).reader(0)).await;
        assert_eq!(again.1, (all.len() - (1 << 20) - (64 << 10)) as u64);
        assert!(again.0.ends_with(&tail) && all.starts_with(&again.0[..1 << 20]));
    });
}

#[test]
fn unread_output_is_counted() {
    run(async {
        let output = Output::new(5);
        output.push(0, Stream::Stdout, b"12345678".to_vec()).await;
        output.push(8, Stream::Stdout, b"9".to_vec()).await;
        output.close(end());
        let kept = output.kept();
        assert_eq!(kept.chunks, [(Stream::Stdout, b"12345".to_vec())]);
        assert_eq!(kept.truncated_bytes, 4);
        assert_eq!(kept.tail, [(Stream::Stdout, b"9".to_vec())]);
        assert_eq!(read_all(output.reader(0)).await, (b"123459".to_vec(), 3, Some(0)));
        let again = Output::ended(kept, end());
        assert_eq!(read_all(again.reader(0)).await, (b"123459".to_vec(), 3, Some(0)));
    });
}

proptest! {
    /// For every output and every read position: bytes delivered + bytes reported as truncated = bytes written.
    #[test]
    fn every_byte_is_delivered_or_counted(
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..20),
        keep in 0u64..300,
        from in 0u64..200,
        join_after in 0usize..20,
    ) {
        let all: Vec<u8> = chunks.concat();
        let (early, late) = run(async {
            let output = Output::new(keep);
            let early = tokio::task::spawn_local(read_all(output.reader(0)));
            let mut late = None;
            let mut offset = 0;
            for (i, chunk) in chunks.iter().enumerate() {
                if i == join_after {
                    late = Some(tokio::task::spawn_local(read_all(output.reader(from))));
                }
                output.push(offset, Stream::Stdout, chunk.clone()).await;
                offset += chunk.len() as u64;
                tokio::task::yield_now().await;
            }
            let late = late.unwrap_or_else(|| tokio::task::spawn_local(read_all(output.reader(from))));
            output.close(end());
            (early.await.expect("no panic"), late.await.expect("no panic"))
        });
        prop_assert_eq!(early, (all.clone(), 0, Some(0)));
        let wanted = (all.len() as u64).saturating_sub(from);
        prop_assert_eq!(late.0.len() as u64 + late.1, wanted);
        prop_assert!(all.ends_with(&late.0) || late.1 > 0);
    }
}

/// Untrusted code chooses the type of a display and its row count: both are charged.
#[test]
fn empty_rich_output_is_bounded() {
    use crate::core::exec::{OutputData, OutputNode};
    run(async {
        let output = Output::new(1 << 20);
        for _ in 0..2000 {
            output.push_event(OutputEvent::Display { mime: "m".repeat(200), data: Vec::new() }).await;
            let row = OutputNode { cells: vec![String::new(); 100], ..OutputNode::default() };
            let rows = OutputData { headers: Vec::new(), root: vec![row] };
            output.push_event(OutputEvent::Structured(rows)).await;
        }
        let inner = output.inner.borrow();
        let held: usize = inner.kept.iter().chain(&inner.window).map(Item::bytes).sum();
        assert!(held < (1 << 20) + (128 << 10), "{held} bytes are held: also the newest");
        assert!(inner.kept.len() < 2000, "{} pieces are kept", inner.kept.len());
    });
}

/// Bytes that a worker dropped while no daemon ran end the kept beginning; what follows is newest output, without gaps.
#[test]
fn gap_ends_kept_beginning() {
    run(async {
        let output = Output::new(1 << 20);
        output.push(0, Stream::Stdout, b"before".to_vec()).await;
        output.push(100, Stream::Stdout, b"after".to_vec()).await;
        let kept = output.kept();
        assert_eq!(kept.chunks, [(Stream::Stdout, b"before".to_vec())]);
        assert_eq!(kept.truncated_bytes, 99);
        assert_eq!(kept.tail, [(Stream::Stdout, b"after".to_vec())]);
        output.push(200, Stream::Stderr, b"last".to_vec()).await;
        assert_eq!(output.kept().tail, [(Stream::Stderr, b"last".to_vec())]);
    });
}
