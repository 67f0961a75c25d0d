//! The data sources of a group: one interface for each kind of data beside git.
//!
//! ```text
//! freeze   ahead ─▶ quiesce ─▶ revision ─▶ pin ─▶ revision ─▶ resume ─▶ store
//! restore  verify ─▶ quiesce ─▶ pin ─▶ store ─▶ prepare ─▶ switch ─▶ discard ─▶ resume
//!                                                  └ failure ─▶ revert ─▶ discard ─▶ resume
//! ```
//! A pin holds one moment; only it is within the pause. The driver is chosen by trying it on the file system or the
//! server:
//!
//! | source | pinned by | the pause grows with |
//! |---|---|---|
//! | SQLite, with a write-ahead log | a read transaction | nothing |
//! | SQLite, without | a clone (Btrfs, XFS) | nothing |
//! | SQLite, without either | a shared lock, on which its writers wait until the copy is made | size |
//! | directory | its tree; all but the last changes are stored before | changes |
//! | PostgreSQL | an exported snapshot and locks of the tables' definitions | nothing |
//! | PostgreSQL server | a snapshot of its Btrfs subvolume, between backup start and stop | nothing |
//! | command | the program's output | size |
//!
//! `tests/freeze/conformance.rs` is one suite for all of them. Until the switch, only inactive copies change. `pending`
//! keeps the promise that a quiesced source is resumed.

mod command;
mod database;
mod directory;
pub(super) mod pending;
mod postgres;
mod postgres_credentials;
mod postgres_files;
mod postgres_marks;
mod postgres_private;
mod postgres_process;
mod postgres_rows;
mod postgres_server;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use async_trait::async_trait;

pub(super) use self::database::copy_now;
pub(super) use self::directory::{check as check_directory, forget as forget_directory};
pub(super) use self::postgres_rows::{postgres_rows_now, postgres_rows_of};
use super::access;
use crate::catalog::host_database::{self, SUFFIXES};
use crate::core::error::{Error, Result};
use crate::core::freeze::cost::Driver;
use crate::core::freeze::postgres::ConnectionError;
use crate::core::freeze::{Captured, Member, Target};
use crate::core::ids::{Digest, GroupId};
use crate::core::kernel::transition::Kind;
use crate::store::Store;
use crate::supervisor::host::Host;
use crate::supervisor::registry::Supervisor;
use crate::workspace::{self, Seen, TreeId};

/// The folder of copies of what other programs wrote during a restore that was reverted.
pub(super) use self::database::KEPT;

/// The address of content that is not stored yet.
const NOT_STORED: Digest = Digest::from_bytes([0; 32]);

/// One source during one operation.
#[async_trait(?Send)]
pub(super) trait DataSource {
    /// Whether [`Self::resume`] must follow [`Self::quiesce`] even if the daemon ends in between.
    fn must_resume(&self, _transition: Kind) -> bool {
        false
    }

    /// Stores what can be stored while writers go on, so that a pin has less to do. It may fail without effect.
    async fn ahead(&mut self) {}

    /// Stops writers, as far as the source can.
    async fn quiesce(&mut self, _transition: Kind) -> Result<()> {
        Ok(())
    }

    /// Admits writers again. May be repeated.
    async fn resume(&mut self) -> Result<()>;

    /// The present revision: the same as long as nothing changes that the freeze must see. `any`: also of content that is
    /// missing or damaged.
    async fn revision(&mut self, any: bool) -> Result<String>;

    /// Checks that the content can be reached.
    async fn check_reachable(&mut self) -> Result<()> {
        self.revision(false).await.map(drop)
    }

    /// The present state without its content, if it can be known.
    async fn present(&mut self) -> Result<Option<Captured>>;

    /// Holds the present content apart from the source; returns it with its revision. Until [`Self::store`], the
    /// addresses of its content are unknown.
    async fn pin(&mut self, any: bool) -> Result<(Captured, String)>;

    /// How the content is pinned.
    fn driver(&self) -> Driver;

    /// The program that holds the content, with its version, and a path in the file system that has it, as far as they are
    /// known.
    fn held_by(&self) -> (String, Option<PathBuf>) {
        (String::new(), None)
    }

    /// What a pinned content depends on besides, for people; empty: nothing is known.
    fn parameters(&self) -> String {
        String::new()
    }

    /// Which credentials a captured content holds, if it cannot be captured without.
    fn credentials_held(&self) -> Option<&'static str> {
        None
    }

    /// Ends a pin on which writers wait, by a copy. Before anything is stored.
    async fn admit_writers(&mut self) -> Result<()> {
        Ok(())
    }

    /// Stores what is pinned, completes its description and ends the pin. Writers may be admitted again.
    async fn store(&mut self, _captured: &mut Captured) -> Result<()> {
        Ok(())
    }

    /// Reads what the restore of a captured state needs.
    async fn verify(&mut self, target: &Captured) -> Result<()>;

    /// Makes an inactive copy of a captured state.
    async fn prepare(&mut self, target: &Captured) -> Result<()>;

    /// Makes the inactive copy the active one, unless the present is no longer `safety`. Not to be abandoned.
    async fn switch(&mut self, target: &Captured, safety: &Captured) -> Result<()>;

    /// Brings the source back to `safety` if a restore of `target` may have changed it. Not to be abandoned.
    async fn revert(&mut self, safety: &Captured, target: Option<&Captured>) -> Result<()>;

    /// Notes that a restore of a former daemon may have changed it.
    fn may_be_switched(&mut self);

    /// Removes inactive copies.
    async fn discard(&mut self);

    /// What the present content has that a restore neither brings back nor keeps, with a hint.
    async fn lost_by_restore(&mut self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Why the source does not serve although the operation has ended.
    fn at_rest(&self) -> Option<String> {
        None
    }

    /// Where the content that another program wrote during a restore was kept.
    fn kept(&self) -> Option<&Path> {
        None
    }
}

/// Opens the source of a member; `scratch` is for files of this operation. `None`: the member is no data source.
///
/// # Errors
/// `refused` by the rules for host paths, `notFound` for a source that is no longer configured.
pub(super) async fn open(
    host: &Rc<Host>,
    uid: u32,
    member: &Member,
    scratch: PathBuf,
) -> Result<Option<Box<dyn DataSource>>> {
    let host = Rc::clone(host);
    let name = member.name.clone();
    Ok(Some(match &member.target {
        Target::Kernel { .. } | Target::Repository { .. } => return Ok(None),
        Target::Database { path } => {
            access::recheck(&host, uid, Path::new(path))?;
            Box::new(database::DatabaseSource::new(host, name, path.into(), scratch))
        }
        Target::Directory { path } => {
            access::recheck(&host, uid, Path::new(path))?;
            Box::new(directory::DirectorySource::new(host, path.into()))
        }
        Target::Command { source } => {
            access::own_user(uid)?;
            Box::new(command::CommandSource::new(host, source, scratch)?)
        }
        Target::Postgres { connection } => {
            access::own_user(uid)?;
            let wrong = |error: ConnectionError| Error::corrupt(format!("member {name}: {error}"));
            Box::new(postgres::PostgresSource::new(host, connection.parse().map_err(wrong)?, scratch))
        }
        Target::Server { server } => {
            access::own_user(uid)?;
            Box::new(postgres_server::ServerSource::new(host, server)?)
        }
    }))
}

/// Opens the source of a member and checks that no kernel shares what it needs.
///
/// # Errors
/// As [`open`], and `refused` (`shared_with_kernel`, `member_overlap`).
pub(super) async fn open_checked(
    supervisor: &Supervisor,
    uid: u32,
    member: &Member,
    scratch: PathBuf,
) -> Result<Option<Box<dyn DataSource>>> {
    let opened = open(supervisor.host(), uid, member, scratch).await?;
    if let Target::Directory { path } | Target::Database { path } = &member.target {
        // A server may have been configured since.
        access::apart_from_servers(supervisor.host(), Path::new(path))?;
    }
    if let Target::Directory { path } = &member.target {
        access::unshared_directory(supervisor, Path::new(path)).await?;
    }
    if let Target::Server { server } = &member.target
        && let Some(server) = supervisor.host().config.postgres.get(server)
    {
        access::unshared_directory(supervisor, &server.data).await?;
    }
    Ok(opened)
}

/// Checks that the content of a new member can be reached.
///
/// # Errors
/// Those of its revision.
pub(super) async fn check_reachable(host: &Rc<Host>, group: GroupId, uid: u32, member: &Member) -> Result<()> {
    let scratch = super::scratch(host, group).join(".check");
    std::fs::create_dir_all(&scratch).map_err(|error| Error::unavailable(error.to_string()))?;
    match open(host, uid, member, scratch).await? {
        Some(mut source) => source.check_reachable().await,
        None => Ok(()),
    }
}

/// The files of every database that is a member of a group: a repository around one leaves them out.
pub(super) async fn database_members(host: &Host) -> Result<Vec<PathBuf>> {
    let groups = host.catalog.groups(None).await?;
    let members = groups.iter().flat_map(|group| &group.members);
    Ok(members.filter_map(|member| member.target.database_path()).flat_map(database_files).collect())
}

/// The files that SQLite may have for a database.
pub(super) fn database_files(database: &Path) -> Vec<PathBuf> {
    SUFFIXES.iter().map(|suffix| host_database::beside(database, suffix)).collect()
}

fn other_content() -> Error {
    Error::internal("the captured content is that of another kind of source")
}

/// Checks that all objects of a stored tree are there, and protects them while the restore runs.
///
/// # Errors
/// `corrupt` if one is missing; those of reading.
pub(super) async fn tree_is_whole(host: &Host, tree: Digest, what: &str) -> Result<()> {
    let reached = move |store: &Store| {
        let mut all = Vec::new();
        let mut take = |digest| {
            all.push(digest);
            Ok(())
        };
        let walked = workspace::reach(store, TreeId(tree), &mut Seen::default(), &mut take);
        let missing = all.into_iter().find(|digest| !store.claim(*digest));
        Ok(walked.map(|()| missing))
    };
    let missing = host.store.run_beside(reached).await??;
    missing.map_or(Ok(()), |digest| Err(Error::corrupt(format!("object {digest} of the {what} is missing"))))
}
