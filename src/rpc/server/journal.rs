//! A kernel's journal and messages, and the engine calls of interactive front ends.

use super::kernel::KernelServer;
use crate::core::error::Error;
use crate::core::info::{CodeStatus, JournalView};
use crate::core::limits;
use crate::link::host::CodeCheck;
use crate::rpc::convert::exec::code_status_to_wire;
use crate::rpc::convert::info::write_journal_entry;
use crate::rpc::convert::{read_name, read_text, to_capnp, write_text_list};
use crate::rpc::schema::ryokan_capnp::kernel;
use crate::supervisor::kernel::command::Message;

impl KernelServer {
    pub(super) async fn stream_journal(&self, params: kernel::JournalParams) -> capnp::Result<()> {
        let params = params.get()?;
        let sink = params.get_sink()?;
        let reference = read_text(params.get_checkpoint(), "checkpoint").map_err(to_capnp)?;
        let view = match (reference.as_str(), params.get_compacted()) {
            ("", true) => JournalView::Compacted,
            ("", false) => JournalView::Whole,
            (reference, _) => JournalView::Of(self.resolve_checkpoint(reference).await.map_err(to_capnp)?.0.number),
        };
        let (mut after, mut left) = (params.get_since(), params.get_limit() as usize);
        let unbounded = left == 0;
        loop {
            let most = if unbounded { limits::PAGE_ROWS } else { left.min(limits::PAGE_ROWS) };
            let page = self.kernel.journal(view, after, most).await.map_err(to_capnp)?;
            for entry in &page {
                let mut request = sink.entry_request();
                write_journal_entry(request.get().init_entry(), entry);
                request.send().await?;
                after = entry.sequence;
            }
            left = left.saturating_sub(page.len());
            // A page may end before its rows do: entries can be large.
            if page.is_empty() || (!unbounded && left == 0) {
                return Ok(());
            }
        }
    }

    pub(super) async fn add_message(
        &self,
        params: kernel::MessageParams,
        mut results: kernel::MessageResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let role = read_name(params.get_role(), "role").map_err(to_capnp)?;
        let text = read_text(params.get_text(), "text").map_err(to_capnp)?;
        if text.len() > limits::MESSAGE_BYTES {
            return Err(to_capnp(
                Error::invalid(format!("a message has at most {} bytes", limits::MESSAGE_BYTES))
                    .hint("store it as a blob"),
            ));
        }
        let key = read_name(params.get_key(), "key").map_err(to_capnp)?;
        let change = self.change(params.get_expected_version());
        let sequence = self.kernel.message(change, Message { role, text, key }).await.map_err(to_capnp)?;
        results.get().set_sequence(sequence);
        Ok(())
    }

    pub(super) async fn complete_code(
        &self,
        params: kernel::CompleteParams,
        mut results: kernel::CompleteResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let code = read_text(params.get_code(), "code").map_err(to_capnp)?;
        let cursor = params.get_cursor() as usize;
        if !code.is_char_boundary(cursor) {
            return Err(to_capnp(Error::invalid(format!("cursor {cursor} is not between two characters of the code"))));
        }
        let found = self.kernel.with_worker(None, move |link| async move { link.complete(&code, cursor).await }).await;
        let found = found.map_err(to_capnp)?;
        let mut results = results.get();
        results.set_start(found.start as u32);
        write_text_list(results.init_matches(found.matches.len() as u32), &found.matches);
        Ok(())
    }

    pub(super) async fn check_code(
        &self,
        params: kernel::CheckParams,
        mut results: kernel::CheckResults,
    ) -> capnp::Result<()> {
        let code = read_text(params.get()?.get_code(), "code").map_err(to_capnp)?;
        let checked = self.kernel.with_worker(None, move |link| async move { link.check(&code).await }).await;
        let (status, indent) = match checked.map_err(to_capnp)? {
            CodeCheck::Complete => (CodeStatus::Complete, String::new()),
            CodeCheck::Incomplete { indent } => (CodeStatus::Incomplete, indent),
            CodeCheck::Invalid => (CodeStatus::Invalid, String::new()),
        };
        results.get().set_status(code_status_to_wire(status));
        results.get().set_indent(indent.as_str());
        Ok(())
    }
}
