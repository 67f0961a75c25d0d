//! The originator of a request.

/// The client on whose behalf a request is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor {
    /// The peer's uid.
    pub uid: u32,
    /// The client's own name, or the label of an attenuated capability.
    pub client: String,
    /// Token of the lease that the capability carries; empty if none.
    pub lease: Vec<u8>,
}

impl std::fmt::Display for Actor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (uid {})", if self.client.is_empty() { "client" } else { &self.client }, self.uid)
    }
}
