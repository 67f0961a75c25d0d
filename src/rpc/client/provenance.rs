//! Keys and signatures.

use super::connection::{answer, fields};
use super::host::HostClient;
use crate::core::error::Result;
use crate::core::signature::{KnownKey, SignedUnit};
use crate::rpc::convert::provenance::{read_known_key, read_signed_units};
use crate::rpc::schema::ryokan_capnp as wire;

impl HostClient {
    async fn provenance_cap(&self) -> Result<wire::provenance::Client> {
        let response = self.link.call(self.cap.provenance_request().send().promise).await?;
        fields(fields(response.get())?.get_provenance())
    }

    /// The host's key, its former keys, and those that the caller trusts.
    ///
    /// # Errors
    /// `refused` (`host_key`) if the host's key cannot be used.
    pub async fn known_keys(&self) -> Result<Vec<KnownKey>> {
        let response = self.link.call(self.provenance_cap().await?.keys_request().send().promise).await?;
        let list = fields(fields(response.get())?.get_keys())?;
        list.iter().map(|key| answer(read_known_key(key))).collect()
    }

    /// Trusts a host's key.
    ///
    /// # Errors
    /// `invalidArgument`, `alreadyExists`.
    pub async fn trust_key(&self, name: &str, key: &str) -> Result<KnownKey> {
        let mut request = self.provenance_cap().await?.trust_request();
        request.get().set_name(name);
        request.get().set_key(key);
        let response = self.link.call(request.send().promise).await?;
        answer(read_known_key(fields(fields(response.get())?.get_key())?))
    }

    /// Trusts a key no longer.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn distrust_key(&self, name: &str) -> Result<()> {
        let mut request = self.provenance_cap().await?.distrust_request();
        request.get().set_name(name);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// The signers of a group's freezes or a kernel's checkpoints, and the number of further ones; with an empty `name`
    /// of all groups.
    ///
    /// # Errors
    /// `notFound`, `conflict` (ambiguous).
    pub async fn provenance(&self, name: &str, reference: &str) -> Result<(Vec<SignedUnit>, u64)> {
        let mut request = self.provenance_cap().await?.check_request();
        request.get().set_name(name);
        request.get().set_ref(reference);
        let response = self.link.wait(request.send().promise).await?;
        let response = fields(response.get())?;
        Ok((answer(read_signed_units(response.get_units()))?, response.get_omitted()))
    }
}
