//! The engine as init sees it: raw frames over a socket pair, output over two pipes, and a real bash.

mod contract;
mod hostile;
mod interrupts;
mod kit;
mod running;
mod state;
