//! Executions: requests and results.

use super::output::{read_output_data, write_output_data};
use super::text::{bounded, count, malformed, read_data, read_name, read_pairs, read_text, unknown, write_pairs};
use super::value::{read_value, write_value};
use crate::core::error::{Error, Result};
use crate::core::exec::{Display, ExecEnd, ExecRequest, ExecResult, ExecStatus, Work};
use crate::core::ids::ExecId;
use crate::core::info::CodeStatus;
use crate::core::limits;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads a request and checks all its limits.
///
/// # Errors
/// `invalidArgument` that names the exceeded limit.
pub fn read_exec_request(reader: wire::exec_request::Reader<'_>) -> Result<ExecRequest> {
    let tool = read_name(reader.get_tool(), "tool name")?;
    let code = read_text(reader.get_code(), "code")?;
    let what = match tool.is_empty() {
        true => Work::Code(code),
        false if !code.is_empty() => return Err(Error::invalid("a request has code or a tool, not both")),
        false => {
            let args = reader.get_args().map_err(|e| malformed("args", e))?;
            Work::Call { name: tool, args: read_value(args)? }
        }
    };
    let request = ExecRequest {
        what,
        stdin: read_data(reader.get_stdin(), "inline standard input", limits::STDIN_INLINE_BYTES)?,
        stdin_open: reader.get_stdin_open(),
        env: read_pairs(reader.get_env(), "environment", limits::ENV_BYTES / 4)?,
        timeout_ms: reader.get_timeout_ms(),
        output_limit_bytes: reader.get_output_limit_bytes(),
        key: read_name(reader.get_key(), "idempotency key")?,
        expected_version: reader.get_expected_version(),
    };
    request.check().map_err(|e| Error::invalid(e.to_string()))?;
    Ok(request)
}

/// Writes a request.
///
/// # Errors
/// As [`write_value`].
pub fn write_exec_request(mut builder: wire::exec_request::Builder<'_>, request: &ExecRequest) -> Result<()> {
    match &request.what {
        Work::Code(code) => builder.set_code(code.as_str()),
        Work::Call { name, args } => {
            builder.set_tool(name.as_str());
            write_value(builder.reborrow().init_args(), args)?;
        }
        Work::Process(_) => return Err(Error::invalid("a process is no execution of code: spawn it")),
    }
    builder.set_stdin(&request.stdin);
    builder.set_stdin_open(request.stdin_open);
    write_pairs(builder.reborrow().init_env(count(request.env.len())), &request.env);
    builder.set_timeout_ms(request.timeout_ms);
    builder.set_output_limit_bytes(request.output_limit_bytes);
    builder.set_key(request.key.as_str());
    builder.set_expected_version(request.expected_version);
    Ok(())
}

/// Reads a result.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_exec_result(reader: wire::exec_result::Reader<'_>) -> Result<ExecResult> {
    let value = match reader.get_has_data() {
        true => Some(read_value(reader.get_data().map_err(|e| malformed("result value", e))?)?),
        false => None,
    };
    let output = match reader.has_output() {
        true => Some(read_output_data(reader.get_output().map_err(|e| malformed("output", e))?)?),
        false => None,
    };
    let kept = |reader: capnp::Result<capnp::data::Reader<'_>>, what| {
        reader.map(<[u8]>::to_vec).map_err(|e| malformed(what, e))
    };
    Ok(ExecResult {
        exec: ExecId(reader.get_exec_id()),
        end: ExecEnd {
            status: status_from_wire(reader.get_status().map_err(|n| unknown("execution status", n))?),
            code: reader.get_code(),
            err: read_text(reader.get_err(), "error text")?,
            value,
            output,
            duration_us: reader.get_duration_us(),
        },
        stdout: kept(reader.get_stdout(), "stdout")?,
        stderr: kept(reader.get_stderr(), "stderr")?,
        truncated_bytes: reader.get_truncated_bytes(),
        stdout_tail: kept(reader.get_stdout_tail(), "stdout's tail")?,
        stderr_tail: kept(reader.get_stderr_tail(), "stderr's tail")?,
        displays: read_displays(reader.get_displays().map_err(|e| malformed("displays", e))?)?,
    })
}

/// Writes a result.
///
/// # Errors
/// As [`write_value`] and [`write_output_data`].
pub fn write_exec_result(mut builder: wire::exec_result::Builder<'_>, result: &ExecResult) -> Result<()> {
    let end = &result.end;
    builder.set_code(end.code);
    builder.set_ok(end.status == ExecStatus::Done);
    builder.set_err(end.err.as_str());
    builder.set_stdout(&result.stdout);
    builder.set_stderr(&result.stderr);
    builder.set_has_data(end.value.is_some());
    if let Some(value) = &end.value {
        write_value(builder.reborrow().init_data(), value)?;
    }
    if let Some(output) = &end.output {
        write_output_data(builder.reborrow().init_output(), output)?;
    }
    builder.set_status(status_to_wire(end.status));
    builder.set_duration_us(end.duration_us);
    builder.set_exec_id(result.exec.0);
    builder.set_truncated_bytes(result.truncated_bytes);
    if !result.stdout_tail.is_empty() {
        builder.set_stdout_tail(&result.stdout_tail);
    }
    if !result.stderr_tail.is_empty() {
        builder.set_stderr_tail(&result.stderr_tail);
    }
    if !result.displays.is_empty() {
        let mut list = builder.init_displays(count(result.displays.len()));
        for (i, display) in result.displays.iter().enumerate() {
            let mut out = list.reborrow().get(count(i));
            out.set_mime(display.mime.as_str());
            out.set_data(&display.data);
        }
    }
    Ok(())
}

fn read_displays(list: capnp::struct_list::Reader<'_, wire::display::Owned>) -> Result<Vec<Display>> {
    bounded(list.len(), "displays", limits::OUTPUT_KEPT_ITEMS)?;
    let display = |reader: wire::display::Reader<'_>| {
        let data = reader.get_data().map_err(|e| malformed("display", e))?.to_vec();
        Ok(Display { mime: read_text(reader.get_mime(), "media type")?, data })
    };
    list.iter().map(display).collect()
}

fn status_to_wire(status: ExecStatus) -> wire::ExecStatus {
    match status {
        ExecStatus::Done => wire::ExecStatus::Done,
        ExecStatus::Failed => wire::ExecStatus::Failed,
        ExecStatus::Timeout => wire::ExecStatus::Timeout,
        ExecStatus::Interrupted => wire::ExecStatus::Interrupted,
        ExecStatus::Lost => wire::ExecStatus::Lost,
        ExecStatus::Refused => wire::ExecStatus::Refused,
    }
}

fn status_from_wire(status: wire::ExecStatus) -> ExecStatus {
    match status {
        wire::ExecStatus::Done => ExecStatus::Done,
        wire::ExecStatus::Failed => ExecStatus::Failed,
        wire::ExecStatus::Timeout => ExecStatus::Timeout,
        wire::ExecStatus::Interrupted => ExecStatus::Interrupted,
        wire::ExecStatus::Lost => ExecStatus::Lost,
        wire::ExecStatus::Refused => ExecStatus::Refused,
    }
}

/// The wire form of a code's status.
pub fn code_status_to_wire(status: CodeStatus) -> wire::CodeStatus {
    match status {
        CodeStatus::Complete => wire::CodeStatus::Complete,
        CodeStatus::Incomplete => wire::CodeStatus::Incomplete,
        CodeStatus::Invalid => wire::CodeStatus::Invalid,
    }
}

/// Reads a code's status.
///
/// # Errors
/// `invalidArgument` for a status unknown to this build.
pub fn read_code_status(status: Result<wire::CodeStatus, capnp::NotInSchema>) -> Result<CodeStatus> {
    Ok(match status.map_err(|n| unknown("code status", n))? {
        wire::CodeStatus::Complete => CodeStatus::Complete,
        wire::CodeStatus::Incomplete => CodeStatus::Incomplete,
        wire::CodeStatus::Invalid => CodeStatus::Invalid,
    })
}

/// Reads the matches of a completion.
///
/// # Errors
/// `invalidArgument` for more than [`limits::VALUE_ITEMS`].
pub fn read_matches(reader: capnp::Result<capnp::text_list::Reader<'_>>) -> Result<Vec<String>> {
    let list = reader.map_err(|e| malformed("completions", e))?;
    bounded(list.len(), "completions", limits::VALUE_ITEMS)?;
    list.iter().map(|item| read_text(item, "completion")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::convert::testing::{any_request, any_result, check_round_trip, check_round_trip_with};
    use proptest::prelude::*;

    fn same_result(a: &ExecResult, b: &ExecResult) -> bool {
        let value = |r: &ExecResult| r.end.value.as_ref().map(|v| v.to_json().to_string());
        let rest = |r: &ExecResult| ExecResult { end: ExecEnd { value: None, ..r.end.clone() }, ..r.clone() };
        value(a) == value(b) && rest(a) == rest(b)
    }

    proptest! {
        #[test]
        fn exec_request_round_trips(request in any_request()) {
            check_round_trip_with::<wire::exec_request::Owned, _>(
                &request, write_exec_request, read_exec_request, |a, b| format!("{a:?}") == format!("{b:?}"))?;
        }

        #[test]
        fn exec_result_round_trips(result in any_result()) {
            check_round_trip_with::<wire::exec_result::Owned, _>(
                &result, write_exec_result, read_exec_result, same_result)?;
        }
    }

    #[test]
    fn empty_exec_request_is_default() {
        let request = ExecRequest::default();
        check_round_trip::<wire::exec_request::Owned, _>(&request, write_exec_request, read_exec_request)
            .expect("it survives");
    }

    #[test]
    fn invalid_exec_request_is_refused() {
        let refused = |fill: fn(wire::exec_request::Builder<'_>)| {
            let mut message = capnp::message::Builder::new_default();
            let mut request = message.init_root::<wire::exec_request::Builder<'_>>();
            fill(request.reborrow());
            read_exec_request(request.into_reader()).is_err()
        };
        assert!(refused(|mut r| r.set_code("a\0b")));
        assert!(refused(|mut r| r.set_code(capnp::text::Reader(b"\xff"))));
        assert!(refused(|mut r| r.set_tool("a\0b")));
        assert!(refused(|mut r| {
            r.set_tool("t");
            r.set_code("c");
        }));
        assert!(refused(|mut r| r.set_key("k".repeat(limits::KEY_BYTES + 1))));
        assert!(refused(|r| r.init_env(1).get(0).set_key("A=B")));
        assert!(refused(|r| {
            let mut pair = r.init_env(1).get(0);
            pair.set_key("A");
            pair.set_value("b\0");
        }));
    }

    #[test]
    fn wire_exec_status_round_trips() {
        for status in ExecStatus::ALL {
            assert_eq!(status_from_wire(status_to_wire(status)), status);
        }
        for status in [CodeStatus::Complete, CodeStatus::Incomplete, CodeStatus::Invalid] {
            assert_eq!(read_code_status(Ok(code_status_to_wire(status))), Ok(status));
        }
    }
}
