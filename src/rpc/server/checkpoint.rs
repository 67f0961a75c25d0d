//! The checkpoint methods of a kernel's capability.

use std::rc::Rc;

use super::kernel::KernelServer;
use crate::core::checkpoint::{Checkpoint, CheckpointType, Restoration};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::rights::Right;
use crate::core::workflow::Options;
use crate::rpc::convert::checkpoint::{
    read_kind, read_request, write_checkpoint, write_difference, write_patch, write_restoration,
};
use crate::rpc::convert::spec::read_retention;
use crate::rpc::convert::{read_data, read_text, to_capnp};
use crate::rpc::schema::ryokan_capnp::{checkpoint_sink, kernel};
use crate::supervisor::checkpoint::{self, Asked, Suspension};
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;

impl KernelServer {
    pub(super) fn host(&self) -> &Rc<Host> {
        self.connection.supervisor.host()
    }

    pub(super) async fn take_checkpoint(
        &self,
        params: kernel::CheckpointParams,
        mut results: kernel::CheckpointResults,
    ) -> capnp::Result<()> {
        let request = read_request(params.get()?.get_request()?).map_err(to_capnp)?;
        if request.kind == CheckpointType::System {
            return Err(to_capnp(Error::invalid("checkpoints of type system are ryokan's own")));
        }
        let taken = checkpoint::take(self.host(), &self.kernel, request, self.actor.clone()).await;
        write_checkpoint(results.get().init_checkpoint(), &taken.map_err(to_capnp)?, true);
        Ok(())
    }

    pub(super) async fn suspend_worker(&self, params: kernel::SuspendParams) -> capnp::Result<()> {
        let params = params.get()?;
        let (before, actor) = (self.kernel.view().version, self.actor.clone());
        let how = Suspension {
            interrupt: params.get_interrupt(),
            release: params.get_release(),
            until_start: params.get_until_start(),
        };
        checkpoint::suspend(self.host(), &self.kernel, actor, how).await.map_err(to_capnp)?;
        let named = [(how.interrupt, "at once"), (how.release, "released"), (how.until_start, "until the next start")];
        let detail: Vec<&str> = named.into_iter().filter_map(|(is_asked, what)| is_asked.then_some(what)).collect();
        self.audit_done("kernel.suspend", before, &detail.join(", ")).await;
        Ok(())
    }

    pub(super) async fn resume_worker(&self) -> capnp::Result<()> {
        let before = self.kernel.view().version;
        self.kernel.resume(self.actor.clone()).await.map_err(to_capnp)?;
        self.audit_done("kernel.resume", before, "").await;
        Ok(())
    }

    pub(super) async fn list_checkpoints(&self, sink: checkpoint_sink::Client, limit: usize) -> capnp::Result<()> {
        let records = &self.kernel.records;
        let head = records.head().await.map_err(to_capnp)?.checkpoint;
        let (mut before, mut left) = (u64::MAX, if limit == 0 { usize::MAX } else { limit });
        while left > 0 {
            let page = records.checkpoints(before, left.min(limits::PAGE_ROWS)).await.map_err(to_capnp)?;
            let Some(last) = page.last() else { break };
            (before, left) = (last.number, left - page.len());
            for one in &page {
                let mut request = sink.next_request();
                write_checkpoint(request.get().init_checkpoint(), one, head == Some(one.id));
                request.send().await?;
            }
        }
        Ok(())
    }

    pub(super) async fn resolve_checkpoint(&self, reference: &str) -> Result<(Checkpoint, bool)> {
        let found = checkpoint::find(&self.kernel, reference).await?;
        let head = self.kernel.records.head().await?.checkpoint;
        Ok((found.clone(), head == Some(found.id)))
    }

    pub(super) async fn look_up_checkpoint(
        &self,
        params: kernel::FindCheckpointParams,
        mut results: kernel::FindCheckpointResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let (found, is_head) = match params.get_undo() {
            true => checkpoint::undo_target(&self.kernel).await.map(|found| (found, false)).map_err(to_capnp)?,
            false => {
                let reference = read_text(params.get_ref(), "ref").map_err(to_capnp)?;
                self.resolve_checkpoint(&reference).await.map_err(to_capnp)?
            }
        };
        write_checkpoint(results.get().init_checkpoint(), &found, is_head);
        Ok(())
    }

    pub(super) async fn restore_to(
        &self,
        params: kernel::RestoreCheckpointParams,
        mut results: kernel::RestoreCheckpointResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let reference = read_text(params.get_ref(), "ref").map_err(to_capnp)?;
        let options = Options {
            supersede_decisions: params.get_supersede_decisions(),
            with_artifacts: params.get_with_artifacts(),
            ..Options::default()
        };
        let kind =
            if params.get_kind()?.is_empty() { None } else { Some(read_kind(params.get_kind()).map_err(to_capnp)?) };
        let asked = Asked { options, kind };
        let change = self.change(params.get_expected_version());
        let done = checkpoint::restore(self.host(), &self.kernel, &reference, asked, change);
        let done: Restoration = done.await.map_err(to_capnp)?;
        write_restoration(results.get().init_restoration(), &done);
        Ok(())
    }

    /// The kernel of the second state of a comparison: this one, or one that the client may read as well.
    async fn compared(&self, other: Option<capnp::Result<kernel::Client>>) -> capnp::Result<Rc<Kernel>> {
        let Some(other) = other.transpose()? else { return Ok(Rc::clone(&self.kernel)) };
        let other = self.connection.local(&other).await.ok_or_else(|| {
            to_capnp(
                Error::invalid("`other` is no kernel of this connection")
                    .hint("open both kernels over the same connection"),
            )
        })?;
        other.may(Right::Read)?;
        Ok(Rc::clone(&other.kernel))
    }

    pub(super) async fn stream_diff(&self, params: kernel::DiffParams) -> capnp::Result<()> {
        let params = params.get()?;
        let from = read_text(params.get_from(), "from").map_err(to_capnp)?;
        let to = read_text(params.get_to(), "to").map_err(to_capnp)?;
        let of = self.compared(params.has_other().then(|| params.get_other())).await?;
        let sink = params.get_sink()?;
        let mut refused = None;
        let reported = checkpoint::diff(self.host(), (&self.kernel, &from), (&of, &to), async |difference| {
            let mut request = sink.next_request();
            write_difference(request.get().init_difference(), &difference);
            request.send().await.map_err(|error| {
                refused = Some(error);
                Error::unavailable("the client takes no more")
            })
        });
        let reported = reported.await;
        match refused {
            Some(error) => Err(error),
            None => reported.map_err(to_capnp),
        }
    }

    pub(super) async fn stream_text_diff(&self, params: kernel::DiffTextParams) -> capnp::Result<()> {
        let params = params.get()?;
        let from = read_text(params.get_from(), "from").map_err(to_capnp)?;
        let to = read_text(params.get_to(), "to").map_err(to_capnp)?;
        let asked = params.get_paths()?;
        if asked.len() as usize > limits::DIFF_PATHS {
            return Err(to_capnp(Error::invalid(format!("at most {} paths are compared at once", limits::DIFF_PATHS))));
        }
        let paths = asked.iter().map(|path| read_data(path, "path", limits::PATH_BYTES));
        let paths = paths.collect::<Result<Vec<_>>>().map_err(to_capnp)?;
        let of = self.compared(params.has_other().then(|| params.get_other())).await?;
        let sink = params.get_sink()?;
        let mut refused = None;
        let reported = checkpoint::diff_text(self.host(), (&self.kernel, &from), (&of, &to), paths, async |patch| {
            let mut request = sink.next_request();
            write_patch(request.get().init_patch(), &patch);
            request.send().await.map_err(|error| {
                refused = Some(error);
                Error::unavailable("the client takes no more")
            })
        });
        let reported = reported.await;
        match refused {
            Some(error) => Err(error),
            None => reported.map_err(to_capnp),
        }
    }

    pub(super) async fn undo_restore(
        &self,
        params: kernel::UndoParams,
        mut results: kernel::UndoResults,
    ) -> capnp::Result<()> {
        let change = self.change(params.get()?.get_expected_version());
        let done = checkpoint::undo(self.host(), &self.kernel, change).await.map_err(to_capnp)?;
        write_restoration(results.get().init_restoration(), &done);
        Ok(())
    }

    pub(super) async fn pin(&self, params: kernel::PinCheckpointParams) -> capnp::Result<()> {
        let params = params.get()?;
        let reference = read_text(params.get_ref(), "ref").map_err(to_capnp)?;
        let pinned = checkpoint::pin(self.host(), &self.kernel, &reference, params.get_pinned(), &self.actor);
        pinned.await.map_err(to_capnp)
    }

    pub(super) async fn remove_checkpoint(
        &self,
        params: kernel::RemoveCheckpointParams,
        mut results: kernel::RemoveCheckpointResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let reference = read_text(params.get_ref(), "ref").map_err(to_capnp)?;
        let change = self.change(params.get_expected_version());
        let removed = checkpoint::remove(self.host(), &self.kernel, &reference, change).await.map_err(to_capnp)?;
        write_checkpoint(results.get().init_checkpoint(), &removed, false);
        Ok(())
    }

    pub(super) async fn set_retention(
        &self,
        params: kernel::SetRetentionParams,
        mut results: kernel::SetRetentionResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let retention = read_retention(params.get_retention()?, self.kernel.retention());
        let change = self.change(params.get_expected_version());
        let gone = checkpoint::set_retention(self.host(), &self.kernel, retention, change).await.map_err(to_capnp)?;
        results.get().set_gone(gone);
        Ok(())
    }

    pub(super) async fn archive(
        &self,
        params: kernel::ArchiveParams,
        mut results: kernel::ArchiveResults,
    ) -> capnp::Result<()> {
        let change = self.change(params.get()?.get_expected_version());
        let (held_by, version) = checkpoint::archive(self.host(), &self.kernel, change).await.map_err(to_capnp)?;
        let mut results = results.get();
        write_checkpoint(results.reborrow().init_checkpoint(), &held_by, true);
        results.set_version(version);
        Ok(())
    }

    pub(super) async fn unarchive(
        &self,
        params: kernel::UnarchiveParams,
        mut results: kernel::UnarchiveResults,
    ) -> capnp::Result<()> {
        let change = self.change(params.get()?.get_expected_version());
        let version = checkpoint::unarchive(self.host(), &self.kernel, change).await.map_err(to_capnp)?;
        results.get().set_version(version);
        Ok(())
    }
}
