//! Records of events: journal, message, events. With `--json`, one object per line.

use std::collections::{BTreeSet, VecDeque};
use std::io::Read;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::context::Context;
use super::drive::Signals;
use super::failure::Failure;
use super::names::KernelArg;
use super::{exit, json, render};
use crate::core::info::{Event, JournalEntry};
use crate::core::limits;
use crate::rpc::client::{JournalSeen, KernelClient};

/// `ryokan journal`
#[derive(Debug, Args)]
pub struct JournalArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Only entries after this sequence number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub since: u64,
    /// At most this many entries; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub limit: u32,
    /// Only the newest N entries
    #[arg(short = 'n', long, value_name = "N", conflicts_with_all = ["since", "limit"])]
    pub tail: Option<u64>,
    /// Follow new entries until Ctrl-C
    #[arg(long, conflicts_with = "limit")]
    pub follow: bool,
    /// Show full texts with their authors, and compacted messages
    #[arg(long)]
    pub full: bool,
    /// Only the messages that this checkpoint compacted
    #[arg(long, value_name = "REF", conflicts_with_all = ["follow", "tail"])]
    pub checkpoint: Option<String>,
}

/// `ryokan message`
#[derive(Debug, Args)]
pub struct MessageArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Role of the author, such as user or assistant
    #[arg(long)]
    pub role: String,
    /// The text; - reads standard input
    pub text: String,
}

/// `ryokan events`
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Only events of this kernel
    pub name: Option<KernelArg>,
    /// Only events after this sequence number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub since: u64,
    /// Only the newest N existing events
    #[arg(short = 'n', long, value_name = "N", conflicts_with = "since")]
    pub tail: Option<usize>,
    /// Follow new events until Ctrl-C
    #[arg(long)]
    pub follow: bool,
}

/// Shows a journal.
pub async fn journal(context: &Context, args: JournalArgs) -> Result<(), Failure> {
    let (kernel, info) = context.kernel(&args.name).await?;
    // The version is one more than the newest entry's number, and numbers have no gaps.
    let since = args.tail.map_or(args.since, |newest| info.version.saturating_sub(newest.saturating_add(1)));
    let seen = match &args.checkpoint {
        Some(reference) => JournalSeen::Of(reference),
        None if args.full => JournalSeen::Whole,
        None => JournalSeen::Compacted,
    };
    let (ended, running) = (BTreeSet::new(), BTreeSet::new());
    let mut shown = Shown { context, full: args.full, seen, since, ended, running };
    if !args.follow {
        return shown.more(&kernel, args.limit).await;
    }
    let mut signals = Signals::catch()?;
    let mut events = kernel.events(0).await?;
    let follow = async {
        loop {
            shown.more(&kernel, 0).await?;
            // One read of the journal for all pending events.
            events.next().await?;
            while tokio::time::timeout(Duration::ZERO, events.next()).await.is_ok_and(|event| event.is_ok()) {}
        }
    };
    until_signal(&mut signals, follow).await
}

/// The entries already shown. An entry of a running execution is shown again at its end.
struct Shown<'a> {
    context: &'a Context,
    full: bool,
    seen: JournalSeen<'a>,
    since: u64,
    ended: BTreeSet<u64>,
    running: BTreeSet<u64>,
}

impl Shown<'_> {
    async fn more(&mut self, kernel: &KernelClient, limit: u32) -> Result<(), Failure> {
        let mut failed = None;
        let since = self.since;
        let read = kernel.each_entry_seen(self.seen, since, limit, async |entry: JournalEntry| {
            self.entry(&entry).map_err(|failure| {
                failed = Some(failure);
                crate::core::error::Error::unavailable("the output is closed")
            })
        });
        let read = read.await;
        if let Some(failure) = failed {
            return Err(failure);
        }
        read?;
        // Read again from the oldest running entry.
        let last = self.ended.last().copied().unwrap_or(self.since);
        self.since = self.running.first().map_or(last, |first| (first - 1).min(last)).max(since);
        let since = self.since;
        self.ended.retain(|sequence| *sequence > since);
        Ok(())
    }

    fn entry(&mut self, entry: &JournalEntry) -> Result<(), Failure> {
        let runs = entry.status == "running" || entry.status == "queued";
        let known = match runs {
            true => !self.running.insert(entry.sequence),
            false => {
                self.running.remove(&entry.sequence);
                !self.ended.insert(entry.sequence)
            }
        };
        if known {
            return Ok(());
        }
        self.context.print(&match self.context.options.json {
            true => format!("{}\n", json::journal_entry(entry)),
            false => render::journal_entry(entry, self.full, self.context.terminal.paint),
        })
    }
}

/// Adds a message to a journal.
pub async fn message(context: &Context, args: MessageArgs) -> Result<(), Failure> {
    let mut text = args.text;
    if text == "-" {
        text.clear();
        let read = std::io::stdin().lock().take(limits::CODE_BYTES as u64).read_to_string(&mut text);
        read.map_err(|e| Failure::usage(format!("standard input: {e}"), "pass the message as UTF-8 text"))?;
    }
    let (kernel, _) = context.kernel(&args.name).await?;
    let sequence = kernel.message(&args.role, &text).await?;
    match context.options.json {
        true => context.print_json(&json!({ "sequence": sequence })),
        false => Ok(()),
    }
}

/// Shows events of the host or of a kernel.
pub async fn events(context: &Context, args: EventsArgs) -> Result<(), Failure> {
    let host = context.host().await?;
    let mut events = match &args.name {
        Some(name) => host.open_kernel(name).await?.0.events(args.since).await?,
        None => host.events(args.since).await?,
    };
    let mut signals = if args.follow { Some(Signals::catch()?) } else { None };
    let show = async {
        match args.tail {
            Some(most) => {
                let mut newest = VecDeque::new();
                while let Some(event) = events.next_past().await? {
                    newest.push_back(event);
                    if newest.len() > most {
                        newest.pop_front();
                    }
                }
                newest.iter().try_for_each(|event| print_event(context, event))?;
            }
            None => {
                while let Some(event) = events.next_past().await? {
                    print_event(context, &event)?;
                }
            }
        }
        if args.follow {
            loop {
                print_event(context, &events.next().await?)?;
            }
        }
        Ok(())
    };
    match &mut signals {
        Some(signals) => until_signal(signals, show).await,
        None => show.await,
    }
}

fn print_event(context: &Context, event: &Event) -> Result<(), Failure> {
    context.print(&match context.options.json {
        true => format!("{}\n", json::event(event)),
        false => render::event(event, context.terminal.paint),
    })
}

/// Follows until a signal; Ctrl-C is success.
pub(super) async fn until_signal(
    signals: &mut Signals,
    follow: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    tokio::select! {
        followed = follow => followed,
        ended = signals.any() => match ended {
            exit::INTERRUPTED => Ok(()),
            code => Err(Failure::Quiet(code)),
        },
    }
}
