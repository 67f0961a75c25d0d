//! Creation: quotas, engines, and repeated requests.

use ryokan::core::engine::EngineName;
use ryokan::core::error::{ErrorCode, Result};
use ryokan::core::fork::Forking;
use ryokan::rpc::client::Forks;

use crate::support::{Host, User, kernel, out, spec, users};

#[test]
fn creation_key_is_idempotent() {
    for user in users() {
        let host = Host::start_as(user);
        let given = host.given(user);
        for n in 0..300 {
            std::fs::write(given.join(format!("f{n}")), [b'x'; 4096]).expect("written");
        }
        host.with(async |client| {
            let mut wanted = spec("k", EngineName::Kaish);
            wanted.from_dir = Some(given.clone());
            let (one, other) =
                futures::join!(client.create_kernel(&wanted, "key"), client.create_kernel(&wanted, "key"));
            let (one, other) = (one.expect("made").1, other.expect("the same").1);
            assert_eq!(one.id, other.id);
            assert_eq!(client.create_kernel(&wanted, "key").await.expect("the same").1.id, one.id);
            let parent = client.open_kernel("k").await.expect("opened").0;
            let forking = Forking { key: "key".into(), ..Forking::of("fork") };
            let (one, other) = futures::join!(parent.fork(&forking), parent.fork(&forking));
            let child = |done: Result<Forks>| {
                let (name, made) = done.expect("forked").children.pop().expect("one child");
                (name, made.expect("made").1.id)
            };
            assert_eq!(child(one), child(other));
            // A failed creation releases its key.
            wanted.name = "other".parse().expect("a name");
            wanted.from_dir = Some("/nowhere/at/all".into());
            let (one, other) =
                futures::join!(client.create_kernel(&wanted, "next"), client.create_kernel(&wanted, "next"));
            assert!(one.is_err() && other.is_err());
            wanted.from_dir = None;
            client.create_kernel(&wanted, "next").await.expect("made");
        });
    }
}

#[test]
fn single_user_daemon_has_no_quota() {
    let mut host = Host::prepare(User::Own);
    host.configure("[limits]\nkernels = 3\nkernels_per_user = 1\n");
    host.launch();
    host.with(async |client| {
        for n in 0..3 {
            kernel(&client, &format!("k{n}"), EngineName::Kaish).await;
        }
        let refused = client.create_kernel(&spec("k3", EngineName::Kaish), "").await.err().expect("too many");
        assert_eq!(refused.code, ErrorCode::Busy);
        assert!(refused.message.contains("3 kernels") && refused.hint.contains("limits.kernels"), "{refused:?}");
        client.remove_kernel("k0", 0).await.expect("removed");
        kernel(&client, "k3", EngineName::Kaish).await;
    });
}

#[test]
fn cpu_fraction_requires_cgroup() {
    for user in users() {
        let host = Host::start_as(user);
        host.with(async |client| {
            let mut wanted = spec("half", EngineName::Kaish);
            wanted.cpu_milli = Some(500);
            match client.create_kernel(&wanted, "").await {
                Ok((half, _)) => {
                    assert_eq!(out(&half, "echo hi").await, "hi");
                    let layers = half.info().await.expect("info").sandbox.join("\n");
                    assert!(layers.contains("0.500, by cgroup"), "{layers}");
                }
                Err(error) => {
                    assert_eq!(
                        (error.code, error.reason.as_str()),
                        (ErrorCode::Unsupported, "sandbox-cpu"),
                        "{error:?}"
                    );
                    assert!(error.hint.contains("whole number"), "{error:?}");
                }
            }
            wanted.name = "whole".parse().expect("a name");
            wanted.cpu_milli = Some(1000);
            let whole = client.create_kernel(&wanted, "").await.expect("made").0;
            assert_eq!(out(&whole, "echo hi").await, "hi");
        });
    }
}
