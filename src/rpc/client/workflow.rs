//! Steps, hand-overs, decisions and artifacts of a kernel.

use super::blob::BlobDownload;
use super::connection::{answer, fields};
use super::feed::feed;
use super::kernel::KernelClient;
use crate::core::checkpoint::Checkpoint;
use crate::core::error::Result;
use crate::core::workflow::{Artifact, Decision, Source, Step, Workflow};
use crate::rpc::convert::checkpoint::read_checkpoint;
use crate::rpc::convert::workflow::{read_artifact, read_decision, read_step, read_workflow, write_source};

impl KernelClient {
    /// Steps and the current agent.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn workflow(&self) -> Result<Workflow> {
        let response = self.link.call(self.cap.workflow_request().send().promise).await?;
        answer(read_workflow(fields(fields(response.get())?.get_workflow())?))
    }

    /// Begins a step.
    ///
    /// # Errors
    /// `conflict` with reason `step_open` while another step is open.
    pub async fn begin_step(&self, name: &str, expected_version: u64) -> Result<Step> {
        let mut request = self.cap.begin_step_request();
        request.get().set_name(name);
        request.get().set_expected_version(expected_version);
        let response = self.link.call(request.send().promise).await?;
        answer(read_step(fields(fields(response.get())?.get_step())?))
    }

    /// Completes the current step, with a checkpoint that contains the completion.
    ///
    /// # Errors
    /// `conflict` with reason `no_step`; the errors of taking a checkpoint.
    pub async fn complete_step(&self, expected_version: u64) -> Result<(Step, Checkpoint)> {
        let mut request = self.cap.complete_step_request();
        request.get().set_expected_version(expected_version);
        let response = self.link.wait(request.send().promise).await?;
        let response = fields(response.get())?;
        let step = answer(read_step(fields(response.get_step())?))?;
        Ok((step, answer(read_checkpoint(fields(response.get_checkpoint())?))?.0))
    }

    /// Changes the current agent, with a checkpoint that contains the change.
    ///
    /// # Errors
    /// `conflict` with reason `same_agent`; the errors of taking a checkpoint.
    pub async fn hand_over(&self, agent: &str, note: &str, expected_version: u64) -> Result<Checkpoint> {
        let mut request = self.cap.hand_over_request();
        request.get().set_agent(agent);
        request.get().set_note(note);
        request.get().set_expected_version(expected_version);
        let response = self.link.wait(request.send().promise).await?;
        Ok(answer(read_checkpoint(fields(fields(response.get())?.get_checkpoint())?))?.0)
    }

    /// Opens a decision; the same `key`, if any, returns the same decision.
    ///
    /// # Errors
    /// `invalidArgument`, `conflict`.
    pub async fn open_decision(&self, title: &str, text: &str, key: &str, expected_version: u64) -> Result<Decision> {
        let mut request = self.cap.open_decision_request();
        request.get().set_title(title);
        request.get().set_text(text);
        request.get().set_key(key);
        request.get().set_expected_version(expected_version);
        let response = self.link.call(request.send().promise).await?;
        answer(read_decision(fields(fields(response.get())?.get_decision())?))
    }

    /// Locks a decision, with a checkpoint just before.
    ///
    /// # Errors
    /// `notFound`, `conflict` with reason `decision_state`; the errors of taking a checkpoint.
    pub async fn lock_decision(&self, id: u64, expected_version: u64) -> Result<(Decision, Checkpoint)> {
        let mut request = self.cap.lock_decision_request();
        request.get().set_id(id);
        request.get().set_expected_version(expected_version);
        let response = self.link.wait(request.send().promise).await?;
        let response = fields(response.get())?;
        let decision = answer(read_decision(fields(response.get_decision())?))?;
        Ok((decision, answer(read_checkpoint(fields(response.get_checkpoint())?))?.0))
    }

    /// Supersedes a decision.
    ///
    /// # Errors
    /// `notFound`, `conflict` with reason `decision_state`.
    pub async fn supersede_decision(&self, id: u64, expected_version: u64) -> Result<Decision> {
        let mut request = self.cap.supersede_decision_request();
        request.get().set_id(id);
        request.get().set_expected_version(expected_version);
        let response = self.link.call(request.send().promise).await?;
        answer(read_decision(fields(fields(response.get())?.get_decision())?))
    }

    /// Passes the decisions to `take`, oldest first.
    ///
    /// # Errors
    /// The errors of the daemon and of `take`.
    pub async fn decisions(&self, take: impl AsyncFnMut(Decision) -> Result<()>) -> Result<()> {
        let (inlet, feed) = feed::<Decision>();
        let mut request = self.cap.decisions_request();
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        feed.pump(&self.link, async { self.link.wait(call).await.map(drop) }, take).await
    }

    /// Adds a version to an artifact; the same `key`, if any, returns the same version.
    ///
    /// # Errors
    /// `notFound`, `invalidArgument`, `conflict`.
    pub async fn put_artifact(
        &self,
        name: &str,
        source: &Source,
        content_type: &str,
        key: &str,
        expected_version: u64,
    ) -> Result<Artifact> {
        let mut request = self.cap.put_artifact_request();
        request.get().set_name(name);
        write_source(request.get().init_source(), source);
        request.get().set_content_type(content_type);
        request.get().set_key(key);
        request.get().set_expected_version(expected_version);
        let response = self.link.wait(request.send().promise).await?;
        answer(read_artifact(fields(fields(response.get())?.get_artifact())?))
    }

    /// Adds a version to an artifact, with the content of an earlier version.
    ///
    /// # Errors
    /// `notFound`, `conflict`.
    pub async fn revert_artifact(&self, name: &str, version: u32, expected_version: u64) -> Result<Artifact> {
        let mut request = self.cap.revert_artifact_request();
        request.get().set_name(name);
        request.get().set_version(version);
        request.get().set_expected_version(expected_version);
        let response = self.link.call(request.send().promise).await?;
        answer(read_artifact(fields(fields(response.get())?.get_artifact())?))
    }

    /// Passes the newest version of each artifact to `take`, or every version of one, newest first.
    ///
    /// # Errors
    /// The errors of the daemon and of `take`.
    pub async fn artifacts(&self, name: &str, take: impl AsyncFnMut(Artifact) -> Result<()>) -> Result<()> {
        let (inlet, feed) = feed::<Artifact>();
        let mut request = self.cap.artifacts_request();
        request.get().set_name(name);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        feed.pump(&self.link, async { self.link.wait(call).await.map(drop) }, take).await
    }

    /// Opens a version of an artifact; `version` 0: the newest.
    ///
    /// # Errors
    /// `notFound`, with reason `withdrawn` for a version that a restore withdrew.
    pub async fn artifact(&self, name: &str, version: u32) -> Result<(Artifact, BlobDownload)> {
        let mut request = self.cap.artifact_request();
        request.get().set_name(name);
        request.get().set_version(version);
        let response = self.link.call(request.send().promise).await?;
        let response = fields(response.get())?;
        let artifact = answer(read_artifact(fields(response.get_artifact())?))?;
        Ok((artifact, BlobDownload::new(fields(response.get_blob())?, self.link.clone()).await?))
    }
}
