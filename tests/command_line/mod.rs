//! The command line with a real daemon and real kernels.

mod checkpoint_names;
mod doc_examples;
mod examples;
mod kernels;
mod output_errors;
mod packaging;
mod pool;
mod rename;
mod shell_use;
mod take;
mod terminal;
mod top;
mod uncaptured_files;
mod update;
mod values;
mod wait_notice;
