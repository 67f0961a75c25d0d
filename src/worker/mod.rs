//! The worker: a trusted init and its engine. All of it runs in `ryokan-worker` processes, except
//! [`embedded`].

#[cfg(feature = "kaish")]
pub mod embedded;
pub mod engines;
mod guest;
pub mod init;
pub mod probe;
mod probe_exercise;
mod probe_pooled;
pub(crate) mod spawner;

/// The worker's entry point; the first argument selects the role.
pub fn main() {
    // If executed by descriptor, its default name would be the descriptor's number.
    let _ = nix::sys::prctl::set_name(c"ryokan-worker");
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some(spawner::COMMAND) => spawner::main(),
        Some("guest") => guest::main(),
        Some(guest::WORKER_COMMAND) => spawner::main_in_guest(),
        Some("build") => println!("{}", crate::link::bootstrap::BUILD),
        Some(crate::sandbox::kvm::COMMAND) => crate::sandbox::kvm::main(),
        Some("probe") => probe::main(arguments.collect()),
        _ => {
            eprintln!(
                "ryokan-worker: started by ryokand, not by hand; `ryokan-worker probe -- PROGRAM` runs a program in the sandbox"
            );
            std::process::exit(2);
        }
    }
}
