//! Every short text from users and clients: names, ids, quantities, paths, patterns.

use std::path::Path;
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::ids::{Digest, HostId, KernelId, WorkerId};
use ryokan::core::name::KernelName;
use ryokan::core::pattern::Pattern;
use ryokan::core::quantity::{format_size, parse_cpu_milli, parse_duration, parse_size};
use ryokan::core::spec::check_inside_path;

fn comes_back<T: std::str::FromStr + std::fmt::Display>(text: &str) {
    if let Ok(read) = text.parse::<T>() {
        assert_eq!(read.to_string(), text);
    }
}

pub fn run(text: &str) {
    if let Ok(name) = text.parse::<KernelName>() {
        assert_eq!(name.as_str(), text);
        assert!(!text.contains(['/', '\0']) && text != "." && text != "..", "a name is a file name");
    }
    comes_back::<KernelId>(text);
    comes_back::<HostId>(text);
    comes_back::<WorkerId>(text);
    comes_back::<Digest>(text);
    let _ = text.parse::<EngineName>();
    if let Ok(bytes) = parse_size(text) {
        let _ = format_size(bytes);
    }
    if let Ok(milli) = parse_cpu_milli(text) {
        assert!(milli > 0);
    }
    let _ = parse_duration(text);
    if check_inside_path(Path::new(text)).is_ok() {
        assert!(text.starts_with('/') && !text.split('/').any(|part| part == ".."), "{text:?} leads out");
        let mut parts = Path::new(text).components().skip(1).map(|part| part.as_os_str());
        let first = parts.next().expect("never the root itself");
        assert!(!["proc", "dev", "sys", "etc", "usr"].iter().any(|reserved| first == *reserved), "{text:?}");
    }
    let (pattern, name) = text.split_once('\n').unwrap_or((text, text));
    let started = Instant::now();
    let _ = Pattern::new(pattern).matches(name);
    assert!(started.elapsed() < Duration::from_secs(1), "a pattern took {:?}", started.elapsed());
    if !pattern.contains(['*', '?']) {
        assert_eq!(Pattern::new(pattern).matches(name), pattern == name);
    }
}
