"""Our run so far: Llama 2 70B on 64 H100, with the techniques of the chapters up to here.

The problem: every chapter improves something, and a reader loses sight of what for. The idea: one run goes through the
book. Each chapter opens with what the run has, and ends with what it has gained. All numbers are those of `lib.planner`
when the page is built: modelled, not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from book.figures.canvas import Canvas
from book.figures.svg import NARROW, Figure, color, drawn_twice, num
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
        words: the layout, as one would say it.
        keeps_all: whether the first rank keeps every microbatch of a step, as under GPipe.
    """

    technique: str
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
    1: Station("one GPU", "all of it on one GPU", Layout4D(1, 1, 1, 1, zero=0)),
    3: Station("copies", "64 copies of the model", Layout4D(1, 1, 1, 64, zero=0)),
    4: Station("ZeRO-2", "ZeRO-2 over 64 GPUs", Layout4D(1, 1, 1, 64, zero=2)),
    5: Station(
        "ZeRO-3, recomputed",
        "ZeRO-3 over 64 GPUs, all blocks recomputed",
        Layout4D(1, 1, 1, 64, zero=3, recompute="full"),
    ),
    6: Station("tp", "tensor parallel in a node, ZeRO-1 over 8 nodes", _TP8),
    7: Station("tp and sp", "tensor and sequence parallel in a node", _TP8._replace(sequence_parallel=True)),
    8: Station("GPipe", "4 copies of 4 stages of 4 GPUs, GPipe", _PIPELINE, keeps_all=True),
    9: Station("1F1B", "4 copies of 4 stages of 4 GPUs, 1F1B", _PIPELINE),
    11: Station("interleaved", "4 × 4 × 4 GPUs, interleaved 1F1B", _PIPELINE._replace(stages_per_rank=5)),
    12: Station("ZB-V", "4 × 4 × 4 GPUs, ZB-V", _PIPELINE._replace(stages_per_rank=2, schedule="zb-v")),
}
MOST_S, MOST_SENT_BYTES = 90.0, 9e12  # at the end of an axis
INKS = {"computes": "forward", "waits": "comm", "idles": "idle"}
KINDS = {"computes": "computes", "waits": "waits for messages", "idles": "idles"}
SENT = "series-1"  # not the colour of waiting: most of what is sent is hidden
TORN = 5, 14, 19  # pixels from the end of a bar that goes on
MODELLED = (
    "Modelled by lib.planner: Llama 2 70B on {gpus} H100, 1,024 sequences of 4,096 tokens in a step, one at a time; "
    "large matmuls at {share:.0%} of the peak, {link:.0f} GB/s from a GPU inside a node, {network:.0f} GB/s out of it."
)


@drawn_twice
def our_run(after: int, *, since: int | None = None, width: float = 680) -> Figure:
    """The run after a chapter: memory of the GPU with the highest peak, bytes that a GPU sends, seconds of a step.

    Args:
        after: number of the chapter.
        since: number of an earlier chapter, to compare with.
    """
    now, was, limit = STATIONS[after], STATIONS.get(since), RUN.room_bytes
    most = 2 * limit  # bytes at the end of the axis
    said = f"{_gb(now.memory_bytes)} on the fullest GPU, {now.step_s:.1f} seconds per step"
    before = f"; before, {_gb(was.memory_bytes)} and {was.step_s:.1f} seconds" if was else ""
    canvas = Canvas(f"Our run {'now' if was else 'so far'}, {now.words}: {said}{before}.")
    legend = [(INKS[kind], KINDS[kind]) for kind, seconds in now.seconds.items() if seconds]
    if was:
        legend.append(("track", "before this chapter"))
    y = canvas.head(f"{'Our run now' if was else 'Our run so far'}: {now.words}", legend, 0, width) + 12

    axis = _Axis(canvas, *((92.0, width - 176) if width > NARROW else (0.0, width)), width)
    line = axis.at(limit / most)
    top = axis.name(y, "fullest GPU", _memory_words(now, was, limit))
    axis.bar(top, {"param": now.memory_bytes / most}, was and was.memory_bytes / most)
    if was and was.memory_bytes > most:  # its line ends where the axis ends
        axis.say_before(top + 43, f"{_gb(was.memory_bytes)} before")
    canvas.path(f"M{num(line)} {num(top - 5)}V{num(top + 32)}", stroke=color("text"), stroke_width=1.5)
    canvas.note(line + 5, top + 43, f"an H100 has {_gb(limit)}")
    top = axis.name(top + 56, "a GPU sends", _gb(now.sent_bytes))
    axis.bar(top, {SENT: now.sent_bytes / MOST_SENT_BYTES}, was and was.sent_bytes / MOST_SENT_BYTES)
    top = axis.name(top + 44, "a step", _step_words(now, was))
    parts = {INKS[kind]: value / MOST_S for kind, value in now.seconds.items()}
    axis.bar(top, parts, was and was.step_s / MOST_S)
    device, stack = RUN.cluster.device, RUN.stack
    speeds = {"share": stack.matmul_share, "link": device.link_Bps / 1e9, "network": device.network_Bps / 1e9}
    return canvas.figure(width, top + 34, MODELLED.format(gpus=now.layout.gpus, **speeds))


@dataclass(frozen=True)
class _Axis:
    """Bars from `left` to `right`, in fractions of their axis; what is longer has a torn end."""

    canvas: Canvas
    left: float
    right: float
    width: float

    def at(self, fraction: float) -> float:
        return self.left + (self.right - self.left) * min(fraction, 1)

    def name(self, y: float, name: str, words: str) -> float:
        """What a bar shows; returns the top of the bar, below its words on a phone and beside them elsewhere."""
        top = y if self.left else y + 18
        self.canvas.text(0, top + 16 if self.left else y + 11, name)
        self.canvas.text(self.width, top + 16 if self.left else y + 11, words, "end", font_weight=650)
        return top

    def bar(self, top: float, parts: dict[str, float], before: float | None) -> None:
        start = 0.0
        for ink, fraction in parts.items():
            if not fraction:
                continue
            x, end = self.at(start), self.at(start + fraction)
            start += fraction
            if ink == "idle":
                self.canvas.rect(x, top, end - x, 22, fill=self.canvas.hatched, stroke=color("rule"))
                continue
            self.canvas.bars(ink).rect(x, top, end - x - (TORN[-1] if start > 1 else 0), 22)
            for back in TORN[:-1] if start > 1 else ():
                self.canvas.bars(ink).rect(end - back, top, 5, 22)
        if before:
            end = self.at(before)
            for x, width in [(self.left, end - self.left - (TORN[-1] if before > 1 else 0))] + [
                (end - back, 5) for back in TORN[:-1] if before > 1
            ]:
                self.canvas.rect(x, top + 26, width, 5, radius=1, fill=color("soft"))

    def say_before(self, y: float, words: str) -> None:
        """Right of the bars; on a phone below their left end, where nothing else is written."""
        self.canvas.note(self.width if self.left else 0, y, words, "end" if self.left else "")


def road(more: Mapping[str, Layout4D] | None = None) -> dict[str, dict[str, float]]:
    """The whole way, for bars: chapter and technique, whether it is too large, and the seconds of a step.

    Args:
        more: layouts by name, for rows after the last chapter's.
    """
    way = {f"{chapter}: {one.technique}": one for chapter, one in STATIONS.items()}
    way |= {name: Station(name, name, layout) for name, layout in (more or {}).items()}
    rows = {}
    for name, one in way.items():
        if one.layout.gpus == RUN.cluster.gpus:
            seconds = {"compute": one.seconds["computes"], "comm": one.seconds["waits"], "idle": one.seconds["idles"]}
            rows[name + ("" if one.fits else ", too large")] = seconds
    return rows


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f} GB"


def _memory_words(now: Station, was: Station | None, limit: float) -> str:
    if not now.fits:
        return f"{_gb(now.memory_bytes)}, too much"
    return f"{_gb(now.memory_bytes)}, it fits" + ("" if was is None or was.fits else " now")


def _step_words(now: Station, was: Station | None) -> str:
    if now.step_s > 600:
        return f"{now.step_s / 60:.0f} minutes" + ("" if now.fits else " if it fitted")
    words = f"{now.step_s:.1f} s" + ("" if now.fits else " if it fitted")
    if was is None or was.step_s > 600:
        return words
    return f"{words} ({now.step_s - was.step_s:+.1f})".replace("-", "−")
