//! Whether KVM serves on this host, found out by use, in a process that a deadline ends.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::core::limits;

/// The worker's command that measures.
pub const COMMAND: &str = "probe-kvm";

/// Prints the time of the guest's loop in microseconds, or why there is none.
pub(crate) fn main() {
    #[cfg(target_arch = "x86_64")]
    let measured = crate::sys::kvm::loop_time();
    #[cfg(not(target_arch = "x86_64"))]
    let measured: std::io::Result<Duration> = Err(std::io::ErrorKind::Unsupported.into());
    match measured {
        Ok(time) => println!("{}", time.as_micros()),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

/// Measures KVM with the worker's binary; an error says why it does not serve. Blocks, at most for some seconds.
///
/// # Errors
/// Why it does not serve.
pub fn speed(worker: &Path) -> Result<Duration, String> {
    let mut command = Command::new(worker);
    command.arg(COMMAND).env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("cannot run {}: {error}", worker.display()))?;
    let until = Instant::now() + limits::KVM_PROBE;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) => {
                let _ = child.kill();
                // Not waited for without a bound: the guest may hold its process in the host kernel.
                std::thread::sleep(Duration::from_millis(50));
                let _ = child.try_wait();
                return Err(String::from("its guest does not end"));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    judge(output.status.success(), &output.stdout, &output.stderr)
}

fn judge(is_success: bool, out: &[u8], err: &[u8]) -> Result<Duration, String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).trim().to_owned();
    if !is_success {
        return Err(text(err));
    }
    let micros = text(out).parse().map_err(|_| String::from("the probe printed no time"))?;
    let time = Duration::from_micros(micros);
    if time > limits::KVM_LOOP {
        return Err(format!(
            "a loop takes {time:.1?} in a guest, more than {:?}: this host emulates it",
            limits::KVM_LOOP
        ));
    }
    Ok(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_kvm_does_not_serve() {
        assert_eq!(judge(true, b"180\n", b""), Ok(Duration::from_micros(180)));
        let slow = judge(true, b"27000\n", b"").expect_err("too slow");
        assert!(slow.contains("27.0ms") && slow.contains("emulates"), "{slow}");
        assert_eq!(judge(false, b"", b"No such file\n"), Err(String::from("No such file")));
        assert!(judge(true, b"", b"").is_err());
    }

    #[test]
    fn hanging_probe_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let worker = folder.path().join("worker");
        std::fs::write(&worker, "#!/bin/sh\nexec sleep 60\n").expect("written");
        std::fs::set_permissions(&worker, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("executable");
        let began = Instant::now();
        assert_eq!(speed(&worker), Err(String::from("its guest does not end")));
        assert!(began.elapsed() < limits::KVM_PROBE * 4);
    }
}
