"""Models larger than a device are timed in shortened forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate_poplar.blocks import combine, shortened, variants
from accelerate_poplar.comm import SingleRank
from accelerate_poplar.emulation import Emulation
from accelerate_poplar.errors import ProfileError
from accelerate_poplar.measure import MeasuredProfile, profile_cluster

from .ranks_in_threads import ThreadRanks, run_ranks
from .tiny_models import tiny_bert, tiny_llama


class Block(nn.Module):
    """Takes a stated time per sample on a scripted clock."""

    def __init__(self, clock: list[float], seconds: float, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.clock, self.seconds = clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock[0] += self.seconds * x.shape[0]
        return self.linear(x)


class Mixed(nn.Module):
    """Ten blocks of two kinds, with something before."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.clock = [0.0]
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(Block(self.clock, 0.5, width))
            if position % 5 == 0
            else Block(self.clock, 0.01 * width, width)
            for position in range(10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock[0] += 1.0
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_forms_keep_the_first_of_each_kind_and_add_one() -> None:
    model = Mixed()
    forms = variants(model)
    assert [form.keep[model.blocks] for form in forms] == [(0, 1), (0, 1, 5), (0, 1, 2)]
    assert [form.weight for form in forms] == [0, 1, 7]
    blocks = list(model.blocks)
    with shortened(forms[1]):
        assert list(model.blocks) == [blocks[0], blocks[1], blocks[5]]
        assert len(model.blocks) == 3
    assert list(model.blocks) == blocks


def test_combined_forms_are_the_whole_model() -> None:
    model = Mixed()
    seconds = []
    forms = variants(model)
    for form in forms:
        with shortened(form):
            model.clock[0] = 0.0
            model(torch.ones(3, 32))
            seconds.append(model.clock[0])
    model.clock[0] = 0.0
    model(torch.ones(3, 32))
    assert combine(seconds, forms) == pytest.approx(model.clock[0])


def test_noise_never_makes_blocks_faster_than_nothing() -> None:
    forms = variants(Mixed())
    assert combine([2.0, 1.9, 2.1], forms) == pytest.approx(2.0 + 7 * 0.1)


@pytest.mark.parametrize("make", [tiny_llama, tiny_bert])
def test_models_of_the_hub_are_understood(make) -> None:
    model = make(5)
    forms = variants(model)
    assert [form.weight for form in forms] == [0, 4]
    ids = torch.zeros(1, 8, dtype=torch.long)
    for form in forms:
        with shortened(form):
            model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), tiny_llama(2), nn.ModuleList([nn.Linear(1, 1), nn.ReLU(), nn.Tanh()])]
)
def test_without_repeated_blocks_there_is_no_form(model: nn.Module) -> None:
    assert variants(model) == ()


def profile(model: Mixed, ranks: ThreadRanks | SingleRank, memory_bytes: int | None) -> MeasuredProfile:
    return profile_cluster(
        model=model,
        loss_fn=lambda m, batch: m(batch).sum(),
        make_batch=lambda size: torch.ones(size, 32),
        ranks=ranks,
        device=torch.device("cpu"),
        dtype=torch.float32,
        zero_stages=(3,),
        largest_micro_batch=4,
        user_caps=None,
        memory_fraction=1.0,
        budget_s=1e9,
        relative_error=0.03,
        model_name="mixed",
        seq_len=0,
        clock=lambda: model.clock[0],
        emulation=None if memory_bytes is None else Emulation(memory_bytes=memory_bytes),
        # Nothing is gathered or summed at once, so that the whole model need not fit.
        deepspeed_config={
            "zero_optimization": {
                "stage3_max_live_parameters": 0,
                "contiguous_gradients": False,
                "reduce_bucket_size": 1,
            }
        },
    )


def test_the_curve_is_that_of_the_whole_model() -> None:
    whole = profile(Mixed(), SingleRank(), None)
    size = whole.num_parameters
    # Parameters and gradients do not fit on one device; their share of eight ranks does, with the optimizer.
    memory_bytes = round(4 * size * 1.2)
    in_blocks = run_ranks(8, lambda ranks: profile(Mixed(), ranks, memory_bytes))
    for measured in in_blocks:
        assert all(cap == 4 for cap in measured.stage(3).max_micro_batch_size)
        for rank in measured.ranks:
            assert [p.micro_batch_size for p in rank.points] == [1, 2, 4]
            for point, expected in zip(rank.points, whole.ranks[0].points, strict=True):
                assert point.step_time_s == pytest.approx(expected.step_time_s)


def test_without_blocks_the_message_says_what_to_do() -> None:
    def work(ranks: ThreadRanks) -> MeasuredProfile:
        model = Mixed()
        model.blocks = nn.ModuleList(list(model.blocks)[:2])
        return profile(model, ranks, round(1.9 * 4 * sum(p.numel() for p in model.parameters())))

    for problem in run_ranks(8, work, errors=True):
        assert isinstance(problem, ProfileError)
        assert "per_rank_micro_batch_sizes" in str(problem)
