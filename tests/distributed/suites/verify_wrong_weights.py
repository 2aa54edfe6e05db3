"""What a rank of `verify` runs when the weighting is wrong on purpose: every micro-batch counts as a sum, not a mean."""

from __future__ import annotations

import sys
from typing import Any

from accelerate_poplar import Plan, PoplarTrainer
from accelerate_poplar.loss import SUM, LossRule
from accelerate_poplar.verify_rank import main


class WrongWeights(PoplarTrainer):
    """Weights a mean as if it were a sum."""

    def poplar_prepare(self, resumed: Plan | None = None) -> Any:
        plan = super().poplar_prepare(resumed)
        self.poplar.weigher.rule = LossRule(kind=SUM, items="rows")
        return plan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], trainer_class=WrongWeights))
