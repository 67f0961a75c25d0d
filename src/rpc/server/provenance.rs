//! `Provenance`: keys and signatures. Held by full `Host` capabilities only.

use std::rc::Rc;

use super::Connection;
use crate::rpc::convert::provenance::{write_known_key, write_signed_units};
use crate::rpc::convert::{read_name, read_text, to_capnp};
use crate::rpc::schema::ryokan_capnp::provenance;
use crate::supervisor::freeze;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::command::Actor;

/// Keys and signatures as one client sees them.
pub(super) struct ProvenanceServer {
    pub connection: Rc<Connection>,
    pub actor: Actor,
}

impl ProvenanceServer {
    fn host(&self) -> &Rc<Host> {
        self.connection.supervisor.host()
    }
}

impl provenance::Server for ProvenanceServer {
    async fn keys(
        self: Rc<Self>,
        _: provenance::KeysParams,
        mut results: provenance::KeysResults,
    ) -> capnp::Result<()> {
        self.host().public_key().await.map_err(to_capnp)?;
        let known = self.host().known_keys(self.actor.uid).await.map_err(to_capnp)?;
        let mut list = results.get().init_keys(known.len() as u32);
        for (at, key) in known.iter().enumerate() {
            write_known_key(list.reborrow().get(at as u32), key);
        }
        Ok(())
    }

    async fn trust(
        self: Rc<Self>,
        params: provenance::TrustParams,
        mut results: provenance::TrustResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
        let key = read_name(params.get_key(), "key").map_err(to_capnp)?;
        let trusted = self.host().trust(&self.actor, &name, &key).await.map_err(to_capnp)?;
        write_known_key(results.get().init_key(), &trusted);
        Ok(())
    }

    async fn distrust(
        self: Rc<Self>,
        params: provenance::DistrustParams,
        _: provenance::DistrustResults,
    ) -> capnp::Result<()> {
        let name = read_name(params.get()?.get_name(), "name").map_err(to_capnp)?;
        self.host().distrust(&self.actor, &name).await.map_err(to_capnp)
    }

    async fn check(
        self: Rc<Self>,
        params: provenance::CheckParams,
        mut results: provenance::CheckResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
        let reference = read_text(params.get_ref(), "ref").map_err(to_capnp)?;
        let found = freeze::provenance(&self.connection.supervisor, &name, &reference, &self.actor).await;
        let (units, omitted) = found.map_err(to_capnp)?;
        results.get().set_omitted(omitted);
        write_signed_units(results.get().init_units(units.len() as u32), &units);
        Ok(())
    }
}
