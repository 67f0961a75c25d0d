//! One machine through the API: the order of its requests.

use std::path::Path;
use std::time::Duration;

use super::api::{
    Api, BackendType, BootSource, CacheType, Drive, MachineConfig, MemoryBackend, SnapshotCreate, SnapshotLoad,
    SnapshotType, State, Vsock, VsockOverride, WantedState,
};
use super::name;
use super::process::file;
use super::process::{DISK, INITRD, KERNEL, LOADED_MEMORY, LOADED_STATE, ROOT, SAVED_MEMORY, SAVED_STATE};
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::isolation::microvm::sockets::VSOCK;
use crate::isolation::microvm::template::Kind;

/// The guest's kernel command line. Without an emulated serial port; a restart of the guest ends the machine.
const KERNEL_LINE: &str = "quiet panic=-1 reboot=k 8250.nr_uarts=0 random.trust_cpu=on mitigations=off cryptomgr.notests raid=noautodetect audit=0 selinux=0 apparmor=0 ima=off";
/// The guest's address. Each process has one guest.
const GUEST_CID: u32 = 3;

/// A machine of a Firecracker process.
#[derive(Debug)]
pub(in crate::isolation::microvm) struct Machine {
    pub(super) api: Api,
}

impl Machine {
    /// The machine of the process behind that API.
    pub(in crate::isolation::microvm) fn new(socket: &Path) -> Machine {
        Machine { api: Api::new(socket) }
    }

    /// Configures a machine of that kind in a new process, and starts it.
    ///
    /// # Errors
    /// Those of the API; `unavailable` if the process is not new or of another version.
    pub(in crate::isolation::microvm) async fn boot(&self, kind: &Kind, durability: Durability) -> Result<()> {
        self.check_new(kind).await?;
        let (kernel, initrd) = (file(KERNEL), file(INITRD));
        let source = BootSource { kernel_image_path: &kernel, initrd_path: &initrd, boot_args: KERNEL_LINE };
        self.api.set_boot_source(&source).await?;
        let (vcpu_count, mem_size_mib) = (kind.processors, kind.memory_mib);
        let machine = MachineConfig { vcpu_count, mem_size_mib, smt: false, track_dirty_pages: false };
        self.api.set_machine(&machine).await?;
        // The host's page cache outlives the machine: a flush reaches the device only where a loss of power counts.
        let disk_cache = match durability {
            Durability::Process => CacheType::Unsafe,
            Durability::Power => CacheType::Writeback,
        };
        // The guest names them in this order.
        for (drive_id, number, is_read_only, cache_type) in
            [("root", ROOT, true, CacheType::Unsafe), ("disk", DISK, false, disk_cache)]
        {
            let path = file(number);
            let is_root_device = false;
            let drive = Drive { drive_id, path_on_host: &path, is_root_device, is_read_only, cache_type };
            self.api.set_drive(&drive).await?;
        }
        self.api.set_vsock(&Vsock { guest_cid: GUEST_CID, uds_path: VSOCK }).await?;
        self.api.set_entropy().await?;
        Ok(self.api.start().await?)
    }

    /// Loads a saved machine of that kind into a new process, and leaves it paused.
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub(in crate::isolation::microvm) async fn load(&self, kind: &Kind, within: Duration) -> Result<()> {
        self.check_new(kind).await?;
        let (state, memory) = (file(LOADED_STATE), file(LOADED_MEMORY));
        let snapshot = SnapshotLoad {
            snapshot_path: &state,
            mem_backend: MemoryBackend { backend_type: BackendType::File, backend_path: &memory },
            vsock_override: VsockOverride { uds_path: VSOCK },
            track_dirty_pages: false,
            resume_vm: false,
            clock_realtime: true,
        };
        self.api.load_snapshot(&snapshot, within).await?;
        match self.is_paused().await? {
            true => Ok(()),
            false => Err(Error::unavailable("a restored machine runs already")),
        }
    }

    /// Pauses the processors.
    ///
    /// # Errors
    /// Those of the API; `unavailable` if they run on.
    pub(in crate::isolation::microvm) async fn pause(&self) -> Result<()> {
        self.api.set_state(WantedState::Paused).await?;
        match self.is_paused().await? {
            true => Ok(()),
            false => Err(Error::unavailable("a machine that was paused runs on")),
        }
    }

    /// Resumes the processors.
    ///
    /// # Errors
    /// Those of the API.
    pub(in crate::isolation::microvm) async fn resume(&self) -> Result<()> {
        Ok(self.api.set_state(WantedState::Resumed).await?)
    }

    /// Whether the processors are paused.
    ///
    /// # Errors
    /// Those of the API.
    pub(in crate::isolation::microvm) async fn is_paused(&self) -> Result<bool> {
        Ok(self.api.describe().await?.state == State::Paused)
    }

    /// As [`Self::is_paused`], where a save may be under way: requests are answered one after the other.
    ///
    /// # Errors
    /// Those of the API.
    pub(in crate::isolation::microvm) async fn is_paused_after_save(&self) -> Result<bool> {
        Ok(self.api.describe_within(limits::VM_MEMORY).await?.state == State::Paused)
    }

    /// Saves the paused machine into the files that its process was started with.
    ///
    /// # Errors
    /// Those of the API.
    pub(in crate::isolation::microvm) async fn save(&self, within: Duration) -> Result<()> {
        let (state, memory) = (file(SAVED_STATE), file(SAVED_MEMORY));
        let (snapshot_path, mem_file_path) = (state.as_str(), memory.as_str());
        let snapshot = SnapshotCreate { snapshot_type: SnapshotType::Full, snapshot_path, mem_file_path };
        Ok(self.api.create_snapshot(&snapshot, within).await?)
    }

    /// Waits for a process that starts, and checks that it is new and of the kind's version.
    async fn check_new(&self, kind: &Kind) -> Result<()> {
        self.api.listening().await?;
        let found = self.api.describe().await?;
        if name(&found.vmm_version) != kind.vmm {
            let found: String = found.vmm_version.chars().take(100).collect();
            return Err(Error::unavailable(format!("Firecracker {found} runs in place of {}", kind.vmm)));
        }
        match found.state {
            State::NotStarted => Ok(()),
            State::Running | State::Paused => {
                Err(Error::unavailable("a new Firecracker process has a machine already"))
            }
        }
    }
}
