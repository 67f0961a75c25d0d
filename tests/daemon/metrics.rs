//! Metrics as Prometheus reads them.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;

use ryokan::core::engine::EngineName;

use crate::support::{Host, User, kernel, run, spec};

/// The daemon's current metrics.
pub fn reported(host: &Host) -> String {
    ask(UnixStream::connect(host.socket().with_file_name("metrics.sock")).expect("connected"), "GET /metrics")
}

fn ask(mut stream: impl std::io::Read + std::io::Write, what: &str) -> String {
    write!(stream, "{what} HTTP/1.1\r\nHost: ryokan\r\nConnection: close\r\n\r\n").expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("read");
    answer
}

/// The value of a series.
#[track_caller]
pub fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in {text}")).parse().expect("a number")
}

#[test]
fn metrics_are_anonymous() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let mut host = Host::prepare(User::Own);
    host.configure(&format!("[daemon]\nmetrics_address = \"127.0.0.1:{port}\"\n[pool]\npool_size = 1\nmin_idle = 1\n"));
    host.launch();
    let socket = host.socket().with_file_name("metrics.sock");
    let unix = || UnixStream::connect(&socket).expect("connected");
    host.with(async |client| {
        // The socket exists once a client is answered.
        client.ping().await.expect("an answer");
        assert_eq!(socket.metadata().expect("there").permissions().mode() & 0o777, 0o600);
        crate::support::eventually("a worker is ready", async || {
            let pools = client.pools().await.expect("pools");
            pools.iter().all(|pool| pool.idle == 1)
        })
        .await;
        let secret = kernel(&client, "secretname", EngineName::Kaish).await;
        run(&secret, "x=1").await;
        run(&secret, "/bin/false").await;
    });
    host.ok(&["checkpoint", "secretname", "-m", "here"]);
    host.ok(&["restore", "secretname", "here", "--yes"]);
    host.ok(&["undo", "secretname", "--yes"]);
    host.ok(&["fork", "secretname", "child"]);
    let text = ask(unix(), "GET /metrics");
    assert!(text.starts_with("HTTP/1.1 200 OK\r\ncontent-type: application/openmetrics-text;"), "{text}");
    assert!(text.trim_end().ends_with("# EOF") && !text.contains("secretname"), "{text}");
    let stage = |name: &str| value(&text, &format!("ryokan_stage_seconds_count{{stage=\"{name}\",engine=\"kaish\"}}"));
    assert_eq!(value(&text, "ryokan_executions_total{engine=\"kaish\",status=\"done\"}"), 1.0);
    assert_eq!(value(&text, "ryokan_executions_total{engine=\"kaish\",status=\"failed\"}"), 1.0);
    assert_eq!((stage("create"), stage("worker_taken"), stage("bind_worker")), (1.0, 1.0, 1.0));
    assert_eq!((stage("restore"), stage("fork"), stage("execution_queued")), (2.0, 1.0, 2.0));
    assert!(stage("checkpoint") >= 1.0 && stage("checkpoint_pause") >= 1.0 && stage("pool_refill") >= 1.0);
    assert_eq!(value(&text, "ryokan_pool_events_total{engine=\"kaish\",event=\"taken\"}"), 1.0);
    // The first look starts the measurement.
    crate::support::until("the disk is measured", || {
        let text = reported(&host);
        let bytes = |part: &str| value(&text, &format!("ryokan_kernels_disk_bytes{{part=\"{part}\"}}"));
        bytes("history") > 0.0 && bytes("other") > 0.0 && bytes("saved_memory") == 0.0 && bytes("workspace") >= 0.0
    });
    assert!(value(&text, "ryokan_workers") >= 1.0 && value(&text, "ryokan_clients") >= 0.0, "{text}");
    // Every series of the dashboard exists.
    let dashboard = include_str!("../../docs/grafana-dashboard.json");
    let shown: std::collections::BTreeSet<&str> = dashboard
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("ryokan_"))
        .collect();
    assert!(shown.len() >= 9, "{shown:?}");
    for series in shown {
        let is_there =
            text.lines().any(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(['{', ' '])));
        assert!(is_there, "the dashboard shows {series}, which is not there");
    }
    // The same on the loopback. Other requests get an error, and malformed ones affect no other
    // reader.
    let tcp = || TcpStream::connect(("127.0.0.1", port)).expect("connected");
    assert!(ask(tcp(), "GET /metrics").contains("ryokan_warm_workers{"));
    assert!(ask(tcp(), "GET /").starts_with("HTTP/1.1 404"));
    assert!(ask(unix(), "POST /metrics").starts_with("HTTP/1.1 405"));
    let mut nonsense = unix();
    nonsense.write_all(&[0xff; 4096]).expect("written");
    let _ = nonsense.read_to_end(&mut Vec::new());
    assert!(ask(unix(), "GET /metrics").starts_with("HTTP/1.1 200"));
    // Silent TCP connections up to the limit do not block the socket.
    let _silent: Vec<_> = (0..20).map(|_| tcp()).collect();
    assert!(ask(unix(), "GET /metrics").starts_with("HTTP/1.1 200"));
    host.signal(nix::sys::signal::Signal::SIGTERM);
    host.wait();
    assert!(!socket.exists(), "the socket still exists");
}

#[test]
fn public_metrics_address_refused() {
    let host = Host::prepare(User::Own);
    for (address, says) in [("0.0.0.0:9464", "no address of the loopback"), ("9464", "no address with a port")] {
        host.configure(&format!("[daemon]\nmetrics_address = {address:?}\n"));
        let checked = host.command("ryokand").arg("--check-config").output().expect("runs");
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert!(!checked.status.success() && said.contains(says) && said.contains("metrics_address"), "{said}");
    }
}

#[test]
fn ended_pool_metrics_persist() {
    let mut host = Host::prepare(User::Own);
    host.configure("[pool]\npool_size = 1\nmin_idle = 1\nmax_idle_time = \"1s\"\nmaintenance_interval = \"1s\"\n");
    host.launch();
    let missed = || value(&reported(&host), "ryokan_pool_events_total{engine=\"kaish\",event=\"missed\"}");
    host.ok(&["new", "odd", "--memory", "300M"]);
    host.ok(&["exec", "odd", "echo it"]);
    let before = missed();
    assert!(before >= 1.0);
    host.ok(&["rm", "odd", "--yes"]);
    host.with(async |client| {
        crate::support::eventually("its pool ends", async || {
            client.pools().await.expect("pools").iter().all(|pool| pool.memory_bytes != 300 << 20)
        })
        .await;
    });
    assert_eq!(missed(), before);
}

#[test]
fn removed_kernels_free_memory() {
    let host = Host::start();
    let remembered = || value(&reported(&host), "ryokan_kernels_in_memory");
    host.with(async |client| {
        kernel(&client, "stays", EngineName::Kaish).await;
        for n in 0..300 {
            let mut wanted = spec(&format!("k{n}"), EngineName::Kaish);
            wanted.ephemeral = n % 2 == 0;
            let (made, _) = client.create_kernel(&wanted, "").await.expect("made");
            made.remove(0).await.expect("removed");
        }
        // Few are left whose task has not ended yet.
        crate::support::eventually("few kernels are still in memory", async || remembered() < 60.0).await;
    });
    host.with(async |_| {
        crate::support::eventually("only one kernel is in memory", async || remembered() == 1.0).await;
    });
}
