from __future__ import annotations

import pytest

from accelerate_poplar import metrics


def test_throughput_counts_real_samples_and_tokens() -> None:
    assert metrics.samples_per_s(512, 2.0) == 256.0
    assert metrics.tokens_per_s(512, 2048, 2.0) == 524288.0
    assert metrics.tokens_per_s(512, 0, 2.0) == 0.0
    assert metrics.samples_per_s(512, 0.0) == 0.0


def test_idle_fraction_is_one_minus_mean_over_max() -> None:
    assert metrics.idle_fraction([1.0, 3.0]) == pytest.approx(1.0 - 2.0 / 3.0)
    assert metrics.idle_fraction([2.0, 2.0, 2.0]) == 0.0
    assert metrics.idle_fraction([]) == 0.0
    assert metrics.idle_fraction([0.0, 0.0]) == 0.0
    assert metrics.idle_fractions([1.0, 4.0]) == (0.75, 0.0)
    assert metrics.idle_fractions([0.0]) == (0.0,)


def test_flops_per_token_is_six_per_parameter_and_the_attention_term() -> None:
    assert metrics.flops_per_token(10) == 60.0
    # PaLM, appendix B, by hand: 6 * 100 + 12 * 2 * 8 * 16.
    assert metrics.flops_per_token(100, num_layers=2, hidden_size=8, seq_len=16) == 600 + 3072


def test_mfu_divides_by_the_sum_of_unequal_peaks() -> None:
    assert metrics.mfu(100.0, 6e9, [1e12, 2e12]) == pytest.approx(0.2)


@pytest.mark.parametrize("peaks", [[], [1e12, 0.0]])
def test_mfu_is_unknown_where_a_peak_is_unknown(peaks: list[float]) -> None:
    assert metrics.mfu(100.0, 6e9, peaks) is None
