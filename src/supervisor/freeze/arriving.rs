//! A group that moved to this host, and whose kernels live here: it is imported, and its members come into their places.

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;

use super::import::{self, arriving_group};
use super::operation_turn::of_targets;
use super::{access, member_places, recover, run_restore};
use crate::bundle::GroupContents;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::freeze::portable::GroupArrival;
use crate::core::freeze::{Captured, Part, Target};
use crate::core::ids::{Digest, GroupId};
use crate::core::signature::{Signer, Standing};
use crate::supervisor::host::actor::Actor;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::teleport::{DescribedGroup, GroupArrivals};
use crate::teleport::OfferedGroup;

/// Groups that arrive by moves.
pub(crate) struct Arrivals;

impl GroupArrivals for Arrivals {
    fn may_arrive<'a>(
        &'a self,
        supervisor: &'a Supervisor,
        group: &'a OfferedGroup,
        actor: &'a Actor,
    ) -> LocalBoxFuture<'a, Result<()>> {
        may_arrive(supervisor, group, actor).boxed_local()
    }

    fn rehearse<'a>(
        &'a self,
        supervisor: &'a Supervisor,
        contents: &'a GroupContents,
        arrival: &'a GroupArrival,
        actor: &'a Actor,
    ) -> LocalBoxFuture<'a, Result<()>> {
        rehearse(supervisor, contents, arrival, actor).boxed_local()
    }

    fn arrive<'a>(
        &'a self,
        supervisor: &'a Supervisor,
        arriving: (GroupId, Digest, DescribedGroup),
        arrival: GroupArrival,
        actor: &'a Actor,
    ) -> LocalBoxFuture<'a, Result<()>> {
        arrive(supervisor, arriving, arrival, actor).boxed_local()
    }

    fn end_unfinished<'a>(&'a self, supervisor: &'a Supervisor, id: GroupId) -> LocalBoxFuture<'a, Result<()>> {
        end_unfinished(supervisor, id).boxed_local()
    }
}

/// Checks an offered group, before anything of it arrives.
///
/// # Errors
/// `alreadyExists`, `refused` (`place`), `unsupported` (`group_member`).
async fn may_arrive(supervisor: &Supervisor, group: &OfferedGroup, actor: &Actor) -> Result<()> {
    let name = import::free_name(supervisor, &group.name, actor).await;
    name.map_err(|error| match error.code {
        ErrorCode::AlreadyExists => {
            error.hint(format!("a group that has left is removed there by `ryokan group rm {}`", group.name))
        }
        _ => error,
    })?;
    if !group.members.is_empty() {
        access::own_user(actor.uid)?;
    }
    let known = supervisor.host().known_keys(actor.uid).await?;
    let found = known.iter().find(|known| Some(known.key) == group.key);
    let standing = found.map_or(Standing::Unknown, |known| known.standing);
    let signer = Signer { standing, name: found.map(|known| known.name.clone()).unwrap_or_default(), key: group.key };
    // What it brings is read by git and SQLite outside of a sandbox, as that of a file.
    signer.require_trusted()?;
    for (name, kind) in &group.members {
        if !matches!(kind.as_str(), "repository" | "database" | "directory") {
            return Err(
                Error::unsupported(format!("member {name} is a {kind}, which does not move")).reason("group_member")
            );
        }
        if !group.places.iter().any(|(member, _)| member == name) {
            return Err(Error::refused(format!("member {name} has no place here")).reason("place"));
        }
    }
    Ok(())
}

/// Checks that a received group can come into its places. Nothing is written.
///
/// # Errors
/// As an import.
async fn rehearse(
    supervisor: &Supervisor,
    contents: &GroupContents,
    arrival: &GroupArrival,
    actor: &Actor,
) -> Result<()> {
    let name = import::free_name(supervisor, &arrival.name, actor).await?;
    import::sealer(supervisor, &contents.head.freeze, actor).await?.require_trusted()?;
    let mut group = arriving_group(supervisor.host(), GroupId::from_bytes(supervisor.host().random()), name, actor);
    let placed = member_places::all(supervisor, &mut group, &contents.manifest, arrival).await;
    import::discard_scratch(supervisor.host(), group.id).await;
    import::has_room(supervisor.host(), contents, &placed?)
}

/// Makes the group, and restores its members outside of kernels. Idempotent.
///
/// # Errors
/// As an import and a restore: what was done stays, and the next call goes on.
async fn arrive(
    supervisor: &Supervisor,
    (id, description, described): (GroupId, Digest, DescribedGroup),
    arrival: GroupArrival,
    actor: &Actor,
) -> Result<()> {
    let host = supervisor.host();
    // Its new manifest is named by nothing before the group is.
    let _guard = host.store.run(|store| Ok(store.guard())).await?;
    let freeze = described.head.freeze.clone();
    let manifest = super::manifest(host, &freeze).await?;
    let place = |part: &Part| match &part.captured {
        Captured::Kernel { kernel, .. } => Some(Target::Kernel { id: *kernel }),
        other => {
            let (_, place) = arrival.places.iter().find(|(name, _)| *name == part.name)?;
            Target::named(other.kind(), place)
        }
    };
    let targets: Vec<Target> = manifest.parts.iter().filter_map(place).collect();
    let turn = of_targets(host, Some(id), targets.iter()).await?;
    let find = async || Ok::<_, Error>(host.catalog.groups(None).await?.into_iter().find(|group| group.id == id));
    if let Some(group) = find().await?.filter(|group| group.unfinished) {
        recover::unfinished(supervisor, &group).await?;
    }
    let group = match find().await? {
        Some(group) => group,
        None => {
            let contents = GroupContents {
                head: described.head,
                manifest,
                kernels: Vec::new(),
                sizes: Vec::new(),
                digest: description,
                signed: (description, None),
            };
            import::bring(supervisor, contents, id, arrival, actor).await?;
            find().await?.ok_or_else(|| Error::internal("an arrived group is gone"))?
        }
    };
    let is_kernel = |target: &Target| matches!(target, Target::Kernel { .. });
    let members: Vec<String> =
        group.members.iter().filter(|one| !is_kernel(&one.target)).map(|one| one.name.clone()).collect();
    let first = host.catalog.freezes(id).await?.into_iter().min_by_key(|freeze| freeze.number);
    let first = first.ok_or_else(|| Error::internal("an arrived group has no freeze"))?;
    // A safety freeze alone is no restore.
    if !members.is_empty() && first.restored_at_ms.is_none() {
        run_restore::bring(supervisor, group, first, members, actor, turn).await?;
    }
    Ok(())
}

/// Ends an interrupted operation of a group that came here, if it is there.
async fn end_unfinished(supervisor: &Supervisor, id: GroupId) -> Result<()> {
    let all = supervisor.host().catalog.groups(None).await?;
    let Some(group) = all.into_iter().find(|group| group.id == id) else { return Ok(()) };
    let _turn = of_targets(supervisor.host(), Some(id), group.members.iter().map(|member| &member.target)).await?;
    recover::unfinished(supervisor, &group).await
}
