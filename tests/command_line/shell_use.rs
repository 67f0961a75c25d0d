//! What a shell's user has: an editor, a pager, exit codes, completion.

use std::os::unix::fs::PermissionsExt as _;

use crate::support::{Host, Terminal};

/// An executable script of this host; returns its path.
fn script(host: &Host, name: &str, text: &str) -> String {
    let path = host.path("home").join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
    path.display().to_string()
}

#[test]
fn edited_file_is_written_back() {
    let mut host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    host.ok(&["exec", "k", "mkdir d; echo old > d/app.py; chmod 750 d/app.py"]);
    // The editor gets the file under its own name, with the variable's options before it.
    let editor = script(&host, "ed", "[ \"$1\" = -x ] && [ \"$(basename \"$2\")\" = app.py ] && echo new >> \"$2\"");
    host.env("EDITOR", &format!("{editor} -x"));
    let mut terminal = Terminal::start(&host, &["edit", "k:d/app.py"]);
    terminal.wait_for("wrote d/app.py (8 B)");
    terminal.ended();
    assert_eq!(host.ok(&["exec", "k", "cat d/app.py; stat -c %a d/app.py"]), "old\nnew\n750\n");
    // Without a change nothing is written; a new file is made.
    host.env("EDITOR", "true");
    let mut terminal = Terminal::start(&host, &["edit", "k:d/app.py"]);
    terminal.wait_for("d/app.py is unchanged");
    let mut terminal = Terminal::start(&host, &["edit", "k:empty"]);
    terminal.wait_for("wrote empty (0 B)");
    host.env("EDITOR", "false");
    let mut terminal = Terminal::start(&host, &["edit", "k:d/app.py"]);
    terminal.wait_for("the editor false failed");
    terminal.ended_with(4);
    let mut terminal = Terminal::start(&host, &["edit", "k:d"]);
    terminal.wait_for("is a directory");
    host.ok(&["exec", "k", "ln -s d/app.py link"]);
    let mut terminal = Terminal::start(&host, &["edit", "k:link"]);
    terminal.wait_for("link is a symbolic link to d/app.py");
    assert_eq!(host.ok(&["exec", "k", "readlink link"]), "d/app.py\n");
}

#[test]
fn newer_file_is_not_overwritten() {
    let mut host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    host.ok(&["exec", "k", "echo old > f"]);
    // It changes in the kernel while the editor is open.
    let ryokan = host.command("ryokan");
    let program = ryokan.get_program().to_string_lossy().into_owned();
    let editor = script(&host, "ed", &format!("echo mine >> \"$1\"; {program} exec k 'echo newer > f'"));
    host.env("EDITOR", &editor);
    let mut terminal = Terminal::start(&host, &["edit", "k:f"]);
    terminal.wait_for("your text is in ");
    terminal.wait_for("changed while it was edited");
    terminal.ended_with(4);
    assert_eq!(host.ok(&["exec", "k", "cat f"]), "newer\n");
    let refused = host.cli(&["edit", "k:f"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("an editor needs a terminal"), "{refused:?}");
}

#[test]
fn long_output_is_paged() {
    let mut host = Host::start();
    host.ok(&["new", "k"]);
    host.ok(&["checkpoint", "k", "-m", "first"]);
    host.env("PAGER", "sed 's/^/paged: /'");
    let mut terminal = Terminal::start(&host, &["log", "k"]);
    terminal.wait_for("paged: ");
    terminal.ended();
    // A pager that reads nothing is no failure; an error appears after it.
    host.env("PAGER", "true");
    Terminal::start(&host, &["log", "k"]).ended();
    let mut terminal = Terminal::start(&host, &["log", "none"]);
    terminal.wait_for("error: ");
    terminal.ended_with(3);
    // Without it, and without a terminal, the output is the same as ever.
    host.env("PAGER", "no-such-pager-here");
    Terminal::start(&host, &["log", "k"]).wait_for("first");
    host.env("PAGER", "sed 's/^/paged: /'");
    assert!(!host.ok(&["log", "k"]).contains("paged"));
}

#[test]
fn own_failures_have_their_exit_code() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    for (args, code) in [
        (&["exec", "k", "exit 3"][..], 3),
        (&["exec", "none", "exit 3"], 125),
        (&["run", "--engine", "python", "import sys; sys.exit(4)"], 4),
        (&["spawn", "k", "--", "sh", "-c", "exit 5"], 5),
        (&["spawn", "none", "--", "true"], 125),
        (&["spawn", "k", "--cwd", "no", "--", "true"], 126),
        (&["show", "none"], 3),
    ] {
        assert_eq!(host.cli(args).status.code(), Some(code), "{args:?}");
    }
}

#[test]
fn misspelt_names_get_suggestion() {
    let host = Host::start();
    host.ok(&["new", "demo"]);
    host.ok(&["group", "new", "everything"]);
    for (args, hint) in [
        (["show", "dmeo"], "hint: did you mean demo? `ryokan ls`"),
        (["show", "other"], "hint: `ryokan ls`"),
        (["freeze", "everythign"], "hint: did you mean everything? `ryokan group show`"),
    ] {
        let said = host.cli(&args);
        assert!(String::from_utf8_lossy(&said.stderr).contains(hint), "{said:?}");
    }
}

#[test]
fn checkpoints_are_completed() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    host.ok(&["checkpoint", "k", "-m", "first-one"]);
    host.ok(&["checkpoint", "k", "-m", "two words"]);
    let names = host.ok(&["log", "k", "--quiet"]);
    let names: Vec<&str> = names.lines().collect();
    assert!(names.len() == 3 && names[2] == "first-one", "{names:?}");
    let ryokan = host.command("ryokan");
    let complete = |words: &str| {
        let script = format!(
            "source <(\"$RYOKAN\" completions bash); COMP_WORDS=(\"$RYOKAN\" {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _ryokan_with_names \"$RYOKAN\" \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; echo \"${{COMPREPLY[*]}}\""
        );
        let mut bash = std::process::Command::new("bash");
        bash.args(["-c", &script]).env_clear().envs(ryokan.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let done = bash.env("RYOKAN", ryokan.get_program()).output().expect("it runs");
        assert!(done.status.success() && done.stderr.is_empty(), "{words}: {done:?}");
        String::from_utf8(done.stdout).expect("text").trim_end().to_owned()
    };
    for words in
        ["restore k ''", "diff k ''", "diff k first-one ''", "fork k new --from ''", "checkpoint k --delete ''"]
    {
        assert_eq!(complete(words), names.join(" "), "{words}");
    }
    assert_eq!(complete("restore k first"), "first-one");
    host.ok(&["exec", "k", "abc=1; abd=2; x=3"]);
    for words in ["vars k get a", "vars k set a"] {
        assert_eq!(complete(words), "abc abd", "{words}");
    }
    let process = host.ok(&["spawn", "k", "-d", "--", "sleep", "1000"]);
    for words in ["kill k ''", "interrupt k ''", "exec k --attach ''"] {
        assert_eq!(complete(words), process.trim(), "{words}");
    }
    assert_eq!(complete("restore none ''"), "");
    // Messages of others are data: nothing in them runs.
    host.ok(&["group", "new", "shop"]);
    host.ok(&["group", "add", "shop", "--kernel", "k"]);
    let ran = host.path("home").join("ran");
    host.ok(&["freeze", "shop", "-m", &format!("before $(touch {})", ran.display())]);
    host.ok(&["freeze", "shop", "-m", "plain"]);
    let freezes = complete("restore shop ''");
    assert!(freezes.contains("plain") && !freezes.contains("before") && !ran.exists(), "{freezes}");
    assert!(!complete("fork k ''").contains(names[0]), "a new name");
    for words in ["freeze ''", "group rm ''", "group show sh", "group add ''"] {
        assert_eq!(complete(words), "shop", "{words}");
    }
    for words in ["lock ''", "undo ''", "diff ''", "export ''", "restore ''"] {
        assert_eq!(complete(words), "k shop", "{words}");
    }
    for words in ["take x --from ''", "diff x --with ''", "new n --share ''", "exec --timeout 5s ''"] {
        assert_eq!(complete(words), "k", "{words}");
    }
    for words in ["cp ''", "cp ./x k", "edit ''", "watch ''"] {
        assert_eq!(complete(words), "k:", "{words}");
    }
    // This host has no image; the subcommand's name is also that of one with kernels.
    assert_eq!((complete("images rm ''"), complete("rm ''")), (String::new(), "k".into()));
    for (words, wanted) in [
        ("new n --engine ''", "kaish python bash node"),
        ("new n --isolation ''", "process microvm"),
        ("fork k n --isolation m", "microvm"),
        ("update k --net ''", "none host"),
    ] {
        assert_eq!(complete(words), wanted, "{words}");
    }
}

/// In zsh the functions of the script; that the grammar calls them is in the script's text.
#[test]
fn zsh_and_fish_list_names() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    host.ok(&["group", "new", "shop"]);
    host.ok(&["checkpoint", "k", "-m", "first-one"]);
    host.ok(&["exec", "k", "abc=1"]);
    let process = host.ok(&["spawn", "k", "-d", "--", "sleep", "1000"]);
    let ryokan = host.command("ryokan");
    let programs = std::path::Path::new(ryokan.get_program()).parent().expect("its folder").display().to_string();
    let lists = |kind: &str, line: &str| {
        let script = format!(
            "path=({programs} $path); compdef() {{}}; source <(ryokan completions zsh); _files() {{}}; \
             compadd() {{ local last=$@[-1]; print -r -- ${{(P)last}} }}; BUFFER='{line}'; _ryokan_{kind}"
        );
        let mut zsh = std::process::Command::new("/usr/bin/zsh");
        zsh.args(["-fc", &script]).env_clear().envs(ryokan.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let done = zsh.output().expect("zsh runs; scripts/check installs it");
        assert!(done.status.success() && done.stderr.is_empty(), "{kind}: {done:?}");
        String::from_utf8(done.stdout).expect("text").trim_end().to_owned()
    };
    let of_fish = |line: &str| {
        let script = format!("set PATH {programs} $PATH; ryokan completions fish | source; complete -C '{line}'");
        let mut fish = std::process::Command::new("/usr/bin/fish");
        fish.args(["--no-config", "-c", &script]);
        fish.env_clear().envs(ryokan.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let done = fish.output().expect("fish runs; scripts/check installs it");
        let lines = String::from_utf8(done.stdout).expect("text");
        let names: Vec<&str> = lines.lines().map(|line| line.split('\t').next().unwrap_or_default()).collect();
        names.join(" ")
    };
    for (kind, line, wanted) in [
        ("kernel", "ryokan show ", "k"),
        ("kernel", "ryokan start ", "k"),
        ("place", "ryokan cp ", "k"),
        ("group", "ryokan group show ", "shop"),
        ("kernel_or_group", "ryokan undo ", "k shop"),
        ("variable", "ryokan vars k get ", "abc"),
        ("process", "ryokan --json kill k ", process.trim()),
    ] {
        assert_eq!(lists(kind, line), wanted, "{kind}");
        let found = of_fish(line);
        if kind == "place" {
            assert!(found.split(' ').any(|name| name == "k:"), "also files: {found}");
        } else {
            // Names of kernels are offered anywhere.
            let is_wanted = |name: &&str| *name != "k" || wanted.starts_with('k');
            let found: Vec<&str> = found.split(' ').filter(is_wanted).collect();
            assert_eq!(found.join(" ").trim(), wanted, "{line}");
        }
    }
    let checkpoints = lists("checkpoint", "ryokan restore --yes k ");
    assert!(checkpoints.ends_with(" first-one") && !checkpoints.contains("shop"), "{checkpoints}");
    assert_eq!(lists("checkpoint", "ryokan restore none "), "");
}
