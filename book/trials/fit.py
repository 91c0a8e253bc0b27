"""Bandwidth and latency of a link, from measured times.

The problem: bytes divided by seconds is not the speed of a link. A collective sends more, or less, than its array, and
a short message measures latency. The idea: `lib.cost` predicts a time from a link; invert it. `busbw_Bps` needs one
large measurement, `fit_alpha_beta` several sizes; its two results predict the times of further sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from lib.cost.comm import comm_s


def busbw_Bps(kind: str, payload_bytes: float, n: int, seconds: float) -> float:  # noqa: N802 a unit
    """Bus bandwidth: bytes per second on the busiest link, to compare with a data sheet, one direction.

    all_reduce: 2(n-1)/n · S / seconds.

    Source: NCCL tests, PERFORMANCE.md.
    """
    return comm_s(kind, payload_bytes, n, 0, 1) / seconds


def fit_alpha_beta(
    sizes_bytes: Sequence[float], seconds: Sequence[float], kind: str = "send", n: int = 2
) -> tuple[float, float]:
    """(alpha_s, bandwidth_Bps) with which `cost.comm_s` comes nearest to measured times, by least squares.

    Each point counts by its *relative* error. Otherwise the largest message would dominate: an error of a millisecond
    is small for a large message, and many times the duration of a small message.

    Args:
        sizes_bytes, seconds: payload and time of each measurement; two different sizes at least.
        kind, n: the collective that was measured.

    Raises:
        ValueError: fewer than two sizes, a time that is not above 0, or times that do not grow with the size.
    """
    if len(set(sizes_bytes)) < 2 or min(seconds) <= 0:
        raise ValueError(
            f"{len(set(sizes_bytes))} sizes, shortest {min(seconds, default=0)} s; use two, times above 0"
        )
    messages, share = comm_s(kind, 0, n, 1, 1), comm_s(kind, 1, n, 0, 1)
    # One row for each point, alpha · messages/t + beta · bytes/t = 1; then the two normal equations.
    rows = [(messages / t, share * size / t) for size, t in zip(sizes_bytes, seconds, strict=True)]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    alpha_s, beta = (a * bb - b * ab) / (aa * bb - ab**2), (b * aa - a * ab) / (aa * bb - ab**2)
    if alpha_s < 0:  # noise; then the best fit without latency
        alpha_s, beta = 0.0, b / bb
    if beta <= 0:
        raise ValueError(f"{max(sizes_bytes):g} bytes take no longer than {min(sizes_bytes):g}; measure larger sizes")
    return alpha_s, 1 / beta
