//! Groups and their freezes.

use super::connection::{answer, fields};
use super::host::HostClient;
use crate::core::error::{Error, Result};
use crate::core::freeze::difference::GroupDiff;
use crate::core::freeze::drain::{Drain, InFlight};
use crate::core::freeze::on_failure::OnFailure;
use crate::core::freeze::{FreezeInfo, GroupInfo, GroupRestored, MemberInfo};
use crate::core::limits;
use crate::rpc::convert::groups::{on_failure_to_wire, read_freeze, read_group, read_group_difference, read_member};
use crate::rpc::convert::{read_text, read_text_list};
use crate::rpc::schema::ryokan_capnp as wire;

/// At least one: none means the default.
fn wait_ms(drain: Drain) -> u64 {
    u64::try_from(drain.wait.as_millis()).unwrap_or(u64::MAX).max(1)
}

impl HostClient {
    pub(super) async fn groups_cap(&self) -> Result<wire::groups::Client> {
        let response = self.link.call(self.cap.groups_request().send().promise).await?;
        fields(fields(response.get())?.get_groups())
    }

    /// Creates a group.
    ///
    /// # Errors
    /// `alreadyExists`, `invalidArgument`.
    pub async fn create_group(&self, name: &str) -> Result<()> {
        let mut request = self.groups_cap().await?.create_request();
        request.get().set_name(name);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Adds a kernel, a repository or a database to a group; `name` empty: derived from the target.
    ///
    /// # Errors
    /// `notFound`, `alreadyExists`, `refused`, `unsupported`.
    pub async fn add_member(&self, group: &str, kind: &str, target: &str, name: &str) -> Result<MemberInfo> {
        let mut request = self.groups_cap().await?.add_request();
        request.get().set_group(group);
        request.get().set_kind(kind);
        request.get().set_target(target);
        request.get().set_name(name);
        let response = self.link.wait(request.send().promise).await?;
        answer(read_member(fields(fields(response.get())?.get_member())?))
    }

    /// Removes a member, or with an empty `member` the group; with `abandon` although an operation of it has not ended.
    /// Returns the directories of imported repositories that are not in their places.
    ///
    /// # Errors
    /// `notFound`, `conflict`.
    pub async fn remove_member(&self, group: &str, member: &str, abandon: bool) -> Result<Vec<String>> {
        let mut request = self.groups_cap().await?.remove_request();
        request.get().set_group(group);
        request.get().set_member(member);
        request.get().set_abandon(abandon);
        let response = self.link.wait(request.send().promise).await?;
        answer(read_text_list(fields(response.get())?.get_left(), "left", limits::GROUP_MEMBERS))
    }

    /// Removes a freeze of a group.
    ///
    /// # Errors
    /// `notFound`, `conflict` while an operation of the group has not ended.
    pub async fn remove_freeze(&self, group: &str, reference: &str) -> Result<()> {
        let mut request = self.groups_cap().await?.remove_request();
        request.get().set_group(group);
        request.get().set_freeze(reference);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// The caller's groups.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn groups(&self) -> Result<Vec<GroupInfo>> {
        let response = self.link.call(self.groups_cap().await?.list_request().send().promise).await?;
        let list = fields(fields(response.get())?.get_groups())?;
        list.iter().map(|group| answer(read_group(group))).collect()
    }

    /// One group.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn group(&self, name: &str) -> Result<GroupInfo> {
        let mut request = self.groups_cap().await?.show_request();
        request.get().set_group(name);
        let response = self.link.call(request.send().promise).await?;
        answer(read_group(fields(fields(response.get())?.get_group())?))
    }

    /// Sets what a failed freeze does with the kernels of a group.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn configure_group(&self, group: &str, on_failure: OnFailure) -> Result<()> {
        let mut request = self.groups_cap().await?.configure_request();
        request.get().set_group(group);
        request.get().set_on_failure(on_failure_to_wire(Some(on_failure)));
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Lets the kernels of a paused group go on.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn resume_group(&self, group: &str) -> Result<()> {
        let mut request = self.groups_cap().await?.resume_request();
        request.get().set_group(group);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Freezes a group; `on_failure` absent: as the group is configured.
    ///
    /// # Errors
    /// Errors of members; nothing is visible then.
    pub async fn freeze(
        &self,
        group: &str,
        message: &str,
        drain: Drain,
        on_failure: Option<OnFailure>,
    ) -> Result<FreezeInfo> {
        let mut request = self.groups_cap().await?.freeze_request();
        request.get().set_group(group);
        request.get().set_message(message);
        request.get().set_interrupt(drain.running == InFlight::Abandon);
        request.get().set_park(drain.running == InFlight::Park);
        request.get().set_on_failure(on_failure_to_wire(on_failure));
        request.get().set_wait_ms(wait_ms(drain));
        let response = self.link.wait(request.send().promise).await?;
        answer(read_freeze(fields(fields(response.get())?.get_freeze())?))
    }

    /// The freezes of a group, newest first; `limit` 0: all.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn freezes(&self, group: &str, limit: u32) -> Result<Vec<FreezeInfo>> {
        let mut request = self.groups_cap().await?.freezes_request();
        request.get().set_group(group);
        request.get().set_limit(limit);
        let response = self.link.wait(request.send().promise).await?;
        let list = fields(fields(response.get())?.get_freezes())?;
        list.iter().map(|freeze| answer(read_freeze(freeze))).collect()
    }

    /// Restores a group, or only these members; returns the freeze and the id of the safety freeze.
    ///
    /// # Errors
    /// Refusals of the gate (`refused`, `data_newer`) and errors of members; everything is as before then.
    pub async fn restore_group(
        &self,
        group: &str,
        reference: &str,
        members: &[String],
        drain: Drain,
    ) -> Result<GroupRestored> {
        let mut request = self.groups_cap().await?.restore_request();
        request.get().set_group(group);
        request.get().set_ref(reference);
        let length = u32::try_from(members.len()).map_err(|_| Error::invalid("too many members"))?;
        crate::rpc::convert::write_text_list(request.get().init_members(length), members);
        request.get().set_interrupt(drain.running == InFlight::Abandon);
        request.get().set_wait_ms(wait_ms(drain));
        let response = self.link.wait(request.send().promise).await?;
        restoration(fields(fields(response.get())?.get_restoration())?)
    }

    /// Undoes the group's last restore.
    ///
    /// # Errors
    /// `notFound`, and errors of [`Self::restore_group`].
    pub async fn undo_group(&self, group: &str, drain: Drain) -> Result<GroupRestored> {
        let mut request = self.groups_cap().await?.undo_request();
        request.get().set_group(group);
        request.get().set_interrupt(drain.running == InFlight::Abandon);
        request.get().set_wait_ms(wait_ms(drain));
        let response = self.link.wait(request.send().promise).await?;
        restoration(fields(fields(response.get())?.get_restoration())?)
    }

    /// The lock of the present state of a kernel or a group, as text.
    ///
    /// # Errors
    /// `notFound`, and errors of members.
    pub async fn lock(&self, name: &str) -> Result<String> {
        let mut request = self.groups_cap().await?.lock_request();
        request.get().set_name(name);
        let response = self.link.wait(request.send().promise).await?;
        answer(read_text(fields(response.get())?.get_lock(), "lock"))
    }

    /// How freeze `to` of a group, or with an empty `to` the present, differs from freeze `from`, or from the newest.
    ///
    /// # Errors
    /// `notFound`, `corrupt`, and errors of members.
    pub async fn diff_group(&self, group: &str, from: &str, to: &str) -> Result<GroupDiff> {
        let mut request = self.groups_cap().await?.diff_request();
        request.get().set_group(group);
        request.get().set_from(from);
        request.get().set_to(to);
        let response = self.link.wait(request.send().promise).await?;
        let found = fields(response.get())?;
        let list = fields(found.get_differences())?;
        let differences = list.iter().map(|one| answer(read_group_difference(one))).collect::<Result<_>>()?;
        Ok(GroupDiff { differences, omitted: found.get_omitted() })
    }

    /// How a kernel differs from a checkpoint, or a group from a freeze; `reference` empty: from the newest.
    ///
    /// # Errors
    /// `refused` with reason `data_newer` if its data needs newer code.
    pub async fn check_lock(&self, name: &str, reference: &str) -> Result<Vec<String>> {
        let mut request = self.groups_cap().await?.check_request();
        request.get().set_name(name);
        request.get().set_ref(reference);
        let response = self.link.wait(request.send().promise).await?;
        answer(read_text_list(fields(response.get())?.get_differences(), "differences", limits::VALUE_ITEMS))
    }
}

fn restoration(reader: wire::group_restoration::Reader<'_>) -> Result<GroupRestored> {
    Ok(GroupRestored {
        freeze: answer(read_freeze(fields(reader.get_freeze())?))?,
        safety: answer(read_text(reader.get_safety(), "safety freeze"))?,
        notes: answer(read_text_list(reader.get_notes(), "notes", limits::VALUE_ITEMS))?,
    })
}
