//! The service manager: readiness, watchdog, inherited sockets, and whether a stop is a restart.

use std::os::unix::net::UnixListener as StdListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use sd_notify::NotifyState;
use tokio::net::UnixListener;

use crate::link::connector::unix;

/// The control socket, inherited from the service manager or created here.
///
/// # Errors
/// If another process serves it, or it cannot be created.
pub(super) fn control_socket(path: &Path, mode: u32) -> anyhow::Result<ControlSocket> {
    let mut inherited = listenfd::ListenFd::from_env();
    if let Some(listener) = inherited.take_unix_listener(0).context("the service manager's socket")? {
        listener.set_nonblocking(true)?;
        return Ok(ControlSocket { listener: UnixListener::from_std(listener)?, own: false });
    }
    let listener = make_socket(path, mode).with_context(|| format!("control socket {}", path.display()))?;
    Ok(ControlSocket { listener, own: true })
}

/// The control socket.
pub(super) struct ControlSocket {
    pub listener: UnixListener,
    /// Created here; otherwise it belongs to the service manager, which keeps it for the next
    /// daemon.
    pub own: bool,
}

/// Creates a socket at `path`, replacing a former daemon's.
pub(super) fn make_socket(path: &Path, mode: u32) -> anyhow::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt as _;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let listener: StdListener = unix::listen(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    listener.set_nonblocking(true)?;
    Ok(UnixListener::from_std(listener)?)
}

/// Notifies the service manager, if there is one.
pub(super) fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager could not be notified");
    }
}

/// Notifies the watchdog, at its interval, that the event loop is alive.
pub(super) async fn watchdog() {
    let Some(interval) = sd_notify::watchdog_enabled() else {
        return std::future::pending().await;
    };
    let mut ticks = tokio::time::interval(interval / 3);
    loop {
        ticks.tick().await;
        notify(&[NotifyState::Watchdog]);
    }
}

/// Whether the service manager stops this unit for a restart: workers then survive.
///
/// systemd sends the same signal for both, but knows which job it runs.
pub(super) fn is_restart(system: bool) -> bool {
    let Some(unit) = own_unit() else { return false };
    let mut command = Command::new("systemctl");
    if !system {
        command.arg("--user");
    }
    command.args(["list-jobs", "--no-legend", "--plain", &unit]);
    let Ok(output) = command.output() else { return false };
    String::from_utf8_lossy(&output.stdout).lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        words.next() == Some(unit.as_str()) && matches!(words.next(), Some("restart" | "try-restart"))
    })
}

/// The unit that started this process, only if the unit itself says so (`INVOCATION_ID`).
fn own_unit() -> Option<String> {
    std::env::var_os("INVOCATION_ID")?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    unit_of(&groups)
}

fn unit_of(groups: &str) -> Option<String> {
    let path = groups
        .lines()
        .find_map(|line| line.strip_prefix("0::").or_else(|| line.split_once(":name=systemd:").map(|(_, p)| p)))?;
    path.rsplit('/').find(|part| part.ends_with(".service")).map(str::to_owned)
}

/// Asks the service manager for more time: its own setting limits an orderly stop.
pub(super) fn extend(stop: Duration) {
    let usec = u32::try_from(stop.as_micros()).unwrap_or(u32::MAX);
    notify(&[NotifyState::Stopping, NotifyState::ExtendTimeoutUsec(usec)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_unit_from_cgroup_path() {
        let of = |text: &str| unit_of(text);
        let user = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/ryokand.service/daemon\n";
        assert_eq!(of(user).as_deref(), Some("ryokand.service"));
        assert_eq!(of("1:name=systemd:/system.slice/ryokand.service\n").as_deref(), Some("ryokand.service"));
        assert_eq!(of("0::/init.scope\n"), None);
        assert_eq!(of(""), None);
    }
}
