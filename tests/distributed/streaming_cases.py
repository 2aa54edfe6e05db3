"""The cases of the streaming suite, and the scenarios they answer; importable without torch."""

from __future__ import annotations

CASES: dict[str, tuple[int, ...]] = {
    "a_rank_takes_its_share_of_the_stream": (22,),
    "a_streamed_run_equals_one_process": (22,),
    "a_filtered_and_shuffled_stream_is_seen_once": (23,),
    "streams_that_end_unevenly_are_seen_once": (23,),
    "a_loop_over_streams_that_end_unevenly": (23,),
    "a_plan_for_three_shares_out_a_stream": (24,),
    "a_stream_continues_at_the_next_sample": (35,),
    "a_loop_over_a_stream_continues_at_the_next_sample": (35,),
    "streams_that_diverge_are_told_apart": (),
}


def cases(world_size: int) -> list[str]:
    three = ["a_plan_for_three_shares_out_a_stream", "streams_that_end_unevenly_are_seen_once"]
    return three if world_size == 3 else [name for name in CASES if name != "a_plan_for_three_shares_out_a_stream"]
