"""Our run so far: Llama 2 70B on 64 H100, with the techniques of the chapters up to here.

The problem: every chapter improves something, and a reader loses sight of what for. The idea: one run goes through the
book. Each chapter opens with what the run has, and ends with what it has gained. All numbers are those of `lib.planner`
when the page is built: modelled, not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from book.figures.canvas import Canvas
from book.figures.road import OFF_S, Milestone, Road
from book.figures.svg import SMALLEST_PX, Figure, drawn_twice, lines_of
from lib.planner import Cluster, Layout4D, Training, memory_bytes, step_s
from lib.planner.report import report_of_layout
from lib.planner.training import GPUS, PRESET_MODELS, stack_for

RUN = Training(
    PRESET_MODELS["llama-70b"], Cluster(GPUS["h100"], 64), stack_for("megatron-lm", "h100"), global_batch=1024
)


@dataclass(frozen=True)
class Station:
    """What the run has after a chapter.

    Args:
        technique: of the chapter, in a word or two.
        stop: the same in one word, for the road.
        words: the layout, as one would say it.
        keeps_all: whether the first rank keeps every microbatch of a step, as under GPipe.
    """

    technique: str
    stop: str
    words: str
    layout: Layout4D
    keeps_all: bool = False

    @property
    def training(self) -> Training:
        """The run, on as many GPUs as the layout has."""
        return replace(RUN, cluster=replace(RUN.cluster, gpus=self.layout.gpus))

    @property
    def memory_bytes(self) -> float:
        """On the GPU with the highest peak."""
        held = memory_bytes(self.training, self.layout)
        more = self.layout.microbatches(RUN.global_batch) / self.layout.pp if self.keeps_all else 1
        return held.total + (more - 1) * held.activations

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= RUN.room_bytes

    @property
    def seconds(self) -> dict[str, float]:
        """Of a step, if there is room for it: computing, waiting for messages, idle in the bubble."""
        parts = step_s(self.training, self.layout)
        waits = parts.tp + parts.cp + parts.pp + parts.dp
        return {"computes": parts.total - waits - parts.bubble, "waits": waits, "idles": parts.bubble}

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def sent_bytes(self) -> float:
        """By the GPU that sends most, in a step."""
        return sum(max(one["bytes"]) for one in report_of_layout(self.training, self.layout).sends)


_TP8 = Layout4D(tp=8, cp=1, pp=1, dp=8)
_PIPELINE = Layout4D(tp=4, cp=1, pp=4, dp=4, sequence_parallel=True)
STATIONS = {  # by the chapter after which the run is like this
    1: Station("one GPU", "one GPU", "all of it on one GPU", Layout4D(1, 1, 1, 1, zero=0)),
    3: Station("copies", "copies", "64 copies of the model", Layout4D(1, 1, 1, 64, zero=0)),
    4: Station("ZeRO-2", "ZeRO-2", "ZeRO-2 over 64 GPUs", Layout4D(1, 1, 1, 64, zero=2)),
    5: Station(
        "ZeRO-3, recomputed",
        "ZeRO-3",
        "ZeRO-3 over 64 GPUs, all blocks recomputed",
        Layout4D(1, 1, 1, 64, zero=3, recompute="full"),
    ),
    6: Station("tp", "tp", "tensor parallel in a node, ZeRO-1 over 8 nodes", _TP8),
    7: Station(
        "tp and sp", "tp, sp", "tensor and sequence parallel in a node", _TP8._replace(sequence_parallel=True)
    ),
    8: Station("GPipe", "GPipe", "4 copies of 4 stages of 4 GPUs, GPipe", _PIPELINE, keeps_all=True),
    9: Station("1F1B", "1F1B", "4 copies of 4 stages of 4 GPUs, 1F1B", _PIPELINE),
    11: Station(
        "interleaved",
        "interleaved",
        "4 copies of 4 stages of 4 GPUs, interleaved 1F1B",
        _PIPELINE._replace(stages_per_rank=5),
    ),
    12: Station(
        "ZB-V", "ZB-V", "4 copies of 4 stages of 4 GPUs, ZB-V", _PIPELINE._replace(stages_per_rank=2, schedule="zb-v")
    ),
}
KINDS = {"computes": "computation", "waits": "waiting for messages", "idles": "bubble"}
MODELLED = (
    "Filled: the layout fits. Hollow: it does not, and the seconds are those it would take. Memory is on a logarithmic "
    "scale. Modelled by lib.planner: Llama 2 70B on {gpus} H100, 1,024 sequences of 4,096 tokens in a step, one in a "
    "microbatch; large matmuls at {share:.0%} of the peak, {link:.0f} GB/s from a GPU inside a node, {network:.0f} "
    "GB/s out of it."
)


@drawn_twice
def our_run(after: int, *, since: int | None = None, width: float = 680) -> Figure:
    """The road up to a chapter: memory of the GPU with the highest peak, and seconds of a step, a stop per chapter.

    Args:
        after: number of the chapter.
        since: number of an earlier chapter; a bracket has the difference from it.
    """
    now, was = STATIONS[after], STATIONS.get(since)
    verdict = ("It fits now" if was and not was.fits else "It fits") if now.fits else "It does not fit"
    finding = f"{verdict}: {_gb(now.memory_bytes)}, {_seconds(now)} a step"
    before = f"; after chapter {since}, {_gb(was.memory_bytes)} and {_seconds(was)}" if was else ""
    canvas = Canvas(f"Our run after chapter {after}, {now.words}. {finding}{before}.")
    y = 33.0 + canvas.title(finding, width)
    for words in lines_of(f"After chapter {after}: {now.words}", width, SMALLEST_PX):
        canvas.note(0, y, words)
        y += 17
    stops = {
        chapter: Milestone(one.stop, one.memory_bytes / 1e9, one.step_s, one.fits)
        for chapter, one in STATIONS.items()
    }
    bottom = Road(canvas, stops, after, since, RUN.room_bytes / 1e9, width, y + 12).draw()
    device, stack = RUN.cluster.device, RUN.stack
    speeds = {"share": stack.matmul_share, "link": device.link_Bps / 1e9, "network": device.network_Bps / 1e9}
    return canvas.figure(width, bottom, f"{_parts(now)}{MODELLED.format(gpus=now.layout.gpus, **speeds)}")


def road(more: Mapping[str, Layout4D] | None = None) -> dict[str, dict[str, float]]:
    """The whole way, for bars: chapter and technique, whether it is too large, and the seconds of a step.

    Args:
        more: layouts by name, for rows after the last chapter's.
    """
    way = {f"{chapter}: {one.technique}": one for chapter, one in STATIONS.items()}
    way |= {name: Station(name, name, name, layout) for name, layout in (more or {}).items()}
    rows = {}
    for name, one in way.items():
        if one.layout.gpus == RUN.cluster.gpus:
            seconds = {"compute": one.seconds["computes"], "comm": one.seconds["waits"], "idle": one.seconds["idles"]}
            rows[name + ("" if one.fits else ", too large")] = seconds
    return rows


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f} GB"


def _seconds(one: Station) -> str:
    return f"{one.step_s / 60:.0f} minutes" if one.step_s > OFF_S else f"{one.step_s:.1f} s"


def _parts(one: Station) -> str:
    """Of the seconds, and the bytes that are sent."""
    if not one.sent_bytes:
        return ""
    parts = ", ".join(f"{seconds:.1f} s {KINDS[kind]}" for kind, seconds in one.seconds.items() if seconds)
    return f"A step is {parts}; the GPU that sends most sends {one.sent_bytes / 1e12:.1f} TB. "
