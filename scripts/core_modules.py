"""Which modules are the core: those named below and every module of ours they lead to. Prints their files."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "accelerate_poplar"
SEEDS = ("config", "curve", "ds_config", "errors", "metrics", "plan", "profiles", "sampler", "search", "simulate")


def written_imports(path: Path) -> set[str]:
    """The packages a file imports anywhere, also inside functions; ours as `.name`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {f".{name}" for name in names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def core_modules() -> list[str]:
    """The names of the core's modules, sorted."""
    found: set[str] = set()
    open_ends = set(SEEDS)
    while open_ends:
        module = open_ends.pop()
        found.add(module)
        ours = {name.removeprefix(".") for name in written_imports(PACKAGE / f"{module}.py") if name.startswith(".")}
        open_ends |= ours - found
    return sorted(found)


if __name__ == "__main__":
    for module in core_modules():
        print(f"{PACKAGE.name}/{module}.py")
