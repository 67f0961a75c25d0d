//! Cap'n Proto messages from any bytes, within the readers' limits. The first byte selects the
//! struct.

use capnp::message::{Builder, Reader, ReaderOptions};
use capnp::serialize::{OwnedSegments, read_message, write_message};
use capnp::traits::Owned;
use ryokan::core::error::Result;
use ryokan::rpc::convert::{exec, info, mcp, output, reader_options, spec, value};
use ryokan::rpc::schema::ryokan_capnp as wire;

type Message = Reader<OwnedSegments>;

/// Reads `T`; a readable value can be written, and reads back as the same value.
fn check<T: Owned, X: std::fmt::Debug>(
    message: &Message,
    read: impl for<'a> Fn(T::Reader<'a>) -> Result<X>,
    write: impl for<'a> Fn(T::Builder<'a>, &X) -> Result<()>,
) {
    let Ok(root) = message.get_root::<T::Reader<'_>>() else { return };
    let Ok(item) = read(root) else { return };
    let mut builder = Builder::new_default();
    if write(builder.init_root::<T::Builder<'_>>(), &item).is_err() {
        return;
    }
    let mut bytes = Vec::new();
    write_message(&mut bytes, &builder).expect("memory takes it");
    // A message that shares its parts may grow when it is written: read it without a size limit.
    let mut options: ReaderOptions = reader_options();
    options.traversal_limit_in_words(None);
    let message = read_message(bytes.as_slice(), options).expect("our own message");
    let again = read(message.get_root::<T::Reader<'_>>().expect("its root")).expect("what was written can be read");
    assert_eq!(format!("{item:?}"), format!("{again:?}"));
}

pub fn run(data: &[u8]) {
    let Some((choice, bytes)) = data.split_first() else { return };
    let Ok(message) = read_message(bytes, reader_options()) else { return };
    match choice % 12 {
        0 => check::<wire::kernel_spec::Owned, _>(
            &message,
            |r| spec::read_spec_request(r),
            |b, x| spec::write_spec_request(b, x),
        ),
        1 => check::<wire::kernel_spec::Owned, _>(&message, |r| spec::read_spec(r), |b, x| spec::write_spec(b, x)),
        2 => check::<wire::exec_request::Owned, _>(
            &message,
            |r| exec::read_exec_request(r),
            |b, x| exec::write_exec_request(b, x),
        ),
        3 => check::<wire::exec_result::Owned, _>(
            &message,
            |r| exec::read_exec_result(r),
            |b, x| exec::write_exec_result(b, x),
        ),
        4 => check::<wire::value::Owned, _>(&message, |r| value::read_value(r), |b, x| value::write_value(b, x)),
        5 => check::<wire::output_event::Owned, _>(
            &message,
            |r| output::read_output_event(r),
            |b, x| output::write_output_event(b, x),
        ),
        6 => check::<wire::kernel_info::Owned, _>(
            &message,
            |r| info::read_kernel_info(r),
            |b, (i, rights)| info::write_kernel_info(b, i, *rights),
        ),
        7 => check::<wire::kernel_filter::Owned, _>(
            &message,
            |r| info::read_kernel_filter(r),
            |b, x| Ok(info::write_kernel_filter(b, x)),
        ),
        8 => check::<wire::journal_entry::Owned, _>(
            &message,
            |r| info::read_journal_entry(r),
            |b, x| Ok(info::write_journal_entry(b, x)),
        ),
        9 => check::<wire::mcp_transport::Owned, _>(
            &message,
            |r| mcp::read_mcp_transport(r),
            |b, x| Ok(mcp::write_mcp_transport(b, x)),
        ),
        10 => check::<wire::event::Owned, _>(&message, |r| info::read_event(r), |b, x| Ok(info::write_event(b, x))),
        _ => check::<wire::host_info::Owned, _>(
            &message,
            |r| info::read_host_info(r),
            |b, x| Ok(info::write_host_info(b, x)),
        ),
    }
}
