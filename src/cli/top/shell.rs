//! The loop around the model: passes keys, answers, ticks and signals to it and executes its
//! actions.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use super::asker::Asker;
use super::keyboard;
use super::model::{Action, Input, Model};
use super::screen::{self, Screen};
use super::view::Theme;
use crate::cli::context::Context;
use crate::cli::drive::Signals;
use crate::cli::exit;
use crate::cli::failure::Failure;
use crate::cli::render::now_ms;
use crate::core::error::{Error, Result};
use crate::rpc::client::HostClient;

/// Interval of the model's ticks.
const TICK: Duration = Duration::from_secs(1);
/// Minimum time between two frames: events may arrive by thousands.
const FRAME: Duration = Duration::from_millis(40);

/// Shows the interface until the user quits.
pub async fn run(context: &Context) -> std::result::Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let mut stops = signal(SignalKind::from_raw(libc::SIGTSTP)).map_err(Failure::of_output)?;
    let host = context.host().await?;
    let info = host.info().clone();
    let asker = Asker::new(context.socket()?.0, host);
    let theme = Theme { colours: context.terminal.paint.is_on() };
    let screen =
        Screen::take(theme).map_err(|error| Error::unsupported(format!("could not use the terminal: {error}")))?;
    let model = Model::new(now_ms(), screen::size(), info, context.options.yes);
    let mut shell = Shell { screen, model, asker, connecting: JoinSet::new(), is_left: false };
    let done = shell.go(&mut signals, &mut stops).await;
    drop(shell);
    done
}

struct Shell {
    screen: Screen,
    model: Model,
    asker: Asker,
    connecting: JoinSet<Result<HostClient>>,
    is_left: bool,
}

impl Shell {
    async fn go(&mut self, signals: &mut Signals, stops: &mut Signal) -> std::result::Result<(), Failure> {
        let mut keys = keyboard::read().map_err(Failure::of_output)?;
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut drawn = Instant::now() - FRAME;
        let mut is_new = true;
        while !self.is_left {
            if is_new && drawn.elapsed() >= FRAME {
                self.model.settle();
                self.screen.draw(&self.model).map_err(Failure::of_output)?;
                (drawn, is_new) = (Instant::now(), false);
            }
            tokio::select! {
                biased;
                code = signals.any() => return Err(Failure::Quiet(code)),
                _ = stops.recv() => {
                    self.screen.suspend().map_err(Failure::of_output)?;
                    self.take(Input::Resized(screen::size()))?;
                }
                key = keys.recv() => match key {
                    Some(input) => self.take(input)?,
                    // The terminal has closed.
                    None => return Err(Failure::Quiet(exit::READER_GONE)),
                },
                () = tokio::time::sleep_until(drawn + FRAME), if is_new => continue,
                _ = ticks.tick() => {
                    // The size may have changed while the process was stopped.
                    let size = screen::size();
                    if size != self.model.size {
                        self.take(Input::Resized(size))?;
                    }
                    self.take(Input::Ticked)?;
                }
                Some(connected) = self.connecting.join_next() => self.connected(connected)?,
                input = self.asker.answer() => self.take(input)?,
            }
            is_new = true;
        }
        Ok(())
    }

    fn connected(
        &mut self,
        connected: std::result::Result<Result<HostClient>, tokio::task::JoinError>,
    ) -> std::result::Result<(), Failure> {
        let input = match connected {
            Ok(Ok(host)) => {
                // Event numbers are per daemon.
                let since = self.model.events_known_of(host.info());
                Input::Connected(self.asker.connected(host, since))
            }
            Ok(Err(error)) => Input::NotConnected(error.message),
            Err(error) => Input::NotConnected(error.to_string()),
        };
        self.take(input)
    }

    fn take(&mut self, input: Input) -> std::result::Result<(), Failure> {
        for action in self.model.step(now_ms(), input) {
            match action {
                Action::Connect => {
                    self.connecting.spawn_local(Asker::connect(self.asker.socket()));
                }
                // To the whole process group, as the terminal does it: a calling script stops as
                // well.
                Action::Suspend => {
                    nix::sys::signal::kill(nix::unistd::Pid::from_raw(0), nix::sys::signal::Signal::SIGTSTP)
                        .map_err(|error| Failure::of_output(io::Error::from(error)))?
                }
                Action::Redraw => self.screen.forget(self.model.size).map_err(Failure::of_output)?,
                Action::Quit => self.is_left = true,
                Action::List | Action::Pools | Action::Look { .. } | Action::Inspect(_) | Action::Do(..) => {
                    self.asker.ask(action);
                }
            }
        }
        Ok(())
    }
}
