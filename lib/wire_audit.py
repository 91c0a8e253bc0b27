"""The byte counter of the kernel: how many bytes really crossed the wire.

The problem: a program that counts its own bytes proves little. The reduce-scatter of gloo, for instance, is an
all-reduce inside, and no counter above it would notice.
The idea: ranks on one machine communicate over its loopback interface, and Linux counts every byte on it. Read that
counter before and after, and compare the difference with `lib.trace`. It includes TCP headers and acknowledgements,
about 0.1% of large messages, and all further programs on the interface, such as the sockets of a notebook. The audit
therefore makes many calls in a row, and takes the median of three.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lib import comm, trace
from lib.launch import run
from lib.mesh import Group

COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")
AT_LEAST_BYTES = 8 * 2**20  # to send in one measurement

CALLS: dict[str, Callable] = {  # a call of each kind on an array x; a rank has all of it, or its shard
    "all_reduce": lambda x, group: comm.all_reduce(x, group),
    "reduce_scatter": lambda x, group: comm.reduce_scatter(x, group),
    "all_gather": lambda x, group: comm.all_gather(x[: len(x) // group.size], group),
    "all_to_all": lambda x, group: comm.all_to_all(x, group),
    "broadcast": lambda x, group: comm.broadcast(x, group),
    "reduce": lambda x, group: comm.reduce(x, group),
}


@dataclass(frozen=True)
class Audit:
    """Bytes that a rank sends in one call, the mean over the ranks."""

    counted_bytes: float  # by lib.trace, from the formulas of lib.cost
    sent_bytes: float  # by the kernel


def available() -> bool:
    """Whether this system has the counter: Linux has it."""
    return COUNTER.exists()


def audit(kind: str, payload_bytes: int, n: int, call: Callable | None = None) -> Audit:
    """Counted and sent bytes of `n` ranks in a collective of an array of `payload_bytes`.

    Args:
        kind: a key of `CALLS`.
        payload_bytes: of the full float32 array; a multiple of 4n.
        call: your function of (x, group) to audit instead of the function of the library.

    Raises:
        ValueError: an unknown kind, or an array that cannot be split over the ranks.
        OSError: this system keeps no such counter.
    """
    _check_available()
    if call is None and kind not in CALLS:
        raise ValueError(f"unknown collective {kind!r}; known are {', '.join(CALLS)}")
    if payload_bytes <= 0 or payload_bytes % (4 * n):
        raise ValueError(
            f"payload_bytes={payload_bytes} must be a multiple of {4 * n}: float32, split over {n} ranks"
        )
    rounds = -(-AT_LEAST_BYTES // payload_bytes)
    seen = [run(_measure, n, call or CALLS[kind], payload_bytes, rounds)[0] for _ in range(3)]
    return Audit(seen[0][0] / n, statistics.median(sent for _, sent in seen) / n)


def sent_in_a_step(make: Callable[[Group], Callable[[], object]], n: int) -> float:
    """Bytes that each of `n` ranks sends in a step, the mean over the ranks, by the kernel.

    Args:
        make: called once on each rank, returns the step; two steps run before the counter is read, because they
            make connections, buffers and state.

    Raises:
        OSError: this system keeps no such counter.
    """
    _check_available()
    return statistics.median(run(_measure_steps, n, make)[0] for _ in range(3)) / n


def _check_available() -> None:
    if not available():
        raise OSError(f"the wire audit reads {COUNTER}, which only Linux has")


def _measure(world: Group, call: Callable, payload_bytes: int, rounds: int) -> tuple[float, float]:
    """(counted, sent) bytes of one call over all ranks; sent is the mean of `rounds` calls, as rank 0 reads it."""
    x = torch.ones(payload_bytes // 4)
    with trace.record(world.rank) as recorded:
        call(x, world)  # the first call also makes the connections
    mine = torch.tensor([recorded.wire_bytes], dtype=torch.float64)
    counted = comm.reduce(mine, world)
    sent = _crossed(world, partial(call, x, world), rounds)
    return (counted.item() if counted is not None else 0.0), sent


def _measure_steps(world: Group, make: Callable) -> float:
    step = make(world)
    step()
    step()
    return _crossed(world, step, 2)


def _crossed(world: Group, call: Callable[[], object], rounds: int) -> float:
    """Bytes on the wire in one call, over all ranks: the mean of `rounds` calls, minus the cost of reading itself."""

    def counted(rounds: int) -> int:
        comm.barrier(world)
        before = int(COUNTER.read_text())
        comm.barrier(world)  # no rank sends before all read, nor reads before all sent
        for _ in range(rounds):
            call()
        comm.barrier(world)
        after = int(COUNTER.read_text())
        comm.barrier(world)
        return after - before

    return (counted(rounds) - counted(0)) / rounds
