"""`accelerate-poplar launch`: what it takes out of the YAML, what it passes on, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate_poplar import ConfigError, PoplarConfig, launch
from tests.distributed.launch import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120

ACCELERATE = {
    "distributed_type": "DEEPSPEED",
    "num_processes": 2,
    "gpu_ids": "",
    "main_process_port": 0,
    "deepspeed_config": {"zero_stage": 1},
}

TELL = """
import json, os, sys
from pathlib import Path
folder, names = Path(sys.argv[1]), sys.argv[2:]
told = {name: os.environ.get(name) for name in (
    "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "POPLAR_CONFIG", "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE")}
named = told["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
told["deepspeed_config_is_there"] = named is not None and Path(named).is_file()
told["arguments"] = names
(folder / f"rank{told['RANK']}.json").write_text(json.dumps(told))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training script that writes what it was told into the folder it is given, one file per rank."""
    path = tmp_path / "tell.py"
    path.write_text(TELL)
    return path


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate_poplar.cli", "launch", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: object, **environment: str) -> tuple[int, str]:
    """Launch for real; the exit code and standard error."""
    process = start(*arguments, **environment)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, errors


def told(folder: Path, world_size: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def refused(*arguments: object) -> str:
    """The message of a launch that must not start anything."""
    with pytest.raises(ConfigError) as caught:
        launch.run(argparse.Namespace(arguments=[str(argument) for argument in arguments]))
    return str(caught.value)


@pytest.mark.parametrize("form", ["--config {}", "--config={}", "--config_file {}", "--config_file={}"])
def test_all_forms_of_the_option_name_the_same_file(form: str, tmp_path: Path) -> None:
    assert str(tmp_path / "nope.yaml") in refused(*form.format(tmp_path / "nope.yaml").split(), "train.py")


def test_the_section_reaches_the_ranks_and_everything_else_reaches_accelerate(tmp_path: Path, script: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    config = write(tmp_path / "run.yaml", {**ACCELERATE, "poplar": {"memory_fraction": [0.5, 0.9]}})
    before = config.read_text()
    options = ("--config", config, "--zero_stage", "3")
    code, errors = run(*options, script, tmp_path, "--config", "mine", "--", "x", TMPDIR=str(scratch))
    assert code == 0, errors
    for rank, seen in enumerate(told(tmp_path)):
        assert seen["RANK"] == str(rank)
        assert seen["WORLD_SIZE"] == "2"
        assert seen["CUDA_VISIBLE_DEVICES"] == ""
        assert seen["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
        assert PoplarConfig.load(seen["POPLAR_CONFIG"]).memory_fraction == (0.5, 0.9)
        assert seen["arguments"] == ["--config", "mine", "--", "x"]
    assert config.read_text() == before
    assert [path for path in scratch.iterdir() if path.name.startswith("accelerate-poplar")] == []


def test_a_file_named_by_the_user_comes_before_the_section(tmp_path: Path, script: Path) -> None:
    config = write(tmp_path / "run.yaml", {**ACCELERATE, "poplar": {"replan": "off"}})
    own = write(tmp_path / "own.yaml", {"replan": "on"})
    code, errors = run("--config_file", config, script, tmp_path, POPLAR_CONFIG=str(own))
    assert code == 0, errors
    assert [seen["POPLAR_CONFIG"] for seen in told(tmp_path)] == [str(own)] * 2
    assert f"POPLAR_CONFIG={own} is set and comes first" in errors


def test_without_a_section_nothing_is_handed_over_and_relative_paths_hold(tmp_path: Path, script: Path) -> None:
    options = ("--config", "configs/cpu_two_ranks_zero_json.yaml", "--deepspeed_config_file", "configs/zero3.json")
    code, errors = run(*options, script, tmp_path)
    assert code == 0, errors
    for seen in told(tmp_path):
        assert seen["POPLAR_CONFIG"] is None
        assert seen["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "configs/zero3.json"
        assert seen["deepspeed_config_is_there"]


def test_a_failing_script_is_named_without_a_traceback_of_ours(tmp_path: Path) -> None:
    script = write(tmp_path / "fail.py", "import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    code, errors = run("--config", write(tmp_path / "run.yaml", {**ACCELERATE, "poplar": {}}), script)
    assert code == 1
    assert "the training script failed" in errors
    assert "rank      : 1" in errors
    assert "Traceback" not in errors


def test_a_signal_ends_all_ranks_and_leaves_no_files(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = write(
        tmp_path / "wait.py",
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], 'ready' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n",
    )
    config = write(tmp_path / "run.yaml", {**ACCELERATE, "poplar": {"report": False}})
    process = start("--config", config, script, tmp_path, TMPDIR=str(scratch))
    ready = [tmp_path / "ready0", tmp_path / "ready1"]
    deadline = time.monotonic() + TIMEOUT_S
    while not all(path.is_file() and path.read_text() for path in ready):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert [path for path in scratch.iterdir() if path.name.startswith("accelerate-poplar")] == []
    assert not any(Path("/proc", path.read_text()).exists() for path in ready)


def test_two_hosts_meet(tmp_path: Path, script: Path) -> None:
    port = free_port()
    data = yaml.safe_load((REPOSITORY / "configs" / "two_hosts.yaml").read_text())
    config = write(tmp_path / "run.yaml", {**data, "poplar": {"timeout_s": 60}})
    address = ("--num_processes", 2, "--main_process_ip", "127.0.0.1", "--main_process_port", port)
    hosts = [start("--config", config, "--machine_rank", host, *address, script, tmp_path) for host in (0, 1)]
    for host in hosts:
        _, errors = host.communicate(timeout=TIMEOUT_S)
        assert host.returncode == 0, errors
    assert [seen["WORLD_SIZE"] for seen in told(tmp_path)] == ["2", "2"]


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    message = refused("--config", write(tmp_path / "run.yaml", ACCELERATE), tmp_path / "nope.py")
    assert message == f"{tmp_path / 'nope.py'}: no such training script."


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path, script: Path) -> None:
    message = refused("--config", write(tmp_path / "run.yaml", "distributed_type: [DEEPSPEED\n"), script)
    assert message.startswith(f"{tmp_path / 'run.yaml'}: cannot be read")


@pytest.mark.scenario(27)
def test_all_mistakes_in_the_file_are_reported_together_with_the_right_keys(tmp_path: Path, script: Path) -> None:
    wrong = {**ACCELERATE, "num_proceses": 2, "poplar": {"poplar_enabeld": False, "strategy": "optimum"}}
    config = write(tmp_path / "run.yaml", wrong)
    message = refused("--config", config, script)
    assert "2 problems" in message or "3 problems" in message
    for hint in ("`num_processes` instead of `num_proceses`", "Did you mean `enabled`?", "Did you mean 'optimal'?"):
        assert hint in message
    assert str(config) in message
    assert "accelerate.yaml" not in message


def test_a_misspelt_section_is_recognised(tmp_path: Path, script: Path) -> None:
    message = refused("--config", write(tmp_path / "run.yaml", {**ACCELERATE, "polar": {}}), script)
    assert "Did you mean `poplar` instead of `polar`?" in message


@pytest.mark.parametrize("section", [3, "on", [1]])
def test_a_section_that_is_no_mapping_is_refused(section: Any, tmp_path: Path, script: Path) -> None:
    message = refused("--config", write(tmp_path / "run.yaml", {**ACCELERATE, "poplar": section}), script)
    assert "section `poplar`: must be a mapping of settings" in message


@pytest.mark.scenario(1)
@pytest.mark.parametrize(("options", "ranks"), [((), 2), (("--num_processes", 4), 4)])
def test_sizes_for_another_number_of_ranks_are_refused_before_anything_starts(
    options: tuple[object, ...], ranks: int, tmp_path: Path, script: Path
) -> None:
    section = {"per_rank_micro_batch_sizes": [3, 2, 1]}
    config = write(tmp_path / "run.yaml", {**ACCELERATE, "poplar": section})
    message = refused("--config", config, *options, script)
    assert f"has 3 values [3, 2, 1], but the run has {ranks} ranks" in message


def test_accelerates_own_refusals_become_one_message(tmp_path: Path, script: Path) -> None:
    config = write(tmp_path / "run.yaml", ACCELERATE)
    assert "one of `--cpu`, `--multi_gpu`" in refused("--config", config, "--cpu", "--multi_gpu", script)


def test_the_help_explains_the_section_without_importing_torch() -> None:
    code = textwrap.dedent(
        """
        import sys
        from accelerate_poplar.cli import main
        assert main(["launch", "--help"]) == 0
        assert "torch" not in sys.modules
        """
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "poplar:" in result.stdout
    assert "POPLAR_CONFIG" in result.stdout
