"""The cases of the exactness suite, by number of ranks; importable without torch, so that pytest can list them."""

from __future__ import annotations

from dataclasses import dataclass

KIND_NAMES = ("llama", "bert_mlm", "bert_cls", "plain")


@dataclass(frozen=True)
class Case:
    kind: str
    zero_stage: int
    sizes: tuple[tuple[int, ...], ...]
    optimizer: str = "sgd"
    short_last_step: bool = False

    @property
    def name(self) -> str:
        sizes = "_".join("+".join(map(str, own)) for own in self.sizes)
        tail = "-short" if self.short_last_step else ""
        return f"{self.kind}-zero{self.zero_stage}-{sizes}-{self.optimizer}{tail}"


def cases(world_size: int) -> list[Case]:
    bases = {2: ((3, 1), (6, 2)), 3: ((4, 2, 1),)}[world_size]
    found = []
    for kind in KIND_NAMES:
        for stage in (0, 1, 2, 3):
            for base in bases:
                for accumulation in (1, 3):
                    found.append(Case(kind, stage, tuple((size,) * accumulation for size in base)))
            found.append(Case(kind, stage, tuple((size,) for size in bases[0]), optimizer="adamw"))
            found.append(Case(kind, stage, tuple((size, 0) for size in bases[0]), short_last_step=True))
            if stage < 2:
                uneven = {2: ((2, 2, 1), (3,)), 3: ((2, 2), (1, 1, 1), (2,))}[world_size]
                found.append(Case(kind, stage, uneven))
    return found
