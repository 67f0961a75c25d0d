//! The client library and the command line: goldens of what they print, and their behaviour against a fake daemon
//! that speaks the real protocol over a real socket.

mod autostart;
mod client;
mod command_line;
mod fake;
mod following;
mod goldens;
mod grammar;
mod repl;
mod signals;
mod top;
mod tour;
