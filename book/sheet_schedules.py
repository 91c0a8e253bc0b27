"""The schedules of a pipeline on the sheet: their bubbles, what a rank keeps, and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from book.axes import KEPT, names_of
from book.terms import ON_MODEL, Term, as_1f1b, kept, pipeline_sends, split_bubble
from lib.cost.bubble import bubble, kept_by, v_wait_s, zero_bubble_wait_s
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_v


@dataclass(frozen=True)
class Pipelined:
    """A schedule of a pipeline.

    Args:
        order: in words.
        drawn: ranks, microbatches and stages per rank → the schedule, for its picture.
        kept: activations on the rank that keeps most.
    """

    name: str
    chapter: str
    order: str
    drawn: Callable[[int, int, int], Schedule]
    bubble: Term
    kept: Term
    sends: Term
    names: Mapping[str, str]


SCHEDULES = (
    Pipelined(
        "GPipe",
        "8",
        "All forwards, then all backwards.",
        lambda p, m, v: gpipe(p, m),
        Term("bubble", "(p−1)/(m+p−1)", lambda e: bubble(e["p"], e["m"]), ON_MODEL, "%"),
        Term("keeps m microbatches", f"m/p · {KEPT}", kept(lambda e: e["m"]), ON_MODEL),
        Term("sends", "2m · 2bsh", pipeline_sends(lambda e: 1), ON_MODEL),
        names_of("ScheduleGPipe", "", ""),
    ),
    Pipelined(
        "1F1B",
        "9",
        "A backward as soon as one can run.",
        lambda p, m, v: one_f_one_b(p, m),
        Term("bubble", "(p−1)/(m+p−1)", lambda e: bubble(e["p"], e["m"]), ON_MODEL, "%"),
        Term("keeps p", KEPT, kept(as_1f1b), ON_MODEL),
        Term("sends", "2m · 2bsh", pipeline_sends(lambda e: 1), ON_MODEL),
        names_of("Schedule1F1B", "the default", "the default"),
    ),
    Pipelined(
        "Interleaved",
        "11",
        "v short stages per rank, in turn; m a multiple of p.",
        interleaved,
        Term("bubble", "(p−1)/(vm+p−1)", lambda e: bubble(e["p"], e["m"], e["v"]), ON_MODEL, "%"),
        Term(
            "keeps p + (p−1)/v",
            f"(1 + (p−1)/(pv)) · {KEPT}",
            kept(lambda e: kept_by(0, e["p"], e["m"], e["v"])),
            ON_MODEL,
        ),
        Term("sends v times as much", "2vm · 2bsh", pipeline_sends(lambda e: e["v"]), ON_MODEL),
        names_of("ScheduleInterleaved1F1B", "--num-virtual-stages-per-pipeline-rank", ""),
    ),
    Pipelined(
        "ZB-H1",
        "12",
        "Weight gradients wait, and fill the bubble.",
        lambda p, m, v: zb_h1(p, m),
        Term("bubble", "(p−1)/(3m+p−1)", split_bubble(lambda p: zero_bubble_wait_s(p, 1, 1, 1)), ON_MODEL, "%"),
        Term("keeps p", KEPT, kept(as_1f1b), ON_MODEL),
        Term("sends", "2m · 2bsh", pipeline_sends(lambda e: 1), ON_MODEL),
        names_of("ScheduleInterleavedZeroBubble", "", ""),
    ),
    Pipelined(
        "ZB-V",
        "12",
        "The same on two stages per rank, there and back; m\u00a0≥\u00a02p−1.",
        lambda p, m, v: zb_v(p, m),
        Term("bubble", "(p−1)/(6m+p−1)", split_bubble(lambda p: v_wait_s(p, 1, 1)), ON_MODEL, "%"),
        Term("keeps p", KEPT, kept(as_1f1b), ON_MODEL),
        Term("sends twice as much", "4m · 2bsh", pipeline_sends(lambda e: 2), ON_MODEL),
        names_of("ScheduleZBVZeroBubble", "", ""),
    ),
)
