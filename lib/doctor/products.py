"""How fast each rank multiplies for some seconds, and what kept it from its processor meanwhile.

The problem: a container's CPU quota stops a rank for 60 of each 100 ms. In twelve rounds of a millisecond most are
undisturbed, so the quickest quarter of them never shows it. The sum of some seconds does; but it is as large where
other programs take the processor, and a busy machine is no fault of a rank.
The idea: the kernel counts both (`counters.py`), so what a rank loses can be divided:

    wall clock  =  ran  +  waited (it was ready, and others had its processor)  +  stood (stopped, asleep, throttled)

A rank that stood is slow, on a quiet machine and on a busy one. Where ranks waited, the machine is busy, and their
speeds are not compared. (What a quota takes, the kernel counts as waiting, too. It is told apart by the file `cpu.stat`
of the cgroup, which counts how often a quota was used up; or, where that cannot be read, by processors that were idle
while the rank waited for one.)
"""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from lib import comm
from lib.doctor.counters import Counters
from lib.launch import device, done_s
from lib.mesh import Group

TURN_S, LEAST_TURN_S, ALL_TURNS_S = 2.0, 0.25, 4.0  # of a turn; of all turns, where ranks take turns
SLICE_S = 0.05  # between two looks at the kernel's counters
MOSTLY = 0.75  # of a wait a processor was idle, or of the periods of a quota it was used up: no program is the reason
BUSY = 0.15  # of the time that others had the processor
WIDTH = {"cpu": 256, "cuda": 8192}  # of the matrices


@dataclass(frozen=True)
class Ran:
    """What one rank did in its turn.

    Args:
        wall_s: seconds of the turn.
        cpu_s: in which its main thread ran.
        waited_s: in which it was ready, and others had its processor; None where the system does not say.
        throttled_s: in which a CPU quota held it back.
        flops: floating-point operations per second of the turn.
        load: programs of its machine that were ready to run, the mean of a minute.
        cores: that it may use.
        crowded: whether its machine has fewer cores than its ranks have threads.
        on_gpu: whether a GPU multiplied; then the times of the processor say nothing.
    """

    wall_s: float
    cpu_s: float
    waited_s: float | None
    throttled_s: float
    flops: float
    load: float = 0.0
    cores: int = 1
    crowded: bool = False
    on_gpu: bool = False

    @property
    def stood_s(self) -> float:
        """Seconds in which it did not run, though no other program had its processor; 0 where that cannot be seen."""
        if self.on_gpu or self.waited_s is None:
            return 0.0
        return max(0.0, self.wall_s - self.cpu_s - self.waited_s)

    @property
    def speed(self) -> float:
        """Operations per second: of a GPU per second of the turn, of a processor per second that it ran."""
        return self.flops if self.on_gpu else self.flops * self.wall_s / max(self.cpu_s, 1e-3)

    @property
    def is_busy(self) -> bool:
        """Whether others took so much of its processor that its speed says little."""
        if self.on_gpu:
            return False
        if self.waited_s is None:
            return self.load > self.cores
        return self.waited_s > BUSY * self.wall_s


class Place(NamedTuple):
    """Where a rank computes; ranks in different containers of one machine share a kernel."""

    kernel: str
    cores: tuple[int, ...]
    threads: int


def multiply_in_turns(world: Group) -> dict[int, Ran]:
    """Multiply on all ranks for some seconds; all call it, and get rank → how it ran.

    GPUs all at the same time, as in training; processors in turns.
    """
    here = Place(_kernel(), _cores(), torch.get_num_threads())
    places = comm.all_gather_object(here, world)
    kind = device().type
    turns = [0] * world.size if kind == "cuda" else turns_of(places)
    seconds = min(TURN_S, max(LEAST_TURN_S, ALL_TURNS_S / (max(turns) + 1)))
    for turn in range(max(turns) + 1):
        comm.barrier(world)
        if turns[world.rank] == turn:
            ran = _multiply_on_gpu(seconds) if kind == "cuda" else _multiply(seconds, here)
    comm.barrier(world)
    ran = replace(ran, crowded=kind == "cpu" and is_crowded(places, world.rank))
    return dict(enumerate(comm.all_gather_object(ran, world)))


def turns_of(places: Sequence[Place]) -> list[int]:
    """The turn of each rank: as many of a machine at the same time as need half of its cores, so that others are free.

    Then a rank that waits for a processor while others are idle waits for its quota, and not for a program.
    """
    turns = []
    for rank in range(len(places)):
        mates = _mates(places, rank)
        at_once = max(1, len(_cores_of(places, mates)) // 2 // max(places[mate].threads for mate in mates))
        turns.append(mates.index(rank) // at_once)
    return turns


def is_crowded(places: Sequence[Place], rank: int) -> bool:
    """Whether the machine of a rank has fewer cores than its ranks have threads."""
    mates = _mates(places, rank)
    return sum(places[mate].threads for mate in mates) > len(_cores_of(places, mates))


def _mates(places: Sequence[Place], rank: int) -> list[int]:
    return [mate for mate, place in enumerate(places) if place.kernel == places[rank].kernel]


def _cores_of(places: Sequence[Place], ranks: Sequence[int]) -> set[int]:
    return {core for rank in ranks for core in places[rank].cores}


def _multiply(seconds: float, here: Place) -> Ran:
    """Multiply on the processor, and look at the kernel's counters between slices."""
    matrix, times = torch.ones(WIDTH["cpu"], WIDTH["cpu"]), 0
    first = last = Counters.now(here.cores, here.threads)
    quota_s = 0.0  # ready, while a processor had nothing to do
    while last.wall_s - first.wall_s < seconds:
        until_s = time.perf_counter() + SLICE_S
        while time.perf_counter() < until_s:
            matrix @ matrix
            times += 1
        now = Counters.now(here.cores, here.threads)
        if now.idle_s - last.idle_s > MOSTLY * (now.ready_s - last.ready_s):
            quota_s += now.ready_s - last.ready_s
        last = now
    wall_s, cpu_s, ready_s = last.wall_s - first.wall_s, last.cpu_s - first.cpu_s, last.ready_s - first.ready_s
    throttled_s = min(ready_s, max(quota_s, last.throttled_s - first.throttled_s))
    if last.throttled_periods - first.throttled_periods > MOSTLY * (last.periods - first.periods):
        throttled_s = ready_s  # whoever uses up its quota would have had a processor for longer
    waited_s = None
    if first.is_told:  # of several threads, each may keep the main one waiting
        waited_s = max(0.0, min(wall_s - cpu_s, ready_s - throttled_s + last.stolen_s - first.stolen_s))
    flops = 2 * WIDTH["cpu"] ** 3 * times / wall_s
    return Ran(wall_s, cpu_s, waited_s, throttled_s, flops, _load(), len(here.cores))


def _multiply_on_gpu(seconds: float) -> Ran:
    """Multiply on the GPU, in the 16 bit of training; random numbers, because equal ones draw less power."""
    matrix = torch.randn(WIDTH["cuda"], WIDTH["cuda"], device=device(), dtype=torch.bfloat16)
    matrix @ matrix  # the first product loads the library
    began_s, times = done_s(), 0
    while done_s() - began_s < seconds:
        for _ in range(10):
            matrix @ matrix
        times += 10
    wall_s = done_s() - began_s
    return Ran(wall_s, 0.0, None, 0.0, 2 * WIDTH["cuda"] ** 3 * times / wall_s, _load(), on_gpu=True)


def _cores() -> tuple[int, ...]:
    """The numbers of the processors on which this process may run."""
    some = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(some)


def _kernel() -> str:
    """What tells this machine's kernel from all others; containers of one machine have the same."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
