"""Throughput, idle fraction and MFU from times that were measured or predicted."""

from __future__ import annotations

from collections.abc import Sequence


def samples_per_s(global_batch_size: int, step_time_s: float) -> float:
    """Samples per second of optimizer steps of `global_batch_size` samples; 0 for a time of 0."""
    return global_batch_size / step_time_s if step_time_s > 0.0 else 0.0


def tokens_per_s(global_batch_size: int, seq_len: int, step_time_s: float) -> float:
    """Tokens per second, for samples of `seq_len` tokens; 0 when samples are not token rows (seq_len 0)."""
    return seq_len * samples_per_s(global_batch_size, step_time_s)


def idle_fraction(compute_time_s: Sequence[float]) -> float:
    """Share of the ranks' time spent waiting for the busiest: 1 - mean/max of their compute times; 0 to 1.

    Args:
        compute_time_s: Seconds of forward and backward in one optimizer step, one entry per rank.
    """
    busiest = max(compute_time_s, default=0.0)
    if busiest <= 0.0:
        return 0.0
    return 1.0 - sum(compute_time_s) / len(compute_time_s) / busiest


def idle_fractions(compute_time_s: Sequence[float]) -> tuple[float, ...]:
    """Per rank, the share of the busiest rank's compute time it does not compute itself; 0 to 1 each."""
    busiest = max(compute_time_s, default=0.0)
    return tuple(1.0 - own / busiest if busiest > 0.0 else 0.0 for own in compute_time_s)


def flops_per_token(num_parameters: int, num_layers: int = 0, hidden_size: int = 0, seq_len: int = 0) -> float:
    """FLOPs of forward and backward per token of a transformer: 6 N + 12 L H T.

    Source: Chowdhery et al. 2022 (PaLM), appendix B. Without layers, hidden size and sequence length the attention
    term is left out.

    Args:
        num_parameters: N, parameters of the model.
        num_layers: L, transformer layers.
        hidden_size: H, attention heads times head size.
        seq_len: T, tokens per sample.
    """
    return 6.0 * num_parameters + 12.0 * num_layers * hidden_size * seq_len


def mfu(tokens_per_second: float, token_flops: float, peak_flops: Sequence[float]) -> float | None:
    """Model FLOPs utilisation: model FLOP/s over the sum of the ranks' peaks, 0 to 1.

    Args:
        tokens_per_second: Throughput of the cluster.
        token_flops: FLOPs per token, see `flops_per_token`.
        peak_flops: Dense peak FLOP/s at the dtype in use, one entry per rank.

    Returns:
        The fraction, or None when the peak of any rank is unknown (0): a partial sum would flatter.
    """
    if not peak_flops or min(peak_flops) <= 0.0:
        return None
    return tokens_per_second * token_flops / sum(peak_flops)
