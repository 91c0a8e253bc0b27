"""The best layout for a row of batches, numbers of GPUs or networks; and the term that makes throughput per GPU fall.

The problem: "does it scale?" is asked of one layout, and each cluster has a different best one. The idea: search anew
for each value. Where throughput per GPU falls, `lib.planner.why_fell` names the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lib.layout import one_of
from lib.planner.choices import Choices, layout_text
from lib.planner.search import Planned, recommended
from lib.planner.training import Training
from lib.planner.why_fell import PlacedTraining, why_it_fell

SWEPT = "batch", "gpus", "network"
NODES_SWEPT = 1, 2, 4, 8, 16, 32, 64
# From the largest on, because throughput per GPU falls with both.
TIMES_BATCH = (8, 4, 2, 1, 1 / 2, 1 / 4, 1 / 8)
TIMES_NETWORK = (4, 2, 1, 1 / 2, 1 / 4, 1 / 8)
FELL = 0.005  # of the throughput per GPU, chosen: below it no reason is given


@dataclass(frozen=True)
class SweptRow:
    """One value of a sweep.

    Args:
        value: sequences, GPUs, or bytes per second and GPU.
        training: with this value.
        planned: its best layout, or None.
        nothing: why there is none.
        reason: why its throughput per GPU is below the row before, or empty.
    """

    value: float
    training: Training
    planned: Planned | None = None
    nothing: str = ""
    reason: str = ""

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """0 without a layout."""
        if not self.planned:
            return 0.0
        of = self.training
        return of.global_batch * of.model.context / self.planned.seconds.total / of.cluster.gpus

    def plain(self) -> dict:
        """As plain data, with the layout in words."""
        said = {"value": self.value, "nothing": self.nothing, "reason": self.reason}
        if not self.planned:
            return said
        return said | {
            "layout": self.planned.layout._asdict(),
            "layout_text": layout_text(self.planned.layout),
            "step_s": self.planned.seconds.total,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "memory_bytes": self.planned.memory.total,
            "mfu": self.training.utilisation(self.planned.seconds.total),
        }


def sweep(training: Training, what: str, choices: Choices | None = None) -> list[SweptRow]:
    """A row for each value of `batch`, `gpus` or `network`: with more and more GPUs, smaller batches, slower networks.

    Raises:
        ValueError: no such sweep, or it would change nothing; or seconds are not modelled.
    """
    if training.no_seconds:
        raise ValueError(training.no_seconds)
    rows: list[SweptRow] = []
    for value, changed in _values(training, what):
        row = _searched(value, changed, choices)
        before = next((one for one in reversed(rows) if one.planned), None)
        if before and row.planned and row.tokens_per_s_per_gpu < (1 - FELL) * before.tokens_per_s_per_gpu:
            ran = (PlacedTraining(one.training, one.planned.layout) for one in (before, row) if one.planned)
            row = replace(row, reason=why_it_fell(*ran))
        rows.append(row)
    return rows


def _searched(value: float, training: Training, choices: Choices | None) -> SweptRow:
    try:
        return SweptRow(value, training, recommended(training, choices, 1)[0][0])
    except ValueError as error:
        return SweptRow(value, training, nothing=str(error))


def _values(training: Training, what: str) -> list[tuple[float, Training]]:
    ways: dict[str, Callable] = {"batch": _batches, "gpus": _numbers_of_gpus, "network": _networks}
    if what not in ways:
        raise ValueError(f"no sweep over {what}: choose {one_of(SWEPT)}")
    return ways[what](training)


def _batches(training: Training) -> list[tuple[float, Training]]:
    """Eight times the batch to an eighth of it."""
    sizes = (training.global_batch * times for times in TIMES_BATCH)
    return [(int(size), replace(training, global_batch=int(size))) for size in sizes if size == int(size)]


def _numbers_of_gpus(training: Training) -> list[tuple[float, Training]]:
    """One node to 64 nodes, with the same batch; and the number that is asked for."""
    cluster = training.cluster
    if cluster.device.network_Bps is None:
        raise ValueError("a sweep over GPUs needs the network between nodes: give --network, such as 25GB per GPU")
    sizes = sorted({cluster.per_node * nodes for nodes in NODES_SWEPT} | {cluster.gpus})
    return [(n, replace(training, cluster=replace(cluster, gpus=n))) for n in sizes]


def _networks(training: Training) -> list[tuple[float, Training]]:
    """Four times the network to an eighth of it."""
    cluster, network_Bps = training.cluster, training.cluster.device.network_Bps
    if network_Bps is None or cluster.gpus <= cluster.per_node:
        raise ValueError(
            f"{cluster.gpus} GPUs of one node send nothing over a network: give more GPUs, and --network"
        )
    devices = [replace(cluster.device, network_Bps=network_Bps * times) for times in TIMES_NETWORK]
    return [(one.network_Bps or 0.0, replace(training, cluster=replace(cluster, device=one))) for one in devices]
