//! Calls over standard input and output: successes, failures, bounds.

use std::time::{Duration, Instant};

use ryokan::core::error::{Error, ErrorCode};
use ryokan::core::info::McpTransport;
use ryokan::core::limits;
use ryokan::core::value::Value;
use ryokan::mcp::{CallError, Launch, McpServers, ToolOutput};

use super::fixture::{args, by_name, entry, info, launch, registered, run, servers, until};

fn error(result: Result<ToolOutput, CallError>) -> Error {
    match result {
        Err(CallError::Call(error)) => error,
        other => panic!("expected an error of the call, got {:?}", other.map(|out| out.text.len())),
    }
}

async fn echo(servers: &McpServers) {
    let sent = args(&[("n", Value::Int(7)), ("big", Value::BigInt("18446744073709551615".into()))]);
    let got = servers.call("s__echo", &sent).await.expect("answered");
    assert_eq!(got.value, args(&[("n", Value::Int(7)), ("big", Value::BigInt("18446744073709551615".into()))]));
}

#[test]
fn register_list_call_unregister() {
    run(async {
        let servers = servers([entry("s", &["ok"])], launch());
        let mut changes = servers.changes();
        let info = servers.register("s", &by_name()).await.expect("registered");
        assert_eq!((info.name.as_str(), info.state.as_str(), info.error.as_str()), ("s", "ready", ""));
        assert!(changes.has_changed().expect("open") && *changes.borrow_and_update() > 0);
        let tools = servers.tools();
        assert_eq!(tools.len(), info.tools as usize);
        assert_eq!((tools[1].name.as_str(), tools[1].source.as_str()), ("s__add", "mcp"));
        assert!(tools[1].schema_json.contains(r#""a":{"type":"number"}"#), "{}", tools[1].schema_json);
        echo(&servers).await;
        let sum = servers.call("s__add", &args(&[("a", Value::Int(2)), ("b", Value::Float(0.5))])).await;
        assert_eq!(sum.map(|out| (out.value, out.text)), Ok((Value::String("2.5".into()), "2.5".into())));
        let image = servers.call("s__image", &Value::Null).await.expect("answered");
        assert_eq!(image.text, "[image image/png]");
        let twice = servers.register("s", &by_name()).await.expect_err("the name is taken");
        assert_eq!(twice.code, ErrorCode::AlreadyExists);
        servers.unregister("s").await.expect("there");
        assert_eq!((servers.list().len(), servers.tools().len()), (0, 0));
        assert_eq!(error(servers.call("s__echo", &Value::Null).await).code, ErrorCode::NotFound);
        assert_eq!(servers.unregister("s").await.expect_err("gone").code, ErrorCode::NotFound);
        servers.register("s", &by_name()).await.expect("registered again");
        echo(&servers).await;
    });
}

#[test]
fn tool_error_affects_one_call() {
    run(async {
        let servers = registered(&["ok"]).await;
        match servers.call("s__fail", &Value::Null).await {
            Err(CallError::Tool { message, .. }) => assert!(message.contains("went wrong"), "{message}"),
            other => panic!("{other:?}"),
        }
        // The protocol's own error, not the tool's.
        let wrong = error(servers.call("s__error", &Value::Null).await);
        assert_eq!(wrong.code, ErrorCode::InvalidArgument);
        assert!(wrong.message.contains("no tool 'error'"), "{wrong}");
        assert_eq!(error(servers.call("s__nothing", &Value::Null).await).code, ErrorCode::NotFound);
        assert_eq!(error(servers.call("echo", &Value::Null).await).code, ErrorCode::NotFound);
        assert_eq!(error(servers.call("s__echo", &Value::Int(1)).await).code, ErrorCode::InvalidArgument);
        assert!(servers.call("s__odd", &Value::Null).await.is_err());
        echo(&servers).await;
    });
}

#[test]
fn unlisted_server_refused() {
    run(async {
        let servers = servers([entry("s", &["ok"])], launch());
        let shell =
            McpTransport::Stdio { command: "/bin/sh".into(), args: vec!["-c".into(), "id".into()], env: vec![] };
        for (name, transport) in [("s", shell), ("other", by_name())] {
            let refused = servers.register(name, &transport).await.expect_err("not allowed");
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Refused, "mcp_allow_list"));
            assert!(refused.hint.contains("/etc/ryokan/config.toml"), "{}", refused.hint);
        }
        assert!(servers.list().is_empty());
    });
}

#[test]
fn call_timeout_cancels_at_server() {
    run(async {
        let short = Duration::from_secs(5);
        let servers = servers([ryokan::mcp::allow::ServerEntry { timeout: short, ..entry("s", &["ok"]) }], launch());
        servers.register("s", &by_name()).await.expect("registered");
        let late = error(servers.call("s__slow", &Value::Null).await);
        assert_eq!(late.code, ErrorCode::Deadline);
        // Another call is dropped by its caller.
        let dropped = tokio::time::timeout(Duration::from_millis(50), async {
            let _ = servers.call("s__slow", &Value::Null).await;
        });
        assert!(dropped.await.is_err());
        for _ in 0..2000 {
            let got = servers.call("s__cancelled", &Value::Null).await.expect("answered");
            if got.value == args(&[("n", Value::Int(2))]) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the server got no cancellation");
    });
}

#[test]
fn calls_run_concurrently() {
    run(async {
        let servers = registered(&["ok"]).await;
        let start = Instant::now();
        let slow = args(&[("ms", Value::Int(6000))]);
        let calls = (0..10).map(|_| servers.call("s__slow", &slow));
        assert!(futures::future::join_all(calls).await.iter().all(Result::is_ok));
        // One after the other they take a minute.
        assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
    });
}

#[test]
fn large_answers_are_bounded() {
    run(async {
        let servers = registered(&["ok"]).await;
        let big = |bytes: usize| args(&[("bytes", Value::Int(bytes as i64))]);
        let fits = servers.call("s__big", &big(limits::VALUE_BYTES - 100)).await.expect("it fits");
        assert_eq!(fits.text.len(), limits::VALUE_BYTES - 100);
        // Too large for a value, but not for a message: the server stays.
        let large = error(servers.call("s__big", &big(limits::VALUE_BYTES + 10)).await);
        assert!(large.message.contains("more than 8388608 bytes"), "{large}");
        echo(&servers).await;
        // A message that is too large or endless: the connection ends, and is opened again.
        for tool in ["s__big", "s__endless"] {
            let start = Instant::now();
            let large = error(servers.call(tool, &big(limits::VALUE_BYTES * 3)).await);
            assert_eq!(large.code, ErrorCode::Unavailable);
            assert!(large.message.contains("sent a message of more than"), "{large}");
            // Before the call's deadline.
            assert!(start.elapsed() < Duration::from_secs(100));
            echo(&servers).await;
        }
    });
}

#[test]
fn dense_answers_bounded() {
    run(async {
        let servers = registered(&["ok"]).await;
        // 8 MB of text that fit, but 2.7 million values.
        let dense = error(servers.call("s__dense", &Value::Null).await);
        assert!(dense.message.contains("more than 8388608 bytes"), "{dense}");
        echo(&servers).await;
    });
}

#[test]
fn non_reading_server_restarted() {
    run(async {
        let short = Duration::from_secs(3);
        let servers = servers([ryokan::mcp::allow::ServerEntry { timeout: short, ..entry("s", &["deaf"]) }], launch());
        servers.register("s", &by_name()).await.expect("registered");
        let large = args(&[("x", Value::String("x".repeat(limits::VALUE_BYTES - 1000)))]);
        for _ in 0..3 {
            assert_eq!(error(servers.call("s__echo", &large).await).code, ErrorCode::Deadline);
        }
        until("the server counts as dead", || info(&servers).error.contains("did not answer 3 calls in a row")).await;
        until("the server is ready again", || info(&servers).state == "ready").await;
    });
}

#[test]
fn server_noise_is_ignored() {
    run(async {
        for mode in ["garbage", "flood", "pings"] {
            let servers = registered(&[mode]).await;
            for _ in 0..3 {
                echo(&servers).await;
            }
            assert_eq!(info(&servers).state, "ready", "{mode}");
        }
    });
}

#[test]
fn server_requests_declined() {
    run(async {
        let servers = registered(&["ok"]).await;
        assert_eq!(servers.call("s__ask", &Value::Null).await.map(|out| out.text), Ok("asked".into()));
        echo(&servers).await;
    });
}

#[test]
fn changed_tool_list_reloaded() {
    run(async {
        let servers = registered(&["ok"]).await;
        let before = servers.tools().len();
        let mut changes = servers.changes();
        changes.mark_unchanged();
        for n in 1..4 {
            servers.call("s__grow", &Value::Null).await.expect("answered");
            until("the new tool is listed", || servers.tools().len() == before + n).await;
        }
        assert!(changes.has_changed().expect("open"));
        assert!(servers.tools().iter().any(|tool| tool.name == "s__grown2"));
    });
}

#[test]
fn oversized_tool_list_bounded() {
    run(async {
        let servers = registered(&["pages"]).await;
        let pages = info(&servers);
        assert_eq!((pages.state.as_str(), pages.tools), ("ready", 512));
        assert!(pages.error.contains("only its first 512"), "{}", pages.error);
        let servers = registered(&["loop"]).await;
        assert_eq!(info(&servers).tools, 64);
    });
}

#[test]
fn server_environment_restricted() {
    run(async {
        let mut entry = entry("s", &["ok"]);
        entry.pass_env = vec!["SECRET".into()];
        if let McpTransport::Stdio { env, .. } = &mut entry.transport {
            env.push(("TOKEN".into(), "Bearer ${SECRET}".into()));
        }
        let inherited = |name: &str| match name {
            "SECRET" => Some("s3cret".to_owned()),
            "PATH" | "HOME" => std::env::var(name).ok(),
            _ => Some("leaked".to_owned()),
        };
        let servers = servers([entry], Launch { env: std::rc::Rc::new(inherited), ..launch() });
        servers.register("s", &by_name()).await.expect("registered");
        let got = servers.call("s__env", &Value::Null).await.expect("answered").value;
        let Value::Object(fields) = got else { panic!("{got:?}") };
        let value = |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        assert_eq!(value("TOKEN"), Some(Value::String("Bearer s3cret".into())));
        // A launcher script may set variables of its own, but none of the daemon's are passed on.
        let names: Vec<&str> = fields.iter().map(|(name, _)| name.as_str()).collect();
        assert!(names.contains(&"PATH") && names.contains(&"RYOKAN_MCP_OF"), "{names:?}");
        assert!(!names.iter().any(|name| *name == "SECRET" || name.starts_with("CARGO")), "{names:?}");
    });
}
