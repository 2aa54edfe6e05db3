"""Two processes on one real GPU, each with a part of its memory, over gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from ..distributed.launch import start_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_every_rank_keeps_to_its_part_of_the_memory(tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(result)]
    outputs = start_ranks(command, world_size=2, timeout_s=240, folder=tmp_path)
    assert [output.code for output in outputs] == [0, 0], "\n".join(output.text[-3000:] for output in outputs)
    large, small = json.loads(result.read_text())
    assert large["cap"] > small["cap"] >= 1
    for rank in (large, small):
        assert rank["points"][-1] <= rank["cap"]
        assert 0.7 * rank["budget_bytes"] < rank["peak_bytes"] <= 1.02 * rank["budget_bytes"]
