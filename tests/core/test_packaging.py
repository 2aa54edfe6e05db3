"""The wheel: it builds, holds what it should, and its command runs from it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import accelerate_poplar

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY)],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_its_types_and_its_licence_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"accelerate_poplar-{accelerate_poplar.__version__}-py3-none-any.whl"
    assert {name.partition("/")[0] for name in names} == {
        "accelerate_poplar",
        f"accelerate_poplar-{accelerate_poplar.__version__}.dist-info",
    }
    package = REPOSITORY / "accelerate_poplar"
    files = {path.relative_to(REPOSITORY).as_posix() for path in package.rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} <= set(names)
    assert "accelerate_poplar/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_command_runs_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    code = f"import sys; sys.path.insert(0, {str(target)!r}); from accelerate_poplar import cli; print(cli.__file__); "
    code += "cli.main()"
    result = subprocess.run(
        [sys.executable, "-I", "-c", code, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(target))
    assert "launch" in result.stdout
