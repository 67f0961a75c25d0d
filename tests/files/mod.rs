//! A kernel's files from outside: byte-exact, atomic, never out of the workspace.

pub(crate) mod access;
pub(crate) mod copy;
pub(crate) mod during_transitions;
pub(crate) mod hostile;
pub(crate) mod watch;

use ryokan::core::engine::EngineName;
use ryokan::core::error::Error;
use ryokan::rpc::client::{FilesClient, HostClient, KernelClient};

use crate::processes::Inside;
use crate::support::{Host, users};

/// Runs a test on a daemon of each user.
fn each_user(test: impl Fn(Host)) {
    for user in users() {
        test(Host::start_as(user));
    }
}

async fn bash(client: &HostClient, name: &str) -> (KernelClient, FilesClient) {
    let kernel = crate::support::kernel(client, name, EngineName::Bash).await;
    let files = kernel.files().await.expect("its files");
    (kernel, files)
}

/// The engine of a kernel of [`bash`].
fn shell(kernel: &KernelClient) -> Inside<'_> {
    Inside { kernel, engine: EngineName::Bash }
}

pub(crate) fn reason<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.expect_err("refused").reason
}
