//! Streams to clients: output, events, journal entries, each at its reader's pace.

use std::cell::Cell;
use std::rc::Rc;

use capnp::MessageSize;
use capnp::capability::FromClientHook as _;
use capnp::traits::HasTypeId as _;
use futures::future::try_join_all;
use tokio::task::JoinHandle;

use super::Connection;
use crate::core::error::{Error, Result};
use crate::core::ids::ExecId;
use crate::core::info::Event;
use crate::core::limits;
use crate::rpc::convert::info::write_event;
use crate::rpc::convert::output::write_output_event;
use crate::rpc::convert::to_capnp;
use crate::rpc::schema::ryokan_capnp::{event_sink, output_callback, subscription};
use crate::supervisor::host::SubscriptionGuard;
use crate::supervisor::host::events::{Followed, Follower};
use crate::supervisor::kernel::output::Reader;

/// A running subscription; ends when the client drops it.
pub(super) struct Subscription {
    following: JoinHandle<()>,
    _counted: Place,
    _of_user: SubscriptionGuard,
}

/// A subscription's place on its connection.
struct Place(Rc<Cell<usize>>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Subscription {
    /// Starts a subscription.
    ///
    /// # Errors
    /// `busy` beyond the limit of the connection or the user.
    pub(super) fn start(
        connection: &Connection,
        follower: Follower,
        sink: event_sink::Client,
        wanted: impl Fn(&Event) -> bool + 'static,
    ) -> Result<Subscription> {
        let open = &connection.subscriptions;
        if open.get() >= limits::SUBSCRIPTIONS {
            return Err(Error::busy(format!("this connection has {} event subscriptions already", open.get()))
                .reason("subscriptions")
                .hint("drop one, or follow the host's events, which include those of its kernels"));
        }
        let of_user = connection.supervisor.host().subscription(connection.uid)?;
        open.set(open.get() + 1);
        let following = tokio::task::spawn_local(follow(follower, sink, wanted));
        Ok(Subscription { following, _counted: Place(Rc::clone(open)), _of_user: of_user })
    }
}

impl subscription::Server for Subscription {}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.following.abort();
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

/// Delivers the events that `wanted` accepts until the client disconnects. The next page is read
/// once the client has taken every event of the one before.
async fn follow(mut follower: Follower, sink: event_sink::Client, wanted: impl Fn(&Event) -> bool) {
    loop {
        let page = match follower.next().await {
            Ok(Followed::Page(page)) => page,
            Ok(Followed::CaughtUp) => {
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
        let events = gap.iter().chain(page.events.iter().filter(|event| wanted(event)));
        if try_join_all(events.map(|event| deliver(&sink, event))).await.is_err() {
            return;
        }
    }
}

/// Sends one event; resolves when the client has taken it. A streaming call would resolve while
/// hundreds of messages wait for the client.
async fn deliver(sink: &event_sink::Client, event: &Event) -> capnp::Result<()> {
    let text = event.kernel.len() + event.kind.len() + event.detail_json.len();
    let size = MessageSize { word_count: 64 + text as u64 / 8, cap_count: 0 };
    let mut request = sink.as_client_hook().new_call(event_sink::Client::TYPE_ID, 0, Some(size));
    write_event(request.get().init_as::<event_sink::event_params::Builder<'_>>().init_event(), event);
    request.send().promise.await.map(drop)
}
