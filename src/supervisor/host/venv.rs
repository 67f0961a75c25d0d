//! Virtual environments in workspaces.

use std::path::Path;

use crate::core::error::Error;
use crate::core::name::KernelName;
use crate::core::spec::WORKSPACE;

/// Whether a workspace has a virtual environment at this path of the kernel. No symbolic link is followed: code of the
/// kernel owns the workspace.
pub(crate) fn has_venv(workspace: &Path, venv: &Path) -> bool {
    venv.strip_prefix(WORKSPACE).is_ok_and(|below| crate::workspace::has_file(workspace, &below.join("pyvenv.cfg")))
}

/// The error about a missing virtual environment.
pub(crate) fn no_venv(kernel: &KernelName, venv: &Path) -> Error {
    let shown = venv.display();
    Error::not_found(format!("there is no virtual environment {shown} in kernel {kernel}")).reason("venv").hint(format!(
        "make it in the kernel first: ryokan spawn {kernel} -- python3 -m venv {shown}, then: ryokan update {kernel} \
         --venv {shown}"
    ))
}
