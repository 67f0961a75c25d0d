//! The workflow methods of a kernel's capability: steps, decisions and artifacts.

use capnp_rpc::new_client;

use super::blob::BlobReaderServer;
use super::kernel::KernelServer;
use crate::core::error::Error;
use crate::core::limits;
use crate::rpc::convert::checkpoint::write_checkpoint;
use crate::rpc::convert::workflow::{read_source, write_artifact, write_decision, write_step, write_workflow};
use crate::rpc::convert::{read_name, read_text, to_capnp};
use crate::rpc::schema::ryokan_capnp::kernel;
use crate::supervisor::checkpoint::workflow;

impl KernelServer {
    pub(super) async fn read_workflow(&self, mut results: kernel::WorkflowResults) -> capnp::Result<()> {
        let workflow = self.kernel.records.workflow().await.map_err(to_capnp)?;
        write_workflow(results.get().init_workflow(), &workflow);
        Ok(())
    }

    pub(super) async fn begin_step(
        &self,
        params: kernel::BeginStepParams,
        mut results: kernel::BeginStepResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name of a step").map_err(to_capnp)?;
        let begun = workflow::begin_step(&self.kernel, self.change(params.get_expected_version()), name).await;
        write_step(results.get().init_step(), &begun.map_err(to_capnp)?);
        Ok(())
    }

    pub(super) async fn complete_step(
        &self,
        params: kernel::CompleteStepParams,
        mut results: kernel::CompleteStepResults,
    ) -> capnp::Result<()> {
        let change = self.change(params.get()?.get_expected_version());
        let done = workflow::complete_step(self.host(), &self.kernel, change).await;
        let (step, checkpoint) = done.map_err(to_capnp)?;
        write_step(results.get().init_step(), &step);
        write_checkpoint(results.get().init_checkpoint(), &checkpoint, true);
        Ok(())
    }

    pub(super) async fn hand_off(
        &self,
        params: kernel::HandOverParams,
        mut results: kernel::HandOverResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let agent = read_name(params.get_agent(), "agent").map_err(to_capnp)?;
        let note = read_text(params.get_note(), "note").map_err(to_capnp)?;
        let change = self.change(params.get_expected_version());
        let done = workflow::hand_over(self.host(), &self.kernel, change, agent, note).await;
        write_checkpoint(results.get().init_checkpoint(), &done.map_err(to_capnp)?, true);
        Ok(())
    }

    pub(super) async fn open_decision(
        &self,
        params: kernel::OpenDecisionParams,
        mut results: kernel::OpenDecisionResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let title = read_name(params.get_title(), "title of a decision").map_err(to_capnp)?;
        let text = read_text(params.get_text(), "text of a decision").map_err(to_capnp)?;
        let key = read_name(params.get_key(), "key").map_err(to_capnp)?;
        let change = self.change(params.get_expected_version());
        let opened = workflow::open_decision(&self.kernel, change, title, text, key).await;
        write_decision(results.get().init_decision(), &opened.map_err(to_capnp)?);
        Ok(())
    }

    pub(super) async fn lock_decision(
        &self,
        params: kernel::LockDecisionParams,
        mut results: kernel::LockDecisionResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let change = self.change(params.get_expected_version());
        let locked = workflow::lock_decision(self.host(), &self.kernel, change, params.get_id()).await;
        let (decision, checkpoint) = locked.map_err(to_capnp)?;
        write_decision(results.get().init_decision(), &decision);
        write_checkpoint(results.get().init_checkpoint(), &checkpoint, true);
        Ok(())
    }

    pub(super) async fn supersede_decision(
        &self,
        params: kernel::SupersedeDecisionParams,
        mut results: kernel::SupersedeDecisionResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let change = self.change(params.get_expected_version());
        let superseded = workflow::supersede_decision(&self.kernel, change, params.get_id()).await;
        write_decision(results.get().init_decision(), &superseded.map_err(to_capnp)?);
        Ok(())
    }

    pub(super) async fn stream_decisions(&self, params: kernel::DecisionsParams) -> capnp::Result<()> {
        let sink = params.get()?.get_sink()?;
        let mut after = 0;
        loop {
            let page = self.kernel.records.decisions(after).await.map_err(to_capnp)?;
            let Some(last) = page.last() else { return Ok(()) };
            after = last.id;
            for decision in &page {
                let mut request = sink.next_request();
                write_decision(request.get().init_decision(), decision);
                request.send().await?;
            }
        }
    }

    pub(super) async fn put_artifact(
        &self,
        params: kernel::PutArtifactParams,
        mut results: kernel::PutArtifactResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name of an artifact").map_err(to_capnp)?;
        let source = read_source(params.get_source()?).map_err(to_capnp)?;
        let content_type = read_name(params.get_content_type(), "type of an artifact").map_err(to_capnp)?;
        let key = read_name(params.get_key(), "key").map_err(to_capnp)?;
        let change = self.change(params.get_expected_version());
        let content = (source, content_type);
        let put = workflow::put_artifact(self.host(), &self.kernel, change, name, content, key).await;
        write_artifact(results.get().init_artifact(), &put.map_err(to_capnp)?);
        Ok(())
    }

    pub(super) async fn revert_artifact(
        &self,
        params: kernel::RevertArtifactParams,
        mut results: kernel::RevertArtifactResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name of an artifact").map_err(to_capnp)?;
        let change = self.change(params.get_expected_version());
        let reverted = workflow::revert_artifact(&self.kernel, change, name, params.get_version()).await;
        write_artifact(results.get().init_artifact(), &reverted.map_err(to_capnp)?);
        Ok(())
    }

    pub(super) async fn stream_artifacts(&self, params: kernel::ArtifactsParams) -> capnp::Result<()> {
        let params = params.get()?;
        let (name, sink) = (read_name(params.get_name(), "name of an artifact").map_err(to_capnp)?, params.get_sink()?);
        let records = &self.kernel.records;
        let (mut after, mut before) = (String::new(), limits::ARTIFACT_VERSIONS.saturating_mul(2));
        loop {
            let page = match name.as_str() {
                "" => records.artifacts(after.clone()).await,
                name => records.artifact_versions(name.to_owned(), before).await,
            };
            let page = page.map_err(to_capnp)?;
            let Some(last) = page.last() else { return Ok(()) };
            (after, before) = (last.name.clone(), last.version);
            for artifact in &page {
                let mut request = sink.next_request();
                write_artifact(request.get().init_artifact(), artifact);
                request.send().await?;
            }
        }
    }

    pub(super) async fn open_artifact(
        &self,
        params: kernel::ArtifactParams,
        mut results: kernel::ArtifactResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name of an artifact").map_err(to_capnp)?;
        let found = self.kernel.records.artifact(&name, params.get_version()).await.map_err(to_capnp)?;
        let digest = found.hash.ok_or_else(|| {
            let withdrawn = format!("artifact {name:?} is withdrawn: a restore led to where it did not exist");
            let hint = format!("version {} of it is still there", found.version.saturating_sub(1));
            to_capnp(Error::not_found(withdrawn).reason("withdrawn").hint(hint))
        })?;
        let store = self.kernel.records.store().clone();
        let size = store.run(move |store| store.size(digest)).await.map_err(|error| to_capnp(error.into()))?;
        write_artifact(results.get().init_artifact(), &found);
        results.get().set_blob(new_client(BlobReaderServer { store, digest, size }));
        Ok(())
    }
}
