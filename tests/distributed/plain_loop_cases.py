"""The parity cases of the plain-loop suite; importable without torch, so that pytest can list them."""

from __future__ import annotations

from dataclasses import dataclass

DDP = "ddp"


@dataclass(frozen=True)
class Case:
    kind: str
    stage: int | str
    sizes: tuple[tuple[int, ...], ...]
    short_last_step: bool = False

    @property
    def zero_stage(self) -> int:
        return 0 if self.stage == DDP else int(self.stage)

    @property
    def name(self) -> str:
        sizes = "_".join("+".join(map(str, own)) for own in self.sizes)
        tail = "-short" if self.short_last_step else ""
        return f"{self.kind}-{self.stage}-{sizes}{tail}"


def cases(world_size: int) -> list[Case]:
    base = {2: (3, 1), 3: (4, 2, 1)}[world_size]
    found = []
    for kind in ("llama", "bert_cls") if world_size == 2 else ("llama",):
        for stage in (DDP, 0, 1, 2, 3):
            found.append(Case(kind, stage, tuple((size,) for size in base)))
            if world_size == 2:
                found.append(Case(kind, stage, tuple((size, 0) for size in base), short_last_step=True))
            if stage in (DDP, 0, 1):
                uneven = {2: ((2, 2, 1), (3,)), 3: ((2, 2), (1, 1, 1), (2,))}[world_size]
                found.append(Case(kind, stage, uneven))
            else:
                found.append(Case(kind, stage, tuple((size, size) for size in base)))
    return found


SCENARIOS = {
    "line_has_the_global_gradient": (3,),
    "tokens_weigh_alike": (10,),
    "a_rank_without_labels_adds_nothing": (14,),
    "a_sum_is_divided_by_the_items_of_the_step": (10,),
    "a_loop_without_accumulate": (12,),
    "clipping_is_done_where_the_loop_asks": (),
    "the_schedule_takes_one_step_per_optimizer_step": (45,),
    "every_sample_once_in_every_epoch": (20,),
    "steps_hold_the_samples_of_the_stock_run": (),
    "a_checkpoint_continues_at_the_next_sample": (35,),
    "batches_can_be_skipped": (35,),
    "contradictions_are_refused_together": (1, 24, 26),
    "loaders_that_cannot_be_shared_out_are_refused": (19,),
    "meeting_in_a_micro_step_of_one_rank_is_refused": (16,),
    "a_plan_is_found_by_profiling": (44,),
    "evaluation_comes_in_order": (39,),
}
"""What a plain loop does, and the scenarios it answers."""


def behaviours(world_size: int) -> list[str]:
    return list(SCENARIOS) if world_size == 2 else ["evaluation_comes_in_order"]
