//! The program itself against the fake: output, exit codes, errors.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

use super::fake::Fake;

/// The program with the fake's socket and a minimal environment.
pub fn ryokan(fake: &Fake, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ryokan"));
    command.args(args).env("RYOKAN_SOCKET", &fake.socket).env("XDG_STATE_HOME", fake.socket.parent().unwrap());
    command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Exit code, stdout, stderr.
pub fn parts(output: Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn run(fake: &Fake, args: &[&str]) -> (i32, String, String) {
    parts(ryokan(fake, args).output().unwrap())
}

fn run_with_input(fake: &Fake, args: &[&str], input: &[u8]) -> (i32, String, String) {
    let mut child = ryokan(fake, args).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    parts(child.wait_with_output().unwrap())
}

#[test]
fn exec_output_and_exit_code() {
    let fake = Fake::start();
    for (code, exit, stdout, stderr) in [
        ("say hello", 0, "hello\n", ""),
        ("both", 0, "out\nout\n", "err\n"),
        ("fail 7", 7, "", "failed\n"),
        ("fail 256", 1, "", "failed\n"),
        ("fail -1", 255, "", "failed\n"),
        ("broken", 1, "", "error: it broke\n"),
        ("value", 0, "42\n", ""),
    ] {
        assert_eq!(run(&fake, &["exec", "demo", code]), (exit, stdout.into(), stderr.into()), "{code}");
    }
    let (exit, stdout, stderr) = run(&fake, &["exec", "demo", "lost"]);
    assert_eq!((exit, stdout.as_str()), (137, "before\n"));
    assert!(stderr.contains("the worker exited during execution 8: killed by signal 9"), "{stderr}");
    let (exit, _, stderr) = run(&fake, &["exec", "demo", "late", "--timeout", "1s"]);
    assert_eq!(exit, 124);
    assert!(stderr.contains("exceeded its time limit"), "{stderr}");
    let warned = (0, String::new(), "warning: it is not stored\n".into());
    assert_eq!(run(&fake, &["exec", "demo", "unsaved"]), warned);
}

#[test]
fn daemon_ignores_closed_stdout() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    std::fs::write(&file, "").unwrap();
    // Independent of the umask: a file writable by others is refused.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let file = file.to_str().unwrap();
    for args in [&["--check-config", file, "--json"][..], &["--check-config", file], &["--show-config"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_ryokand"));
        command.args(args).env("HOME", folder.path()).env("XDG_CONFIG_HOME", folder.path());
        command.env("XDG_RUNTIME_DIR", folder.path()).stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped());
        assert_eq!(parts(command.output().unwrap()), (0, String::new(), String::new()), "{args:?}");
    }
}

#[test]
fn verbose_logs_durations() {
    let fake = Fake::start();
    let (exit, stdout, stderr) = run(&fake, &["-v", "exec", "demo", "say hi"]);
    assert_eq!((exit, stdout.as_str()), (0, "hi\n"));
    for said in ["connected", "kernel=demo", "execution begun", "execution ended", "exec=1", "ran=1.5ms"] {
        assert!(stderr.contains(said), "{said}: {stderr}");
    }
    assert!(!stderr.contains("timeout_ms") && !stderr.contains('\x1b'), "{stderr}");
    let (_, _, stderr) = run(&fake, &["-vv", "exec", "demo", "say hi", "--env", "KEY=secret"]);
    assert!(stderr.contains("timeout_ms=0") && stderr.contains("KEY") && !stderr.contains("secret"), "{stderr}");
}

#[test]
fn exec_json_is_one_object() {
    let fake = Fake::start();
    let (exit, stdout, _) = run(&fake, &["exec", "demo", "value", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((exit, &json["value"], &json["status"], &json["exec"]), (0, &42.into(), &"done".into(), &1.into()));
    let (exit, stdout, stderr) = run(&fake, &["exec", "demo", "fail 3", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((exit, &json["code"], &json["stderr"], stderr.as_str()), (3, &3.into(), &"failed\n".into(), ""));
}

#[test]
fn code_from_argument_file_or_stdin() {
    let fake = Fake::start();
    let file = fake.socket.with_file_name("code.py");
    std::fs::write(&file, "say from a file\n").unwrap();
    let file = file.to_str().unwrap();
    assert_eq!(run(&fake, &["exec", "demo", "-f", file]).1, "from a file\n");
    assert_eq!(run_with_input(&fake, &["exec", "demo", "-"], b"say piped").1, "piped\n");
    let input = vec![b'z'; 1 << 20];
    assert_eq!(run_with_input(&fake, &["exec", "demo", "cat", "--stdin"], &input).1.as_bytes(), input);
    for args in [vec!["exec", "demo"], vec!["exec", "demo", "-", "--stdin"], vec!["exec", "demo", "-f", "/"]] {
        let (exit, _, stderr) = run(&fake, &args);
        assert_eq!(exit, 125, "{args:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains("\nhint: "), "{stderr}");
    }
    let (_, _, stderr) = run_with_input(&fake, &["exec", "demo", "-"], &[b'#', 0xff]);
    assert!(stderr.contains("hint: code is UTF-8 text"), "{stderr}");
    let large = fake.socket.with_file_name("large.py");
    std::fs::write(&large, vec![b'#'; (1 << 20) + 1]).unwrap();
    let (exit, _, stderr) = run(&fake, &["exec", "demo", "-f", large.to_str().unwrap()]);
    assert_eq!(exit, 125);
    assert!(stderr.contains("more than 1 MiB") && stderr.contains("workspace"), "{stderr}");
}

#[test]
fn missing_file_exit_code() {
    let fake = Fake::start();
    for args in [
        vec!["exec", "demo", "-f", "/nowhere/x"],
        vec!["run", "-f", "/nowhere/x.py"],
        vec!["run", "--from-dir", "/nowhere/x", "say x"],
        vec!["new", "n", "--from-dir", "/nowhere/x"],
        vec!["new", "n", "--allow-path", "/nowhere/../x"],
        vec!["mount", "demo", "/data", "/nowhere/../x"],
        vec!["blob", "put", "demo", "/nowhere/x"],
        vec!["config", "check", "/nowhere/x.toml"],
    ] {
        let (exit, stdout, stderr) = run(&fake, &args);
        let code = if ["exec", "run"].contains(&args[0]) { 125 } else { 3 };
        assert_eq!((exit, stdout.as_str()), (code, ""), "{args:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains("/nowhere/"), "{args:?}: {stderr}");
    }
    assert_eq!(run(&fake, &["new", "n", "--from-dir", "/dev/null"]).0, 2, "not a folder");
}

#[test]
fn unknown_language_refused() {
    let fake = Fake::start();
    let file = |name: &str, text: &str| {
        let file = fake.socket.with_file_name(name);
        std::fs::write(&file, text).unwrap();
        file.display().to_string()
    };
    for (name, text) in [("s.rb", "say x"), ("s", "#!/usr/bin/env ruby\nsay x"), ("s.txt", "say x")] {
        let path = file(name, text);
        let (exit, _, stderr) = run(&fake, &["run", "-f", &path]);
        assert_eq!(exit, 125, "{name}: {stderr}");
        assert!(stderr.contains("no engine goes with") && stderr.contains("--engine kaish"), "{name}: {stderr}");
        assert_eq!(run(&fake, &["run", "-f", &path, "--engine", "kaish"]).0, 0, "{name}: named");
    }
    for name in ["s.sh", "s.kai", "s.kaish", "plain"] {
        assert_eq!(run(&fake, &["run", "-f", &file(name, "say x")]).1, "x\n", "{name}");
    }
}

#[test]
fn empty_list_messages() {
    let fake = Fake::start();
    for filter in [&["zzz"][..], &["--state", "crashed"], &["--label", "a=b"]] {
        assert_eq!(run(&fake, &[&["ls"], filter].concat()), (0, "no matching kernels\n".into(), String::new()));
    }
    let (exit, _, stderr) = run(&fake, &["ls", "--state", "running"]);
    assert_eq!(exit, 2);
    assert!(
        stderr.contains("running") && stderr.contains("[possible values: created, starting, ready, busy"),
        "{stderr}"
    );
    run(&fake, &["rm", "demo", "--yes"]);
    assert_eq!(run(&fake, &["ls"]).1, "no kernels; create one: ryokan new NAME\n");
}

#[test]
fn big_integers_round_trip() {
    let fake = Fake::start();
    for digits in ["9007199254740993", "-9223372036854775809", "123456789012345678901234567890"] {
        assert_eq!(run(&fake, &["vars", "demo", "set", "n", digits]).0, 0, "{digits}");
        assert_eq!(run(&fake, &["vars", "demo", "get", "n"]).1, format!("{digits}\n"));
    }
    assert_eq!(run(&fake, &["vars", "demo", "set", "n", "[1, 18446744073709551616]"]).0, 0);
    let (_, stdout, _) = run(&fake, &["vars", "demo", "get", "n", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(json["tagged"][1], serde_json::json!({ "I": "18446744073709551616" }));
}

#[test]
fn lost_connection_hint() {
    let fake = Fake::start();
    let (exit, _, stderr) = run(&fake, &["exec", "demo", "hang up later"]);
    assert_eq!(exit, 125);
    assert!(stderr.contains("; attach to it again: ryokan exec demo --attach 1\n"), "{stderr}");
    // The connection may be lost before the execution's number arrives.
    let (exit, _, stderr) = run(&fake, &["exec", "demo", "hang up"]);
    assert_eq!(exit, 125);
    let ways = ["; check whether it started: ryokan journal demo --tail 1", "; attach to it again"];
    assert!(ways.iter().any(|way| stderr.contains(way)), "{stderr}");
    let (exit, _, stderr) = run(&fake, &["run", "hang up later"]);
    assert_eq!(exit, 125);
    assert!(stderr.contains("removed the ephemeral kernel") && !stderr.contains("continue"), "{stderr}");
}

#[test]
fn errors_have_exit_codes_and_hints() {
    let fake = Fake::start();
    assert_eq!(
        run(&fake, &["exec", "none", "say x"]),
        (125, String::new(), "error: there is no kernel none\nhint: ryokan ls lists them\n".into())
    );
    assert_eq!(run(&fake, &["new", "demo"]).0, 4);
    assert_eq!(run(&fake, &["new", "-bad-"]).0, 2);
    assert_eq!(run(&fake, &["new", "x", "--memory", "much"]).0, 2);
    assert_eq!(run(&fake, &["jobs"]).0, 2);
    assert_eq!(run(&fake, &["exec", "demo", "--attach", "99"]).0, 125);
    assert_eq!(run(&fake, &["vars", "demo", "get", "nothing"]).0, 3);
    assert_eq!(run(&fake, &["ls", "--socket", "/nowhere/d.sock"]).0, 69);
    assert_eq!(run(&fake, &["exec", "demo", "hang up"]).0, 125);
}

#[test]
fn removal_needs_confirmation() {
    let fake = Fake::start();
    let (exit, _, stderr) = run(&fake, &["rm", "demo"]);
    assert_eq!(exit, 2);
    assert!(stderr.contains("--yes"), "{stderr}");
    assert!(!fake.log.has("remove demo"));
    assert_eq!(run(&fake, &["rm", "demo", "--yes"]), (0, "removed demo\n".into(), String::new()));
    assert_eq!(run(&fake, &["rm", "demo", "--yes"]).0, 3);
}

#[test]
fn run_removes_ephemeral_kernel() {
    let fake = Fake::start();
    let file = fake.socket.with_file_name("code.py");
    std::fs::write(&file, "value").unwrap();
    assert_eq!(run(&fake, &["run", "say hi"]).1, "hi\n");
    assert_eq!(run(&fake, &["run", "-f", file.to_str().unwrap()]).1, "42\n", "the extension chose python");
    assert_eq!(run(&fake, &["run", "fail 9"]).0, 9);
    let lines = fake.log.lines();
    let made: Vec<&str> = lines.iter().filter_map(|l| l.strip_prefix("create run-")).collect();
    let removed: Vec<&str> = lines.iter().filter_map(|l| l.strip_prefix("remove run-")).collect();
    assert_eq!((made.len(), removed.len()), (3, 3), "{lines:?}");
    assert!(made.iter().all(|line| line.ends_with("[(\"ryokan\", \"run\")]")), "{made:?}");
}

#[test]
fn variable_and_mount_commands() {
    let fake = Fake::start();
    assert_eq!(run(&fake, &["vars", "demo", "set", "x", "{\"a\": [1, 2.5]}"]).0, 0);
    assert_eq!(run(&fake, &["vars", "demo", "set", "x", "not json"]).0, 2);
    assert_eq!(run(&fake, &["vars", "demo", "set", "n", "-5"]).0, 0);
    assert_eq!(run_with_input(&fake, &["vars", "demo", "set", "s", "-"], b"\"text\"").0, 0);
    assert_eq!(run(&fake, &["vars", "demo", "get", "s"]).1, "text\n");
    let (_, stdout, _) = run(&fake, &["vars", "demo", "get", "x", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(json["tagged"]["o"][0][1][0]["i"], "1");
    assert!(run(&fake, &["vars", "demo"]).1.starts_with("NAME  TYPE  VALUE\nn     any   -5\n"));
    assert_eq!(run(&fake, &["mounts", "demo"]).1, "PATH   MODE  SOURCE\n/data  rw    /srv/data\n");
    assert_eq!(run(&fake, &["mount", "demo", "/data", "src", "--rw"]).0, 0);
    let source = std::env::current_dir().unwrap().join("src");
    assert!(fake.log.has(&format!("mount /data {} true", source.display())), "{:?}", fake.log.lines());
    assert!(run(&fake, &["tools", "demo"]).1.contains("counts …"));
    assert_eq!(run(&fake, &["tools", "demo", "call", "wc", "[\"a\"]"]).1, "wc [\"a\"]\n");
    assert_eq!(run(&fake, &["tools", "demo", "call", "wc", "3"]).0, 2);
    assert_eq!(run(&fake, &["message", "demo", "--role", "user", "hello"]).0, 0);
    assert!(fake.log.has("message user hello"));
    assert_eq!(run(&fake, &["stop", "demo", "--force"]).0, 0);
    assert!(fake.log.has("stop true"));
}

#[test]
fn blob_put_and_get() {
    let fake = Fake::start();
    let file = fake.socket.with_file_name("in");
    let data: Vec<u8> = (0..3 << 20).map(|i| (i / 3) as u8).collect();
    std::fs::write(&file, &data).unwrap();
    let (exit, hash, _) = run(&fake, &["blob", "put", "demo", file.to_str().unwrap()]);
    assert_eq!((exit, hash.trim()), (0, blake3::hash(&data).to_hex().as_str()));
    assert_eq!(ryokan(&fake, &["blob", "get", "demo", hash.trim()]).output().unwrap().stdout, data);
    let out = fake.socket.with_file_name("out");
    assert_eq!(run(&fake, &["blob", "get", "demo", hash.trim(), "-o", out.to_str().unwrap()]).0, 0);
    assert_eq!(std::fs::read(&out).unwrap(), data);
    assert_eq!(run(&fake, &["blob", "get", "demo", "xyz"]).0, 2);
}

#[test]
fn doctor_fails_on_missing_ability() {
    let fake = Fake::start();
    let (exit, stdout, _) = run(&fake, &["doctor"]);
    assert_eq!(exit, 5);
    assert!(stdout.contains("userns    MISSING  looked"), "{stdout}");
    assert!(stdout.contains("hint: userns (kernels cannot run without it): install userns"), "{stdout}");
}

#[test]
fn completions_are_made_for_every_shell() {
    let fake = Fake::start();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let (exit, stdout, _) = run(&fake, &["completions", shell]);
        assert!(exit == 0 && stdout.contains("unmount"), "{shell}");
    }
}

#[test]
fn kernel_name_completion() {
    let fake = Fake::start();
    run(&fake, &["new", "other"]);
    let complete = |words: &str| {
        let script = format!(
            "source <(\"$RYOKAN\" completions bash); COMP_WORDS=(\"$RYOKAN\" {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _ryokan_with_names \"$RYOKAN\" \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; echo \"${{COMPREPLY[*]}}\""
        );
        let mut bash = Command::new("bash");
        bash.args(["-c", &script]).env("RYOKAN", env!("CARGO_BIN_EXE_ryokan")).env("RYOKAN_SOCKET", &fake.socket);
        let (exit, stdout, stderr) = parts(bash.output().unwrap());
        assert_eq!((exit, stderr.as_str()), (0, ""), "{words}");
        stdout.trim_end().to_owned()
    };
    for (words, found) in [
        ("exec ''", "demo other"),
        ("exec d", "demo"),
        ("mcp add o", "other"),
        ("exec --env A=1 ''", "demo other"),
        ("du o", "other"),
        ("rm demo o", "other"),
        ("cp o", "other:"),
        ("cp ./file d", "demo:"),
        ("edit d", "demo:"),
        ("diff demo --with ''", "demo other"),
        ("take demo --from=o", ""),
        ("take demo --from = o", "other"),
        ("new n --share ''", "demo other"),
        ("events ''", "demo other"),
        ("exec --att", "--attach"),
        ("new d", ""),
        ("journ", "journal"),
    ] {
        assert_eq!(complete(words), found, "{words}");
    }
    for (shell, asks) in [
        ("zsh", "':name -- Name or id of the kernel:_ryokan_kernel'"),
        ("zsh", "':name -- Name or id of the kernel, or name of the group:_ryokan_kernel_or_group'"),
        ("zsh", "(N before the newest; quote it):_ryokan_checkpoint'"),
        ("zsh", "[Fork from this checkpoint, not from the present]:REF:_ryokan_checkpoint'"),
        ("zsh", "':var -- Name of the variable:_ryokan_variable'"),
        ("zsh", "':process -- Number of the process:_ryokan_process'"),
        ("fish", "-l from -d 'Fork from this checkpoint, not from the present' -r -f -a \"(ryokan --no-autostart log "),
        ("fish", "-r -f -a \"(ryokan --no-autostart images list "),
        ("fish", "-n \"__fish_ryokan_using_subcommand exec\" -f -a \"(ryokan --no-autostart ls --quiet 2>/dev/null)\""),
    ] {
        assert!(run(&fake, &["completions", shell]).1.contains(asks), "{shell}");
    }
}
