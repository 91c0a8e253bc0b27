"""reduce-scatter: ours against gloo's own, in time and in bytes on the loopback interface."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.table import paired, ratio, show, three
from lib import comm, run

SIZES = (64 * 2**10, 2**20, 8 * 2**20, 32 * 2**20)
_SENT = Path("/sys/class/net/lo/statistics/tx_bytes")
_theirs = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _sides(world, size_bytes: int):
    """Both sides on the same tensor, timed from barrier to barrier, since a collective is done when all are."""
    x = torch.ones(size_bytes // 4 // world.size * world.size)

    def timed(call) -> float:
        comm.barrier(world)
        began_s = time.perf_counter()
        call()
        comm.barrier(world)
        return time.perf_counter() - began_s

    return {
        "ours": lambda: timed(lambda: comm.reduce_scatter(x, world)),
        "gloo": lambda: timed(lambda: _theirs(torch.empty(len(x) // world.size), x)),
    }


def _measure(world, rounds: int) -> dict:
    results = {}
    for size_bytes in SIZES:
        sides = _sides(world, size_bytes)
        paired(sides, 2)
        times = paired(sides, rounds)
        sent = {name: _sent_bytes(world, call) for name, call in sides.items()} if _SENT.exists() else {}
        results[size_bytes] = times, sent
    return results


def _sent_bytes(world, call, times: int = 5) -> float:
    """Bytes on the loopback interface per rank and call: all ranks' together, over their number."""
    comm.barrier(world)
    before = int(_SENT.read_text())
    for _ in range(times):
        call()
    comm.barrier(world)
    return (int(_SENT.read_text()) - before) / times / world.size


def main(rounds: int = 21) -> None:
    rows = [("ranks", "size, KiB", "ours, ms", "gloo / ours", "ours, bytes/size", "gloo, bytes/size", "ideal")]
    for n in (2, 3, 4, 8):
        for size_bytes, (times, sent) in run(_measure, n, rounds, timeout_s=600)[0].items():
            ours_ms = sorted(1e3 * t for t in times["ours"])[rounds // 2]
            wire = [f"{sent[side] / size_bytes:.2f}" if sent else "Linux only" for side in ("ours", "gloo")]
            speed = three(ratio(times["ours"], times["gloo"]))
            rows.append((f"{n}", f"{size_bytes // 1024}", f"{ours_ms:.2f}", speed, *wire, f"{(n - 1) / n:.2f}"))
    show("Reduce-scatter (reach: half of gloo's bytes, 1.3× faster)", rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 21)
