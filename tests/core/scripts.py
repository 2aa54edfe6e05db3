"""The project's scripts and examples as modules, so that tests can call their parts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load_file(path: Path, name: str) -> ModuleType:
    """A file as a module of that name, by which dataclasses look their module up; it finds its neighbours, as when it is run."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def load_script(name: str) -> ModuleType:
    """`scripts/<name>.py` under its own name."""
    return load_file(SCRIPTS / f"{name}.py", name)
