//! The command line with a real daemon and real kernels: what its users meet.

mod documents;
mod kernels;
mod left_out;
mod pool;
mod terminal;
mod top;
mod unwritten;
mod values;
mod waiting;
