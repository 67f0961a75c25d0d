//! The engines, one folder each; all keep `docs/engine-contract.md`. Here: how each is started.

mod answers;
pub mod bash;
#[cfg(feature = "kaish")]
pub mod kaish;
pub mod node;
mod paths;
pub mod python;
mod sources;

use crate::core::engine::EngineName;
#[cfg(not(feature = "kaish"))]
use crate::core::error::Error;
use crate::core::error::Result;
use crate::core::name::KernelName;
use crate::core::origin::{Origin, OriginKind};
use crate::link::bootstrap::EngineSettings;
use crate::sandbox::EngineProgram;

/// Where programs are found inside.
const PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin";

/// Reads the compiled driver, which only the daemon's user may read: to be called before init becomes another. Empty where there is none.
pub fn read_compiled(settings: &EngineSettings) -> Vec<u8> {
    // One that cannot be read costs a slower start, no more.
    settings.python_compiled.as_deref().and_then(|path| python::read_compiled(path).ok()).unwrap_or_default()
}

/// The program of an engine, with the environment of the contract. `kernel`: its name and how its state came to be; none for a
/// slot. `compiled`: what [`read_compiled`] gave.
///
/// # Errors
/// `Unsupported` if this build or host does not have it.
pub fn program(
    engine: EngineName,
    settings: &EngineSettings,
    compiled: &[u8],
    kernel: Option<(&KernelName, (OriginKind, u32))>,
) -> Result<EngineProgram> {
    let env = environment(kernel);
    match engine {
        EngineName::Kaish => kaish_program(env),
        EngineName::Python => python::program(settings, compiled, env),
        EngineName::Bash => bash::program(settings, env),
        EngineName::Node => node::program(settings, env),
    }
}

fn environment(kernel: Option<(&KernelName, (OriginKind, u32))>) -> Vec<(String, String)> {
    let fixed = [("HOME", "/workspace"), ("PATH", PATH), ("LANG", "C.UTF-8"), ("TMPDIR", "/tmp"), ("USER", "guest")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    fixed.into_iter().chain(kernel_environment(kernel)).collect()
}

/// The variables that say whose engine it is; empty ones for an engine that has no kernel yet.
pub fn kernel_environment(kernel: Option<(&KernelName, (OriginKind, u32))>) -> Vec<(String, String)> {
    let (name, (kind, generation)) =
        kernel.map_or(("", (OriginKind::Original, 0)), |(name, origin)| (name.as_str(), origin));
    let told = [("RYOKAN_KERNEL".to_owned(), name.to_owned())].into_iter().chain(Origin::environment(kind, generation));
    match kernel {
        Some(_) => told.collect(),
        None => told.map(|(name, _)| (name, String::new())).collect(),
    }
}

#[cfg(feature = "kaish")]
fn kaish_program(env: Vec<(String, String)>) -> Result<EngineProgram> {
    // Part of this very program: a fork saves the exec, the loading and the linking.
    Ok(EngineProgram::Call { entry: run_kaish, arguments: Vec::new(), env })
}

#[cfg(not(feature = "kaish"))]
fn kaish_program(_: Vec<(String, String)>) -> Result<EngineProgram> {
    Err(Error::unsupported("this build has no kaish").hint("build ryokan with the feature `kaish`"))
}

/// Becomes the kaish engine: its descriptors are 1, 2 and 3, its variables those of the environment.
#[cfg(feature = "kaish")]
fn run_kaish(_: Vec<String>) -> ! {
    use crate::sys::process::adopt;

    let setup = kaish::Setup { vars: std::env::vars().collect(), ..kaish::Setup::default() };
    match (adopt(3), adopt(1), adopt(2)) {
        (Ok(control), Ok(stdout), Ok(stderr)) => kaish::main_forked(control, stdout, stderr, setup),
        _ => crate::sys::process::exit_now(71),
    }
}
