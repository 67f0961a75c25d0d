//! Git repositories of users on this host, through the host's `git`.
//!
//! `git` runs as the daemon's own user, in repositories of that user only. Hooks, file system monitors and automatic
//! maintenance are off; the filters of the user's configuration apply, as the user's own `git` applies them. Those of the
//! repository's configuration are refused. Never runs in a kernel's workspace.

mod ancestry;
mod command;
mod compare;
mod history;
mod kept;
mod left_out;
mod marks;
mod new_submodule;
mod overwritten;
mod private;
mod repository;
mod sequences;
mod settings;
mod submodules;
#[cfg(test)]
mod test_repository;
mod worktrees;

pub use command::Git;
pub use compare::Commit;
pub use history::Room;
pub use repository::{Repository, State};
pub use sequences::end_of;
pub use submodules::{Submodule, scratch_of};
pub use worktrees::shared_by;
