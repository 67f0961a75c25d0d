//! A lease on a kernel: while it lasts, only its holder may change the kernel.

use std::rc::Rc;
use std::time::Duration;

use super::connection::{Link, fields};
use super::kernel::KernelClient;
use crate::core::error::Result;
use crate::rpc::schema::ryokan_capnp as wire;

/// A lease held by this client.
pub struct LeaseClient {
    cap: wire::lease::Client,
    token: Vec<u8>,
    expires_at_ms: i64,
    link: Rc<Link>,
}

impl LeaseClient {
    pub(super) fn new(cap: wire::lease::Client, token: Vec<u8>, expires_at_ms: i64, link: Rc<Link>) -> Self {
        LeaseClient { cap, token, expires_at_ms, link }
    }

    /// The secret that resumes the lease after a lost connection.
    pub fn token(&self) -> &[u8] {
        &self.token
    }

    /// Expiry unless renewed, milliseconds since 1970.
    pub fn expires_at_ms(&self) -> i64 {
        self.expires_at_ms
    }

    /// The kernel's capability for the lease holder.
    ///
    /// # Errors
    /// `refused` once the lease has ended.
    pub async fn kernel(&self) -> Result<KernelClient> {
        let response = self.link.call(self.cap.kernel_request().send().promise).await?;
        Ok(KernelClient::new(fields(fields(response.get())?.get_kernel())?, self.link.clone()))
    }

    /// Extends the lease to `ttl` from now.
    ///
    /// # Errors
    /// `refused` once the lease has ended.
    pub async fn renew(&mut self, ttl: Duration) -> Result<()> {
        let mut request = self.cap.renew_request();
        request.get().set_ttl_ms(millis(ttl));
        let response = self.link.call(request.send().promise).await?;
        self.expires_at_ms = fields(response.get())?.get_expires_at_ms();
        Ok(())
    }

    /// Ends the lease now.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn release(self) -> Result<()> {
        self.link.call(self.cap.release_request().send().promise).await.map(drop)
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
