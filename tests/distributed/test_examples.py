"""Both examples, started as their READMEs say, at every ZeRO stage, on real text where it is at hand."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

from tests.core.scripts import load_file
from tests.data_folder import data_folder

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400
STEPS = 8
SEQ_LEN = 32
EVAL_ROWS = 32

STAGE_FLAG = ("accelerate", "launch", "--config_file", "configs/cpu_two_ranks.yaml", "--zero_stage")
STAGE_JSON = ("accelerate", "launch", "--config_file", "configs/cpu_two_ranks_zero_json.yaml")
SECTION = ("accelerate-poplar", "launch", "--config", "configs/cpu_two_ranks_poplar.yaml")
BY_HAND = ("--poplar_per_rank_micro_batch_sizes", "6,2")


def json_config(name: str) -> tuple[str, ...]:
    return (*STAGE_JSON, "--deepspeed_config_file", f"configs/{name}.json")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run and, for some, a second one that continues from its first checkpoint."""

    example: str
    zero_stage: int
    command: tuple[str, ...]
    flags: tuple[str, ...] = ()
    resume_command: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.example}-zero{self.zero_stage}"


CASES = (
    Case(example="llama", zero_stage=0, command=(*STAGE_FLAG, "0")),
    Case(example="llama", zero_stage=1, command=(*STAGE_FLAG, "1"), resume_command=json_config("zero1")),
    Case(example="llama", zero_stage=2, command=(*STAGE_FLAG, "2"), flags=BY_HAND),
    Case(example="llama", zero_stage=3, command=(*STAGE_FLAG, "3"), resume_command=(*STAGE_FLAG, "3")),
    Case(example="bert", zero_stage=0, command=json_config("zero0"), flags=BY_HAND),
    Case(example="bert", zero_stage=1, command=SECTION),
    Case(example="bert", zero_stage=2, command=json_config("zero2"), resume_command=json_config("zero2_poplar")),
    Case(example="bert", zero_stage=3, command=json_config("zero3"), flags=BY_HAND),
)


def train(case: Case, command: tuple[str, ...], output_dir: Path, *more: str) -> str:
    """Run the example to its end; what it printed."""
    folder = data_folder()
    program, *options = command
    result = subprocess.run(
        [
            *(str(Path(sys.executable).with_name(program)), *options, f"examples/{case.example}/train.py"),
            *("--size", "tiny", "--seq_len", str(SEQ_LEN), "--vocab_size", "800", "--output_dir", str(output_dir)),
            *(("--data_dir", str(folder / "wikitext-2")) if folder else ()),
            *("--max_train_rows", "400", "--max_eval_rows", str(EVAL_ROWS), "--per_device_train_batch_size", "4"),
            *("--max_steps", str(STEPS), "--save_steps", str(STEPS // 2), "--logging_steps", "1"),
            *("--learning_rate", "2e-3", "--report_to", "none", "--disable_tqdm", "true"),
            *("--poplar_profile_budget_s", "2", "--poplar_cache_dir", str(output_dir.parent / "cache")),
            *more,
        ],
        cwd=REPOSITORY,
        env={**os.environ, "POPLAR_EMULATE_SLOWDOWN": "1,3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    return result.stdout


def logged(output_dir: Path) -> list[tuple[int, float, float]]:
    """Step, loss and learning rate of every logged optimizer step."""
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in history if "loss" in entry]


def plan_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "poplar_plan.json").read_text())


@pytest.mark.scenario(44)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_example_trains_evaluates_and_resumes(case: Case, tmp_path: Path) -> None:
    first = tmp_path / "first"
    output = train(case, case.command, first, *case.flags)

    steps = logged(first)
    assert [step for step, _, _ in steps] == list(range(1, STEPS + 1))
    assert sum(loss for _, loss, _ in steps[-2:]) < sum(loss for _, loss, _ in steps[:2]) - 0.2
    plan = plan_of(first)
    assert (plan["zero_stage"], plan["global_batch_size"]) == (case.zero_stage, 8)
    assert ("valid.txt" if data_folder() else "generated text") in output

    evaluation = json.loads((first / "eval_results.json").read_text())
    assert evaluation["eval_perplexity"] == pytest.approx(math.exp(evaluation["eval_loss"]))
    assert "eval_perplexity" in output
    # Text of the same kind: neither a sum over ranks nor a share of one rank.
    assert evaluation["eval_loss"] == pytest.approx(steps[-1][1], abs=1.0)
    if case.example == "bert":
        assert evaluation["eval_loss"] == pytest.approx(bert_loss(first), rel=0.02)

    if case.resume_command is not None:
        second = tmp_path / "second"
        checkpoint = str(first / f"checkpoint-{STEPS // 2}")
        train(case, case.resume_command, second, *case.flags, "--resume_from_checkpoint", checkpoint)
        assert plan_of(second)["global_batch_size"] == plan["global_batch_size"]
        for before, after in zip(steps, logged(second), strict=True):
            assert after == pytest.approx(before, rel=1e-5)


def bert_loss(output_dir: Path) -> float:
    """The loss of the saved model on the evaluation rows, in this process alone."""
    example = load_file(REPOSITORY / "examples" / "bert" / "train.py", "example_bert")
    folder = data_folder()
    _, lines, _ = example.load_text(str(folder / "wikitext-2") if folder else None)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output_dir / "tokenizer")
    rows = example.make_rows(example.ScriptArguments(seq_len=SEQ_LEN), tokenizer, lines, EVAL_ROWS)
    model = BertForMaskedLM.from_pretrained(output_dir).eval()
    with torch.no_grad():
        return float(model(**{name: torch.tensor(rows[name]) for name in ("input_ids", "labels")}).loss)
