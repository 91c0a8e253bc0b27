"""What a rank was started with, and what of it looks wrong.

The problem: a variable that somebody set to search for a fault, and forgot, makes a run slow for months; if only on one
machine, nobody who looks at another finds it.
The idea: each rank says names and texts. What most ranks say is usual, and a rank that says something else is named.
Few values are wrong even if all have them: these are listed here, with the reason.
"""

import os
import platform
from collections.abc import Mapping
from typing import NamedTuple

import torch

from lib.runtime.hang import named_ranks
from lib.torchrun.meeting import Member, interfaces

WATCHED = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "GLOO_", "OMP_", "MKL_", "CUDA_DEVICE_", "CUDA_LAUNCH_")
OF_A_HOST = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "cores")  # hosts may differ in them

# Sources: NCCL 2.28 user guide, PyTorch 2.9 (`torch.distributed`, ProcessGroupNCCL), CUDA programming guide: the
# chapters on environment variables, 2025.
SUSPECT = {
    "NCCL_P2P_DISABLE=1": "GPUs of a host then send through its memory instead of their own links",
    "NCCL_SHM_DISABLE=1": "GPUs of a host without a link of their own then send over the network",
    "NCCL_IB_DISABLE=1": "hosts then send over TCP instead of InfiniBand or RoCE",
    "CUDA_LAUNCH_BLOCKING=1": "the CPU then waits for each kernel, and nothing overlaps",
    "TORCH_NCCL_BLOCKING_WAIT=1": "the CPU then waits for each collective, and nothing overlaps",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING=0": "a collective that hangs then never ends",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "each collective then waits for a second one that checks it",
}
# The guide on NCCL_PROTO: on platforms that do not support it, LL128 can corrupt data. NCCL itself knows which do.
CORRUPTS = "LL128"


class Finding(NamedTuple):
    """Something that looks wrong, and at which ranks; a link has two."""

    kind: str  # missing, connection, code, setting, clock, link, slow, network, collective, hang, mismatch or died
    ranks: tuple[int, ...]
    text: str  # a sentence for a reader


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
    said, findings = {rank: member.settings for rank, member in members.items()}, []
    of_host: dict[str, list[int]] = {}
    for rank, member in members.items():
        of_host.setdefault(member.machine, []).append(rank)
    for ranks, its, usual in _odd({rank: member.files for rank, member in members.items() if member.files}):
        names = sorted(name for name in its.keys() | usual.keys() if its.get(name) != usual.get(name))
        text = f"on {members[ranks[0]].host} lib/{names[0]} is another than elsewhere, {len(names)} files in all"
        findings.append(Finding("code", ranks, f"{text}: copy one library to all machines"))
    for name in sorted({name for settings in said.values() for name in settings} - {"interfaces"}):
        for together in of_host.values() if name in OF_A_HOST else [list(members)]:
            for ranks, its, usual in _odd({rank: said[rank].get(name) for rank in together}):
                if f"{name}={its}" in SUSPECT or name == "NCCL_PROTO" and _forces_ll128(its):
                    continue  # below
                text = f"{name} is {its or 'not set'} on {named_ranks(ranks)}, and {usual or 'not set'} on the others"
                findings.append(Finding("setting", ranks, f"{text}: start all with the same"))
    for setting, why in SUSPECT.items():
        name, value = setting.split("=")
        if ranks := tuple(rank for rank, settings in said.items() if settings.get(name, "").upper() == value):
            findings.append(Finding("setting", ranks, f"{setting} on {named_ranks(ranks)}: {why}; unset it"))
    if forced := tuple(rank for rank, settings in said.items() if _forces_ll128(settings.get("NCCL_PROTO"))):
        text = (
            f"NCCL_PROTO={said[forced[0]]['NCCL_PROTO']} on {named_ranks(forced)}: where the GPUs or the network do"
        )
        text += " not support LL128 this corrupts data, and NCCL uses it by itself where they do; unset it"
        findings.append(Finding("setting", forced, text))
    for ranks in of_host.values():
        threads, cores = sum(int(said[rank].get("threads", 1)) for rank in ranks), int(said[ranks[0]].get("cores", 1))
        if len(ranks) < threads > cores:
            text = f"{threads} threads of {len(ranks)} ranks share the {cores} cores of {members[ranks[0]].host}"
            findings.append(
                Finding("setting", tuple(ranks), f"{text}: set OMP_NUM_THREADS={cores // len(ranks) or 1}")
            )
    for rank, name in ((rank, name) for rank in members for name in OF_A_HOST[:2] if said[rank].get(name)):
        value, here, nccl = said[rank][name], said[rank].get("interfaces", "").split(), name.startswith("NCCL")
        wanted = value.split("^")[0].lstrip("=").split(",") if nccl else value.split(",")  # ^: all but these
        matches = (interface == word or nccl and interface.startswith(word) for word in wanted for interface in here)
        if here and not any(matches):
            text = f"{name} is {value} on rank {rank}, and {members[rank].host} has no such network interface"
            findings.append(Finding("setting", (rank,), f"{text}: name one of {', '.join(here)}"))
    return findings


def _forces_ll128(value: str | None) -> bool:
    """Whether a value of NCCL_PROTO asks for LL128: a list of protocols, or with ^ those to exclude."""
    wanted = (value or "").upper().replace(" ", "")
    return not wanted.startswith("^") and CORRUPTS in wanted.split(",")


def _odd(values: Mapping[int, object]) -> list[tuple[tuple[int, ...], object, object]]:
    """(ranks, their value, the usual one) for each value that fewer ranks have; of equally many, the first is usual."""
    listed = [*values.values()]
    usual = max(listed, key=listed.count, default=None)
    odd = [value for i, value in enumerate(listed) if value != usual and value not in listed[:i]]
    return [(tuple(rank for rank, its in values.items() if its == value), value, usual) for value in odd]
