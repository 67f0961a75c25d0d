//! `Groups`: a client's groups. Held by full `Host` capabilities only.

use std::rc::Rc;
use std::time::Duration;

use capnp_rpc::new_client;

use super::Connection;
use super::portable::BundleReaderServer;
use crate::core::error::{Error, Result};
use crate::core::freeze::drain::{Drain, InFlight};
use crate::core::freeze::{Freeze, FreezeInfo, Group, GroupInfo, Member, MemberInfo, Target};
use crate::core::ids::FreezeId;
use crate::core::limits;
use crate::rpc::convert::groups::{
    on_failure_from_wire, write_freeze, write_group, write_group_difference, write_member,
};
use crate::rpc::convert::{read_name, read_text, read_text_list, to_capnp, write_text_list};
use crate::rpc::schema::ryokan_capnp::{group_restoration, groups};
use crate::supervisor::freeze;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;

/// One client's groups.
pub(super) struct GroupsServer {
    pub connection: Rc<Connection>,
    pub actor: Actor,
}

impl GroupsServer {
    fn supervisor(&self) -> &Supervisor {
        &self.connection.supervisor
    }

    async fn restored(
        &self,
        group: &str,
        done: Result<freeze::Restored>,
        mut restoration: group_restoration::Builder<'_>,
    ) -> capnp::Result<()> {
        let freeze::Restored { freeze, safety, notes } = done.map_err(to_capnp)?;
        let info = freeze_info(self.supervisor(), group, &freeze, Some(freeze.id)).await.map_err(to_capnp)?;
        restoration.set_safety(safety.to_string().as_str());
        write_text_list(restoration.reborrow().init_notes(notes.len() as u32), &notes);
        write_freeze(restoration.init_freeze(), &info);
        Ok(())
    }
}

fn member_info(supervisor: &Supervisor, uid: u32, member: &Member) -> MemberInfo {
    let target = match &member.target {
        Target::Kernel { id } => match supervisor.find(uid, &id.to_string()) {
            Ok(kernel) => kernel.spec().name.to_string(),
            Err(_) => id.to_string(),
        },
        Target::Repository { path } | Target::Database { path } | Target::Directory { path } => path.clone(),
        Target::Command { source } => source.clone(),
        Target::Postgres { connection } => connection.clone(),
        Target::Server { server } => server.clone(),
    };
    MemberInfo { name: member.name.clone(), kind: member.target.kind().into(), target }
}

/// A group as clients see it.
pub(super) fn group_info(supervisor: &Supervisor, uid: u32, group: &Group) -> GroupInfo {
    GroupInfo {
        name: group.name.clone(),
        members: group.members.iter().map(|member| member_info(supervisor, uid, member)).collect(),
        freezes: group.freezes,
        created_at_ms: group.created_at_ms,
        unfinished: group.unfinished,
        on_failure: group.on_failure,
        paused: group.paused.clone().unwrap_or_default(),
    }
}

/// A freeze as clients see it, with its lock.
pub(super) async fn freeze_info(
    supervisor: &Supervisor,
    group: &str,
    freeze: &Freeze,
    head: Option<FreezeId>,
) -> Result<FreezeInfo> {
    let lock = freeze::lock_of(supervisor, group, freeze).await?.text();
    let Freeze { id, number, message, kind, creator, at_ms, restored_at_ms, .. } = freeze.clone();
    let (is_head, restored_at_ms) = (head == Some(id), restored_at_ms.unwrap_or(0));
    let (id, cost, notes) = (id.to_string(), None, Vec::new());
    Ok(FreezeInfo { id, number, message, kind, creator, at_ms, restored_at_ms, is_head, lock, cost, notes })
}

/// What happens to running code.
fn drain((interrupt, park): (bool, bool), wait_ms: u64) -> capnp::Result<Drain> {
    let wait = match wait_ms {
        0 => Drain::default().wait,
        ms if Duration::from_millis(ms) <= limits::FREEZE_WAIT => Duration::from_millis(ms),
        _ => {
            let most = limits::FREEZE_WAIT.as_secs() / 60;
            let refused = Error::invalid(format!("running code of a group is awaited for at most {most} minutes"));
            return Err(to_capnp(refused.hint("wait for its end before, or interrupt it")));
        }
    };
    let both = || to_capnp(Error::invalid("an execution is interrupted or parked, not both"));
    Ok(Drain { running: InFlight::asked(interrupt, park).ok_or_else(both)?, wait })
}

impl groups::Server for GroupsServer {
    async fn create(self: Rc<Self>, params: groups::CreateParams, _: groups::CreateResults) -> capnp::Result<()> {
        let name = read_name(params.get()?.get_name(), "name").map_err(to_capnp)?;
        freeze::create(self.supervisor(), &name, &self.actor).await.map_err(to_capnp)
    }

    async fn add(self: Rc<Self>, params: groups::AddParams, mut results: groups::AddResults) -> capnp::Result<()> {
        let params = params.get()?;
        let read = |text, what| read_name(text, what).map_err(to_capnp);
        let (group, kind) = (read(params.get_group(), "group")?, read(params.get_kind(), "kind")?);
        let (target, name) = (read(params.get_target(), "target")?, read(params.get_name(), "name")?);
        let added = freeze::add(self.supervisor(), &group, (&kind, &target), &name, &self.actor).await;
        if let Err(error) = &added {
            self.supervisor().host().audit_refusal(&self.actor, "group.add", None, error).await;
        }
        write_member(
            results.get().init_member(),
            &member_info(self.supervisor(), self.actor.uid, &added.map_err(to_capnp)?),
        );
        Ok(())
    }

    async fn remove(
        self: Rc<Self>,
        params: groups::RemoveParams,
        mut results: groups::RemoveResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let group = read_name(params.get_group(), "group").map_err(to_capnp)?;
        let member = read_name(params.get_member(), "member").map_err(to_capnp)?;
        let reference = read_text(params.get_freeze(), "freeze").map_err(to_capnp)?;
        let done = match (params.get_abandon(), member.is_empty(), reference.is_empty()) {
            (false, true, false) => {
                let removed = freeze::remove_freeze(self.supervisor(), &group, &reference, &self.actor).await;
                removed.map(|()| Vec::new())
            }
            (_, _, false) => Err(Error::invalid("a freeze is removed of a whole group, which is not abandoned")),
            (true, true, true) => freeze::abandon(self.supervisor(), &group, &self.actor).await,
            (true, false, true) => Err(Error::invalid("only a whole group is abandoned")),
            (false, _, true) => {
                freeze::remove(self.supervisor(), &group, &member, &self.actor).await.map(|()| Vec::new())
            }
        };
        let left = done.map_err(to_capnp)?;
        write_text_list(results.get().init_left(left.len() as u32), &left);
        Ok(())
    }

    async fn list(self: Rc<Self>, _: groups::ListParams, mut results: groups::ListResults) -> capnp::Result<()> {
        let all = freeze::list(self.supervisor(), self.actor.uid).await.map_err(to_capnp)?;
        let mut list = results.get().init_groups(all.len() as u32);
        for (at, group) in all.iter().enumerate() {
            write_group(list.reborrow().get(at as u32), &group_info(self.supervisor(), self.actor.uid, group));
        }
        Ok(())
    }

    async fn show(self: Rc<Self>, params: groups::ShowParams, mut results: groups::ShowResults) -> capnp::Result<()> {
        let name = read_name(params.get()?.get_group(), "group").map_err(to_capnp)?;
        let group = freeze::find(self.supervisor(), self.actor.uid, &name).await.map_err(to_capnp)?;
        write_group(results.get().init_group(), &group_info(self.supervisor(), self.actor.uid, &group));
        Ok(())
    }

    async fn freeze(
        self: Rc<Self>,
        params: groups::FreezeParams,
        mut results: groups::FreezeResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let group = read_name(params.get_group(), "group").map_err(to_capnp)?;
        let message = read_text(params.get_message(), "message").map_err(to_capnp)?;
        let drain = drain((params.get_interrupt(), params.get_park()), params.get_wait_ms())?;
        let on_failure = on_failure_from_wire(params.get_on_failure()?);
        let taken = freeze::freeze(self.supervisor(), &group, (&message, drain, on_failure), &self.actor).await;
        let freeze::Taken { freeze, cost, notes } = taken.map_err(to_capnp)?;
        let info = freeze_info(self.supervisor(), &group, &freeze, Some(freeze.id)).await.map_err(to_capnp)?;
        let info = FreezeInfo { cost: Some(cost), notes, ..info };
        write_freeze(results.get().init_freeze(), &info);
        Ok(())
    }

    async fn freezes(
        self: Rc<Self>,
        params: groups::FreezesParams,
        mut results: groups::FreezesResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_group(), "group").map_err(to_capnp)?;
        let group = freeze::find(self.supervisor(), self.actor.uid, &name).await.map_err(to_capnp)?;
        let all = self.supervisor().host().catalog.freezes(group.id).await;
        let mut all = all.map_err(|error| to_capnp(error.into()))?;
        let most = if params.get_limit() == 0 { limits::PAGE_ROWS } else { params.get_limit() as usize };
        all.truncate(most.min(limits::PAGE_ROWS));
        let mut list = results.get().init_freezes(all.len() as u32);
        for (at, one) in all.iter().enumerate() {
            let info = freeze_info(self.supervisor(), &name, one, group.head).await.map_err(to_capnp)?;
            write_freeze(list.reborrow().get(at as u32), &info);
        }
        Ok(())
    }

    async fn restore(
        self: Rc<Self>,
        params: groups::RestoreParams,
        mut results: groups::RestoreResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let group = read_name(params.get_group(), "group").map_err(to_capnp)?;
        let reference = read_text(params.get_ref(), "ref").map_err(to_capnp)?;
        let members = read_text_list(params.get_members(), "members", limits::GROUP_MEMBERS).map_err(to_capnp)?;
        let drain = drain((params.get_interrupt(), false), params.get_wait_ms())?;
        let done = freeze::restore(self.supervisor(), &group, &reference, (members, drain), &self.actor).await;
        self.restored(&group, done, results.get().init_restoration()).await
    }

    async fn undo(self: Rc<Self>, params: groups::UndoParams, mut results: groups::UndoResults) -> capnp::Result<()> {
        let params = params.get()?;
        let group = read_name(params.get_group(), "group").map_err(to_capnp)?;
        let drain = drain((params.get_interrupt(), false), params.get_wait_ms())?;
        let done = freeze::undo(self.supervisor(), &group, drain, &self.actor).await;
        self.restored(&group, done, results.get().init_restoration()).await
    }

    async fn lock(self: Rc<Self>, params: groups::LockParams, mut results: groups::LockResults) -> capnp::Result<()> {
        let name = read_name(params.get()?.get_name(), "name").map_err(to_capnp)?;
        let lock = freeze::lock(self.supervisor(), &name, &self.actor).await.map_err(to_capnp)?;
        results.get().set_lock(lock.text().as_str());
        Ok(())
    }

    async fn diff(self: Rc<Self>, params: groups::DiffParams, mut results: groups::DiffResults) -> capnp::Result<()> {
        let params = params.get()?;
        let group = read_name(params.get_group(), "group").map_err(to_capnp)?;
        let from = read_text(params.get_from(), "from").map_err(to_capnp)?;
        let to = read_text(params.get_to(), "to").map_err(to_capnp)?;
        let found = freeze::diff(self.supervisor(), &group, (&from, &to), &self.actor).await.map_err(to_capnp)?;
        results.get().set_omitted(found.omitted);
        let mut list = results.get().init_differences(found.differences.len() as u32);
        for (at, one) in found.differences.iter().enumerate() {
            write_group_difference(list.reborrow().get(at as u32), one);
        }
        Ok(())
    }

    async fn check(
        self: Rc<Self>,
        params: groups::CheckParams,
        mut results: groups::CheckResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
        let reference = read_text(params.get_ref(), "ref").map_err(to_capnp)?;
        let reported = freeze::check(self.supervisor(), &name, &reference, &self.actor).await.map_err(to_capnp)?;
        write_text_list(results.get().init_differences(reported.len() as u32), &reported);
        Ok(())
    }

    async fn configure(
        self: Rc<Self>,
        params: groups::ConfigureParams,
        _: groups::ConfigureResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let group = read_name(params.get_group(), "group").map_err(to_capnp)?;
        match on_failure_from_wire(params.get_on_failure()?) {
            Some(chosen) => freeze::configure(self.supervisor(), &group, chosen, &self.actor).await.map_err(to_capnp),
            None => freeze::find(self.supervisor(), self.actor.uid, &group).await.map(drop).map_err(to_capnp),
        }
    }

    async fn resume(self: Rc<Self>, params: groups::ResumeParams, _: groups::ResumeResults) -> capnp::Result<()> {
        let group = read_name(params.get()?.get_group(), "group").map_err(to_capnp)?;
        freeze::resume(self.supervisor(), &group, &self.actor).await.map_err(to_capnp)
    }

    async fn export(
        self: Rc<Self>,
        params: groups::ExportParams,
        mut results: groups::ExportResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let group = read_name(params.get_group(), "group").map_err(to_capnp)?;
        let reference = read_text(params.get_ref(), "ref").map_err(to_capnp)?;
        let export = freeze::export(self.supervisor(), &group, &reference, &self.actor).await;
        if let Err(error) = &export {
            self.supervisor().host().audit_refusal(&self.actor, "group.export", None, error).await;
        }
        results.get().set_file(new_client(BundleReaderServer::new(export.map_err(to_capnp)?)));
        Ok(())
    }
}
