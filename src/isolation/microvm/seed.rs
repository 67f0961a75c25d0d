//! Seeds a guest: machines of one template have the same random state, clock and identity until this is confirmed.

use std::time::{Duration, Instant};

use super::client::{Client, unexpected};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::machine::{Reply, Request};
use crate::sys;

/// Whether boot id and machine id change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Renewal {
    /// It is the machine that it was.
    Keep,
    /// It is a copy of a machine that runs.
    Renew,
}

/// Seeds the guest's random generator and sets its clock. Returns its boot id. `shared`: the boot id of another machine
/// of the same template, or nothing. Blocks.
///
/// # Errors
/// Those of the guest; `unavailable` if the guest does not confirm it: the machine must end.
pub(super) fn seed(client: &mut Client, shared: &str, renewal: Renewal) -> Result<String> {
    let now = Duration::from_millis(u64::try_from(sys::clock::now_ms()).unwrap_or_default());
    let now_ns = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
    let request = Request::Seed { entropy: sys::random::bytes(), now_ns, renew: renewal == Renewal::Renew };
    let begun = Instant::now();
    let (reply, _) = client.call(&request, &[], limits::VM_CALL)?;
    let Reply::Seeded { boot_id, now_ns: theirs, .. } = reply else { return Err(unexpected()) };
    confirm(&boot_id, shared, (now_ns, begun.elapsed()), theirs)?;
    Ok(boot_id)
}

/// Checks an answer; `took`: the time from the sent clock to the answer, in which the guest's went on.
fn confirm(boot_id: &str, shared: &str, (now_ns, took): (i64, Duration), theirs: i64) -> Result<()> {
    let most = (limits::VM_CLOCK_ERROR + took).as_nanos();
    let why = if boot_id.len() != 36 || !boot_id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
        "its boot id is none"
    } else if boot_id == shared {
        "it has the boot id of another machine"
    } else if u128::from(theirs.abs_diff(now_ns)) > most {
        "its clock is not set"
    } else {
        return Ok(());
    };
    Err(Error::unavailable(format!("the seeding of a virtual machine is not confirmed: {why}")).reason("seeding"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unseeded_guests_are_refused() {
        let at = |now_ns| (now_ns, Duration::from_secs(3));
        let (one, other) = ("0b3f8d4e-5c1e-4d9a-9f4e-2f8b7c6d5e4a", "1b3f8d4e-5c1e-4d9a-9f4e-2f8b7c6d5e4a");
        assert!(confirm(one, "", at(7), 7).is_ok() && confirm(one, other, at(7), 8).is_ok());
        assert!(confirm(one, one, at(7), 7).is_err(), "the random state is the template's");
        assert!(confirm("", other, at(7), 7).is_err() && confirm(&"g".repeat(36), other, at(7), 7).is_err());
        assert!(confirm(one, other, at(10_000_000_000), 0).is_err(), "the clock is the template's");
        assert!(confirm(one, other, at(0), 8_000_000_000).is_ok(), "the call took three seconds");
        assert!(confirm(one, other, at(0), i64::MIN).is_err());
    }
}
