//! Writes the first inputs of every target into a folder: `seeds FOLDER`.

// Every crate is compiled with coverage counters, so libFuzzer must be linked here too.
extern crate libfuzzer_sys as _;

#[path = "inputs/seeds.rs"]
mod seeds;

fn main() -> std::io::Result<()> {
    let folder = std::env::args_os().nth(1).expect("seeds FOLDER");
    for (target, name, bytes) in seeds::all() {
        let folder = std::path::Path::new(&folder).join(target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}
