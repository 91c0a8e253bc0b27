"""What a rank was started with, and what of it looks wrong.

The problem: a variable that somebody set to search for a fault, and forgot, makes a run slow for months. A variable
that is set on one machine only is worse: nobody who looks at another machine finds it.
The idea: each rank describes itself in a table of names and texts. What most ranks say is usual; a rank that says
something else is named. Few values are wrong even if all ranks have them: those are listed here, with the reason.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import NamedTuple

import torch

from lib.runtime.hang import named_ranks
from lib.torchrun.meeting import Member, interfaces

WATCHED = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "GLOO_", "OMP_", "MKL_", "CUDA_DEVICE_", "CUDA_LAUNCH_")
OF_A_HOST = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "cores")  # hosts may differ in them
LEAST_CLOCK_S = 0.1  # NTP keeps clocks within milliseconds

# Sources: NCCL 2.28 user guide, "Environment Variables"; PyTorch 2.9, `torch.distributed` and "ProcessGroupNCCL
# Environment Variables"; CUDA programming guide, "CUDA Environment Variables" (all read in 2025).
SUSPECT = {
    "NCCL_P2P_DISABLE=1": "GPUs of a host then send through its memory instead of their own links",
    "NCCL_SHM_DISABLE=1": "GPUs of a host without a link of their own then send over the network",
    "NCCL_IB_DISABLE=1": "hosts then send over TCP instead of InfiniBand or RoCE",
    "CUDA_LAUNCH_BLOCKING=1": "the CPU then waits for each kernel, and nothing overlaps",
    "TORCH_NCCL_BLOCKING_WAIT=1": "the CPU then waits for each collective, and nothing overlaps",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING=0": "a collective that hangs then never ends",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "each collective then waits for a second one that checks it",
}


class Finding(NamedTuple):
    """Something that looks wrong.

    Args:
        kind: `missing`, `died`, `code`, `setting`, `clock`, `link`, `slow`, `hang`, `mismatch` or `connection`.
        ranks: at which it is; for a link its two ranks, the sender first.
        text: a sentence for a reader.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str


def described() -> dict[str, str]:
    """What this rank was started with: name → value. The names in capitals are variables of the environment."""
    cuda = torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(WATCHED)} | {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": str(torch.get_num_threads()),
        "cores": str(cores),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "interfaces": " ".join(interfaces()),
    }


def judge_settings(members: Mapping[int, Member]) -> list[Finding]:
    """What looks wrong in the words of the ranks that came."""
    said, found = {rank: one.settings for rank, one in members.items()}, []
    of_host: dict[str, list[int]] = {}
    for rank, one in members.items():
        of_host.setdefault(one.machine, []).append(rank)
    for ranks, its, usual in _odd({rank: one.files for rank, one in members.items() if one.files}):
        names = sorted(name for name in its.keys() | usual.keys() if its.get(name) != usual.get(name))
        text = f"on {members[ranks[0]].host} lib/{names[0]} is another than elsewhere, {len(names)} files in all"
        found.append(Finding("code", ranks, f"{text}: copy one library to all machines"))
    for name in sorted({name for one in said.values() for name in one} - {"interfaces"}):
        for together in of_host.values() if name in OF_A_HOST else [list(members)]:
            for ranks, its, usual in _odd({rank: said[rank].get(name) for rank in together}):
                if f"{name}={its}" in SUSPECT:
                    continue  # below
                text = f"{name} is {its or 'not set'} on {named_ranks(ranks)}, and {usual or 'not set'} on the others"
                found.append(Finding("setting", ranks, f"{text}: start all with the same"))
    for setting, why in SUSPECT.items():
        name, value = setting.split("=")
        if ranks := tuple(rank for rank, one in said.items() if one.get(name, "").upper() == value):
            found.append(Finding("setting", ranks, f"{setting} on {named_ranks(ranks)}: {why}; unset it"))
    for ranks in of_host.values():
        threads, cores = sum(int(said[rank].get("threads", 1)) for rank in ranks), int(said[ranks[0]].get("cores", 1))
        if len(ranks) < threads > cores:
            text = f"{threads} threads of {len(ranks)} ranks share the {cores} cores of {members[ranks[0]].host}"
            found.append(Finding("setting", tuple(ranks), f"{text}: set OMP_NUM_THREADS={cores // len(ranks) or 1}"))
    for rank, name in ((rank, name) for rank in members for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")):
        value, here = said[rank].get(name, ""), said[rank].get("interfaces", "").split()
        wanted = (
            [] if value.startswith("^") else [word.lstrip("=") for word in value.split(",") if word]
        )  # ^: all but
        if wanted and here and not any(one.startswith(word) for word in wanted for one in here):
            text = f"{name} is {value} on rank {rank}, and {members[rank].host} has no such network interface"
            found.append(Finding("setting", (rank,), f"{text}: name one of {', '.join(here)}"))
    return found


def judge_clocks(ahead_s: Mapping[int, float]) -> list[Finding]:
    """Ranks whose clock is not that of rank 0; `ahead_s` says by how much it is ahead."""
    far = {rank: by_s for rank, by_s in ahead_s.items() if abs(by_s) > LEAST_CLOCK_S}
    text = "the clock of rank {} differs from that of rank 0 by {:+.2f} s: start the time service (NTP) of its host"
    return [Finding("clock", (rank,), text.format(rank, by_s)) for rank, by_s in far.items()]


def _odd(values: Mapping[int, object]) -> list[tuple[tuple[int, ...], object, object]]:
    """(ranks, their value, the usual one) for each value that fewer ranks have; of equally many, the first is usual."""
    ranks_of: list[tuple[object, list[int]]] = []
    for rank, value in values.items():
        same = next((ranks for other, ranks in ranks_of if other == value), None)
        if same is None:
            ranks_of.append((value, same := []))
        same.append(rank)
    usual = max(ranks_of, key=lambda item: len(item[1]), default=(None, []))[0]
    return [(tuple(ranks), value, usual) for value, ranks in ranks_of if value != usual]
