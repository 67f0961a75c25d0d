//! The images of virtual machines and the kernels that use them.

use std::rc::Rc;

use super::Supervisor;
use super::kernels::Registry;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::handover::Side;
use crate::core::ids::{Epoch, KernelId};
use crate::core::info::ImageInfo;
use crate::core::kernel::State;
use crate::core::limits;
use crate::core::spec::{Isolation, KernelSpec};
use crate::isolation::{Images, Shape};
use crate::supervisor::checkpoint::manifest_of;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::journal::Records;

/// The image of a kernel in creation: the registry has it until the registry has the kernel.
pub(crate) struct HeldImage {
    registry: Rc<Registry>,
    /// The kernel's name, and the image's version.
    held: Option<(String, String)>,
}

impl Drop for HeldImage {
    fn drop(&mut self) {
        let mut all = self.registry.images_held.borrow_mut();
        if let Some(at) = self.held.as_ref().and_then(|held| all.iter().position(|other| other == held)) {
            all.swap_remove(at);
        }
    }
}

/// The part of the record of a received kernel that names its image.
#[derive(serde::Deserialize)]
struct Received {
    files: KernelId,
    spec: KernelSpec,
}

impl Supervisor {
    /// The images of this host, with the names of the kernels that use them.
    ///
    /// # Errors
    /// `unsupported` if this build has no virtual machines.
    pub async fn images(&self) -> Result<Vec<ImageInfo>> {
        let mut images = self.host_images()?.list().await?;
        let users = self.image_users()?;
        for image in &mut images {
            image.kernels = names_of(&users, &image.version);
        }
        Ok(images)
    }

    /// The folder into which images are built.
    ///
    /// # Errors
    /// `unsupported`.
    pub fn images_folder(&self) -> Result<std::path::PathBuf> {
        Ok(self.host_images()?.folder())
    }

    /// Protects an image from removal, or no more. Returns its version.
    ///
    /// # Errors
    /// `notFound`, `invalidArgument`, those of writing.
    pub fn pin_image(&self, version: &str, is_pinned: bool) -> Result<String> {
        self.host_images()?.pin(version, is_pinned)
    }

    /// Makes an image current, the newest by default, once its templates are built and a machine started from each: that
    /// of the default shape, and those of kernels that would run it. Kernels that name no image run it from their next
    /// start on. Returns its version.
    ///
    /// # Errors
    /// `unsupported` if it cannot be used; `conflict` if it lacks the engine of a kernel that would run it; `unavailable` if no machine starts: the former one stays current.
    pub async fn rotate_image(&self, version: &str) -> Result<String> {
        let images = self.host_images()?;
        let wanted = images.usable(version)?;
        self.check_engines_of(&wanted).await?;
        let version = images.rotate(&wanted, &self.shapes_with(&wanted)?).await?;
        self.host.events.publish("", "image_current", serde_json::json!({ "version": version }));
        Ok(version)
    }

    /// The kernels that run the current image from their next start on.
    fn takers(&self) -> impl Iterator<Item = Rc<Kernel>> {
        self.kernels().into_iter().filter(|kernel| {
            let spec = kernel.spec();
            let is_here = !matches!(kernel.view().state, State::Departed { .. });
            is_here && spec.isolation == Isolation::Microvm && spec.image.is_empty()
        })
    }

    /// The shapes of workers from an image that becomes current: the default one, one of each engine in use, and further
    /// ones of the kernels that were used last.
    fn shapes_with(&self, version: &str) -> Result<Vec<Shape>> {
        let mut spec = self.host.config.defaults.spec();
        spec.isolation = Isolation::Microvm;
        // Not the current one, which may lack the engine that this one has.
        spec.image = version.to_owned();
        let default = self.workers.shape(&spec, nix::unistd::geteuid().as_raw())?;
        let mut takers: Vec<Rc<Kernel>> = self.takers().collect();
        takers.sort_by_key(|kernel| std::cmp::Reverse(kernel.view().last_used_at_ms));
        let (mut first, mut further) = (vec![default], Vec::new());
        for kernel in takers {
            let mut spec = (*kernel.spec()).clone();
            spec.image = version.to_owned();
            // One that cannot start at all is no reason to keep another image.
            let Ok(shape) = self.workers.shape(&spec, kernel.uid) else { continue };
            let is_known = first.iter().any(|known| known.engine == shape.engine);
            if is_known { further.push(shape) } else { first.push(shape) }
        }
        for shape in further {
            if !first.contains(&shape) {
                first.push(shape);
            }
        }
        first.truncate(limits::VM_ROTATED_SHAPES);
        Ok(first)
    }

    /// Refuses to make an image current without which kernels would not start.
    async fn check_engines_of(&self, version: &str) -> Result<()> {
        let images = self.host_images()?.list().await?;
        let Some(image) = images.into_iter().find(|image| image.version == version) else { return Ok(()) };
        let mut lacking: Vec<String> = self
            .takers()
            .filter(|kernel| !image.engines.iter().any(|engine| engine == kernel.spec().engine.name()))
            .map(|kernel| format!("{} ({})", kernel.event_name(), kernel.spec().engine))
            .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        lacking.sort();
        Err(Error::conflict(format!("image {version} lacks the engines of {}", lacking.join(", ")))
            .reason("engine")
            .hint("build an image with these engines: `ryokan images build --engines`; or remove these kernels"))
    }

    /// Removes an image. Returns its version.
    ///
    /// # Errors
    /// `conflict` if kernels use it, if checkpoints hold memory of its machines, if it is current or pinned; `notFound`,
    /// `invalidArgument`.
    pub async fn remove_image(&self, version: &str) -> Result<String> {
        let images = self.host_images()?;
        let version = images.resolve(version)?;
        self.check_unused(&version)?;
        let mut checkpoints = self.memory_checkpoints(&version).await?;
        checkpoints.extend(self.check_received(&version).await?);
        if !checkpoints.is_empty() {
            let named: Vec<&str> = checkpoints.iter().take(limits::NAMED_USERS).map(String::as_str).collect();
            let more = if named.len() < checkpoints.len() { ", ..." } else { "" };
            let message = format!("image {version} is needed by checkpoints with memory: {}{more}", named.join(", "));
            return Err(Error::conflict(message).reason("in_use").hint(
                "without it their memory cannot continue; remove one: ryokan checkpoint KERNEL --delete CHECKPOINT",
            ));
        }
        // Again, without a pause before the removal.
        self.check_unused(&version)?;
        images.remove(&version).await?;
        self.host.events.publish("", "image_removed", serde_json::json!({ "version": version }));
        Ok(version)
    }

    /// Refuses to remove an image that kernels use.
    fn check_unused(&self, version: &str) -> Result<()> {
        refuse_used(version, &names_of(&self.image_users()?, version))
    }

    /// The checkpoints that hold memory of an image's machines, as `KERNEL@CHECKPOINT`. Their memory continues with
    /// exactly that image.
    async fn memory_checkpoints(&self, version: &str) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for kernel in self.kernels() {
            found.extend(self.memory_checkpoints_of(&kernel.records, &kernel.event_name(), version).await?);
        }
        found.sort();
        Ok(found)
    }

    async fn memory_checkpoints_of(&self, records: &Records, name: &str, version: &str) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let all = match records.all_checkpoints().await {
            // None of its checkpoints can be restored.
            Err(error) if error.code == ErrorCode::Corrupt => return Ok(found),
            all => all?,
        };
        for checkpoint in all.into_iter().filter(|checkpoint| checkpoint.machine_bytes > 0) {
            match manifest_of(&self.host, &checkpoint).await {
                Ok(manifest) if manifest.base_image_version == version => {
                    found.push(format!("{name}@{}", checkpoint.short_id()));
                }
                Ok(_) => {}
                Err(error) if matches!(error.code, ErrorCode::Corrupt | ErrorCode::NotFound) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Refuses to remove an image that received kernels need once they are activated. Returns the checkpoints of these
    /// that hold memory of the image's machines.
    async fn check_received(&self, version: &str) -> Result<Vec<String>> {
        let driver = self.host.drivers.of(Isolation::Microvm)?;
        let (mut users, mut checkpoints) = (Vec::new(), Vec::new());
        for row in self.host.catalog.handovers().await?.into_iter().filter(|row| row.side == Side::In && !row.live) {
            let received: Received = serde_json::from_str(&row.record)
                .map_err(|error| Error::corrupt(format!("the record of handover {}: {error}", row.id)))?;
            let name = self.host.event_name(row.uid, &received.spec.name);
            let dir = self.host.catalog.kernel_files(received.files).dir;
            let needed = driver.kept_image(&dir).unwrap_or_else(|| received.spec.image.clone());
            if received.spec.isolation == Isolation::Microvm && needed == version {
                users.push((format!("{name} (arriving)"), needed));
            }
            let records = Records::new(received.files, Epoch(0), &self.host.catalog, &self.host.store);
            checkpoints.extend(self.memory_checkpoints_of(&records, &name, version).await?);
        }
        refuse_used(version, &names_of(&users, version))?;
        Ok(checkpoints)
    }

    /// Keeps the image of a kernel in creation from removal until the kernel is in the registry.
    pub(crate) fn hold_image(&self, spec: &KernelSpec) -> HeldImage {
        let registry = Rc::clone(self.registry());
        let held = (!spec.image.is_empty()).then(|| (spec.name.to_string(), spec.image.clone()));
        registry.images_held.borrow_mut().extend(held.clone());
        HeldImage { registry, held }
    }

    fn host_images(&self) -> Result<Rc<dyn Images>> {
        let images = self.host.drivers.of(Isolation::Microvm)?.images();
        images.ok_or_else(|| Error::unsupported("this build has no images").reason("image"))
    }

    /// The names of kernels in virtual machines, in creation as well, with their image's version.
    fn image_users(&self) -> Result<Vec<(String, String)>> {
        let driver = self.host.drivers.of(Isolation::Microvm)?;
        let kernels = self.kernels().into_iter().filter(|kernel| {
            kernel.spec().isolation == Isolation::Microvm && !matches!(kernel.view().state, State::Departed { .. })
        });
        let user = |kernel: Rc<Kernel>| {
            let dir = self.host.home(kernel.id, None).dir;
            (kernel.event_name(), driver.image_version(&kernel.spec(), &dir))
        };
        Ok(kernels.map(user).chain(self.registry().images_held.borrow().iter().cloned()).collect())
    }
}

fn refuse_used(version: &str, kernels: &[String]) -> Result<()> {
    if kernels.is_empty() {
        return Ok(());
    }
    Err(Error::conflict(format!("image {version} is used by {}", kernels.join(", ")))
        .reason("in_use")
        .hint("remove these kernels, or stop those that name no image"))
}

fn names_of(users: &[(String, String)], version: &str) -> Vec<String> {
    let mut names: Vec<String> =
        users.iter().filter(|(_, image)| image == version).map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}
