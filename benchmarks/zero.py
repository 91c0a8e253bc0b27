"""A step with sharded state: ZeRO-1, ZeRO-2 and FSDP against PyTorch's own, and what prefetch hides."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.data_parallel import BUCKET_MB, CONFIG, ROWS_PER_RANK
from benchmarks.table import between_barriers, paired, quartiles, ratio, show, three
from book.trials import exposed, wire_audit
from book.trials.sleep import SleepLayer
from lib import comm, cost, data, run
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.zero import ZeRO1, ZeRO2
from lib.model import GPT, mean_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
Step = Callable[[torch.Tensor, torch.Tensor], None]


def _ours(make: Callable, world) -> Step:
    model = make(GPT(CONFIG), world, ADAMW)

    def step(x, y) -> None:
        mean_loss(model(x), y).backward()
        model.finish()
        model.step()

    return step


def _redundancy(views: bool, world) -> Step:
    """`views` broadcasts what a rank owns at once, and not parameter by parameter, which is its default."""
    model = DistributedDataParallel(GPT(CONFIG), bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=views)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, lr=1e-3
    )
    return partial(_theirs, model, optimizer)


def _fully_shard(reshard: bool, world) -> Step:
    model, mesh = GPT(CONFIG), init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return partial(_theirs, model, ADAMW(model.parameters()))


def _theirs(model, optimizer, x, y) -> None:
    mean_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


_BUCKETS = {"bucket_bytes": BUCKET_MB * 2**20}
SIDES: dict[str, Callable[..., Step]] = {
    "ZeRO1": partial(_ours, partial(ZeRO1, **_BUCKETS)),
    "ZeRO2": partial(_ours, partial(ZeRO2, **_BUCKETS)),
    "FSDP": partial(_ours, FSDP),
    "FSDP, stays whole": partial(_ours, partial(FSDP, reshard_after_forward=False)),
    "ZeroRedundancyOptimizer": partial(_redundancy, False),
    "ZeroRedundancyOptimizer, views": partial(_redundancy, True),
    "fully_shard": partial(_fully_shard, True),
    "fully_shard, stays whole": partial(_fully_shard, False),
}
PAIRS = [
    ("ZeRO1", "ZeroRedundancyOptimizer"),
    ("ZeRO1", "ZeroRedundancyOptimizer, views"),
    ("ZeRO2", "ZeroRedundancyOptimizer"),
    ("ZeRO2", "ZeroRedundancyOptimizer, views"),
    ("FSDP", "fully_shard"),
    ("FSDP, stays whole", "fully_shard, stays whole"),
]


def _rows(world) -> tuple[torch.Tensor, torch.Tensor]:
    rows = ROWS_PER_RANK * world.size
    inputs, targets = data.batch(data.load().train, 0, global_batch=rows, context=CONFIG.context)
    mine = data.rows_of_rank(rows, world.rank, world.size)
    return inputs[mine], targets[mine]


def _measure(world, rounds: int, backwards: bool) -> dict[str, list[float]]:
    x, y = _rows(world)

    sides = {}
    for name, make in list(SIDES.items())[:: -1 if backwards else 1]:
        torch.manual_seed(0)
        sides[name] = partial(between_barriers, world, make(world), x, y)
    paired(sides, 3)
    return paired(sides, rounds)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def _step_of(name: str, world) -> Callable[[], None]:
    return partial(SIDES[name](world), *_rows(world))


def _model_sizes(name: str, n: int) -> str:
    """Bytes that a rank sends in a step, the mean, by the kernel's count, in sizes of the model."""
    if not wire_audit.available():
        return "Linux only"
    sent = statistics.mean(wire_audit.sent_in_a_step(partial(_step_of, name), n))
    return f"{sent / (4 * CONFIG.num_parameters):.2f}"


# ---- what prefetch hides --------------------------------------------------------------------------------------------

# Long sleeps, small tensors, a slow link: so hooks, wake-ups and the real copies take little beside them.
UNITS, FORWARD_S, BACKWARD_S, UNIT_PARAMETERS = 6, 0.05, 0.1, 10_000
LINK = {"alpha_s": 2.5e-3, "bandwidth_Bps": 0.8e6}


def _asleep(world, prefetch: bool, rounds: int) -> list[float]:
    layers = [SleepLayer(UNIT_PARAMETERS, FORWARD_S, BACKWARD_S) for _ in range(UNITS)]
    model = FSDP(nn.Sequential(*layers), world, partial(torch.optim.SGD, lr=0.1), layers, prefetch=prefetch)
    times_s = []
    for _ in range(rounds):
        comm.barrier(world)
        with comm.link(**LINK):
            began_s = time.perf_counter()
            model(torch.ones(1, requires_grad=True)).sum().backward()
            model.finish()
            times_s.append(time.perf_counter() - began_s)
        model.step()
    return times_s


def hidden(rounds: int = 7) -> None:
    """Of the time that the link is busy, the part in which the ranks compute."""
    rows = [("ranks", "prefetch", "step, ms", "predicted, ms", "hidden", "predicted")]
    compute_s = UNITS * (FORWARD_S + BACKWARD_S)
    for n in (2, 4):
        gather_s, reduce_s = (
            cost.comm_s(kind, 4 * UNIT_PARAMETERS, n, **LINK) for kind in ("all_gather", "reduce_scatter")
        )
        busy_s = UNITS * (2 * gather_s + reduce_s)
        for prefetch in (True, False):
            layers = [[each] * UNITS for each in (FORWARD_S, BACKWARD_S, gather_s, reduce_s)]
            predicted_s = max(end_s for *_, end_s in exposed.sharded_step(*layers, prefetch))
            times_s = [max(step) for step in zip(*run(_asleep, n, prefetch, rounds), strict=True)]
            shares = quartiles([1 - (step_s - compute_s) / busy_s for step_s in times_s])
            rows.append(
                (
                    f"{n}",
                    "yes" if prefetch else "no",
                    f"{1e3 * statistics.median(times_s):.0f}",
                    f"{1e3 * predicted_s:.0f}",
                    three(shares),
                    f"{1 - (predicted_s - compute_s) / busy_s:.2f}",
                )
            )
    show("Communication hidden by FSDP (reach: 0.6 with prefetch, 0.1 from what is predicted)", rows)


def main(fresh: int = 4, rounds: int = 11) -> None:
    """`fresh` times new processes and models, as where they lie in memory moves a ratio by a few hundredths."""
    rows = [("ranks", "ours", "ms", "theirs", "ours / theirs")]
    for n in (2, 4):
        times: dict[str, list[float]] = {}
        for i in range(fresh):
            for side, values in run(_measure, n, rounds, i % 2 == 1, timeout_s=600)[0].items():
                times.setdefault(side, []).extend(values)
        for ours, theirs in PAIRS:
            ours_ms = 1e3 * statistics.median(times[ours])
            rows.append((f"{n}", ours, f"{ours_ms:.0f}", theirs, three(ratio(times[theirs], times[ours]))))
    millions = CONFIG.num_parameters / 1e6
    show(f"Sharded step ({fresh * rounds} pairs, reach 0.9), GPT of {millions:.1f} M parameters with AdamW", rows)
    hidden()
    rows = [("one step, 4 ranks", "model sizes sent")]
    rows += [(name, _model_sizes(name, 4)) for name in SIDES]
    show("Bytes on the wire (ideal: 1.50 for ZeRO-1 and -2 and for FSDP that stays whole, 2.25 for FSDP)", rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
