//! Requests between executions, and the engine's start and end.

use std::io::Write as _;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use super::kit::{Engine, setup};
use crate::link::frames::{DynamicTool, EndStatus, Event, Request};
use crate::worker::engines::bash::{EXIT_PROTOCOL, EXIT_SETUP, Setup, serve};

#[test]
fn bash_set_keeps_types() {
    let mut engine = Engine::start();
    engine.out("export kept=1");
    for (name, value, shown) in [
        ("s", json!("it's \"text\"\nü"), "declare -- s=$'it\\'s \"text\"\\nü'"),
        ("b", json!(true), "declare -- b=\"true\""),
        ("i", json!({ "i": "-42" }), "declare -i i=\"-42\""),
        ("f", json!({ "f": "1.5" }), "declare -- f=\"1.5\""),
        ("n", Json::Null, "declare -- n"),
        ("a", json!(["x", { "i": "2" }, "y z"]), "declare -a a=([0]=\"x\" [1]=\"2\" [2]=\"y z\")"),
        ("m", json!({ "o": [["k k", "v"], ["]", { "i": "1" }]] }), "declare -A m=([\"]\"]=\"1\" [\"k k\"]=\"v\" )"),
        ("kept", json!("2"), "declare -x kept=\"2\""),
        ("a", json!("scalar now"), "declare -- a=\"scalar now\""),
    ] {
        let reply = engine.ask(|id| Request::Set { id, name: name.into(), value: value.clone() });
        assert!(reply.ok, "{name}: {reply:?}");
        assert!(engine.entries.contains_key(&format!("var/{name}")), "{name}");
        let seen = engine.out(&format!("declare -p {name}"));
        let (mut seen, mut shown): (Vec<char>, Vec<char>) =
            (seen.trim_end().chars().collect(), shown.chars().collect());
        if name == "m" {
            seen.sort_unstable();
            shown.sort_unstable();
        }
        assert_eq!(seen, shown);
    }
    for (name, value) in
        [("i", json!({ "i": "-42" })), ("s", json!("it's \"text\"\nü")), ("n", Json::Null), ("a", json!("scalar now"))]
    {
        assert_eq!(engine.get(name), value);
    }
    engine.out("arr=(1 'b c'); sparse=([2]=x); declare -A map=([k]=v); raw=$'\\377'; readonly ro=1");
    assert_eq!(engine.get("arr"), json!(["1", "b c"]));
    assert_eq!(engine.get("sparse"), json!({ "o": [["2", "x"]] }));
    assert_eq!(engine.get("map"), json!({ "o": [["k", "v"]] }));
    assert_eq!(engine.get("raw"), json!({ "x": "/w==" }));
    let reply = engine.ask(|id| Request::Get { id, name: "nosuch".into() });
    assert_eq!((reply.ok, reply.code.as_str()), (false, "notFound"));
    for (name, value) in [
        ("ro", json!("x")),
        ("1a", json!("x")),
        ("x;y", json!("x")),
        ("nest", json!([["x"]])),
        ("z", json!("a\0")),
        ("num", json!(4)),
    ] {
        let reply = engine.ask(|id| Request::Set { id, name: name.into(), value: value.clone() });
        assert_eq!((reply.ok, reply.code.as_str()), (false, "invalidArgument"), "{name}");
    }
    // Not an execution: the effects of the last one remain.
    engine.run("trap 'echo t' USR1; set -x; (exit 4)");
    engine.ask(|id| Request::Set { id, name: "q".into(), value: json!("1") });
    let ran = engine.run("echo $? $q");
    assert_eq!((ran.out.as_str(), ran.stderr.as_str()), ("4 1\n", "++ echo 4 1\n"));
}

#[test]
fn variables_and_tools_are_listed() {
    let mut engine = Engine::start();
    assert_eq!(engine.ask(|id| Request::Vars { id }).fields["vars"], json!([]));
    engine.out("x='some text'; declare -ix n=4; f() { echo; }");
    let vars = engine.ask(|id| Request::Vars { id }).fields["vars"].clone();
    assert_eq!(
        vars,
        json!([{ "name": "n", "type": "exported integer", "summary": "4" }, { "name": "x", "type": "string", "summary": "some text" }])
    );
    let tools = engine.ask(|id| Request::Tools { id }).fields["tools"].clone();
    let named = |name: &str| {
        tools.as_array().expect("a list").iter().find(|tool| tool["name"] == name).map(|tool| tool["source"].clone())
    };
    assert_eq!((named("f"), named("cd"), named("nosuch")), (Some(json!("user")), Some(json!("builtin")), None));
}

#[test]
fn completion_knows_commands_variables_and_files() {
    let mut engine = Engine::start();
    engine.out("my_function() { :; }; alias my_alias=ls; my_var=1; mkdir some_folder; : > some_file");
    for (code, start, wanted) in [
        ("my_", 0, &["my_alias", "my_function"][..]),
        ("echo $my_", 6, &["my_var"]),
        ("cat some_", 4, &["some_file", "some_folder/"]),
        ("declar", 0, &["declare"]),
        ("ls; basenam", 4, &["basename"]),
        ("echo nosuch", 5, &[]),
    ] {
        let reply = engine.ask(|id| Request::Complete { id, code: code.into(), cursor: code.len() });
        assert_eq!((&reply.fields["start"], &reply.fields["matches"]), (&json!(start), &json!(wanted)), "{code}");
    }
}

#[test]
fn bash_check_statuses() {
    let mut engine = Engine::start();
    for (code, status) in [
        ("echo hi", "complete"),
        ("if true; then", "incomplete"),
        ("echo 'x", "incomplete"),
        ("cat <<E\nx", "incomplete"),
        ("fi", "invalid"),
        ("f() { echo; }", "complete"),
        ("echo )", "invalid"),
    ] {
        let reply = engine.ask(|id| Request::Check { id, code: code.into() });
        assert_eq!(reply.fields["status"], status, "{code}");
        assert_eq!(reply.fields.contains_key("indent"), status == "incomplete");
    }
    engine.out("shopt -s extglob");
    let reply = engine.ask(|id| Request::Check { id, code: "ls !(a)".into() });
    assert_eq!(reply.fields["status"], "complete");
}

#[test]
fn call_arguments_are_literal() {
    let mut engine = Engine::start();
    engine.out("show() { printf '<%s>' \"$@\"; x=set; }; alias show='echo alias'; ok() { return 3; }");
    let ran = engine.call("show", json!(["a b", "$HOME `id` \"q\" 'p'", "", "*", { "i": "4" }, true]));
    assert_eq!(ran.good(), "<a b><$HOME `id` \"q\" 'p'><><*><4><true>");
    assert_eq!(ran.puts, ["var/x"]);
    assert_eq!(engine.call("printf", json!(["%s-", "x", "y"])).good(), "x-y-");
    assert_eq!(engine.call("basename", json!(["/a/b c"])).good(), "b c\n");
    assert_eq!(
        engine.call("show", json!({ "o": [["verbose", true], ["n", { "i": "2" }], ["name", "x"]] })).good(),
        "<--verbose><-n><2><--name=x>"
    );
    assert_eq!(engine.call("ok", Json::Null).code, 3);
    for name in ["nosuch", "if", "", "a\0b", "x; echo", "/nosuch"] {
        let ran = engine.call(name, json!([]));
        assert_eq!((ran.status, ran.out.as_str()), (Some(EndStatus::Refused), ""), "{name:?}");
        assert!(!ran.err.is_empty());
    }
    assert_eq!(engine.call("show", json!("text")).status, Some(EndStatus::Refused));
}

fn announce(engine: &mut Engine, names: &[&str]) {
    let schema = json!({ "type": "object", "properties": { "n": { "type": "integer" } } });
    let tools =
        names.iter().map(|name| DynamicTool { name: (*name).into(), description: "d".into(), schema: schema.clone() });
    engine.send(&Request::DynamicTools { tools: tools.collect() }, &[]);
}

/// Awaits the next tool call and answers it.
fn answer(engine: &mut Engine, ok: bool, value: Json, text: &str) -> (String, Json) {
    loop {
        if let Event::ToolCall { call, name, args, .. } = engine.event().0 {
            let message = text.to_owned();
            engine.send(&Request::ToolResult { call, ok, value, text: text.into(), message }, &[]);
            return (name, args);
        }
    }
}

#[test]
fn mcp_tools_are_functions() {
    let mut engine = Engine::start();
    announce(&mut engine, &["srv__add", "srv__fail"]);
    let id = engine.begin("x=$(srv__add n=4 s='a b'); echo \"got $x\"");
    let (name, args) = answer(&mut engine, true, Json::Null, "the text");
    assert_eq!((name.as_str(), args), ("srv__add", json!({ "o": [["n", { "i": "4" }], ["s", "a b"]] })));
    assert_eq!(engine.end(id).good(), "got the text\n");
    let id = engine.begin("srv__add '{\"deep\": [1, null]}' | tr a-z A-Z");
    let (_, args) = answer(&mut engine, true, json!({ "o": [["k", "v"]] }), "");
    assert_eq!(args, json!({ "o": [["deep", [{ "i": "1" }, null]]] }));
    assert_eq!(engine.end(id).good(), "{\"K\":\"V\"}\n");
    let id = engine.begin("srv__fail; echo $?");
    answer(&mut engine, false, Json::Null, "no luck");
    let ran = engine.end(id);
    assert_eq!((ran.out.as_str(), ran.stderr.as_str()), ("1\n", "srv__fail: no luck\n"));
    // Malformed arguments do not reach init, and concurrent calls do not mix.
    let ran = engine.run("srv__add word; echo $?");
    assert!(ran.stderr.contains("name=value") && ran.out == "1\n", "{ran:?}");
    let id = engine.begin("srv__add n=1 | cat & srv__add n=2; wait");
    answer(&mut engine, true, json!("one"), "");
    answer(&mut engine, true, json!("one"), "");
    assert_eq!(engine.end(id).good(), "one\none\n");
    // A large result with zero bytes.
    let id = engine.begin("y=$(srv__add); echo ${#y}");
    answer(&mut engine, true, Json::Null, &format!("\0{}", "z".repeat(300_000)));
    assert_eq!(engine.end(id).good(), "300000\n");
    // Tool functions are not part of the state.
    assert!(!engine.entries.keys().any(|key| key.starts_with("fn/")), "{:?}", engine.entries.keys());
    let id = engine.begin("srv__add n=1");
    while !matches!(engine.event().0, Event::ToolCall { .. }) {}
    engine.interrupt(id);
    assert_eq!(engine.end(id).status, Some(EndStatus::Interrupted));
    let id = engine.begin("srv__add n=2");
    assert_eq!(answer(&mut engine, true, json!("again"), "").0, "srv__add");
    assert_eq!(engine.end(id).good(), "again\n");
    announce(&mut engine, &["srv__other"]);
    assert_eq!(engine.run("type -t srv__add || echo none").out, "none\n");
    let id = engine.id();
    engine.send(
        &Request::Call {
            id,
            exec: id,
            name: "srv__other".into(),
            args: json!({ "o": [["n", { "i": "1" }]] }),
            env: Vec::new(),
            stdin: false,
        },
        &[],
    );
    answer(&mut engine, true, json!(["v"]), "shown");
    let ran = engine.end(id);
    assert_eq!((ran.good(), ran.value.clone()), ("shown\n", Some(json!(["v"]))));
}

#[test]
fn bind_sets_kernel_environment() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut begun = setup(&dir);
    begun.vars.retain(|(name, _)| name != "RYOKAN_KERNEL");
    begun.vars.push(("RYOKAN_KERNEL".into(), String::new()));
    let mut engine = Engine::start_with(dir, begun);
    let env = vec![("RYOKAN_KERNEL".to_owned(), "it's mine".to_owned()), ("RYOKAN_ORIGIN".into(), "forked".into())];
    let reply = engine.ask(|id| Request::Bind { id, env });
    assert!(reply.ok, "{reply:?}");
    assert_eq!(
        engine.out("sh -c 'echo $RYOKAN_KERNEL $RYOKAN_ORIGIN'; [[ $PWD == \"$HOME\" ]] && echo home"),
        "it's mine forked\nhome\n"
    );
    assert_eq!(engine.save().keys().cloned().collect::<Vec<_>>(), Vec::<String>::new());
    engine.run("exit 1");
    assert_eq!(engine.out("echo $RYOKAN_KERNEL"), "it's mine\n");
}

#[test]
fn copied_shell_is_seeded() {
    let mut engine = Engine::start();
    engine.run("RANDOM=7; mine=1; export RYOKAN_KERNEL=changed");
    let env = vec![("RYOKAN_KERNEL".to_owned(), "copy".to_owned())];
    let drawn = |engine: &mut Engine| {
        engine.run("RANDOM=7");
        assert!(engine.ask(|id| Request::Reseed { id, env: env.clone() }).ok);
        engine.out("echo $RANDOM $RANDOM $RANDOM")
    };
    assert_ne!(drawn(&mut engine), drawn(&mut engine));
    assert_eq!(engine.out("echo $RYOKAN_KERNEL $mine"), "copy 1\n");
    assert_eq!(engine.save().keys().cloned().collect::<Vec<_>>(), ["var/mine"]);
    engine.run("exit 1");
    assert_eq!(engine.out("echo $RYOKAN_KERNEL"), "copy\n");
    // A name that is no generator any more is left alone; a generator that cannot be seeded is reported.
    engine.run("unset RANDOM; RANDOM=own");
    assert!(engine.ask(|id| Request::Reseed { id, env: env.clone() }).ok);
    assert_eq!(engine.out("echo $RANDOM"), "own\n");
    let mut engine = Engine::start();
    engine.run("readonly RANDOM");
    assert!(!engine.ask(|id| Request::Reseed { id, env: env.clone() }).ok);
}

#[test]
fn bash_engine_exit_codes() {
    let engine = Engine::start();
    assert_eq!(engine.exit(), 0);
    let mut engine = Engine::start();
    let begun = Instant::now();
    engine.send(&Request::Shutdown, &[]);
    assert_eq!(engine.joined(), 0);
    assert!(begun.elapsed() < Duration::from_secs(2));
    for bytes in [
        &b"\xff\xff\xff\xff\0\0\0\0"[..],
        b"\x02\0\0\0\0\0\0\0{}",
        b"\x0e\0\0\0\0\0\0\0{\"op\":\"nosuch\"",
        b"\x03\0\0\0\0\0\0\0abc",
    ] {
        let mut engine = Engine::start();
        engine.socket.write_all(bytes).expect("written");
        assert_eq!(engine.joined(), EXIT_PROTOCOL, "{bytes:?}");
    }
    let mut engine = Engine::start();
    let id = engine.id();
    engine.send(&Request::Exec { id, exec: id, code: ":".into(), env: Vec::new(), stdin: true }, &[]);
    assert_eq!(engine.joined(), EXIT_PROTOCOL, "no descriptor came");
    // Also while code runs.
    let mut engine = Engine::start();
    engine.begin("sleep 30");
    engine.socket.write_all(b"\x03\0\0\0\0\0\0\0abc").expect("written");
    assert_eq!(engine.joined(), EXIT_PROTOCOL);
    let mut engine = Engine::start();
    engine.begin("sleep 30");
    engine.socket.shutdown(std::net::Shutdown::Write).expect("shuts");
    assert_eq!(engine.joined(), 0);
}

#[test]
fn missing_bash_fails_setup() {
    for argv in [vec![], vec!["/nosuch/bash".to_owned()], vec!["/bin/true".to_owned()]] {
        let (_ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let null = || std::fs::File::open("/dev/null").expect("opens").into();
        let setup = Setup { argv, cwd: "/".into(), vars: Vec::new() };
        assert_eq!(serve(theirs.into(), null(), null(), setup), EXIT_SETUP);
    }
}

#[test]
fn pipelined_requests_in_order() {
    let mut engine = Engine::start();
    let ids: Vec<u64> = (0..50).map(|i| engine.begin(&format!("x=$((x+1)); echo {i}"))).collect();
    for (i, id) in ids.into_iter().enumerate() {
        assert!(engine.end(id).out.contains(&i.to_string()) || i > 0);
    }
    assert_eq!(engine.get("x"), "50");
}
