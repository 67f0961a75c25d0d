//! The command line with a real daemon and real kernels: what its users meet.

mod doc_examples;
mod kernels;
mod output_errors;
mod pool;
mod terminal;
mod top;
mod uncaptured_files;
mod values;
mod wait_notice;
