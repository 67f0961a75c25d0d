//! Code runs as in bash itself.

use std::io::Write as _;
use std::time::{Duration, Instant};

use super::kit::Engine;
use crate::link::frames::{EndStatus, Request};

#[test]
fn bash_state_outlives_execution() {
    let mut engine = Engine::start();
    let code = "x=1; declare -i n=4; a=(p 'q r'); declare -A m=([k]=v); f() { echo \"f:$x\"; }; alias hi='echo alias'\n\
                set -o pipefail; shopt -s extglob; umask 027; set -- one 'two three'; mkdir -p d; pushd d >/dev/null";
    engine.out(code);
    let seen = engine.out(
        "f; hi; echo \"$n ${a[1]} ${m[k]} $# $2 ${PWD##*/} ${#DIRSTACK[@]}\"; umask; [[ -o pipefail ]] && [[ abab == *(ab) ]] && echo set; n+=3; echo $n",
    );
    assert_eq!(seen, "f:1\nalias\n4 q r v 2 two three d 2\n0027\nset\n7\n");
}

#[test]
fn bash_runs_every_program_form() {
    let mut engine = Engine::start();
    for (code, out) in [
        ("cat <<E\na $((1+1))\nE", "a 2\n"),
        ("cat <<'E'\n}\nE\nfor i in 1 2; do\n  echo $i\ndone", "}\n1\n2\n"),
        ("if true\nthen echo yes\nfi", "yes\n"),
        ("g() {\n  local y=2\n  echo $y\n}\ng", "2\n"),
        ("echo a \\\n  b", "a b\n"),
        ("echo one; # comment", "one\n"),
        ("", ""),
        ("# only a comment", ""),
        ("echo }", "}\n"),
        ("shopt -s extglob\n[[ ab == +(a|b) ]] && echo glob", "glob\n"),
        ("case x in x) echo in ;; esac; { echo grouped; }; (echo sub)", "in\ngrouped\nsub\n"),
        ("alias greet='echo hello'\ngreet you", "hello you\n"),
        ("printf '%s|' \"$@\" ; echo", "|\n"),
        ("echo ünïcödé 日本", "ünïcödé 日本\n"),
        ("echo trailing\\", "trailing\\\n"),
    ] {
        assert_eq!(engine.run(code).good(), out, "{code:?}");
    }
}

#[test]
fn status_and_last_argument_persist() {
    let mut engine = Engine::start();
    let ran = engine.run("(exit 7)");
    assert_eq!((ran.status, ran.code), (Some(EndStatus::Failed), 7));
    assert_eq!(engine.out("echo $?"), "7\n");
    engine.out("echo some 'last one'");
    assert_eq!(engine.out("echo \"$_\""), "last one\n");
}

#[test]
fn errors_keep_bash_line_numbers() {
    let mut engine = Engine::start();
    for _ in 0..3 {
        let ran = engine.run("\n\nnosuch_program; echo $LINENO");
        assert_eq!(ran.stderr, "bash: line 3: nosuch_program: command not found\n");
        assert_eq!(ran.out, "3\n");
    }
    let ran = engine.run("break; return 3; local z=1; echo on");
    assert_eq!(ran.out, "on\n");
    assert_eq!(ran.stderr.lines().count(), 3, "{}", ran.stderr);
}

#[test]
fn invalid_program_runs_nothing() {
    let mut engine = Engine::start();
    engine.out("x=1");
    for code in [
        "echo ran; fi",
        "echo ran\nif true; then",
        "echo ran; }",
        "echo ran; echo 'open",
        "echo ran )",
        "echo ran; f() { ",
        "for x in",
        "echo ran; } ;; esac; then :; fi; do :; done; }; y() { :",
    ] {
        let ran = engine.run(code);
        assert_eq!(
            (ran.status, ran.out.as_str(), ran.stderr.as_str()),
            (Some(EndStatus::Refused), "", ""),
            "{code:?} {ran:?}"
        );
        assert!(ran.err.contains("syntax error") || ran.err.contains("unexpected"), "{code:?} {ran:?}");
        assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
        assert!(ran.puts.is_empty() && ran.dels.is_empty(), "{ran:?}");
    }
    let ran = engine.run("echo a\0b");
    assert_eq!(ran.status, Some(EndStatus::Refused));
    assert_eq!(engine.out("echo $x $?"), "1 0\n");
}

#[test]
fn exit_keeps_session() {
    let mut engine = Engine::start();
    engine.out("kept=1; g() { echo g; }");
    let ran = engine.run("new=2; a=(x y); cd /; set -o noglob; exit 3; echo never");
    assert_eq!((ran.status, ran.code, ran.out.as_str(), ran.stderr.as_str()), (Some(EndStatus::Failed), 3, "", ""));
    assert_eq!(engine.out("echo $kept $new ${a[1]} $PWD $-; g").replace('s', ""), "1 2 y / fhB\ng\n");
    let ran = engine.run("exit 0");
    assert_eq!((ran.status, ran.code), (Some(EndStatus::Done), 0));
    assert!(engine.missed.is_empty(), "{:?}", engine.missed);
    // In a function, whose local variables are not the session's.
    engine.out("x=global; y=(1 2); export z=e; declare -A w=([k]=1)");
    let ran = engine.run(
        "h() { local x=mine y=no z=no q=3; local -A w=([l]=2); i; }; i() { local x=deeper; new=3; kept=5; exit 4; }; h",
    );
    assert_eq!((ran.code, ran.stderr.as_str()), (4, ""));
    assert_eq!(
        engine.out("declare -p x y z w new kept; echo ${q-unset}"),
        "declare -- x=\"global\"\ndeclare -a y=([0]=\"1\" [1]=\"2\")\ndeclare -x z=\"e\"\ndeclare -A w=([k]=\"1\" )\ndeclare -- new=\"3\"\ndeclare -- kept=\"5\"\nunset\n"
    );
}

#[test]
fn shell_end_leaves_session() {
    let mut engine = Engine::start();
    engine.out("x=before; readonly r=1");
    for (code, status, code_of, x) in [
        ("x=e; set -e; false; x=never", EndStatus::Failed, 1, "e"),
        ("set +e; x=u; set -u; echo $nosuch; x=never", EndStatus::Failed, 1, "u"),
        ("set +u; x=q; : ${nosuch?gone}; x=never", EndStatus::Failed, 1, "q"),
        ("x=lost; exec /bin/sh -c 'exit 9'", EndStatus::Failed, 9, "q"),
        ("x=lost; exec true", EndStatus::Done, 0, "q"),
        ("x=lost; kill -9 $$", EndStatus::Failed, 137, "q"),
        ("x=term; kill $$; sleep 5", EndStatus::Failed, 143, "term"),
    ] {
        let ran = engine.run(code);
        assert_eq!((ran.status, ran.code), (Some(status), code_of), "{code}: {ran:?}");
        assert_eq!(engine.has_missed("execution"), code.contains("lost"), "{code}: {:?}", engine.missed);
        let now = engine.run("set +eu; echo $x $r");
        assert_eq!(now.good(), format!("{x} 1\n"), "{code}");
    }
}

#[test]
fn user_exit_trap_keeps_state() {
    let mut engine = Engine::start();
    let ran = engine.run("trap 'echo bye $? $x' EXIT; x=1; exit 5");
    assert_eq!((ran.code, ran.out.as_str(), ran.stderr.as_str()), (5, "bye 5 1\n", ""));
    assert_eq!(engine.out("echo $x"), "1\n");
    // The trap still exists, and can be removed.
    let ran = engine.run("x=2; exit 6");
    assert_eq!((ran.code, ran.out.as_str()), (6, "bye 6 2\n"));
    engine.out("trap - EXIT");
    let ran = engine.run("echo $x; exit 6");
    assert_eq!((ran.code, ran.out.as_str()), (6, "2\n"));
    // The trap's status counts, as in bash.
    let ran = engine.run("trap 'exit 8' EXIT; x=3; exit 1");
    assert_eq!((ran.code, ran.out.as_str()), (8, ""));
    assert_eq!(engine.out("trap - EXIT; echo $x"), "3\n");
}

#[test]
fn exec_redirection_persists() {
    let mut engine = Engine::start();
    engine.out("exec 5>side; echo five >&5");
    assert!(engine.has_missed("descriptor/5"), "{:?}", engine.missed);
    assert_eq!(engine.out("echo more >&5; cat side"), "five\nmore\n");
    // A shell that exits is replaced by a new one in the same process, which keeps its descriptors.
    engine.run("exit 1");
    assert_eq!(engine.out("echo third >&5; cat side"), "five\nmore\nthird\n");
    engine.out("exec 5>&-");
    assert!(engine.missed.is_empty(), "{:?}", engine.missed);
    engine.out("exec 6>&1 >out; echo to file");
    assert!(engine.has_missed("descriptor/1"), "{:?}", engine.missed);
    assert_eq!(engine.out("cat out >&6; exec >&6 6>&-"), "to file\n");
    assert!(engine.missed.is_empty(), "{:?}", engine.missed);
}

#[test]
fn programs_inherit_no_extra_fds() {
    let mut engine = Engine::start();
    for code in
        ["ls /proc/self/fd", "sh -c 'ls /proc/self/fd'", "exit 1", "ls /proc/self/fd", "f() { ls /proc/self/fd; }; f"]
    {
        let ran = engine.run(code);
        if ran.code == 0 {
            // The last one is the descriptor of the directory itself.
            assert_eq!(ran.out, "0\n1\n2\n3\n", "{code}");
        }
    }
    assert_eq!(engine.out("readlink /proc/self/fd/0"), "/dev/null\n");
}

#[test]
fn bash_stdin_is_per_execution() {
    let mut engine = Engine::start();
    let feed = |bytes: &[u8]| {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        writer.write_all(bytes).expect("written");
        reader
    };
    let id = engine.begin_fed("read first; echo \"[$first]\"; cat", feed(b"one\ntwo\nthree\n").into());
    assert_eq!(engine.end(id).good(), "[one]\ntwo\nthree\n");
    // Unread input does not reach the next execution.
    let id = engine.begin_fed("read x; echo $x", feed(b"a\nb\nc\n").into());
    assert_eq!(engine.end(id).good(), "a\n");
    assert_eq!(engine.run("cat; read x").code, 1);
    let id = engine.begin_fed("cat; read x; echo end", feed(b"").into());
    assert_eq!(engine.end(id).good(), "end\n");
    // Input in small parts.
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let id = engine.begin_fed("while read line; do echo \"<$line>\"; done", reader.into());
    writer.write_all(b"x\n").expect("written");
    engine.until_out("<x>");
    writer.write_all(b"y\n").expect("written");
    engine.until_out("<y>");
    drop(writer);
    assert_eq!(engine.end(id).good(), "<x>\n<y>\n");
    // Large input, from a file.
    let path = engine.dir.path().join("large");
    std::fs::write(&path, vec![b'x'; 3 << 20]).expect("written");
    let id = engine.begin_fed("wc -c", std::fs::File::open(&path).expect("opens").into());
    assert_eq!(engine.end(id).good().trim(), (3 << 20).to_string());
    assert_eq!(engine.out("cat | wc -c").trim(), "0");
}

#[test]
fn execution_env_is_temporary() {
    let mut engine = Engine::start();
    engine.out("A=own; export B=exported; C=(1 2)");
    let id = engine.resume_unjournalled(
        "echo $A $B $C $D; sh -c 'echo $A $B $C $D'; B=changed",
        &[("A", "1"), ("B", "2"), ("C", "3"), ("D", "it's \"4\"")],
    );
    assert_eq!(engine.end(id).good(), "1 2 3 it's \"4\"\n1 2 3 it's \"4\"\n");
    assert_eq!(
        engine.out("declare -p A B C; echo ${D-none}"),
        "declare -- A=\"own\"\ndeclare -x B=\"changed\"\ndeclare -a C=([0]=\"1\" [1]=\"2\")\nnone\n"
    );
    let id = engine.resume_unjournalled("exit 2", &[("A", "gone"), ("D", "gone")]);
    engine.end(id);
    assert_eq!(engine.out("echo $A ${D-none}"), "own none\n");
}

#[test]
fn bash_output_streams_completely() {
    let mut engine = Engine::start();
    let id = engine.begin("echo early; read x < fifo; echo late");
    engine.until_out("early");
    std::thread::sleep(Duration::from_millis(20));
    engine.interrupt(id);
    engine.end(id);
    let begun = Instant::now();
    let ran = engine.run("head -c 5000000 /dev/zero | tr '\\0' x");
    assert_eq!(ran.good().len(), 5_000_000);
    assert!(begun.elapsed() < Duration::from_secs(20));
    let ran = engine.run("for i in {1..3000}; do echo line $i; done");
    assert!(ran.good().ends_with("line 3000\n"));
}

#[test]
fn engine_internals_stay_hidden() {
    let mut engine = Engine::start();
    assert_eq!(
        engine.out(
            "declare -F; alias; trap -p | grep -v ryokan | grep -v proc/self | grep -v builtin | grep .; history; jobs"
        ),
        ""
    );
    let ran = engine.run("set -x; echo traced");
    assert_eq!((ran.out.as_str(), ran.stderr.as_str()), ("traced\n", "++ echo traced\n"));
    let ran = engine.run("echo again");
    assert_eq!((ran.out.as_str(), ran.stderr.as_str()), ("again\n", "++ echo again\n"));
    let ran = engine.run("exit 3");
    assert_eq!(ran.stderr, "++ exit 3\n");
    let ran = engine.run("set +x");
    assert_eq!(ran.stderr, "++ set +x\n");
    let ran = engine.run("set -v\necho verbose");
    assert_eq!(ran.out, "verbose\n");
    assert!(!ran.stderr.contains("ryokan"), "{}", ran.stderr);
    let ran = engine.run("set +v");
    assert!(!ran.stderr.contains("ryokan") && !ran.stderr.contains("proc"), "{}", ran.stderr);
    assert_eq!(engine.run("echo $0 $BASH_SUBSHELL ${#FUNCNAME[@]} ${BASH_SOURCE[0]-none}").out, "bash 0 0 none\n");
    let vars = engine.ask(|id| Request::Vars { id });
    assert!(!vars.fields["vars"].to_string().contains("ryokan"), "{vars:?}");
    assert!(!engine.save().keys().any(|key| key.contains("__ryokan")));
}
