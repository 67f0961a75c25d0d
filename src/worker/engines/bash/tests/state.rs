//! The state: its content, the time of saving, and restoring.

use super::kit::Engine;
use crate::link::frames::EndStatus;
use proptest::prelude::*;

#[test]
fn only_changed_state_is_sent() {
    let mut engine = Engine::start();
    let mut sent = |code: &str| {
        let ran = engine.run(code);
        let mut keys = ran.puts.clone();
        keys.extend(ran.dels.iter().map(|key| format!("-{key}")));
        keys.sort();
        keys
    };
    for (code, keys) in [
        (":", &[][..]),
        ("x=1 y=2", &["var/x", "var/y"]),
        ("x=1; z=$((1+1))", &["var/z"]),
        ("x=2; unset y", &["-var/y", "var/x"]),
        ("f() { echo 1; }; g() { :; }", &["fn/f", "fn/g"]),
        ("f() { echo 2; }", &["fn/f"]),
        ("unset -f g", &["-fn/g"]),
        ("alias l='ls -l'", &["alias/l"]),
        ("unalias l", &["-alias/l"]),
        ("set -o pipefail; shopt -s globstar", &["opt/set.pipefail", "opt/shopt.globstar"]),
        ("set +o pipefail; shopt -u globstar", &["-opt/set.pipefail", "-opt/shopt.globstar"]),
        ("shopt -u checkwinsize", &["opt/shopt.checkwinsize"]),
        ("shopt -s checkwinsize", &["-opt/shopt.checkwinsize"]),
        ("cd /", &["cwd", "var/OLDPWD"]),
        ("trap 'echo usr' USR1; trap '' HUP", &["trap/HUP", "trap/USR1"]),
        ("trap - USR1 HUP", &["-trap/HUP", "-trap/USR1"]),
        ("umask 077", &["umask"]),
        ("set -- a b", &["positional"]),
        ("pushd /tmp >/dev/null", &["cwd", "dirs", "var/OLDPWD"]),
        ("enable -n kill", &["builtin/kill"]),
        ("enable kill", &["-builtin/kill"]),
        ("hash -p /bin/cat dog", &["hash/dog"]),
        ("ls >/dev/null", &[]),
        ("complete -W 'a b' dog", &["completions"]),
        ("false", &["status"]),
        ("true", &["-status"]),
        ("export PATH=/bin:/usr/bin", &["-hash/dog", "var/PATH"]),
        ("unset HOME", &["unset/var/HOME"]),
        ("readonly ro=1; declare -u up=abc; declare -i int=5", &["var/int", "var/ro", "var/up"]),
        ("RANDOM=5; SECONDS=100; : $RANDOM $SECONDS $BASHPID", &[]),
    ] {
        assert_eq!(sent(code), keys, "{code}");
    }
}

/// The state as bash itself prints it.
const EVERYTHING: &str = r#"declare -p | grep -vE '^declare -[a-zA-Z-]+ (_|BASH.*|PPID|RANDOM|SRANDOM|SECONDS|EPOCH.*|LINENO|HOME|__ryokan.*|BASHPID|DIRSTACK|FUNCNAME|GROUPS|PIPESTATUS|HISTCMD|COMP_WORDBREAKS|SHELLOPTS|OLDPWD|PWD)(=|$)'
declare -f; declare -F; alias -p; shopt -p; set +o; trap -p | grep -v -e ryokan -e builtin -e '^$'; umask; dirs -lp; printf '<%s>' "$@"; echo; enable -n; hash -t dog; complete -p; echo "$OLDPWD $PWD""#;

#[test]
fn bash_session_round_trips() {
    let mut engine = Engine::start();
    let code = r#"
s=$'tab\t nl\n quote\' back\\ "double" $dollar `tick` é \001 \177 \377 \303\050'
empty= ; declare unset_one; declare -x exported='x y'; readonly ro=$'r\no'; declare -ir ri=42
declare -i n=7; declare -l low=ABC; declare -u up=abc; declare -t traced=1
a=(one 'two 2' $'three\n3' ''); sparse=([3]=x [10]=y); declare -a none; declare -a void=(); declare -ra roa=(1 '2 3')
declare -A m=([key]=value ['a b']='c d' [$'n\nl']=$'x\ny' [']']=bracket ['"']=quote ["'"]=single ['$x']=dollar); declare -A nomap=()
declare -n ref=s; declare -ai ints=(1 2 3); declare -Ax em=([q]=1)
f() { local x="$1"; cat <<EOF
doc $x
}
EOF
}
g() ( echo sub ); h-dash() { [[ $1 == @(a|b) ]] && echo "in \"quotes\" 'single'"; }; export -f g; readonly -f f
k() { case $1 in (x) echo ;& *) ;; esac; } 2>/dev/null
alias ll='ls -l' q="it's" dots='cd ..'
set -o pipefail -o noclobber; shopt -s extglob globstar nullglob; shopt -u sourcepath
trap 'echo usr1; echo "two"' USR1; trap '' HUP; trap 'echo it'\''s' TERM; trap 'echo bye >/dev/null' EXIT; trap 'true' DEBUG
umask 027; set -- 'pos 1' '' $'pos\n3'; mkdir -p d/e; cd d; pushd e >/dev/null; pushd / >/dev/null; hash -p /bin/cat dog
complete -W 'one two' dog; enable -n kill printf; (exit 3)"#;
    engine.run("shopt -s extglob");
    let ran = engine.run(code);
    assert_eq!((ran.code, ran.stderr.as_str()), (3, ""), "{ran:?}");
    let (mut other, missed) = {
        let dir = engine.dir.path().to_owned();
        let saved = engine.save();
        let mut other = Engine::start();
        std::fs::create_dir_all(dir.join("d/e")).expect("there");
        let missed = other.load(&saved);
        (other, missed)
    };
    assert_eq!(missed, [], "everything comes back");
    let status = (engine.out("echo $?"), other.out("echo $?"));
    assert_eq!(status, ("3\n".into(), "3\n".into()));
    let was = engine.run(EVERYTHING);
    let is = other.run(EVERYTHING);
    let differ: Vec<_> = was.out.lines().zip(is.out.lines()).filter(|(was, is)| was != is).collect();
    assert_eq!(differ, []);
    assert_eq!(was.out, is.out);
    for marker in ["h-dash", "two 2", "noclobber", "kill", "bye"] {
        assert!(was.out.contains(marker), "{marker}: {}", was.out);
    }
    assert_eq!(
        other.run("f x; h-dash b; echo \"$ref\" | od -An -c | head -2; bash -c g").out,
        engine.run("f x; h-dash b; echo \"$ref\" | od -An -c | head -2; bash -c g").out
    );
    // Nothing is sent again after a load, and a second save gives the same entries.
    let ran = other.run("(exit 3)");
    assert_eq!(ran.puts, ["status"], "{ran:?}");
}

#[test]
fn load_replaces_readonly() {
    let mut engine = Engine::start();
    engine.out("readonly x=1; y=2; f() { :; }; cd /");
    let saved = engine.save();
    engine.out("readonly z=3; y=9; f() { echo other; }; alias a=b; set -f");
    let missed = engine.load(&saved);
    assert_eq!(missed, []);
    assert_eq!(engine.out("echo $x $y ${z-none} $PWD $-").replace('s', ""), "1 2 none / hB\n");
    assert_eq!(engine.out("alias; type -t f"), "function\n");
    assert!(engine.run("x=4").stderr.contains("readonly"));
}

#[test]
fn broken_state_entries_are_skipped() {
    let mut engine = Engine::start();
    engine.out("x=1; f() { echo f; }; a=(1 2)");
    let mut saved = engine.save();
    let broken: [(&str, &[u8]); 12] = [
        ("var/bad", b"\x01\xff\xff\xff\xff"),
        ("var/version", b"\x07x"),
        ("var/not a name", b"\x01\0\0\0\0sx"),
        ("var/zero", b"\x01\0\0\0\0sa\0b"),
        ("var/evil;echo", b"\x01\0\0\0\0sx"),
        ("fn/open", b"\x01\0\0\0\0open () { echo "),
        ("fn/;echo evil", b"\x01\0\0\0\0nothing"),
        ("opt/set.nosuch", b"\x011"),
        ("cwd", b"\x01/no/such/folder"),
        ("trap/NOSUCH", b"\x01echo"),
        ("strange/kind", b"\x01x"),
        ("var/empty", b""),
    ];
    for (key, body) in broken {
        saved.insert(key.to_owned(), (Default::default(), body.to_vec()));
    }
    let missed = engine.load(&saved);
    let mut keys: Vec<&str> = missed.iter().map(|missed| missed.key.as_str()).collect();
    keys.sort_unstable();
    let mut wanted: Vec<&str> = broken.iter().map(|(key, _)| *key).collect();
    wanted.sort_unstable();
    assert_eq!(keys, wanted, "{missed:?}");
    assert!(missed.iter().all(|missed| !missed.reason.is_empty()));
    assert_eq!(engine.out("f; echo $x ${a[1]}"), "f\n1 2\n");
}

#[test]
fn large_state_values_are_chunked() {
    let mut engine = Engine::start();
    engine.out("x=$(head -c 3000000 /dev/zero | tr '\\0' é)");
    let length = engine.entries["var/x"].1.len();
    assert!(length >= 3_000_000, "{length}");
    let (mut other, missed) = engine.restored();
    assert_eq!(missed, []);
    assert_eq!(other.out("printf %s \"$x\" | md5sum"), engine.out("printf %s \"$x\" | md5sum"));
    let ran = engine.run("y=1");
    assert_eq!(ran.puts, ["var/y"]);
}

#[test]
fn uncaptured_state_is_reported() {
    let mut engine = Engine::start();
    engine.out("exec 7</etc/passwd; coproc cat; sleep 40 & exec 8< <(sleep 41)");
    for kind in ["descriptor/7", "descriptor/8"] {
        assert!(engine.has_missed(kind), "{kind} {:?}", engine.missed);
    }
    assert!(engine.missed.iter().filter(|missed| missed.key.starts_with("job/")).count() >= 3, "{:?}", engine.missed);
    engine.out("exec 7<&- 8<&-; kill $(jobs -p)");
}

#[test]
fn state_metadata_is_readable() {
    let mut engine = Engine::start();
    engine.out("declare -ir n=5; long=$(printf 'x%.0s' {1..1000}); a=(1 2 3); f() { echo hi; }; ctl=$'a\\nb\\033c'");
    let meta = |key: &str| engine.entries[key].0.clone();
    assert_eq!((meta("var/n").type_name.as_str(), meta("var/n").summary.as_str()), ("readonly integer", "5"));
    assert!(meta("var/long").summary.chars().count() <= 200);
    assert!(meta("var/a").summary.starts_with("3 elements: [0]=1"), "{:?}", meta("var/a"));
    assert_eq!(meta("var/ctl").summary, "a b c");
    assert!(engine.entries.values().all(|(_, body)| body[0] == 1));
}

#[test]
fn heredoc_function_round_trips() {
    let mut engine = Engine::start();
    engine.out("a() { cat <<'E'\n}\nb () \n{ \n    echo not b\n}\nE\n}\nb() { echo real b; }");
    let (mut other, missed) = engine.restored();
    assert_eq!(missed, []);
    assert_eq!(other.out("b; a"), "real b\n}\nb () \n{ \n    echo not b\n}\n");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    /// Arbitrary bytes in each kind of variable, through bash, entries and another bash.
    #[test]
    fn bash_state_bytes_round_trip(texts in prop::collection::vec(prop::collection::vec(1u8..=255, 0..30), 1..12)) {
        let mut engine = Engine::start();
        let mut code = String::from("a=() ; declare -A m=()\n");
        for (i, text) in texts.iter().enumerate() {
            let word: String = text.iter().map(|b| format!("\\{b:03o}")).collect();
            code.push_str(&format!("v{i}=$'{word}'; a[{}]=$'{word}'; k=$'k{word}'; m[$k]=$'{word}'; alias q{i}=$'{word}'; trap -- $'{word}' {}\n", i * 3, ["USR1", "USR2", "HUP", "WINCH"][i % 4]));
        }
        code.push_str("unset k");
        let ran = engine.run(&code);
        prop_assert_eq!((ran.status, ran.stderr.as_str()), (Some(EndStatus::Done), ""));
        let (mut other, missed) = engine.restored();
        prop_assert_eq!(&missed[..], &[]);
        for (i, text) in texts.iter().enumerate() {
            let read = |name: &str| format!("printf %s \"{name}\" | od -An -v -tx1 | tr -d ' \\n'");
            let hex: String = text.iter().map(|b| format!("{b:02x}")).collect();
            for name in [format!("$v{i}"), format!("${{a[{}]}}", i * 3), format!("${{BASH_ALIASES[q{i}]}}")] {
                prop_assert_eq!(&other.run(&read(&name)).out, &hex);
            }
        }
        let (was, is) = (engine.save(), other.save());
        prop_assert_eq!(was.keys().collect::<Vec<_>>(), is.keys().collect::<Vec<_>>());
        for (key, (_, body)) in &was {
            prop_assert_eq!(body, &is[key].1, "{}", key);
        }
    }
}
