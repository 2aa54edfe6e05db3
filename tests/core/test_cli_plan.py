"""The commands `plan` and `simulate`, as a user types them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate_poplar import cli_plan
from accelerate_poplar.errors import ConfigError, InsufficientMemoryError, PlanError, PoplarError, ProfileError
from accelerate_poplar.plan import Plan
from accelerate_poplar.profiles import ClusterProfile
from accelerate_poplar.search import STRATEGIES
from accelerate_poplar.simulate import step_time
from tests.core.planner_cases import Case

CLUSTERS = Path(__file__).resolve().parents[2] / "configs" / "clusters"


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    cli_plan.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args([str(argument) for argument in arguments])
    code: int = args.run(args)
    return code


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A profile file of a fast and a slow rank at stages 0 and 2."""
    case = Case(
        times=((1.0, 1.5, 2.0), (2.0, 4.0, 6.0)), caps=(3, 2), global_batch_size=12, zero_stage=2, per_step_s=0.5
    )
    path = tmp_path / "profiles.json"
    data = case.profile().to_dict()
    data["zero_stages"]["0"] = {"max_micro_batch_size": [3, 0]}
    path.write_text(json.dumps(data))
    return path


def test_plan_prints_a_table_that_names_ranks_shares_and_limits(
    profiles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("plan", "--profiles", profiles, "--global-batch-size", 12, "--zero-stage", 2) == 0
    out = capsys.readouterr().out
    assert "ZeRO stage 2, global batch 12, strategy optimal" in out
    assert "s a step" in out
    assert "x the even split" in out
    header, _, *rows = out.splitlines()[-4:]
    assert header.split()[:4] == ["rank", "host", "device", "memory"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert rows[0].split()[-1] in {"memory", "speed"}


def test_plan_says_why_a_stage_is_out(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("plan", "--profiles", profiles, "--global-batch-size", 12)
    out = capsys.readouterr().out
    assert "ZeRO stage 0 is out: not one sample fits on rank 1." in out
    assert "ZeRO stage 2, global" in out


def test_plan_as_json_is_the_plan_and_its_figures(
    profiles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    arguments = ("--global-batch-size", 12, "--zero-stage", 2, "--strategy", "poplar", "--json", "--output", target)
    command("plan", "--profiles", profiles, *arguments)
    report = json.loads(capsys.readouterr().out)
    plan = Plan.load(target)
    assert plan == Plan.from_dict(report)
    assert plan.strategy == "poplar"
    assert report["predicted_step_time_s"] == step_time(ClusterProfile.load(profiles), plan)
    assert report["samples_per_s"] == pytest.approx(12 / report["predicted_step_time_s"])
    assert len(report["limited_by"]) == 2
    assert report["speedup_over_even"] >= 1.0
    assert report["advice"] is None


def test_plan_gives_advice_in_words_and_as_json(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("plan", "--profiles", profiles, "--global-batch-size", 12, "--advise")
    assert "- One more d (like rank 0): " in capsys.readouterr().out
    command("plan", "--profiles", profiles, "--global-batch-size", 12, "--advise", "--json")
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert advice["now"]["gain"] == 1.0
    assert any("One more" in sentence for sentence in advice["sentences"])


def test_plan_where_an_even_split_does_not_fit(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("plan", "--profiles", profiles, "--global-batch-size", 12, "--zero-stage", 0)
    assert "an even split does not fit" in capsys.readouterr().out


def test_emulated_profiles_are_marked(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(profiles, lambda data: data.update(emulated=True))
    command("plan", "--profiles", profiles, "--global-batch-size", 12)
    assert "emulation" in capsys.readouterr().out
    command("simulate", "--profiles", profiles, "--global-batch-size", 12)
    assert "all figures emulated or simulated" in capsys.readouterr().out


def test_simulate_judges_a_plan_beside_the_strategies(
    profiles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.json"
    command("plan", "--profiles", profiles, "--global-batch-size", 12, "--strategy", "even", "--output", mine)
    capsys.readouterr()
    command("simulate", "--profiles", profiles, "--plan", mine)
    out = capsys.readouterr().out
    assert "your plan" in out
    assert all(name in out for name in STRATEGIES)
    command("simulate", "--profiles", profiles, "--plan", mine, "--json")
    report = json.loads(capsys.readouterr().out)
    rows = {row["strategy"]: row for row in report["zero_stages"]["2"]}
    assert report["plan"]["step_time_s"] == rows["even"]["step_time_s"]
    assert set(rows) == set(STRATEGIES)
    assert len(rows["optimal"]["idle_fraction_by_rank"]) == 2


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_simulate_a_cluster_nobody_has(tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str) -> None:
    picture, saved = tmp_path / f"step.{ending}", tmp_path / "simulated.json"
    code = command(
        "simulate",
        "--cluster",
        CLUSTERS / "c.yaml",
        "--model",
        "llama-1.1b",
        "--global-batch-size",
        96,
        "--timeline",
        picture,
        "--save-profiles",
        saved,
        "--advise",
    )
    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("cluster C, llama-1.1b, 2048 tokens a sample, global batch 96: all figures simulated")
    assert "over flops" in out
    assert "Uneven training state at ZeRO-3 (simulated" in out
    assert "One more A800-80GB" in out
    assert picture.stat().st_size > 1000
    assert ClusterProfile.load(saved).emulated


def test_simulate_as_json_covers_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    command("simulate", "--cluster", CLUSTERS / "b.yaml", "--model", "llama-1.1b", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"] is True
    assert report["global_batch_size"] == 2**21 // 2048
    assert set(report["zero_stages"]) == {"0", "1", "2", "3"}
    does_not_fit = report["zero_stages"]["0"][0]
    assert (does_not_fit["plan"], does_not_fit["step_time_s"]) == (None, None)
    assert "not a single sample fits at ZeRO stage 0" in does_not_fit["problem"]
    assert report["cephalo"]["gain"] > 0.0


def test_simulate_on_measured_layer_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {
        "models": {
            "m": {"hidden_size": 64, "num_layers": 2, "parameters_per_layer": 50000, "total_parameters": 200000}
        },
        "curves": [
            {
                "model": "m",
                "gpu": gpu,
                "seq_len": 32,
                "dtype": "float16",
                "forward_ms": [speed * size for size in (1, 2, 3, 4)],
                "backward_ms": [2 * speed * size for size in (1, 2, 3, 4)],
            }
            for gpu, speed in (("v100-pciex16", 1.0), ("t4", 3.0))
        ],
    }
    path = tmp_path / "latencies.json"
    path.write_text(json.dumps(table))
    arguments = ("--model", "m", "--latencies", path, "--seq-len", 32, "--global-batch-size", 32, "--zero-stage", 0)
    command("simulate", "--cluster", CLUSTERS / "b.yaml", *arguments, "--json")
    plan = json.loads(capsys.readouterr().out)["zero_stages"]["0"][0]["plan"]
    # Two cards do 3 samples where the other two do 1.
    assert [sum(rank["micro_batch_sizes"]) for rank in plan["ranks"]] == [12, 12, 4, 4]


# Arguments that contradict each other


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--cluster", "c.yaml"), ConfigError, "--cluster needs --model: one of llama-0.5b"),
        (("--cluster", "c.yaml", "--model", "llama-0.5b", "--plan", "x"), ConfigError, "--plan belongs to --profiles"),
        (("--cluster", "c.yaml", "--model", "llama-0.5b", "--dtype", "fp32"), ConfigError, "fp32 needs --latencies"),
        (("--cluster", "c.yaml", "--model", "m", "--latencies", "x"), ConfigError, "--latencies needs --seq-len"),
        (("--cluster", "none.yaml", "--model", "llama-0.5b"), ConfigError, "none.yaml: no such file"),
        (("--cluster", "c.yaml", "--model", "gpt-9"), ConfigError, "'gpt-9' is neither a file nor one of"),
        (("--cluster", "b.yaml", "--model", "llama-7b"), InsufficientMemoryError, "not a single sample fits at ZeRO"),
        (
            ("--cluster", "c.yaml", "--model", "llama-0.5b", "--global-batch-size", "0"),
            PlanError,
            "global_batch_size is 0",
        ),
    ],
)
def test_simulate_refuses_what_does_not_go_together(
    arguments: tuple[str, ...], error: type[PoplarError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CLUSTERS)
    with pytest.raises(error, match=message):
        command("simulate", *arguments)


def test_a_stage_that_does_not_exist_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("plan", "--profiles", "x", "--global-batch-size", 1, "--zero-stage", 4)
    assert "'4' is not 0, 1, 2, 3 or auto" in capsys.readouterr().err


def test_samples_that_are_not_tokens_need_a_batch(profiles: Path) -> None:
    edit(profiles, lambda data: data.update(seq_len=0))
    with pytest.raises(ConfigError, match="give --global-batch-size"):
        command("simulate", "--profiles", profiles)


# Profile files that are wrong: the message names the file, the rank and the field


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


BAD_PROFILES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no points": (lambda d: d["ranks"][1].update(points=[]), r"rank 1: `points` must be a list with at least one"),
    "points missing": (lambda d: d["ranks"][1].pop("points"), r"rank 1: `points` must be a list"),
    "a time of NaN": (
        lambda d: d["ranks"][0]["points"][1].update(step_time_s=float("nan")),
        r"rank 0: points\[1\]: `step_time_s` is nan",
    ),
    "a negative size": (
        lambda d: d["ranks"][0]["points"][0].update(micro_batch_size=-1),
        r"rank 0: points\[0\]: `micro_batch_size` is -1",
    ),
    "unsorted sizes": (
        lambda d: d["ranks"][1]["points"].reverse(),
        r"rank 1: points\[1\]: `micro_batch_size` 2 follows 3; sizes must increase",
    ),
    "two ranks with one number": (lambda d: d["ranks"][1].update(rank=0), r"rank 0 appears 2 times"),
    "a negative cap": (
        lambda d: d["zero_stages"]["2"].update(max_micro_batch_size=[3, -2]),
        r"zero_stages\['2'\]: rank 1: `max_micro_batch_size` is -2",
    ),
    "a cap too few": (
        lambda d: d["zero_stages"]["2"].update(max_micro_batch_size=[3]),
        r"zero_stages\['2'\]: `max_micro_batch_size` has 1 entries for 2 ranks",
    ),
    "an overlap above 1": (lambda d: d["zero_stages"]["2"].update(overlap=1.5), r"`overlap` is 1.5"),
    "no stages": (lambda d: d.update(zero_stages={}), "`zero_stages` must be an object with at least one stage"),
}


@pytest.mark.parametrize("name", BAD_PROFILES)
def test_wrong_profiles_name_the_file_the_rank_and_the_field(profiles: Path, name: str) -> None:
    change, message = BAD_PROFILES[name]
    edit(profiles, change)
    with pytest.raises(ProfileError, match=message) as caught:
        command("plan", "--profiles", profiles, "--global-batch-size", 12)
    assert str(profiles) in str(caught.value)


def test_a_cap_of_zero_everywhere_names_the_ranks(profiles: Path) -> None:
    edit(profiles, lambda data: data["zero_stages"]["2"].update(max_micro_batch_size=[0, 0]))
    with pytest.raises(InsufficientMemoryError, match=r"not a single sample fits .* 2 on rank 0 .*; rank 1"):
        command("plan", "--profiles", profiles, "--global-batch-size", 12)


def test_a_batch_of_nothing_is_refused(profiles: Path) -> None:
    with pytest.raises(PlanError, match="global_batch_size is 0; it must be a whole number of at least 1"):
        command("plan", "--profiles", profiles, "--global-batch-size", 0)
