//! Accepted and refused arguments of the command line, and the exit code of each error.

use clap::{CommandFactory, Parser};
use ryokan::cli::args::{Cli, Command};
use ryokan::cli::exit;
use ryokan::cli::failure::Failure;
use ryokan::cli::spec::{parse_allowed, parse_pair};
use ryokan::core::error::{Error, ErrorCode};

#[test]
fn clap_definition_is_valid() {
    Cli::command().debug_assert();
}

#[test]
fn documented_commands_parse() {
    for line in [
        "run 1+1",
        "run -f a.py --engine python --isolation process",
        "run -",
        "new n --engine kaish --isolation microvm --image base@1 --allow-path /a:ro --allow-path /b:rw --venv v --net none",
        "new n --memory 512M --cpus 1 --pids 256 --idle-timeout 5m --from-dir . --label a=b --allow-degraded landlock",
        "exec n 1+1 --timeout 5s --json",
        "exec n -f a.py",
        "exec n -",
        "exec n --stdin cat",
        "exec n -- -x",
        "repl n",
        "ls",
        "top",
        "top --once",
        "top --json",
        "ls pre --label a=b --state ready -q",
        "new n --idle-timeout never",
        "show n",
        "start n",
        "stop n --force",
        "rm n --yes",
        "rm a b c -y",
        "vars n",
        "vars n get v",
        "vars n set v 3",
        "vars n set v -3",
        "vars n set v -",
        "new n --share k --engine bash --key x",
        "cp a.txt n:",
        "cp n:/workspace/a -",
        "mount n /data ./data --rw",
        "unmount n /data",
        "mounts n",
        "tools n",
        "tools n call wc [1]",
        "mcp add n s --url http://x --header A=b",
        "mcp add n s --env A=b -- prog --flag",
        "mcp add n s",
        "mcp ls n",
        "mcp rm n s",
        "blob put n file",
        "group new g",
        "group add g --kernel n",
        "group add g --repository . --name code",
        "group rm g code",
        "group rm g --freeze ~1",
        "group show",
        "group set g --on-failure pause",
        "freeze g --on-failure resume",
        "resume g",
        "freeze g -m text",
        "lock g --check",
        "restore g 1 --member a --member b",
        "blob get n 0000000000000000000000000000000000000000000000000000000000000000",
        "journal n --since 3 --limit 4 --full",
        "journal n --follow",
        "journal n --tail 3 --follow",
        "journal n -n 3",
        "journal n --checkpoint latest",
        "message n --role user text",
        "exec n --attach 3 --offset 9",
        "shell n --cwd /tmp",
        "spawn n -t -- vim a",
        "diff n",
        "restore n latest --preview",
        "daemon status",
        "daemon log -f -n 3",
        "checkpoint n -m text --conflict",
        "checkpoint n --summary text --compact 1..9 --compact 20..",
        "diff n a b -p -- src",
        "diff n a --text",
        "restore n ~2 --with-artifacts --supersede-decisions",
        "work step begin n text",
        "work step complete n",
        "work step ls n",
        "work handoff n agent -m text",
        "work decision open n title -m text",
        "work decision lock n 1",
        "work decision supersede n 1",
        "work decision show n 1",
        "work decision ls n",
        "work artifact put n report file --type text/plain",
        "work artifact put n report --path out/report",
        "work artifact get n report --version 2 -o file",
        "work artifact ls n",
        "work artifact ls n report",
        "work artifact revert n report 1",
        "events",
        "events n --since 4 --follow",
        "config check",
        "config check file.toml",
        "config show",
        "doctor",
        "completions bash",
        "tour",
        "--json ls",
        "ls --json --color never -vv --no-autostart",
        "--socket /x ls",
        "--system ls",
    ] {
        let words = line.split(' ').filter(|word| !word.is_empty());
        assert!(Cli::try_parse_from(["ryokan"].into_iter().chain(words)).is_ok(), "{line}");
    }
}

#[test]
fn invalid_arguments_rejected() {
    for line in [
        "",
        "nonsense",
        "run a b",
        "run a -f b",
        "exec",
        "exec n a -f b",
        "exec n a --attach 1",
        "exec n --attach x",
        "exec n a --timeout 5",
        "new",
        "new a/b",
        "new n --net all",
        "new n --share k --memory 1G",
        "new n --share k --label a=b",
        "new n --engine perl",
        "new n --memory -1",
        "new n --idle-timeout ever",
        "ls --state running",
        "journal n -n 3 --since 4",
        "journal n -n 3 --limit 4",
        "new n --cpus 0",
        "new n --pids 0",
        "new n --label =x",
        "new n --label x",
        "new n --allow-path :ro",
        "rm",
        "set n v",
        "mcp add n s --url http://x -- prog",
        "mcp add n s --header A=b -- prog",
        "blob get n abc",
        "journal n --follow --limit 3",
        "message n text",
        "completions tcsh",
        "--system --socket /x ls",
        "ls --color sometimes",
    ] {
        let words = line.split(' ').filter(|word| !word.is_empty());
        let error = Cli::try_parse_from(["ryokan"].into_iter().chain(words)).expect_err(line);
        assert_eq!(exit::of_parser(&error), exit::USAGE, "{line}");
    }
}

#[test]
fn allowed_path_parsing() {
    for (text, path, writable) in [
        ("/a", "/a", false),
        ("/a:ro", "/a", false),
        ("/a:rw", "/a", true),
        ("/a:b:rw", "/a:b", true),
        ("/a:b", "/a:b", false),
        ("/a:rw:ro", "/a:rw", false),
        ("rel", "rel", false),
    ] {
        let allowed = parse_allowed(text).unwrap();
        assert_eq!((allowed.path.to_str().unwrap(), allowed.writable), (path, writable), "{text}");
    }
    assert!(parse_allowed(":rw").is_err() && parse_allowed("").is_err());
    assert_eq!(parse_pair("a=b=c"), Ok(("a".into(), "b=c".into())));
    assert_eq!(parse_pair("a="), Ok(("a".into(), String::new())));
}

#[test]
fn labels_and_limits_reach_request() {
    let line = "new n --memory 1.5G --cpus 0.5 --idle-timeout 0 --label a=b --label c=d --allow-path src:rw";
    let cli = Cli::try_parse_from(["ryokan"].into_iter().chain(line.split(' '))).unwrap();
    let Command::New(args) = cli.command else { panic!("new is new") };
    let request = args.spec.request(args.name).unwrap();
    assert_eq!((request.memory_bytes, request.cpu_milli), (Some(3 << 29), Some(500)));
    assert_eq!(request.idle_timeout_ms, Some(0));
    let never = Cli::try_parse_from(["ryokan", "new", "n", "--idle-timeout", "never"]).unwrap();
    let Command::New(never) = never.command else { panic!("new is new") };
    assert_eq!(never.spec.limits.idle_timeout, Some(0));
    assert_eq!(request.labels.len(), 2);
    assert_eq!(request.paths[0].path, std::env::current_dir().unwrap().join("src"));
    assert_eq!((request.engine, request.pids), (None, None), "the daemon's defaults");
}

#[test]
fn every_error_has_an_exit_code() {
    for code in ErrorCode::ALL {
        let expected = match code {
            ErrorCode::Internal | ErrorCode::Lost | ErrorCode::Corrupt | ErrorCode::Deadline => 1,
            ErrorCode::InvalidArgument => 2,
            ErrorCode::NotFound => 3,
            ErrorCode::AlreadyExists
            | ErrorCode::Conflict
            | ErrorCode::Refused
            | ErrorCode::Busy
            | ErrorCode::Departed => 4,
            ErrorCode::Unsupported => 5,
            ErrorCode::Unavailable => 69,
        };
        assert_eq!(exit::of(code), expected, "{code}");
        assert_eq!(Failure::from(Error::new(code, "x")).exit_code(), expected);
    }
}

#[test]
fn failure_exit_code_nonzero() {
    for (code, exit) in [(0, 0), (1, 1), (255, 255), (256, 1), (257, 1), (-1, 255), (i32::MIN, 1), (137, 137)] {
        assert_eq!(exit::of_execution(code), exit, "{code}");
    }
}
