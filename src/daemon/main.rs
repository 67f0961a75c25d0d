//! ryokan's host daemon.

fn main() -> std::process::ExitCode {
    ryokan::daemon::main()
}
