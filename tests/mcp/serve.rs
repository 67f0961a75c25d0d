//! `ryokan mcp serve`, driven by the client of the official SDK.

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ReadResourceRequestParams,
    ReadResourceResponse,
};
use rmcp::service::{RunningService, ServiceError};
use rmcp::transport::TokioChildProcess;
use rmcp::{RoleClient, ServiceExt as _};
use serde_json::{Value, json};

use crate::support::{Host, users};

struct Client(RunningService<RoleClient, ()>);

impl Client {
    async fn start(host: &Host, args: &[&str]) -> Client {
        let mut command = host.command("ryokan");
        command.args(["mcp", "serve"]).args(args);
        let transport = TokioChildProcess::new(tokio::process::Command::from(command)).expect("it starts");
        Client(().serve(transport).await.expect("a server"))
    }

    async fn ask(&self, tool: &'static str, arguments: Value) -> Result<CallToolResult, ServiceError> {
        let arguments = arguments.as_object().expect("an object").clone();
        match self.0.call_tool_once(CallToolRequestParams::new(tool).with_arguments(arguments)).await? {
            CallToolResponse::Complete(result) => Ok(result),
            other => panic!("no result: {other:?}"),
        }
    }

    /// The text of a call that succeeds.
    async fn call(&self, tool: &'static str, arguments: Value) -> String {
        let result = self.ask(tool, arguments).await.expect("an answer");
        assert_eq!(result.is_error, Some(false), "{tool}: {result:?}");
        text(&result)
    }

    /// The text of a call that fails.
    async fn fails(&self, tool: &'static str, arguments: Value) -> String {
        let result = self.ask(tool, arguments).await.expect("an answer");
        assert_eq!(result.is_error, Some(true), "{tool}: {result:?}");
        text(&result)
    }
}

fn text(result: &CallToolResult) -> String {
    let texts = result.content.iter().filter_map(|content| match content {
        ContentBlock::Text(text) => Some(text.text.as_str()),
        _ => None,
    });
    texts.collect()
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(test)
}

#[test]
fn client_works_in_kernel() {
    for user in users() {
        let host = Host::start_as(user);
        run(async {
            let client = Client::start(&host, &[]).await;
            let tools = client.0.list_all_tools().await.expect("tools");
            assert!(tools.iter().any(|tool| tool.name == "execute") && tools.len() == 13, "{tools:?}");
            client.call("create_kernel", json!({ "name": "demo", "engine": "python" })).await;
            let python = async |code: &str| client.call("execute", json!({ "kernel": "demo", "code": code })).await;
            assert_eq!(python("x = 41\nprint('hi')\nx + 1").await, "hi\n42\n");
            client.call("write_file", json!({ "kernel": "demo", "path": "src/a.txt", "content": "one\n" })).await;
            assert_eq!(python("print(open('src/a.txt').read())").await.trim(), "one");
            let listed = client.call("list_files", json!({ "kernel": "demo", "path": "src" })).await;
            assert_eq!(listed, "file 4 a.txt\n");
            client.call("checkpoint", json!({ "kernel": "demo", "message": "good" })).await;
            python("x = 0\nimport os; os.remove('src/a.txt')").await;
            let diff = client.call("diff", json!({ "kernel": "demo", "from": "good" })).await;
            assert!(diff.contains("src/a.txt") && diff.contains('x'), "{diff}");
            client.call("restore", json!({ "kernel": "demo", "checkpoint": "good" })).await;
            assert_eq!(python("x").await, "41\n");
            assert_eq!(client.call("read_file", json!({ "kernel": "demo", "path": "src/a.txt" })).await, "one\n");
            client.call("undo", json!({ "kernel": "demo" })).await;
            assert_eq!(python("x").await, "0\n");
            client.call("fork", json!({ "kernel": "demo", "name": "try", "checkpoint": "good" })).await;
            assert_eq!(client.call("execute", json!({ "kernel": "try", "code": "x" })).await, "41\n");
            assert!(client.call("log", json!({ "kernel": "demo" })).await.contains("good"));
            let kernels = client.call("list_kernels", json!({})).await;
            assert!(kernels.contains("demo") && kernels.contains("try"), "{kernels}");
            client.call("remove_kernel", json!({ "kernel": "try" })).await;
            // A failure of the code, of an argument and of a name is text for the model.
            let failed = client.fails("execute", json!({ "kernel": "demo", "code": "1 / 0" })).await;
            assert!(failed.contains("ZeroDivisionError") && failed.contains("exit code 1"), "{failed}");
            let missing = json!({ "kernel": "demo", "code": "import absent_module" });
            let hint = client.fails("execute", missing).await;
            assert!(hint.contains("hint: ") && hint.contains("ryokan update demo --venv DIR"), "{hint}");
            let slow = json!({ "kernel": "demo", "code": "import time; time.sleep(60)", "timeout_seconds": 0.2 });
            assert!(client.fails("execute", slow).await.contains("timeout"));
            assert!(client.fails("execute", json!({ "kernel": "demo" })).await.contains("code is missing"));
            assert!(client.fails("log", json!({ "kernel": "none" })).await.contains("notFound"));
            let outside = json!({ "kernel": "demo", "path": "../../etc/passwd" });
            assert!(client.fails("read_file", outside).await.contains("outside"));
            client.0.cancel().await.expect("it ends");
        });
    }
}

#[test]
fn rights_and_kernels_are_limited() {
    let host = Host::start();
    for name in ["mine", "other"] {
        host.ok(&["new", name, "--engine", "bash"]);
    }
    run(async {
        let client = Client::start(&host, &["--kernel", "mine", "--rights", "read,execute,fork"]).await;
        let tools = client.0.list_all_tools().await.expect("tools");
        let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_ref()).collect();
        assert_eq!(names, ["list_kernels", "execute", "read_file", "list_files", "log", "diff", "fork"]);
        assert!(client.fails("execute", json!({ "kernel": "other", "code": "echo" })).await.contains("not one that"));
        // The daemon refuses, not only the list of tools.
        let refused = client.fails("write_file", json!({ "kernel": "mine", "path": "a", "content": "" })).await;
        assert!(refused.contains("refused") && refused.contains("write"), "{refused}");
        let removed = client.fails("remove_kernel", json!({ "kernel": "mine" })).await;
        assert!(removed.contains("refused"), "{removed}");
        assert!(client.ask("create_kernel", json!({ "name": "new" })).await.is_err());
        // Forks are served too.
        client.call("fork", json!({ "kernel": "mine", "name": "copy" })).await;
        assert_eq!(client.call("execute", json!({ "kernel": "copy", "code": "echo hi" })).await, "hi\n");
        host.ok(&["fork", "copy", "deeper"]);
        host.ok(&["fork", "other", "foreign"]);
        assert_eq!(client.call("execute", json!({ "kernel": "deeper", "code": "echo hi" })).await, "hi\n");
        assert!(client.fails("execute", json!({ "kernel": "foreign", "code": "echo" })).await.contains("not one that"));
        assert!(!client.call("list_kernels", json!({})).await.contains("other"));
        // Another kernel that gets the name is not served; the one that had it is.
        host.ok(&["rename", "mine", "renamed"]);
        host.ok(&["new", "mine", "--engine", "bash"]);
        assert!(client.fails("execute", json!({ "kernel": "mine", "code": "echo" })).await.contains("not one that"));
        assert_eq!(client.call("execute", json!({ "kernel": "renamed", "code": "echo same" })).await, "same\n");
        client.0.cancel().await.expect("it ends");
    });
    run(async {
        // Without a kernel to attenuate, the server itself is what refuses.
        let client = Client::start(&host, &["--rights", "execute"]).await;
        for (tool, given) in [("create_kernel", json!({ "name": "new" })), ("list_kernels", json!({}))] {
            assert!(client.fails(tool, given).await.contains("does not pass on the right"), "{tool}");
        }
        assert!(client.0.list_all_resources().await.expect("resources").is_empty());
        client.0.cancel().await.expect("it ends");
    });
    assert!(!host.ok(&["ls"]).contains("new"));
    let unknown = host.cli(&["mcp", "serve", "--kernel", "nothing"]);
    assert_eq!(unknown.status.code(), Some(3), "{unknown:?}");
}

#[test]
fn resources_and_large_output() {
    let host = Host::start();
    host.ok(&["new", "demo", "--engine", "python"]);
    run(async {
        let client = Client::start(&host, &["--output-limit", "4K"]).await;
        let python = async |code: &str| client.call("execute", json!({ "kernel": "demo", "code": code })).await;
        let long = python("print('ä' * 100_000)").await;
        assert!(long.len() < 6_000 && (long.contains("left out") || long.contains("dropped")), "{}", long.len());
        python("open('text', 'w').write('ä' * 3000); open('bytes', 'wb').write(bytes(range(256)))").await;
        let mut whole = String::new();
        // In parts that end between characters.
        while !whole.ends_with("ends") {
            let part = json!({ "kernel": "demo", "path": "text", "offset": whole.len() });
            let part = client.call("read_file", part).await;
            match part.split_once("\n[") {
                Some((text, more)) => {
                    assert!(more.contains("go on with offset"), "{more}");
                    whole.push_str(text);
                }
                None => whole.push_str(&(part + "ends")),
            }
        }
        assert_eq!(whole, "ä".repeat(3000) + "ends");
        assert!(client.fails("read_file", json!({ "kernel": "demo", "path": "bytes" })).await.contains("base64"));
        let encoded = client.call("read_file", json!({ "kernel": "demo", "path": "bytes", "base64": true })).await;
        assert!(encoded.starts_with("AAECAwQF"), "{encoded}");
        let resources = client.0.list_all_resources().await.expect("resources");
        assert_eq!(resources[0].uri, "ryokan://demo/journal");
        let read = async |uri: &str| match client.0.read_resource_once(ReadResourceRequestParams::new(uri)).await? {
            ReadResourceResponse::Complete(read) => Ok::<_, ServiceError>(json!(read).to_string()),
            other => panic!("no content: {other:?}"),
        };
        assert!(read("ryokan://demo/journal").await.expect("a journal").contains("open('text'"));
        assert!(read("ryokan://demo/files/bytes").await.expect("a file").contains("AAECAwQF"));
        assert!(read("ryokan://demo/files/%2e%2e/secret").await.is_err());
        assert!(read("ryokan://none/journal").await.is_err());
        client.0.cancel().await.expect("it ends");
    });
}

/// The next call connects to the next daemon.
#[test]
fn killed_daemon_serves_next_call() {
    let mut host = Host::start();
    host.ok(&["new", "demo", "--engine", "bash"]);
    run(async {
        let client = Client::start(&host, &[]).await;
        client.call("execute", json!({ "kernel": "demo", "code": "x=kept" })).await;
        host.restart();
        assert_eq!(client.call("execute", json!({ "kernel": "demo", "code": "echo $x" })).await, "kept\n");
        client.0.cancel().await.expect("it ends");
    });
}

/// A call that the client gives up interrupts its code.
#[test]
fn cancelled_call_interrupts_code() {
    use rmcp::model::{CancelledNotificationParam, ClientRequest, Request};
    let host = Host::start();
    host.ok(&["new", "demo", "--engine", "bash"]);
    run(async {
        let client = Client::start(&host, &[]).await;
        let arguments = json!({ "kernel": "demo", "code": "sleep 600" }).as_object().expect("an object").clone();
        let call = CallToolRequestParams::new("execute").with_arguments(arguments);
        let request = ClientRequest::CallToolRequest(Request::new(call));
        let sent = client.0.send_cancellable_request(request, Default::default()).await.expect("sent");
        while !host.ok(&["show", "demo", "--json"]).contains("\"busy\"") {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        let id = sent.id.clone();
        client.0.notify_cancelled(CancelledNotificationParam::new(Some(id), None)).await.expect("sent");
        while host.ok(&["show", "demo", "--json"]).contains("\"busy\"") {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        assert!(host.ok(&["journal", "demo"]).contains("interrupted"));
        client.0.cancel().await.expect("it ends");
    });
}
