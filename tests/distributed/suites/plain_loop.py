"""Plain Accelerate loops under uneven plans against one process on the same global batches, and how they behave."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plain_loop_cases import Case, behaviours, cases


def check(case: Case) -> list[str]:
    from suites import common, loops

    global_batch_size = sum(map(sum, case.sizes))
    data = common.rows(case.kind, global_batch_size * 3 + (2 if case.short_last_step else 0))
    result = loops.train(case, data)
    want = expected(case.kind, len(data), global_batch_size)
    problems = common.compare("loss", result.losses, want.losses)
    return problems + common.compare_parameters(result.parameters, want.parameters)


@functools.cache
def expected(kind: str, count: int, global_batch_size: int) -> Any:
    from suites import common

    return common.reference(kind, common.rows(kind, count), global_batch_size, optimizer="sgd")


def main() -> None:
    from suites import loop_behaviour
    from suites.common import run_cases

    world_size = int(os.environ["WORLD_SIZE"])
    checks = {case.name: functools.partial(check, case) for case in cases(world_size)}
    checks |= {name: functools.partial(getattr(loop_behaviour, name), world_size) for name in behaviours(world_size)}
    run_cases(checks)


if __name__ == "__main__":
    main()
