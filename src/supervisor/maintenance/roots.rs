//! Lists the roots: every row and live workspace that names an object, while no such row is removed.

use std::rc::Rc;

use futures::StreamExt as _;

use crate::catalog::state::RootKind;
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, KernelId};
use crate::supervisor::registry::Supervisor;

/// Number of kernels whose rows are read concurrently.
const AT_ONCE: usize = 16;

/// The kind of reference to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Named {
    /// A row.
    Row(RootKind),
    /// The last known file tree of a live kernel.
    Files,
    /// The manifest of a group's freeze.
    Freeze {
        /// The freeze's number.
        number: u64,
    },
}

/// A direct reference to an object.
#[derive(Debug, Clone)]
pub(crate) struct Root {
    /// Its kernel; zero for a freeze.
    pub kernel: KernelId,
    /// The label of the kernel or the group.
    pub name: Rc<str>,
    /// The kind of reference.
    pub named: Named,
    /// The referenced object.
    pub digest: Digest,
}

/// Lists every root.
///
/// # Errors
/// A database cannot be read, so its references are unknown. The error names the kernel.
pub(crate) async fn list(supervisor: &Supervisor) -> Result<Vec<Root>> {
    let _names = supervisor.host().upkeep.names.write().await;
    collect(supervisor, Err).await
}

/// Lists the roots of the kernels whose databases can be read.
///
/// # Errors
/// The catalog cannot be read.
pub(crate) async fn list_readable(supervisor: &Supervisor) -> Result<Vec<Root>> {
    let _names = supervisor.host().upkeep.names.write().await;
    collect(supervisor, |_| Ok(())).await
}

/// As [`list_readable`], but rows may be removed or copied meanwhile: for approximate figures, without delay for writers.
///
/// # Errors
/// The catalog cannot be read.
pub(crate) async fn list_unlocked(supervisor: &Supervisor) -> Result<Vec<Root>> {
    collect(supervisor, |_| Ok(())).await
}

async fn collect(supervisor: &Supervisor, unreadable: fn(Error) -> Result<()>) -> Result<Vec<Root>> {
    let host = supervisor.host();
    let rows = host.catalog.kernels(None).await?;
    let listed = rows.into_iter().map(|row| async move {
        let name: Rc<str> = host.event_name(row.uid, &row.spec.name).into();
        let roots = host.catalog.state(row.id).roots().await.map_err(|error| {
            let error = Error::from(error);
            let message = format!("what kernel {name} needs cannot be known: {}", error.message);
            Error { message, ..error }
        })?;
        Ok::<_, Error>((row.id, name, roots))
    });
    let mut listed = futures::stream::iter(listed.collect::<Vec<_>>()).buffer_unordered(AT_ONCE);
    let mut all = Vec::new();
    while let Some(roots) = listed.next().await {
        let (kernel, name, roots) = match roots {
            Ok(roots) => roots,
            Err(error) => {
                unreadable(error)?;
                continue;
            }
        };
        let root = |root: crate::catalog::state::Root| Root {
            kernel,
            name: Rc::clone(&name),
            named: Named::Row(root.kind),
            digest: root.digest,
        };
        all.extend(roots.into_iter().map(root));
    }
    for (files, name) in supervisor.prepared_kernels().await? {
        let name: Rc<str> = name.into();
        let roots = host.catalog.state(files).roots().await?;
        let root = |root: crate::catalog::state::Root| Root {
            kernel: files,
            name: Rc::clone(&name),
            named: Named::Row(root.kind),
            digest: root.digest,
        };
        all.extend(roots.into_iter().map(root));
    }
    for (group, singles, manifest) in supervisor.prepared_groups().await? {
        let (kernel, name): (_, Rc<str>) = (KernelId::from_bytes([0; 16]), group.into());
        let single = |digest| Root { kernel, name: Rc::clone(&name), named: Named::Row(RootKind::Blob), digest };
        all.extend(singles.into_iter().map(single));
        all.push(Root { kernel, name: Rc::clone(&name), named: Named::Freeze { number: 0 }, digest: manifest });
    }
    for kernel in supervisor.kernels() {
        if let Some(digest) = kernel.base.get() {
            let name = kernel.event_name().into();
            all.push(Root { kernel: kernel.id, name, named: Named::Files, digest });
        }
    }
    for (group, number, digest) in host.catalog.freeze_roots().await? {
        let kernel = KernelId::from_bytes([0; 16]);
        all.push(Root { kernel, name: group.into(), named: Named::Freeze { number }, digest });
    }
    Ok(all)
}
