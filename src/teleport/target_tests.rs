use std::cell::Cell;

use tokio::sync::Notify;

use super::*;
use crate::core::engine::EngineName;
use crate::core::snapshot::PortableKind;
use crate::core::spec::KernelSpec;
use crate::store::Store;

/// A host that checks an offer until it is let go.
struct Slow {
    store: StoreHandle,
    goes_on: Notify,
    sessions: Cell<u32>,
}

#[async_trait(?Send)]
impl TargetHost for Slow {
    fn host(&self) -> HostId {
        HostId::from_bytes([2; 16])
    }

    fn store(&self) -> &StoreHandle {
        &self.store
    }

    async fn admit(&self, _source: HostId, offer: &Offer) -> Result<Admission> {
        self.goes_on.notified().await;
        self.sessions.set(self.sessions.get() + 1);
        let (missing, why) = (Vec::new(), String::new());
        let accept = Accept { missing, kind: offer.kind, why };
        Ok(Admission { accept, reuse: Reuse::All, most_bytes: 0, silence: Rc::default() })
    }

    fn take_room(&self, _handover: HandoverId, _bytes: u64) -> Result<()> {
        Err(Error::internal("nothing arrives"))
    }

    async fn preview(&self, _offer: &Offer, _received: &Received, _tree: Digest) {}

    async fn preview_state(&self, _offer: &Offer, _received: &Received, _list: Digest) {}

    async fn prepare(&self, _source: HostId, _offer: &Offer, _received: &Received, _at: Digest) -> Result<()> {
        Err(Error::internal("nothing arrives"))
    }

    fn end_session(&self, _handover: HandoverId, stored: u64, _whole: Vec<Digest>) {
        assert_eq!(stored, 0);
        self.sessions.set(self.sessions.get() - 1);
    }

    async fn recorded(&self, _handover: HandoverId, _kernel: Option<(KernelId, Epoch)>) -> Result<Target> {
        Ok(Target::Gone)
    }

    async fn activate(&self, _handover: HandoverId, _kernel: Option<(KernelId, Epoch)>) -> Result<()> {
        Err(Error::internal("nothing arrives"))
    }

    async fn discard(&self, _handover: HandoverId) -> Result<()> {
        Ok(())
    }
}

pub(in crate::teleport) fn offer(awaits_admission: bool) -> Offer {
    Offer {
        handover: HandoverId::from_bytes([3; 16]),
        kernel: KernelId::from_bytes([4; 16]),
        epoch: Epoch(2),
        spec: KernelSpec::new("k".parse().expect("a name"), EngineName::Kaish),
        resources: Vec::new(),
        allow_missing: false,
        allowed: Vec::new(),
        format: 1,
        bytes: 0,
        kind: PortableKind::Checkpoint,
        machine: None,
        or_checkpoint: false,
        report_ms: 100,
        awaits_admission,
        group: None,
    }
}

/// What a source gets between its offer and the acceptance.
async fn answers(awaits_admission: bool) -> Vec<Message> {
    let folder = tempfile::tempdir().expect("a folder");
    let store = StoreHandle::new(Store::open(&folder.path().join("store")).expect("a store"));
    let host = Slow { store, goes_on: Notify::new(), sessions: Cell::new(0) };
    let (near, far) = tokio::io::duplex(1 << 16);
    let ((near_read, near_write), (far_read, far_write)) = (tokio::io::split(near), tokio::io::split(far));
    let mut source = Wire::new(near_read, near_write);
    let asks = async {
        source.greet(HostId::from_bytes([1; 16])).await.expect("a greeting");
        source.send(Message::Offer(Box::new(offer(awaits_admission)))).await.expect("sent");
        let mut seen = Vec::new();
        if awaits_admission {
            // Before the check ends, which needs this report.
            seen.push(source.message(limits::HANDOVER_FRAME).await.expect("a report"));
        }
        host.goes_on.notify_one();
        loop {
            match source.message(limits::HANDOVER_FRAME).await.expect("an answer") {
                Message::Accept(_) => break,
                other => seen.push(other),
            }
        }
        drop(source);
        seen
    };
    let (served, seen) = tokio::join!(serve(Wire::new(far_read, far_write), &host), asks);
    served.expect("the source closed the connection");
    assert_eq!(host.sessions.get(), 0);
    seen
}

#[tokio::test]
async fn long_admission_is_reported() {
    let local = tokio::task::LocalSet::new();
    let (reported, former) = local.run_until(async { (answers(true).await, answers(false).await) }).await;
    assert!(!reported.is_empty() && reported.iter().all(|one| matches!(one, Message::Working)), "{reported:?}");
    assert!(former.is_empty(), "a source of an earlier release expects the answer only: {former:?}");
}
