//! Checks a configuration against this host: missing programs and accounts, and unusable values.
//!
//! Only `ryokan config check` performs all of these checks. A daemon starts without an interpreter,
//! and then lacks its engine.

use nix::unistd::{Uid, User};

use super::Config;
use super::problem::Fault;
use crate::core::quantity;
use crate::sandbox::{Unfound, find_program};

/// The named items that this host lacks.
///
/// `names` reports whether the file contains a key: an interpreter that only the defaults name may
/// be missing.
pub(super) fn lacking(config: &Config, names: impl Fn(&[&str]) -> bool) -> Vec<Fault> {
    let mut faults = Vec::new();
    let at = ["sandbox", "worker_user"];
    // Only a daemon that runs as root needs the account.
    if (names(&at) || Uid::effective().is_root())
        && let Err(why) = account(&config.sandbox.worker_user)
    {
        faults.push(Fault::new(&at, why).hint("name an unprivileged account of this host"));
    }
    for (engine, command) in config.engines.interpreters() {
        let at = ["engines", engine.name(), "command"];
        if !names(&at) {
            continue;
        }
        let why = match find_program(&command, &config.sandbox.system_paths) {
            Ok(_) => continue,
            Err(Unfound::Hidden) => format!("kernels cannot see {command:?}, or what it leads to"),
            Err(Unfound::Absent) => format!("there is no program {command:?} on this host"),
        };
        let hint = "name a program below /usr, /opt or /nix, or its folder in sandbox.system_paths";
        faults.push(Fault::new(&at, why).hint(hint));
    }
    for path in &config.sandbox.system_paths {
        if let Err(error) = path.metadata() {
            let why = format!("{path:?} cannot be shown to kernels: {error}");
            faults.push(Fault::new(&["sandbox", "system_paths"], why).hint("take it out: no kernel would start"));
        }
    }
    let one = config.defaults.memory;
    if let Some(most) = config.limits.memory.filter(|most| *most < one) {
        let [one, most] = [one, most].map(quantity::format_size);
        let why = format!("{most} for all workers is less than one kernel is promised ({one})");
        let hint = "raise it, or lower defaults.memory: no kernel would start that does not ask for less";
        faults.push(Fault::new(&["limits", "memory"], why).hint(hint));
    }
    faults
}

/// User and group of the account that runs workers.
///
/// # Errors
/// The account does not exist or is root's.
pub fn account(name: &str) -> Result<(u32, u32), String> {
    let found = User::from_name(name).map_err(|error| format!("account {name:?}: {error}"))?;
    let user = found.ok_or_else(|| format!("there is no account {name:?}"))?;
    match user.uid.is_root() || user.gid.as_raw() == 0 {
        true => Err(format!("account {name:?} is root's")),
        false => Ok((user.uid.as_raw(), user.gid.as_raw())),
    }
}
