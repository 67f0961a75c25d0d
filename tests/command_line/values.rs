//! Values, files and configuration, from the command line to the engine and back.

use crate::support::{Host, User};

#[test]
fn exact_big_integers() {
    let host = Host::start();
    host.ok(&["new", "p", "--engine", "python"]);
    for digits in ["9007199254740993", "18446744073709551616", "-123456789012345678901234567890"] {
        host.ok(&["vars", "p", "set", "n", digits]);
        assert_eq!(host.ok(&["exec", "p", &format!("type(n) is int and n == {digits}")]), "True\n");
        assert_eq!(host.ok(&["vars", "p", "get", "n"]), format!("{digits}\n"));
    }
    host.ok(&["new", "s"]);
    host.ok(&["vars", "s", "set", "n", "9007199254740993"]);
    assert_eq!(host.ok(&["exec", "s", "echo $((n + 1))"]), "9007199254740994\n");
    let refused = host.cli(&["vars", "s", "set", "n", "18446744073709551616"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("18446744073709551616"), "{said}");
    assert_eq!(host.ok(&["vars", "s", "get", "n"]), "9007199254740993\n", "the refused value changed nothing");
    let journal = host.ok(&["journal", "s"]);
    assert_eq!(journal.matches("set n failed: ").count(), 1, "{journal}");
}

#[test]
fn missing_config_uses_defaults() {
    let host = Host::prepare(User::Own);
    let file = host.path("config").join("ryokan/config.toml").display().to_string();
    std::fs::remove_file(&file).unwrap();
    let text = host.ok(&["config", "check"]);
    assert_eq!(text, format!("there is no {file}: the defaults are in force\n"));
    let json = |args: &[&str]| -> serde_json::Value {
        serde_json::from_slice(&host.cli(args).stdout).unwrap_or_else(|e| panic!("{args:?}: {e}"))
    };
    let check = json(&["config", "check", "--json"]);
    assert_eq!((&check["file"], &check["defaults"]), (&file.as_str().into(), &true.into()));
    assert_eq!(json(&["config", "show", "--json"])["defaults"]["idle_timeout"], "5m");
    host.configure("[defaults]\nmemroy = \"1G\"\n");
    assert_eq!(host.cli(&["config", "check"]).status.code(), Some(1));
    let check = json(&["config", "check", "--json"]);
    let problem = &check["problems"][0];
    assert_eq!(
        (&check["defaults"], &problem["line"], &problem["key"]),
        (&false.into(), &2.into(), &"defaults.memroy".into())
    );
    // Values that are valid but cannot work.
    let hidden = host.path("home").join("python3");
    std::fs::copy("/bin/true", &hidden).unwrap();
    let engine = format!("[engines.python]\ncommand = {hidden:?}\n");
    host.configure(&format!("[limits]\nmemory = \"100M\"\n{engine}"));
    let said = String::from_utf8(host.cli(&["config", "check"]).stderr).unwrap();
    assert!(said.contains("limits.memory: 100 MiB for all workers is less than one kernel"), "{said}");
    assert!(said.contains("engines.python.command: kernels cannot see"), "{said}");
    host.configure("[sandbox]\nsystem_paths = [\"/nowhere\"]\n");
    let said = String::from_utf8(host.cli(&["config", "check"]).stderr).unwrap();
    assert!(said.contains("sandbox.system_paths: \"/nowhere\" cannot be shown to kernels"), "{said}");
    host.configure(&format!("[sandbox]\nsystem_paths = [{:?}]\n{engine}", host.path("home")));
    assert_eq!(host.ok(&["config", "check"]), format!("{file}: ok\n"));
    host.configure("[defaults]\nmemory = \"1G\"\n");
    assert_eq!(host.ok(&["config", "check"]), format!("{file}: ok\n"));
    assert_eq!(json(&["config", "show", "--json"])["defaults"]["memory"], "1G");
}

#[test]
fn limit_errors_use_readable_units() {
    let host = Host::start();
    let refused = host.cli(&["new", "k", "--memory", "10M"]);
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(String::from_utf8_lossy(&refused.stderr), "error: memory of 10 MiB is outside 32 MiB to 1 PiB\n");
    let missing = host.cli(&["new", "k", "--allow-path", "/nowhere/x"]);
    assert_eq!(missing.status.code(), Some(3));
    host.ok(&["new", "k", "--idle-timeout", "never"]);
    assert!(host.ok(&["show", "k"]).contains("idle timeout  never"));
    assert_eq!(host.cli(&["mount", "k", "/data", "/nowhere/x"]).status.code(), Some(3));
}

#[test]
fn json_errors_are_objects() {
    let host = Host::start();
    for (args, code, exit) in [
        (&["show", "none", "--json"][..], "notFound", 3),
        (&["new", "k", "--memory", "10M", "--json"], "invalidArgument", 2),
        (&["show", "--json"], "invalidArgument", 2),
        (&["blob", "put", "k", "/nowhere/x", "--json"], "notFound", 3),
    ] {
        let failed = host.cli(args);
        let said = String::from_utf8_lossy(&failed.stderr);
        let error: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{args:?}: {said}"));
        assert_eq!((error["code"].as_str(), failed.status.code()), (Some(code), Some(exit)), "{args:?}: {said}");
        assert!(error["message"].as_str().is_some_and(|text| !text.starts_with("error")), "{said}");
        assert!(error["hint"].is_string() && error["reason"].is_string(), "{said}");
    }
    let failed = host.cli(&["show", "--", "--json", "x"]);
    assert!(failed.stderr.starts_with(b"error: "), "{failed:?}");
}

/// The commands that `docs/cli-json.md` lists as lines print lines, the others one document.
#[test]
fn json_is_lines_where_documented() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    host.ok(&["exec", "k", "x=1; echo 1 > f"]);
    host.ok(&["checkpoint", "k", "-m", "one"]);
    host.ok(&["exec", "k", "x=2; echo 2 > f; echo 2 > g"]);
    host.ok(&["checkpoint", "k", "-m", "two"]);
    for args in [
        &["journal", "k"][..],
        &["events", "k"],
        &["log", "k"],
        &["diff", "k", "one", "two"],
        &["diff", "k", "one", "two", "--text"],
        &["gc", "--dry-run"],
        &["verify"],
        &["audit"],
    ] {
        let said = host.ok(&[args, &["--json"]].concat());
        assert!(!said.is_empty(), "{args:?}");
        for line in said.lines() {
            let line = serde_json::from_str::<serde_json::Value>(line);
            assert!(line.is_ok_and(|line| line.is_object()), "{args:?}: {said}");
        }
    }
    for args in [
        &["ls"][..],
        &["show", "k"],
        &["vars", "k"],
        &["vars", "k", "get", "x"],
        &["mounts", "k"],
        &["tools", "k"],
        &["mcp", "ls", "k"],
        &["ps", "k"],
        &["retention", "k"],
        &["diff", "k", "one", "two", "--stat"],
        &["restore", "k", "one", "--yes"],
        &["undo", "k", "--yes"],
        &["group", "show"],
        &["work", "step", "ls", "k"],
        &["work", "decision", "ls", "k"],
        &["work", "artifact", "ls", "k"],
        &["audit", "--verify"],
        &["pool"],
        &["config", "show"],
        &["config", "check"],
        &["message", "k", "hello", "--role", "user"],
        &["exec", "k", "echo 1"],
    ] {
        let said = host.ok(&[args, &["--json"]].concat());
        assert!(serde_json::from_str::<serde_json::Value>(&said).is_ok(), "{args:?}: {said}");
    }
}

#[test]
fn limits_beyond_host_are_refused() {
    let host = Host::start();
    for (args, message) in [
        (["--cpus", "999"], "error: 999 processors are more than this host has ("),
        (["--memory", "900T"], "error: 900 TiB of memory is more than this host has ("),
    ] {
        let refused = host.cli(&[&["new", "k"][..], &args].concat());
        assert_eq!(refused.status.code(), Some(2));
        let stderr = String::from_utf8_lossy(&refused.stderr);
        assert!(stderr.starts_with(message), "{stderr}");
    }
    host.ok(&["new", "k", "--cpus", "1"]);
}

/// The tour prints commands in a form that can be pasted.
#[test]
fn tour_commands_shell_quoted() {
    let tour = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/tour");
    let words = ["ryokan", "exec", "it's \"$x\" `y`", "", "two\nlines", "a\\b", "*", "--flag=a/b"];
    let script = format!("source <(sed -n '/^quoted()/,/^}}/p' {tour}); eval \"printf '<%s>' $(quoted \"$@\")\"");
    let output = std::process::Command::new("bash").args(["-c", &script, "tour"]).args(words).output().unwrap();
    let expected: String = words.iter().map(|word| format!("<{word}>")).collect();
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", String::from_utf8_lossy(&output.stderr));
}

/// Rich forms of results are in the result and in the journal, named on stderr, and written on request.
#[test]
fn rich_results_are_kept() {
    let mut host = Host::start();
    host.ok(&["new", "k", "--engine", "python"]);
    let code = "
class Figure:
    def _repr_png_(self): return b'\\x89PNG' + bytes(range(256)) * 32
    def _repr_html_(self): return '<b>figure</b>'
display(Figure()); print('text')
";
    let folder = host.path("home").join("figures");
    let shown = host.cli(&["exec", "k", "--save-display", folder.to_str().unwrap(), code]);
    let said = String::from_utf8_lossy(&shown.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&shown.stdout), "text\n");
    assert!(said.contains(" image/png (8.0 KiB)") && said.contains(" text/html (13 B)"), "{said}");
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
    let png = files.iter().find(|path| path.extension().is_some_and(|end| end == "png")).expect("an image");
    assert_eq!(std::fs::read(png).unwrap().len(), 4 + 8192);
    host.restart();
    let json: serde_json::Value = serde_json::from_str(&host.ok(&["exec", "k", "--attach", "1", "--json"])).unwrap();
    let mimes: Vec<_> = json["displays"].as_array().unwrap().iter().map(|one| one["mime"].as_str().unwrap()).collect();
    assert!(mimes.contains(&"image/png") && mimes.contains(&"text/html"), "{json}");
}

/// Larger than the queue of frames to the engine.
#[test]
fn large_value_survives_stop() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "python", "--memory", "800M"]);
    host.ok(&["exec", "k", "large = bytes(range(256)) * (3 << 17)"]);
    host.ok(&["stop", "k"]);
    assert_eq!(host.ok(&["exec", "k", "len(large), large[-3:]"]), "(100663296, b'\\xfd\\xfe\\xff')\n");
}
