"""Every command of the READMEs is run: quick ones here, launches with two steps, scripts by other tests."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_poplar.cli import main
from tests.data_folder import data_folder

REPOSITORY = Path(__file__).resolve().parents[2]
READMES = ("README.md", "examples/llama/README.md", "examples/bert/README.md", "examples/sft/README.md")
TIMEOUT_S = 400

RUN_ELSEWHERE = {
    "scripts/quickstart.sh": "tests/distributed/test_quickstart.py runs what it starts",
    "scripts/test.sh": "CI is this command",
    "python -m pip install -c constraints.txt torch": "scripts/setup.sh, by CI",
    "python -m pip install -c constraints.txt .": "scripts/setup.sh, by CI; the wheel by test_packaging.py",
}
ON_THE_CPU = ("--num_processes", "2", "--gpu_ids", "", "--mixed_precision", "no")
SHORT = ("--size", "tiny", "--seq_len", "32", "--vocab_size", "500", "--max_train_rows", "64", "--max_eval_rows", "8")
SHORT += ("--max_steps", "2", "--save_steps", "2", "--report_to", "none", "--poplar_profile_budget_s", "2")


def blocks(readme: str, language: str) -> list[str]:
    text = (REPOSITORY / readme).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The command lines of all READMEs, each once."""
    lines = [line for readme in READMES for block in blocks(readme, "sh") for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.strip()))


LAUNCHES = [
    line for line in commands() if line.split()[:2] in (["accelerate", "launch"], ["accelerate-poplar", "launch"])
]
PLANNING = [line for line in commands() if line.startswith("accelerate-poplar ") and line not in LAUNCHES]


def test_every_command_is_run_by_some_test() -> None:
    assert set(commands()) == {*LAUNCHES, *PLANNING, *RUN_ELSEWHERE}
    for line in RUN_ELSEWHERE:
        script = REPOSITORY / line
        assert not line.startswith("scripts/") or os.access(script, os.X_OK)


@dataclass(frozen=True)
class Launched:
    """What the launches of this session left behind."""

    folder: Path


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Run every launch command of the READMEs, cut down to two steps, on the CPU."""
    folder = tmp_path_factory.mktemp("readme")
    for line in LAUNCHES:
        program, _, option, config, script, *arguments = shlex.split(line)
        output = folder / arguments[arguments.index("--output_dir") + 1]
        data = data_folder()
        result = subprocess.run(
            [
                *(str(Path(sys.executable).with_name(program)), "launch", option, config, *ON_THE_CPU),
                *(script, *arguments, *SHORT, "--output_dir", str(output)),
                *(("--data_dir", str(data / "wikitext-2")) if data else ()),
            ],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout[-5000:]}"
        assert "eval_perplexity" in result.stdout, line
        assert (output / "poplar_plan.json").is_file(), line
    return Launched(folder)


def test_the_launch_commands_train(launched: Launched) -> None:
    assert len(LAUNCHES) >= 6
    assert {path.name for path in (launched.folder / "outputs").iterdir()} >= {"llama", "bert", "sft", "sft-packed"}


@pytest.mark.parametrize("line", PLANNING)
def test_the_planning_commands_print_a_plan(line: str, launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(line)[1:]
    assert main([str(launched.folder / a) if a.startswith("outputs/") else a for a in arguments]) == 0
    assert "samples/s" in capsys.readouterr().out


def test_the_six_lines_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 6
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rows = torch.randint(0, 32, (32, 8)).tolist()
    names = {
        "model": LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape)),
        "train_dataset": Dataset.from_dict({"input_ids": rows, "labels": rows}),
    }
    exec(compile(code, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 6
    assert (tmp_path / "outputs" / "run" / "poplar_plan.json").is_file()
