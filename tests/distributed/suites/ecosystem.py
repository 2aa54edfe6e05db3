"""What else people train with: evaluation, adapters, precision, other trainers."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ecosystem_cases import cases
from suites import common, evaluation, lengths


def main() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    checks = vars(evaluation) | vars(lengths)
    common.run_cases({name: functools.partial(checks[name], world_size) for name in cases(world_size)})


if __name__ == "__main__":
    main()
