//! Sockets: admission of clients, and the capabilities served to them.
//!
//! The control socket serves `Host`; each kernel has a socket that serves its `Kernel`; `publish`
//! adds sockets with fewer rights. The peer's uid is checked on each of them, so a descriptor
//! leaked to another user is useless.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use capnp_rpc::RpcSystem;
use capnp_rpc::new_broken_cap;
use capnp_rpc::rpc_twoparty_capnp::Side;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

use super::Connection;
use super::host::HostServer;
use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::rights::Rights;
use crate::link::connector::unix;
use crate::link::message_limit::MaxWords;
use crate::rpc::convert::to_capnp;
use crate::rpc::schema::ryokan_capnp as wire;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;

/// Raises this process's limit on open files to the maximum: every kernel has a socket.
///
/// # Errors
/// The system's.
pub fn raise_open_files() -> io::Result<u64> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}

/// Serves the control socket until the future is dropped.
pub async fn serve(listener: UnixListener, supervisor: Supervisor, published: Rc<Published>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (supervisor, published) = (supervisor.clone(), Rc::clone(&published));
                tokio::task::spawn_local(async move { greet(stream, supervisor, published).await });
            }
            Err(error) => pause_after(&error).await,
        }
    }
}

/// Pauses after a failed accept: if descriptors are short, an immediate retry would spin.
async fn pause_after(error: &io::Error) {
    tracing::warn!(%error, "a client could not be accepted");
    tokio::time::sleep(limits::RESTART_BACKOFF_FIRST).await;
}

/// Removes the sockets of a killed daemon. Those of existing kernels are created again later.
fn sweep(folder: &Path) {
    for entry in folder.read_dir().into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => sweep(&path),
            Ok(kind) if std::os::unix::fs::FileTypeExt::is_socket(&kind) => {
                if let Err(error) = std::fs::remove_file(&path) {
                    tracing::warn!(path = %path.display(), %error, "a former daemon's socket stays");
                }
            }
            Ok(_) | Err(_) => {}
        }
    }
}

/// The daemon's uid.
fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// The uid on whose behalf a peer acts.
///
/// Where only one user may connect, root acts for that user: root could become that user anyway.
fn admit(stream: &UnixStream, allowed: Option<u32>) -> Option<u32> {
    let uid = stream.peer_cred().ok()?.uid();
    match allowed {
        None => Some(uid),
        Some(allowed) if uid == allowed || uid == 0 => Some(allowed),
        Some(_) => {
            tracing::warn!(uid, "a connection of another user was refused");
            None
        }
    }
}

async fn greet(stream: UnixStream, supervisor: Supervisor, published: Rc<Published>) {
    let system_wide = supervisor.host().environment.system_wide;
    let Some(uid) = admit(&stream, (!system_wide).then(own_uid)) else { return };
    let _counted = match supervisor.host().client(uid) {
        Ok(counted) => counted,
        Err(error) => return published.turn_away(stream, error).await,
    };
    let connection = Connection::new(supervisor, published, uid);
    let most = MaxWords::new(limits::HELLO_WORDS);
    let server =
        Rc::new(HostServer { connection: Rc::clone(&connection), client: RefCell::new(None), most: most.clone() });
    let host: wire::host::Client = capnp_rpc::new_client_from_rc(Rc::clone(&server));
    let network = match unix::network_of(stream, Side::Server, most) {
        Ok(network) => network,
        Err(error) => return tracing::warn!(%error, "a client's connection cannot be watched"),
    };
    let rpc = RpcSystem::new(Box::new(network), Some(host.client));
    let silent = async {
        tokio::time::sleep(limits::CLIENT_HELLO).await;
        if server.client.borrow().is_some() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        ended = rpc => if let Err(error) = ended { tracing::debug!(%error, "a client's connection ended") },
        () = silent => tracing::debug!(uid, "a client that never said hello was disconnected"),
    }
    connection.end();
}

/// The kernels' own sockets and the published ones.
pub struct Published {
    supervisor: Supervisor,
    sockets: RefCell<HashMap<PathBuf, Listening>>,
    turning_away: Cell<usize>,
}

/// A served socket.
pub struct Listening {
    kernel: KernelId,
    own: bool,
    serving: JoinHandle<()>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Published {
    /// Starts to serve each kernel's socket.
    pub fn start(supervisor: &Supervisor) -> Rc<Self> {
        let published = Rc::new(Published {
            supervisor: supervisor.clone(),
            sockets: RefCell::default(),
            turning_away: Cell::new(0),
        });
        sweep(&supervisor.host().environment.kernel_sockets);
        let keeper = Rc::downgrade(&published);
        supervisor.set_socket_publisher(Box::new(move |kernel, open| {
            if let Some(keeper) = keeper.upgrade() {
                if open { keeper.open(kernel) } else { keeper.close(kernel) }
            }
        }));
        published
    }

    /// Answers every call of a surplus client with this error, for a moment.
    ///
    /// This takes resources too, so the number of such clients is limited; others are just
    /// disconnected.
    async fn turn_away(&self, stream: UnixStream, error: Error) {
        tracing::warn!(%error, "a client was refused");
        if self.turning_away.get() >= limits::CLIENT_REFUSALS {
            return;
        }
        let most = MaxWords::new(limits::HELLO_WORDS);
        let Ok(network) = unix::network_of(stream, Side::Server, most) else { return };
        self.turning_away.set(self.turning_away.get() + 1);
        let rpc = RpcSystem::new(Box::new(network), Some(new_broken_cap(to_capnp(error))));
        // Ended or timed out; neither needs handling.
        let _ = tokio::time::timeout(limits::CLIENT_REFUSAL, rpc).await;
        self.turning_away.set(self.turning_away.get() - 1);
    }

    fn folder(&self, uid: u32) -> PathBuf {
        let environment = &self.supervisor.host().environment;
        if environment.system_wide {
            environment.kernel_sockets.join(uid.to_string())
        } else {
            environment.kernel_sockets.clone()
        }
    }

    fn path(&self, uid: u32, name: &str) -> PathBuf {
        self.folder(uid).join(format!("{name}.sock"))
    }

    fn open(self: &Rc<Self>, kernel: &Rc<Kernel>) {
        let path = self.path(kernel.uid, kernel.spec().name.as_str());
        // A renamed kernel's socket moves; its connections continue.
        self.sockets.borrow_mut().retain(|path, listening| {
            let keep = listening.kernel != kernel.id || !listening.own;
            if !keep {
                // A missing file is fine.
                let _ = std::fs::remove_file(path);
            }
            keep
        });
        let actor = Actor { uid: kernel.uid, client: "kernel socket".into(), lease: Vec::new() };
        if let Err(error) = self.listen(&path, kernel, Rights::ALL, actor, true) {
            tracing::warn!(kernel = %kernel.spec().name, %error, "the kernel has no socket of its own");
        }
    }

    fn close(&self, kernel: &Rc<Kernel>) {
        self.sockets.borrow_mut().retain(|path, listening| {
            let keep = listening.kernel != kernel.id;
            if !keep {
                if let (false, Some(name)) = (listening.own, path.file_stem().and_then(|stem| stem.to_str())) {
                    self.supervisor.registry().published.borrow_mut().remove(&(kernel.uid, name.to_owned()));
                }
                // A missing file is fine.
                let _ = std::fs::remove_file(path);
            }
            keep
        });
    }

    fn listen(
        self: &Rc<Self>,
        path: &Path,
        kernel: &Rc<Kernel>,
        rights: Rights,
        actor: Actor,
        own: bool,
    ) -> io::Result<()> {
        let folder = self.folder(kernel.uid);
        if !folder.is_dir() {
            std::fs::create_dir(&folder)?;
            std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755))?;
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = unix::listen(path)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        if self.supervisor.host().environment.system_wide {
            std::os::unix::fs::chown(path, Some(kernel.uid), None)?;
        }
        let serving =
            tokio::task::spawn_local(serve_kernel(listener, Rc::clone(self), Rc::clone(kernel), rights, actor));
        let listening = Listening { kernel: kernel.id, own, serving };
        self.sockets.borrow_mut().insert(path.to_owned(), listening);
        Ok(())
    }

    /// Serves a kernel with these rights at a socket of this name.
    pub(super) async fn publish(
        self: &Rc<Self>,
        connection: &Rc<Connection>,
        kernel: &Rc<Kernel>,
        name: &str,
        rights: Rights,
    ) -> Result<PathBuf> {
        let name: KernelName = name.parse().map_err(|error| Error::invalid(format!("{error}")))?;
        let path = self.path(kernel.uid, name.as_str());
        let own = (kernel.uid, name.to_string());
        let taken = self.sockets.borrow().contains_key(&path)
            || self.supervisor.find(kernel.uid, name.as_str()).is_ok()
            // The name is reserved before the first await.
            || !self.supervisor.registry().published.borrow_mut().insert(own.clone());
        if taken {
            return Err(Error::already_exists(format!("there is a socket {} already", path.display()))
                .hint("take another name"));
        }
        let actor = Actor { uid: connection.uid, client: format!("published {name}"), lease: Vec::new() };
        let recorded = kernel.records.publish(name.as_str(), Some(rights), &actor, crate::sys::clock::now_ms()).await;
        let served = recorded.and_then(|()| {
            self.listen(&path, kernel, rights, actor.clone(), false)
                .map_err(|error| Error::unavailable(format!("{} cannot be served: {error}", path.display())))
        });
        if let Err(error) = served {
            self.supervisor.registry().published.borrow_mut().remove(&own);
            return Err(error);
        }
        self.audit(kernel, &actor, "kernel.publish").await;
        Ok(path)
    }

    /// Serves again the sockets published before the daemon's start.
    pub fn republish(self: &Rc<Self>, kernel: &Rc<Kernel>, published: &[(String, Rights)]) {
        for (name, rights) in published {
            self.supervisor.registry().published.borrow_mut().insert((kernel.uid, name.clone()));
            let actor = Actor { uid: kernel.uid, client: format!("published {name}"), lease: Vec::new() };
            if let Err(error) = self.listen(&self.path(kernel.uid, name), kernel, *rights, actor, false) {
                tracing::warn!(kernel = %kernel.spec().name, name, %error, "a published socket could not be served again");
            }
        }
    }

    /// Ends a published socket. Its existing connections continue.
    pub(super) async fn unpublish(&self, kernel: &Rc<Kernel>, name: &str, actor: &Actor) -> Result<()> {
        let path = self.path(kernel.uid, name);
        let published = self.sockets.borrow().get(&path).is_some_and(|l| l.kernel == kernel.id && !l.own);
        if !published {
            return Err(Error::not_found(format!("kernel {} has published nothing as {name:?}", kernel.spec().name)));
        }
        kernel.records.publish(name, None, actor, crate::sys::clock::now_ms()).await?;
        self.sockets.borrow_mut().remove(&path);
        self.supervisor.registry().published.borrow_mut().remove(&(kernel.uid, name.to_owned()));
        let _ = std::fs::remove_file(&path);
        self.audit(kernel, actor, "kernel.unpublish").await;
        Ok(())
    }

    async fn audit(&self, kernel: &Rc<Kernel>, actor: &Actor, action: &str) {
        let version = Some(kernel.view().version);
        self.supervisor.host().audit(actor, action, kernel, (version, version), "").await;
    }
}

async fn serve_kernel(
    listener: UnixListener,
    published: Rc<Published>,
    kernel: Rc<Kernel>,
    rights: Rights,
    actor: Actor,
) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                pause_after(&error).await;
                continue;
            }
        };
        let allowed = if published.supervisor.host().environment.system_wide { kernel.uid } else { own_uid() };
        let Some(uid) = admit(&stream, Some(allowed)) else { continue };
        let counted = match published.supervisor.host().client(uid) {
            Ok(counted) => counted,
            Err(error) => {
                let published = Rc::clone(&published);
                tokio::task::spawn_local(async move { published.turn_away(stream, error).await });
                continue;
            }
        };
        let connection = Connection::new(published.supervisor.clone(), Rc::clone(&published), uid);
        let client = connection.kernel_client(&kernel, rights, Actor { uid, ..actor.clone() });
        let network = match unix::network(stream, Side::Server) {
            Ok(network) => network,
            Err(error) => {
                tracing::warn!(%error, "a connection to a kernel's socket cannot be watched");
                continue;
            }
        };
        let rpc = RpcSystem::new(Box::new(network), Some(client.client));
        tokio::task::spawn_local(async move {
            let _counted = counted;
            if let Err(error) = rpc.await {
                tracing::debug!(%error, "a connection to a kernel's socket ended");
            }
        });
    }
}
