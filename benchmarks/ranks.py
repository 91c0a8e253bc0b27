"""How long until n ranks have returned a tensor: `run`, `torch.multiprocessing.spawn`, `torchrun`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.table import quartiles, show, three
from lib import comm, run


def _ours(world):
    return comm.all_reduce(torch.ones(4), world)


def _theirs(rank: int, size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    x = torch.ones(4)
    dist.all_reduce(x)
    torch.save(x, f"{folder}/{rank}")
    dist.destroy_process_group()


def _spawn(size: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        mp.spawn(_theirs, args=(size, folder), nprocs=size)
        [torch.load(f"{folder}/{rank}") for rank in range(size)]
        return time.perf_counter() - began_s


def _torchrun(size: int) -> float:
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "-m", "benchmarks.ranks"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began_s


def main() -> None:
    run(_ours, 2)  # the server starts once
    rows = [("ranks", "run, ms", "spawn, s", "torchrun, s", "spawn / run", "torchrun / run")]
    for size in (2, 4, 8):
        ours = quartiles([run(_ours, size).wall_s for _ in range(10)])
        spawn, torchrun = _spawn(size), _torchrun(size)
        mine = three(tuple(1e3 * x for x in ours), "{:.0f}")
        rows.append(
            (
                f"{size}",
                mine,
                f"{spawn:.1f}",
                f"{torchrun:.1f}",
                f"{spawn / ours[1]:.0f}×",
                f"{torchrun / ours[1]:.0f}×",
            )
        )
    show("Ranks that return a tensor (reach: at 8 ranks under 500 ms and 40× faster)", rows)


if __name__ == "__main__":  # what torchrun starts
    with tempfile.TemporaryDirectory() as own:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        dist.all_reduce(x := torch.ones(4))
        torch.save(x, f"{own}/x")
        dist.destroy_process_group()
