"""Loss, gradient norm and parameters under uneven plans against one process on the same global batches."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from exactness_cases import Case, cases


def check(case: Case) -> list[str]:
    from suites import common

    global_batch_size = sum(map(sum, case.sizes))
    data = common.rows(case.kind, global_batch_size * 3 + (2 if case.short_last_step else 0))
    trainer = common.train(
        case.kind,
        data,
        optim="sgd" if case.optimizer == "sgd" else "adamw_torch",
        trainer_kwargs={"poplar_plan": common.make_plan(case.zero_stage, [list(s) for s in case.sizes])},
    )
    want = expected(case.kind, len(data), global_batch_size, case.optimizer)
    rtol = 1e-5 if case.optimizer == "sgd" else 1e-4
    problems = common.compare("loss", common.history(trainer, "loss"), want.losses, rtol=rtol)
    norms = common.history(trainer, "grad_norm")
    if norms or case.zero_stage > 0:
        problems += common.compare("grad_norm", norms, want.grad_norms, rtol=rtol)
    if case.optimizer == "sgd":
        problems += common.compare_parameters(common.parameters(trainer), want.parameters)
    if trainer.state.global_step != common.STEPS:
        problems.append(f"global_step {trainer.state.global_step}, expected {common.STEPS}")
    return problems


@functools.cache
def expected(kind: str, count: int, global_batch_size: int, optimizer: str) -> Any:
    from suites import common

    return common.reference(kind, common.rows(kind, count), global_batch_size, optimizer=optimizer)


if __name__ == "__main__":
    import os

    from suites.common import run_cases

    chosen = cases(int(os.environ["WORLD_SIZE"]))
    run_cases({case.name: functools.partial(check, case) for case in chosen})
