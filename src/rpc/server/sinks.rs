//! Streams to clients: output, events, journal entries, each at its reader's pace.

use tokio::task::JoinHandle;

use crate::core::ids::ExecId;
use crate::core::info::Event;
use crate::rpc::convert::info::write_event;
use crate::rpc::convert::output::write_output_event;
use crate::rpc::convert::to_capnp;
use crate::rpc::schema::ryokan_capnp::{event_sink, output_callback, subscription};
use crate::supervisor::host::events::{Follower, Heard};
use crate::supervisor::kernel::output::Reader;

/// A running subscription; ends when the client drops it.
pub(super) struct Subscription(pub JoinHandle<()>);

impl subscription::Server for Subscription {}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Delivers an execution's output until its end.
pub(super) async fn pump(exec: ExecId, mut reader: Reader, callback: output_callback::Client) -> capnp::Result<()> {
    while let Some(event) = reader.next().await {
        let mut request = callback.on_output_request();
        request.get().set_exec_id(exec.0);
        write_output_event(request.get().init_event(), &event).map_err(to_capnp)?;
        request.send().await?;
    }
    Ok(())
}

/// Delivers the events that `wanted` accepts until the client disconnects.
pub(super) async fn follow(mut follower: Follower, sink: event_sink::Client, wanted: impl Fn(&str) -> bool) {
    loop {
        let page = match follower.next().await {
            Ok(Heard::Page(page)) => page,
            Ok(Heard::CaughtUp) => {
                // An older client does not know the call and does not need it.
                drop(sink.caught_up_request().send().promise.await);
                continue;
            }
            Err(error) => {
                tracing::warn!(%error, "a subscription ended");
                return;
            }
        };
        let gap = (page.lost > 0).then(|| Event {
            sequence: page.events.first().map_or(0, |event| event.sequence - 1),
            at_ms: page.events.first().map_or(0, |event| event.at_ms),
            kernel: String::new(),
            kind: "gap".into(),
            detail_json: serde_json::json!({ "lost": page.lost }).to_string(),
        });
        for event in gap.iter().chain(page.events.iter().filter(|event| wanted(&event.kernel))) {
            let mut request = sink.event_request();
            write_event(request.get().init_event(), event);
            if request.send().await.is_err() {
                return;
            }
        }
    }
}
