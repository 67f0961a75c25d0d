//! The hint after a Python module was not found: the same wherever code is executed.

use crate::core::engine::EngineName;

/// How to install a Python module that was not found by code of the kernel `name`; `None`: of an ephemeral kernel.
pub fn missing_module(name: Option<&str>, engine: EngineName, err: &str) -> Option<String> {
    let module = err.strip_prefix("ModuleNotFoundError: No module named '").filter(|_| engine == EngineName::Python)?;
    let module = module.split(['\'', '.']).next()?;
    // It is shown as a command.
    if module.is_empty() || !module.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        return None;
    }
    let ways = match name {
        Some(name) => format!(
            "into the workspace: ryokan update {name} --net host && ryokan stop {name} && ryokan spawn {name} -- \
             python3 -m pip install --target lib {module}; then: import sys; sys.path.insert(0, '/workspace/lib')\n  a \
             virtual environment: ryokan update {name} --venv DIR && ryokan stop {name}"
        ),
        None => format!("a virtual environment that has {module}: ryokan run --venv DIR"),
    };
    Some(format!("hint: the kernel has the packages of its interpreter (import sys; sys.executable)\n  {ways}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_module_has_hint() {
        let hint = |engine, err: &str| missing_module(Some("k"), engine, err);
        let of = |module: &str| format!("ModuleNotFoundError: No module named '{module}'");
        assert!(hint(EngineName::Python, &of("yaml.nodes")).is_some_and(|hint| hint.contains("--target lib yaml;")));
        assert!(hint(EngineName::Python, &of("yaml")).is_some_and(|hint| hint.contains("ryokan update k --venv DIR")));
        let ephemeral = missing_module(None, EngineName::Python, &of("yaml"));
        assert!(ephemeral.is_some_and(|hint| hint.contains("has yaml: ryokan run --venv DIR")));
        assert_eq!(hint(EngineName::Python, &of("a; rm -rf x")), None);
        assert_eq!(hint(EngineName::Python, "ValueError: no"), None);
        assert_eq!(hint(EngineName::Bash, &of("yaml")), None);
    }
}
