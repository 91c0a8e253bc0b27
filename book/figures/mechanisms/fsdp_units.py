"""FSDP through a step: a unit arrives while the one before computes, and is freed when it has computed.

The figure shows rank 0. A thin bar is its shard, a thick bar all shards. The shards of the other ranks come in an
all-gather; their shards of the gradients leave in a reduce-scatter. Below, the parameters that are live, in bytes, on a
track as long as the full model; a dashed frame keeps the highest so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from book.figures.svg import OUTLINE, SMALLEST_PX, color, text_width
from book.trials.exposed import sharded_step
from lib.cost import zero_wire_bytes

ROOT = 0  # the unit of all layers outside the blocks
TOP, ROW, HIGH, BAR = 26, 38, 30, 26  # pixels: of the first row, from row to row, of a full unit, of the bar
OUT = 4  # pixels by which the frame of the highest is larger than the bar
DASHED = OUTLINE | {"stroke": color("soft")}
COLUMNS = {  # pixels: x and width
    "wide": {"gradients": (84, 124), "parameters": (220, 124), "in flight": (372, 152), "other ranks": (552, 124)},
    "narrow": {"gradients": (70, 41), "parameters": (115, 76), "in flight": (195, 106), "other ranks": (305, 34)},
}


class Moment(NamedTuple):
    """The work of rank 0 at one time, and the units in it.

    Args:
        what: `forward`, `backward`, or empty where it waits.
        unit: that computes.
        arriving, whole, leaving: units in an all-gather, with full parameters, in a reduce-scatter.
    """

    what: str = ""
    unit: int = ROOT
    arriving: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()


def play_fsdp_units(sizes: Sequence[float], n: int = 4) -> Player:
    """A step of FSDP with prefetch on rank 0 of n.

    Args:
        sizes: bytes of the parameters of each unit, not sharded: of the root, then of the blocks, three or four.
    """
    moments = moments_of_step(len(sizes) - 1)
    title = f"A step of FSDP on rank 0 of {n}"
    return Player(title, lambda width: _scene(moments, sizes, n, width), _beats(moments, sizes, n))


def live_bytes(moment: Moment, sizes: Sequence[float], n: int) -> float:
    """Bytes of parameters on a rank: all shards, and each unit that is unsharded or arrives."""
    return sum(sizes) / n + sum(sizes[unit] for unit in moment.whole | moment.arriving)


def moments_of_step(num_blocks: int) -> list[Moment]:
    """A step in the order of `sharded_step`; before it and after it a rank has only shards.

    The root is not in that formula: it arrives at the beginning of each pass, and is unsharded to its end.
    """
    moments = [Moment()]
    gathers, reduces = frozenset(), frozenset()  # started since the last computation of a block
    for what, block, *_ in sharded_step(*[[0.0] * num_blocks] * 4):  # only the order of its times is used
        unit = frozenset({block + 1})
        if what == "gather":
            gathers |= unit
        elif what == "reduce":
            reduces |= unit
        else:
            if unit <= gathers:  # nothing can compute before it arrives
                moments.append(Moment(arriving=unit | {ROOT}))
            moments.append(Moment(what, block + 1, gathers - unit, unit | {ROOT}, reduces))
            gathers, reduces = frozenset(), frozenset()
    return [*moments, Moment("backward", ROOT, whole=frozenset({ROOT}), leaving=reduces | {ROOT}), Moment()]


def _whole(moments: list[Moment], unit: int) -> Iterator[tuple[int, int]]:
    """For each all-gather of a unit: when it arrives, and when it is freed."""
    for begin, moment in enumerate(moments):
        if unit in moment.arriving:
            yield begin, next(i for i in range(begin + 1, len(moments)) if unit not in moments[i].whole)


def _scene(moments: list[Moment], sizes: Sequence[float], n: int, width: float) -> Scene:
    narrow, units = width == NARROW, range(len(sizes))
    columns = COLUMNS["narrow" if narrow else "wide"]
    bar = TOP + ROW * len(sizes) + 26
    scale = (width - 2) / max(sum(sizes), *(live_bytes(moment, sizes, n) for moment in moments))

    canvas = Canvas(f"FSDP units {list(sizes)} {n} {width}")
    for words, (x, across) in columns.items():
        if narrow and words in ("gradients", "other ranks"):  # longer than their columns
            canvas.text(x + across, 14, words.replace("other ranks", "others"), "end", font_weight=650)
        else:
            canvas.text(x + across / 2, 14, words, "middle", font_weight=650)
    for unit in units:
        y = TOP + ROW * unit
        canvas.text(0, y + 12, _name(unit))
        canvas.rect(columns["parameters"][0], y, columns["parameters"][1], HIGH, radius=3, fill="none", **DASHED)
        x, across = columns["other ranks"]
        for other in range(1, n):
            canvas.rect(x, y + HIGH / n * other, across, HIGH / n - 1, fill=color("param", True))
    canvas.text(0, bar - 8, "live parameters")
    canvas.text(width - 1, bar - 8, f"all: {_size(sum(sizes), sizes)}", "end")
    canvas.rect(1, bar, scale * sum(sizes), BAR, radius=3, fill=color("idle"), stroke=color("rule"))

    def shard(unit: int, column: str, ink: str, seen: bool = True) -> Thing:
        """The shard of rank 0, on top."""
        x, across = columns[column]
        return Thing(x, TOP + ROW * unit, across, HIGH / n, ink, seen=float(seen))

    def rest(unit: int, column: str, ink: str, words: str = "", seen: bool = True) -> Thing:
        """The shards of the other ranks."""
        x, across = columns[column]
        return Thing(x, TOP + ROW * unit + HIGH / n, across, HIGH - HIGH / n, ink, words, float(seen))

    def things(number: int) -> Iterator[tuple[str, Thing]]:
        moment = moments[number]
        for unit in units:
            yield f"shard {unit}", shard(unit, "parameters", "param")
            for turn, (begin, end) in enumerate(_whole(moments, unit)):
                if number < begin:
                    others = rest(unit, "other ranks", "comm", seen=False)
                elif number == begin:
                    others = rest(unit, "in flight", "comm", "all-gather")
                else:
                    others = rest(unit, "parameters", "param", "unsharded", number < end)
                yield f"others {unit} {turn}", others
            yield from gradient(number, unit)
        if moment.what:
            yield "compute", Thing(0, TOP + ROW * moment.unit + 17, 66, HIGH - 17, moment.what, moment.what)
        yield from live(moment)
        yield from highest(number)

    def gradient(number: int, unit: int) -> Iterator[tuple[str, Thing]]:
        moment, has_left = moments[number], any(unit in one.leaving for one in moments[:number])
        is_made = moment.what == "backward" and unit in (ROOT, moment.unit)
        leaves = unit in moment.leaving
        if leaves:
            others = rest(unit, "in flight", "comm", "reduce-scatter")
        elif has_left:
            others = rest(unit, "other ranks", "comm", seen=False)
        else:
            others = rest(unit, "gradients", "gradient", "full", is_made)
        yield f"gradient {unit}", others
        yield f"gradient shard {unit}", shard(unit, "gradients", "gradient", is_made or leaves or has_left)

    def live(moment: Moment) -> Iterator[tuple[str, Thing]]:
        x = 1.0
        parts = [("shards", sum(sizes) / n, "param")]
        for ink, there in (("param", moment.whole), ("comm", moment.arriving)):
            parts += [(_name(unit), sizes[unit], ink) for unit in sorted(there)]
        for name, size, ink in parts:
            words = name if text_width(name, SMALLEST_PX) < scale * size - 2 else ""
            yield f"live {name}", Thing(x, bar, scale * size - 1, BAR, ink, words)
            x += scale * size
        words = _size(live_bytes(moment, sizes, n), sizes)
        yield "live", Thing(104, bar - 21, text_width(words, SMALLEST_PX), 18, "plain", words)

    def highest(number: int) -> Iterator[tuple[str, Thing]]:
        """A frame around the most that was live until now; before the step there is nothing to compare with."""
        most = max(live_bytes(moment, sizes, n) for moment in moments[: number + 1])
        long, words = scale * most, f"highest so far: {_size(most, sizes)}"
        across, seen = text_width(words, SMALLEST_PX), float(number > 0)
        yield "highest", Thing(1, bar - OUT, long, BAR + 2 * OUT, "outline", seen=seen)
        yield "highest in words", Thing(max(1.0, long - across), bar + BAR + OUT, across, 18, "plain", words, seen)

    return Scene(canvas, bar + BAR + OUT + 18, [dict(things(i)) for i in range(len(moments))])


def _name(unit: int) -> str:
    return "root" if unit == ROOT else f"block {unit - 1}"


def _size(size: float, sizes: Sequence[float]) -> str:
    """In a unit of bytes that suits all sizes."""
    return f"{size / 1e9:.2f} GB" if sum(sizes) >= 1e9 else f"{size / 1e6:.2f} MB"


def _beats(moments: list[Moment], sizes: Sequence[float], n: int) -> list[Beat]:
    live = [live_bytes(moment, sizes, n) for moment in moments]
    (first, turn), end = (
        (i for i, moment in enumerate(moments) if moment.arriving and not moment.what),
        len(moments) - 1,
    )
    kept, whole, most, sent = (
        _size(x, sizes) for x in (live[0], sum(sizes), max(live), zero_wire_bytes(3, sum(sizes), n))
    )
    block = _name(moments[first + 1].unit)
    ahead = _name(max(moments[first + 1].arriving))
    return [
        Beat("Before", f"Rank 0 keeps 1/{n} of each unit: {kept} of {whole}. How much is live while it trains?", 0),
        Beat(
            "First unit",
            f"The root, which is all outside the blocks, and {block} arrive. Nothing computes meanwhile.",
            first,
        ),
        Beat("Prefetch", f"While {block} computes, {ahead} is already on its way.", first + 1),
        Beat("Forward", "Each block is freed when it has computed. While one computes, the next arrives.", turn - 1),
        Beat(
            "Turn",
            "All units are freed. Backward begins with the last block: it arrives again, and rank 0 waits.",
            turn,
        ),
        Beat(
            "Backward",
            "A block computes, the block before it arrives, and the gradients of the block after it leave.",
            end - 2,
        ),
        Beat(
            "End",
            f"Shards are updated. Rank 0 has sent {sent}. At most {most} were live: shards, root, two blocks.",
            end,
        ),
    ]
