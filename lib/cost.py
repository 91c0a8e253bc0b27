"""What a collective costs: bytes on the wire, and seconds on a link.

The problem: published figures disagree by factors of two and eight, mostly because one of them counts both directions
of a link, or the whole array where the other counts a shard. The idea: one function per quantity, with the unit in its
name, and a claim in the chapter beside it that compares it with what was counted.

Letters: `S` bytes of the whole array, `n` ranks, `alpha_s` seconds until the first byte of a message arrives,
`bandwidth_Bps` bytes a second in one direction of one rank's link.
"""

from __future__ import annotations

# Bytes that each rank sends, as a multiple of the whole array, and messages that follow one another, for n ranks.
_RING = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "reduce_scatter": (lambda n: (n - 1) / n, lambda n: n - 1),
    "all_gather": (lambda n: (n - 1) / n, lambda n: n - 1),
    "all_to_all": (lambda n: (n - 1) / n, lambda n: n - 1),
    "broadcast": (lambda n: 1.0 if n > 1 else 0.0, lambda n: n - 1),
    "send": (lambda n: 1.0, lambda n: 1),
    "recv": (lambda n: 0.0, lambda n: 1),
    "barrier": (lambda n: 0.0, lambda n: 2 * (n - 1)),
}


def _ring(kind: str) -> tuple:
    if kind not in _RING:
        raise ValueError(f"unknown collective {kind!r}; known are {', '.join(_RING)}")
    return _RING[kind]


def wire_bytes(kind: str, payload_bytes: float, n: int) -> float:
    """Bytes that one rank sends when `n` ranks do a collective as an ideal ring.

    `all_reduce` is a reduce-scatter and an all-gather, hence its factor 2(n-1)/n; it receives as much again.

    Args:
        kind: one of the names of `comm`.
        payload_bytes: bytes of the whole array (not of a shard).
        n: ranks in the group.

    Source: Patarasuk & Yuan, JPDC 69(2), 2009; NCCL tests, PERFORMANCE.md.
    """
    return _ring(kind)[0](n) * payload_bytes


def comm_s(kind: str, payload_bytes: float, n: int, alpha_s: float, bandwidth_Bps: float) -> float:
    """Seconds of a collective in the alpha-beta model: messages in a row, and bytes over one direction's bandwidth.

    `all_reduce`: 2(n-1)·alpha + 2(n-1)/n · S / bandwidth.

    Args:
        payload_bytes: bytes of the whole array.
        alpha_s: latency of one message in seconds.
        bandwidth_Bps: bytes a second, one direction.

    Source: Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005.
    """
    if bandwidth_Bps <= 0:
        raise ValueError(f"bandwidth_Bps={bandwidth_Bps} must be above 0")
    if n == 1:
        return 0.0
    return _ring(kind)[1](n) * alpha_s + wire_bytes(kind, payload_bytes, n) / bandwidth_Bps


def overlap(ready_s: list[float], lasts_s: list[float]) -> list[tuple[float, float]]:
    """When each bucket travels: not before its gradients exist, and not before the bucket ahead of it has arrived.

    Args:
        ready_s: when backward has made the last gradient of each bucket, in the order of sending.
        lasts_s: how long each bucket's all-reduce takes.

    Returns:
        (start, end) of each, in seconds. Whatever lies after the end of backward is exposed.

    Raises:
        ValueError: the two lists differ in length.
    """
    times, free_s = [], 0.0
    for ready, lasts in zip(ready_s, lasts_s, strict=True):
        start = max(ready, free_s)
        free_s = start + lasts
        times.append((start, free_s))
    return times
