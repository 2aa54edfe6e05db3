"""The command itself: its help, its exit codes, its errors."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import accelerate_poplar
from accelerate_poplar import ConfigError, ProfileError
from accelerate_poplar.cli import build_parser, main

COMMANDS = ("launch", "plan", "simulate")


def test_the_console_script_is_this_function() -> None:
    (script,) = entry_points(group="console_scripts", name="accelerate-poplar")
    assert script.load() is main


def test_the_installed_version_is_the_packages() -> None:
    assert version("accelerate-poplar") == accelerate_poplar.__version__


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"    {command} " in text
    assert "PoplarTrainer" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main([command, "--help"])
    except SystemExit as left:
        code = left.code
    assert code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: accelerate-poplar {command}")
    assert len(text.splitlines()) > 10


@pytest.mark.parametrize("arguments", [[], ["lunch"], ["plan"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: accelerate-poplar" in capsys.readouterr().err


def test_an_error_of_ours_is_one_message_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "profiles.json"
    assert main(["plan", "--profiles", str(missing), "--global-batch-size", "8"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"accelerate-poplar plan: {missing}: no such file.\n"
    assert captured.out == ""


def test_debug_shows_where_an_error_came_from(tmp_path: Path) -> None:
    with pytest.raises(ProfileError):
        main(["--debug", "plan", "--profiles", str(tmp_path / "profiles.json"), "--global-batch-size", "8"])
    with pytest.raises(ConfigError):
        main(["--debug", "launch", "--config", str(tmp_path / "run.yaml"), "train.py"])


def test_debug_after_launch_is_left_for_accelerate() -> None:
    args = build_parser().parse_args(["launch", "--debug", "--config", "a.yaml", "train.py", "--help"])
    assert args.arguments == ["--debug", "--config", "a.yaml", "train.py", "--help"]
    assert not args.debug


def test_the_module_can_be_run() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "accelerate_poplar.cli", "launch", "--config", "nope.yaml", "train.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.strip().endswith("accelerate-poplar launch: nope.yaml: no such file.")
    assert "Traceback" not in result.stderr
