"""A profile of a run with its plan beside it: one step of all ranks as a trace, with measured and predicted lanes.

Only the durations of forward and backward are from the run: where the lanes differ, ranks waited for messages, or for a
core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from lib.pipeline.gantt import to_trace
from lib.pipeline.schedules.action import COMPUTE, Action, Op
from lib.pipeline.simulate import Costs, simulate
from lib.planner.plan import Plan
from lib.trace import Span, Trace


def step_profile(plan: Plan, traces: Sequence[Trace]) -> Trace:
    """Measured and predicted lanes in one trace, whose `save` writes a file for ui.perfetto.dev; times from the start.

    Args:
        traces: of each rank, of the same step, from synchronised clocks, such as the clock of one machine.
    """
    start_s = min(item.start_s for trace in traces for item in [*trace.spans, *trace.events])
    return Trace.merge([*traces, _predicted_spans(plan, traces)], start_s)


def _predicted_spans(plan: Plan, traces: Sequence[Trace]) -> Trace:
    """The simulated step, on a lane `predicted` of each rank, from the first measured forward on."""
    measured = [span for trace in traces for span in trace.spans if _is_action(span)]
    seconds: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for span in measured:
        stage, op, _ = Action.parse(span.label)
        seconds[stage, op].append(span.end_s - span.start_s)

    def of_stages(op: Op) -> list[float]:
        """The median of each stage; of a half the median of its full backwards, halved, if it has no halves."""
        stages = range(plan.layout.num_stages)
        return [median(seconds[s, op]) if (s, op) in seconds else median(seconds[s, Op.B]) / 2 for s in stages]

    costs = Costs(of_stages(Op.F), of_stages(Op.I), of_stages(Op.W))
    zero_s = min(span.start_s for span in measured)
    of_places = to_trace(simulate(plan.layout.make_schedule(), costs), lane="predicted").spans
    spans = [
        replace(span, rank=rank, start_s=zero_s + span.start_s, end_s=zero_s + span.end_s)
        for rank in range(plan.layout.num_ranks)
        for span in of_places
        if span.rank == plan.place(rank)
    ]
    return Trace(spans=spans)


def _is_action(span: Span) -> bool:
    """Whether a span is a forward or backward of a schedule, such as `2F0`; a trace also has spans inside these."""
    return span.label != "" and Action.parse(span.label).op in COMPUTE
