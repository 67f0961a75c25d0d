//! Hostile code: the session continues, or reports promptly what was lost.

use std::time::{Duration, Instant};

use super::kit::Engine;
use crate::link::frames::EndStatus;

/// Each of these leaves a session that keeps its state and hides the engine's internals.
#[test]
fn hostile_code_keeps_session() {
    for code in [
        "declare() { echo hijacked; }; printf() { echo hijacked; }; eval() { echo hijacked; }; read() { :; }",
        "unset() { echo hijacked; }; set() { echo hijacked; }; trap() { echo hijacked; }; source() { echo hijacked; }",
        "shopt() { echo hijacked; }; alias() { echo hijacked; }; enable() { :; }; return() { :; }; cd() { :; }; exec() { :; }",
        "enable -n declare printf source umask hash jobs complete alias shopt read",
        "alias builtin='echo hijacked' declare='echo hijacked' printf='echo hijacked' eval='echo hijacked'",
        "alias if='echo' then=echo; shopt -s expand_aliases",
        "alias x='}' y='{' z=fi",
        "IFS=x; IFS=:",
        "IFS=$'0123456789abcdefghijklmnopqrstuvwxyz/_'",
        "set -o posix",
        "set -u -f -C -a -B -H -k -P -T -E",
        "set -e",
        "LC_ALL=C; export LC_ALL",
        "LC_ALL=nonsense",
        "export BASH_ENV=/dev/null ENV=/dev/null; PROMPT_COMMAND='echo hijacked' PS4='hijacked' PS1=hijacked PS0=hijacked",
        "shopt -s nullglob failglob nocasematch nocaseglob dotglob extdebug lastpipe inherit_errexit xpg_echo",
        "shopt -u sourcepath expand_aliases promptvars interactive_comments",
        "trap 'true' DEBUG; trap 'true' ERR; trap 'true' RETURN; set -o functrace -o errtrace",
        "trap '' INT TERM QUIT HUP PIPE CHLD",
        "PATH=; unset PWD OLDPWD HOME",
        "unset LINENO BASH_ALIASES DIRSTACK PIPESTATUS RANDOM",
        "exec 10</dev/null 11</dev/null 12</dev/null; exec 3>&1",
        "exec </etc/passwd",
        "cat() { echo hijacked; }; command_not_found_handle() { echo hijacked; }",
        "POSIXLY_CORRECT=1; BASH_COMPAT=4.2",
        "TMOUT=1; GLOBIGNORE='*'; FUNCNEST=1",
        "ulimit -n 300; ulimit -c 0",
        "shopt -s compat44 assoc_expand_once localvar_inherit localvar_unset; :",
        "__ryokan_s=1 __ryokan_code=2 __ryokan_i=4 __ryokan_o=q __ryokan_f=z __ryokan_l=5",
        "cd /; rmdir gone 2>/dev/null; mkdir -p $HOME/gone; cd $HOME/gone; rmdir $HOME/gone",
    ] {
        let mut engine = Engine::start();
        engine.out("kept=1");
        let ran = engine.run(&format!("before=1\n{code}\nafter=2"));
        assert!(!ran.out.contains("hijacked") && !ran.stderr.contains("ryokan"), "{code}: {ran:?}");
        assert!(!engine.has_missed("execution"), "{code}: {:?} {ran:?}", engine.missed);
        assert!(["var/before", "var/after"].iter().all(|key| engine.entries.contains_key(*key)), "{code}: {ran:?}");
        let begun = Instant::now();
        let ran = engine.run("x=3");
        assert_eq!((ran.status, ran.stderr.as_str()), (Some(EndStatus::Done), ""), "{code}: {ran:?}");
        assert!(engine.entries.contains_key("var/x"), "{code}: {ran:?}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{code}");
        let ran = engine.run("x=5; exit 4");
        assert_eq!(ran.code, 4, "{code}: {ran:?}");
        assert!(!ran.stderr.contains("ryokan") && !ran.out.contains("hijacked"), "{code}: {ran:?}");
        let ran = engine.run("y=$x");
        assert_eq!(ran.status, Some(EndStatus::Done), "{code}: {ran:?}");
        assert_eq!(engine.get("y"), "5", "{code}");
        assert_eq!(engine.get("kept"), "1", "{code}");
        let id = engine.begin("while :; do :; done");
        std::thread::sleep(Duration::from_millis(50));
        engine.interrupt(id);
        assert_eq!(engine.end(id).status, Some(EndStatus::Interrupted), "{code}");
    }
}

/// Permanent damage is detected; the session continues with its last state.
#[test]
fn broken_shell_is_replaced() {
    for code in [
        "builtin() { :; }",
        "enable -n builtin",
        "enable -n enable declare printf",
        "enable -n eval; enable -n trap builtin",
        "set -n",
        "exec 251>&-",
        "exec 250<&- 248<&-",
        "exec 251>/dev/null",
        "readonly __ryokan_s=4",
        "set -r; x=1",
        "exec 253</dev/null",
        "printf '\\0ryokan-0000000000000000-R\\0garbage' >&251; exec 251>&-",
        "shopt -s extdebug; trap false DEBUG",
        "alias '{'='echo'; alias '}'=echo; builtin() { sleep 0; }",
    ] {
        let mut engine = Engine::start();
        engine.out("kept=1; f() { echo f; }");
        let begun = Instant::now();
        let ran = engine.run(code);
        let then = engine.run("echo $kept; f");
        assert!(begun.elapsed() < Duration::from_secs(10), "{code}: {:?}", begun.elapsed());
        let third = engine.run("echo $kept; f");
        assert!(
            third.out == "1\nf\n" && (then.out == "1\nf\n" || then.status == Some(EndStatus::Failed)),
            "{code}: {ran:?} {then:?} {third:?}"
        );
    }
}

#[test]
fn report_garbage_is_ignored() {
    let mut engine = Engine::start();
    engine.out("kept=1");
    for code in [
        "head -c 200000 /dev/urandom >&251",
        "builtin printf 'x' >&251; builtin printf '\\0\\0\\0' >&251",
        "for i in {1..300}; do builtin printf 'ryokan\\0%s\\0' $i; done >&251",
        "builtin printf 'junk\\0\\0999999999\\0' >&254",
    ] {
        let ran = engine.run(code);
        assert!(ran.status.is_some(), "{code}");
        assert_eq!(engine.run("echo $kept").out, "1\n", "{code}");
    }
}

#[test]
fn report_flood_is_bounded() {
    let mut engine = Engine::start();
    engine.out("kept=1");
    let ran = engine.run(
        "x='0123456789abcdef'; for i in {1..14}; do x=$x$x; done; while builtin printf %s \"$x\"; do :; done >&251",
    );
    assert_eq!(ran.status, Some(EndStatus::Failed), "{ran:?}");
    assert!(engine.has_missed("execution"));
    assert_eq!(engine.out("echo $kept"), "1\n");
}

#[test]
fn dead_idle_shell_restarts() {
    let mut engine = Engine::start();
    engine.out("kept=1");
    engine.run("(sleep 0.2; kill -9 $$) &");
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(engine.out("echo $kept"), "1\n");
}

#[test]
fn user_traps_run_as_in_bash() {
    let mut engine = Engine::start();
    let ran = engine.run("trap 'echo \"D:$BASH_COMMAND\"' DEBUG\necho one");
    assert!(ran.out.starts_with("D:echo one\none\n"), "{ran:?}");
    let ran = engine.run("echo two");
    assert!(ran.out.starts_with("D:echo two\ntwo\n"), "{ran:?}");
    let machinery: Vec<&str> =
        ran.out.lines().skip(2).filter(|line| !line.contains("ryokan") && !line.contains("\\builtin")).collect();
    assert!(machinery.is_empty(), "{ran:?}");
    engine.run("trap - DEBUG");
    assert_eq!(engine.out("trap 'echo failed' ERR; false; true"), "failed\n");
    assert_eq!(engine.run("false").out, "failed\n");
    engine.out("trap - ERR; trap 'echo returned' RETURN; :");
    assert_eq!(engine.out("set -T; r() { :; }; r"), "returned\n");
    engine.out("set +T; trap - RETURN; trap 'echo usr' USR1");
    assert_eq!(engine.out("kill -USR1 $$; :"), "usr\n");
}
