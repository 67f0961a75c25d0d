//! Invalid names: through the client, as raw requests where its types forbid them, and through the
//! command line.

use capnp_rpc::{RpcSystem, rpc_twoparty_capnp::Side, twoparty};
use ryokan::core::engine::EngineName;
use ryokan::core::error::{Error, ErrorCode};
use ryokan::rpc::client::run_local;
use ryokan::rpc::schema::ryokan_capnp as wire;
use tokio_util::compat::{TokioAsyncReadCompatExt as _, TokioAsyncWriteCompatExt as _};

use crate::support::{Host, kernel, out, users};

fn bad_names() -> Vec<String> {
    let mut names: Vec<String> =
        ["", ".", "..", "../up", "a/b", "/etc", "a\0b", "\0", "-rf", "a b", "é", "a\nb", "\u{202e}x"]
            .map(String::from)
            .to_vec();
    names.extend(["n".repeat(300), "n".repeat(65), "n".repeat(1 << 20)]);
    names
}

/// The error that an exception carries.
fn reported(exception: &capnp::Error) -> Error {
    let text = exception.to_string();
    let line = text.lines().find_map(|line| line.find("ryokan:").map(|at| &line[at..]));
    line.and_then(Error::from_line).unwrap_or_else(|| panic!("no machine-readable error: {text}"))
}

#[test]
fn interface_rejects_invalid_names() {
    for user in users() {
        let host = Host::start_as(user);
        run_local(async {
            let stream = tokio::net::UnixStream::connect(host.socket()).await.unwrap();
            let (read, write) = stream.into_split();
            let network =
                twoparty::VatNetwork::new(read.compat(), write.compat_write(), Side::Client, Default::default());
            let mut system = RpcSystem::new(Box::new(network), None);
            let raw: wire::host::Client = system.bootstrap(Side::Server);
            tokio::task::spawn_local(system);
            let mut hello = raw.hello_request();
            hello.get().set_wire_version(wire::WIRE_VERSION);
            hello.get().set_client("by hand");
            hello.send().promise.await.expect("greeted");
            for name in bad_names() {
                let shown: String = name.chars().take(20).collect();
                let mut request = raw.create_kernel_request();
                request.get().init_spec().set_name(&name);
                let error = reported(&request.send().promise.await.err().unwrap_or_else(|| panic!("{shown:?} passed")));
                assert_eq!(error.code, ErrorCode::InvalidArgument, "{shown:?}: {error:?}");
                assert!(error.message.len() < 500 && !error.message.contains(['\0', '\n', '\u{202e}']), "{error:?}");
                let mut request = raw.remove_kernel_request();
                request.get().set_name(&name);
                let error =
                    reported(&request.send().promise.await.err().unwrap_or_else(|| panic!("{shown:?} was found")));
                assert!(
                    [ErrorCode::InvalidArgument, ErrorCode::NotFound].contains(&error.code),
                    "{shown:?}: {error:?}"
                );
                assert!(error.message.len() < 500 && !error.message.contains(['\0', '\n', '\u{202e}']), "{error:?}");
            }
            // Text that is not UTF-8.
            let mut request = raw.create_kernel_request();
            request.get().init_spec().init_name(3).as_bytes_mut().copy_from_slice(&[b'a', 0xff, b'b']);
            let error = reported(&request.send().promise.await.err().expect("no text"));
            assert_eq!(error.code, ErrorCode::InvalidArgument, "{error:?}");
        })
        .unwrap();
        host.with(async |client| {
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            for name in bad_names() {
                let error =
                    shell.publish(ryokan::core::rights::Rights::ALL, &name).await.expect_err("not a socket name");
                assert_eq!(error.code, ErrorCode::InvalidArgument, "{error:?}");
                let error = client.open_kernel(&name).await.err().expect("not a kernel name");
                assert!([ErrorCode::InvalidArgument, ErrorCode::NotFound].contains(&error.code), "{error:?}");
            }
            for name in ["a\0b", "", "a b"] {
                let error =
                    shell.put_var(name, &ryokan::core::value::Value::Int(1), 0).await.expect_err("not a variable name");
                assert_eq!(error.code, ErrorCode::InvalidArgument, "{name:?}: {error:?}");
            }
            for path in ["/a\0b", "", "relative", "/../etc", "/workspace/../proc", &format!("/{}", "p".repeat(5000))] {
                let error = shell.mount_at(path, "/tmp", false, 0).await.expect_err("not a mount path");
                assert!([ErrorCode::InvalidArgument, ErrorCode::Refused].contains(&error.code), "{path:?}: {error:?}");
            }
            assert_eq!(out(&shell, "echo well").await, "well");
            assert_eq!(client.list_kernels(&Default::default()).await.expect("a list").len(), 1);
        });
        assert!(!host.path("run").join("ryokan/up.sock").exists());
        assert_eq!(std::fs::read_dir(host.data().join("kernels")).unwrap().count(), 1);
    }
}

#[test]
fn cli_rejects_invalid_names() {
    let host = Host::start();
    for name in bad_names().iter().filter(|name| !name.contains('\0') && name.len() < 100_000) {
        for command in [&["new", "--"][..], &["rm", "--yes", "--"], &["exec", "--"], &["vars", "--"]] {
            let mut arguments = command.to_vec();
            arguments.push(name);
            if command[0] == "exec" {
                arguments.push("echo no");
            }
            let output = host.cli(&arguments);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let code = output.status.code();
            // 3, not found, is valid too, except for `new`.
            let most = if command[0] == "new" { 2 } else { 3 };
            let is_own = command[0] == "exec" && code == Some(125);
            let is_known = is_own || code.is_some_and(|code| (1..=most).contains(&code));
            assert!(is_known, "{arguments:?}: {:?} {said}", output.status);
            assert!(!said.trim().is_empty() && !said.contains("panicked"), "{arguments:?}: {said}");
            assert!(said.len() < 2000, "{arguments:?}: a message of {} bytes", said.len());
            assert!(!said.contains('\u{202e}'), "{arguments:?}: {said}");
        }
    }
    assert_eq!(host.ok(&["ls", "--json"]).matches("\"name\"").count(), 0);
}
