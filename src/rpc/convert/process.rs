//! Processes: requests, and lists of running ones.

use capnp::struct_list;

use super::text::{bounded, count, malformed, read_name, read_pairs, read_text_list, write_pairs, write_text_list};
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, Program, TerminalSize, Work};
use crate::core::ids::ExecId;
use crate::core::info::ProcessInfo;
use crate::core::limits;
use crate::core::spec::WORKSPACE;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads a request and checks all its limits.
///
/// # Errors
/// `invalidArgument` that names the exceeded limit.
pub fn read_process_request(reader: wire::process_request::Reader<'_>) -> Result<ExecRequest> {
    let cwd = read_name(reader.get_cwd(), "working directory")?;
    let program = Program {
        argv: read_text_list(reader.get_argv(), "arguments", limits::PROCESS_ARGUMENTS)?,
        cwd: if cwd.starts_with('/') { cwd } else { in_workspace(&cwd) },
        detached: reader.get_detached(),
        terminal: TerminalSize::from_wire(reader.get_rows(), reader.get_columns()),
    };
    let request = ExecRequest {
        what: Work::Process(program),
        stdin_open: reader.get_stdin_open(),
        env: read_pairs(reader.get_env(), "environment", limits::ENV_BYTES / 4)?,
        timeout_ms: reader.get_timeout_ms(),
        output_limit_bytes: reader.get_output_limit_bytes(),
        expected_version: reader.get_expected_version(),
        ..ExecRequest::default()
    };
    request.check().map_err(|e| Error::invalid(e.to_string()))?;
    Ok(request)
}

fn in_workspace(path: &str) -> String {
    if path.is_empty() { WORKSPACE.to_owned() } else { format!("{WORKSPACE}/{path}") }
}

/// Writes a request.
///
/// # Errors
/// `invalidArgument` if it runs no program.
pub fn write_process_request(mut builder: wire::process_request::Builder<'_>, request: &ExecRequest) -> Result<()> {
    let Work::Process(program) = &request.what else {
        return Err(Error::invalid("a process needs a program"));
    };
    write_text_list(builder.reborrow().init_argv(count(program.argv.len())), &program.argv);
    builder.set_cwd(program.cwd.as_str());
    builder.set_detached(program.detached);
    if let Some(TerminalSize { rows, columns }) = program.terminal {
        builder.set_rows(rows);
        builder.set_columns(columns);
    }
    builder.set_stdin_open(request.stdin_open);
    write_pairs(builder.reborrow().init_env(count(request.env.len())), &request.env);
    builder.set_timeout_ms(request.timeout_ms);
    builder.set_output_limit_bytes(request.output_limit_bytes);
    builder.set_expected_version(request.expected_version);
    Ok(())
}

/// Reads running processes.
///
/// # Errors
/// `invalidArgument` for malformed data and for more than [`limits::PROCESSES`].
pub fn read_processes(
    reader: capnp::Result<struct_list::Reader<'_, wire::process_info::Owned>>,
) -> Result<Vec<ProcessInfo>> {
    let list = reader.map_err(|e| malformed("processes", e))?;
    bounded(list.len(), "processes", limits::PROCESSES)?;
    let info = |reader: wire::process_info::Reader<'_>| {
        Ok(ProcessInfo {
            exec: ExecId(reader.get_exec_id()),
            argv: read_text_list(reader.get_argv(), "arguments", limits::PROCESS_ARGUMENTS)?,
            started_at_ms: reader.get_started_at_ms(),
            detached: reader.get_detached(),
            terminal: reader.get_terminal(),
        })
    };
    list.iter().map(info).collect()
}

/// Writes into a builder of the same length.
pub fn write_processes(mut builder: struct_list::Builder<'_, wire::process_info::Owned>, processes: &[ProcessInfo]) {
    for (i, process) in processes.iter().enumerate() {
        let mut info = builder.reborrow().get(count(i));
        info.set_exec_id(process.exec.0);
        write_text_list(info.reborrow().init_argv(count(process.argv.len())), &process.argv);
        info.set_started_at_ms(process.started_at_ms);
        info.set_detached(process.detached);
        info.set_terminal(process.terminal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fill: impl FnOnce(wire::process_request::Builder<'_>)) -> Result<ExecRequest> {
        let mut message = capnp::message::Builder::new_default();
        let mut request = message.init_root::<wire::process_request::Builder<'_>>();
        fill(request.reborrow());
        read_process_request(request.into_reader())
    }

    #[test]
    fn process_request_round_trips() {
        let program = Program {
            argv: vec!["a".into(), String::new()],
            cwd: "/tmp".into(),
            detached: true,
            terminal: TerminalSize::from_wire(1, 2),
        };
        let request = ExecRequest {
            what: Work::Process(program),
            stdin_open: true,
            env: vec![("A".into(), "b".into())],
            timeout_ms: 7,
            output_limit_bytes: 8,
            expected_version: 9,
            ..ExecRequest::default()
        };
        assert_eq!(read(|builder| write_process_request(builder, &request).expect("written")), Ok(request));
    }

    #[test]
    fn invalid_process_request_is_refused() {
        assert!(read(|_| ()).is_err(), "no program");
        let program = |argument: &str, cwd: &str| {
            read(|mut builder| {
                builder.set_cwd(cwd);
                builder.init_argv(1).set(0, argument);
            })
        };
        for (given, whole) in [("", WORKSPACE), ("src/a", "/workspace/src/a"), ("/tmp", "/tmp")] {
            let request = program("ls", given).expect("valid");
            assert!(matches!(request.what, Work::Process(program) if program.cwd == whole), "{given:?}");
        }
        for (argument, cwd) in [("", "/tmp"), ("a\0b", "/tmp"), ("ls", "/a\0b")] {
            assert!(program(argument, cwd).is_err(), "{argument:?} in {cwd:?}");
        }
        assert!(program(&"x".repeat(limits::PROCESS_ARGUMENT_MAX_BYTES + 1), "/tmp").is_err());
    }
}
