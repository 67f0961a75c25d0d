//! The error inside the text of an exception, which any peer may have written.

use ryokan::core::error::Error;
use ryokan::rpc::convert::{from_capnp, to_capnp};

pub fn run(text: &str) {
    if let Some(error) = Error::from_line(text) {
        assert_eq!(Error::from_line(&error.to_line()).as_ref(), Some(&error));
        assert_eq!(from_capnp(to_capnp(error.clone())), error);
    }
    let _ = from_capnp(capnp::Error::failed(text.to_owned()));
}
