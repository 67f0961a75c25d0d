//! Connecting to a server over its standard streams or HTTP.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use rmcp::model::{ClientCapabilities, ClientConfig, Implementation};
use rmcp::service::{RunningService, serve_client};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::streamable_http_client::{StreamableHttpClientTransportConfig, StreamableHttpError};
use rmcp::{RoleClient, transport::Transport};

use super::allow::{ServerEntry, expand};
use super::limits;
use super::process::{Launch, Process};
use super::wire::{Guarded, Health, LineLimit, chain};
use crate::core::info::McpTransport;

/// A server that has answered `initialize`.
pub(super) struct Connection {
    /// rmcp's side; the connection ends when it is dropped.
    pub(super) service: RunningService<RoleClient, ClientConfig>,
    /// The state of the connection.
    pub(super) health: Arc<Health>,
}

/// Starts the server if it is a program, storing it in `process` at once, and performs the
/// handshake.
///
/// # Errors
/// The reason for a failure.
pub(super) async fn connect(
    entry: &ServerEntry,
    launch: &Launch,
    process: &RefCell<Option<Process>>,
) -> Result<Connection, String> {
    let health = Arc::new(Health::default());
    let expanded = |pairs: &[(String, String)]| {
        let expand = |(name, value): &(String, String)| {
            expand(value, &entry.pass_env, |name| (launch.env)(name)).map(|value| (name.clone(), value))
        };
        pairs.iter().map(expand).collect::<Result<Vec<_>, String>>()
    };
    match &entry.transport {
        McpTransport::Stdio { command, args, env } => {
            let (started, (stdout, stdin)) = Process::start(command, args, &expanded(env)?, launch)?;
            process.replace(Some(started));
            let limited = LineLimit::new(stdout, limits::MESSAGE_BYTES, Arc::clone(&health));
            // Our limit is lower and ends the connection. At rmcp's limit the message would be
            // dropped while its call waits.
            let lines = AsyncRwTransport::<RoleClient, _, _>::new(limited, stdin)
                .with_max_line_length(limits::MESSAGE_BYTES * 2);
            introduce(Guarded::new(lines, Arc::clone(&health), Some(limits::SEND), |_| true), health).await
        }
        McpTransport::Http { url, headers } => {
            let http = http(url, &expanded(headers)?)?;
            // A send lasts until the server answers. An HTTP status concerns one call, a broken
            // network every call.
            let fatal =
                |e: &_| matches!(e, StreamableHttpError::Client(_) | StreamableHttpError::TransportChannelClosed);
            introduce(Guarded::new(http, Arc::clone(&health), None, fatal), health).await
        }
    }
}

async fn introduce<T: Transport<RoleClient> + 'static>(
    transport: Guarded<T>,
    health: Arc<Health>,
) -> Result<Connection, String> {
    let us = Implementation::new("ryokan", env!("CARGO_PKG_VERSION"));
    let config = ClientConfig::new(ClientCapabilities::default(), us);
    match serve_client(config, transport).await {
        Ok(service) => Ok(Connection { service, health }),
        // Our record of a closed connection says more than rmcp's error.
        Err(e) => Err(health.why().unwrap_or_else(|| chain(&e))),
    }
}

fn http(url: &str, headers: &[(String, String)]) -> Result<StreamableHttpClientTransport<reqwest::Client>, String> {
    let mut map = HashMap::new();
    for (name, value) in headers {
        let name = name.parse().map_err(|_| format!("{name:?} cannot be a header"))?;
        let value = value.parse().map_err(|_| format!("the value of header {name:?} cannot be sent"))?;
        map.insert(name, value);
    }
    let config = StreamableHttpClientTransportConfig::with_uri(url)
        .custom_headers(map)
        .max_sse_event_size(limits::MESSAGE_BYTES)
        .max_concurrent_requests(limits::CALLS_IN_FLIGHT);
    Ok(StreamableHttpClientTransport::with_client(http_client(url)?, config))
}

fn http_client(url: &str) -> Result<reqwest::Client, String> {
    // The client library has no cryptography of its own and panics unless one is chosen. Choosing
    // the same one again is refused harmlessly.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // Connections are not reused: a body that was not read to its end would delay the next request.
    let mut builder = reqwest::Client::builder()
        .pool_max_idle_per_host(0)
        .connect_timeout(limits::CONNECT)
        .redirect(reqwest::redirect::Policy::custom(same_origin));
    if let Some(rest) = url.strip_prefix("http://") {
        // Plain HTTP must work on a host without CA certificates.
        builder = builder.tls_certs_only([]);
        if ["127.", "localhost", "[::1]"].iter().any(|loopback| rest.starts_with(loopback)) {
            builder = builder.no_proxy();
        }
    }
    builder.build().map_err(|e| chain(&e))
}

/// Follows redirects that keep the request unchanged and stay on the same host. The allow-list
/// names only this host, and the headers may be secret.
fn same_origin(attempt: reqwest::redirect::Attempt<'_>) -> reqwest::redirect::Action {
    let keeps = matches!(attempt.status().as_u16(), 307 | 308);
    let origin = attempt.previous().first().is_some_and(|first| first.origin() == attempt.url().origin());
    if keeps && origin && attempt.previous().len() <= limits::REDIRECTS { attempt.follow() } else { attempt.stop() }
}
