//! Saves and loads the engine's state: one object per entry, and one object that lists them.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};

use crate::catalog::{EngineInfo, Entry};
use crate::core::checkpoint::{StatePart, StateParts};
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, ExecId, KernelId};
use crate::core::limits;
use crate::core::spec::Isolation;
use crate::link::host::WorkerLink;
use crate::link::types::{StateBefore, StateChunk, StateHead, StateHeads};
use crate::store::StoreHandle;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::engine_state;

use crate::workspace::SharedBatch;

/// Format of the whole state, as recorded in `engine.db`.
const STATE_FORMAT: u32 = 1;

/// Batch size of bodies that are read from the worker before they are stored, bytes.
const TOGETHER_BYTES: usize = 8 << 20;

/// Asks the engine to save, and stores new entries. Returns the list and its address.
///
/// # Errors
/// Engine errors, `corrupt` if `engine.db` is damaged, and store errors.
pub(super) async fn capture(
    link: &Rc<WorkerLink>,
    store: &StoreHandle,
    objects: &Arc<SharedBatch>,
) -> Result<(StateParts, Digest)> {
    link.save().await?;
    store_entries(link, store, objects, link.state_heads().await?).await
}

/// Stores the state before a running execution, which `engine.db` has until the execution ends. Returns the list and its
/// address; `None`: it has ended.
///
/// # Errors
/// As [`saved_before`], and as [`capture`].
pub(super) async fn capture_before(
    link: &Rc<WorkerLink>,
    store: &StoreHandle,
    objects: &Arc<SharedBatch>,
    exec: ExecId,
) -> Result<Option<(StateParts, Digest)>> {
    let Some(heads) = saved_before(link, exec).await? else { return Ok(None) };
    let stored = store_entries(link, store, objects, heads).await;
    if stored.is_err() && saved_before(link, exec).await?.is_none() {
        // Its end changed what was read.
        return Ok(None);
    }
    stored.map(Some)
}

/// The execution that runs, as the worker knows it.
///
/// # Errors
/// Those of [`WorkerLink::state_heads`].
pub(super) async fn under_way(link: &WorkerLink) -> Result<Option<ExecId>> {
    Ok(link.state_at_boundary().await?.under_way)
}

/// The entries of `engine.db`, if they are the state before a running execution; `None`: it has ended.
///
/// # Errors
/// `unsupported` (`park`) if they are not, or if the worker does not know; those of [`WorkerLink::state_heads`].
pub(super) async fn saved_before(link: &WorkerLink, exec: ExecId) -> Result<Option<Vec<StateHead>>> {
    let StateHeads { heads, under_way, before } = link.state_at_boundary().await?;
    let why = match (before, under_way == Some(exec)) {
        (StateBefore::Unknown, _) => "its worker is of an earlier release",
        (_, false) => return Ok(None),
        (StateBefore::Saved, true) => return Ok(Some(heads)),
        (StateBefore::Unsaved, true) => "what an earlier execution changed could not be saved",
        (StateBefore::Background, true) => {
            "threads, tasks or timers were at work in the engine when it began, and may have changed variables since the \
             last save"
        }
    };
    Err(Error::unsupported(format!("execution {exec} cannot be parked: {why}")).reason("park").hint(
        "take a checkpoint before long executions (`ryokan checkpoint`) and end work beside them, or wait for its end \
         (--wait) or interrupt it (--interrupt)",
    ))
}

async fn store_entries(
    link: &Rc<WorkerLink>,
    store: &StoreHandle,
    objects: &Arc<SharedBatch>,
    heads: Vec<StateHead>,
) -> Result<(StateParts, Digest)> {
    let known = {
        let addresses: Vec<Digest> = heads.iter().map(|head| head.digest).collect();
        store.run(move |store| Ok(addresses.into_iter().map(|at| store.claim(at)).collect::<Vec<_>>())).await?
    };
    let mut fresh: BTreeMap<Digest, Vec<u8>> = BTreeMap::new();
    let mut bytes = 0;
    for head in heads.iter().zip(known).filter_map(|(head, known)| (!known).then_some(head)) {
        let body = link.state_entry(&head.key).await?.body;
        bytes += body.len();
        fresh.insert(head.digest, body);
        if bytes >= TOGETHER_BYTES {
            bytes = 0;
            put_all(store, objects, std::mem::take(&mut fresh)).await?;
        }
    }
    let parts = StateParts { entries: parts(heads)? };
    let list = parts.encode().map_err(|error| Error::refused(error.to_string()).reason("state_size"))?;
    fresh.insert(Digest::from_bytes(*blake3::hash(&list).as_bytes()), list.clone());
    put_all(store, objects, fresh).await?;
    Ok((parts, Digest::from_bytes(*blake3::hash(&list).as_bytes())))
}

/// Stores the state of a kernel without a worker as its last worker stored it. Returns the list and its address.
///
/// # Errors
/// `corrupt` if `engine.db` is damaged, and store errors.
pub(super) async fn capture_stored(
    host: &Host,
    kernel: &Kernel,
    objects: &Arc<SharedBatch>,
) -> Result<(StateParts, Digest)> {
    let state = host.drivers.of(kernel.spec().isolation)?.engine_state(&host.home(kernel.id, None));
    let together = Arc::clone(objects);
    let stored = host.store.run_beside(move |_| {
        let mut entries = Vec::new();
        let read = state.read(&mut |Entry { key, meta_json, body }| {
            let meta = serde_json::from_str(&meta_json)
                .map_err(|error| Error::corrupt(format!("the meta of state entry {key:?}: {error}")))?;
            let bytes = body.len() as u64;
            entries.push(StatePart { key, meta, body: together.put(&body)?, bytes });
            Ok(())
        });
        Ok(read.map(|()| entries))
    });
    let mut entries = stored.await??;
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    let parts = StateParts { entries };
    let list = parts.encode().map_err(|error| Error::refused(error.to_string()).reason("state_size"))?;
    let together = Arc::clone(objects);
    let at = host.store.run_beside(move |_| together.put(&list)).await?;
    Ok((parts, at))
}

fn parts(heads: Vec<StateHead>) -> Result<Vec<StatePart>> {
    let part = |head: StateHead| {
        let meta = serde_json::from_str(&head.meta_json)
            .map_err(|error| Error::corrupt(format!("the meta of state entry {:?}: {error}", head.key)))?;
        Ok(StatePart { key: head.key, meta, body: head.digest, bytes: head.size })
    };
    let mut parts = heads.into_iter().map(part).collect::<Result<Vec<_>>>()?;
    parts.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(parts)
}

async fn put_all(store: &StoreHandle, objects: &Arc<SharedBatch>, bodies: BTreeMap<Digest, Vec<u8>>) -> Result<()> {
    let objects = Arc::clone(objects);
    let put = move |_: &crate::store::Store| {
        for (address, body) in &bodies {
            if objects.put(body)? != *address {
                return Ok(Some(*address));
            }
        }
        Ok(None)
    };
    match store.run(put).await? {
        None => Ok(()),
        Some(address) => Err(Error::corrupt(format!("the state entry of digest {address} is not what was stored"))
            .hint("`ryokan verify` names what is damaged; an earlier checkpoint has it whole")),
    }
}

/// Reads a state list.
///
/// # Errors
/// `corrupt`.
pub(super) async fn list(store: &StoreHandle, at: Digest) -> Result<StateParts> {
    let bytes = store.get(at, limits::MANIFEST_BYTES as u64).await?;
    StateParts::decode(&bytes).map_err(|error| Error::corrupt(format!("list of engine state {at}: {error}")))
}

/// Makes `engine.db` equal to this list; the engine already has this state. Only differences are read and sent.
///
/// # Errors
/// Worker errors and store errors; `engine.db` is unchanged then.
pub(super) async fn revise(link: &Rc<WorkerLink>, store: StoreHandle, wanted: StateParts) -> Result<()> {
    let there: BTreeMap<String, StatePart> =
        parts(link.state_heads().await?)?.into_iter().map(|part| (part.key.clone(), part)).collect();
    let stays = |key: &String| wanted.entries.binary_search_by(|part| part.key.cmp(key)).is_ok();
    let gone = there.keys().filter(|key| !stays(key)).cloned().collect();
    let differs = |part: &StatePart| there.get(&part.key) != Some(part);
    let entries = wanted.entries.iter().filter(|part| differs(part)).cloned().collect();
    link.revise(gone, chunks(store, StateParts { entries })).await
}

/// Splits the entries into chunks that fit a frame; each entry is read on demand.
pub(super) fn chunks(store: StoreHandle, parts: StateParts) -> impl Stream<Item = Result<StateChunk>> {
    futures::stream::iter(parts.entries).flat_map(move |part| {
        let store = store.clone();
        let read = async move {
            let body = match store.get(part.body, limits::STATE_BYTES).await {
                Ok(body) => body,
                Err(error) => return vec![Err(error.into())],
            };
            engine_state::chunks(part.key, part.meta.to_string().into_bytes(), body).collect()
        };
        futures::stream::once(read).flat_map(futures::stream::iter)
    })
}

/// The writer of a checkpoint's state: no manifest records its version, and the engine that reads the state reports its own.
pub(super) fn engine_info(engine: EngineName) -> EngineInfo {
    EngineInfo { name: engine.name().into(), version: String::new(), format: STATE_FORMAT }
}

/// Writes the engine's state to `engine.db`, for the kernel's next worker.
pub(crate) async fn load_engine(
    host: &Host,
    id: KernelId,
    isolation: Isolation,
    engine: EngineName,
    parts: StateParts,
) -> Result<()> {
    if parts.entries.is_empty() {
        return Ok(());
    }
    let state = host.drivers.of(isolation)?.engine_state(&host.home(id, None));
    let info = engine_info(engine);
    let loaded = host.store.run_beside(move |store| {
        let mut entries = parts.entries.into_iter().map(|part| {
            let body = store.get(part.body, limits::STATE_BYTES)?;
            Ok::<_, Error>(Entry { key: part.key, meta_json: part.meta.to_string(), body })
        });
        Ok(state.replace(&info, &mut entries))
    });
    loaded.await?
}
