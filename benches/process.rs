//! Data of `/proc` about processes and the machine.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Load averages of 1, 5 and 15 minutes.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// First line that a program prints about itself.
pub fn version_of(program: &Path, arguments: &[&str]) -> String {
    let Ok(output) = Command::new(program).args(arguments).output() else {
        return format!("{}: not there", program.display());
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    text.lines().next().unwrap_or_default().to_owned()
}

fn field_kib(file: &str, pid: u32, name: &str) -> Option<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim_start_matches(':').trim().trim_end_matches(" kB").trim().parse().ok()
}

/// Resident memory, MiB.
pub fn rss_mib(pid: u32) -> f64 {
    field_kib("status", pid, "VmRSS").unwrap_or(f64::NAN) / 1024.0
}

/// Proportional share of memory, MiB: pages that processes share count once in all.
pub fn pss_mib(pid: u32) -> f64 {
    field_kib("smaps_rollup", pid, "Pss").unwrap_or(f64::NAN) / 1024.0
}

/// Memory that the process shares with no other, MiB.
pub fn private_mib(pid: u32) -> f64 {
    let part = |name| field_kib("smaps_rollup", pid, name).unwrap_or(f64::NAN) / 1024.0;
    part("Private_Clean") + part("Private_Dirty")
}

/// Processor time of the process so far, without its children.
pub fn cpu(pid: u32) -> Duration {
    // `USER_HZ` is 100 on every architecture that ryokan runs on.
    const TICK_MS: u64 = 10;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_millis((ticks(11) + ticks(12)) * TICK_MS)
}

/// Processor time of all processes and of the host kernel so far.
pub fn machine_cpu() -> Duration {
    const TICK_MS: u64 = 10;
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = |at: usize| text.split_whitespace().nth(at).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    // user, nice, system; irq, softirq.
    Duration::from_millis((ticks(1) + ticks(2) + ticks(3) + ticks(6) + ticks(7)) * TICK_MS)
}

/// The process `root` and its descendants.
pub fn tree(root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = text.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = vec![root];
    let mut at = 0;
    while let Some(pid) = found.get(at).copied() {
        found.extend(children.remove(&pid).unwrap_or_default());
        at += 1;
    }
    found
}

/// A process's name.
pub fn name(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}
