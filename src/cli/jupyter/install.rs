//! Kernelspecs: the files that offer ryokan kernels in Jupyter.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::super::context::Context;
use super::super::failure::Failure;
use super::{InstallArgs, NotebookArgs, UninstallArgs};
use crate::core::engine::EngineName;
use crate::core::error::Error;

/// Marks the kernelspecs of this command.
const MARK: &str = "ryokan";

/// Writes a kernelspec.
pub fn install(context: &Context, args: &InstallArgs) -> Result<(), Failure> {
    let NotebookArgs { engine, kernel, html } = &args.kernels;
    let program = std::env::current_exe().map_err(|error| Error::internal(format!("this program's path: {error}")))?;
    let mut argv = vec![program.display().to_string()];
    if let Some(socket) = &context.options.socket {
        let socket = std::path::absolute(socket).map_err(|error| Failure::of_file("use", socket, &error))?;
        argv.extend(["--socket".into(), socket.display().to_string()]);
    }
    if context.options.system {
        argv.push("--system".into());
    }
    argv.extend(["jupyter", "run", "-f", "{connection_file}", "--engine", engine.name()].map(String::from));
    if let Some(kernel) = kernel {
        argv.extend(["--kernel".into(), kernel.to_string()]);
    }
    if *html {
        argv.push("--html".into());
    }
    let name = match kernel {
        Some(kernel) => format!("ryokan-{}-{kernel}", engine.name()).to_lowercase(),
        None => format!("ryokan-{}", engine.name()),
    };
    let of = kernel.as_ref().map_or(String::new(), |kernel| format!(": {kernel}"));
    let spec = json!({
        "argv": argv,
        "display_name": format!("{} (ryokan{of})", title(*engine)),
        "language": language(*engine),
        "interrupt_mode": "message",
        "metadata": { "debugger": false, MARK: true },
    });
    let folder = kernels(args.prefix.as_deref())?.join(&name);
    if folder.exists() && !is_ours(&folder) {
        return Err(Error::already_exists(format!("{} is a kernelspec of another program", folder.display())).into());
    }
    let path = folder.join("kernel.json");
    std::fs::create_dir_all(&folder).map_err(|error| Failure::of_file("create", &folder, &error))?;
    std::fs::write(&path, format!("{spec:#}\n")).map_err(|error| Failure::of_file("write", &path, &error))?;
    context.show(|| json!({ "name": name, "path": path }), || format!("{name}: {}\n", path.display()))
}

/// Removes every kernelspec of this command.
pub fn uninstall(context: &Context, args: &UninstallArgs) -> Result<(), Failure> {
    let folder = kernels(args.prefix.as_deref())?;
    let mut removed = Vec::new();
    for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if is_ours(&path) {
            std::fs::remove_dir_all(&path).map_err(|error| Failure::of_file("remove", &path, &error))?;
            removed.push(path.display().to_string());
        }
    }
    context.show(
        || json!({ "removed": removed }),
        || match removed.is_empty() {
            true => format!("nothing of ryokan is in {}\n", folder.display()),
            false => removed.iter().map(|path| format!("removed {path}\n")).collect(),
        },
    )
}

/// Whether a kernelspec is one of this command.
fn is_ours(folder: &Path) -> bool {
    let read = std::fs::read(folder.join("kernel.json")).ok();
    let spec: Option<serde_json::Value> = read.and_then(|text| serde_json::from_slice(&text).ok());
    spec.is_some_and(|spec| spec["metadata"][MARK] == true)
}

/// The directory of kernelspecs, as Jupyter finds it.
fn kernels(prefix: Option<&Path>) -> Result<PathBuf, Failure> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = match prefix {
        Some(prefix) => Some(prefix.join("share/jupyter")),
        None => absolute("JUPYTER_DATA_DIR")
            .or_else(|| absolute("XDG_DATA_HOME").map(|data| data.join("jupyter")))
            .or_else(|| absolute("HOME").map(|home| home.join(".local/share/jupyter"))),
    };
    let none = || Failure::usage("no directory for Jupyter's kernels: HOME is not set", "name one with --prefix");
    Ok(data.ok_or_else(none)?.join("kernels"))
}

fn title(engine: EngineName) -> &'static str {
    match engine {
        EngineName::Python => "Python",
        EngineName::Node => "JavaScript",
        EngineName::Bash => "Bash",
        EngineName::Kaish => "kaish",
    }
}

/// The language, as Jupyter names it.
pub fn language(engine: EngineName) -> &'static str {
    match engine {
        EngineName::Python => "python",
        EngineName::Node => "javascript",
        EngineName::Bash => "bash",
        EngineName::Kaish => "kaish",
    }
}
