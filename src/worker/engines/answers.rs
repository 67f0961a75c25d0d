//! Replies shared by the engines that are part of this program.

use std::io;

use serde_json::Value as Json;

use crate::core::error::ErrorCode;
use crate::core::limits;
use crate::core::value::Value;
use crate::link::frames::Reply;

/// A success with these fields.
pub(super) fn success<const N: usize>(id: u64, fields: [(&str, Json); N]) -> Reply {
    let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Reply { id, ok: true, fields, ..Reply::default() }
}

/// A failure.
pub(super) fn refusal(id: u64, code: ErrorCode, message: String) -> Reply {
    Reply { id, ok: false, code: code.name().into(), message, ..Reply::default() }
}

/// A reply with a value, if its size is within the limit.
pub(super) fn bounded_value(id: u64, value: &Value) -> Reply {
    let json = value.to_json();
    if larger_than(&json, limits::VALUE_BYTES) {
        let message = format!("the value is larger than {} MiB", limits::VALUE_BYTES >> 20);
        return Reply {
            hint: "write it to a file in the workspace".into(),
            ..refusal(id, ErrorCode::InvalidArgument, message)
        };
    }
    success(id, [("value", json)])
}

/// Whether the JSON text would exceed `most` bytes, without building it.
pub(super) fn larger_than(json: &Json, most: usize) -> bool {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::WriteZero)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    serde_json::to_writer(Count(most), json).is_err()
}
