"""The kernel's count: how many bytes each rank really sends.

The problem: a program that counts its own bytes proves little. The reduce-scatter of gloo, for instance, is an
all-reduce inside, and no counter above it would notice.
The idea: ranks communicate over TCP, and Linux counts the bytes of each connection (`TCP_INFO`). Each rank adds up its
own connections, before and after, and the difference is compared with `lib.trace`. No other program has a part in it.
It is exact: on top of the tensors gloo sends 144 bytes per message, 96 from its sender (a notice, a header) and 48 from
its receiver (a notice).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from lib import comm, trace
from lib.launch import run
from lib.mesh import Group

ELSEWHERE = "Bytes on the wire are not measured here: only Linux, from 4.19 on, counts them for each connection."

_INFO = struct.Struct("=144xI52xQQ")  # notsent_bytes, bytes_sent, bytes_retrans in the tcp_info of linux/tcp.h
_OF_ALL = (comm.all_reduce, comm.reduce_scatter, comm.all_to_all, comm.broadcast, comm.reduce)
CALLS: dict[str, Callable] = {call.__name__: call for call in _OF_ALL}  # of an array x and a group
CALLS["all_gather"] = lambda x, group: comm.all_gather(x[: len(x) // group.size], group)


class Audit(NamedTuple):
    """Bytes that one rank sends."""

    counted_bytes: float  # by lib.trace, from the formulas of lib.cost, which give all ranks of a broadcast the mean
    sent_bytes: int  # by the kernel


def available() -> bool:
    """Whether this system counts: whether it finds 1,000 bytes that are sent on a connection made here."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as peer, socket.create_connection(peer.getsockname()) as mine:
            mine.sendall(bytes(1000))
            return os.path.isdir("/proc/self/fd") and _handed_over(mine) == 1000
    except (OSError, AttributeError):  # no network, or no TCP_INFO
        return False


def audit(kind: str, payload_bytes: int, n: int, call: Callable | None = None) -> list[Audit]:
    """Counted and sent bytes of each of `n` ranks in a collective of an array of `payload_bytes`.

    Args:
        kind: a key of `CALLS`.
        payload_bytes: of the full float32 array; a multiple of 4n.
        call: your function of (x, group) to audit instead of the function of the library.

    Raises:
        ValueError: an unknown kind, or an array that cannot be split over the ranks.
        OSError: this system keeps no such count.
    """
    if call is None and kind not in CALLS:
        raise ValueError(f"unknown collective {kind!r}; known are {', '.join(CALLS)}")
    if payload_bytes <= 0 or payload_bytes % (4 * n):
        raise ValueError(f"{payload_bytes=} must be a multiple of {4 * n}: float32, split over {n} ranks")
    return _audit(lambda group: partial(call or CALLS[kind], torch.ones(payload_bytes // 4), group), n)


def sent_in_a_step(make: Callable[[Group], Callable[[], object]], n: int) -> list[int]:
    """Bytes that each of `n` ranks sends in a step, in rank order, by the kernel.

    Args:
        make: called once on each rank, returns the step; its third call is counted: the first two make connections.

    Raises:
        OSError: this system keeps no such count.
        RankError: the step closed a connection, whose bytes are lost. (One that it also made goes unnoticed.)
    """
    return [rank.sent_bytes for rank in _audit(make, n)]


def _audit(make: Callable[[Group], Callable[[], object]], n: int) -> list[Audit]:
    if not available():
        raise OSError(ELSEWHERE)
    return run(_measure, n, make)


def _measure(world: Group, make: Callable[[Group], Callable[[], object]]) -> Audit:
    step = make(world)
    step()
    step()
    with trace.record(world.rank) as recorded:
        sent = _sent(step, world)
    return Audit(recorded.wire_bytes, sent - _sent(lambda: None, world))


def _sent(step: Callable[[], object], world: Group) -> int:
    """Bytes that this rank sends in a step and in the barrier after it, which waits for messages in flight."""
    comm.barrier(world)
    before = _connections()
    step()
    comm.barrier(world)
    after = _connections()
    if closed := before.keys() - after.keys():
        raise RuntimeError(f"the step closed {len(closed)} TCP sockets, whose count is lost: end its groups after it")
    return sum(after.values()) - sum(before.values())


def _connections() -> dict[str, int]:
    """Bytes that this process handed to each of its TCP connections, by name: two descriptors may share one."""
    handed = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed, or has another protocol
            if (name := os.readlink(f"/proc/self/fd/{fd}")).startswith("socket:"):
                with socket.fromfd(int(fd), socket.AF_INET, socket.SOCK_STREAM) as connection:
                    handed[name] = _handed_over(connection)
    return handed


def _handed_over(connection: socket.socket) -> int:
    """Bytes that were written to a TCP connection, sent or waiting in its queue; 0 if this system does not count."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    waiting, sent, again = _INFO.unpack(info.ljust(_INFO.size, b"\0"))
    return sent - again + waiting
