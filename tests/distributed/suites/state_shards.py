"""Uneven shares of the training state against even ones, and against one process."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from state_cases import CHECKS, ONE_PROCESS, StateCase, case_id, cases


@functools.cache
def even_run(case: StateCase) -> Any:
    from suites import state_training

    # Stock DeepSpeed cannot offload on some ranks only under stage 3; by itself, offloading changes nothing.
    case = dataclasses.replace(case, offload="all" if case.offload else "")
    # Weights initialised under zero.Init are other weights, wherever that is.
    return state_training.run(dataclasses.replace(case, zero_init="before" if case.zero_init else ""))[0]


def check(case: StateCase) -> list[str]:
    from suites import state_training

    want = even_run(case.even())
    got, held = state_training.run(case)
    problems = state_training.differences(got, want, case.tolerance)
    return problems + state_training.held_problems(held, case)


def one_process(zero_stage: int, sizes: tuple[int, ...], world_size: int) -> list[str]:
    from suites import common

    from accelerate_poplar.state_shards import uneven_state

    data = common.rows("llama", sum(sizes) * 3)
    want = common.reference("llama", data, sum(sizes), optimizer="sgd")
    with uneven_state(ONE_PROCESS[world_size][0], zero_stage=zero_stage):
        plan = common.make_plan(zero_stage, [[size] for size in sizes])
        trainer = common.train("llama", data, trainer_kwargs={"poplar_plan": plan})
    problems = common.compare("loss", common.history(trainer, "loss"), want.losses)
    problems += common.compare("grad_norm", common.history(trainer, "grad_norm"), want.grad_norms)
    return problems + common.compare_parameters(common.parameters(trainer), want.parameters)


def setters(zero_stage: int) -> list[str]:
    """DeepSpeed's own means to set one parameter's state, at every stage."""
    import torch
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )
    from suites import common, state_training

    case = StateCase("", zero_stage, (0.7, 0.3), bf16=False)
    engine = state_training.build(case)
    state_training.train(engine, case, steps=1)
    engine.backward(engine(**common.collate(common.rows("llama", 2))).loss)
    problems = []
    for name, parameter in engine.module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        value = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
        safe_set_full_fp32_param(parameter, value)
        safe_set_full_optimizer_state(parameter, value + 1, "exp_avg")
        gradient = safe_get_full_grad(parameter)
        safe_set_full_grad(parameter, gradient * 2)
        for what, got, want in (
            ("fp32", safe_get_full_fp32_param(parameter), value),
            ("exp_avg", safe_get_full_optimizer_state(parameter, "exp_avg"), value + 1),
            ("grad", safe_get_full_grad(parameter), gradient * 2),
        ):
            if not torch.equal(got, want):
                problems.append(f"{name}: {what} is not what was set")
    if zero_stage == 3:
        parameter = next(engine.module.parameters())
        before = safe_get_full_grad(parameter)
        engine.optimizer.update_fp32_grad_for_param_vectorized(lambda gradient, _: gradient + 1, [parameter])
        if not torch.equal(safe_get_full_grad(parameter), before + 1):
            problems.append("the vectorized update of gradients went elsewhere")
    return problems


def further_check(name: str) -> list[str]:
    from suites import state_training

    from accelerate_poplar import _compat
    from accelerate_poplar.errors import CompatibilityError, ConfigError, RankError
    from accelerate_poplar.state_shards import held_bytes, uneven_state

    rank, _ = state_training.start()
    if name == "setters":
        return [f"zero{stage}: {text}" for stage in (1, 2, 3) for text in setters(stage)]
    places = (_compat.ENGINE_OPTIMIZER, _compat.STAGE3_OPTIMIZER, *_compat.ZERO_INIT)
    if name == "restored":
        before = [_compat.found_at(place) for place in places]
        for stage in (2, 3):
            try:
                with uneven_state((0.7, 0.3), zero_stage=stage):
                    raise KeyError("in the block")
            except KeyError:
                pass
        return [] if before == [_compat.found_at(place) for place in places] else ["a name stayed replaced"]
    if name == "refusals":
        given = (
            ({"fractions": (0.5, 0.3, 0.2), "zero_stage": 2}, ConfigError, "3 state fractions .* for 2 ranks"),
            ({"fractions": (0.7, 0.3) if rank else (0.6, 0.4), "zero_stage": 2}, RankError, "do not agree"),
            ({"fractions": (0.7, 0.3), "zero_stage": 0}, ConfigError, "ZeRO stage 0"),
        )
        return [text for settings, error, pattern in given for text in expect(settings, error, pattern)]
    if name == "no-engine":
        return expect({"fractions": (0.7, 0.3), "zero_stage": 2}, CompatibilityError, "no DeepSpeed engine")
    engine = state_training.build(StateCase("", 2, (0.7, 0.3)))
    engine.destroy()
    after = state_training.build(StateCase("", 2, ()))
    stock = _compat.found_at(_compat.ENGINE_OPTIMIZER)
    problems = [] if type(after.optimizer) is stock else [f"{type(after.optimizer)} is not the stock optimizer"]
    return problems + state_training.held_problems(held_bytes(after), StateCase("", 2, (0.5, 0.5)))


def expect(settings: dict[str, Any], error: type[Exception], pattern: str) -> list[str]:
    import re

    from accelerate_poplar.state_shards import uneven_state

    try:
        with uneven_state(**settings):
            pass
    except error as problem:
        return [] if re.search(pattern, str(problem)) else [f"{settings}: {problem}"]
    return [f"{settings}: no {error.__name__}"]


def all_checks(world_size: int) -> dict[str, Any]:
    from suites import state_checkpoints

    checks: dict[str, Any] = {case_id(case): functools.partial(check, case) for case in cases(world_size)}
    if world_size == 2:
        checks |= {name: functools.partial(further_check, name) for name in CHECKS}
    for stage in (1, 2, 3):
        for sizes in ONE_PROCESS[world_size][1]:
            name = f"one-process-zero{stage}-{'_'.join(map(str, sizes))}"
            checks[name] = functools.partial(one_process, stage, sizes, world_size)
    return checks | state_checkpoints.all_checks(world_size)


if __name__ == "__main__":
    from suites.common import run_cases

    run_cases(all_checks(int(os.environ["WORLD_SIZE"])))
