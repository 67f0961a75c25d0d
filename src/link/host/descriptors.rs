//! Hands a descriptor to a worker's init beside the Cap'n Proto connection, which carries none.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::io::{AsyncReadExt, Interest};

use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::connector::unix::{self, DescriptorNote};
use crate::link::handshake::{Role, WorkerIdentity};

/// Sends `descriptor` and gives the token by which the next call names it. Init has it when this returns.
pub(crate) async fn hand_over(socket: &Path, identity: &WorkerIdentity, descriptor: OwnedFd) -> Result<u64> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|e| Error::internal(format!("no random bytes: {e}")))?;
    // 0 means "no token".
    let token = u64::from_le_bytes(random) | 1;
    let proof = identity.proof(Role::Descriptor, &token.to_le_bytes(), b"");
    let sending = send(socket, DescriptorNote { token, proof }, descriptor);
    match tokio::time::timeout(limits::WORKER_ADOPT, sending).await {
        Ok(Ok(())) => Ok(token),
        Ok(Err(error)) => Err(Error::unavailable(format!("the worker did not take a descriptor: {error}"))),
        Err(_) => Err(Error::deadline("the worker did not take a descriptor in time")),
    }
}

async fn send(socket: &Path, note: DescriptorNote, descriptor: OwnedFd) -> io::Result<()> {
    let mut stream = unix::connect(&unix::descriptor_path(socket)).await?;
    let bytes = note.to_bytes();
    let sent = stream
        .async_io(Interest::WRITABLE, || {
            let fds = [descriptor.as_raw_fd()];
            let rights = [ControlMessage::ScmRights(&fds)];
            sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&bytes)], &rights, MsgFlags::MSG_NOSIGNAL, None)
                .map_err(io::Error::from)
        })
        .await?;
    if sent != bytes.len() {
        return Err(io::Error::new(io::ErrorKind::WriteZero, "the note did not go out whole"));
    }
    stream.read_u8().await.map(drop)
}
