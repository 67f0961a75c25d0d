//! `GET /metrics` over HTTP/1.1, on a Unix socket beside the daemon's own.
//!
//! If the configuration names a loopback address, metrics are served there too.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::service::make_socket;
use crate::core::limits;
use crate::supervisor::maintenance::refresh_figures;
use crate::supervisor::registry::Supervisor;

/// The content type of OpenMetrics 1.0.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Delay after a failed accept, for example for lack of descriptors.
const AFTER_FAILURE: Duration = Duration::from_millis(200);

/// Serves metrics until the daemon ends.
///
/// # Errors
/// If the socket cannot be made.
pub(super) async fn serve(supervisor: &Supervisor, socket: PathBuf, address: Option<SocketAddr>) -> anyhow::Result<()> {
    // Each listener has its own limit, so that clients of the loopback address cannot block the
    // socket.
    let door = || {
        Rc::new(Door { supervisor: supervisor.clone(), open: Arc::new(Semaphore::new(limits::METRICS_CONNECTIONS)) })
    };
    let unix = make_socket(&socket, 0o600).with_context(|| format!("metrics socket {}", socket.display()))?;
    if let Some(address) = address {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                tracing::info!(%address, "metrics are served");
                serve_tcp(door(), listener);
            }
            // Not fatal: kernels are more important than metrics.
            Err(error) => tracing::error!(%address, %error, "daemon.metrics_address: metrics are not served there"),
        }
    }
    let door = door();
    tokio::task::spawn_local(async move {
        loop {
            match unix.accept().await {
                Ok((stream, _)) => door.admit(stream),
                Err(error) => failed(&error).await,
            }
        }
    });
    Ok(())
}

fn serve_tcp(door: Rc<Door>, listener: TcpListener) {
    tokio::task::spawn_local(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => door.admit(stream),
                Err(error) => failed(&error).await,
            }
        }
    });
}

async fn failed(error: &std::io::Error) {
    tracing::warn!(%error, "a reader of metrics was not served");
    tokio::time::sleep(AFTER_FAILURE).await;
}

struct Door {
    supervisor: Supervisor,
    open: Arc<Semaphore>,
}

impl Door {
    /// Serves a connection in its own task; a connection beyond the limit is closed.
    fn admit(&self, stream: impl AsyncRead + AsyncWrite + Unpin + 'static) {
        let Ok(permit) = Arc::clone(&self.open).try_acquire_owned() else { return };
        let supervisor = self.supervisor.clone();
        tokio::task::spawn_local(async move {
            let _permit = permit;
            let service = service_fn(|request| {
                let answer = answer(&supervisor, &request);
                async { Ok::<_, Infallible>(answer) }
            });
            let mut server = hyper::server::conn::http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(limits::METRICS_TIMEOUT).keep_alive(false);
            // A client that disconnects early is not an error.
            let served =
                tokio::time::timeout(limits::METRICS_TIMEOUT, server.serve_connection(TokioIo::new(stream), service));
            if let Ok(Err(error)) = served.await {
                tracing::debug!(%error, "a reader of metrics");
            }
        });
    }
}

fn answer(supervisor: &Supervisor, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let said = |status, text: &'static str| {
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return said(StatusCode::NOT_FOUND, "metrics are at /metrics\n");
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = said(StatusCode::METHOD_NOT_ALLOWED, "GET\n");
        response.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    refresh_figures(supervisor);
    let mut response = Response::new(Full::from(supervisor.metrics_text()));
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(OPEN_METRICS));
    response
}
