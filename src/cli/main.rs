//! The command line `ryokan`.

fn main() -> std::process::ExitCode {
    ryokan::cli::main()
}
