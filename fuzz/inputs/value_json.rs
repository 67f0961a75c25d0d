//! A value's tagged JSON form, as engines write it, and plain JSON, as people type it.

use ryokan::core::value::Value;

pub fn run(data: &[u8]) {
    let Ok(json) = serde_json::from_slice::<serde_json::Value>(data) else { return };
    let plain = Value::from_plain_json(&json);
    let _ = (plain.to_plain_json(), plain.to_json());
    if let Ok(value) = Value::from_json(&json) {
        let again = Value::from_json(&value.to_json()).expect("a written value can be read");
        // NaN differs from itself, but its text does not.
        assert_eq!(format!("{value:?}"), format!("{again:?}"));
        let _ = value.to_plain_json();
    }
}
