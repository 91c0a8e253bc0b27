"""Why the throughput per GPU of one run is below that of another: the kind of seconds that grew, and its cause.

The problem: "efficiency fell to 0.39" says nothing about the remedy. The idea: scale the seconds of the first run to
the sequences per GPU of the second. The kind with the largest surplus is the reason; of messages it is their latency,
their bytes, or computation behind which fewer hide.
"""

from __future__ import annotations

from typing import NamedTuple

from lib.planner.choices import layout_text
from lib.planner.messages import AxisWait
from lib.planner.seconds import Seconds, step_and_waits
from lib.planner.training import Layout4D, Training


class PlacedTraining(NamedTuple):
    """A training in a layout."""

    training: Training
    layout: Layout4D

    @property
    def per_gpu(self) -> float:
        """Sequences of a step for each GPU."""
        return self.training.global_batch / self.training.cluster.gpus


def why_it_fell(before: PlacedTraining, now: PlacedTraining) -> str:
    """`14.0% less per GPU: 0.31 s more for dp: latency of 1,023 steps between nodes, 0.31 s`."""
    seconds_then, waits_then = step_and_waits(*before)
    seconds_now, waits_now = step_and_waits(*now)
    scale = now.per_gpu / before.per_gpu
    less = 1 - scale * seconds_then.total / seconds_now.total
    surplus = {
        kind: s - scale * then for kind, s, then in zip(Seconds._fields, seconds_now, seconds_then, strict=True)
    }
    kind = max(surplus, key=lambda kind: surplus[kind])
    if kind in waits_now:
        cause = _cause_of_messages(kind, now, waits_then[kind].times(scale), waits_now[kind])
    else:
        cause = _cause(kind, before, now)
    return f"{less:.1%} less per GPU: {_short(surplus[kind])} s more for {kind}: {cause}"


def _cause(kind: str, before: PlacedTraining, now: PlacedTraining) -> str:
    """Of computation, the bubble or the optimizer."""
    if kind == "bubble":
        m, m_then = (one.layout.microbatches(one.training.global_batch) for one in (now, before))
        return f"pp {now.layout.pp} with {m:,.0f} microbatches, after pp {before.layout.pp} with {m_then:,.0f}"
    if kind == "optimizer":
        return f"{_short(now.per_gpu)} sequences per GPU, after {_short(before.per_gpu)}"
    return f"{layout_text(now.layout)}, after {layout_text(before.layout)}"


def _cause_of_messages(axis: str, now: PlacedTraining, then: AxisWait, wait: AxisWait) -> str:
    """The part that grew most; `then` has the seconds of the first run, scaled."""
    latency_s, sent_s = wait.messages.latency_s, wait.messages.seconds - wait.messages.latency_s
    grew = {
        "latency": latency_s - then.messages.latency_s,
        "bytes": sent_s - (then.messages.seconds - then.messages.latency_s),
        "hidden": then.hidden_s - wait.hidden_s,
    }
    part = max(grew, key=lambda part: grew[part])
    steps, where = _steps(axis, now)
    if part == "hidden":
        return f"{_short(wait.hidden_s)} s of its messages hide behind computation, after {_short(then.hidden_s)}"
    if part == "latency":
        return f"latency of {steps:,} steps {where}, {_short(latency_s)} s"
    rate = wait.messages.bytes / sent_s / 1e9
    return f"{_short(wait.messages.bytes / 1e9)} GB {where} at {_short(rate)} GB/s, {_short(sent_s)} s"


def _steps(axis: str, of: PlacedTraining) -> tuple[int, str]:
    """Steps of a ring on this axis, and whether it leaves a node."""
    ranks, consecutive = of.layout.group(axis)
    return ranks - 1, of.training.cluster.where(consecutive)


def _short(x: float) -> str:
    """Three digits: `1,024`, `0.31`."""
    return f"{x:,.0f}" if x >= 999.5 else f"{x:.3g}" if x >= 0.001 else "less than 0.001"
