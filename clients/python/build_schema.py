"""Adds the repository's schema and licences to a distribution built from a checkout."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SchemaHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if (root / "src/ryokan/ryokan.capnp").exists():
            return  # An unpacked source distribution has them.
        repository = root.parent.parent
        files = {"schema/ryokan.capnp": "ryokan/ryokan.capnp"}
        if self.target_name == "sdist":
            files = {"schema/ryokan.capnp": "src/ryokan/ryokan.capnp", "LICENSE-MIT": "", "LICENSE-APACHE": ""}
        for source, target in files.items():
            build_data["force_include"][str(repository / source)] = target or source
