//! The templates of a host: found, built in the background, rebuilt beside their use, counted, removed.
//!
//! ```text
//!  templates/KEY/  ── description and digests are right ─▶ open descriptors ─▶ private copies of the memory
//!   there is none, or it is damaged ─▶ build ─▶ publish
//!   it is in use and old ─▶ build beside it ─▶ publish in its place: machines of the old one have its files open
//!                              └ failed: the old one stays, with its age; tried again later
//! ```
//!
//! When a template is rebuilt is decided in `core::pool::refresh`. `builder.rs` makes templates, `template_folder.rs`
//! knows their names.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::builder::{Builder, Built};
use super::description::Unusable;
use super::image::Image;
use super::notes::Notes;
use super::template::{Kind, Template};
use super::template_folder::{self as folder, publish};
use super::vmm::Vmms;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::pool::{Attempt, Refresh, RefreshRules, RefreshTime, TemplateAge, refresh};
use crate::isolation::Deferral;
use crate::isolation::cgroups::Cgroups;
use crate::sys::{clock, fs};

/// What is known of a kind's template.
enum Known {
    Ready(Box<Ready>),
    Building,
    /// When, and why.
    Failed(Instant, String),
}

/// A template in use.
struct Ready {
    template: Rc<Template>,
    kind: Kind,
    image: Image,
    attempt: Attempt,
}

/// The settings of templates.
pub(super) struct TemplateSettings {
    pub folder: PathBuf,
    pub sockets: PathBuf,
    /// Uid and gid of the monitor, in a daemon that is root.
    pub account: Option<(u32, u32)>,
    /// The machines' cgroups, where they are delegated.
    pub cgroups: Option<Cgroups>,
    /// When they are rebuilt.
    pub refresh: RefreshRules,
}

/// The templates of a host.
pub(super) struct Templates {
    folder: PathBuf,
    rules: RefreshRules,
    builder: Builder,
    known: RefCell<HashMap<String, Known>>,
    /// One template is verified at a time.
    turn: tokio::sync::Mutex<()>,
    notes: Rc<Notes>,
    is_swept: Cell<bool>,
    is_kept_fresh: Cell<bool>,
    began: Instant,
    deferral: RefCell<Option<Deferral>>,
    /// Notified after each build.
    built: tokio::sync::watch::Sender<()>,
    /// Notified when the next rebuild must be decided again.
    changed: Rc<tokio::sync::Notify>,
}

impl Templates {
    pub(super) fn new(settings: TemplateSettings, vmms: Rc<Vmms>, notes: Rc<Notes>) -> Rc<Templates> {
        let TemplateSettings { folder, sockets, account, cgroups, refresh } = settings;
        Rc::new(Templates {
            folder: folder.clone(),
            rules: refresh,
            builder: Builder { folder, sockets, account, cgroups, vmms },
            known: RefCell::default(),
            turn: tokio::sync::Mutex::default(),
            notes,
            is_swept: Cell::new(false),
            is_kept_fresh: Cell::new(false),
            began: Instant::now(),
            deferral: RefCell::default(),
            built: tokio::sync::watch::Sender::new(()),
            changed: Rc::default(),
        })
    }

    /// Sets what defers rebuilds.
    pub(super) fn defer_by(&self, deferral: Deferral) {
        self.deferral.replace(Some(deferral));
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn note(&self, kind: &Kind, event: &'static str, detail: String) {
        self.notes.add(Some(kind.engine), event, detail);
    }

    fn ready(&self, key: String, template: Rc<Template>, kind: &Kind, image: &Image, attempt: Attempt) {
        let ready = Ready { template, kind: kind.clone(), image: image.clone(), attempt };
        self.known.borrow_mut().insert(key, Known::Ready(Box::new(ready)));
        self.changed.notify_one();
    }

    /// The template of a kind; an error says why a machine boots instead.
    pub(super) async fn find(&self, kind: &Kind, image: &Image) -> std::result::Result<Rc<Template>, String> {
        let key = kind.key().map_err(|error| error.message)?;
        let _turn = self.turn.lock().await;
        match self.known.borrow().get(&key) {
            Some(Known::Ready(ready)) => return Ok(Rc::clone(&ready.template)),
            Some(Known::Building) => return Err(String::from("its template is being built")),
            Some(Known::Failed(at, why)) if at.elapsed() < limits::VM_TEMPLATE_RETRY => return Err(why.clone()),
            Some(Known::Failed(..)) | None => {}
        }
        self.sweep();
        let (folder, about) = (self.folder.join(&key), kind.clone());
        let opened = tokio::task::spawn_blocking(move || Template::open(&folder, &about)).await;
        match opened.map_err(|error| error.to_string())? {
            Ok(Some(template)) => {
                let template = Rc::new(template);
                self.ready(key, Rc::clone(&template), kind, image, Attempt::Never);
                Ok(template)
            }
            Ok(None) => Err(String::from("there is no template of it yet")),
            Err(unusable) => {
                let event = match &unusable {
                    Unusable::Damaged(_) => "template_damaged",
                    Unusable::OtherFormat(_) => "template_outdated",
                };
                let why = format!("its template {key} cannot be used: {unusable}");
                tracing::warn!(why, "a template of virtual machines is built again");
                self.note(kind, event, why.clone());
                Err(why)
            }
        }
    }

    /// The template of a kind, built first if there is none: a machine that nothing waits for yet need not boot.
    pub(super) async fn find_or_build(
        self: &Rc<Self>,
        kind: &Kind,
        image: &Image,
    ) -> std::result::Result<Rc<Template>, String> {
        let key = kind.key().map_err(|error| error.message)?;
        let mut built = self.built.subscribe();
        if let Ok(template) = self.find(kind, image).await {
            return Ok(template);
        }
        self.build_soon(kind.clone(), image.clone());
        while matches!(self.known.borrow().get(&key), Some(Known::Building)) {
            // The sender is borrowed, so it does not close. Each step of a build has a deadline.
            let _ = built.changed().await;
        }
        self.find(kind, image).await
    }

    /// Notes that a machine was restored from a template.
    pub(super) fn served(&self, template: &Template) {
        if template.served() {
            self.changed.notify_one();
        }
    }

    /// Notes that a machine could not be restored from a template, and returns why it boots instead. A busy host or the
    /// end of one machine is no fault of the template: it is removed after several failures in a row, and built again.
    pub(super) fn note_failure(&self, kind: &Kind, template: &Template, error: &Error) -> String {
        let why = format!("no machine can be restored from its template: {}", error.message);
        let Ok(key) = kind.key() else { return why };
        if template.failed() < limits::VM_TEMPLATE_FAILURES {
            tracing::warn!(key, why, "a virtual machine boots instead");
            return why;
        }
        // The failures may be those of a template that was replaced meanwhile.
        let is_current = match self.known.borrow().get(&key) {
            Some(Known::Ready(ready)) => std::ptr::eq(&*ready.template, template),
            Some(Known::Building | Known::Failed(..)) | None => false,
        };
        if is_current {
            let _ = fs::remove_tree(&self.folder.join(&key));
            self.note(kind, "template_damaged", why.clone());
            self.known.borrow_mut().insert(key, Known::Failed(Instant::now(), why.clone()));
        }
        why
    }

    /// Forgets that a template could not be built: what prevented it may be over.
    pub(super) fn forget_failure(&self, kind: &Kind) {
        let Ok(key) = kind.key() else { return };
        let mut known = self.known.borrow_mut();
        if matches!(known.get(&key), Some(Known::Failed(..))) {
            known.remove(&key);
        }
    }

    /// Builds a template in the background, unless it is known already.
    pub(super) fn build_soon(self: &Rc<Self>, kind: Kind, image: Image) {
        let Ok(key) = kind.key() else { return };
        match self.known.borrow().get(&key) {
            Some(Known::Ready(_) | Known::Building) => return,
            Some(Known::Failed(at, _)) if at.elapsed() < limits::VM_TEMPLATE_RETRY => return,
            Some(Known::Failed(..)) | None => {}
        }
        self.known.borrow_mut().insert(key.clone(), Known::Building);
        let templates = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let began = Instant::now();
            match templates.build(&key, &kind, &image, None).await {
                Ok(template) => {
                    let took = began.elapsed().as_millis();
                    templates.note(&kind, "template_built", format!("{key} in {took} ms"));
                    templates.ready(key, template, &kind, &image, Attempt::Never);
                }
                Err(error) => {
                    let why = format!("its template cannot be built: {error}");
                    tracing::warn!(why, "virtual machines boot instead");
                    templates.known.borrow_mut().insert(key, Known::Failed(Instant::now(), why));
                }
            }
            templates.built.send_replace(());
        });
    }

    async fn build(&self, key: &str, kind: &Kind, image: &Image, replaced: Option<&Template>) -> Result<Rc<Template>> {
        let Built { place, template, copies_by_stream } = self.builder.build(kind, image, replaced).await?;
        if !self.known.borrow().contains_key(key) {
            return Err(Error::unavailable("its image was removed meanwhile"));
        }
        if let Some(why) = copies_by_stream {
            self.note(kind, "copies_by_stream", format!("{key}: {why}"));
        }
        let (templates, name) = (self.folder.clone(), key.to_owned());
        let kept = self.serving(key);
        let published = tokio::task::spawn_blocking(move || {
            publish(&place.0, &templates.join(&name))?;
            folder::prune(&templates, &kept);
            Ok::<_, Error>(())
        });
        published.await.map_err(|error| Error::internal(error.to_string()))??;
        Ok(Rc::new(template))
    }

    /// The templates that machines of this daemon share, and the one with that key.
    fn serving(&self, key: &str) -> Vec<String> {
        let known = self.known.borrow();
        let used = known.iter().filter_map(|(other, known)| match known {
            Known::Ready(ready) if ready.template.is_used() && other != key => Some(other.clone()),
            Known::Ready(_) | Known::Building | Known::Failed(..) => None,
        });
        used.chain([key.to_owned()]).collect()
    }

    /// Rebuilds templates beside their use, as their rules say, while the daemon runs.
    pub(super) fn keep_fresh(self: &Rc<Self>) {
        if self.is_kept_fresh.replace(true) {
            return;
        }
        let (templates, changed) = (Rc::downgrade(self), Rc::clone(&self.changed));
        tokio::task::spawn_local(async move {
            while let Some(templates) = templates.upgrade() {
                let wait_ms = match templates.next_refresh() {
                    Ok(key) => {
                        templates.rebuild(&key).await;
                        continue;
                    }
                    Err(wait_ms) => wait_ms,
                };
                drop(templates);
                match wait_ms.map(Duration::from_millis) {
                    Some(wait) => {
                        // The wall clock may be set meanwhile.
                        let _ = tokio::time::timeout(wait.min(limits::VM_TEMPLATE_REFRESH), changed.notified()).await;
                    }
                    None => changed.notified().await,
                }
            }
        });
    }

    /// The template to rebuild now, or the time until the next decision.
    fn next_refresh(&self) -> std::result::Result<String, Option<u64>> {
        let known = self.known.borrow();
        let in_use = known.iter().filter_map(|(key, known)| match known {
            Known::Ready(ready) => Some((key, ready)),
            Known::Building | Known::Failed(..) => None,
        });
        let (keys, ages): (Vec<&String>, Vec<TemplateAge>) = in_use
            .map(|(key, ready)| {
                let (created_at_ms, is_used) = (ready.template.created_at_ms(), ready.template.is_used());
                (key, TemplateAge { created_at_ms, is_used, attempt: ready.attempt })
            })
            .unzip();
        let time = RefreshTime { wall_ms: clock::now_ms(), now_ms: self.now_ms() };
        match refresh(&self.rules, &ages, time) {
            // An old template serves; the machine of a new one takes memory.
            Refresh::Rebuild(at) => match self.deferral.borrow().as_ref().and_then(|deferral| deferral()) {
                Some(left) => Err(Some(u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1))),
                None => keys.get(at).map(|key| (*key).clone()).ok_or(None),
            },
            Refresh::Wait(wait_ms) => Err(wait_ms),
        }
    }

    /// Rebuilds a template, which stays in use until the new one has its name, or for longer if that fails.
    async fn rebuild(&self, key: &str) {
        let (began, began_ms) = (Instant::now(), self.now_ms());
        let (old, kind, image) = match self.known.borrow_mut().get_mut(key) {
            Some(Known::Ready(ready)) => {
                ready.attempt = Attempt::Running;
                (Rc::clone(&ready.template), ready.kind.clone(), ready.image.clone())
            }
            Some(Known::Building | Known::Failed(..)) | None => return,
        };
        let built = self.build(key, &kind, &image, Some(&old)).await;
        let (took, attempt) = (began.elapsed().as_millis(), Attempt::Ended { began_ms });
        match built {
            Ok(template) => {
                self.note(&kind, "template_refreshed", format!("{key} in {took} ms, in place of {}", old.id()));
                self.ready(key.to_owned(), template, &kind, &image, attempt);
            }
            Err(error) => {
                match self.known.borrow_mut().get_mut(key) {
                    Some(Known::Ready(ready)) => ready.attempt = attempt,
                    Some(Known::Building | Known::Failed(..)) => {}
                    // Nothing starts from it any more.
                    None => return,
                }
                let why = format!("{key} cannot be rebuilt, and stays in use: {error}");
                tracing::warn!(why, "an old template of virtual machines");
                self.note(&kind, "template_refresh_failed", why);
            }
        }
    }

    /// Removes the templates of an image that is no more.
    pub(super) fn forget_image(&self, version: &str) {
        self.known.borrow_mut().retain(|_, known| match known {
            Known::Ready(ready) => ready.kind.image != version,
            Known::Building | Known::Failed(..) => true,
        });
        for (name, place) in folder::of_image(&self.folder, version) {
            self.known.borrow_mut().remove(&name);
            let _ = fs::remove_tree(&place);
        }
    }

    /// Removes what a former daemon did not finish, and reports what is no template, once.
    pub(super) fn sweep(&self) {
        if self.is_swept.replace(true) {
            return;
        }
        let skipped = folder::sweep(&self.folder);
        if let Some(report) = folder::report(&self.folder, &skipped) {
            tracing::warn!(report, "the folder of templates has other entries");
            self.notes.add(None, "templates_skipped", report);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use futures::FutureExt as _;

    use super::super::image;
    use super::super::image::tests::write_image;
    use super::super::template::tests::{kind, template};
    use super::super::vmm::tests::vmms;
    use super::*;
    use crate::core::vmm::WantedVmm;
    use crate::link::bootstrap::BUILD;
    use crate::sys::fault::tests::with_fault;

    const RULES: RefreshRules = RefreshRules { max_age_ms: Some(60_000), interval_ms: 60_000 };

    fn templates(folder: &Path) -> (Rc<Templates>, Rc<Notes>) {
        templates_by(folder, RULES)
    }

    fn templates_by(folder: &Path, refresh: RefreshRules) -> (Rc<Templates>, Rc<Notes>) {
        let (place, sockets, notes) = (folder.join("templates"), folder.to_owned(), Rc::new(Notes::default()));
        let settings = TemplateSettings { folder: place, sockets, account: None, cgroups: None, refresh };
        (Templates::new(settings, vmms(WantedVmm::Qemu, None), Rc::clone(&notes)), notes)
    }

    /// A template, and the image that it is of.
    fn made(folder: &Path) -> (PathBuf, Image) {
        std::fs::create_dir(folder.join("templates")).expect("a folder");
        write_image(&folder.join("images"), "abc", "abc", BUILD);
        let image = image::find(&folder.join("images"), "abc").expect("an image");
        (template(&folder.join("templates"), &kind()), image)
    }

    #[tokio::test]
    async fn repeated_failures_remove_template() {
        let (folder, kind, late) = (tempfile::tempdir().expect("a folder"), kind(), Error::deadline("a busy host"));
        let (place, image) = made(folder.path());
        let (templates, notes) = templates(folder.path());
        let found = templates.find(&kind, &image).await.expect("a template");
        for failures in [limits::VM_TEMPLATE_FAILURES - 1, limits::VM_TEMPLATE_FAILURES] {
            templates.served(&found);
            for _ in 0..failures {
                let why = templates.note_failure(&kind, &found, &late);
                assert!(why.contains("a busy host"), "{why}");
            }
            let is_kept = failures < limits::VM_TEMPLATE_FAILURES;
            assert_eq!((templates.find(&kind, &image).await.is_ok(), place.exists()), (is_kept, is_kept));
        }
        assert_eq!(notes.kept().len(), 1);
    }

    #[tokio::test]
    async fn failed_refresh_keeps_template() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        let (place, image) = made(folder.path());
        let (templates, notes) = templates(folder.path());
        let found = templates.find(&kind, &image).await.expect("a template");
        let (key, created) = (kind.key().expect("a key"), found.created_at_ms().expect("it says when"));
        assert_eq!(templates.next_refresh(), Err(None), "nothing uses it");
        templates.served(&found);
        let wait = templates.next_refresh().expect_err("it is new").expect("it is in use");
        assert!(wait > 50_000, "{wait}");
        with_fault("machine.template.boot=eio", || templates.rebuild(&key).now_or_never()).expect("it fails at once");
        let noted = notes.kept();
        assert!(
            noted.iter().any(|note| note.kind == "template_refresh_failed" && note.detail.contains(&key)),
            "{noted:?}"
        );
        let again = templates.find(&kind, &image).await.expect("it stays in use");
        assert!(Rc::ptr_eq(&found, &again) && place.exists());
        assert_eq!(again.created_at_ms(), Some(created), "it is as old as before");
        let left = std::fs::read_dir(folder.path().join("templates")).expect("a folder").count();
        assert_eq!(left, 1, "nothing is left of the attempt");
    }

    #[tokio::test]
    async fn short_memory_defers_rebuild() {
        let folder = tempfile::tempdir().expect("a folder");
        let (_, image) = made(folder.path());
        let (templates, _) = templates_by(folder.path(), RefreshRules { max_age_ms: Some(0), interval_ms: 0 });
        templates.served(&templates.find(&kind(), &image).await.expect("a template"));
        let key = kind().key().expect("a key");
        assert_eq!(templates.next_refresh(), Ok(key.clone()));
        let short = Rc::new(Cell::new(Some(Duration::from_secs(7))));
        let left = Rc::clone(&short);
        templates.defer_by(Rc::new(move || left.get()));
        assert_eq!(templates.next_refresh(), Err(Some(7_000)));
        short.set(None);
        assert_eq!(templates.next_refresh(), Ok(key));
    }

    /// A template of that kind with other users' failures is not the one that has the name now.
    #[tokio::test]
    async fn failures_of_replaced_template_spare_next() {
        let (folder, kind, late) = (tempfile::tempdir().expect("a folder"), kind(), Error::deadline("a busy host"));
        let (place, image) = made(folder.path());
        let (templates, _) = templates(folder.path());
        let old = templates.find(&kind, &image).await.expect("a template");
        let next = Rc::new(Template::open(&place, &kind).expect("it is whole").expect("it is there"));
        templates.ready(kind.key().expect("a key"), Rc::clone(&next), &kind, &image, Attempt::Never);
        (0..limits::VM_TEMPLATE_FAILURES).for_each(|_| _ = templates.note_failure(&kind, &old, &late));
        assert!(templates.find(&kind, &image).await.is_ok_and(|found| Rc::ptr_eq(&found, &next)) && place.exists());
    }

    #[tokio::test]
    async fn removed_image_takes_its_templates() {
        let folder = tempfile::tempdir().expect("a folder");
        let (place, image) = made(folder.path());
        let (templates, notes) = templates(folder.path());
        std::fs::create_dir(folder.path().join("templates/mine")).expect("a folder");
        assert!(templates.find(&kind(), &image).await.is_ok());
        templates.forget_image("abc");
        assert!(!place.exists() && folder.path().join("templates/mine").exists());
        assert_eq!(templates.find(&kind(), &image).await.err().as_deref(), Some("there is no template of it yet"));
        let noted = notes.kept();
        assert!(noted.iter().any(|note| note.kind == "templates_skipped" && note.detail.contains("mine")), "{noted:?}");
    }
}
