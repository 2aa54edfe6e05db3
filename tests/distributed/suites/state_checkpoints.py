"""Checkpoints of runs with uneven training state: resumed, refused, converted, made universal.

A part of the suite `state_shards`. The launch on two ranks saves and converts; the one on three reads what it left.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from state_cases import CHECKPOINTS, LARGE_FIRST, LARGE_LAST, StateCase

SAVED_STEPS = MORE_STEPS = 2


def case_of(name: str) -> StateCase:
    return StateCase(**CHECKPOINTS[name])


def shares_of(case: StateCase, fractions: tuple[float, ...], **changes: Any) -> StateCase:
    return StateCase(**{**case.__dict__, "fractions": fractions, **changes})


def folder_of(name: str) -> Path:
    return Path(sys.argv[1]).parent / name


def only_on_rank_0(work: Any) -> None:
    """Do something on rank 0 while the others wait, and fail everywhere if it fails."""
    from accelerate_poplar.comm import connect, decide

    decide(connect(120.0), work)


def train_and_save(name: str) -> list[str]:
    from suites import state_training

    case = case_of(name)
    engine = state_training.build(case)
    state_training.train(engine, case, steps=SAVED_STEPS)
    engine.save_checkpoint(str(folder_of(name)))
    remember(name, "saved", state_training.whole_state(engine))
    problems = consolidated_problems(engine) if case.zero_stage == 3 else []
    state_training.train(engine, case, steps=MORE_STEPS, first=SAVED_STEPS)
    remember(name, "final", state_training.whole_state(engine))
    engine.destroy()
    return problems


def consolidated_problems(engine: Any) -> list[str]:
    """What `save_model` writes is what the engine holds."""
    import torch
    from suites import state_training

    written = engine._zero3_consolidated_16bit_state_dict()
    state = state_training.whole_state(engine)
    if engine.global_rank != 0:
        return []
    return [f"save_model: {n} differs" for n, value in written.items() if not torch.equal(value.cpu(), state[n])]


def remember(name: str, what: str, state: dict[str, Any]) -> None:
    import torch

    if int(os.environ["RANK"]) == 0:
        torch.save(state, folder_of(name).with_name(f"{name}-{what}.pt"))
    torch.distributed.barrier()


def resume(name: str, folder: Path, case: StateCase, **config: Any) -> list[str]:
    """Load into a new engine, compare, train on, compare again."""
    import torch
    from suites import state_training

    engine = state_training.build(case, **config)
    loaded, _ = engine.load_checkpoint(str(folder))
    if loaded is None:
        return [f"{folder}: was not loaded"]
    if case.zero_stage < 3:
        # DeepSpeed itself makes loaded moments readable in the next step only.
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    saved, final = (torch.load(folder_of(name).with_name(f"{name}-{what}.pt")) for what in ("saved", "final"))
    problems = state_training.differences(state_training.whole_state(engine), saved, 0.0)
    if len(case.sizes) == 2:
        state_training.train(engine, case, steps=MORE_STEPS, first=SAVED_STEPS)
        problems += state_training.differences(state_training.whole_state(engine), final, 0.0)
    engine.destroy()
    return problems


def same_shares(name: str) -> list[str]:
    return resume(name, folder_of(name), case_of(name))


def other_shares(name: str) -> list[str]:
    """Refused by the engine, and by the check that a trainer makes before it builds one."""
    from suites import state_training

    from accelerate_poplar.checkpoint import check_resume
    from accelerate_poplar.errors import ConfigError

    case = shares_of(case_of(name), LARGE_LAST)
    engine = state_training.build(case)
    # Frozen weights under stage 3 do not fit before the optimizer's state is looked at.
    early = case.frozen and case.zero_stage == 3
    error, text = (RuntimeError, "must match the size") if early else (ConfigError, "checkpoint to-even DIR")
    problems = refused(lambda: engine.load_checkpoint(str(folder_of(name))), error, text)
    engine.destroy()
    check = functools.partial(check_resume, folder_of(name))
    problems += refused(lambda: check(fractions=None, world_size=2), ConfigError, "in even shares")
    problems += refused(lambda: check(fractions=LARGE_LAST, world_size=2), ConfigError, "of 0.25, 0.75")
    problems += refused(lambda: check(fractions=LARGE_FIRST, world_size=3), ConfigError, "2 ranks, this run has 3")
    check(fractions=LARGE_FIRST, world_size=2)
    return problems


def refused(work: Any, error: type[Exception], pattern: str) -> list[str]:
    try:
        work()
    except error as problem:
        return [] if re.search(pattern, str(problem)) else [str(problem)]
    return [f"no {error.__name__} that says {pattern!r}"]


def even_copy(name: str) -> list[str]:
    """The converted checkpoint is one that a plain DeepSpeed run resumes from."""
    from accelerate_poplar.checkpoint import check_resume, saved_shares, to_even
    from accelerate_poplar.errors import ConfigError

    only_on_rank_0(lambda: str(to_even(folder_of(name))))
    folder = folder_of(f"{name}-even")
    check_resume(folder, fractions=None, world_size=2)
    if saved_shares(folder) is not None:
        return ["the copy still says that its shares are uneven"]
    problems = refused(lambda: to_even(folder, folder_of("again")), ConfigError, "in even shares already")
    problems += refused(lambda: to_even(folder_of(name)), ConfigError, "exists already")
    return problems + resume(name, folder, shares_of(case_of(name), ()))


def fp32_file(name: str) -> list[str]:
    """DeepSpeed's own tool reads the weights; of stage 3, from the converted checkpoint."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if int(os.environ["RANK"]) != 0:
        return []
    folder = folder_of(f"{name}-even" if case_of(name).zero_stage == 3 else name)
    with redirect_stdout(StringIO()):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    saved = torch.load(folder_of(name).with_name(f"{name}-saved.pt"))
    wanted = {n.removesuffix(".fp32"): value for n, value in saved.items() if n.endswith(".fp32")}
    return [f"{n} differs" for n, value in wanted.items() if not torch.equal(weights[n].float(), value)]


def universal(name: str) -> list[str]:
    """The universal form loads into other shares; stages 1 and 2 need no conversion before."""
    case = case_of(name)
    source = folder_of(f"{name}-even" if case.zero_stage == 3 else name)
    tag = (source / "latest").read_text().strip()
    target = folder_of(f"{name}-universal")
    arguments = Namespace(
        input_folder=str(source / tag),
        output_folder=str(target / f"{tag}_universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )

    def convert() -> None:
        from deepspeed.checkpoint import ds_to_universal

        with redirect_stdout(StringIO()):
            ds_to_universal.main(arguments)
        (target / "latest_universal").write_text(f"{tag}_universal")

    only_on_rank_0(convert)
    return resume_universal(name, LARGE_LAST)


def resume_universal(name: str, fractions: tuple[float, ...]) -> list[str]:
    sizes = (3, 1, 2)[: len(fractions)] if len(fractions) == 3 else case_of(name).sizes
    case = shares_of(case_of(name), fractions, sizes=sizes)
    return resume(name, folder_of(f"{name}-universal"), case, checkpoint={"load_universal": True})


def three_ranks(name: str) -> list[str]:
    return resume_universal(name, (0.625, 0.25, 0.125))


def all_checks(world_size: int) -> dict[str, Any]:
    steps = (train_and_save, same_shares, other_shares, even_copy, fp32_file, universal)
    if world_size == 3:
        steps = (three_ranks,)
    return {f"{name}-{step.__name__}": functools.partial(step, name) for name in CHECKPOINTS for step in steps}
