//! Virtual environments of Python kernels.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Host, User, users};

/// A virtual environment of this host with a module of its own.
pub(crate) fn made_in(folder: &Path) -> PathBuf {
    let venv = folder.join("venv");
    let made = Command::new("/usr/bin/python3").args(["-m", "venv", "--without-pip"]).arg(&venv).status();
    assert!(made.expect("it runs").success(), "Debian: python3-venv");
    let lib = fs::read_dir(venv.join("lib")).unwrap().next().unwrap().unwrap().path();
    fs::write(lib.join("site-packages/only_here.py"), "answer = 42\n").unwrap();
    venv
}

fn refused(host: &Host, args: &[&str]) -> (Option<i32>, String) {
    let output = host.cli(args);
    assert!(!output.status.success(), "{args:?} was accepted");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

const PREFIX: &str = "import sys; print(sys.prefix)";
/// Whether the interpreter is of no virtual environment.
const OWN: &str = "import sys; print(sys.prefix == sys.base_prefix)";

#[test]
fn venv_follows_kernel() {
    for user in users() {
        let mut host = Host::start_as(user);
        let venv = made_in(&host.given(user));
        let (dir, prefix) = (venv.to_str().unwrap(), format!("{}\n", venv.display()));
        host.ok(&["new", "lab", "--venv", dir]);
        let code = "import os, sys, only_here; print(sys.prefix, only_here.answer, os.environ['VIRTUAL_ENV'])";
        assert_eq!(host.ok(&["exec", "lab", code]), format!("{dir} 42 {dir}\n"), "{user:?}");
        let program = ["spawn", "lab", "--", "python", "-c", "import only_here; print(only_here.answer)"];
        assert_eq!(host.ok(&program), "42\n");
        assert!(refused(&host, &["exec", "lab", &format!("open('{dir}/new', 'w')")]).1.contains("Read-only"));
        let shown = host.ok(&["show", "lab"]);
        assert!(shown.contains(&format!("venv          {dir}\n")) && shown.contains(&format!("{dir}:ro")), "{shown}");
        host.ok(&["checkpoint", "lab", "-m", "good"]);
        host.ok(&["restore", "lab", "good", "--yes"]);
        host.ok(&["exec", "lab", "x = only_here.answer; sys.path.insert(0, '/workspace/lib')"]);
        host.ok(&["fork", "lab", "child"]);
        host.ok(&["stop", "lab"]);
        host.kill();
        host.launch();
        for name in ["lab", "child"] {
            assert_eq!(host.ok(&["exec", name, PREFIX]), prefix, "{name}");
            assert_eq!(host.ok(&["exec", name, "print(x, sys.path[0])"]), "42 /workspace/lib\n");
        }

        let said = host.ok(&["update", "lab", "--venv", "none"]);
        assert!(said.contains("with its next start") && said.contains(&format!("venv {dir} -> none")), "{said}");
        assert_eq!(host.ok(&["exec", "lab", PREFIX]), prefix, "its interpreter runs");
        host.ok(&["stop", "lab"]);
        assert_eq!(host.ok(&["exec", "lab", OWN]), "True\n");
        // The saved import path has what code added, and not the other interpreter's entries.
        let code = format!("print('/workspace/lib' in sys.path, any(p.startswith('{dir}') for p in sys.path), x)");
        assert_eq!(host.ok(&["exec", "lab", &code]), "True False 42\n");
        host.ok(&["update", "lab", "--remove-path", dir]);
        assert!(!host.ok(&["show", "lab"]).contains(dir));
    }
}

#[test]
fn missing_module_names_venv() {
    let host = Host::start();
    host.ok(&["new", "lab", "--engine", "python"]);
    let (code, said) = refused(&host, &["exec", "lab", "import only_here"]);
    assert!(code == Some(1) && said.contains("ryokan update lab --venv DIR"), "{said}");
    let (code, said) = refused(&host, &["run", "--engine", "python", "import only_here"]);
    assert!(code == Some(1) && said.contains("ryokan run --venv DIR") && !said.contains("ryokan update"), "{said}");
    let venv = made_in(&host.given(User::Own));
    let run =
        ["run", "--engine", "python", "--venv", venv.to_str().unwrap(), "import only_here; print(only_here.answer)"];
    assert_eq!(host.ok(&run), "42\n");
}

#[test]
fn venv_in_workspace() {
    let host = Host::start();
    host.ok(&["new", "lab", "--engine", "python"]);
    let update = ["update", "lab", "--venv", "/workspace/.venv"];
    let (code, said) = refused(&host, &update);
    assert!(code == Some(3) && said.contains("python3 -m venv /workspace/.venv"), "{said}");
    assert_eq!(refused(&host, &["new", "other", "--venv", "/workspace/.venv"]).0, Some(3));
    host.ok(&["spawn", "lab", "--", "python3", "-m", "venv", "--without-pip", "/workspace/.venv"]);
    host.ok(&update);
    host.ok(&["stop", "lab"]);
    assert_eq!(host.ok(&["exec", "lab", PREFIX]), "/workspace/.venv\n");
    assert!(host.ok(&["show", "lab", "--json"]).contains("\"paths\": []"), "it needs no path of the host");
    host.ok(&["fork", "lab", "child"]);
    assert_eq!(host.ok(&["exec", "child", PREFIX]), "/workspace/.venv\n");
    // Code removed it: the error says how to go on, and that works.
    host.ok(&["exec", "lab", "import shutil; shutil.rmtree('/workspace/.venv')"]);
    host.ok(&["stop", "lab"]);
    let (_, said) = refused(&host, &["exec", "lab", "1"]);
    assert!(said.contains("/workspace/.venv") && said.contains("ryokan update lab --venv none"), "{said}");
    host.ok(&["update", "lab", "--venv", "none"]);
    assert_eq!(host.ok(&["exec", "lab", OWN]), "True\n");
}

#[test]
fn wrong_venv_is_refused() {
    let host = Host::start();
    let given = host.given(User::Own);
    let venv = made_in(&given);
    let (dir, folder) = (venv.to_str().unwrap(), given.to_str().unwrap());
    for (args, code, what) in [
        (&["--venv", "/absent/venv"][..], 3, "there is no virtual environment /absent/venv"),
        (&["--venv", folder], 2, "no pyvenv.cfg"),
        (&["--venv", dir, "--engine", "bash"], 2, "for the python engine"),
        (&["--venv", dir, "--isolation", "microvm"], 5, "the Python of its image"),
    ] {
        let (found, said) = refused(&host, &[&["new", "lab"], args].concat());
        assert!(found == Some(code) && said.contains(what), "{args:?}: {found:?} {said}");
    }
    host.ok(&["new", "lab", "--venv", dir]);
    let (code, said) = refused(&host, &["update", "lab", "--remove-path", dir]);
    assert!(code == Some(2) && said.contains("none of the kernel's paths"), "{said}");
    // It was made anew for another interpreter, or copied from another machine.
    fs::remove_file(venv.join("bin/python")).unwrap();
    std::os::unix::fs::symlink("/absent/python3.11", venv.join("bin/python")).unwrap();
    let (_, said) = refused(&host, &["exec", "lab", "1"]);
    assert!(said.contains("/absent/python3.11") && said.contains("python3 -m venv --clear"), "{said}");
}
