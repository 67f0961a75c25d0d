//! The speed of KVM: the time that a guest of a few instructions needs.
//!
//! `/dev/kvm` alone says little: inside some virtual machines it exists, and each guest instruction that matters is
//! emulated. A loop of known length tells them apart.

use std::io;
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

/// The stable version of the interface.
const API: i32 = 12;
/// Memory of the guest: page tables and code.
const MEMORY_BYTES: usize = 64 << 10;
/// Where the tables of the four levels' upper three begin, and the code.
const TABLES: [u64; 3] = [0x1000, 0x2000, 0x3000];
const CODE_AT: u64 = 0x4000;
/// `mov ecx, 20000; dec ecx; jnz; hlt`.
const CODE: [u8; 10] = [0xb9, 0x20, 0x4e, 0, 0, 0xff, 0xc9, 0x75, 0xfc, 0xf4];

/// Runs a guest with a loop of 20,000 rounds; returns the shortest of three times.
///
/// A host whose KVM does not work may not return: call it in a process that a deadline ends.
///
/// # Errors
/// Those of opening `/dev/kvm` and of the calls; `Unsupported` for another interface or another end of the guest.
pub fn loop_time() -> io::Result<Duration> {
    let kvm = Kvm::new().map_err(from_errno)?;
    if kvm.get_api_version() != API {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "another version of the interface"));
    }
    let mut best = Duration::MAX;
    for _ in 0..3 {
        best = best.min(run(&kvm)?);
    }
    Ok(best)
}

/// A guest's memory; unmapped with it.
struct Memory(*mut libc::c_void);

impl Memory {
    fn new() -> io::Result<Memory> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address that the host kernel chooses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), MEMORY_BYTES, access, flags, -1, 0) };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Memory(at)) }
    }

    fn write(&mut self, at: u64, bytes: &[u8]) {
        let at = usize::try_from(at).expect("it is small");
        assert!(at + bytes.len() <= MEMORY_BYTES, "it is within the memory");
        // SAFETY: within the mapping, which nothing else uses while no guest runs.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.cast::<u8>().add(at), bytes.len()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nothing refers to it: the guest's descriptors are closed before.
        let _ = unsafe { libc::munmap(self.0, MEMORY_BYTES) };
    }
}

fn run(kvm: &Kvm) -> io::Result<Duration> {
    let mut memory = Memory::new()?;
    // The first 2 MiB, each address as itself: present and writable, the last table with one large page.
    memory.write(TABLES[0], &(TABLES[1] | 0b11).to_le_bytes());
    memory.write(TABLES[1], &(TABLES[2] | 0b11).to_le_bytes());
    memory.write(TABLES[2], &0b1000_0011u64.to_le_bytes());
    memory.write(CODE_AT, &CODE);
    // Without an interrupt controller in the host kernel `hlt` ends the run.
    let vm = kvm.create_vm().map_err(from_errno)?;
    let mut cpu = set_up(&vm, &memory)?;
    let began = Instant::now();
    let ended = loop {
        match cpu.run() {
            Err(error) if error.errno() == libc::EINTR => {}
            ended => break ended.map_err(from_errno)?,
        }
    };
    match ended {
        VcpuExit::Hlt => Ok(began.elapsed()),
        other => Err(io::Error::new(io::ErrorKind::Unsupported, format!("the guest ended with {other:?}"))),
    }
}

fn set_up(vm: &VmFd, memory: &Memory) -> io::Result<VcpuFd> {
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: MEMORY_BYTES as u64,
        userspace_addr: memory.0 as u64,
    };
    // SAFETY: the memory is mapped until the guest is gone.
    unsafe { vm.set_user_memory_region(region) }.map_err(from_errno)?;
    let cpu = vm.create_vcpu(0).map_err(from_errno)?;
    let mut special = cpu.get_sregs().map_err(from_errno)?;
    let code =
        kvm_segment { limit: u32::MAX, selector: 8, type_: 11, present: 1, s: 1, l: 1, g: 1, ..kvm_segment::default() };
    let data = kvm_segment { selector: 16, type_: 3, l: 0, db: 1, ..code };
    special.cs = code;
    for segment in [&mut special.ds, &mut special.es, &mut special.fs, &mut special.gs, &mut special.ss] {
        *segment = data;
    }
    // Long mode: paging with protection, physical addresses of 64 bits, and the mode enabled and active.
    special.cr3 = TABLES[0];
    special.cr4 = 1 << 5;
    special.cr0 = (1 << 31) | (1 << 4) | 1;
    special.efer = (1 << 8) | (1 << 10);
    cpu.set_sregs(&special).map_err(from_errno)?;
    // The second bit of the flags is always set.
    cpu.set_regs(&kvm_regs { rip: CODE_AT, rflags: 2, ..kvm_regs::default() }).map_err(from_errno)?;
    Ok(cpu)
}

fn from_errno(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}
