"""Communication beside computation, on a link that carries one message at a time: what of it is exposed.

The problem: bytes over bandwidth is not what a step waits, because messages travel while a rank computes. The idea:
list when each message may start and when the link is free.
"""

from __future__ import annotations


def overlap(ready_s: list[float], duration_s: list[float]) -> list[tuple[float, float]]:
    """When each bucket is reduced: not before its gradients exist, and not before the end of the previous bucket.

    Args:
        ready_s: when backward computes the last gradient of each bucket, in the order of sending.
        duration_s: duration of the all-reduce of each bucket.

    Returns:
        (start, end) of each, in seconds. Communication after the end of backward is exposed.

    Raises:
        ValueError: the two lists differ in length.
    """
    times, free_s = [], 0.0
    for ready, duration in zip(ready_s, duration_s, strict=True):
        start = max(ready, free_s)
        free_s = start + duration
        times.append((start, free_s))
    return times


def sharded_step(
    forward_s: list[float],
    backward_s: list[float],
    gather_s: list[float],
    reduce_s: list[float],
    prefetch: bool = True,
) -> list[tuple[str, int, float, float]]:
    """When ZeRO-3 computes and sends in a step, if the link carries one message at a time.

    A unit computes when its parameters arrive. Their all-gather starts when it would compute, or with `prefetch` when
    the previous unit begins. Its reduce-scatter starts when its backward ends and the link is free.

    Args:
        forward_s, backward_s: seconds of computation of each unit, in the order of forward.
        gather_s, reduce_s: seconds of its all-gather and of its reduce-scatter.

    Returns:
        (event, unit, start_s, end_s), the event being `forward`, `backward`, `gather` or `reduce`. All gradients are
        reduced at the last end.
    """
    times: list[tuple[str, int, float, float]] = []
    now_s = link_free_s = 0.0
    arrives_s: dict[int, float] = {}

    def send(what: str, unit: int, duration_s: float) -> float:
        nonlocal link_free_s
        start_s = max(now_s, link_free_s)
        link_free_s = start_s + duration_s
        times.append((what, unit, start_s, link_free_s))
        return link_free_s

    order = range(len(forward_s))
    for what, units, duration_s in (("forward", order, forward_s), ("backward", order[::-1], backward_s)):
        reduced_s = 0.0
        for place, unit in enumerate(units):
            if unit not in arrives_s:
                arrives_s[unit] = send("gather", unit, gather_s[unit])
            now_s = max(now_s, arrives_s.pop(unit))
            for ahead in units[place + 1 : place + 2] if prefetch else ():
                arrives_s[ahead] = send("gather", ahead, gather_s[ahead])
            times.append((what, unit, now_s, now_s + duration_s[unit]))
            now_s += duration_s[unit]
            if what == "backward":
                now_s = max(now_s, reduced_s)  # memory for gradients of one unit in flight
                reduced_s = send("reduce", unit, reduce_s[unit])
    return times
