"""The cases of the ecosystem suite, and the scenarios they answer; importable without torch."""

from __future__ import annotations

CASES: dict[str, tuple[int, ...]] = {
    "evaluation_equals_one_process": (39,),
    "predictions_come_in_order": (39,),
    "evaluation_without_training": (39,),
    "a_stream_is_evaluated": (39,),
    "rows_of_unequal_length_equal_one_process": (),
    "a_loop_over_rows_of_unequal_length_equals_one_process": (),
    "a_stream_of_unequal_lengths_equals_one_process": (),
}


def cases(world_size: int) -> list[str]:
    return list(CASES) if world_size == 2 else ["evaluation_equals_one_process", "predictions_come_in_order"]
