"""A data-parallel step: `BucketedDDP` against `DistributedDataParallel`, same weights, rows and bucket size."""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.table import paired, ratio, show, three
from lib import comm, cost, data, run, trace
from lib.data_parallel.ddp import BucketedDDP
from lib.model import GPT, GPTConfig, mean_loss

CONFIG = GPTConfig(d_model=256, num_layers=4, num_heads=4, context=64)
ROWS_PER_RANK = 4
BUCKET_MB = 4


def _measure(world, rounds: int, backwards: bool) -> tuple[dict[str, list[float]], float]:
    inputs, targets = data.batch(
        data.load().train, 0, global_batch=ROWS_PER_RANK * world.size, context=CONFIG.context
    )
    mine = data.rows_of_rank(len(inputs), world.rank, world.size)
    x, y = inputs[mine], targets[mine]
    wraps = {
        "ours": lambda m: BucketedDDP(m, world, bucket_bytes=BUCKET_MB * 2**20),
        "DDP": lambda m: DistributedDataParallel(m, bucket_cap_mb=BUCKET_MB),
        "DDP, views": lambda m: DistributedDataParallel(m, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True),
    }
    sides = {}
    for name, wrap in list(wraps.items())[:: -1 if backwards else 1]:
        torch.manual_seed(0)
        model = wrap(GPT(CONFIG))
        sides[name] = partial(_step, world, model, torch.optim.SGD(model.parameters(), lr=0.01), x, y)
    paired(sides, 3)
    with trace.record(world.rank) as recorded:
        sides["ours"]()
    sent = sum(e.wire_bytes for e in recorded.events if e.label.startswith("bucket"))
    return paired(sides, rounds), sent


def _step(world, model, optimizer, x, y) -> float:
    comm.barrier(world)
    began_s = time.perf_counter()
    optimizer.zero_grad()
    mean_loss(model(x), y).backward()
    if isinstance(model, BucketedDDP):
        model.finish()
    optimizer.step()
    comm.barrier(world)
    return time.perf_counter() - began_s


def main(fresh: int = 12, rounds: int = 11) -> None:
    """`fresh` times new processes and models, as where they lie in memory moves a ratio by a few hundredths."""
    rows = [("ranks", "ours, ms", "DDP / ours", "DDP with views / ours", "bytes sent / ideal")]
    psi_bytes = 4 * CONFIG.num_parameters
    for n in (2, 4):
        times = {}
        for i in range(fresh):
            some, sent = run(_measure, n, rounds, i % 2 == 1, timeout_s=600)[0]
            for side, values in some.items():
                times.setdefault(side, []).extend(values)
        ours_ms = 1e3 * statistics.median(times["ours"])
        ideal = cost.wire_bytes("all_reduce", psi_bytes, n)
        speeds = [three(ratio(times["ours"], times[side]), "{:.3f}") for side in ("DDP", "DDP, views")]
        rows.append((f"{n}", f"{ours_ms:.0f}", *speeds, f"{sent / ideal:.6f}"))
    millions = CONFIG.num_parameters / 1e6
    show(f"Data-parallel step ({fresh * rounds} pairs, reach 1.0), GPT of {millions:.1f} M parameters", rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
