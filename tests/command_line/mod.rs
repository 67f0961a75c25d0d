//! The command line with a real daemon and real kernels.

mod doc_examples;
mod kernels;
mod output_errors;
mod packaging;
mod pool;
mod rename;
mod terminal;
mod top;
mod uncaptured_files;
mod values;
mod wait_notice;
