//! Calls over streamable HTTP, on the loopback and without TLS.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ryokan::core::error::{Error, ErrorCode};
use ryokan::core::info::McpTransport;
use ryokan::core::limits;
use ryokan::core::value::Value;
use ryokan::mcp::allow::ServerEntry;
use ryokan::mcp::{CallError, Launch, McpServers};

use super::fixture::{args, by_name, entry, info, launch, program, run, servers, words};

/// A running `http_server.py`; killed when dropped.
struct Http {
    child: Child,
    url: String,
}

impl Http {
    async fn start(dir: &Path) -> Http {
        let file = dir.join("port");
        let _ = std::fs::remove_file(&file);
        let child = Command::new("python3").arg(program("http_server.py")).arg(&file).spawn().expect("started");
        let port = words(&file).await.remove(0);
        Http { child, url: format!("http://127.0.0.1:{port}/mcp") }
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn allowed(url: &str) -> ServerEntry {
    ServerEntry {
        transport: McpTransport::Http {
            url: url.into(),
            headers: vec![("Authorization".into(), "Bearer ${TOKEN}".into())],
        },
        pass_env: vec!["TOKEN".into()],
        timeout: Duration::from_secs(120),
        ..entry("s", &[])
    }
}

fn with_token() -> Launch {
    let env = |name: &str| (name == "TOKEN").then(|| "t0ken".to_owned());
    Launch { env: std::rc::Rc::new(env), ..launch() }
}

async fn error(servers: &McpServers, tool: &str, args: &Value) -> Error {
    match servers.call(tool, args).await {
        Err(CallError::Call(error)) => error,
        other => panic!("expected an error of the call, got {:?}", other.map(|out| out.text.len())),
    }
}

#[test]
fn http_register_list_and_call() {
    let dir = tempfile::tempdir().expect("a directory");
    run(async {
        let http = Http::start(dir.path()).await;
        let servers = servers([allowed(&http.url)], with_token());
        let asked = McpTransport::Http { url: http.url.clone(), headers: Vec::new() };
        let registered = servers.register("s", &asked).await.expect("registered");
        assert_eq!((registered.state.as_str(), registered.tools), ("ready", 7));
        let sent = args(&[("n", Value::Int(1))]);
        for tool in ["s__echo", "s__stream"] {
            assert_eq!(servers.call(tool, &sent).await.map(|out| out.value), Ok(sent.clone()), "{tool}");
        }
        let Value::Object(headers) = servers.call("s__headers", &Value::Null).await.expect("answered").value else {
            panic!("headers are an object")
        };
        let sent = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("authorization"));
        assert_eq!(sent.map(|(_, value)| value), Some(&Value::String("Bearer t0ken".into())));
        servers.unregister("s").await.expect("there");
    });
}

#[test]
fn failed_http_call_isolated() {
    let dir = tempfile::tempdir().expect("a directory");
    run(async {
        let http = Http::start(dir.path()).await;
        let servers = servers([allowed(&http.url)], with_token());
        servers.register("s", &by_name()).await.expect("registered");
        let broken = error(&servers, "s__broken", &Value::Null).await;
        assert!(broken.code == ErrorCode::Unavailable && broken.message.contains("500"), "{broken}");
        let large = args(&[("bytes", Value::Int(limits::VALUE_BYTES as i64 * 3))]);
        for (tool, why) in [("s__big", "exceeded the maximum size"), ("s__bigstream", "broke off its answer")] {
            let large = error(&servers, tool, &large).await;
            assert!(large.code == ErrorCode::Unavailable && large.message.contains(why), "{large}");
            assert!(!large.message.contains("rmcp"), "{large}");
        }
        assert!(servers.call("s__echo", &Value::Null).await.is_ok());
        assert_eq!(info(&servers).state, "ready");
    });
}

#[test]
fn http_call_times_out() {
    let dir = tempfile::tempdir().expect("a directory");
    run(async {
        let http = Http::start(dir.path()).await;
        let entry = ServerEntry { timeout: Duration::from_secs(3), ..allowed(&http.url) };
        let servers = servers([entry], with_token());
        servers.register("s", &by_name()).await.expect("registered");
        let start = Instant::now();
        assert_eq!(error(&servers, "s__slow", &Value::Null).await.code, ErrorCode::Deadline);
        assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
    });
}

#[test]
fn redirects_stay_at_the_allowed_host() {
    let dir = tempfile::tempdir().expect("a directory");
    run(async {
        let http = Http::start(dir.path()).await;
        for (path, follows) in [("/moved", true), ("/away", false)] {
            let servers = servers([allowed(&http.url.replace("/mcp", path))], with_token());
            assert_eq!(servers.register("s", &by_name()).await.is_ok(), follows, "{path}");
        }
    });
}

#[test]
fn unreachable_http_server_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    run(async {
        let http = Http::start(dir.path()).await;
        let servers = servers([allowed(&http.url)], with_token());
        servers.register("s", &by_name()).await.expect("registered");
        drop(http);
        let gone = error(&servers, "s__echo", &Value::Null).await;
        assert!(gone.code == ErrorCode::Unavailable, "{gone}");
        servers.unregister("s").await.expect("there");
        let refused = servers.register("s", &by_name()).await.expect_err("no server listens");
        assert!(refused.message.contains("did not start"), "{refused}");
        let unset = Launch { env: std::rc::Rc::new(|_| None), ..launch() };
        let servers = super::fixture::servers([allowed("http://127.0.0.1:1/mcp")], unset);
        let unset = servers.register("s", &by_name()).await.expect_err("no token");
        assert!(unset.message.contains("no variable TOKEN"), "{unset}");
    });
}
