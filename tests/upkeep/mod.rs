//! Old and unneeded data is removed, needed data stays, damage is found, and actions are recorded.

mod auditing;
mod crash_safety;
mod garbage_collection;
mod retention;
mod stop_checkpoints;
mod usage;
mod verifying;

use std::path::{Path, PathBuf};

use ryokan::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType};
use ryokan::core::upkeep::{GcItem, GcReport};
use ryokan::rpc::client::{HostClient, KernelClient};
use serde_json::Value;

use crate::support::{Host, User};

/// A host whose daemon does not collect by itself, and has no minimum age for garbage.
fn host(user: User) -> Host {
    let mut host = Host::prepare(user);
    host.configure("[upkeep]\ninterval = \"never\"\ngrace = \"0s\"\n");
    host.launch();
    host
}

fn taking(kind: CheckpointType, name: &str) -> CheckpointRequest {
    CheckpointRequest::new(kind, name)
}

async fn auto(kernel: &KernelClient, name: &str) -> Checkpoint {
    kernel.checkpoint(&taking(CheckpointType::Auto, name)).await.expect("taken")
}

async fn manual(kernel: &KernelClient, name: &str) -> Checkpoint {
    kernel.checkpoint(&taking(CheckpointType::Manual, name)).await.expect("taken")
}

/// All checkpoints of a kernel, newest first.
async fn log(kernel: &KernelClient) -> Vec<Checkpoint> {
    let mut all = Vec::new();
    let listed = kernel.checkpoints(0, async |one, _| {
        all.push(one);
        Ok(())
    });
    listed.await.expect("a list");
    all
}

async fn names(kernel: &KernelClient) -> Vec<String> {
    log(kernel).await.into_iter().map(|one| one.name).collect()
}

async fn gc(client: &HostClient, dry_run: bool) -> (Vec<GcItem>, GcReport) {
    let mut items = Vec::new();
    let done = client.gc(dry_run, async |item| {
        items.push(item);
        Ok(())
    });
    let report = done.await.expect("collected");
    (items, report)
}

/// Verifies with the command line; returns its output, one object a line, the report last.
fn verify(host: &Host) -> (bool, Vec<Value>) {
    let output = host.cli(&["verify", "--json"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn sound(host: &Host, what: &str) {
    let (is_sound, reported) = verify(host);
    assert!(is_sound, "{what}: {reported:?}\n{}", host.log());
}

/// The packs of the store.
fn packs(host: &Host) -> Vec<PathBuf> {
    let folder = host.data().join("store/packs");
    std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()).collect()
}

fn bytes_of(paths: &[PathBuf]) -> u64 {
    paths.iter().map(|path| std::fs::metadata(path).map_or(0, |meta| meta.len())).sum()
}

/// Changes a database of a stopped daemon, without its triggers.
fn edit(database: &Path, sql: &str) {
    let conn = rusqlite::Connection::open(database).unwrap();
    conn.set_db_config(rusqlite::config::DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false).unwrap();
    conn.execute_batch(sql).unwrap();
    conn.close().unwrap();
}

/// The directory of the only kernel.
fn kernel_folder(host: &Host) -> PathBuf {
    let mut folders = std::fs::read_dir(host.data().join("kernels")).unwrap().flatten();
    folders.next().unwrap().path()
}
