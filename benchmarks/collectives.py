"""Reduce-scatter and the ring all-reduce: ours against gloo's own, in time; the former in bytes on the wire, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.table import between_barriers, paired, ratio, show, three
from book.trials import wire_audit
from lib import collectives, comm, run

SIZES = (64 * 2**10, 2**20, 8 * 2**20, 32 * 2**20)
_theirs = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _sides(world, size_bytes: int):
    """Both sides on the same tensor, timed from barrier to barrier, since a collective is done when all are."""
    x = torch.ones(size_bytes // 4 // world.size * world.size)

    return {
        "ours": partial(between_barriers, world, comm.reduce_scatter, x, world),
        "gloo": partial(between_barriers, world, _gloo, x, world),
    }


def _measure(world, rounds: int) -> dict:
    results = {}
    for size_bytes in SIZES:
        sides = _sides(world, size_bytes)
        paired(sides, 2)
        results[size_bytes] = paired(sides, rounds)
    return results


def _gloo(x, group) -> None:
    _theirs(torch.empty(len(x) // group.size), x)


def _share(size_bytes: int, n: int, call: Callable | None) -> str:
    """Bytes that a rank sends in a reduce-scatter, as a share of the whole array."""
    if not wire_audit.available():
        return "Linux only"
    size_bytes = size_bytes // (4 * n) * 4 * n
    ranks = wire_audit.audit("reduce_scatter", size_bytes, n, call)
    return f"{max(rank.sent_bytes for rank in ranks) / size_bytes:.2f}"


def _all_reduce_sides(world, size_bytes: int, rounds: int) -> dict:
    x = torch.ones(size_bytes // 4)

    names = ("ring", "tree", "naive")
    calls = {name: getattr(collectives, f"{name}_all_reduce") for name in names} | {"gloo": comm.all_reduce}
    sides = {name: partial(between_barriers, world, call, x, world) for name, call in calls.items()}
    paired(sides, 2)
    return paired(sides, rounds)


def by_hand(rounds: int, n: int = 4) -> None:
    rows = [("size, KiB", "gloo, ms", "ring / gloo", "tree / gloo", "naive / gloo")]
    for size_bytes in SIZES:
        times = run(_all_reduce_sides, n, size_bytes, rounds, timeout_s=600)[0]
        gloo_ms = sorted(1e3 * t for t in times["gloo"])[rounds // 2]
        slower = [three(ratio(times["gloo"], times[name])) for name in ("ring", "tree", "naive")]
        rows.append((f"{size_bytes // 1024}", f"{gloo_ms:.2f}", *slower))
    show(f"All-reduce from send and receive, {n} ranks (reach: the ring at most 1.5 times gloo's at 8 MiB)", rows)


def main(rounds: int = 21) -> None:
    rows = [("ranks", "size, KiB", "ours, ms", "gloo / ours", "ours, bytes/size", "gloo, bytes/size", "ideal")]
    for n in (2, 3, 4, 8):
        for size_bytes, times in run(_measure, n, rounds, timeout_s=600)[0].items():
            ours_ms = sorted(1e3 * t for t in times["ours"])[rounds // 2]
            sent = [_share(size_bytes, n, call) for call in (None, _gloo)]
            speed = three(ratio(times["ours"], times["gloo"]))
            rows.append((f"{n}", f"{size_bytes // 1024}", f"{ours_ms:.2f}", speed, *sent, f"{(n - 1) / n:.2f}"))
    show("Reduce-scatter (reach: half of gloo's bytes, 1.3× faster)", rows)
    by_hand(rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 21)
