"""Converting checkpoints with uneven shares, on files made by hand."""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_poplar import cli_checkpoint
from accelerate_poplar.checkpoint import check_resume, saved_shares, to_even
from accelerate_poplar.errors import ConfigError
from accelerate_poplar.state_layout import StateShares
from accelerate_poplar.state_record import RECORD_KEY, share_record

SHARES = StateShares(fractions=(0.75, 0.25))
VALUES = torch.arange(1.0, 23.0)
"""Real elements of the flat group; it is padded to 24."""


@dataclass
class Address:
    """Stands for DeepSpeed's `fragment_address`."""

    start: int
    numel: int


def save_stage2(folder: Path) -> None:
    """Two parameters, of 10 and 12 elements, in one flat group."""
    bounds = SHARES.bounds(24, block=2)
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    (folder / "other.txt").write_text("kept")
    (folder / "poplar_plan.json").write_text(
        json.dumps(
            {"digest": "x", "ranks": [{"rank": 0, "state_fraction": 0.75}, {"rank": 1, "state_fraction": 0.25}]}
        )
    )
    padded = torch.nn.functional.pad(VALUES, (0, 2))
    for rank in (0, 1):
        start, end = bounds[rank], bounds[rank + 1]
        lean = VALUES[start : min(end, 22)].clone()
        mappings = OrderedDict()
        for name, first, last in (("a", 0, 10), ("b", 10, 22)):
            low, high = max(first, start), min(last, end)
            if low < high:
                mappings[name] = Address(start=low - start, numel=high - low)
        state: dict[str, Any] = {
            "zero_stage": 2,
            "single_partition_of_fp32_groups": [lean],
            "group_paddings": [end - start - lean.numel()],
            "param_slice_mappings": [mappings],
            "base_optimizer_state": {
                "state": {0: {"exp_avg": 2 * padded[start:end].clone(), "step": torch.tensor(3.0)}},
                "param_groups": [{"params": [0], "lr": 0.1}],
            },
            RECORD_KEY: share_record(SHARES, zero_stage=2),
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0"}, folder / "global_step3" / name)


def loaded(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / "global_step3" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    content: dict[str, Any] = torch.load(path, weights_only=False)["optimizer_state_dict"]
    return content


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli_checkpoint.add_parsers(parser.add_subparsers())
    return parser.parse_args(["checkpoint", "to-even", *arguments])


def test_the_command_writes_equal_shares_and_keeps_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint-3"
    save_stage2(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    args = parse(str(folder))
    assert args.run(args) == 0
    said = capsys.readouterr().out
    assert "rank 0 75.0%, rank 1 25.0%; now 50.0% each" in said
    assert "checkpoint-3-even" in said
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    copy = tmp_path / "checkpoint-3-even"
    first, second = loaded(copy, 0), loaded(copy, 1)
    assert first["group_paddings"] == [0]
    assert second["group_paddings"] == [2]
    pieces = [state["single_partition_of_fp32_groups"][0] for state in (first, second)]
    assert [piece.numel() for piece in pieces] == [12, 10]
    assert torch.equal(torch.cat(pieces), VALUES)
    moments = [state["base_optimizer_state"]["state"][0]["exp_avg"] for state in (first, second)]
    assert torch.equal(torch.cat(moments), torch.nn.functional.pad(2 * VALUES, (0, 2)))
    assert first["base_optimizer_state"]["state"][0]["step"] == 3
    assert first["param_slice_mappings"] == [{"a": Address(start=0, numel=10), "b": Address(start=10, numel=2)}]
    assert second["param_slice_mappings"] == [{"b": Address(start=0, numel=10)}]
    assert (copy / "other.txt").read_text() == "kept"
    assert json.loads((copy / "poplar_plan.json").read_text()) == {"ranks": [{"rank": 0}, {"rank": 1}]}
    assert saved_shares(copy) is None
    assert saved_shares(folder) == saved_shares(folder / "global_step3") == SHARES


def test_what_cannot_be_converted_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    save_stage2(folder)
    with pytest.raises(ConfigError, match="no such folder"):
        to_even(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"is no DeepSpeed checkpoint. Name a folder with a `latest` file"):
        to_even(tmp_path / "empty")
    with pytest.raises(ConfigError, match="exists already"):
        to_even(folder, tmp_path / "empty")
    to_even(folder, tmp_path / "even")
    with pytest.raises(ConfigError, match="in even shares already"):
        to_even(tmp_path / "even")
    (folder / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConfigError, match=r"state of ranks \[1\]"):
        to_even(folder)
    assert not list(tmp_path.glob("*.partial"))


def test_a_missing_last_rank_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    save_stage2(folder)
    (folder / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConfigError, match="state of 1 ranks, but it was cut for 2"):
        to_even(folder)


def test_shards_of_another_size_than_recorded_are_damage(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    save_stage2(folder)
    path = folder / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["group_paddings"] = [8]
    torch.save(content, path)
    with pytest.raises(ConfigError, match=r"parameter group 0: the ranks' shards have .* damaged"):
        to_even(folder)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("fractions", "world_size", "message"),
    [
        (None, 2, "this run holds it in even shares.*to-even DIR.*universal"),
        ((0.25, 0.75), 2, r"shares of 0.75, 0.25, this run holds it in shares of 0.25, 0.75"),
        ((0.5, 0.25, 0.25), 3, "cut for 2 ranks, this run has 3.*ds_to_universal"),
    ],
)
def test_resume_with_other_shares_names_the_route(
    tmp_path: Path, fractions: tuple[float, ...] | None, world_size: int, message: str
) -> None:
    save_stage2(tmp_path / "c")
    check_resume(tmp_path / "c", fractions=(0.75, 0.25), world_size=2)
    with pytest.raises(ConfigError, match=message):
        check_resume(tmp_path / "c", fractions=fractions, world_size=world_size)
