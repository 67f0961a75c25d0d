//! The launch data of a worker's init: the sandbox plan and the document around it.

use std::path::Path;

use ryokan::sandbox::SandboxPlan;

pub fn run(data: &[u8]) {
    let Ok(plan) = serde_json::from_slice::<SandboxPlan>(data) else { return };
    let text = serde_json::to_vec(&plan);
    if let Ok(text) = text {
        assert_eq!(serde_json::from_slice::<SandboxPlan>(&text).ok().as_ref(), Some(&plan));
    }
    if plan.check().is_ok() {
        let ordered = plan.mounts_outermost_first();
        for (i, mount) in ordered.iter().enumerate() {
            assert!(
                !ordered[..i].iter().any(|earlier| earlier.inside.starts_with(&mount.inside)),
                "{:?} would cover a mount that was made before it",
                mount.inside
            );
        }
        let _ = (plan.scratch_bytes(), plan.scratch_files(), plan.whole_cpus());
        let _ = plan.writable_at(Path::new("/workspace/a"));
    }
}
