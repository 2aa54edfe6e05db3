"""The core imports the standard library, numpy, scipy and PyYAML only; proved in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.scripts import load_script

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "accelerate_poplar"


SCRIPT = load_script("core_modules")
CORE = SCRIPT.core_modules()
ALLOWED = {"accelerate_poplar", "numpy", "scipy", "yaml"}

CHILD = """
import importlib, json, sys
before = {name.partition(".")[0] for name in sys.modules}
for module in sys.argv[1:]:
    importlib.import_module(module)
# Modules without a spec were made by others (cython_runtime), not found and imported.
after = {name.partition(".")[0] for name, module in sys.modules.items() if getattr(module, "__spec__", None)}
print(json.dumps(sorted(after - before - set(sys.stdlib_module_names))))
"""


def foreign_imports(*modules: str) -> set[str]:
    """The packages that importing modules brings in, beyond the standard library and what the core may use."""
    result = subprocess.run([sys.executable, "-c", CHILD, *modules], capture_output=True, text=True, check=True)
    # scipy and numpy load compiled helpers under private names of their own.
    return {name for name in json.loads(result.stdout) if not name.startswith("_")} - ALLOWED


def test_the_core_and_the_package_itself_import_no_foreign_package() -> None:
    assert foreign_imports("accelerate_poplar", *(f"accelerate_poplar.{module}" for module in CORE)) == set()


def test_the_proof_can_fail() -> None:
    assert "torch" in foreign_imports("accelerate_poplar.comm")


@pytest.mark.parametrize("module", CORE)
def test_no_function_of_the_core_imports_a_foreign_package(module: str) -> None:
    foreign = SCRIPT.written_imports(PACKAGE / f"{module}.py") - ALLOWED - set(sys.stdlib_module_names)
    assert {name for name in foreign if not name.startswith(".")} == set()


def test_imports_inside_functions_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("def f():\n    import torch.nn\n    from .comm import connect\n    from . import plan\n")
    assert SCRIPT.written_imports(file) == {"torch", ".comm", ".plan"}


def test_planning_from_the_shell_needs_no_torch() -> None:
    assert foreign_imports("accelerate_poplar.cli") <= {"rich", "markdown_it", "mdurl", "pygments"}
