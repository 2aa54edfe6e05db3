"""`accelerate-poplar verify`: it passes here, and it fails, naming what differs, when the weighting is wrong."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_poplar import cli_verify, verify
from accelerate_poplar.errors import ConfigError, RankError
from accelerate_poplar.verify import BUILT_IN, CaseResult, VerifyOptions, VerifyReport
from accelerate_poplar.verify_models import find_kinds, make_rows
from accelerate_poplar.verify_rank import Found, uneven_plan

REPOSITORY = Path(__file__).resolve().parents[2]
WRONG = str(Path(__file__).resolve().parent / "suites" / "verify_wrong_weights.py")
PROGRAM = str(Path(__file__).resolve().parent / "suites" / "verify_program.py")
TIMEOUT_S = 400.0


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    cli_verify.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args(["verify", *map(str, arguments)])
    code: int = args.run(args)
    return code


def save_gpt2(folder: Path) -> Path:
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 1,
        "n_embd": 16,
        "n_head": 2,
        "vocab_size": 300,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.1,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# The real thing


def test_it_passes_on_this_machine_for_every_stage_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    code = command("--json", "--cpu", "--timeout-s", TIMEOUT_S)
    found = json.loads(capsys.readouterr().out)
    assert found["cases"], found
    assert {(case["kind"], case["zero_stage"]) for case in found["cases"]} == {
        (kind, stage) for kind in BUILT_IN for stage in (0, 1, 2, 3)
    }
    assert [case["problems"] for case in found["cases"]] == [[]] * 16
    assert max(case["largest_difference"] for case in found["cases"]) < 1e-5
    assert len(found["ranks"]) == 2
    assert found["versions"]["torch"] == torch.__version__
    assert found["passed"] is True
    assert code == 0
    text = VerifyReport.from_dict(found).to_text()
    assert "passed: all 16 are equal within 1e-05" in text
    assert all(name in text for name in BUILT_IN.values())


def test_it_fails_and_names_what_differs_when_the_weighting_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    options = VerifyOptions(kinds=("llama", "module"), zero_stages=(1, 3))
    report = verify.launch(options, num_processes=2, cpu=True, timeout_s=TIMEOUT_S, entry=(WRONG,))
    assert cli_verify.show(report) == 1
    text = capsys.readouterr().out
    assert "FAILED: 2 of 4 differ by more than 1e-05." in text
    assert "plain module, own loss, ZeRO stage 1, micro-batches rank 0: [3, 2], rank 1: [1]" in text
    assert "loss at step 1:" in text
    assert "gradient norm at step 1:" in text
    by_case = {(case.kind, case.zero_stage): case for case in report.cases}
    # Llama divides by the item count it is given: there a sum is right.
    assert by_case["llama", 1].passed
    assert by_case["llama", 3].passed
    assert any("parameter layers.0.weight" in problem for problem in by_case["module", 3].problems)
    assert by_case["module", 3].largest_difference > 0.1


def test_it_runs_on_the_ranks_of_a_launcher_with_a_model_of_the_users_own(tmp_path: Path) -> None:
    model, text = save_gpt2(tmp_path / "model"), tmp_path / "notes.txt"
    text.write_text("The same training run, on unequal ranks. " * 40)
    result = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("accelerate")), "launch"),
            *("--config_file", "configs/cpu_two_ranks.yaml", "--zero_stage", "3"),
            *(PROGRAM, "verify", "--model", str(model), "--data", str(text), "--zero-stages", "2"),
        ],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "passed: all 1 are equal within 1e-05" in result.stdout
    assert result.stdout.count("passed:") == 1
    assert str(model) in result.stdout


def test_ranks_that_crash_or_hang_end_in_a_message() -> None:
    options = VerifyOptions()
    crash = ("-c", "import sys; print('no such device'); sys.exit(3)")
    with pytest.raises(RankError, match=r"(?s)2 ranks on this machine: exit code 1.*no such device") as raised:
        verify.launch(options, num_processes=2, cpu=True, timeout_s=120, entry=crash)
    assert "elastic" not in str(raised.value)
    with pytest.raises(RankError, match="this rank: not done after 1 s"):
        verify.join(options, timeout_s=1.0, entry=("-c", "import time; time.sleep(60)"))


def test_a_setting_found_wrong_on_the_ranks_is_a_setting_that_is_wrong() -> None:
    words = "import sys, json; open(sys.argv[2], 'w').write(json.dumps({'error': 'no such model'}))"
    with pytest.raises(ConfigError, match="no such model"):
        verify.join(VerifyOptions(), timeout_s=60.0, entry=("-c", words))


# Its parts


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_its_plans_are_uneven(zero_stage: int, world_size: int) -> None:
    plan = uneven_plan(zero_stage, world_size)
    assert len({rank.micro_batch_sizes for rank in plan.ranks}) > 1
    counts = {len(rank.micro_batch_sizes) for rank in plan.ranks}
    assert (len(counts) > 1) is (zero_stage < 2)
    assert any(0 in rank.micro_batch_sizes for rank in plan.ranks) is (zero_stage > 1)


def test_what_is_not_a_number_counts_as_a_difference() -> None:
    found = Found(1e-5)
    found.numbers("loss", [1.0, math.nan], [1.0, 2.0])
    found.numbers("loss", [1.0], [1.0, 2.0])
    found.tensors({"w": torch.tensor([1.0, math.nan])}, {"w": torch.tensor([1.0, 2.0])})
    assert [problem.split(":")[0] for problem in found.problems] == ["loss at step 2", "loss", "parameter w"]
    assert not found.largest <= 1e-5


def test_rows_are_uneven_and_some_have_no_label() -> None:
    rows = make_rows(find_kinds(VerifyOptions())["llama"], 20)
    counts = [int((row["labels"] != -100).sum()) for row in rows]
    assert min(counts) == 0
    assert len(set(counts)) > 3


def test_text_becomes_rows(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz")
    row = make_rows(find_kinds(VerifyOptions(data=str(text)))["llama"], 1)[0]
    assert row["input_ids"].tolist() == list(b"abcdefghijkl")
    text.write_text("abc")
    with pytest.raises(ConfigError, match="--data has 3 tokens, a row needs 12"):
        make_rows(find_kinds(VerifyOptions(data=str(text)))["llama"], 1)


def test_a_model_of_the_users_own_has_no_dropout(tmp_path: Path) -> None:
    kind = find_kinds(VerifyOptions(model=str(save_gpt2(tmp_path))))["own"]
    model: Any = kind.model()
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.config.resid_pdrop == model.config.embd_pdrop == 0.0
    assert make_rows(kind, 1)[0]["input_ids"].shape == (32,)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config of a transformers model"):
        find_kinds(VerifyOptions(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    with pytest.raises(ConfigError, match="ViTModel is not a language model or a sequence classifier"):
        find_kinds(VerifyOptions(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ("lama",)}, "unknown kind 'lama'; known: llama, bert_mlm, bert_cls, module"),
        ({"zero_stages": (4,)}, "4 is not a ZeRO stage"),
        ({"zero_stages": ()}, "there is nothing to verify"),
        ({"data": "nowhere.txt"}, "--data nowhere.txt: no such file"),
        ({"seq_len": 2}, "--seq-len is 2; it must be at least 4"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VerifyOptions(**settings)


def test_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="--num-processes is 1; uneven plans need at least 2 ranks"):
        command("--num-processes", 1)


def test_options_and_reports_survive_their_json_form() -> None:
    options = VerifyOptions(kinds=("llama",), zero_stages=(0, 3), model="m", seq_len=8)
    assert VerifyOptions.from_json(options.to_json()) == options
    case = CaseResult(
        kind="llama",
        zero_stage=3,
        micro_batch_sizes=((3, 2), (1, 0)),
        largest_difference=float("inf"),
        problems=tuple(f"loss at step {step}: 1, one process has 2" for step in range(9)),
        seconds=1.0,
    )
    report = VerifyReport(ranks=("a", "b"), model="", steps=4, tolerance=1e-5, versions={}, cases=(case,))
    assert VerifyReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert "and 3 more (all of them with --json)" in report.to_text()
    assert not report.passed
