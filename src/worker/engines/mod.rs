//! The engines, one folder each, all following `docs/engine-contract.md`. This file starts them.

mod answers;
pub mod bash;
#[cfg(feature = "kaish")]
pub mod kaish;
pub mod node;
mod paths;
pub mod python;
mod sources;

use std::path::Path;

use crate::core::engine::EngineName;
#[cfg(not(feature = "kaish"))]
use crate::core::error::Error;
use crate::core::error::Result;
use crate::core::ids::Epoch;
use crate::core::name::KernelName;
use crate::core::origin::{Origin, OriginKind};
use crate::link::bootstrap::EngineSettings;
use crate::sandbox::EngineProgram;

/// `PATH` inside.
const PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin";

/// Reads the compiled driver. To be called before init changes its user: only the daemon's user may
/// read it. Empty if there is none.
pub fn read_compiled(settings: &EngineSettings) -> Vec<u8> {
    // An unreadable file only costs a slower start.
    settings.python_compiled.as_deref().and_then(|path| python::read_compiled(path).ok()).unwrap_or_default()
}

/// What the code inside reads of its kernel: name, origin and generation of its state, and epoch.
pub type KernelSeen<'a> = (&'a KernelName, (OriginKind, u32), Epoch);

/// The program of an engine with the environment of the contract. `kernel`: none for a warm worker.
/// `compiled`: the result of [`read_compiled`].
///
/// # Errors
/// `Unsupported` if this build or host lacks the engine.
pub fn program(
    engine: EngineName,
    settings: &EngineSettings,
    compiled: &[u8],
    kernel: Option<KernelSeen<'_>>,
) -> Result<EngineProgram> {
    let env = environment(settings.venv.as_deref(), kernel);
    match engine {
        EngineName::Kaish => kaish_program(env),
        EngineName::Python => python::program(settings, compiled, env),
        EngineName::Bash => bash::program(settings, env),
        EngineName::Node => node::program(settings, env),
    }
}

fn environment(venv: Option<&Path>, kernel: Option<KernelSeen<'_>>) -> Vec<(String, String)> {
    common_environment(venv).into_iter().chain(kernel_environment(kernel)).collect()
}

/// Environment variables of every program inside, in a kernel with this virtual environment.
pub fn common_environment(venv: Option<&Path>) -> Vec<(String, String)> {
    let path = venv.map_or_else(|| PATH.to_owned(), |venv| format!("{}/bin:{PATH}", venv.display()));
    let common = [("HOME", "/workspace"), ("PATH", &*path), ("LANG", "C.UTF-8"), ("TMPDIR", "/tmp"), ("USER", "guest")];
    let common = common.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let active = venv.map(|venv| ("VIRTUAL_ENV".to_owned(), venv.display().to_string()));
    common.into_iter().chain(active).collect()
}

/// Environment variables that identify the kernel; empty for an engine without one.
pub fn kernel_environment(kernel: Option<KernelSeen<'_>>) -> Vec<(String, String)> {
    let (name, (kind, generation), epoch) = kernel
        .map_or(("", (OriginKind::Original, 0), Epoch(0)), |(name, origin, epoch)| (name.as_str(), origin, epoch));
    let reported =
        [("RYOKAN_KERNEL".to_owned(), name.to_owned())].into_iter().chain(Origin::environment(kind, generation, epoch));
    match kernel {
        Some(_) => reported.collect(),
        None => reported.map(|(name, _)| (name, String::new())).collect(),
    }
}

#[cfg(feature = "kaish")]
fn kaish_program(env: Vec<(String, String)>) -> Result<EngineProgram> {
    // Part of this program: a fork avoids exec, loading and linking.
    Ok(EngineProgram::Call { entry: run_kaish, arguments: Vec::new(), env })
}

#[cfg(not(feature = "kaish"))]
fn kaish_program(_: Vec<(String, String)>) -> Result<EngineProgram> {
    Err(Error::unsupported("this build has no kaish").hint("build ryokan with the feature `kaish`"))
}

/// Becomes the kaish engine, with descriptors 1, 2 and 3 and the variables of the environment.
#[cfg(feature = "kaish")]
fn run_kaish(_: Vec<String>) -> ! {
    use crate::sys::process::adopt;

    let setup = kaish::Setup { vars: std::env::vars().collect(), ..kaish::Setup::default() };
    match (adopt(3), adopt(1), adopt(2)) {
        (Ok(control), Ok(stdout), Ok(stderr)) => kaish::main_forked(control, stdout, stderr, setup),
        _ => crate::sys::process::exit_now(71),
    }
}
