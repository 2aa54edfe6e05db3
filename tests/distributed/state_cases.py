"""The cases of the uneven-state suite, by number of ranks; importable without torch, so that pytest can list them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

HALF = (0.5, 0.5)
LARGE_FIRST, LARGE_LAST = (0.75, 0.25), (0.25, 0.75)
FIVE_TWO_ONE = (0.625, 0.25, 0.125)


@dataclass(frozen=True)
class StateCase:
    """One training run on uneven shares, compared with the same run on even ones."""

    name: str
    zero_stage: int
    fractions: tuple[float, ...]
    kind: str = "llama"
    bf16: bool = True
    accumulation: int = 1
    sizes: tuple[int, ...] = (2, 2)
    optimizer: str = "adamw"
    frozen: bool = False
    checkpointing: bool = False
    clip: float = 0.0
    offload: str = ""
    """`all`, `last` (the last rank only) or none."""
    zero_init: str = ""
    """`inside` or `before` the block, or none."""
    two_groups: bool = False
    zero: tuple[tuple[str, Any], ...] = ()
    """Further keys of `zero_optimization`."""
    tolerance: float = 0.0
    """Largest difference allowed, absolute; 0 = the same bits."""

    def even(self) -> StateCase:
        """The run on even shares to compare with."""
        return replace(self, fractions=(), name="", tolerance=0.0)


SMALL_BUCKETS = (
    ("reduce_bucket_size", 500),
    ("allgather_bucket_size", 500),
    ("round_robin_gradients", True),
    ("overlap_comm", True),
    ("sub_group_size", 700),
    ("stage3_prefetch_bucket_size", 900),
)
SHARDED = (("stage3_param_persistence_threshold", 0),)
"""Without it every parameter of a tiny model stays whole under stage 3."""


def cases(world_size: int) -> list[StateCase]:
    """All cases of a launch."""
    return _two_ranks() if world_size == 2 else _three_ranks()


def _two_ranks() -> list[StateCase]:
    found = []
    for stage in (1, 2, 3):
        for fractions in (LARGE_FIRST, LARGE_LAST):
            found.append(StateCase("llama-bf16", stage, fractions, zero=SHARDED))
            found.append(StateCase("bert-fp32-acc3", stage, fractions, "bert_mlm", False, 3, (3, 1), zero=SHARDED))
        first = StateCase("", stage, LARGE_FIRST, sizes=(3, 1), zero=SHARDED)
        last = replace(first, fractions=LARGE_LAST)
        found += [
            replace(first, name="llama-fp32-frozen", bf16=False, frozen=True),
            replace(last, name="llama-bf16-acc3-checkpointing", accumulation=3, checkpointing=True),
            replace(last, name="bert-bf16-frozen-checkpointing", kind="bert_cls", frozen=True, checkpointing=True),
            replace(first, name="small-buckets-acc3", accumulation=3, zero=SHARDED + SMALL_BUCKETS),
            replace(first, name="tiny-share", fractions=(0.999, 0.001), zero=(*SHARDED, ("sub_group_size", 300))),
            replace(first, name="offload", offload="all", two_groups=True),
            replace(last, name="offload-on-one-rank", offload="last"),
            replace(last, name="clipped", clip=0.1, tolerance=2e-6, bf16=False),
        ]
        if stage == 3:
            found += [
                replace(first, name="persistent", zero=()),
                replace(first, name="zero-init-inside", zero_init="inside", checkpointing=True),
                replace(last, name="zero-init-before", zero_init="before"),
                replace(first, name="offload-on-one-rank-even", fractions=HALF, offload="last"),
            ]
        if stage == 3:
            offload = ("offload_param_device", "cpu")
            found.append(replace(first, name="offload-parameters", offload="all", zero=(*SHARDED, offload)))
        if stage < 3:
            found.append(replace(last, name="all-reduced", zero=(("reduce_scatter", False),)))
            found.append(replace(first, name="alignment", zero=(("parameter_alignment", True),), two_groups=True))
    return found


def _three_ranks() -> list[StateCase]:
    found = []
    for stage in (1, 2, 3):
        one = StateCase("", stage, FIVE_TWO_ONE, sizes=(3, 1, 2), zero=SHARDED, tolerance=5e-6 if stage == 3 else 0.0)
        found += [
            replace(one, name="llama-fp32", bf16=False),
            replace(one, name="bert-fp32-acc3-frozen", kind="bert_mlm", bf16=False, accumulation=3, frozen=True),
            replace(
                one,
                name="llama-bf16-small-buckets",
                optimizer="sgd",
                checkpointing=True,
                zero=SHARDED + SMALL_BUCKETS,
                tolerance=2e-3 if stage == 3 else 0.0,
            ),
            replace(
                one,
                name="tiny-share",
                bf16=False,
                fractions=(0.9, 0.099, 0.001),
                zero=(*SHARDED, ("sub_group_size", 300)),
            ),
        ]
    return found


def case_id(case: StateCase) -> str:
    """Name of a case in reports."""
    shares = "_".join(f"{fraction:g}" for fraction in case.fractions)
    return f"zero{case.zero_stage}-{case.name}-{shares}"


ONE_PROCESS = {2: (LARGE_FIRST, ((3, 1), (6, 2))), 3: (FIVE_TWO_ONE, ((4, 2, 1),))}
"""Fractions and micro-batch sizes of the runs that are compared with one process, by number of ranks."""
CHECKS = ("setters", "restored", "refusals", "no-engine", "stock-after")
"""Further checks of the two-rank launch."""

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "zero1": {"name": "", "zero_stage": 1, "fractions": LARGE_FIRST, "bf16": False},
    "zero2": {"name": "", "zero_stage": 2, "fractions": LARGE_FIRST, "sizes": (3, 1), "frozen": True},
    "zero3": {
        "name": "",
        "zero_stage": 3,
        "fractions": LARGE_FIRST,
        "sizes": (3, 1),
        "zero": (*SHARDED, ("sub_group_size", 1500)),
    },
    "zero3-frozen": {"name": "", "zero_stage": 3, "fractions": LARGE_FIRST, "frozen": True, "zero": SHARDED},
}
"""Runs whose checkpoints are saved, resumed and converted."""
CHECKPOINT_STEPS = ("train_and_save", "same_shares", "other_shares", "even_copy", "fp32_file", "universal")
"""What is done with each on two ranks; on three ranks: `three_ranks`."""
