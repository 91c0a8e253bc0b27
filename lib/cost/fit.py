"""What measured times say about a link: its bandwidth, its latency.

The problem: bytes divided by seconds is not the speed of a link. A collective sends more, or less, than its array, and
a short message measures latency. The idea: `lib.cost` turns a link into a time; turn it around. `busbw_Bps` needs one
large measurement, `fit_alpha_beta` several of different sizes, and with both numbers other sizes can be predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from lib.cost.comm import comm_s


def busbw_Bps(kind: str, payload_bytes: float, n: int, seconds: float) -> float:  # noqa: N802 a unit
    """Bus bandwidth: bytes a second on the busiest link, the one to compare with a data sheet's, of one direction.

    all_reduce: 2(n-1)/n · S / seconds.

    Source: NCCL tests, PERFORMANCE.md.
    """
    return comm_s(kind, payload_bytes, n, 0, 1) / seconds


def fit_alpha_beta(
    sizes_bytes: Sequence[float], seconds: Sequence[float], kind: str = "send", n: int = 2
) -> tuple[float, float]:
    """(alpha_s, bandwidth_Bps) with which `cost.comm_s` comes nearest to measured times, by least squares.

    Each point counts by its *relative* error. Otherwise the largest message would decide alone: a millisecond is
    nothing to it, and many times what a small one takes.

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
    if alpha_s < 0:  # noise; then the best one without latency
        alpha_s, beta = 0.0, b / bb
    if beta <= 0:
        raise ValueError(f"{max(sizes_bytes):g} bytes take no longer than {min(sizes_bytes):g}; measure larger ones")
    return alpha_s, 1 / beta
