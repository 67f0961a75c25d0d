//! The kernels and rights that a server passes on.

use std::cell::RefCell;
use std::collections::BTreeSet;

use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::names::KernelArg;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::KernelId;
use crate::core::info::{KernelFilter, KernelInfo};
use crate::core::rights::{Right, Rights};
use crate::rpc::client::{HostClient, KernelClient};

/// The kernels and rights that a server passes on.
pub struct Access {
    context: Context,
    /// Ids: another kernel may get a name later. `None`: every kernel is served.
    kernels: Option<RefCell<BTreeSet<KernelId>>>,
    rights: Rights,
    /// Most bytes of text in one answer.
    pub most_bytes: usize,
}

impl Access {
    /// Access to the kernels that have these names or ids now, with these rights; no names: to all.
    ///
    /// # Errors
    /// Those of the connection, and `notFound`.
    pub async fn open(context: Context, names: &[KernelArg], rights: Rights, most_bytes: u64) -> Result<Access> {
        let most_bytes = usize::try_from(most_bytes).unwrap_or(usize::MAX);
        let mut access = Access { context, kernels: None, rights, most_bytes };
        let host = access.host().await?;
        let mut kernels = BTreeSet::new();
        for name in names {
            kernels.insert(host.open_kernel(name).await?.1.id);
        }
        access.kernels = (!names.is_empty()).then(|| RefCell::new(kernels));
        Ok(access)
    }

    /// Whether only named kernels and their forks are served.
    pub fn is_restricted(&self) -> bool {
        self.kernels.is_some()
    }

    /// Whether the server passes a right on.
    pub fn has(&self, right: Right) -> bool {
        self.rights.has(right)
    }

    /// Refuses what needs a right that the server does not pass on. The daemon checks the rights on a kernel too;
    /// what concerns no single kernel is checked only here.
    ///
    /// # Errors
    /// `refused`.
    pub fn require(&self, right: Right) -> Result<()> {
        if self.has(right) {
            return Ok(());
        }
        Err(Error::refused(format!("this server does not pass on the right {}", right.name()))
            .hint("start it with this right in --rights"))
    }

    /// Connects to the daemon.
    ///
    /// # Errors
    /// `unavailable`.
    pub async fn host(&self) -> Result<HostClient> {
        self.context.host().await.map_err(Failure::into_error)
    }

    /// Opens a kernel with no more than the server's rights.
    ///
    /// # Errors
    /// `notFound`, also for a kernel that is not served.
    pub async fn kernel(&self, name: &str) -> Result<(KernelClient, KernelInfo)> {
        let not_served = || {
            Error::new(ErrorCode::NotFound, format!("kernel {name} is not one that this server serves"))
                .reason("not_served")
                .hint("list_kernels shows those that it serves")
        };
        let (kernel, info) = match self.host().await?.open_kernel(name).await {
            // The daemon's hint may name other kernels.
            Err(error) if error.code == ErrorCode::NotFound && self.is_restricted() => return Err(not_served()),
            opened => opened?,
        };
        // The list also finds forks of forks.
        if !self.serves(&info) && !self.list().await?.iter().any(|served| served.id == info.id) {
            return Err(not_served());
        }
        match self.rights == Rights::ALL {
            true => Ok((kernel, info)),
            false => Ok((kernel.attenuate(self.rights, "mcp").await?, info)),
        }
    }

    /// The kernels that are served.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn list(&self) -> Result<Vec<KernelInfo>> {
        let mut all = self.host().await?.list_kernels(&KernelFilter::default()).await?;
        while all.iter().filter(|info| !self.serves(info)).any(|info| self.is_fork(info)) {
            all.iter().filter(|info| self.is_fork(info)).for_each(|info| self.add(info.id));
        }
        all.retain(|info| self.serves(info));
        Ok(all)
    }

    /// Also serves a kernel that was forked from a served one.
    pub fn add(&self, kernel: KernelId) {
        if let Some(kernels) = &self.kernels {
            kernels.borrow_mut().insert(kernel);
        }
    }

    fn serves(&self, info: &KernelInfo) -> bool {
        self.kernels.as_ref().is_none_or(|kernels| kernels.borrow().contains(&info.id))
    }

    /// Whether a kernel was forked from one that is served.
    fn is_fork(&self, info: &KernelInfo) -> bool {
        let kernels = self.kernels.as_ref().map(RefCell::borrow);
        let from = info.origin.from.as_ref().map(|from| from.kernel);
        kernels.zip(from).is_some_and(|(kernels, from)| kernels.contains(&from))
    }
}
