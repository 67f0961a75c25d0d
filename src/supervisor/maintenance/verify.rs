//! Verification: reads everything, and reports damaged objects with the data lost because of them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use tokio::sync::mpsc;

use super::marks::walk;
use super::roots::{self, Named, Root};
use super::{Running, is_gone, relay};
use crate::catalog::Inspected;
use crate::catalog::state::RootKind;
use crate::core::audit::NewAudit;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::{Digest, KernelId};
use crate::core::kernel::State;
use crate::core::limits;
use crate::core::upkeep::{AUDIT_GAP, Affected, Damage, VerifyEvent, VerifyProgress, VerifyReport};
use crate::store::{Store, StoreError};
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;
use crate::workspace::Seen;

/// Number of attempts on a database that is opened during its check.
const LOOKS: u32 = 5;

/// Reads all data and reports damage to `take`.
///
/// # Errors
/// `busy` if another run is in progress; a failure to read at all; `take`'s.
pub async fn verify(
    supervisor: &Supervisor,
    actor: &Actor,
    take: impl AsyncFnMut(VerifyEvent) -> Result<()>,
) -> Result<VerifyReport> {
    let host = supervisor.host();
    let (tell, items) = mpsc::channel(limits::UPKEEP_QUEUE);
    let (of, who) = (supervisor.clone(), actor.clone());
    let running = Running::begin(host)?;
    let work = tokio::task::spawn_local(async move {
        let _running = running;
        let done = perform(&of, &tell).await;
        if let Ok(done) = &done {
            let detail = format!("{} objects, {} damaged", done.objects, done.damaged);
            of.host().write_audit(NewAudit { detail, ..of.host().line(&who, "host.verify", None) }).await;
        }
        done
    });
    relay(items, take, work).await
}

/// Reports damage.
struct Reporter<'a> {
    tell: &'a mpsc::Sender<VerifyEvent>,
    damaged: u64,
}

impl Reporter<'_> {
    /// Reports missing lines of the audit log, which are no damage.
    async fn gap(&self, name: String, why: String) {
        let gap = Damage { what: AUDIT_GAP.into(), name, why, affects: Vec::new() };
        let _ = self.tell.send(VerifyEvent::Damage(gap)).await;
    }

    async fn damage(&mut self, what: &str, name: String, why: String, affects: Vec<Affected>) {
        self.damaged += 1;
        let damage = Damage { what: what.into(), name, why, affects };
        tracing::error!(what, name = damage.name, why = damage.why, "damage was found");
        // The client may have disconnected; the count stays.
        let _ = self.tell.send(VerifyEvent::Damage(damage)).await;
    }
}

async fn perform(supervisor: &Supervisor, tell: &mpsc::Sender<VerifyEvent>) -> Result<VerifyReport> {
    let host = supervisor.host();
    let mut reporter = Reporter { tell, damaged: 0 };
    let mut done = VerifyReport::default();
    databases(supervisor, &mut reporter, &mut done).await?;
    let progress_to = tell.clone();
    let verified = host.store.run_beside(move |store| {
        store.verify(|progress| {
            // Dropped if the queue is full; a later report follows.
            let (packs, of_packs) = (progress.packs as u64, progress.of_packs as u64);
            let at = VerifyProgress { packs, of_packs, bytes: progress.bytes };
            let _ = progress_to.try_send(VerifyEvent::Progress(at));
        })
    });
    let verified = verified.await?;
    (done.objects, done.bytes) = (verified.good, verified.bytes);
    references(supervisor, verified.damaged, &mut reporter, &mut done).await?;
    Ok(VerifyReport { damaged: reporter.damaged, ..done })
}

async fn databases(supervisor: &Supervisor, reporter: &mut Reporter<'_>, done: &mut VerifyReport) -> Result<()> {
    let host = supervisor.host();
    if let Err(error) = host.catalog.check().await {
        let everything = vec![Affected { kernel: String::new(), what: "all".into(), name: String::new() }];
        reporter.damage("database", "catalog.db".into(), error.to_string(), everything).await;
    }
    match supervisor.verify_audit(None).await {
        Ok(Ok(_)) => {}
        Ok(Err(gap)) if gap.is_gap => reporter.gap(format!("line {}", gap.sequence), gap.why).await,
        Ok(Err(broken)) => {
            reporter.damage("audit log", format!("line {}", broken.sequence), broken.why, Vec::new()).await
        }
        Err(error) => reporter.damage("audit log", "audit.head".into(), error.message, Vec::new()).await,
    }
    for kernel in supervisor.kernels() {
        let all = || vec![Affected { kernel: kernel.event_name(), what: "all".into(), name: String::new() }];
        let files = host.catalog.kernel_files(kernel.id);
        match host.catalog.state(kernel.id).check().await {
            Ok(()) => {}
            Err(_) if is_gone(supervisor, kernel.id) => continue,
            Err(error) => {
                reporter.damage("database", files.state_db.display().to_string(), error.to_string(), all()).await
            }
        }
        match engine_db(host, &kernel).await {
            Ok(()) => done.kernels += 1,
            // An archived kernel has no database: its state is in the checkpoint.
            Err(_) if kernel.archived_in().is_some() || kernel.check_here().is_err() => done.kernels += 1,
            Err(_) if is_gone(supervisor, kernel.id) => {}
            Err(error) => {
                reporter.damage("database", files.engine_db.display().to_string(), error.message, all()).await;
            }
        }
    }
    Ok(())
}

/// Checks a kernel's engine state, through the worker that has it open or in the closed database.
async fn engine_db(host: &Host, kernel: &Kernel) -> Result<()> {
    for _ in 0..LOOKS {
        if kernel.is_parked() {
            tracing::info!(kernel = %kernel.spec().name, "the engine state of a suspended machine is not verified");
            return Ok(());
        }
        let link = kernel.link.borrow().clone();
        if let Some(link) = link {
            match through(&link).await {
                // The worker ended meanwhile.
                Err(error) if matches!(error.code, ErrorCode::Lost | ErrorCode::Unavailable | ErrorCode::NotFound) => {}
                looked => return looked,
            }
        } else {
            let state = host.drivers.of(kernel.spec().isolation)?.engine_state(&host.home(kernel.id, None));
            let looked = tokio::task::spawn_blocking(move || state.inspect());
            match looked.await.map_err(|error| Error::internal(error.to_string()))? {
                Ok(Inspected::Sound) => return Ok(()),
                Ok(Inspected::InUse) => {}
                // A worker that is starting reads the same state and reports its damage.
                Err(_) if kernel.link.borrow().is_some() || matches!(kernel.view().state, State::Starting) => {}
                Err(error) => return Err(error),
            }
        }
        tokio::time::sleep(limits::RESTART_BACKOFF_FIRST).await;
    }
    // The database is opened and closed constantly; each opening worker checks it.
    Ok(())
}

async fn through(link: &crate::link::host::WorkerLink) -> Result<()> {
    for head in link.state_heads().await? {
        let entry = match link.state_entry(&head.key).await {
            Ok(entry) => entry,
            // The code changed its state meanwhile.
            Err(error) if error.code == ErrorCode::NotFound => continue,
            Err(error) => return Err(error),
        };
        let found = Digest::from_bytes(*blake3::hash(&entry.body).as_bytes());
        let changed = || async {
            let heads = link.state_heads().await?;
            Ok::<_, Error>(heads.iter().any(|now| now.key == head.key && now.digest != head.digest))
        };
        if found != head.digest && !changed().await? {
            return Err(Error::corrupt(format!("the body of {:?} is not what was stored", head.key)));
        }
    }
    Ok(())
}

/// Checks every referenced object, and reports who needs the damaged or missing ones.
async fn references(
    supervisor: &Supervisor,
    damaged: Vec<StoreError>,
    reporter: &mut Reporter<'_>,
    done: &mut VerifyReport,
) -> Result<()> {
    let host = supervisor.host();
    let mut whys: BTreeMap<Digest, String> = BTreeMap::new();
    for error in damaged {
        match error.digest() {
            Some(digest) => drop(whys.insert(digest, error.to_string())),
            None => reporter.damage("pack", pack_of(&error), error.to_string(), Vec::new()).await,
        }
    }
    let roots: Vec<(KernelId, String, Named, Digest)> = listed(supervisor, reporter)
        .await
        .into_iter()
        .map(|root| (root.kernel, root.name.to_string(), root.named, root.digest))
        .collect();
    let bad: HashSet<Digest> = whys.keys().copied().collect();
    let looked = host.store.run_beside(move |store| Ok(look(store, &roots, &bad))).await?;
    let Found { hits, whole } = looked;
    done.checkpoints = whole;
    // A reference removed meanwhile is no damage.
    let still: HashSet<(KernelId, Named, Digest)> =
        listed(supervisor, reporter).await.into_iter().map(|root| (root.kernel, root.named, root.digest)).collect();
    let mut affects: HashMap<Digest, BTreeSet<Affected>> = HashMap::new();
    for hit in hits.into_iter().filter(|hit| still.contains(&(hit.kernel, hit.named, hit.root))) {
        whys.entry(hit.object).or_insert(hit.why);
        affects.entry(hit.object).or_default().insert(affected(hit.name, hit.named, hit.root));
    }
    for (digest, why) in whys {
        let affects = affects.remove(&digest).unwrap_or_default().into_iter().collect();
        reporter.damage("object", digest.to_string(), why, affects).await;
    }
    Ok(())
}

/// The roots of every kernel with readable rows; damage to other kernels was reported already.
async fn listed(supervisor: &Supervisor, reporter: &mut Reporter<'_>) -> Vec<Root> {
    match roots::list_readable(supervisor).await {
        Ok(roots) => roots,
        Err(error) => {
            reporter.damage("database", "catalog.db".into(), error.message, Vec::new()).await;
            Vec::new()
        }
    }
}

fn pack_of(error: &StoreError) -> String {
    match error {
        StoreError::Pack { path } | StoreError::Index { path } => path.display().to_string(),
        other => other.to_string(),
    }
}

fn affected(kernel: String, named: Named, root: Digest) -> Affected {
    let (what, name) = match named {
        Named::Row(RootKind::Checkpoint { number }) => ("checkpoint", number.to_string()),
        Named::Row(RootKind::Blob) => ("blob", root.to_string()),
        Named::Row(RootKind::Output { exec }) => ("output", exec.to_string()),
        Named::Files => ("files", String::new()),
        Named::Freeze { number } => ("freeze", number.to_string()),
    };
    Affected { kernel, what: what.into(), name }
}

/// A root that needs a damaged or missing object.
struct Hit {
    kernel: KernelId,
    name: String,
    named: Named,
    root: Digest,
    object: Digest,
    why: String,
}

struct Found {
    hits: Vec<Hit>,
    /// The number of complete checkpoints.
    whole: u64,
}

/// Walks all roots together first, so that shared objects are checked once; walks each root separately only after a
/// failure.
fn look(store: &Store, roots: &[(KernelId, String, Named, Digest)], bad: &HashSet<Digest>) -> Found {
    let is_checkpoint = |named: &Named| matches!(named, Named::Row(RootKind::Checkpoint { .. }));
    let (mut seen, mut wrong) = (Seen::default(), false);
    for (_, _, named, digest) in roots {
        let mut object = |object: Digest| wrong |= bad.contains(&object) || !store.contains(object);
        wrong |= walk(store, *named, *digest, &mut seen, &mut object).is_err();
        if wrong {
            break;
        }
    }
    drop(seen);
    let mut found = Found { hits: Vec::new(), whole: 0 };
    for (kernel, name, named, root) in roots {
        let mut needs: Vec<(Digest, String)> = Vec::new();
        if wrong {
            let mut object = |object: Digest| {
                if bad.contains(&object) {
                    needs.push((object, String::new()));
                } else if !store.contains(object) {
                    needs.push((object, "it is missing".into()));
                }
            };
            let walked = walk(store, *named, *root, &mut Seen::default(), &mut object);
            if let Err(error) = walked {
                let object = error.reason.parse().unwrap_or(*root);
                if !needs.iter().any(|(known, _)| *known == object) {
                    needs.push((object, error.message));
                }
            }
        }
        found.whole += u64::from(needs.is_empty() && is_checkpoint(named));
        found.hits.extend(needs.into_iter().map(|(object, why)| Hit {
            kernel: *kernel,
            name: name.clone(),
            named: *named,
            root: *root,
            object,
            why,
        }));
    }
    found
}
