"""The cases of the profiling suite and the scenario lines they belong to; importable without torch."""

from __future__ import annotations

TWO_RANKS: dict[str, tuple[int, ...]] = {
    "same_profile_on_both": (),
    "engines_leave_no_trace": (28,),
    "partitioned_model": (),
    **{f"training_state-zero{s}": () for s in range(4)},
    **{f"training_unchanged-{kind}-zero{s}": (29,) for kind in ("dropout", "batch_norm") for s in (0, 3)},
    **{f"memory_two_to_one-zero{s}": (5, 6) for s in range(4)},
    "out_of_memory_in_the_step": (28,),
    "second_start": (),
    "preflight": (42, 44),
    "the_quicker_rank_goes_on": (),
}
