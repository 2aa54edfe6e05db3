"""The cases of the training suite and the scenario lines they belong to; importable without torch."""

from __future__ import annotations

TWO_RANKS: dict[str, tuple[int, ...]] = {
    **{f"same_as_stock-zero{s}": () for s in range(4)},
    **{f"once_per_epoch-{w}workers": (20,) for w in (0, 2)},
    **{f"ten_samples-zero{s}": (15, 17) for s in range(4)},
    **{f"nine_samples-zero{s}": (15, 18) for s in range(4)},
    **{
        f"odd_loss-{name}-acc{a}": (11,)
        for name in ("smoothing", "own", "own_scaled", "func", "func_summed", "mlm", "no_average")
        for a in (1, 2, 4)
    },
    **{f"twelve_samples-zero{s}": (12,) for s in (1, 2)},
    **{f"identical_parameters-zero{s}": (13,) for s in (1, 2)},
    **{f"resume-zero{s}": (35,) for s in range(4)},
    "straight_line": (3,),
    "unequal_tokens": (10,),
    "learning_rate": (45,),
    "speed_of_real_samples": (40,),
    "compiled": (),
    "conflicts_together": (1, 26),
    "json_against_plan": (26,),
    "micro_above_cap": (1,),
    "misspelt_key": (27,),
    "empty_data": (21,),
    "nothing_left": (21,),
    "missing_file": (),
    "unequal_micro_steps": (16,),
    "auto_keys_under_zero_init": (25,),
    "plan_in_output_dir": (),
    "switched_off": (),
    "too_small_a_card": (9,),
    **{f"slow_rank-zero{s}": (30, 41) for s in (1, 2)},
}
