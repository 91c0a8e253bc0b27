"""Gradients fill buckets while backward runs, and each full bucket leaves as one all-reduce.

Time is modelled: all weights take part in equally many products, so backward makes equal bytes in equal times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from book.figures.canvas import Canvas
from book.figures.player import MOST_BEATS, NARROW, Beat, Player, Scene, Thing
from book.figures.svg import SMALLEST_PX, color, num, text_width
from book.trials.exposed import overlap
from lib.cost.sizes import bucket_shares

HIGH, LANE = 24, 30  # pixels: of a bar, from lane to lane
LEAST, GAP = 2, 1  # pixels of a gradient, added to the pixels for its bytes, and to the next gradient
TOP, ZERO = 26, 66  # pixels: the first bar from the top, where time begins from the left


def play_buckets(
    tensors: Sequence[tuple[str, int]], bucket_bytes: int, *, backward_s: float, reduce_s: Callable[[int], float]
) -> Player:
    """The backward pass of a model of a few layers.

    Args:
        tensors: name and bytes of each gradient, in the order in which backward makes them. A name begins with its
            layer, such as `head.` or `blocks.3.`
        bucket_bytes: about the bytes of a bucket, as in `lib.data_parallel.bucketed_gradients.fill_buckets`.
        backward_s: seconds of the backward pass.
        reduce_s: seconds of an all-reduce of so many bytes.
    """
    run = _Backward(tensors, bucket_bytes, backward_s, reduce_s)
    title = f"Buckets: {len(tensors)} gradients in {len(run.shares)} messages"
    return Player(title, lambda width: _scene(run, width), run.beats())


class _Backward:
    """When each gradient exists, in which bucket it is, and when each bucket is in flight; in seconds."""

    def __init__(
        self, tensors: Sequence[tuple[str, int]], bucket_bytes: int, backward_s: float, reduce_s: Callable
    ) -> None:
        self.names, self.sizes = map(list, zip(*tensors, strict=True))
        self.exists_s = [backward_s * made / sum(self.sizes) for made in accumulate(self.sizes)]
        self.shares = bucket_shares(self.sizes, bucket_bytes)
        self.ready_s = [self.exists_s[share[-1]] for share in self.shares]
        self.travels_s = overlap(self.ready_s, [reduce_s(self.bytes_of(share)) for share in self.shares])
        self.layers: dict[str, list[int]] = {}  # their gradients, the last layer first
        for i, name in enumerate(self.names):
            self.layers.setdefault(_layer(name), []).append(i)
        self.layer_s = {layer: self.exists_s[made[-1]] for layer, made in self.layers.items()}
        self.backward_s, self.end_s = self.exists_s[-1], self.travels_s[-1][1]
        self.one_by_one_s = sum(map(reduce_s, self.sizes))

    def bytes_of(self, gradients: Sequence[int]) -> int:
        return sum(self.sizes[i] for i in gradients)

    def words(self, gradients: Sequence[int]) -> str:
        size, count = self.bytes_of(gradients), len(gradients)
        said = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
        return f"{count} gradient{'s' * (count != 1)} ({said})"

    def moments_s(self) -> list[float]:
        """The start; when the gradients of a layer exist, and when a bucket is full; the end."""
        return sorted({0.0, *self.layer_s.values(), *self.ready_s, self.end_s})

    def network_s(self, now_s: float) -> float:
        """How long the network has been busy by then."""
        return sum(max(0, min(now_s, end_s) - start_s) for start_s, end_s in self.travels_s)

    def beats(self) -> list[Beat]:
        """The start, when buckets are full, the last apart, and the end."""
        moments, last = self.moments_s(), len(self.shares) - 1
        said = f"Backward will make {self.words(range(len(self.sizes)))}, the last layer first. When can they leave?"
        told = [("Before", said, 0.0)]
        for k, now_s in enumerate(self.ready_s):
            is_free = self.travels_s[k][0] == now_s
            leaves = "leaves as one all-reduce" if is_free else f"waits until bucket {k - 1} has arrived"
            said = f"Bucket {k} is full: {self.words(self.shares[k])}. It {leaves}, and backward goes on."
            if now_s == self.backward_s:
                said = (
                    f"Backward ends, and bucket {k} is full: {self.words(self.shares[k])}. It cannot hide any more."
                )
            if k in (0, last) or k <= MOST_BEATS - 4:
                told.append((f"Bucket {k}", said, now_s))
        sent_s, exposed_s = self.network_s(self.end_s), self.end_s - self.backward_s
        said = f"{1 - exposed_s / sent_s:.0%} of the communication was hidden, {_ms(exposed_s)} are exposed; "
        said += f"{len(self.sizes)} messages after backward would expose {_ms(self.one_by_one_s)}."
        told.append(("End", said, self.end_s))
        return [Beat(name, said, moments.index(now_s)) for name, said, now_s in told]


def _scene(run: _Backward, width: float) -> Scene:
    left = 88 if width == NARROW else 150  # of the buckets
    room = width - left - max(map(len, run.shares)) * (LEAST + GAP)
    a_byte = room / max(map(run.bytes_of, run.shares))  # pixels
    a_second = (width - ZERO) / run.end_s
    wide = [LEAST + a_byte * size for size in run.sizes]
    row, gap = (44, 2) if width == NARROW else (50, 6)  # from bucket to bucket, between layers: a phone is short
    pitch = max(HIGH + gap, (row * len(run.shares) - 20) / len(run.layers))
    floor = {layer: TOP + pitch * k for k, layer in enumerate(reversed(run.layers))}  # the first layer on top
    lanes = max(floor.values()) + pitch + 50

    canvas = Canvas(f"buckets {run.names} {width}")
    canvas.text(0, 15, "layers", font_weight=650)
    canvas.text(left, 15, "buckets", font_weight=650)
    canvas.text((left - 22) / 2, lanes - 37, "loss", "middle")
    rows = [TOP + row * k for k in reversed(range(len(run.shares)))]  # up from the loss, as the layers
    for k, y in enumerate(rows):
        canvas.text(left, y + HIGH + 15, f"bucket {k}")
    for k, lane in enumerate(("backward", "network")):
        canvas.text(0, lanes + 17 + LANE * k, lane)
    over = ZERO + a_second * run.backward_s
    canvas.note(over, lanes - 12, f"backward ends, {_ms(run.backward_s)}", "end")
    canvas.path(f"M{num(over)} {num(lanes - 6)}v{num(LANE + HIGH + 12)}", stroke=color("soft"), stroke_width=1.2)

    def lane_bar(lane: int, start_s: float, end_s: float, ink: str, words: str) -> Thing:
        long = a_second * (end_s - start_s)
        place = ZERO + a_second * start_s, lanes + LANE * lane, max(1, long - 1), HIGH
        return Thing(*place, ink, _fitting(words, long))

    def bucket(k: int, now_s: float) -> Iterator[tuple[str, Thing]]:
        share, (start_s, end_s), x, y = run.shares[k], run.travels_s[k], left, rows[k]
        made = [i for i in share if run.exists_s[i] <= now_s]
        is_away, is_back = start_s < now_s < end_s, now_s >= end_s
        whole = x, y, sum(wide[i] + GAP for i in share) - GAP, HIGH
        for i in share:
            place, words, seen = (left - 30, floor[_layer(run.names[i])]), "", 0  # it waits in its layer
            if i in made:
                words = "" if is_away else _fitting(run.names[i].split(".")[-2], wide[i])
                place, seen = (x, y), 0.35 if is_away else 1
            yield f"gradient {i}", Thing(*place, wide[i], HIGH, "gradient", words, seen, 1)
            x += wide[i] + GAP
        yield f"row {k}", Thing(*whole, "frame" if is_back else "outline")
        said = f"{len(made)} averages are back" if is_back else "on the network" if is_away else run.words(made)
        beside = left + 60, y + HIGH, text_width(said, SMALLEST_PX), 20
        yield f"said {k}", Thing(*beside, "plain", said, float(bool(made)))
        sent = lane_bar(1, start_s, min(now_s, end_s), "comm", f"{k}")
        yield f"message {k}", sent if now_s > start_s else Thing(*whole, "comm", seen=0)

    def things(now_s: float) -> Iterator[tuple[str, Thing]]:
        start_s = 0.0
        for layer, end_s in run.layer_s.items():
            ink = "forward" if now_s <= start_s else "backward" if now_s <= end_s else "idle"
            yield layer, Thing(0, floor[layer], left - 22, HIGH, ink, layer)
            if now_s > start_s:
                yield f"bar {layer}", lane_bar(0, start_s, min(now_s, end_s), "backward", layer)
            start_s = end_s
        for k in range(len(run.shares)):
            yield from bucket(k, now_s)
        if now_s == run.end_s:
            said = f"{_ms(now_s - run.backward_s)} exposed"
            long = text_width(said, SMALLEST_PX)
            yield "exposed", Thing(width - long, lanes + LANE + HIGH + 6, long, 20, "plain", said)

    moments = run.moments_s()
    times = [ZERO + a_second * now_s for now_s in moments]
    return Scene(canvas, lanes + LANE + HIGH + 28, [dict(things(now_s)) for now_s in moments], times)


def _layer(name: str) -> str:
    """`block 3` of `blocks.3.mlp.up.weight`, `head` of `head.norm.bias`."""
    first, second = name.split(".")[:2]
    return f"{first.removesuffix('s')} {second}" if second.isdigit() else first


def _fitting(words: str, width: float) -> str:
    return words if text_width(words, SMALLEST_PX) + 2 <= width else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
