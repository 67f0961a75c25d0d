//! The worker's binary. Everything is in the library.

fn main() {
    ryokan::worker::main()
}
