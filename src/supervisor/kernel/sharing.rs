//! The sessions of one workspace: the kernel that owns it, and its threads.
//!
//! Owns their shared state: the workspace tracker, the file lock, and the freeze that keeps every session from starting
//! work. Everything runs on the one event loop; no locks are needed.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::command::Command;
use super::file_room::FileRoom;
use crate::core::error::{Error, Result};
use crate::core::files::WhileHeld;
use crate::core::kernel::State;
use crate::core::kernel::transition::{Kind, Refusal};
use crate::core::limits;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::transition::ExclusiveTransition;
use crate::workspace::Workspace;

/// A kernel's part in a workspace. File state is held by the kernel that owns the files.
pub struct Sharing {
    owner: Option<Rc<Kernel>>,
    threads: RefCell<Vec<Weak<Kernel>>>,
    /// Number of kernels that are being created from this one.
    making: Cell<usize>,
    /// Number of holds that freeze the files.
    still: Cell<usize>,
    /// Whether a restore of the kernel's group is unfinished: the files may be those of either state.
    awaits_group: Cell<bool>,
    /// Whether a failed freeze of the kernel's group has paused it.
    group_paused: Cell<bool>,
    /// An import that created it is withdrawn.
    withdrawn: Cell<bool>,
    /// Tracks the files since their first capture.
    workspace: RefCell<Option<Box<dyn Workspace>>>,
    turn: Arc<Semaphore>,
    /// Number of captures, restores and archives that have the file lock or wait for it.
    captures: Rc<Cell<usize>>,
    /// Notifies those that wait for the end of a transition.
    released: Notify,
    /// Files that clients may have open.
    open: Arc<Semaphore>,
    /// Watches that clients may have.
    watches: Arc<Semaphore>,
    /// Room for files that clients write.
    room: FileRoom,
}

impl Sharing {
    /// For a kernel with its own files, or for a thread of `owner`.
    pub(crate) fn new(owner: Option<Rc<Kernel>>) -> Sharing {
        Sharing {
            owner,
            threads: RefCell::default(),
            making: Cell::new(0),
            still: Cell::new(0),
            awaits_group: Cell::new(false),
            group_paused: Cell::new(false),
            withdrawn: Cell::new(false),
            workspace: RefCell::new(None),
            turn: Arc::new(Semaphore::new(1)),
            captures: Rc::default(),
            released: Notify::new(),
            open: Arc::new(Semaphore::new(limits::FILES_OPEN)),
            watches: Arc::new(Semaphore::new(limits::FILE_WATCHES)),
            room: FileRoom::default(),
        }
    }
}

/// The file lock of a capture, a restore or an archive.
pub(crate) struct CaptureTurn {
    _turn: OwnedSemaphorePermit,
    _counted: CountedCapture,
}

/// One of the captures that have the file lock or wait for it.
struct CountedCapture(Rc<Cell<usize>>);

impl CountedCapture {
    fn new(captures: &Rc<Cell<usize>>) -> CountedCapture {
        captures.set(captures.get() + 1);
        CountedCapture(Rc::clone(captures))
    }
}

impl Drop for CountedCapture {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Keeps the other sessions of a workspace from starting work, until dropped.
pub(crate) struct FilesHold(Rc<Kernel>);

impl Drop for FilesHold {
    fn drop(&mut self) {
        let still = &self.0.sessions.still;
        still.set(still.get() - 1);
        if still.get() == 0 {
            self.0.wake_sharers();
        }
    }
}

/// Keeps a source kernel from being removed while another is created from it, until dropped.
pub(crate) struct Source(Rc<Kernel>);

impl Drop for Source {
    fn drop(&mut self) {
        let making = &self.0.sessions.making;
        making.set(making.get() - 1);
    }
}

impl Kernel {
    /// The kernel that owns the files: itself, or the owner of a thread.
    pub fn files(&self) -> &Kernel {
        self.sessions.owner.as_deref().unwrap_or(self)
    }

    /// As [`Self::files`], as an owned handle.
    pub(crate) fn files_owner(self: &Rc<Self>) -> Rc<Kernel> {
        Rc::clone(self.sessions.owner.as_ref().unwrap_or(self))
    }

    /// Registers a thread.
    pub(crate) fn joined_by(&self, thread: &Rc<Kernel>) {
        let mut threads = self.sessions.threads.borrow_mut();
        threads.retain(|thread| thread.upgrade().is_some_and(|thread| !thread.is_gone()));
        threads.push(Rc::downgrade(thread));
    }

    /// Whether the kernel's task has ended.
    pub(crate) fn is_gone(&self) -> bool {
        self.commands.is_closed()
    }

    /// The threads of this workspace.
    pub fn threads(&self) -> Vec<Rc<Kernel>> {
        let threads = self.sessions.threads.borrow();
        threads.iter().filter_map(Weak::upgrade).filter(|thread| !thread.is_gone()).collect()
    }

    /// The other sessions of its workspace.
    pub(crate) fn others(&self) -> Vec<Rc<Kernel>> {
        let mut others = self.files().threads();
        others.extend(self.sessions.owner.clone());
        others.retain(|other| other.id != self.id);
        others
    }

    /// Keeps the other sessions from starting work.
    pub(crate) fn hold_files(self: &Rc<Self>) -> FilesHold {
        let owner = self.files_owner();
        owner.sessions.still.set(owner.sessions.still.get() + 1);
        FilesHold(owner)
    }

    /// Whether no work may start here now: the files are frozen, or between two states.
    pub(crate) fn is_held(&self) -> bool {
        let files = self.files();
        files.sessions.still.get() > 0 || (files.id != self.id && files.is_changing())
    }

    /// Keeps code from running until the unfinished restore of the kernel's group has ended.
    pub(crate) fn set_awaits_group(&self, awaits: bool) {
        self.files().sessions.awaits_group.set(awaits);
        self.wake_sharers();
    }

    /// Records that the import which created it is withdrawn: no lease keeps it.
    pub(crate) fn set_withdrawn(&self) {
        self.files().sessions.withdrawn.set(true);
    }

    /// Whether the import that created it is withdrawn.
    pub(crate) fn is_withdrawn(&self) -> bool {
        self.files().sessions.withdrawn.get()
    }

    /// Whether no code may run here until the kernel's group was brought back, or resumed.
    pub(crate) fn awaits_group(&self) -> bool {
        self.files().sessions.awaits_group.get() || self.is_group_paused()
    }

    /// Keeps work from the kernel until a client resumes its group.
    pub(crate) fn set_group_paused(&self, paused: bool) {
        self.files().sessions.group_paused.set(paused);
        self.wake_sharers();
    }

    /// Whether a failed freeze of the kernel's group has paused it.
    pub(crate) fn is_group_paused(&self) -> bool {
        self.files().sessions.group_paused.get()
    }

    /// Refuses work in a kernel whose group is paused.
    ///
    /// # Errors
    /// `conflict` with reason `group_paused`.
    pub(crate) fn refuse_paused_group(&self) -> Result<()> {
        if !self.is_group_paused() {
            return Ok(());
        }
        Err(Error::conflict(format!("a freeze of the group of kernel {} failed", self.files().spec().name))
            .reason("group_paused")
            .hint("`ryokan group show` names the group and the reason; `ryokan resume GROUP` lets it go on"))
    }

    /// Refuses work in a kernel whose group awaits recovery, or is paused.
    ///
    /// # Errors
    /// `conflict` with reason `group_unfinished` or `group_paused`.
    pub(crate) fn refuse_unfinished_group(&self) -> Result<()> {
        if !self.files().sessions.awaits_group.get() {
            return self.refuse_paused_group();
        }
        let message = format!("an operation of the group of kernel {} has not ended", self.files().spec().name);
        Err(Error::conflict(message).reason("group_unfinished").hint(
            "`ryokan group show` names the group; its next freeze, restore or undo goes back first. If it moved here, \
                 `ryokan teleport --status` names it, and what it waits for",
        ))
    }

    /// Wakes every session of this workspace to retry deferred work.
    pub(crate) fn wake_sharers(&self) {
        for session in self.threads().iter().map(|thread| &**thread).chain([self]) {
            // A session with a full queue retries anyway.
            let _ = session.commands.try_send(Box::new(Command::Wake));
        }
    }

    /// The file lock: one session at a time captures or restores the files.
    ///
    /// # Errors
    /// `deadline` if the lock was not free in time.
    pub(crate) async fn lock_files(&self) -> Result<CaptureTurn> {
        let counted = CountedCapture::new(&self.files().sessions.captures);
        let turn = self.file_turn(Instant::now() + limits::CHECKPOINT_WAIT).await?;
        Ok(CaptureTurn { _turn: turn, _counted: counted })
    }

    /// The file lock for a change by a client.
    ///
    /// # Errors
    /// `deadline` if the lock was not free by `until`; with [`WhileHeld::Refuse`], `busy` during a capture.
    pub(crate) async fn lock_files_to_change(&self, held: WhileHeld, until: Instant) -> Result<OwnedSemaphorePermit> {
        let files = self.files();
        // Captures that come later get the lock later. Changes of other clients are short.
        if held == WhileHeld::Refuse && files.sessions.captures.get() > 0 {
            return Err(Error::busy(format!("the files of kernel {} are being captured", files.spec().name))
                .reason("checkpointing")
                .hint("try again when the checkpoint is taken, or let the call wait for it"));
        }
        self.file_turn(until).await
    }

    /// Waits until `until` for the end of a transition of the kernel, or of the owner of its files.
    ///
    /// # Errors
    /// `deadline`, or with [`WhileHeld::Refuse`] `busy`, names the transition.
    pub(crate) async fn await_transitions(&self, held: WhileHeld, until: Instant) -> Result<()> {
        loop {
            // Registered first: the end may come between the check and the wait.
            let (owners, own) = (self.files().sessions.released.notified(), self.sessions.released.notified());
            let Some((name, kind)) = self.awaited_transition() else { return Ok(()) };
            if held == WhileHeld::Refuse {
                return Err(kind.busy(&name));
            }
            let released = async {
                tokio::select! {
                    () = owners => {}
                    () = own => {}
                }
            };
            if tokio::time::timeout_at(until, released).await.is_err() {
                return Err(kind.too_long(&name));
            }
        }
    }

    /// The transition for which [`Self::await_transitions`] would wait, with its kernel's name.
    pub(crate) fn awaited_transition(&self) -> Option<(String, Kind)> {
        let awaited = |session: &Kernel| {
            let kind = session.transitions.borrow().admit().err().and_then(Refusal::awaited)?;
            Some((session.spec().name.to_string(), kind))
        };
        awaited(self.files()).or_else(|| awaited(self))
    }

    /// Notifies operations that wait for the end of a transition.
    pub(crate) fn transition_released(&self) {
        self.sessions.released.notify_waiters();
    }

    async fn file_turn(&self, until: Instant) -> Result<OwnedSemaphorePermit> {
        let files = self.files();
        let name = &files.spec().name;
        let turn = Arc::clone(&files.sessions.turn).acquire_owned();
        match tokio::time::timeout_at(until, turn).await {
            Ok(Ok(turn)) => Ok(turn),
            Ok(Err(_)) => Err(Error::unavailable(format!("the workspace of {name} is gone"))),
            Err(_) => Err(Error::deadline(format!("the files of {name} are being captured or restored for too long"))),
        }
    }

    /// Room for files that clients write; of the kernel that owns the files.
    pub(crate) fn file_room(&self) -> &FileRoom {
        &self.sessions.room
    }

    /// A place for a file that a client opens.
    ///
    /// # Errors
    /// `busy` if too many are open.
    pub(crate) fn file_place(&self) -> Result<OwnedSemaphorePermit> {
        let files = self.files();
        Arc::clone(&files.sessions.open).try_acquire_owned().map_err(|_| {
            Error::busy(format!("clients have {} files of {} open", limits::FILES_OPEN, files.spec().name))
                .reason("files_open")
                .hint("close some of them, or wait")
        })
    }

    /// Takes one of the places for watches of the kernel's files.
    ///
    /// # Errors
    /// `busy` if there is none.
    pub(crate) fn watch_place(&self) -> Result<OwnedSemaphorePermit> {
        let files = self.files();
        Arc::clone(&files.sessions.watches).try_acquire_owned().map_err(|_| {
            Error::busy(format!("clients watch files of {} {} times already", files.spec().name, limits::FILE_WATCHES))
                .reason("watches")
                .hint("end one of the watches, or watch one directory with those below it")
        })
    }

    /// Takes the workspace tracker; the caller holds the file lock.
    pub(crate) fn take_workspace(&self) -> Option<Box<dyn Workspace>> {
        self.files().sessions.workspace.borrow_mut().take()
    }

    /// Drops all knowledge of the files: they are removed or replaced.
    pub(crate) fn forget_files(&self) {
        drop(self.take_workspace());
        self.files().base.set(None);
    }

    /// Returns the workspace tracker.
    pub(crate) fn keep_workspace(&self, workspace: Box<dyn Workspace>) {
        let files = self.files();
        files.base.set(workspace.base().map(|tree| tree.0));
        *files.sessions.workspace.borrow_mut() = Some(workspace);
    }

    /// Refuses to change files under running code: its writes would be lost, or would reach other files.
    ///
    /// # Errors
    /// `conflict` names the running sessions.
    pub(crate) fn refuse_if_others_run(&self) -> Result<()> {
        let works = |other: &Rc<Kernel>| {
            matches!(other.view.borrow().state, State::Busy { .. } | State::Starting) || other.has_background_work()
        };
        let busy: Vec<String> =
            self.others().iter().filter(|other| works(other)).map(|k| k.spec().name.to_string()).collect();
        if busy.is_empty() {
            return Ok(());
        }
        let message = format!("{} runs code in the workspace of {}", busy.join(", "), self.files().spec().name);
        Err(Error::conflict(message)
            .reason("workspace_busy")
            .hint("wait for it, or stop it: its files would be changed under it"))
    }

    /// Keeps the kernel from being removed or archived while another is created from it.
    ///
    /// # Errors
    /// `conflict` if it is being removed, archived or moved, `departed`.
    pub(crate) fn lock_as_source(self: &Rc<Self>) -> Result<Source> {
        match self.transitions.borrow().active() {
            Some(kind @ (Kind::Archive | Kind::HandoverOut | Kind::Remove)) => {
                return Err(self.refused(Refusal::UnderWay(kind)));
            }
            Some(Kind::Restore | Kind::Unarchive | Kind::Freeze) | None => {}
        }
        if self.is_gone() {
            return Err(self.refused(Refusal::UnderWay(Kind::Remove)));
        }
        self.check_here()?;
        self.refuse_unfinished_group()?;
        self.sessions.making.set(self.sessions.making.get() + 1);
        Ok(Source(Rc::clone(self)))
    }

    /// Begins the removal: no kernel can be created from this one any more.
    ///
    /// # Errors
    /// `conflict` names its threads, unless they are removed too, or says that it is being removed, archived or read.
    pub(crate) fn begin_removal(self: &Rc<Self>, with_threads: bool) -> Result<ExclusiveTransition> {
        let name = &self.spec().name;
        let threads: Vec<String> = self.threads().iter().map(|thread| thread.spec().name.to_string()).collect();
        if !with_threads && !threads.is_empty() {
            return Err(Error::conflict(format!("{} works in the workspace of {name}", threads.join(", ")))
                .reason("threads")
                .hint("remove that first, or both at once with --with-threads"));
        }
        ExclusiveTransition::begin(self, Kind::Remove)
    }

    /// Refuses operations that are not allowed while another kernel is created from this one.
    ///
    /// # Errors
    /// `conflict`.
    pub(super) fn not_a_source(&self) -> Result<()> {
        if self.sessions.making.get() == 0 {
            return Ok(());
        }
        Err(Error::conflict(format!("a fork, a thread or a file is being made of {}", self.spec().name))
            .reason("forking")
            .hint("try again when that is done"))
    }

    /// Drains the host's file change events, so that their queue does not overflow before the next checkpoint.
    pub(crate) fn follow_files(&self) {
        if let Some(workspace) = self.files().sessions.workspace.borrow_mut().as_mut() {
            workspace.drain();
        }
    }

    /// Stops the workspace tracker if no session can change the files. Its knowledge is kept for the next time.
    pub(crate) fn leave_files(&self) {
        if self.others().iter().any(|other| other.link.borrow().is_some()) {
            return;
        }
        let Some(mut workspace) = self.take_workspace() else { return };
        // The next tracker checks that the known contents still exist.
        self.files().base.set(None);
        let name = self.files().spec().name.to_string();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = workspace.save() {
                tracing::warn!(kernel = name, %error, "the next checkpoint looks at every file: what was known could not be kept");
            }
        });
    }
}
