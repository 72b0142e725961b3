"""Compiles the C code of opteq when the wheel is built."""

import importlib.util
import os
import shlex
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Compile(BuildHookInterface):
    """Puts a library for each kind of processor into the wheel, which is for this platform and any Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiling = _compiling(Path(self.root))
        compiler = shlex.split(os.environ.get("CC", "cc"))
        self._made = TemporaryDirectory()
        for processor in compiling.PROCESSORS:
            name = compiling.file_name(processor)
            made = Path(self._made.name) / name
            compiling.make(compiler, processor, made)
            build_data["force_include"][str(made)] = f"opteq_native/{name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._made.cleanup()


def _compiling(root: Path) -> ModuleType:
    """`opteq.native.compiling` of the sources, without opteq, which needs PyTorch."""
    beside = root.parent / "src" / "opteq" / "native"
    folder = beside if beside.is_dir() else root / "sources"
    found = importlib.util.spec_from_file_location("compiling", folder / "compiling.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
