"""A second start measures nothing; a changed one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate_poplar.comm import SingleRank
from accelerate_poplar.config import default_cache_dir
from accelerate_poplar.emulation import Emulation
from accelerate_poplar.measure import MeasuredProfile, explain_memory, profile_cluster
from accelerate_poplar.profile_cache import ProfileCache, cache_key, model_fingerprint
from accelerate_poplar.profiles import ClusterProfile

from .ranks_in_threads import run_ranks


class Counted:
    """A small model whose real micro-steps are counted."""

    def __init__(self, width: int = 8) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.micro_steps = 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.micro_steps += type(batch) is torch.Tensor
        return model(batch).sum()

    def profile(self, cache: ProfileCache | None, **changes) -> MeasuredProfile:
        values = {
            "model": self.model,
            "loss_fn": self.loss,
            "make_batch": lambda size: torch.ones(size, 4),
            "ranks": SingleRank(),
            "device": torch.device("cpu"),
            "dtype": torch.float32,
            "zero_stages": (0, 2),
            "largest_micro_batch": 4,
            "user_caps": None,
            "memory_fraction": 0.9,
            "budget_s": 5.0,
            "relative_error": 0.5,
            "model_name": "test",
            "seq_len": 16,
            "cache": cache,
        }
        return profile_cluster(**{**values, **changes})


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(folder=tmp_path / "profiles")


def test_a_second_start_runs_no_micro_step(cache: ProfileCache) -> None:
    first = Counted()
    measured = first.profile(cache)
    assert first.micro_steps > 0
    second = Counted()
    known = second.profile(cache, model_name="another label")
    assert second.micro_steps == 0
    assert known.ranks == measured.ranks
    assert known.zero_stages == measured.zero_stages
    assert known.memory == measured.memory
    assert known.model == "another label"
    assert known.seconds == 0.0
    assert len(list(cache.folder.iterdir())) == 1, "no drafts are left behind"


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_len": 32},
        {"dtype": torch.bfloat16},
        {"zero_stages": (0, 3)},
        {"largest_micro_batch": 8},
        {"memory_fraction": 0.5},
        {"user_caps": [3]},
        {"emulation": Emulation(memory_bytes=2**20)},
        {"emulation": Emulation(slowdown=1.5)},
        {"deepspeed_config": {"zero_optimization": {"reduce_bucket_size": 100}}},
        {"optimizer_bytes_per_parameter": 4.0},
        {"shortest": torch.ones(1, 4)},
    ],
)
def test_whatever_counts_is_measured_again(cache: ProfileCache, changes: dict) -> None:
    Counted().profile(cache)
    changed = Counted()
    changed.profile(cache, **changes)
    assert changed.micro_steps > 0


def test_another_model_is_measured_again(cache: ProfileCache) -> None:
    Counted().profile(cache)
    wider = Counted(width=16)
    wider.profile(cache)
    assert wider.micro_steps > 0
    frozen = Counted()
    frozen.model[0].weight.requires_grad_(False)
    frozen.profile(cache)
    assert frozen.micro_steps > 0


def test_reprofile_ignores_and_replaces(cache: ProfileCache) -> None:
    Counted().profile(cache)
    (path,) = cache.folder.iterdir()
    path.write_text(path.read_text().replace('"device": "', '"device": "old '), encoding="utf-8")
    again = Counted()
    again.profile(ProfileCache(folder=cache.folder, refresh=True))
    assert again.micro_steps > 0
    assert '"device": "old' not in path.read_text()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', '{"profile": {"version": 99}}'])
def test_a_damaged_file_is_measured_again(cache: ProfileCache, damage: str) -> None:
    Counted().profile(cache)
    (path,) = cache.folder.iterdir()
    path.write_text(damage, encoding="utf-8")
    again = Counted()
    again.profile(cache)
    assert again.micro_steps > 0
    assert json.loads(path.read_text())["profile"]["version"] == 1


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way", encoding="utf-8")
    assert Counted().profile(ProfileCache(folder=blocked / "profiles")).ranks


def test_only_rank_0_reads(tmp_path: Path) -> None:
    key = cache_key({"a": 1})
    profile = Counted().profile(None)
    ProfileCache(folder=tmp_path).store(SingleRank(), key, {"a": 1}, profile)

    def work(ranks):
        folder = tmp_path if ranks.rank == 0 else tmp_path / "not there"
        return ProfileCache(folder=folder).load(ranks, key)

    first, second = run_ranks(2, work)
    assert first == second
    assert isinstance(first, ClusterProfile)


def test_a_known_limit_is_still_explained(cache: ProfileCache) -> None:
    small = Emulation(memory_bytes=600)
    Counted().profile(cache, emulation=small)
    known = Counted().profile(cache, emulation=small)
    assert known.stage(0).max_micro_batch_size == (0,)
    assert "rank 0" in explain_memory(known, 0)


def test_the_fingerprint_knows_checkpointing_but_no_values() -> None:
    plain = model_fingerprint(Counted().model)
    other = Counted()
    nn.init.zeros_(other.model[0].weight)
    assert model_fingerprint(other.model) == plain
    other.model.gradient_checkpointing = True
    assert model_fingerprint(other.model) != plain


def test_keys_do_not_depend_on_the_order_of_their_parts() -> None:
    assert cache_key({"a": 1, "b": (2, 3)}) == cache_key({"b": [2, 3], "a": 1})
    assert default_cache_dir().name == "accelerate_poplar"
