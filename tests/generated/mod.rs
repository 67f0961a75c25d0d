//! The checked-in code generated from `schema/` matches the schema.
//!
//! Building ryokan therefore needs no Cap'n Proto tool. `RYOKAN_BLESS=1` regenerates the code.

use std::path::Path;
use std::{env, fs};

fn check_fresh(schema: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().expect("a temporary folder");
    capnpc::CompilerCommand::new()
        .src_prefix(root.join("schema"))
        .import_path(root.join("schema"))
        .no_standard_import()
        .file(root.join("schema").join(format!("{schema}.capnp")))
        .output_path(out.path())
        .run()
        .expect("capnp compiles the schema; scripts/check installs it (Debian: capnproto)");
    let name = format!("{schema}_capnp.rs");
    let fresh = fs::read_to_string(out.path().join(&name)).expect("capnpc wrote its output");
    let kept = root.join("schema/rust/src").join(&name);
    if env::var_os("RYOKAN_BLESS").is_some() {
        fs::write(&kept, &fresh).expect("the checked-in file can be written");
    }
    let old = fs::read_to_string(&kept).unwrap_or_default();
    assert!(old == fresh, "{name} is stale: run RYOKAN_BLESS=1 cargo test --test runner generated");
}

#[test]
fn public_schema_is_fresh() {
    check_fresh("ryokan");
}

#[test]
fn link_schema_is_fresh() {
    check_fresh("worker");
}
