//! Documents for programs: man pages from the grammar, and the schema of the interface.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::args;
use super::context::Context;
use super::failure::Failure;

/// The public interface.
const SCHEMA: &str = include_str!("../../schema/ryokan.capnp");

/// `ryokan man`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan man ~/.local/share/man/man1
  man ryokan-exec")]
pub struct ManArgs {
    /// Directory for the pages: one for each command
    pub dir: PathBuf,
}

/// Writes the man pages.
pub fn man(context: &Context, given: &ManArgs) -> Result<(), Failure> {
    std::fs::create_dir_all(&given.dir).map_err(|error| Failure::of_file("create", &given.dir, &error))?;
    let mut grammar = args::command().disable_help_subcommand(true);
    grammar.build();
    let (mut commands, mut pages) = (vec![grammar], Vec::new());
    while let Some(command) = commands.pop() {
        commands.extend(command.get_subcommands().cloned());
        let name = command.get_bin_name().unwrap_or("ryokan").replace(' ', "-");
        let path = given.dir.join(format!("{name}.1"));
        let (version, mut page) = (env!("CARGO_PKG_VERSION"), Vec::new());
        let command = command.display_name(name.clone()).version(version);
        let written = clap_mangen::Man::new(command).source(format!("ryokan {version}")).render(&mut page);
        written.and_then(|()| std::fs::write(&path, page)).map_err(|error| Failure::of_file("write", &path, &error))?;
        pages.push(name);
    }
    pages.sort();
    context.show(
        || json!({ "dir": given.dir, "pages": pages }),
        || format!("{} pages in {}\n", pages.len(), given.dir.display()),
    )
}

/// Prints the schema.
pub fn schema(context: &Context) -> Result<(), Failure> {
    context.print(SCHEMA)
}
