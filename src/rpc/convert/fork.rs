//! Fork requests. Results contain capabilities, so client and server convert those themselves.

use std::time::Duration;

use super::spec::{read_optional_isolation, read_spec_update, write_spec_update};
use super::text::{malformed, read_name, read_text, unknown};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::fork::Forking;
use crate::core::limits;
use crate::core::spec::Isolation;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads a request.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_fork_request(reader: wire::fork_request::Reader<'_>) -> Result<Forking> {
    Ok(Forking {
        name: read_name(reader.get_name(), "name of a kernel")?,
        from: read_text(reader.get_from(), "checkpoint to fork from")?,
        count: reader.get_count(),
        interrupt: reader.get_interrupt(),
        wait: match reader.get_wait_ms() {
            0 => limits::CHECKPOINT_WAIT,
            ms => Duration::from_millis(ms),
        },
        expected_version: reader.get_expected_version(),
        key: read_text(reader.get_key(), "key")?,
        isolation: read_optional_isolation(reader.get_isolation())?,
        image: Some(read_text(reader.get_image(), "image")?).filter(|image| !image.is_empty()),
        update: read_spec_update(reader.get_change().map_err(|e| malformed("change", e))?)?,
    })
}

/// Writes a request.
///
/// # Errors
/// `invalidArgument` for a path that is not UTF-8.
pub fn write_fork_request(mut builder: wire::fork_request::Builder<'_>, forking: &Forking) -> Result<()> {
    builder.set_name(forking.name.as_str());
    builder.set_from(forking.from.as_str());
    builder.set_count(forking.count);
    builder.set_interrupt(forking.interrupt);
    builder.set_wait_ms(u64::try_from(forking.wait.as_millis()).unwrap_or(u64::MAX).max(1));
    builder.set_expected_version(forking.expected_version);
    builder.set_key(forking.key.as_str());
    builder.set_isolation(forking.isolation.map_or("", Isolation::name));
    builder.set_image(forking.image.as_deref().unwrap_or_default());
    write_spec_update(builder.init_change(), &forking.update)
}

/// Reads an error that is part of an answer.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_error(reader: wire::error::Reader<'_>) -> Result<Error> {
    let code = reader.get_code().map_err(|n| unknown("code of an error", n))?;
    let code = ErrorCode::ALL.into_iter().nth(code as usize);
    Ok(Error {
        code: code.ok_or_else(|| Error::invalid("an error without a code that is known"))?,
        message: read_text(reader.get_message(), "message of an error")?,
        hint: read_text(reader.get_hint(), "hint of an error")?,
        reason: read_text(reader.get_reason(), "reason of an error")?,
        said: String::new(),
    })
}

/// Writes an error that is part of an answer.
pub fn write_error(mut builder: wire::error::Builder<'_>, error: &Error) {
    let place = ErrorCode::ALL.iter().position(|code| *code == error.code).unwrap_or_default();
    if let Ok(code) = wire::ErrorCode::try_from(place as u16) {
        builder.set_code(code);
    }
    builder.set_message(error.message.as_str());
    builder.set_hint(error.hint.as_str());
    builder.set_reason(error.reason.as_str());
}

#[cfg(test)]
#[expect(clippy::unit_arg, reason = "`infallible` turns a writer that cannot fail into one that the checks take")]
mod tests {
    use super::*;
    use crate::core::spec::Net;
    use crate::core::spec_update::SpecUpdate;
    use crate::rpc::convert::testing::{check_round_trip, infallible};

    #[test]
    fn fork_request_round_trips() {
        let forking = Forking {
            from: "~2".into(),
            count: 7,
            interrupt: true,
            wait: Duration::from_millis(5),
            expected_version: 9,
            key: "k".into(),
            isolation: Some(Isolation::Microvm),
            image: Some("v1".into()),
            update: SpecUpdate { net: Some(Net::Host), memory_bytes: Some(9), ..SpecUpdate::default() },
            ..Forking::of("name")
        };
        check_round_trip::<wire::fork_request::Owned, _>(&forking, write_fork_request, read_fork_request)
            .expect("survives");
        for code in ErrorCode::ALL {
            let error = Error::new(code, "what").hint("do").reason("rule");
            let write = |b: wire::error::Builder<'_>, e: &Error| infallible(write_error(b, e));
            check_round_trip::<wire::error::Owned, _>(&error, write, read_error).expect("survives");
        }
    }
}
