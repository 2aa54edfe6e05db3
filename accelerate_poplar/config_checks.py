"""The ranges of the settings."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import PoplarConfig

STRATEGIES = ("optimal", "poplar", "proportional", "flops", "even")
REPLAN_MODES = ("off", "warn", "on")
STATE_SHARDS = ("even", "auto")
OFFLOAD_MODES = ("off", "auto")
SHARE_TOLERANCE = 1e-6
"""Distance at which shares of the training state still count as equal, and their sum as 1."""


def _is_whole(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(value: Any, low: float, high: float) -> bool:
    """True for a number above `low`, up to and including `high`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low < value <= high


def out_of_range(config: PoplarConfig) -> list[str]:
    """Every value of the settings that is of the wrong type or out of range, one sentence each."""
    return [*_bad_switches(config), *_bad_sizes(config), *_bad_shares(config), *_bad_numbers(config)]


def _bad_switches(config: PoplarConfig) -> list[str]:
    problems = []
    for name in ("enabled", "reprofile", "allow_fp16", "report"):
        if not isinstance(getattr(config, name), bool):
            problems.append(f"{name} is {getattr(config, name)!r}; it must be true or false.")
    for name, choices in (("strategy", STRATEGIES), ("replan", REPLAN_MODES), ("state_offload", OFFLOAD_MODES)):
        value = getattr(config, name)
        if value not in choices:
            close = difflib.get_close_matches(str(value), choices, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            problems.append(f"{name} is {value!r}; it must be one of {', '.join(choices)}.{hint}")
    stage = config.zero_stage
    if stage is not None and stage != "auto" and not (_is_whole(stage, 0) and int(stage) <= 3):
        problems.append(f'zero_stage is {stage!r}; it must be 0, 1, 2, 3, "auto" or null.')
    if config.cache_dir is not None and not isinstance(config.cache_dir, str):
        problems.append(f"cache_dir is {config.cache_dir!r}; it must be the path of a folder.")
    return problems


def _bad_sizes(config: PoplarConfig) -> list[str]:
    problems = []
    if config.global_batch_size is not None and not _is_whole(config.global_batch_size, 1):
        problems.append(f"global_batch_size is {config.global_batch_size!r}; it must be a whole number of at least 1.")
    caps = config.max_micro_batch_size
    for cap in caps if isinstance(caps, tuple) else () if caps is None else (caps,):
        if not _is_whole(cap, 1):
            problems.append(f"max_micro_batch_size holds {cap!r}; every cap must be a whole number of at least 1.")
    given = config.per_rank_micro_batch_sizes
    if given is not None and not isinstance(given, (tuple, Mapping)):
        problems.append(f"per_rank_micro_batch_sizes is {given!r}; it must be a list or a mapping rank -> size.")
        return problems
    sizes = list(given.values()) if isinstance(given, Mapping) else list(given or ())
    problems += [
        f"per_rank_micro_batch_sizes holds {size!r}; every size must be a whole number of at least 0."
        for size in sizes
        if not _is_whole(size, 0)
    ]
    if isinstance(given, Mapping):
        problems += [
            f"per_rank_micro_batch_sizes names rank {rank!r}; ranks are whole numbers counted from 0."
            for rank in given
            if not _is_whole(rank, 0)
        ]
    if sizes and all(size == 0 for size in sizes):
        problems.append("per_rank_micro_batch_sizes gives every rank 0 samples; at least one rank must run some.")
    return problems


def _bad_shares(config: PoplarConfig) -> list[str]:
    shares = config.state_shards
    problems = []
    if not isinstance(shares, tuple):
        if shares not in STATE_SHARDS:
            problems.append(
                f'state_shards is {shares!r}; it must be "even", "auto" or a list of one fraction per rank.'
            )
    elif not shares or not all(_is_number(share, 0.0, 1.0) for share in shares):
        problems.append(f"state_shards is {list(shares)}; every rank must hold a share above 0 and at most 1.")
    elif abs(math.fsum(shares) - 1.0) > SHARE_TOLERANCE:
        problems.append(f"state_shards is {list(shares)}, together {math.fsum(shares):.6g}; shares must sum to 1.")
    if config.zero_stage == 0 and shares != "even":
        problems.append(
            f"state_shards is {list(shares) if isinstance(shares, tuple) else repr(shares)}, but ZeRO stage 0 keeps the "
            "whole training state on every rank. Use zero_stage 1, 2 or 3, or leave state_shards out."
        )
    if config.zero_stage == 0 and config.state_offload == "auto":
        problems.append(
            "state_offload is 'auto', but DeepSpeed offloads optimizers at ZeRO stage 1, 2 and 3 only. Use one of these, or "
            "leave state_offload out."
        )
    return problems


def _bad_numbers(config: PoplarConfig) -> list[str]:
    problems = []
    fractions = config.memory_fraction
    for fraction in fractions if isinstance(fractions, tuple) else (fractions,):
        if not _is_number(fraction, 0.0, 1.0):
            problems.append(f"memory_fraction holds {fraction!r}; it must be above 0 and at most 1.")
    for name, high in (
        ("profile_budget_s", float("inf")),
        ("profile_relative_error", 0.999),
        ("replan_threshold", 0.999),
        ("timeout_s", 1e9),
    ):
        value = getattr(config, name)
        if not _is_number(value, 0.0, high):
            limit = "" if high == float("inf") else f" and at most {high:g}"
            problems.append(f"{name} is {value!r}; it must be a number above 0{limit}.")
    if not _is_whole(config.replan_every, 1):
        problems.append(f"replan_every is {config.replan_every!r}; it must be a whole number of at least 1.")
    return problems
